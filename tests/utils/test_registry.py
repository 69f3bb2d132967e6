import sys

import pytest

import basicsr
from basicsr.utils import registry
from basicsr.utils.registry import ARCH_REGISTRY, Registry, import_name, import_plugins

KINDS = {
    'dataset': registry.DATASET_REGISTRY,
    'arch': registry.ARCH_REGISTRY,
    'model': registry.MODEL_REGISTRY,
    'loss': registry.LOSS_REGISTRY,
    'metric': registry.METRIC_REGISTRY,
}


def entry(name, module):
    """A class of this name, as if it was defined in a module of this name."""
    return type(name, (), {'__module__': module})


@pytest.fixture
def plugin(tmp_path):
    """Write a plug-in file that registers an arch; returns its folder."""

    def write(folder, name, class_name):
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / f'{name}.py').write_text(
            'from basicsr.utils.registry import ARCH_REGISTRY\n\n\n'
            f'@ARCH_REGISTRY.register()\nclass {class_name}:\n    pass\n'
        )
        return path

    return write


def test_a_decorator_registers_and_returns_the_object():
    names = Registry('thing')

    @names.register()
    class Net:
        pass

    @names.register(suffix='x')
    def loss():
        pass

    assert names.get('Net') is Net
    assert names.get('loss_x') is loss
    assert names.get('loss', 'x') is loss
    assert dict(iter(names)) == {'Net': Net, 'loss_x': loss}
    assert list(names.keys()) == ['Net', 'loss_x']
    assert ('Net' in names, 'loss' in names) == (True, False)


def test_a_call_registers_and_returns_none():
    names = Registry('thing')
    net = entry('Net', 'mine')
    assert names.register(net) is None
    assert names.register(net) is None, 'the same again is no clash'
    assert names.get('Net') is net


def test_the_exact_name_comes_before_the_suffixed_one():
    names = Registry('thing')
    ours, theirs = entry('Net', 'basicsr.archs.net_arch'), entry('Net', 'theirs.net_arch')
    names.register(ours, suffix='basicsr')
    assert names.get('Net') is ours
    names.register(theirs)
    assert names.get('Net') is theirs
    assert names.get('Net_basicsr') is ours


def test_a_name_of_two_users_is_refused_with_both_files(plugin):
    first, second = plugin('a', 'one_arch', 'Doubled'), plugin('b', 'two_arch', 'Doubled')
    with pytest.raises(AssertionError) as error:
        import_plugins([first, second])
    assert "An object named 'Doubled' was already registered in 'arch' registry" in str(error.value)
    assert str(first / 'one_arch.py') in str(error.value)
    assert str(second / 'two_arch.py') in str(error.value)


def test_a_name_of_two_built_ins_is_refused():
    names = Registry('thing')
    names.register(entry('Net', 'basicsr.archs.a_arch'))
    with pytest.raises(AssertionError, match=r"'Net' .* 'thing'.*a_arch.*b_arch"):
        names.register(entry('Net', 'basicsr.archs.b_arch'))


@pytest.mark.parametrize('users_first', [True, False])
def test_a_users_entry_replaces_a_built_in_whichever_comes_first(users_first):
    names = Registry('thing')
    entries = [entry('Net', 'hat.archs.net_arch'), entry('Net', 'basicsr.archs.net_arch')]
    for item in entries if users_first else entries[::-1]:
        names.register(item)
    assert names.get('Net') is entries[0]


def test_a_users_net_replaces_a_real_built_in(plugin):
    import_plugins([plugin('mine', 'my_arch', 'MSRResNet')])
    assert ARCH_REGISTRY.get('MSRResNet').__module__ == 'my_arch'
    # The fixture that forgets plug-ins removes the entry; the built-in one is put back here.
    from basicsr.archs.srresnet_arch import MSRResNet

    ARCH_REGISTRY._obj_map['MSRResNet'] = MSRResNet


def test_a_definition_that_is_run_again_replaces_itself():
    """A notebook cell run twice, or a script that its workers import as a module."""
    names = Registry('thing')
    for _ in range(2):

        @names.register()
        class Net:
            pass

    assert names.get('Net') is Net


def test_an_unknown_name_gets_help():
    with pytest.raises(KeyError) as error:
        ARCH_REGISTRY.get('MSRResNett')
    message = error.value.args[0]
    assert message.startswith("No object named 'MSRResNett' found in 'arch' registry!")
    assert 'Did you mean MSRResNet' in message
    assert f'basicsr imported from {basicsr.__file__}.' in message
    known = message.partition('It knows ')[2].partition(', with basicsr')[0].split(', ')
    assert known == sorted(known) and {'ECBSR', 'SwinIR', 'VGGStyleDiscriminator'} <= set(known)
    assert '@ARCH_REGISTRY.register() in a file *_arch.py' in message
    assert 'plugins: [folder]' in message


@pytest.mark.parametrize(
    ('kind', 'name'),
    [
        ('dataset', 'PairedImageDataset'),
        ('arch', 'RRDBNet'),
        ('model', 'SRModel'),
        ('loss', 'L1Loss'),
        ('metric', 'calculate_psnr'),
    ],
)
def test_built_ins_are_found_by_name(kind, name):
    known = KINDS[kind]
    assert name in known
    assert name in list(known.keys())
    assert dict(iter(known))[name] is known.get(name)


def test_importing_the_registries_imports_no_network(run_program):
    result = run_program(
        '-c',
        'import sys, basicsr, basicsr.utils.registry, basicsr.utils.options\n'
        'heavy = {"torch", "cv2", "scipy", "torchvision", "basicsr.archs"} & set(sys.modules)\n'
        'sys.exit(f"imported: {heavy}" if heavy else 0)\n',
    )
    assert result.returncode == 0, result.stderr


def test_only_plugin_files_are_imported(plugin):
    folder = plugin('mine', 'my_arch', 'MyNet')
    for name in ('setup.py', 'arch.py', 'notes_arch.txt', 'test_my.py'):
        (folder / name).write_text('raise RuntimeError("not a plug-in")')
    import_plugins([str(folder)])
    assert registry.plugin_modules == ['my_arch']
    assert ARCH_REGISTRY.get('MyNet').__name__ == 'MyNet'
    import_plugins([folder])
    assert (registry.plugin_modules, sys.path.count(str(folder))) == (['my_arch'], 1)


def test_plugins_may_import_each_other(plugin):
    folder = plugin('mine', 'base_arch', 'BaseNet')
    (folder / 'derived_arch.py').write_text(
        'from base_arch import BaseNet\n'
        'from basicsr.utils.registry import ARCH_REGISTRY\n\n\n'
        '@ARCH_REGISTRY.register()\nclass DerivedNet(BaseNet):\n    pass\n'
    )
    import_plugins([folder])
    assert ARCH_REGISTRY.get('DerivedNet').__mro__[1] is ARCH_REGISTRY.get('BaseNet')


def test_a_plugin_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f'plugins: no folder {tmp_path / "none"}'):
        import_plugins([tmp_path / 'none'])


def test_a_plugin_with_the_name_of_an_installed_module_is_refused(plugin, monkeypatch):
    monkeypatch.setitem(sys.modules, 'taken_arch', sys.modules['json'])
    with pytest.raises(ImportError, match=r'mine/taken_arch.py has the module name of .*json'):
        import_plugins([plugin('mine', 'taken_arch', 'Net')])


def test_a_name_with_its_module_is_imported():
    assert import_name('basicsr.utils.text:some', 'option')(['x']) == 'x'
    for name in ('nowhere:x', 'basicsr:nothing', ':x', 'basicsr'):
        with pytest.raises(ValueError, match=f"option '{name}' cannot be imported"):
            import_name(name, 'option')

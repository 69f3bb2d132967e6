"""Networks of other packages are named as ours are, and checked, trained and saved like them."""

import sys

import pytest
import torch
from runs import checkpoint, differences

from basicsr.archs import build_network, load_network_from
from basicsr.utils.checkpoint import DESCRIPTION, description, save_checkpoint
from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY
from basicsr.utils.yaml_util import OptionError

# It multiplies its input in place.
RCAN = {'type': 'spandrel:RCAN', 'n_resgroups': 1, 'n_resblocks': 1, 'n_feats': 16, 'scale': 2}


@pytest.fixture(autouse=True)
def forget_outside_networks():
    yield
    for name in [name for name, _ in ARCH_REGISTRY if ':' in name]:
        del ARCH_REGISTRY._obj_map[name]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Options of a network in a package that can be imported."""
    source = """
        from torch import nn

        class Doubling(nn.Module):
            def __init__(self, width: int):
                super().__init__()
                self.conv = nn.Conv2d(3, width, 1)

            def forward(self, x):
                return self.conv(x.mul_(2))
        """
    folder = tmp_path / 'packages'
    folder.mkdir()
    lines = [line[8:] for line in source.splitlines()]
    (folder / 'nets_of_others.py').write_text('\n'.join(lines))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, 'nets_of_others', raising=False)
    return {'type': 'nets_of_others:Doubling', 'width': 4}


def image(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def test_a_network_of_spandrel_trains_resumes_and_is_loaded_by_spandrel(run, train_opt):
    import spandrel

    whole = run(train_opt(network_g=RCAN, name='whole', train__total_iter=4))
    folder = run(train_opt(network_g=RCAN, name='cut', train__total_iter=2))
    run(train_opt(network_g=RCAN, name='cut', train__total_iter=4), '--auto_resume')
    ends = [checkpoint(f, 'net_g_latest.pth') for f in (whole, folder)]
    assert differences(*ends) == []
    assert ends[0][DESCRIPTION]['network'] == RCAN
    file = folder / 'models/net_g_latest.pth'
    ours, x = load_network_from(file), image(1, 3, 12, 10)
    kept = x.clone()
    with torch.no_grad():
        out = ours(x)
    assert torch.equal(x, kept)
    found = spandrel.ModelLoader().load_from_file(file)
    assert type(found.model) is type(ours)
    with torch.no_grad():
        assert torch.equal(found.model.eval()(x.clone()), out)


def test_a_class_of_a_package_gets_a_copy_of_its_input(package):
    net, x = build_network(package), image(1, 3, 4, 5)
    assert torch.equal(net(x), net.conv(2 * x))
    assert list(net.state_dict()) == ['conv.weight', 'conv.bias']


@pytest.mark.parametrize(
    ('network', 'message'),
    [
        ({**RCAN, 'type': 'spandrel:RCAM'}, "no network 'RCAM'; did you mean 'RCAN'? It has ATD, "),
        ({**RCAN, 'n_feat': 8}, "no argument 'n_feat'; did you mean 'n_feats'?"),
        ({**RCAN, 'n_feats': '8'}, "n_feats: must be a number, got '8'"),
        ({'type': 'nets_of_others:Doubling'}, "Doubling needs the argument 'width'"),
        ({'type': 'nets_of_others:Halving'}, "'nets_of_others:Halving' cannot be imported"),
        ({'type': 'torch:Tensor'}, "'torch:Tensor' must be a subclass of Module"),
        ({'type': 'subprocess:Popen'}, "'subprocess:Popen' is part of Python"),
    ],
)
def test_mistakes_are_told_before_the_run_begins(run, train_opt, package, network, message):
    with pytest.raises(OptionError) as caught:
        run(train_opt(network_g=network))
    assert 'tiny.yml:' in str(caught.value)
    assert message in str(caught.value)


def test_a_file_of_weights_does_not_choose_what_is_imported(package, tmp_path):
    file = tmp_path / 'net_g.pth'
    state = {'conv.weight': torch.ones(4, 3, 1, 1), 'conv.bias': torch.zeros(4)}
    save_checkpoint({'params': state, DESCRIPTION: description(package, 1)}, file)
    with pytest.raises(UserError, match=r"must not import 'nets_of_others:Doubling'.*\(--opt\)"):
        load_network_from(file)
    assert 'nets_of_others' not in sys.modules
    build_network(package)
    assert torch.equal(load_network_from(file).conv.weight, state['conv.weight'])

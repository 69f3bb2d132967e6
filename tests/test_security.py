"""Files from strangers run no code: neither through a call of ours, nor through what they hold."""

import ast
import gzip
import io
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from runs import log_text

from basicsr.archs.vgg_arch import VGGFeatureExtractor
from basicsr.data.paired_tar_dataset import _count_pairs, _read
from basicsr.data.samplers import build_sampler
from basicsr.models.optimization import build_optimizer
from basicsr.models.posthoc import write_averages
from basicsr.run.program import message_for_users
from basicsr.utils.checkpoint import load_checkpoint
from basicsr.utils.file_client import FileClient
from basicsr.utils.registry import import_name

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    *(
        file
        for part in ('basicsr', 'scripts', 'inference', 'benchmarks')
        for file in (ROOT / part).rglob('*.py')
    ),
    *(ROOT / 'docs').glob('*.py'),
]

# Calls that may run code or write anywhere, by the end of their name.
DANGEROUS = {
    *('eval', 'exec', 'compile', '__import__', 'import_module', 'runpy.run_path'),
    *('pickle.load', 'pickle.loads', 'Unpickler', 'marshal.loads', 'shelve.open', 'joblib.load'),
    *('yaml.load', 'yaml.load_all', 'yaml.unsafe_load', 'yaml.full_load'),
    *('os.system', 'os.popen', 'tempfile.mktemp', 'extractall', 'tar.extract', 'unpack_archive'),
    *('urlopen', 'urlretrieve', 'requests.get', 'load_state_dict_from_url', 'get_state_dict'),
    *('download_url_to_file', 'hub.load', 'torch.load', 'jit.load', 'np.load'),
}
# What each of them needs to be harmless, as keyword arguments.
HARMLESS_WITH = {
    'torch.load': {'weights_only': True},
    'np.load': {'allow_pickle': False},
}
ALLOWED = {
    ('basicsr/utils/lazy.py', 'import_module'): 'a table in our own packages names the modules',
    ('basicsr/utils/download_util.py', 'urlopen'): 'the web alone, whole files with checksum',
    ('basicsr/utils/registry.py', 'import_module'): 'plug-ins, which are programs by design',
    ('basicsr/data/workers.py', 'import_module'): 'the same plug-ins, in a worker process',
    ('basicsr/cli.py', 'import_module'): 'a table in the file names the modules',
    ('basicsr/commands/prepare.py', 'import_module'): 'a table in the file names the modules',
}


def dangerous_calls(source):
    """Names of the calls in a program that need a reason."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {k.arg: getattr(k.value, 'value', None) for k in node.keywords}
        if given.get('shell') or given.get('allow_pickle'):
            yield name
        for end in DANGEROUS:
            whole = '.' in end or isinstance(node.func, ast.Attribute)
            is_it = f'.{name}'.endswith(f'.{end}') if whole else name == end
            if end in ('eval', 'compile'):  # networks have methods of these names
                is_it = name == end
            if is_it and not (HARMLESS_WITH.get(end, {'': 0}).items() <= given.items()):
                yield end


def test_no_call_of_ours_runs_code_of_a_file():
    found = {
        (file.relative_to(ROOT).as_posix(), name)
        for file in SOURCES
        for name in dangerous_calls(file.read_text(encoding='utf-8'))
    }
    assert len(SOURCES) > 80
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    'line',
    [
        'torch.load(f)',
        'torch.load(f, weights_only=False)',
        'numpy.load(f, allow_pickle=True)',
        'np.load(f)',
        'pickle.loads(b)',
        'yaml.load(t, yaml.Loader)',
        'subprocess.run(c, shell=True)',
        'eval(t)',
        'tar.extractall()',
        'official.get_state_dict(check_hash=True)',
    ],
)
def test_the_search_finds(line):
    assert list(dangerous_calls(line))
    assert not list(dangerous_calls('net.eval(); torch.load(f, weights_only=True); re.compile(p)'))


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, 'w')


@pytest.fixture
def hostile(tmp_path):
    """A file that writes another one when its pickle is loaded, in either format of torch."""

    def make(name, content=None, zipped=True):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {**(content or {}), 'params': Hostile(tmp_path / 'marker')}
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
        return str(file)

    yield make
    assert not (tmp_path / 'marker').exists()


def test_the_file_would_run_code_if_it_were_trusted(tmp_path):
    pickle.loads(pickle.dumps(Hostile(tmp_path / 'marker')))
    assert (tmp_path / 'marker').exists()


@pytest.mark.parametrize('zipped', [True, False])
def test_weights_and_states_that_hold_code_are_refused(hostile, run, train_opt, zipped):
    weights = hostile('net.pth', zipped=zipped)
    state = hostile('old/training_states/3.state', {'iter': 3}, zipped)
    for key, file in {'pretrain_network_g': weights, 'resume_state': state}.items():
        with pytest.raises(ValueError, match=f'cannot load {file}: .*plain values'):
            run(train_opt(**{f'path__{key}': file}))
    with pytest.raises(ValueError, match='cannot load'):
        VGGFeatureExtractor(['conv1_1'], 'vgg11', weights=weights)
    test = train_opt(name='tested', path__pretrain_network_g=weights)
    del test['datasets']['train'], test['train'], test['logger']
    with pytest.raises(ValueError, match='cannot load'):
        run(test, pipeline='test')


def test_the_newest_state_and_stored_averages_that_hold_code_are_refused(
    hostile, run, train_opt, tmp_path
):
    opt = train_opt(train__posthoc_ema=True)
    folder = run(opt)
    snapshot = next(file for file in (folder / 'models').iterdir() if 'averages' in file.name)
    hostile(snapshot.relative_to(tmp_path))
    with pytest.raises(ValueError, match='cannot load'):
        write_averages(folder, [0.1], tmp_path / 'made.pth', None)
    hostile((folder / 'training_states' / '6.state').relative_to(tmp_path), {'iter': 6})
    run(opt, '--auto_resume')
    assert 'skipped: cannot load' in log_text(folder)


@pytest.mark.parametrize('name', ['os:system', 'subprocess:Popen', 'builtins:exec', 'os.path:join'])
def test_an_option_cannot_name_a_part_of_python(name):
    for call in (
        lambda: build_optimizer(name, [torch.nn.Parameter(torch.ones(1))]),
        lambda: build_sampler([1], {'sampler': {'type': name}}),
        lambda: import_name(name, 'collate_fn'),
    ):
        with pytest.raises(ValueError, match=f"'{name}' is part of Python"):
            call()


def test_an_option_builds_classes_of_its_kind_only():
    with pytest.raises(ValueError, match=r"'torch:save' must be a subclass of Optimizer"):
        build_optimizer('torch:save', [torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"'torch\.nn:Linear' must be a subclass of Iterable"):
        build_sampler([1], {'sampler': {'type': 'torch.nn:Linear'}})
    with pytest.raises(ValueError, match=r"'torch\.nn:Linear' is not a function"):
        import_name('torch.nn:Linear', 'collate_fn')


def test_an_archive_that_unpacks_to_more_than_it_has_is_refused(tmp_path):
    import zipfile

    torch.save({'a': torch.zeros(10**6)}, tmp_path / 'a.pth')
    with (
        zipfile.ZipFile(tmp_path / 'a.pth') as old,
        zipfile.ZipFile(tmp_path / 'b.pth', 'w', zipfile.ZIP_DEFLATED) as new,
    ):
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    assert torch.load(tmp_path / 'b.pth', weights_only=True)['a'].numel() == 10**6
    with pytest.raises(ValueError, match='its parts have .* bytes, more than the file'):
        load_checkpoint(tmp_path / 'b.pth')


def test_an_earlier_run_behind_a_link_is_left_alone(run, train_opt, tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'elsewhere' / 'kept.txt').write_text('mine')
    (tmp_path / 'experiments').mkdir()
    (tmp_path / 'experiments' / 'tiny').symlink_to(tmp_path / 'elsewhere')
    folder = run(train_opt())
    assert [file.name for file in (tmp_path / 'elsewhere').iterdir()] == ['kept.txt']
    assert not folder.is_symlink() and (folder / 'models').is_dir()
    (archive,) = (tmp_path / 'experiments').glob('tiny_archived_*')
    assert archive.is_symlink() and archive.resolve() == tmp_path / 'elsewhere'


def test_a_wrong_size_of_a_network_ends_in_a_message(run, train_opt):
    with pytest.raises(RuntimeError) as error:
        run(train_opt(network_g__num_feat=-3))
    message = message_for_users(error.value)
    assert message and message.startswith('RuntimeError: Trying to create tensor')
    assert "while building arch 'SRVGGNetCompact' from {" in message


@pytest.mark.parametrize(
    'compiled',
    [{'options': {'cpp.cxx': ['touch']}}, {'backend': 'own:compiler'}, {'mode': 'x'}, {'name': 1}],
)
def test_the_compiler_is_given_no_options_that_name_programs(run, train_opt, compiled):
    with pytest.raises(ValueError, match=r'train\.compile'):
        run(train_opt(train__compile=compiled))


@pytest.mark.parametrize('option', [{'dir': '/etc'}, {'settings': {'x_executable': 'touch'}}])
def test_wandb_is_given_no_folder_and_no_settings(run, train_opt, option):
    with pytest.raises(ValueError, match=rf'logger\.wandb\.{next(iter(option))}: unknown key'):
        run(train_opt(logger__wandb={'project': 'x', **option}))


@pytest.mark.parametrize(
    'option', [{'readonly': False}, {'lock': True}, {'writemap': True}, {'map_size': 2**33}]
)
def test_reading_a_database_does_not_write_to_it(tmp_path, option):
    folder = shutil.copytree(ROOT / 'tests/golden/lmdb/lq.lmdb', tmp_path / 'lq.lmdb')
    before = {file.name: file.stat().st_size for file in folder.iterdir()}
    with pytest.raises(ValueError, match='io_backend: .* an LMDB is only read here'):
        FileClient('lmdb', db_paths=str(folder), **option)
    FileClient('lmdb', db_paths=str(folder), readahead=True, max_readers=4).get('x')
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == before


@pytest.mark.parametrize('kind', ['sparse', 'large'])
def test_a_file_in_a_shard_is_bounded_before_it_takes_memory(tmp_path, monkeypatch, kind):
    monkeypatch.setattr('basicsr.data.paired_tar_dataset._MOST_BYTES', 10**6)
    shard = tmp_path / 'x.tar'
    with tarfile.open(shard, 'w', format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo('0.gt.png')
        if kind == 'sparse':
            member.pax_headers = {
                **{'GNU.sparse.major': '0', 'GNU.sparse.minor': '1', 'GNU.sparse.name': '0.gt.png'},
                **{'GNU.sparse.size': str(2**31), 'GNU.sparse.map': f'0,0,{2**31},0'},
            }
            tar.addfile(member)
        else:
            member.size = 10**6 + 1
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    for read in (_count_pairs, lambda shard: list(_read([shard]))):
        with pytest.raises(
            ValueError, match=r'0\.gt\.png claims [\d,]+ bytes.*an image has at most'
        ):
            read(str(shard))


@pytest.mark.parametrize('kind', [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_long_name_in_a_shard_is_bounded_before_it_takes_memory(tmp_path, kind):
    shard, size = tmp_path / 'x.tar', 2**20 + 1
    with gzip.open(shard, 'wb') as file:
        member = tarfile.TarInfo('0.gt.png')
        member.type, member.size = kind, size
        file.write(member.tobuf(tarfile.GNU_FORMAT) + bytes(size))
    for read in (_count_pairs, lambda shard: list(_read([shard]))):
        with pytest.raises(ValueError, match='attributes of 1,048,577 bytes'):
            read(str(shard))


def test_a_test_makes_no_folder_but_its_own(run, train_opt, tmp_path):
    opt = train_opt(train__total_iter=1)
    weights = run(opt) / 'models/net_g_latest.pth'
    del opt['train'], opt['logger'], opt['datasets']['train']
    folders = dict.fromkeys(('models', 'training_states', 'visualization'), str(tmp_path / 'other'))
    opt |= {'name': 'tested', 'path': {'pretrain_network_g': str(weights), **folders}}
    folder = run(opt, pipeline='test')
    assert folder == tmp_path / 'results/tested' and '# psnr: ' in log_text(folder)
    assert not (tmp_path / 'other').exists()

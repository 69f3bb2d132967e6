import json
import sys

import pytest
import safetensors.torch
import torch
from runs import checkpoint, differences, log_text, psnr_of

from basicsr import cli
from basicsr.utils import safetensors_file, weights
from basicsr.utils.checkpoint import DESCRIPTION, description, load_checkpoint, save_checkpoint
from basicsr.utils.safetensors_file import as_safetensors, read_safetensors
from basicsr.version import __version__

STATE = {'conv.weight': torch.arange(4.0).reshape(2, 2), 'steps': torch.tensor(3)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / 'x.safetensors'


BOTH = {'params': STATE, 'params_ema': {'a.b': torch.ones(2)}}
ENTRY = {DESCRIPTION: description({'type': 'EDSR', 'rgb_mean': [0.1, 0.5, 1e-8]}, 3)}


@pytest.mark.parametrize(
    'content', [STATE, {'params': STATE}, BOTH, BOTH | ENTRY, ENTRY | BOTH, STATE | ENTRY]
)
def test_what_is_written_is_read_back(file, content):
    save_checkpoint(content, file)
    assert differences(load_checkpoint(file), content) == []


def test_equal_networks_give_equal_bytes(file, tmp_path):
    content = {'params': STATE, 'params_ema': STATE, **ENTRY}
    files = [file.with_name(f'{number}.safetensors') for number in range(4)]
    records = [save_checkpoint(content, name) for name in files]
    assert len({record['sha256'] for record in records}) == 1


def test_any_layout_kind_and_sharing_of_memory_keeps_its_values(file):
    weight = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    state = {
        'a': weight,
        'tied': weight,
        'view': weight[1],
        'channels_last': weight.clone().contiguous(memory_format=torch.channels_last),
        'empty': torch.zeros(0, 3),
        'none': torch.zeros(0),
        **{str(kind): torch.ones(3).to(kind) for kind in (torch.bfloat16, torch.bool, torch.int64)},
    }
    save_checkpoint({'params': state}, file)
    assert differences(load_checkpoint(file)['params'], state) == []


def test_other_programs_read_the_names_and_their_files_are_read(file):
    save_checkpoint({'params': STATE, 'params_ema': STATE}, file)
    assert sorted(safetensors.torch.load_file(file)) == sorted(
        f'{key}.{name}' for key in ('params', 'params_ema') for name in STATE
    )
    save_checkpoint({'params_ema': STATE, **ENTRY}, file)
    assert differences(safetensors.torch.load_file(file), STATE) == []
    with safetensors.safe_open(file, 'pt') as opened:
        described = json.loads(opened.metadata()['basicsr'].partition(' ')[2])['description']
    assert described['network'] == {'type': 'EDSR', 'rgb_mean': [0.1, 0.5, 1e-8]}
    assert (described['scale'], described['version']) == (3, __version__)
    safetensors.torch.save_file({'params.x': torch.ones(2)}, file, {'format': 'pt'})
    assert differences(load_checkpoint(file), {'params.x': torch.ones(2)}) == []


@pytest.mark.parametrize('text', ['["params"]', '{"keys": ["params"], "description": {"a": 1}}'])
def test_a_file_of_one_network_whose_names_begin_with_its_key_is_read(file, text):
    """As earlier versions wrote them."""
    tensors = {'params.a': torch.ones(2)}
    entry = {'basicsr': f'{safetensors_file._checksum(tensors, text)} {text}'}
    safetensors.torch.save_file(tensors, file, entry)
    described = {DESCRIPTION: {'a': 1}} if 'description' in text else {}
    assert differences(load_checkpoint(file), {'params': {'a': torch.ones(2)}} | described) == []


def test_what_is_not_a_tensor_is_refused_by_name(file):
    for content, named in (
        ({'params': STATE, 'iter': 3}, 'iter'),
        ({'params': {'x': 2}}, 'x'),
        ({'params': STATE, DESCRIPTION: STATE}, DESCRIPTION),
        ({'params': STATE, DESCRIPTION: 3}, DESCRIPTION),
    ):
        with pytest.raises(ValueError, match=f'holds only networks .* and no .*{named}'):
            save_checkpoint(content, file)
    assert not file.exists()


def test_damage_to_tensors_or_keys_is_seen(file):
    save_checkpoint({'params': STATE, 'params_ema': STATE, **ENTRY}, file)
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            content = load_checkpoint(file)
        except ValueError as error:
            assert f'cannot load {file}: it is damaged' in str(error)
        else:  # the name of our entry, without which it is another program's file
            assert all(isinstance(value, torch.Tensor) for value in content.values())
            assert whole[:place].count(b'metadata') == 1
            assert abs(place - whole.index(b'basicsr')) < 20
    for length in (0, 3, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match='it is damaged'):
            load_checkpoint(file)


@pytest.mark.parametrize(('workers', 'decay'), [(0, 0.9), (2, 0)])
def test_a_run_that_writes_safetensors_resumes_bit_for_bit(run, train_opt, workers, decay):
    options = {'datasets__train__num_worker_per_gpu': workers, 'logger__keep_last': 1}
    options['train__ema_decay'] = decay
    plain = run(train_opt(name='plain', **options))
    options['logger__checkpoint_format'] = 'safetensors'
    folder = run(train_opt(name='cut', train__total_iter=4, **options))
    run(train_opt(name='cut', **options), '--auto_resume')
    endings = ('pth', 'safetensors') if decay else ('safetensors',)
    assert f'net_g_4.{endings[0]}' in log_text(folder)
    networks = [f'net_g_{when}.{ending}' for when in ('6', 'latest') for ending in endings]
    assert sorted(file.name for file in (folder / 'models').iterdir()) == networks
    expected, ours = checkpoint(plain, 'net_g_latest.pth'), folder / 'models/net_g_latest'
    assert differences(load_checkpoint(f'{ours}.{endings[0]}'), expected) == []
    bare = safetensors.torch.load_file(f'{ours}.safetensors')
    assert differences(bare, expected['params_ema' if decay else 'params']) == []
    a, b = (checkpoint(f, '6.state') for f in (plain, folder))
    del a['files'], b['files']
    assert differences(a, b) == []


def test_a_resume_reads_the_network_that_the_state_was_written_with(run, train_opt):
    """Though there is one of the other format, of an attempt before."""
    whole = run(train_opt(name='whole', train__ema_decay=0))
    opt = train_opt(name='cut', train__total_iter=4, train__ema_decay=0)
    folder = run(opt)
    models = folder / 'models'
    save_checkpoint(checkpoint(folder, 'net_g_2.pth'), models / 'net_g_4.safetensors')
    opt['train']['total_iter'] = 6
    opt['logger']['checkpoint_format'] = 'safetensors'
    run(opt, '--auto_resume')
    ours = load_checkpoint(models / 'net_g_latest.safetensors')
    assert differences(ours, checkpoint(whole, 'net_g_latest.pth')) == []
    assert not (models / 'net_g_latest.pth').exists(), 'it would be of iteration 4'


def test_weights_of_either_format_score_alike(run, train_opt, tmp_path):
    opt = train_opt()
    folder = run(opt) / 'models'
    converted = tmp_path / 'bare.safetensors'
    safetensors.torch.save_file(load_checkpoint(folder / 'net_g_6.pth')['params_ema'], converted)
    save_checkpoint(load_checkpoint(folder / 'net_g_6.pth'), tmp_path / 'both.safetensors')
    expected = psnr_of(run, opt, folder / 'net_g_6.pth', 'params_ema')
    assert psnr_of(run, opt, converted, 'params_ema') == expected
    assert psnr_of(run, opt, tmp_path / 'both.safetensors', 'params_ema') == expected
    assert psnr_of(run, opt, tmp_path / 'both.safetensors', 'params') != expected


def test_a_missing_package_stops_a_run_before_its_first_step(run, train_opt, monkeypatch):
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(ImportError, match='need: pip install safetensors'):
        run(train_opt(logger__checkpoint_format='safetensors'))


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Run ``basicsr convert``: (exit status, stderr)."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['basicsr', 'convert', *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, capsys.readouterr().err

    return call


def test_files_are_converted_there_and_back(convert, tmp_path):
    content = {'params': STATE, 'params_ema': {'conv.weight': torch.ones(2)}, **ENTRY}
    save_checkpoint(content, tmp_path / 'a.pth')
    assert convert('a.pth', 'b.safetensors')[0] == 0
    assert convert('b.safetensors', 'c.pth')[0] == 0
    for name in ('b.safetensors', 'c.pth'):
        assert differences(load_checkpoint(tmp_path / name), content) == []
    assert convert('a.pth', 'd.safetensors', '--key', 'params_ema')[0] == 0
    bare = safetensors.torch.load_file(tmp_path / 'd.safetensors')
    assert differences(bare, content['params_ema']) == []


def test_bare_weights_keep_the_description_where_it_is_not_taken_for_one(convert, tmp_path):
    save_checkpoint({'params': STATE, **ENTRY}, tmp_path / 'a.pth')
    for source, target, *key, kept in (
        ('a.pth', 'b.safetensors', '--key', 'params', ENTRY),
        ('b.safetensors', 'c.safetensors', ENTRY),
        ('b.safetensors', 'd.pth', {}),
        ('a.pth', 'e.pth', '--key', 'params', {}),
    ):
        assert convert(source, target, *key)[0] == 0
        assert differences(load_checkpoint(tmp_path / target), STATE | kept) == []


def test_what_cannot_be_converted_is_told(convert, tmp_path):
    save_checkpoint({'params': STATE, 'iter': 2}, tmp_path / 'a.pth')
    save_checkpoint({'params': STATE, **ENTRY}, tmp_path / 'described.pth')
    for arguments, message in (
        (('a.pth', 'a.pth'), 'a.pth exists: remove it'),
        (('a.pth', 'b.bin'), 'b.bin must end in .pth or .safetensors'),
        (('a.pth', 'b.safetensors'), 'named by strings), and no iter'),
        (
            ('a.pth', 'b.pth', '--key', 'mine'),
            "has no state dict 'mine'; its keys are: params, iter",
        ),
        (
            ('described.pth', 'b.pth', '--key', 'basicsr'),
            "has no state dict 'basicsr'; its keys are: params.",
        ),
        (('none.pth', 'b.pth'), 'no checkpoint file none.pth'),
    ):
        status, printed = convert(*arguments)
        assert (status, 'Traceback' in printed) == (1, False)
        assert message in printed


def test_names_that_would_be_one_when_joined_are_refused():
    content = {'params': {'a.b': torch.ones(1)}, 'params.a': {'b': torch.zeros(1)}}
    with pytest.raises(ValueError, match='params, params.a and names below them are ambiguous'):
        as_safetensors(content)


@pytest.mark.parametrize('keys', ['5', '{x', '["zzz"]', '[["params"]]', '{}', '{"keys": 3}'])
def test_a_list_of_keys_that_is_none_is_damage(tmp_path, keys):
    tensors = {'params.a': torch.ones(1)}
    entry = {'basicsr': f'{safetensors_file._checksum(tensors, keys)} {keys}'}
    file = tmp_path / 'x.safetensors'
    file.write_bytes(safetensors_file.require_safetensors().save(tensors, entry))
    with pytest.raises(ValueError, match='cannot load .*x.safetensors: it lists no keys'):
        read_safetensors(file)


@pytest.mark.parametrize('content', [torch.ones(1), [1], {1: torch.ones(1)}])
def test_what_holds_no_networks_cannot_be_converted(tmp_path, content):
    torch.save(content, tmp_path / 'a.pth')
    with pytest.raises(ValueError, match='a dict is needed|named by strings'):
        weights.convert(tmp_path / 'a.pth', tmp_path / 'a.safetensors')
    assert not (tmp_path / 'a.safetensors').exists()

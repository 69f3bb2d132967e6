import errno
import os
import pickle
import resource
import shutil
import zipfile
from collections import Counter, OrderedDict
from datetime import date

import numpy as np
import pytest
import torch
from runs import checkpoint, differences
from torch import nn

from basicsr.models.base_model import BaseModel
from basicsr.utils.checkpoint import (
    DESCRIPTION,
    description,
    load_checkpoint,
    save_checkpoint,
    select_params,
    strip_wrapper_prefixes,
)
from basicsr.utils.misc import atomic_path, remove_stale_temporaries

STATE = {'conv.weight': torch.arange(4.0), 'conv.bias': torch.ones(1)}


# ---------------------------------------------------------------------------- writing


def test_what_is_written_is_read_back(tmp_path):
    content = {'params': STATE, 'iter': 3, 'milestones': Counter([1, 1]), 'best': -float('inf')}
    save_checkpoint(content, tmp_path / 'x.pth')
    assert differences(load_checkpoint(str(tmp_path / 'x.pth')), content) == []
    assert os.listdir(tmp_path) == ['x.pth']


@pytest.mark.parametrize('kind', [OSError, RuntimeError])
def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path, monkeypatch, kind):
    """Torch reports the failing write as a RuntimeError."""
    path = tmp_path / 'net_g_latest.pth'
    save_checkpoint({'params': STATE}, path)

    def half(content, file):
        file.write(path.read_bytes()[:100])
        text = os.strerror(errno.ENOSPC)
        raise OSError(errno.ENOSPC, text) if kind is OSError else RuntimeError(text)

    monkeypatch.setattr(torch, 'save', half)
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * 1024**2)
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage)
    with pytest.raises(OSError, match=rf'cannot write {path} \(free space: 3.0 MB\): .*No space'):
        save_checkpoint({'params': {}}, path)
    assert os.listdir(tmp_path) == ['net_g_latest.pth']
    assert differences(load_checkpoint(path), {'params': STATE}) == []


def test_space_is_looked_at_before_anything_is_written(tmp_path, monkeypatch):
    """A tensor that is there twice is written once."""
    path, big = tmp_path / 'x.pth', torch.zeros(1024, 256)
    content = {'params': {'a': big, 'tied': big}}
    usage, written, save = shutil.disk_usage(tmp_path), [], torch.save
    monkeypatch.setattr(torch, 'save', lambda *args: written.append(save(*args)))
    free = {'free': 1024**2 - 1}
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage._replace(**free))
    message = r'x.pth \(free space: .* it needs 1.0 MB. Free some space, .*logger.keep_last'
    with pytest.raises(OSError, match=message) as caught:
        save_checkpoint(content, path)
    assert caught.value.errno == errno.ENOSPC
    assert (written, os.listdir(tmp_path)) == ([], [])
    free['free'] += 1
    save_checkpoint(content, path)
    assert len(written) == 1


@pytest.mark.parametrize('ending', ['pth', 'safetensors'])
def test_a_write_that_fails_halfway_is_named_by_its_cause(tmp_path, ending):
    """torch alone would say: unexpected pos 64 vs 0."""
    path = tmp_path / f'x.{ending}'
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match=rf'cannot write {path} .*: File too large'):
            save_checkpoint({'params': {'a': torch.zeros(100_000)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_an_interruption_leaves_the_old_file(tmp_path):
    (tmp_path / 'x.txt').write_text('old')
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / 'x.txt') as temporary:
        temporary.write_text('ne')
        raise KeyboardInterrupt
    assert (tmp_path / 'x.txt').read_text() == 'old'
    assert os.listdir(tmp_path) == ['x.txt']


def test_a_folder_that_is_missing_is_named(tmp_path):
    path = tmp_path / 'none' / 'x.pth'
    with pytest.raises(OSError, match=rf'cannot write {path} \(free space: none\)'):
        save_checkpoint({}, path)


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / 'x.txt'
    path.write_text('old')
    with atomic_path(str(path)) as temporary:
        assert temporary.parent == tmp_path, 'a rename works within one file system only'
        temporary.write_text('new')
        assert path.read_text() == 'old'
    assert path.read_text() == 'new'


def test_permissions_are_those_of_any_file_or_of_the_old_one(tmp_path):
    path, plain = tmp_path / 'x.txt', tmp_path / 'plain.txt'
    plain.touch()
    for mode in (plain.stat().st_mode, 0o100640):
        with atomic_path(path) as temporary:
            temporary.touch()
        assert path.stat().st_mode == mode
        path.chmod(0o640)


def test_what_a_killed_process_left_is_removed(tmp_path):
    for name in ('.net_g_5.pth.123.tmp', 'net_g_5.pth', 'mine.tmp'):
        (tmp_path / name).touch()
    (tmp_path / '.folder.tmp').mkdir()
    remove_stale_temporaries(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ['.folder.tmp', 'mine.tmp', 'net_g_5.pth']


def test_a_run_goes_on_after_a_full_disk(run, train_opt, monkeypatch):
    """No half-written file, and a resume from the last whole pair."""
    whole = run(train_opt(name='whole'))
    save, opt = torch.save, train_opt(name='full')

    def fill_up(content, file):
        if 'net_g_4' in str(file.name):
            file.write(b'half')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r'net_g_4.pth \(free space'):
        patch.setattr(torch, 'save', fill_up)
        run(opt)
    folder = run(opt, '--auto_resume')
    for name in ('net_g_latest.pth', '6.state'):
        assert differences(checkpoint(whole, name), checkpoint(folder, name)) == []
    assert not list(folder.rglob('*.tmp'))


# ---------------------------------------------------------------------------- reading


class Malicious:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path):
    folder, path = tmp_path / 'made', tmp_path / 'evil.pth'
    for save in (torch.save, lambda content, file: file.write_bytes(pickle.dumps(content, 2))):
        save({'params': STATE, 'evil': Malicious(str(folder))}, path)
        with pytest.raises(ValueError, match=f'cannot load {path}'):
            load_checkpoint(path)
        assert not folder.exists()


def test_objects_that_could_not_be_read_back_are_named_when_they_are_saved(tmp_path, caplog):
    save_checkpoint({'params': STATE, 'when': date(2026, 1, 1)}, tmp_path / 'x.pth')
    (text,) = caplog.messages
    assert 'holds objects (datetime.date) and will be refused when it is loaded' in text


def test_an_old_state_with_numpy_numbers_is_refused_with_advice(tmp_path):
    torch.save({'best': np.float64(1.5)}, tmp_path / 'old.state')
    with pytest.raises(ValueError, match=r'If you trust .*weights_only=False\) and save'):
        load_checkpoint(tmp_path / 'old.state')


def test_damaged_and_missing_files_are_named(tmp_path):
    path = tmp_path / 'x.pth'
    with pytest.raises(FileNotFoundError, match=f'no checkpoint file {path}'):
        load_checkpoint(path)
    save_checkpoint({'params': STATE}, path)
    whole = path.read_bytes()
    for content in (b'', b'no checkpoint', whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f'cannot load {path}: it is damaged'):
            load_checkpoint(path)


@pytest.mark.parametrize('place', ['weights', 'pickle', 'table'])
def test_a_changed_byte_of_a_torch_file_is_seen(tmp_path, place):
    """torch looks at no checksum, and loads other weights."""
    path = tmp_path / 'x.pth'
    save_checkpoint({'params': {'a': torch.full((1000,), 3.0)}}, path)
    content = bytearray(path.read_bytes())
    index = {'weights': 2000, 'pickle': content.index(b'params'), 'table': len(content) - 200}[
        place
    ]
    content[index] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f'cannot load {path}: it is damaged'):
        load_checkpoint(path)


SMALL = {'iter': 4, 'optimizers': [{'state': {0: torch.arange(40.0)}}]}


def flipped_copies(path, places):
    """Put, one after the other, copies with one bit of those bytes flipped in the file's place."""
    whole = path.read_bytes()
    for place in places:
        for bit in range(8):
            content = bytearray(whole)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            yield place, bit


def test_every_flipped_bit_of_a_checkpoint_is_seen_before_it_is_parsed(tmp_path, monkeypatch):
    """Also those that no part's checksum covers: its name, its attributes, the tables."""
    path = tmp_path / '4.state'
    save_checkpoint(SMALL, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert differences(torch.load(path), SMALL) == []
    monkeypatch.setattr(torch, 'load', None)
    for _ in flipped_copies(path, range(0, path.stat().st_size, 11)):
        with pytest.raises(ValueError, match=r'cannot load .*4.state: it is damaged \('):
            load_checkpoint(path)


def test_a_flipped_bit_in_the_tables_of_another_programs_file_changes_nothing_unseen(tmp_path):
    """The bits of compression and of the disk's number make zipfile fail, in ways of its own."""
    path = tmp_path / 'x.state'
    torch.save(SMALL, path)
    last_part = path.read_bytes().rindex(b'PK\1\2')
    folders, refused = 0, 0
    for place, bit in flipped_copies(path, range(last_part, path.stat().st_size)):
        try:
            content = load_checkpoint(path)
        except ValueError as error:
            assert 'it is damaged' in str(error)
            refused += 1
            folders += 'marked as a folder' in str(error)
        else:
            assert differences(content, SMALL) == [], (place, bit)
    assert folders == 1, 'torch would give uninitialised memory for it'
    assert refused > 600


def test_files_without_checksums_and_of_the_old_format_are_read(tmp_path):
    path, with_checksums = tmp_path / 'x.pth', torch.serialization.get_crc32_options()
    torch.save({'params': STATE}, path, _use_new_zipfile_serialization=False)
    assert differences(load_checkpoint(path), {'params': STATE}) == []
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({'params': STATE}, path)
    finally:
        torch.serialization.set_crc32_options(with_checksums)
    assert differences(load_checkpoint(path), {'params': STATE}) == []


def kinds(value):
    """Types of all values inside nested ones."""
    if isinstance(value, dict):
        return set().union(*map(kinds, value.keys()), *map(kinds, value.values()), {type(value)})
    if isinstance(value, list | tuple):
        return set().union(*map(kinds, value), {type(value)})
    return {type(value)}


def test_states_hold_tensors_and_plain_values_only(run, train_opt):
    """With the record of best scores in the state."""
    folder = run(train_opt(val__val_freq=2))
    state = checkpoint(folder, '6.state')
    assert state['best_metric_results']['val']['psnr']['iter'] in (2, 4)
    plain = {int, float, bool, str, type(None), list, tuple, dict, torch.Tensor, Counter}
    assert kinds(state) <= plain
    plain = {str, int, dict, OrderedDict, torch.Tensor}
    assert kinds(checkpoint(folder, 'net_g_6.pth')) <= plain


def test_sparse_tensors_are_written_too(tmp_path):
    """They have no storage whose size could be asked for."""
    content = {'params': {'a': torch.eye(3).to_sparse()}}
    save_checkpoint(content, tmp_path / 'x.pth')
    assert torch.equal(load_checkpoint(tmp_path / 'x.pth')['params']['a'].to_dense(), torch.eye(3))


# ---------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    'prefix', ['', 'module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.module.']
)
def test_prefixes_of_wrappers_are_stripped_in_any_nesting(prefix):
    wrapped = {prefix + key: value for key, value in STATE.items()}
    assert strip_wrapper_prefixes(wrapped, STATE) == STATE


def test_a_prefix_that_only_some_keys_have_stays():
    state = {'module.a': 1, 'b': 2}
    assert strip_wrapper_prefixes(state, {'x'}) == state
    assert strip_wrapper_prefixes({}, {'x'}) == {}


class ModuleNet(nn.Module):
    """A network with a layer of its own called ``module``."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.fixture
def base_model(tmp_path):
    path = {'models': str(tmp_path)}
    return BaseModel({'num_gpu': 0, 'is_train': True, 'dist': False, 'path': path})


@pytest.mark.parametrize('wrap', [lambda net: net, nn.DataParallel], ids=['bare', 'wrapped'])
def test_a_net_with_an_attribute_module_is_saved_and_loaded(base_model, tmp_path, wrap):
    net, other = ModuleNet(), ModuleNet()
    base_model.save_network(wrap(net), 'net_g', -1)
    content = load_checkpoint(tmp_path / 'net_g_latest.pth')
    assert list(content['params']) == ['module.weight', 'module.bias']
    for prefix in ('', 'module.', '_orig_mod.module.'):
        wrapped = {prefix + key: value for key, value in content['params'].items()}
        save_checkpoint({'params': wrapped}, tmp_path / 'x.pth')
        nn.init.zeros_(other.module.weight)
        base_model.load_network(other, tmp_path / 'x.pth')
        assert differences(dict(other.state_dict()), dict(net.state_dict())) == []


OTHER = {'conv.weight': torch.zeros(4)}
ENTRY = description({'type': 'EDSR'}, 4)


@pytest.mark.parametrize(
    ('content', 'asked', 'used'),
    [
        ({'params': STATE}, None, 'params'),
        ({'params': OTHER, 'params_ema': STATE}, None, 'params_ema'),
        ({'state_dict': STATE, 'epoch': 3}, None, 'state_dict'),
        (STATE, None, None),
        ({'params': STATE, 'params_ema': OTHER}, 'params', 'params'),
        ({'params': OTHER, 'params_ema': STATE}, 'params_ema', 'params_ema'),
        ({'params': OTHER, 'mine': STATE}, 'mine', 'mine'),
        (STATE, 'params', None),
        ({'params': torch.ones(1)}, 'params', None),
        ({DESCRIPTION: ENTRY, 'params': STATE}, None, 'params'),
        ({'mine': STATE, DESCRIPTION: ENTRY}, 'mine', 'mine'),
        ({DESCRIPTION: torch.ones(1)}, 'params', None),
    ],
)
def test_the_state_dict_of_a_file_is_found(content, asked, used, caplog):
    state, key = select_params(content, asked, 'x.pth')
    assert state is (content if used is None else content[used])
    assert key == used
    assert not caplog.records


@pytest.mark.parametrize(
    ('content', 'asked', 'used'),
    [
        ({'params': STATE}, 'params_ema', 'params'),
        ({'params_ema': STATE, 'params': OTHER}, 'mine', 'params_ema'),
        ({'state_dict': STATE}, 'params', 'state_dict'),
        ({DESCRIPTION: {}, 'params': STATE}, DESCRIPTION, 'params'),
    ],
)
def test_another_key_than_the_one_asked_for_is_named(content, asked, used, caplog):
    assert select_params(content, asked, 'x.pth') == (content[used], used)
    (record,) = caplog.records
    keys = ', '.join(key for key in content if key != DESCRIPTION)
    message = f'Loading: x.pth has no key {asked}; using {used} (it has: {keys}).'
    assert (record.levelname, record.message) == ('WARNING', message)


def test_bare_weights_with_a_description_are_those_of_the_network(caplog):
    state, key = select_params(STATE | {DESCRIPTION: ENTRY}, 'params', 'x.pth')
    assert differences(state, STATE) == []
    assert (key, caplog.messages) == (None, [])


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ({'net': STATE, DESCRIPTION: ENTRY}, "no key 'params' .*keys are net. Set .* to net."),
        ({DESCRIPTION: ENTRY}, "no key 'params' .* It holds no weights."),
        ({'net': STATE, 'epoch': 3}, "no key 'params' .*its keys are net, epoch. Set path.param"),
        ({}, "has no key 'params'"),
        ([1, 2], 'holds a list; a state dict is needed'),
    ],
)
def test_a_file_without_a_state_dict_is_refused(content, message):
    with pytest.raises(ValueError, match=f'x.pth .*{message}|x.pth {message}'):
        select_params(content, 'params', 'x.pth')


# ---------------------------------------------------------------------------- which network it is


def test_a_description_is_of_plain_values_that_either_format_gives_back(tmp_path):
    options = OrderedDict(
        type='EDSR', rgb_mean=(0.4, 0.5), res_scale=1e-4, deep={'a': [None, True]}
    )
    entry = description(options, 4)
    plain = {'type': 'EDSR', 'rgb_mean': [0.4, 0.5], 'res_scale': 1e-4, 'deep': {'a': [None, True]}}
    assert entry == {'network': plain, 'scale': 4, 'version': '2.0.0'}
    for ending in ('pth', 'safetensors'):
        save_checkpoint({'params': STATE, DESCRIPTION: entry}, tmp_path / f'x.{ending}')
        content = load_checkpoint(tmp_path / f'x.{ending}')
        assert differences(content, {'params': STATE, DESCRIPTION: entry}) == []


@pytest.mark.parametrize('value', [date(2026, 1, 2), b'x', {1: 2}, np.float64(1), STATE, nn.ReLU])
def test_arguments_that_no_file_can_hold_are_told_and_do_not_stop_a_save(value, caplog):
    entry = description({'type': 'Mine', 'act': [value]}, None)
    assert entry == {'network': None, 'scale': None, 'version': '2.0.0'}
    (message,) = caplog.messages
    assert message.startswith('Saving: the network Mine has ')
    assert message.endswith('load_network_from cannot rebuild it from this file.')

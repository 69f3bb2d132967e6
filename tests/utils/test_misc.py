import errno
import fcntl
import os
import random
import re
import subprocess
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from basicsr.utils.misc import (
    atomic_path,
    best_effort,
    check_resume,
    get_time_str,
    make_exp_dirs,
    mkdir_and_rename,
    scandir,
    set_random_seed,
    sizeof_fmt,
)


@pytest.mark.parametrize(
    ('size', 'text'),
    [
        # From the reference:
        (0, '0.0 B'),
        (1, '1.0 B'),
        (1023, '1023.0 B'),
        (1024, '1.0 KB'),
        (1536, '1.5 KB'),
        (1000000, '976.6 KB'),
        (10000000000, '9.3 GB'),
        # By hand:
        (-2048, '-2.0 KB'),
        (3 * 1024**7, '3.0 ZB'),
        (5 * 1024**9, '5120.0 YB'),
    ],
)
def test_sizes_for_people(size, text):
    assert sizeof_fmt(size) == text


def test_sizes_may_have_another_unit():
    assert sizeof_fmt(2048, 'bit') == '2.0 Kbit'


def test_times_are_legal_in_file_names():
    assert re.fullmatch(r'20\d{6}_\d{6}', get_time_str())


def test_one_number_seeds_all_generators():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    set_random_seed(5)
    first = draw()
    assert draw() != first
    set_random_seed(5)
    assert draw() == first
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert draw() == first, 'the generators are seeded as in the reference'
    set_random_seed(2**32 + 5)  # larger than numpy takes


def test_an_existing_folder_is_kept_under_another_name(tmp_path):
    folder = tmp_path / 'parent' / 'run'
    assert mkdir_and_rename(str(folder)) is None
    archives = []
    for number in range(3):  # within one second
        (folder / 'number').write_text(str(number))
        archives.append(mkdir_and_rename(folder))
        assert list(folder.iterdir()) == []
    assert [(archive / 'number').read_text() for archive in archives] == ['0', '1', '2']
    assert all(re.match(r'run_archived_\d{8}_\d{6}', archive.name) for archive in archives)


def exp_opt(root, **path):
    folders = ('models', 'training_states', 'visualization')
    path |= {'experiments_root': str(root), 'log': str(root)}
    path |= {name: str(root / name) for name in folders}
    return {'is_train': True, 'path': path}


def test_only_known_folders_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opt = exp_opt(tmp_path / 'run', pretrain_model_g=None, my_folder='mine', resume_state='x.state')
    assert make_exp_dirs(opt) is None
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob('*')}
    assert made == {'run', 'run/models', 'run/training_states', 'run/visualization'}
    (tmp_path / 'run' / 'models' / 'net.pth').touch()
    assert (make_exp_dirs(opt) / 'models' / 'net.pth').exists()


def test_a_test_run_has_no_folders_for_models(tmp_path):
    path = {'results_root': str(tmp_path / 'r'), 'visualization': str(tmp_path / 'r/v')}
    make_exp_dirs({'is_train': False, 'path': path})
    assert sorted(p.name for p in tmp_path.rglob('*')) == ['r', 'v']


def test_only_rank_0_makes_folders(tmp_path, monkeypatch):
    monkeypatch.setattr('basicsr.utils.dist_util.get_dist_info', lambda: (1, 2))
    assert make_exp_dirs(exp_opt(tmp_path / 'run')) is None
    assert not (tmp_path / 'run').exists()


@pytest.fixture
def tree(tmp_path):
    for name in ('b.png', 'a.jpg', '.hidden.png', 'sub/c.png', 'sub/deep/d.PNG', '.git/e.png'):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


@pytest.mark.parametrize(
    ('options', 'names'),
    [
        ({}, {'a.jpg', 'b.png'}),
        ({'suffix': '.png'}, {'b.png'}),
        ({'suffix': ('.png', '.jpg')}, {'a.jpg', 'b.png'}),
        ({'recursive': True}, {'a.jpg', 'b.png', 'sub/c.png', 'sub/deep/d.PNG'}),
        ({'recursive': True, 'suffix': '.png'}, {'b.png', 'sub/c.png'}),
    ],
)
def test_visible_files_are_listed(tree, options, names):
    assert sorted(scandir(str(tree), **options)) == sorted(names)
    full = scandir(tree, full_path=True, **options)
    assert sorted(full) == sorted(str(tree / name) for name in names)


def test_files_are_listed_one_by_one_as_they_are_found(tree):
    files = scandir(tree)
    assert next(files) in {'a.jpg', 'b.png'}


def test_a_suffix_of_another_kind_is_refused(tree):
    with pytest.raises(TypeError, match=r"tuple of strings, got \['.png'\]"):
        scandir(tree, ['.png'])


def test_links_that_lead_nowhere_are_no_files(tree):
    files = set(scandir(tree, recursive=True))
    assert {'a.jpg', 'b.png'} <= files
    (tree / 'broken.png').symlink_to(tree / 'none.png')
    assert set(scandir(tree, recursive=True)) == files
    assert set(scandir(tree, recursive=True, broken_links=True)) == files | {'broken.png'}


# ---------------------------------------------------------------------------- resume


@pytest.fixture
def resume_opt(tmp_path):
    path = {
        'models': str(tmp_path / 'new/models'),
        'resume_state': str(tmp_path / 'old/training_states/8.state'),
        'pretrain_network_g': 'start.pth',
        'param_key_g': 'params_ema',
        'strict_load_g': False,
        'pretrain_network_d': 'start_d.pth',
        'param_key_d': 'params',
        'ignore_resume_networks': None,
    }
    return {'network_g': {}, 'network_d': {}, 'network_x': {}, 'path': path}


def test_a_resume_takes_the_networks_saved_with_the_state(resume_opt, tmp_path):
    (tmp_path / 'old/models').mkdir(parents=True)
    check_resume(resume_opt, 8)
    path = resume_opt['path']
    for label in 'gdx':
        expected = str(tmp_path / f'old/models/net_{label}_8.pth')
        assert path[f'pretrain_network_{label}'] == expected
        assert path[f'param_key_{label}'] == 'params'
        assert path[f'strict_load_{label}'] is True


def test_a_state_without_networks_beside_it_takes_those_of_the_run(resume_opt, tmp_path):
    check_resume(resume_opt, 8)
    assert resume_opt['path']['pretrain_network_g'] == str(tmp_path / 'new/models/net_g_8.pth')


def test_ignored_and_absent_networks_are_left_alone(resume_opt):
    resume_opt['path']['ignore_resume_networks'] = ['network_d']
    resume_opt['network_x'] = None
    check_resume(resume_opt, 8)
    assert resume_opt['path']['pretrain_network_d'] == 'start_d.pth'
    assert resume_opt['path']['pretrain_network_g'].endswith('net_g_8.pth')
    assert 'pretrain_network_x' not in resume_opt['path']


def test_without_a_state_nothing_is_changed(resume_opt):
    resume_opt['path']['resume_state'] = None
    check_resume(resume_opt, 8)
    assert resume_opt['path']['pretrain_network_g'] == 'start.pth'


def test_runs_need_neither_links_nor_other_programs(run, train_opt, monkeypatch, tmp_path):
    """Train, archive, resume and test on any file system."""

    def refuse(*_, **__):
        raise AssertionError('not everywhere')

    monkeypatch.setattr(os, 'symlink', refuse)
    monkeypatch.setattr(os, 'system', refuse)
    monkeypatch.setattr(subprocess, 'Popen', refuse)
    run(train_opt(train__total_iter=2))
    folder = run(train_opt(train__total_iter=2, val__save_img=True))
    run(train_opt(train__total_iter=4), '--auto_resume')
    opt = train_opt(path__pretrain_network_g=str(folder / 'models/net_g_latest.pth'))
    opt = {key: opt[key] for key in opt if key not in ('train', 'logger')}
    opt['datasets'] = {'test': opt['datasets']['val']}
    run(opt, pipeline='test')
    assert len(list(folder.parent.glob('tiny_archived_*'))) == 1
    names = [path.name for path in tmp_path.rglob('*')]
    assert len(names) > 30
    assert [name for name in names if re.search(r'[<>:"|?*\\]', name)] == []


def test_folders_may_be_given_as_paths(tree):
    assert sorted(scandir(Path(tree) / 'sub')) == ['c.png']


def test_a_folder_is_claimed_by_one_process_at_a_time(tmp_path):
    from basicsr.utils.misc import claim_folder

    def claim_elsewhere(name):
        with ProcessPoolExecutor(1, get_context('fork')) as pool:
            pool.submit(claim_folder, tmp_path / name).result()

    claim_folder(tmp_path / 'run')
    claim_folder(tmp_path / 'run')  # again, by the same process
    with pytest.raises(BlockingIOError, match=f'another process is writing to {tmp_path / "run"}'):
        claim_elsewhere('run')
    claim_elsewhere('other')
    claim_folder(tmp_path / 'other')  # its process has ended


@pytest.mark.parametrize('number', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_folder_is_claimed_with_a_warning(number, break_locks, tmp_path, caplog):
    from basicsr.utils.misc import claim_folder

    break_locks(number)
    claim_folder(tmp_path / 'run')
    (message,) = caplog.messages
    assert message.startswith(f'The file system of {tmp_path / "run"} has no locks')


@pytest.mark.parametrize('number', [errno.EACCES, errno.EAGAIN])
def test_of_two_errors_another_process_is_the_cause(number, break_locks, tmp_path):
    from basicsr.utils.misc import claim_folder

    break_locks(number)
    with pytest.raises(BlockingIOError, match='another process is writing to '):
        claim_folder(tmp_path / 'run')


def test_a_locked_block_says_whether_others_are_kept_out(tmp_path, break_locks):
    from basicsr.utils.misc import locked

    with locked(tmp_path / 'lock') as is_alone:
        assert is_alone
        with (tmp_path / 'lock').open('a') as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    break_locks()
    with locked(tmp_path / 'lock') as is_alone:
        assert not is_alone


def test_threads_may_write_one_file_at_once(tmp_path):
    """The last one wins, and no reader sees anything half written."""
    path, together = tmp_path / 'x.txt', threading.Barrier(2)

    def write(text):
        with atomic_path(path, durable=False) as temporary:
            temporary.write_text(text)
            together.wait(300)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ('a' * 1000, 'b' * 1000)))
    assert set(path.read_text()) in ({'a'}, {'b'}) and os.listdir(tmp_path) == ['x.txt']


def test_what_is_made_with_best_effort_ends_no_run(caplog):
    with best_effort('picture.png'):
        raise RuntimeError('first line\nsecond line')
    assert [record.message for record in caplog.records] == [
        'picture.png could not be made: RuntimeError: first line'
    ]


def test_a_file_with_the_longest_name_can_be_written(tmp_path):
    file = tmp_path / ('x' * 251 + '.png')
    with atomic_path(file) as temporary:
        temporary.write_text('a')
    assert [path.name for path in tmp_path.iterdir()] == [file.name]

"""The console command and the two scripts as programs: messages, statuses, interruption."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from runs import checkpoint, differences, rows

import basicsr
from basicsr import cli
from basicsr.archs import build_network
from basicsr.models.sr_model import SRModel
from basicsr.run import watchdog
from basicsr.run.program import message_for_users
from basicsr.run.program import run as run_pipeline
from basicsr.utils.logger import get_root_logger
from basicsr.utils.options import OptionError


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the console command in this process: (exit status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['/usr/bin/basicsr', *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def write(tmp_path):
    def call(opt, name='x.yml'):
        (tmp_path / name).write_text(json.dumps(opt))
        return name

    return call


def message(text):
    """The last line of stderr, below the log of the run, without its time."""
    assert 'Traceback' not in text
    return re.sub(r'^[-\d]+ [:,\d]+ (?=ERROR)', '', text.splitlines()[-1])


def test_without_a_command_or_with_another_one_the_usage_is_shown(command):
    status, out, err = command('tran', '-opt', 'x.yml')
    assert (status, out) == (2, '')
    assert err.startswith('usage: basicsr ')
    assert "error: argument COMMAND: invalid choice: 'tran'" in err
    status, out, err = command()
    assert (status, out) == (2, '')
    assert err.startswith('usage: basicsr ')
    assert all(re.search(f'^ +{name}( |$)', err, re.MULTILINE) for name in cli.COMMANDS)


def test_the_version_is_told_by_the_package_as_a_program_without_torch(run_program):
    result = run_program('-X', 'importtime', '-m', 'basicsr', '--version')
    assert (result.returncode, result.stdout) == (0, f'basicsr {basicsr.__version__}\n')
    assert not re.search(r'\| +(torch|numpy|cv2)$', result.stderr, re.MULTILINE)


@pytest.mark.parametrize('name', cli.COMMANDS)
def test_the_help_of_every_command_has_an_example(command, name):
    status, out, _ = command(name, '--help')
    assert status == 0
    assert re.search(rf'Examples?: basicsr\s+{name}\s', out)


def test_help_is_no_error(command):
    status, out, err = command('--help')
    assert (status, err) == (0, '')
    assert re.search('^ +train +train a network', out, re.MULTILINE)
    status, out, err = command('train', '--help')
    assert (status, err) == (0, '')
    assert out.startswith('usage: basicsr train')
    assert '--force_yml' in out
    status, out, err = command('tune', '--help')
    assert (status, err) == (0, '')
    assert out.startswith('usage: basicsr tune')
    assert '--tolerance' in out


def test_mistyped_flags_end_with_status_2(command):
    for arguments in (['train'], ['test', '-opt', 'x.yml', '--launcher', 'mpi']):
        status, _, err = command(*arguments)
        assert status == 2
        assert err.count('error: ') == 1


def test_a_missing_option_file_is_one_line(run_program, tmp_path):
    result = run_program('-m', 'basicsr.cli', 'train', '-opt', 'missing.yml')
    assert result.returncode == 1
    assert message(result.stderr) == f'ERROR: no option file missing.yml (looked in {tmp_path}).'
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ''


def test_a_wrong_option_file_ends_with_status_2(command, write, train_opt):
    status, _, err = command('train', '-opt', write(train_opt(train__total_iter='soon')))
    assert status == 2
    assert len(err.splitlines()) == 1
    assert 'x.yml:1: train.total_iter: input should be a valid integer' in err
    opt = train_opt()
    del opt['train'], opt['logger']
    status, _, err = command('test', '-opt', write(opt))
    assert status == 2
    assert 'datasets.train: unknown phase' in err


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        ({'network_g__type': 'SRVGGNetCompakt'}, 'Did you mean SRVGGNetCompact?'),
        ({'model_type': 'SRModell'}, 'Did you mean SRModel'),
    ],
)
def test_components_that_do_not_exist_end_with_status_2(
    command, write, train_opt, change, expected
):
    status, _, err = command('train', '-opt', write(train_opt(**change)))
    assert status == 2
    assert len(err.splitlines()) == 1 and expected in err


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        ({'datasets__train__dataroot_lq': 'nowhere'}, 'nowhere'),
        ({'path__pretrain_network_g': 'none.pth'}, 'no checkpoint file none.pth'),
        ({'plugins': ['none']}, 'plugins: no folder'),
    ],
)
def test_what_cannot_be_found_is_one_message_with_status_1(
    command, write, train_opt, change, expected
):
    status, _, err = command('train', '-opt', write(train_opt(**change)))
    assert status == 1
    assert message(err).startswith('ERROR: ')
    assert expected in message(err)


def test_a_test_without_weights_is_refused(command, write, train_opt):
    opt = train_opt()
    opt['datasets'] = {'test': opt['datasets']['val']}
    del opt['train']
    status, _, err = command('test', '-opt', write(opt))
    assert status == 1
    assert 'path.pretrain_network_g names no weights' in message(err)


def test_a_broken_image_in_a_worker_is_one_message(command, write, train_opt, tmp_path):
    opt = train_opt(datasets__train__num_worker_per_gpu=1)
    for file in (tmp_path / 'data/gt').iterdir():
        file.write_bytes(file.read_bytes()[:40])
    status, _, err = command('train', '-opt', write(opt))
    assert status == 1
    assert re.search(r'data/gt/000\d.png', message(err))


MORTAL = """
import os
import signal

import torch
from torch.utils.data import Dataset, get_worker_info

from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class Mortal(Dataset):
    def __init__(self, opt):
        self.opt = opt

    def __len__(self):
        return 50

    def __getitem__(self, index):
        if get_worker_info() is not None and index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return {'lq': torch.rand(3, 8, 8), 'gt': torch.rand(3, 16, 16)}
"""


def test_a_killed_loader_process_is_one_message(command, write, train_opt, tmp_path):
    (tmp_path / 'mortal_dataset.py').write_text(MORTAL)
    opt = train_opt(val=None, plugins=['.'], train__total_iter=100)
    train = {'type': 'Mortal', 'batch_size_per_gpu': 2, 'num_worker_per_gpu': 1}
    status, _, err = command('train', '-opt', write(opt | {'datasets': {'train': train}}))
    assert status == 1
    assert 'Traceback' not in err
    (line,) = [line for line in err.splitlines() if 'DataLoader worker (pid' in line]
    assert ' ERROR: DataLoader worker (pid ' in line
    assert 'was killed (signal 9), most likely because the machine ran out of memory' in line
    assert 'num_worker_per_gpu' in line


def test_a_gpu_without_memory_in_a_step_is_one_message(command, write, train_opt, monkeypatch):
    def step(model, current_iter):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')

    monkeypatch.setattr(SRModel, 'optimize_parameters', step)
    status, _, err = command('train', '-opt', write(train_opt()))
    assert status == 1
    assert 'ERROR: Out of memory of the GPU (OutOfMemoryError: CUDA out of memory.' in message(err)
    assert 'lower datasets.train.batch_size_per_gpu or gt_size' in message(err)


def test_the_console_command_trains_where_it_is_called(command, write, train_opt, tmp_path):
    opt = train_opt(train__total_iter=1)
    status, _, err = command('train', '-opt', write(opt), '--force_yml', 'name=other')
    assert status == 0
    assert 'End of training' in err
    assert rows(tmp_path / 'experiments/other')[0]['iter'] == 1


# ---------------------------------------------------------------------------- run


def run_failing(error):
    def pipeline(root):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_pipeline(pipeline, '.')
    return stop.value.code


def test_statuses_tell_what_went_wrong(capsys):
    assert run_failing(OptionError('x.yml:1: wrong')) == 2
    assert run_failing(FileNotFoundError('no such file')) == 1
    assert run_failing(KeyboardInterrupt()) == 130
    assert 'Interrupted.\n' in capsys.readouterr().err
    assert run_failing(KeyboardInterrupt('The last state is that of iteration 5.')) == 130
    assert 'Interrupted. The last state is that of iteration 5.\n' in capsys.readouterr().err


def test_a_program_that_the_users_code_leaves_ends_as_it_says(monkeypatch):
    told = []
    monkeypatch.setattr(watchdog, 'tell_of_failure', told.append)
    assert run_failing(SystemExit('enough')) == 'enough'
    assert run_failing(SystemExit(0)) == 0
    assert [error.code for error in told] == ['enough', 0]
    assert run_failing(SystemExit(75)) == 75, 'all ranks were asked to stop'
    assert len(told) == 2


@pytest.mark.parametrize('error', [ValueError('not ours'), RuntimeError('a bug'), KeyError('x')])
def test_errors_that_nobody_foresaw_keep_their_traceback(error):
    def pipeline(root):
        raise error

    with pytest.raises(type(error)) as caught:
        run_pipeline(pipeline, '.')
    assert caught.value is error
    assert [entry.name for entry in caught.traceback][-1] == 'pipeline'


def test_the_traceback_of_an_unforeseen_error_is_in_the_log_file(tmp_path, capsys):
    def pipeline(root):
        get_root_logger(log_file=tmp_path / 'run.log')
        raise RuntimeError('a bug')

    with pytest.raises(RuntimeError, match='^a bug$'):
        run_pipeline(pipeline, '.')
    text = (tmp_path / 'run.log').read_text()
    assert text.count('RuntimeError: a bug') == 1 and 'in pipeline' in text
    assert 'a bug' not in capsys.readouterr().err, 'Python prints it'


def test_ctrl_c_saves_the_state_and_a_resume_goes_on(run, run_program, write, train_opt, tmp_path):
    options = {'datasets__train__num_worker_per_gpu': 2, 'logger__save_checkpoint_freq': 5}
    opt = train_opt(name='cut', train__total_iter=100_000, val__val_freq=None, **options)
    log = (tmp_path / 'stderr.txt').open('w+')
    program = subprocess.Popen(
        [sys.executable, '-m', 'basicsr.cli', 'train', '-opt', write(opt)],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': basicsr.__path__[0] + '/..', 'OMP_NUM_THREADS': '1'},
        stderr=log,
        start_new_session=True,
    )
    states = tmp_path / 'experiments/cut/training_states'
    deadline = time.monotonic() + 300
    while not (states / '10.state').exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(program.pid, signal.SIGINT)
    assert program.wait(timeout=300) == 130

    log.seek(0)
    lines = log.read().splitlines()
    last = max(int(state.stem) for state in states.glob('*.state'))
    assert lines.count('Interrupted: saving the state first; Ctrl-C again ends at once.') == 1
    assert not any('Traceback' in line for line in lines)
    assert lines[-1].endswith(
        f'WARNING: Interrupted: the state of iteration {last} is saved. Resume with: basicsr train '
        '-opt x.yml --auto_resume'
    )

    total = last + 2
    folder = run(train_opt(name='cut', train__total_iter=total, **options), '--auto_resume')
    whole = run(train_opt(name='whole', train__total_iter=total, **options))
    for name in ('net_g_latest.pth', f'{total}.state'):
        a, b = checkpoint(folder, name), checkpoint(whole, name)
        a.pop('best_metric_results', None), b.pop('best_metric_results', None)
        assert differences(a, b) == []


# ---------------------------------------------------------------------------- the package alone


def test_a_bare_copy_of_the_package_can_be_imported(tmp_path):
    folder = tmp_path / 'basicsr'
    shutil.copytree(basicsr.__path__[0], folder, ignore=shutil.ignore_patterns('__pycache__'))
    for path in (*folder.rglob('*'), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    code = (
        'import sys, basicsr\n'
        'from basicsr.version import __gitsha__, __version__, version_info\n'
        'assert basicsr.__version__ == __version__ == ".".join(map(str, version_info))\n'
        'assert isinstance(__gitsha__, str)\n'
        'assert not {"torch", "numpy", "cv2", "yaml"} & set(sys.modules)\n'
        'print(basicsr.__file__)\n'
    )
    result = subprocess.run(
        [sys.executable, '-S', '-c', code],  # -S: no installed package is seen
        cwd=tmp_path,
        env={'PYTHONPATH': str(tmp_path)},
        capture_output=True,
        text=True,
    )
    for path in (folder, *folder.rglob('*')):
        path.chmod(0o755)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f'{folder}/__init__.py\n'
    assert not list(folder.rglob('*.pyc')) or os.geteuid() == 0, 'root writes anywhere'


def test_caches_are_listed_and_cleared_by_a_command(tmp_path, monkeypatch, capsys):
    from basicsr import cli
    from basicsr.data.image_cache import ImageCache

    ImageCache(tmp_path, ['/data/a.png', '/data/b.png'])
    monkeypatch.setattr(sys, 'argv', ['basicsr', 'cache', '--folder', str(tmp_path)])
    cli.main()
    out = capsys.readouterr().out
    assert '2 color images, first /data/a.png' in out
    assert out.endswith(f'1 caches in {tmp_path}\n')
    monkeypatch.setattr(sys, 'argv', ['basicsr', 'cache', 'clear', '--folder', str(tmp_path)])
    cli.main()
    assert '64.0 B freed' in capsys.readouterr().out
    assert not list(tmp_path.glob('*/pixels.bin'))


def test_without_a_home_the_cache_command_asks_for_a_folder(no_home, monkeypatch, capsys):
    from basicsr import cli

    monkeypatch.setattr(sys, 'argv', ['basicsr', 'cache'])
    with pytest.raises(SystemExit, match='2'):
        cli.main()
    assert 'error: there is no home folder: set HOME' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('flag', 'value', 'status', 'message'),
    [
        ('--suffix', '../x', 2, "--suffix must be part of a file name, got '../x'"),
        ('--device', 'foo', 1, '--device foo cannot be used: '),
        ('--device', 'cuda:77', 1, '--device cuda:77 cannot be used: '),
    ],
)
def test_flags_of_restore_are_refused_in_a_message(command, tmp_path, flag, value, status, message):
    net = build_network({'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2})
    torch.save({'params': net.state_dict()}, tmp_path / 'net.pth')
    network = '{type: SRVGGNetCompact, num_feat: 4, num_conv: 1, upscale: 2}'
    (tmp_path / 'o.yml').write_text(f'network_g: {network}\n')
    flags = ('-i', tmp_path, '-o', 'out', '-m', 'net.pth', '--opt', 'o.yml')
    found, _, err = command('restore', *flags, flag, value)
    assert found == status
    assert message in err
    assert not (tmp_path / 'out').exists()


BROKEN_METRIC = """
from basicsr.utils.registry import METRIC_REGISTRY


@METRIC_REGISTRY.register()
def broken_metric(img, **kwargs):
    return int('oops')
"""


def test_bugs_of_the_users_own_code_are_shown_with_their_place(
    run, train_opt, tmp_path, monkeypatch
):
    (tmp_path / 'my_metric.py').write_text(BROKEN_METRIC)
    opt = train_opt(plugins=['.'], val__metrics={'mine': {'type': 'broken_metric'}})
    with pytest.raises(ValueError, match='metric mine of image 0000: invalid literal') as error:
        run(opt)
    assert message_for_users(error.value) is None  # so the traceback is printed


def test_output_that_nobody_reads_on_ends_a_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, '-m', 'basicsr', 'list', 'networks']
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b'')


def test_the_help_of_a_test_names_only_what_a_test_reads(command):
    assert '--auto_resume' in command('train', '--help')[1]
    text = command('test', '--help')[1]
    assert '--auto_resume' not in text and '--force_yml' in text

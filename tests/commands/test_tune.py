"""`basicsr tune`: what it tries and takes, its table, the lines to paste, and what it leaves."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from runs import rows

from basicsr import cli
from basicsr.commands import tune as tune_command
from basicsr.commands.tune import (
    ACCEPTED,
    KEYS,
    Failure,
    Report,
    conclusion,
    difference,
    judge,
    reason_of_failure,
    search,
    table_row,
)
from basicsr.utils import yaml_load

# A worker beside the step, which takes longer than reading, saves three of seven parts of the time.
SLOW = """
import time

from torch import nn

from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.utils.registry import ARCH_REGISTRY, DATASET_REGISTRY


@DATASET_REGISTRY.register()
class SlowDataset(PairedImageDataset):
    def __getitem__(self, index):
        time.sleep(0.03)
        return super().__getitem__(index)


@ARCH_REGISTRY.register()
class SlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, x):
        if self.training and len(x) > 1:
            raise RuntimeError('this network takes one image')
        time.sleep(0.04)
        return nn.functional.pixel_shuffle(self.conv(x), 2)
"""


@pytest.fixture
def slow_opt(train_opt, tmp_path):
    (tmp_path / 'slow_arch.py').write_text(SLOW)
    opt = train_opt(plugins=['.'], train__total_iter=1000, network_g={'type': 'SlowNet'})
    opt['datasets']['train'].update(type='SlowDataset', batch_size_per_gpu=1)
    return opt


@pytest.fixture
def environment(tmp_path, repository):
    """Of a `basicsr tune`, with folders of its own for all that it may leave behind."""
    with TemporaryDirectory() as folder:  # names of sockets must be short: not in tmp_path
        yield {
            **os.environ,
            'PYTHONPATH': str(repository),
            'OMP_NUM_THREADS': '1',
            'TMPDIR': folder,
            'HOME': str(tmp_path / 'home'),
            'XDG_CACHE_HOME': str(tmp_path / 'home'),
        }
        assert os.listdir(folder) == []


def start(opt, tmp_path, environment, *flags):
    (tmp_path / 'x.yml').write_text(json.dumps(opt))
    return subprocess.Popen(
        [sys.executable, '-m', 'basicsr.cli', 'tune', '-opt', 'x.yml', *flags],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def main(flags):
    args = cli.parse(['tune', *flags])
    return args.main(args)


def files(folder):
    return {file for file in folder.rglob('*') if '__pycache__' not in file.parts}


@pytest.mark.slow
def test_the_fastest_settings_are_found_and_can_be_pasted(slow_opt, run, tmp_path, environment):
    (tmp_path / 'x.yml').touch()
    before = files(tmp_path)
    names = ['num_worker_per_gpu', 'amp', 'batch_size_per_gpu']
    process = start(
        slow_opt,
        tmp_path,
        environment,
        '--seconds',
        '0.5',
        '--settings',
        *names,
        '--force_yml',
        'logger:print_freq=7',
    )
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, '')
    assert files(tmp_path) == before

    cells = [re.split(r'\s{2,}', line) for line in out.splitlines()]
    table = {row[0]: row[1:] for row in cells[3:] if len(row) == 6}
    plain, one = table['as in the file'], table['num_worker_per_gpu: 1']
    assert plain[3:] == ['-', 'plain'] and float(plain[0]) > 0
    assert one[3] == '0.00%', 'a worker changes no loss'
    failed = 'failed: RuntimeError: this network takes one image'
    assert table['batch_size_per_gpu: 2'] == ['-', '-', '-', '-', failed]
    assert 'Not tried without a GPU: amp.' in out

    if one[4] != 'accepted':  # on a machine so busy that waiting is not what takes the time
        assert re.match(r'slower|\+.*less than', one[4]) and 'as fast as anything tried' in out
        return
    lines = out.partition('these lines:\n\n')[2].partition('\nor the flag')[0]
    workers = yaml_load(lines)['datasets']['train'].pop('num_worker_per_gpu')
    assert workers >= 1
    assert f'--force_yml datasets:train:num_worker_per_gpu={workers}\n' in out
    slow_opt['datasets']['train']['num_worker_per_gpu'] = workers
    slow_opt['train']['total_iter'] = 2
    assert len([row for row in rows(run(slow_opt)) if 'lr' in row]) == 2


def test_an_error_in_the_file_is_shown_as_a_training_shows_it(
    train_opt, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'x.yml').write_text(json.dumps(train_opt(train__total_iter='many')))
    assert main(['-opt', 'x.yml']) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert re.fullmatch(r"[-\d]+ [:,\d]+ ERROR: x.yml:1: train.total_iter: .*, got 'many'\n", err)


@pytest.mark.skipif(not Path('/proc/self/cmdline').exists(), reason='needs /proc')
def test_an_interruption_ends_all_processes(slow_opt, tmp_path, environment):
    slow_opt['datasets']['train']['num_worker_per_gpu'] = 1
    process = start(slow_opt, tmp_path, environment, '--seconds', '60')

    def trials():
        return [
            file.parent.name
            for file in Path('/proc').glob('[0-9]*/cmdline')
            if environment['TMPDIR'].encode() in read(file)
        ]

    def read(file):
        try:
            return file.read_bytes()
        except OSError:  # it has ended meanwhile
            return b''

    deadline = time.monotonic() + 300
    while len(trials()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(trials()) == 2  # the trial and its worker
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, '', 'Interrupted.\n')
    assert trials() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_settings_of_a_gpu_are_tried_on_one(train_opt, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'x.yml').write_text(json.dumps(train_opt(train__total_iter=1000, num_gpu=1)))
    flags = ['--seconds', '0.5', '--settings', 'amp', 'channels_last']
    assert main(['-opt', 'x.yml', *flags]) == 0
    out = capsys.readouterr().out
    assert re.search(r'^amp: (bf16|fp16) +\d', out, re.MULTILINE)
    assert re.search(r'^channels_last: true +\d', out, re.MULTILINE)
    assert 'Not tried' not in out


def test_several_processes_are_refused(monkeypatch, capsys):
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'):
        monkeypatch.setenv(name, '0')
    with pytest.raises(SystemExit) as stop:
        main(['-opt', 'x.yml'])
    assert stop.value.code == 2
    assert 'without torchrun' in capsys.readouterr().err


@pytest.mark.parametrize('flags', ['--seconds 0', '--memory 1.1', '--tolerance -1'])
def test_flags_that_mean_nothing_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        main(['-opt', 'x.yml', *flags.split()])
    assert stop.value.code == 2
    assert 'must be above 0' in capsys.readouterr().err


PLAIN = Report(
    speed=100.0,
    noise=0.0,
    waiting=0.25,
    memory=2**30,
    losses=[{'l_pix': 0.5}],
    settings={'batch_size_per_gpu': 16},
    device='the CPU',
    total_memory=2**31,
    half=None,
    cores=2,
)


def test_the_lines_to_paste_have_what_differs_and_warn_of_a_larger_batch():
    settings = {'amp': 'bf16', 'cache': 'auto', 'batch_size_per_gpu': 32, 'compile': True}
    text = conclusion(settings, PLAIN, PLAIN, list(settings), 0.9)
    lines = text.partition('these lines:\n\n')[2].partition('\nor the flag')[0]
    assert yaml_load(lines) == {
        'train': {'amp': 'bf16', 'compile': True},
        'datasets': {'train': {'cache': 'auto', 'batch_size_per_gpu': 32}},
    }
    assert 'train:amp=bf16 datasets:train:cache=auto' in text
    assert 'scale_lr' in text
    assert 'batch_size_per_gpu: 32 was not tried' in text
    assert 'scale_lr' not in conclusion({'amp': 'bf16'}, PLAIN, PLAIN, ['amp'], 0.9)
    assert 'as fast as anything tried' in conclusion({}, PLAIN, PLAIN, ['amp'], 0.9)


def test_a_row_has_a_cell_for_each_column_and_a_dash_where_there_is_no_number():
    assert re.split(r'\s{2,}', table_row('x', PLAIN, PLAIN, 'yes').rstrip()) == [
        *('x', '100.0', '25%', '1.0 GB', '0.00%', 'yes'),
    ]
    failed = table_row('x', Failure(1, 'out of memory'), PLAIN, 'failed: out of memory')
    assert failed.split()[1:5] == ['-'] * 4


@pytest.mark.parametrize(
    ('status', 'log', 'reason'),
    [
        (1, 'Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried 3 GiB', 'out of memory'),
        (-9, 'loading', 'out of memory'),
        (None, 'compiling', 'no end in sight'),
        (
            1,
            'Traceback\nInvalidCxxCompiler: x\ntorch.NoError: No g++\n\nSet X=1\n',
            'torch.NoError: No g++',
        ),
        (2, '2026-01-01 10:00:00,123 ERROR: x.yml:3: wrong', 'x.yml:3: wrong'),
        (-11, '', 'exit status -11'),
    ],
)
def test_a_trial_that_fails_says_why(status, log, reason):
    assert reason_of_failure(status, log) == reason


GIB = 2**30
WORKERS = 'num_worker_per_gpu'
ON_GPU = Report(
    speed=100.0,
    noise=0.0,
    waiting=0.0,
    memory=4 * GIB,
    losses=[{'l_pix': 0.5}, {'l_pix': 0.4}],
    settings={
        'cache': 'auto',
        'num_worker_per_gpu': 4,
        'prefetch_mode': 'cuda',
        'amp': None,
        'channels_last': False,
        'compile': False,
        'batch_size_per_gpu': 16,
    },
    device='a GPU',
    total_memory=20 * GIB,
    half='bf16',
    cores=16,
)
ON_CPU = ON_GPU._replace(
    device='the CPU', half=None, settings={**ON_GPU.settings, 'prefetch_mode': 'cpu'}
)


def tuned(plain, outcome, names=tuple(KEYS), tolerance=0.05, memory=0.9):
    """The settings that are accepted, and all (new setting, verdict), of trials with an outcome.

    ``outcome(settings)`` gives what changes in the plain report, or a Failure.
    """

    def measure(settings):
        found = outcome(settings)
        if isinstance(found, Failure):
            return found
        return plain._replace(settings={**plain.settings, **settings}, **found)

    rows = []

    def tell(name, value, trial, verdict):
        rows.append((f'{name}={value}', verdict))

    accepted, best = search(measure, tell, plain, names, tolerance, memory)
    assert accepted.items() <= best.settings.items()
    return accepted, rows


def faster(**gains):
    """Settings multiply the speed by these factors, others leave it."""

    def outcome(settings):
        return {'speed': 100.0 * math.prod(gains.get(name, 1.0) for name in settings)}

    return outcome


@pytest.mark.parametrize(
    ('speed', 'noise', 'verdict'),
    [
        (103.1, 0.0, ACCEPTED),
        (102.9, 0.0, '+2.9%, less than 3%'),
        (90.0, 0.0, 'slower (-10.0%)'),
        (109.0, 0.05, '+9.0%, less than 10%'),
        (111.0, 0.05, ACCEPTED),
    ],
)
def test_a_setting_must_be_faster_than_the_margin_and_twice_the_noise(speed, noise, verdict):
    trial = ON_GPU._replace(speed=speed, noise=noise)
    assert judge('compile', trial, ON_GPU, ON_GPU, 0.05) == verdict


def test_the_losses_of_every_iteration_are_bounded_relative_to_the_plain_ones():
    plain = [{'l_pix': 0.5, 'l_gan': -0.3}, {'l_pix': 0.4, 'l_gan': 0.0}]
    other = [{'l_pix': 0.5, 'l_gan': -0.34}, {'l_pix': 0.41, 'l_gan': 0.01}]
    assert difference(other, plain) == pytest.approx(0.05)
    assert difference(plain, plain) == 0
    for loss, verdict in ((0.419, ACCEPTED), (0.421, 'losses differ by more than 5.0%')):
        trial = ON_GPU._replace(speed=200.0, losses=[{'l_pix': 0.5}, {'l_pix': loss}])
        assert judge('amp', trial, ON_GPU, ON_GPU, 0.05) == verdict


def test_losses_that_are_not_finite_are_never_accepted():
    for value in (math.nan, math.inf):
        trial = ON_GPU._replace(speed=200.0, losses=[{'l_pix': value}, {'l_pix': 0.4}])
        assert judge('amp', trial, ON_GPU, ON_GPU, 0.05) == 'losses differ by more than 5.0%'


def test_the_losses_are_compared_with_the_file_as_it_is_not_with_the_best_so_far():
    def outcome(settings):
        loss = 0.4 * (1 + 0.03 * len(settings))
        return {'speed': 100.0 * 2 ** len(settings), 'losses': [{'l_pix': 0.5}, {'l_pix': loss}]}

    accepted, rows = tuned(ON_GPU, outcome, ('amp', 'channels_last'))
    assert accepted == {'amp': 'bf16'}
    assert rows[-1] == ('channels_last=True', 'losses differ by more than 5.0%')


def test_each_setting_is_tried_on_top_of_those_accepted():
    accepted, rows = tuned(ON_GPU, faster(amp=1.5, compile=1.2))
    assert accepted == {'amp': 'bf16', 'compile': True}
    assert rows == [
        ('amp=bf16', ACCEPTED),
        ('channels_last=True', '+0.0%, less than 3%'),
        ('compile=True', ACCEPTED),
        ('batch_size_per_gpu=32', '+0.0%, less than 3%'),
    ]


def test_what_is_on_already_is_not_tried():
    settings = {**ON_GPU.settings, 'amp': 'fp16', 'channels_last': True, 'compile': {'mode': 'x'}}
    _, rows = tuned(ON_GPU._replace(settings=settings), faster())
    assert [row for row, _ in rows] == ['batch_size_per_gpu=32']


def test_without_a_gpu_its_settings_are_not_tried():
    _, rows = tuned(ON_CPU._replace(memory=9 * GIB), faster())
    assert [row for row, _ in rows] == ['compile=True', 'batch_size_per_gpu=32']


def test_workers_are_doubled_up_to_the_cores_while_data_are_waited_for():
    def outcome(settings):
        workers = settings['num_worker_per_gpu']
        return {'speed': 25.0 * workers, 'waiting': 1 - workers / 32}

    names = ['num_worker_per_gpu']
    waiting = ON_GPU._replace(waiting=0.8, cores=12)
    assert tuned(waiting, outcome, names)[1] == [
        ('num_worker_per_gpu=8', ACCEPTED),
        ('num_worker_per_gpu=12', ACCEPTED),
    ]
    assert tuned(waiting._replace(waiting=0.01), outcome, names)[1] == []
    assert tuned(waiting._replace(cores=4), outcome, names)[1] == []


def test_workers_are_tried_again_when_a_faster_step_waits_for_data():
    def outcome(settings):
        step, data = 150.0 if 'amp' in settings else 100.0, 30 * settings.get(WORKERS, 4)
        return {'speed': min(step, data), 'waiting': max(1 - data / step, 0.0)}

    accepted, rows = tuned(ON_GPU, outcome, ['num_worker_per_gpu', 'amp'])
    assert rows == [('amp=bf16', ACCEPTED), ('num_worker_per_gpu=8', ACCEPTED)]
    assert accepted == {'amp': 'bf16', 'num_worker_per_gpu': 8}


def test_a_trial_is_not_made_twice():
    _, rows = tuned(ON_GPU._replace(waiting=0.5), lambda _: {'waiting': 0.5}, [WORKERS, 'compile'])
    assert [row for row, _ in rows] == ['num_worker_per_gpu=8', 'compile=True']


def test_a_cache_and_a_prefetching_mode_are_tried_where_there_is_none():
    off = {'cache': False, 'prefetch_mode': None}
    for plain, mode in ((ON_GPU, 'cuda'), (ON_CPU, 'cpu')):
        plain = plain._replace(settings={**plain.settings, **off})
        accepted, _ = tuned(plain, faster(cache=2.0, prefetch_mode=2.0), off)
        assert accepted == {'cache': 'auto', 'prefetch_mode': mode}


def test_a_batch_is_doubled_until_samples_come_no_faster():
    def outcome(settings):
        return {'speed': 100.0 * min(settings['batch_size_per_gpu'] / 16, 4) ** 0.5}

    accepted, rows = tuned(ON_GPU, outcome, ['batch_size_per_gpu'])
    assert accepted == {'batch_size_per_gpu': 64}
    assert rows[-1] == ('batch_size_per_gpu=128', '+0.0%, less than 3%')


def test_a_batch_may_have_other_losses():
    outcome = {'speed': 200.0, 'losses': [{'l_pix': 5.0}, {'l_pix': 5.0}]}
    _, rows = tuned(ON_GPU, lambda _: outcome, ['amp', 'batch_size_per_gpu'])
    assert rows[0][1].startswith('losses differ')
    assert rows[1] == ('batch_size_per_gpu=32', ACCEPTED)


def test_a_gpu_that_is_full_ends_the_doubling_and_nothing_else():
    def outcome(settings):
        batch = settings.get('batch_size_per_gpu', 16)
        if batch > 64:
            return Failure(1, 'out of memory')
        return {'speed': 10.0 * batch}

    accepted, rows = tuned(ON_GPU, outcome, ['batch_size_per_gpu'])
    assert accepted == {'batch_size_per_gpu': 64}
    assert rows[-1] == ('batch_size_per_gpu=128', 'failed: out of memory')


def test_a_failure_leaves_the_other_settings_to_be_tried():
    def outcome(settings):
        return Failure(1, 'no compiler') if 'compile' in settings else faster(amp=2.0)(settings)

    accepted, rows = tuned(ON_GPU, outcome)
    assert accepted == {'amp': 'bf16'}
    assert ('compile=True', 'failed: no compiler') in rows
    assert rows[-1][0] == 'batch_size_per_gpu=32'


def test_a_batch_that_a_computer_may_have_no_room_for_is_not_tried():
    def outcome(settings):
        batch = settings['batch_size_per_gpu']
        return {'speed': 10.0 * batch, 'memory': batch * GIB // 4}

    accepted, _ = tuned(ON_CPU, outcome, ['batch_size_per_gpu'])
    assert accepted == {'batch_size_per_gpu': 64}
    assert tuned(ON_CPU, outcome, ['batch_size_per_gpu'], memory=0.3) == ({}, [])


def test_ctrl_c_prints_what_was_measured_so_far(monkeypatch, tmp_path, capsys):
    outcomes = iter([ON_GPU, ON_GPU._replace(speed=2 * ON_GPU.speed)])

    def trial(*_):
        if report := next(outcomes, None):
            return report
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_command, 'run_trial', trial)
    names = ('amp', 'channels_last')
    args = Namespace(opt='x.yml', seconds=1, settings=names, tolerance=0.05, memory=0.5)
    with pytest.raises(KeyboardInterrupt):
        tune_command.tune(args, tmp_path)
    out = capsys.readouterr().out
    assert '2.00 times as many samples per second with these lines' in out and 'amp: bf16' in out

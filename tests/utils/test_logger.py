import logging
import re
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from runs import Recorder
from tqdm import tqdm

import basicsr
from basicsr.utils import logger as logger_module
from basicsr.utils.logger import (
    AvgTimer,
    MessageLogger,
    get_env_info,
    get_root_logger,
    show_details,
)
from basicsr.utils.scalar_writers import ScalarWriter, TensorBoardWriter


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""

    class Clock:
        now = 100.0

    monkeypatch.setattr('time.perf_counter', lambda: Clock.now)
    return Clock


@pytest.fixture
def rank_1(monkeypatch):
    monkeypatch.setattr(logger_module, 'get_dist_info', lambda: (1, 2))


# ---------------------------------------------------------------------------- text


def test_a_line_has_the_format_of_the_reference(tmp_path, capsys):
    get_root_logger(log_file=tmp_path / 'x.log')
    logging.getLogger('basicsr.any.module').info('Größe %d', 3)
    line = (tmp_path / 'x.log').read_text(encoding='utf-8')
    assert re.fullmatch(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO: Größe 3\n', line)
    assert capsys.readouterr().err == line


def test_the_log_file_begins_with_what_was_said_before(tmp_path):
    logger = get_root_logger()
    logger.info('early')
    logger.debug('too detailed')
    assert get_root_logger(log_file=str(tmp_path / 'x.log')) is logger
    logger.warning('late')
    lines = (tmp_path / 'x.log').read_text().splitlines()
    assert [line.partition(' ')[2].partition(' ')[2] for line in lines] == [
        'INFO: early',
        'WARNING: late',
    ]


def test_details_stand_in_the_file_and_with_verbose_on_the_console(tmp_path, capsys):
    logger = get_root_logger(log_file=tmp_path / 'x.log')
    logger.info('hidden', extra={'file_only': True})
    show_details()
    logger.info('shown', extra={'file_only': True})
    assert (tmp_path / 'x.log').read_text().count('INFO: ') == 2
    assert capsys.readouterr().err.endswith('INFO: shown\n')


def test_a_second_run_has_a_file_of_its_own(tmp_path, capsys):
    for name in ('a', 'b'):
        get_root_logger(log_file=tmp_path / f'{name}.log').info('run %s', name)
    assert (tmp_path / 'a.log').read_text().count('\n') == 1
    assert 'run b' in (tmp_path / 'b.log').read_text()
    assert len(capsys.readouterr().err.splitlines()) == 2, 'each line is printed once'


def test_a_log_file_is_begun_anew(tmp_path):
    (tmp_path / 'x.log').write_text('old\n')
    get_root_logger(log_file=tmp_path / 'x.log').info('new')
    (line,) = (tmp_path / 'x.log').read_text().splitlines()
    assert line.endswith(' INFO: new')


def test_other_ranks_print_errors_alone_and_write_no_file(tmp_path, capsys, rank_1):
    logger = get_root_logger(log_file=tmp_path / 'x.log')
    logger.info('information')
    logger.warning('warning')
    logger.error('error')
    assert capsys.readouterr().err.splitlines()[0].endswith('ERROR: error')
    assert not (tmp_path / 'x.log').exists()


def test_a_logger_of_a_user_may_have_another_name_and_level(capsys):
    logger = get_root_logger('mine', logging.WARNING)
    logger.info('quiet')
    logger.warning('loud')
    assert capsys.readouterr().err.endswith('WARNING: loud\n')
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)


def test_lines_stand_above_a_progress_bar(capsys):
    logger = get_root_logger()
    with tqdm(total=3, desc='bar', file=sys.stderr) as bar:
        bar.update(1)
        logger.info('a line')
    assert re.search(r'\r +\r[^\r]*INFO: a line\n\rbar', capsys.readouterr().err)


def test_the_environment_names_versions_and_origin():
    lines = get_env_info().splitlines()
    assert lines[1:4] == [
        'Version Information:',
        f'\tBasicSR: {basicsr.__version__} from {Path(basicsr.__file__).parent}',
        f'\tPyTorch: {torch.__version__}',
    ]
    name, number = lines[4].split(': ')
    assert name == '\tTorchVision' and torchvision.__version__.split('+')[0] == number.split('+')[0]


def test_a_timer_gives_the_last_time_and_the_mean_of_recent_ones(clock):
    timer = AvgTimer(window=2)
    assert timer.get_avg_time() == 0
    times = []
    for seconds in (1, 3, 8):
        clock.now += seconds
        timer.record()
        times.append((timer.get_current_time(), timer.get_avg_time()))
    assert times == [(1, 1), (3, 2), (8, 8)]
    clock.now += 50  # a validation, which is no part of the time
    timer.start()
    clock.now += 2
    timer.record()
    assert (timer.get_current_time(), timer.get_avg_time()) == (2, 5)


OPT = {'name': 'tinytiny', 'train': {'total_iter': 5000}, 'logger': {}}


def test_an_iteration_line_has_the_format_of_the_reference(clock, caplog):
    caplog.set_level(logging.INFO)
    recorder = Recorder()
    line = MessageLogger(OPT, start_iter=1000, tb_logger=recorder)
    clock.now += 500
    log_vars = {'epoch': 7, 'iter': 2000, 'lrs': [2e-4, 1e-5], 'time': 0.51, 'data_time': 0.0034}
    line(log_vars | {'l_pix': np.float32(0.5), 'out_d_real': torch.tensor(-1.25)})
    assert caplog.messages == [
        '[tinyt..][epoch:  7, iter:   2,000, lr:(2.000e-04,1.000e-05,)] '
        '[eta: 0:25:00, time (data): 0.510 (0.003)] l_pix: 5.0000e-01 out_d_real: -1.2500e+00 '
    ]
    assert recorder.values == {
        ('losses/l_pix', 2000): 0.5,
        ('out_d_real', 2000): -1.25,
        ('lr', 2000): 2e-4,
        ('lr_1', 2000): 1e-5,
        ('time/iteration', 2000): 0.51,
        ('time/data', 2000): 0.0034,
    }
    assert all(type(value) is float for value in recorder.values.values())
    assert recorder.flushed == 1
    assert len(log_vars) == 5, 'the dict of the caller is not changed'


def test_an_iteration_line_needs_no_times_and_no_writer(caplog):
    caplog.set_level(logging.INFO)
    MessageLogger(OPT)({'epoch': 0, 'iter': 1, 'lrs': [1e-3], 'l_pix': 2})
    expected = '[tinyt..][epoch:  0, iter:       1, lr:(1.000e-03,)] l_pix: 2.0000e+00 '
    assert caplog.messages == [expected]


def test_the_clock_of_the_time_left_may_be_started_anew(clock, caplog):
    caplog.set_level(logging.INFO)
    line = MessageLogger(OPT)
    clock.now += 1000  # the first step, which starts workers
    line.reset_start_time()
    clock.now += 99
    line({'epoch': 0, 'iter': 100, 'lrs': [], 'time': 1})
    assert '[eta: 1:21:40, time (data): 1.000 (0.000)]' in caplog.text


def test_the_first_line_takes_the_time_of_its_step_for_the_time_left(clock, caplog):
    caplog.set_level(logging.INFO)
    MessageLogger(OPT)({'epoch': 0, 'iter': 1, 'lrs': [], 'time': 1})
    assert '[eta: 1:23:19, time (data): 1.000 (0.000)]' in caplog.text


# ---------------------------------------------------------------------------- full disks


@pytest.fixture
def small_files():
    """Within the block no file can grow beyond so many bytes, as on a full disk."""

    @contextmanager
    def limit(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


def test_a_log_file_that_cannot_be_written_costs_one_warning(tmp_path, capsys, small_files):
    root = get_root_logger(log_file=tmp_path / 'x.log')
    with small_files(0):
        for number in range(5):
            root.info('line %d', number)
    root.info('and on')
    printed = capsys.readouterr().err
    assert [f'line {number}' in printed for number in range(5)] == [True] * 5
    assert printed.count('Lines of the log file are lost: cannot write') == 1
    assert 'Traceback' not in printed
    assert 'and on' in (tmp_path / 'x.log').read_text()


def test_an_error_of_a_log_line_itself_is_still_shown(tmp_path, capsys):
    root = get_root_logger(log_file=tmp_path / 'x.log')
    root.info('%d', 'no number')
    assert 'TypeError' in capsys.readouterr().err


def test_events_that_cannot_be_written_cost_one_warning(tmp_path, capsys, small_files):
    """TensorBoard's thread would print a traceback of its own."""
    get_root_logger()
    writer = ScalarWriter(TensorBoardWriter(tmp_path))
    with small_files(0):
        for step in range(3):
            writer.add_scalar('a', 1.0, step)
            writer.flush()
    writer.close()
    printed = capsys.readouterr().err
    assert printed.count('TensorBoardWriter failed and is switched off') == 1
    assert 'Traceback' not in printed


def test_the_error_of_a_dead_loader_process_gets_through_a_log_line(tmp_path, monkeypatch):
    """torch raises it in a signal's handler, wherever the program is."""
    root = get_root_logger(log_file=tmp_path / 'x.log')

    def die(_):
        raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed. ')

    for handler in root.handlers:
        with monkeypatch.context() as patch:
            patch.setattr(handler.formatter, 'format', die)
            with pytest.raises(RuntimeError, match='pid 7'):
                root.info('a line')

"""Whom a watchdog blames; how runs end by it is in tests/test_faults.py."""

import torch.distributed as dist

from basicsr.run import watchdog
from basicsr.run.watchdog import Report, verdict
from basicsr.utils import progress
from basicsr.utils.dist_util import init_dist, limit_of_operations
from basicsr.utils.progress import Progress, note


def report(rank, iteration=5, waits=True, place='x.py:1 in f', phase='step'):
    who = f'host{rank}, pid 1{rank}'
    return Report(phase, iteration, 9, 9, rank, who, 9, place, waits)


def test_who_does_not_report_is_to_blame():
    reports = {0: report(0, waits=False), 1: report(1, iteration=4), 2: report(2)}
    text, ranks = verdict(reports, [2], 60)
    assert ranks == [2]
    assert text.startswith('rank 2 has not made progress for 60 s')
    assert 'rank 2 (host2, pid 12): last seen in iteration 5 (phase: step), at x.py:1 in f.' in text
    assert 'It does not answer' in text


def test_who_does_not_wait_is_to_blame():
    reports = {0: report(0), 1: report(1, waits=False, phase='data'), 2: report(2)}
    text, ranks = verdict(reports, [], 60)
    assert ranks == [1]
    assert 'rank 1 (host1, pid 11): last seen in iteration 5 (phase: data)' in text
    assert 'Waiting: rank 0 (host0' in text
    assert 'answer' not in text


def test_who_is_behind_is_to_blame_where_none_waits():
    """On GPUs the others run ahead until they read a number."""
    reports = {0: report(0, 9, waits=False), 1: report(1, 7, waits=False), 2: report(2, 9)}
    assert verdict(reports, [], 60)[1] == [1]


def test_all_are_shown_where_each_waits_for_the_others():
    assert verdict({0: report(0), 1: report(1)}, [], 60)[1] == [0, 1]


def test_a_note_costs_no_more_than_attributes(monkeypatch):
    own = Progress()
    monkeypatch.setattr(progress, 'current', own)
    note('data', 4)
    note('saving')
    assert own == Progress('saving', 4, steps=0, notes=2)


def test_one_process_needs_no_watchdog(monkeypatch):
    for name, value in {'RANK': 0, 'WORLD_SIZE': 1, 'LOCAL_RANK': 0, 'MASTER_PORT': 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    init_dist('pytorch', timeout=5)
    assert dist.is_initialized()
    assert watchdog._watchdog is None
    assert watchdog.tell_of_failure(RuntimeError('x')) is False


def test_who_has_not_finished_the_step_of_an_iteration_is_to_blame():
    """The others wait in a save or for numbers of the device, of the same iteration."""
    reports = {
        0: report(0, waits=False, phase='saving'),
        1: report(1, waits=False, phase='data'),
        2: report(2, waits=False, phase='step'),
    }
    assert verdict(reports, [], 60)[1] == [1]


def test_before_and_in_the_first_steps_there_is_more_time(monkeypatch):
    watch = watchdog.Watchdog.__new__(watchdog.Watchdog)
    watch.timeout, watch.interval = 12, 0.5
    own = Progress()
    for module in (progress, watchdog):
        monkeypatch.setattr(module, 'current', own)
    limits = [watch.limit]
    for phase in ('step', 'saving', 'step', 'data', 'step'):
        note(phase)
        limits.append(watch.limit)
    assert limits == [120, 120, 12, 120, 12, 12]
    assert watch.patience == 12 - 1.5
    note('start')
    watch.timeout = 1800
    assert watch.limit == 1800


def test_operations_wait_as_long_as_the_start_may_take():
    assert limit_of_operations(12).total_seconds() == 120
    assert limit_of_operations(1800).total_seconds() == 1800


def test_an_end_is_told_for_what_it_is():
    ends = [watchdog._how_it_ends(e) for e in (KeyboardInterrupt(), SystemExit(0), OSError('x\ny'))]
    assert ends == [
        'was interrupted (SIGINT)',
        'has left the program: sys.exit(0)',
        'has failed: OSError: x',
    ]

"""Whom a watchdog blames; how runs end by it is in tests/test_faults.py."""

import dataclasses
import faulthandler
import json
from types import SimpleNamespace

import pytest
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


def test_notes_keep_the_iteration_and_are_counted_as_steps_are(monkeypatch):
    own = Progress()
    monkeypatch.setattr(progress, 'current', own)
    note('data', 4)
    note('step')
    assert own == Progress('step', 4, steps=1, notes=2)
    note('saving')
    assert own == Progress('saving', 4, steps=1, notes=3)


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


class Clock:
    """Stands for the module ``time``: it goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, 'time', clock)
    return clock


@pytest.fixture
def own(monkeypatch):
    """The progress of this process, which is in the midst of a run."""
    own = Progress('data', 5, steps=9)
    for module in (progress, watchdog):
        monkeypatch.setattr(module, 'current', own)
    return own


@pytest.fixture
def watch(own, clock, monkeypatch):
    """The watchdog of rank 0 of three, without its threads and connection; limit 12 s."""
    monkeypatch.setenv('MASTER_ADDR', 'node1')
    monkeypatch.setenv('MASTER_PORT', '29500')
    watch = watchdog.Watchdog.__new__(watchdog.Watchdog)
    watch.rank, watch.world_size, watch.timeout, watch.interval = 0, 3, 12, 0.5
    watch._reports, watch._moved, watch._beaten, watch.verdict = {}, {}, {}, None
    watch._answered, watch._store = clock.now, dist.HashStore()
    watch._store.set('end', '')
    return watch


@pytest.fixture
def hear(watch, clock):
    """Let time pass, then have ranks report, and the watchdog listen."""
    reports = {rank: report(rank, waits=rank != 2) for rank in range(3)}

    def call(seconds, moved=(), silent=()):
        clock.now += seconds
        for rank, its in reports.items():
            its.notes += rank in moved
            its.beat += rank not in silent
            watch._store.set(str(rank), json.dumps(dataclasses.asdict(its)))
        watch._listen()
        watch._answered = clock.now

    call(0)
    return call


def test_before_and_in_the_first_steps_there_is_more_time(watch, own):
    own.phase, own.steps = 'start', 0
    limits = [watch.limit]
    for phase in ('step', 'saving', 'step', 'data', 'step'):
        note(phase)
        limits.append(watch.limit)
    assert limits == [120, 120, 12, 120, 12, 12]
    assert watch.patience == 12 - 1.5
    note('start')
    watch.timeout = 1800
    assert watch.limit == 1800


def test_rank_0_blames_only_when_no_rank_has_got_on_for_its_patience(watch, hear, clock):
    hear(10.5)
    assert watch._judge(clock.now) is None, 'as long as its patience'
    hear(0.5, moved=[1])
    assert watch._judge(clock.now) is None, 'rank 1 gets on'
    hear(10.5)
    assert watch._judge(clock.now) is None
    hear(0.1)
    end = watch._judge(clock.now)
    assert (end['ranks'], end['judge']) == ([2], 0), 'rank 2 is the one that does not wait'
    assert end['reason'].startswith('rank 2 has not made progress for 12 s')


def test_a_rank_that_has_fallen_silent_is_blamed_although_others_get_on(watch, hear, clock):
    hear(10.5, moved=[0, 2], silent=[1])
    assert watch._judge(clock.now) is None
    hear(0.1, moved=[0, 2], silent=[1])
    end = watch._judge(clock.now)
    assert end['ranks'] == [1]
    assert 'rank 1 (host1, pid 11)' in end['reason']
    assert 'It does not answer' in end['reason']


def test_the_others_watch_rank_0_alone(watch, hear, clock):
    watch.rank = 1
    watch._reports, watch._moved, watch._beaten = {}, {}, {}
    hear(0)
    assert watch._reports.keys() == {0}
    hear(100, silent=[2])
    assert watch._judge(clock.now) is None, 'rank 0 answers: it is the one to judge'
    hear(10.6, silent=[0])
    assert watch._judge(clock.now)['ranks'] == [0]


def test_a_store_that_does_not_answer_is_named_before_anyone_is_blamed(watch, hear, clock):
    watch.rank = 1
    clock.now += 9.5
    assert watch._judge(clock.now) is None
    clock.now += 0.1
    end = watch._judge(clock.now)
    assert (end['ranks'], end['judge']) == ([1], 1)
    assert 'the store at node1:29500 has not answered for 12 s' in end['reason']
    assert 'Its last report: rank 0 (host0, pid 10): last seen in iteration 5' in end['reason']


def test_the_first_verdict_is_that_of_all(watch, hear, clock):
    first = {'reason': 'rank 1 has failed: OSError: x', 'ranks': [], 'judge': 1}
    assert watch._publish(first) == first
    hear(10.6)
    assert watch._judge(clock.now) == first
    assert watch._listen() == first


def test_a_process_is_looked_at_when_its_own_notes_stand_still(watch, own, clock, monkeypatch):
    """Then once every interval, until there is a verdict, by which it ends."""
    monkeypatch.setattr(faulthandler, 'dump_traceback_later', lambda *_, **__: None)
    monkeypatch.setattr(watch, '_talk', lambda: None, raising=False)
    judged, ends = [], []

    def wait(seconds):
        clock.now += seconds
        if clock.now == 1005:
            note('data')
        return False

    def judge(now):
        judged.append(now)
        return {'reason': 'x', 'ranks': [2], 'judge': 0} if len(judged) == 3 else None

    watch.stopped = SimpleNamespace(wait=wait)
    watch._judge, watch._end = judge, lambda **end: ends.append(end)
    watch.run()
    assert judged == [1016, 1016.5, 1017], '10.5 s after the note have to be over'
    assert ends == [{'reason': 'x', 'ranks': [2], 'judge': 0}]


@pytest.mark.parametrize(
    ('end', 'level', 'stacks', 'pause', 'status'),
    [
        ({'ranks': [0, 2], 'judge': 0}, 'ERROR', 1, 1.5, 3),
        ({'ranks': [2], 'judge': 0}, 'ERROR', 0, 1.5, 3),
        ({'ranks': [2], 'judge': 1}, 'WARNING', 0, 1.5, 3),
        ({'ranks': [], 'judge': 2}, 'WARNING', 0, 12, 1),
    ],
)
def test_a_process_ends_with_the_status_of_a_hang_or_of_an_error(
    watch, monkeypatch, caplog, end, level, stacks, pause, status
):
    """The judge tells why, those to blame show their stacks, and others may come to an end."""
    calls, pauses = [], []
    monkeypatch.setattr(faulthandler, 'dump_traceback_later', lambda *_, **__: None)
    monkeypatch.setattr(watchdog, '_show_stacks', lambda: calls.append('stacks'))
    monkeypatch.setattr(watchdog, '_exit', calls.append)
    watch.stopped = SimpleNamespace(wait=lambda seconds: pauses.append(seconds))
    watch._end('why', **end)
    assert [record.levelname for record in caplog.records] == [level]
    assert caplog.messages[0].endswith('why')
    assert (calls, pauses) == (['stacks'] * stacks + [status], [pause])


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

import logging
import socket

import pytest
import torch

from basicsr.run import cores
from basicsr.run.cores import CoreWait, report_cores, share_cores, usable_cores


@pytest.fixture
def of_ranks(monkeypatch):
    """Let ranks be given by host (None: this one) and cores, the first one being this.

    Returns the list of the numbers of threads that torch has had.
    """

    def put(ranks, omp=None):
        here = [(host or socket.gethostname(), own) for host, own in ranks]
        monkeypatch.setattr(cores, 'usable_cores', lambda: ranks[0][1])
        monkeypatch.setattr(cores, 'get_dist_info', lambda: (0, len(ranks)))
        monkeypatch.setattr(cores, 'gather_lists', lambda own: here if len(here) > 1 else own)
        threads = [omp or 16]
        monkeypatch.setattr(torch, 'set_num_threads', threads.append)
        monkeypatch.setattr(torch, 'get_num_threads', lambda: threads[-1])
        monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
        if omp:
            monkeypatch.setenv('OMP_NUM_THREADS', str(omp))
        return threads

    return put


ALL = set(range(16))


@pytest.mark.parametrize(
    ('ranks', 'expected'),
    [
        ([(None, ALL)], (4, 16)),
        ([(None, {3, 5})], (2, 16)),
        ([(None, ALL)] * 2, (4, 8)),
        ([(None, ALL)] * 8, (2, 2)),
        ([(None, ALL)] * 32, (1, 1)),
        ([(None, ALL)] * 2 + [('another', ALL)] * 2, (4, 8)),
        ([(None, set(range(8))), (None, set(range(8, 16)))], (4, 8)),  # as srun binds its tasks
    ],
)
def test_ranks_of_a_host_share_its_cores_and_one_process_keeps_its_threads(
    ranks, expected, of_ranks
):
    threads = of_ranks(ranks)
    assert (min(4, share_cores()), threads[-1]) == expected


def test_what_the_user_says_is_kept(of_ranks):
    threads = of_ranks([(None, ALL)] * 8, omp=3)
    share_cores()
    assert threads == [3]


@pytest.mark.parametrize(
    ('ranks', 'threads', 'workers', 'on_gpu', 'message'),
    [
        (2, 9, 2, False, 'for 2 ranks of 9 threads and 2 loader processes'),
        (2, 8, 4, False, ''),
        (2, 2, 9, False, 'for 2 ranks of 2 threads and 9 loader processes'),
        (2, 1, 2, False, 'for 2 ranks of 1 threads and 2 loader processes'),
        (1, 16, 4, False, ''),  # what a run has by default
        (1, 8, 2, False, ''),
        (1, 20, 4, False, 'Cores: 16 on this host, for 1 ranks of 20 threads'),
        (2, 16, 8, True, ''),  # the GPU computes, not the threads
        (2, 16, 9, True, 'for 2 ranks of 1 threads and 9 loader processes'),
    ],
)
def test_one_line_says_that_cores_are_too_few_or_idle(
    ranks, threads, workers, on_gpu, message, of_ranks, caplog
):
    caplog.set_level(logging.INFO)
    of_ranks([(None, ALL)] * ranks, omp=threads)
    report_cores(workers, on_gpu)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(message)
    assert message in ''.join(lines)


def test_a_process_bound_to_a_core_may_use_that_alone(monkeypatch):
    monkeypatch.setattr('os.sched_getaffinity', lambda _: {5}, raising=False)
    assert usable_cores() == {5}
    monkeypatch.delattr('os.sched_getaffinity')
    monkeypatch.setattr('os.cpu_count', lambda: 3)
    assert usable_cores() == {0, 1, 2}


def test_a_process_that_often_waits_for_a_core_says_so_once(tmp_path, monkeypatch, caplog):
    counted = tmp_path / 'schedstat'  # nanoseconds on a core, nanoseconds ready, time slices
    monkeypatch.setattr(cores, '_DELAYS', counted)
    counted.write_text('5 1000000000 7')
    monkeypatch.setattr(cores.time, 'perf_counter', iter([0.0, 10.0, 20.0, 30.0]).__next__)
    waits = CoreWait()
    counted.write_text('5 2900000000 7')
    waits.report()
    assert caplog.messages == []
    for waited in ('6900000000', '10900000000'):
        counted.write_text(f'5 {waited} 7')
        waits.report()
    (text,) = caplog.messages
    assert text.startswith('Waiting for a core 40 % of the time: other programs')


def test_nothing_is_said_of_cores_where_nobody_counts(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cores, '_DELAYS', tmp_path / 'missing')
    CoreWait().report()
    assert caplog.messages == []

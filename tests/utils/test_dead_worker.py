"""A loader process that dies is explained in one line."""

from basicsr.utils.dead_worker import why_worker_died


def test_causes_are_searched_and_other_errors_are_none():
    inner = RuntimeError('DataLoader worker (pid 12) is killed by signal: Bus error. It is …')
    crash = RuntimeError('DataLoader worker (pid 7) is killed by signal: Segmentation fault. ')
    assert '(pid 7) crashed (signal 11, Segmentation fault)' in str(why_worker_died(crash))
    outer = ValueError('something else')
    outer.__cause__ = inner
    assert '/dev/shm is full' in str(why_worker_died(outer))
    gone = RuntimeError('DataLoader worker (pid(s) 12, 13) exited unexpectedly')
    assert 'worker (pid 12, 13) ended without an error' in str(why_worker_died(gone))
    assert why_worker_died(RuntimeError('CUDA out of memory')) is None
    assert why_worker_died(None) is None

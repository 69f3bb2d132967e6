"""Failures of memory and processes are explained in one line."""

import errno
import os
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch

from basicsr.run import failures
from basicsr.run.failures import explain, why_worker_died
from basicsr.utils.dead_worker import note_signals


def test_causes_are_searched_and_other_errors_are_none():
    inner = RuntimeError('DataLoader worker (pid 12) is killed by signal: Bus error. It is …')
    crash = RuntimeError('DataLoader worker (pid 7) is killed by signal: Segmentation fault. ')
    assert '(pid 7) crashed (signal 11, Segmentation fault)' in str(why_worker_died(crash))
    outer = ValueError('something else')
    outer.__cause__ = inner
    assert str(why_worker_died(outer)).startswith('DataLoader worker (pid 12) was killed (signal 7')
    gone = RuntimeError('DataLoader worker (pid(s) 12, 13) exited unexpectedly')
    assert 'worker (pid 12, 13) ended without an error' in str(why_worker_died(gone))
    assert why_worker_died(RuntimeError('CUDA out of memory')) is None
    assert explain(ValueError('No space left on device')) is None
    assert explain(OSError(errno.ENOSPC, 'No space left on device', 'x.pth')) is None
    assert explain(None) is None


def test_a_signal_is_found_behind_an_error_that_only_says_that_a_worker_is_gone():
    """As raised where the handler of SIGCHLD interrupts the loader while it waits for a batch."""
    gone = RuntimeError('DataLoader worker (pid(s) 12) exited unexpectedly')
    gone.__cause__ = RuntimeError('DataLoader worker (pid 12) is killed by signal: Killed. ')
    assert 'worker (pid 12) was killed (signal 9)' in str(why_worker_died(gone))


def test_the_exit_status_of_a_worker_tells_the_signal_where_torch_has_missed_it():
    """As where the loader's thread sees first that the process is gone, or it was not its child."""
    Worker = namedtuple('Worker', 'pid exitcode sentinel')
    runs, _ = os.pipe()  # nothing is there to read, as with a process that has not ended
    workers = [Worker(11, None, runs), Worker(12, -9, runs), Worker(13, 0, runs)]
    gone = RuntimeError('DataLoader worker (pid(s) 12) exited unexpectedly')
    note_signals(gone, workers)
    assert 'worker (pid 12) was killed (signal 9)' in str(why_worker_died(gone))
    lost = FileNotFoundError('of the socket by which the worker hands over a batch')
    note_signals(lost, workers)
    assert 'worker (pid 12) was killed (signal 9)' in str(why_worker_died(lost))
    other = RuntimeError('something else')
    note_signals(other, [workers[0], workers[2]])
    assert why_worker_died(other) is None


def test_a_worker_that_somebody_has_ended_has_not_crashed():
    ended = RuntimeError('DataLoader worker (pid 7) is killed by signal: Terminated. ')
    assert 'was ended by a signal from outside (signal 15' in str(why_worker_died(ended))


def semaphore_error():
    """As a queue to a loader process raises it."""
    line = 'raise OSError(28, "No space left on device")'
    code = compile(line, '/x/multiprocessing/synchronize.py', 'exec')
    with pytest.raises(OSError) as error:
        exec(code)
    return error.value


@pytest.mark.parametrize(
    'error',
    [
        RuntimeError(
            'Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback …\n'
            'RuntimeError: unable to allocate shared memory(shm) for file </torch_5_41_5>: No '
            'space left on device (28)'
        ),
        RuntimeError('unable to write to file </torch_5_41_5>: No space left on device (28)'),
        RuntimeError('DataLoader worker (pid 12) is killed by signal: Bus error. '),
        semaphore_error(),
    ],
)
def test_full_shared_memory_is_named_with_its_size_and_remedies(error, monkeypatch, tmp_path):
    monkeypatch.setattr(failures, '_SHARED_MEMORY', tmp_path)
    Usage = namedtuple('Usage', 'total used free')
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: Usage(2 * 2**20, 0, 0))
    text = str(explain(error))
    assert '/dev/shm (2.0 MB)' in text
    for remedy in ('--shm-size', 'num_worker_per_gpu', 'batch_size_per_gpu'):
        assert remedy in text


def in_order(text, *words):
    places = [text.index(word) for word in words]
    return places == sorted(places)


OPTIONS = ('batch_size_per_gpu', 'gt_size', 'accumulate', 'amp', 'checkpoint_activations')
WORKERS = ('num_worker_per_gpu', 'num_prefetch_queue')


def of_torch():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    return error.value


def of_numpy():
    with pytest.raises(MemoryError) as error:
        np.empty(2**60, np.uint8)
    return error.value


@pytest.mark.parametrize(
    'error',
    [of_torch(), of_numpy(), MemoryError(), OSError(errno.ENOMEM, 'Cannot allocate memory')],
)
def test_without_memory_batch_and_crop_come_before_workers(error):
    text = str(explain(error))
    assert text.startswith('Out of memory of the machine (')
    assert in_order(text, *OPTIONS, *WORKERS)


def test_a_killed_worker_is_a_matter_of_the_batch_first():
    killed = RuntimeError('DataLoader worker (pid 12) is killed by signal: Killed. ')
    gone = RuntimeError('DataLoader worker (pid(s) 12) exited unexpectedly')
    assert all(in_order(str(explain(error)), *OPTIONS, *WORKERS) for error in (killed, gone))


def test_of_a_gpu_it_is_said_what_was_asked_for_and_nothing_of_workers():
    error = torch.OutOfMemoryError(
        'CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.00 GiB '
        'of which 2.00 GiB is free. Of the allocated memory 12 GiB is allocated by PyTorch.'
    )
    text = str(explain(error))
    assert text.startswith('Out of memory of the GPU (OutOfMemoryError: CUDA out of memory. Tried')
    assert '2.00 GiB is free.)' in text and 'allocated by' not in text
    assert in_order(text, *OPTIONS)
    assert not any(word in text for word in WORKERS)


def test_in_a_validation_it_is_the_size_of_the_images():
    text = str(explain(torch.OutOfMemoryError('CUDA out of memory.'), 'validation'))
    assert 'use smaller ones' in text
    assert 'batch_size' not in text

"""Explains failures that PyTorch and the system report in their own terms.

Out of memory, /dev/shm full, a loader process killed: what happened, and which options to change.
"""

import errno
import re
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from .text import sizeof_fmt

_SHARED_MEMORY = Path('/dev/shm')
# As torch names workers: by the signal, where it has seen one, or as processes that are gone.
_BY_SIGNAL = re.compile(r'DataLoader worker \(pid (\d+)\) is killed by signal: (.+?)\. ')
_GONE = re.compile(r'DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) exited unexpectedly')
_NUMBERS = {signal.strsignal(number): number for number in signal.valid_signals()}
_SENT = [getattr(signal, name, None) for name in ('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1')]
# Of torch on CPUs and GPUs, cuBLAS and cuDNN, numpy, and OpenCV.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|_STATUS_ALLOC_FAILED|Unable to allocate [\d.]+ \w*B|"
    r'Insufficient memory|Cannot allocate memory',
    re.IGNORECASE,
)
_GPU = re.compile(r'CUDA|CUDNN|CUBLAS|HIP|MPS|XPU')

_LESS = (
    'lower datasets.train.batch_size_per_gpu or gt_size, or set train.accumulate (the batch in so '
    'many parts), train.amp: bf16 or train.checkpoint_activations: true'
)
_FEWER = 'num_worker_per_gpu or num_prefetch_queue'
_WHOLE = (
    'images are restored whole in a validation or test: use smaller ones, crops of them, or a '
    'smaller network'
)
_ALONE = (
    'To see where it happens, train with num_worker_per_gpu: 0, prefetch_mode: ~ and '
    'pin_memory: false.'
)


def explain(error: BaseException | None, phase: str = 'step') -> str | None:
    """What to tell the user of an error that is a matter of memory or processes; else None.

    Args:
        phase: What the process was doing, see ``watchdog.note``.
    """
    if dead := why_worker_died(error):
        return dead
    for link in _chain(error):
        if _is_shared_memory_full(link):
            return _shared_memory_full()
        if isinstance(link, MemoryError) or (
            isinstance(link, RuntimeError | OSError) or type(link).__module__ == 'cv2'
        ):
            text = f'{type(link).__name__}: {link}'
            if isinstance(link, MemoryError) or _NO_MEMORY.search(text):
                return _out_of_memory(text, phase)
    return None


def why_worker_died(error: BaseException | None) -> str | None:
    """What to tell the user if a loader process ended without a Python error; else None."""
    # An outer error may only say that a worker is gone where an inner one has the signal.
    texts = [
        f'{text} ' for link in _chain(error) for text in (link, *getattr(link, '__notes__', ()))
    ]
    for text in texts:
        if found := _BY_SIGNAL.search(text):
            return _killed(found[1], found[2])
    for text in texts:
        if found := _GONE.search(text):
            return (
                f'DataLoader worker (pid {found[1]}) ended without an error, as if it had been '
                f'killed. Where the machine ran out of memory, {_LESS}; then lower {_FEWER}. '
                f'{_ALONE}'
            )
    return None


def note_signals(error: Exception, workers: Sequence[Any]) -> None:
    """Add to the error of a loader by which signals its processes were ended.

    torch learns of it from a handler of SIGCHLD. Where the loader's thread meets the loss first, or
    a fork server is the parent, the exit status alone tells.
    """
    if workers and isinstance(error, ConnectionError | EOFError):  # it may still be about to end
        connection.wait([worker.sentinel for worker in workers], timeout=5)
    for worker in workers:
        if (worker.exitcode or 0) < 0:
            name = signal.strsignal(-worker.exitcode)
            error.add_note(f'DataLoader worker (pid {worker.pid}) is killed by signal: {name}.')


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _killed(pid: str, name: str) -> str:
    number = _NUMBERS.get(name, 0)
    who = f'DataLoader worker (pid {pid})'
    if number == signal.SIGKILL:
        return (
            f'{who} was killed (signal 9), most likely because the machine ran out of memory: '
            f'{_LESS}; then lower {_FEWER}.'
        )
    if number == signal.SIGBUS:
        return f'{who} was killed (signal {int(number)}, {name}). {_shared_memory_full()}'
    if number in _SENT:
        return f'{who} was ended by a signal from outside (signal {int(number)}, {name}).'
    return f'{who} crashed (signal {int(number)}, {name}) in compiled code. {_ALONE}'


def _is_shared_memory_full(error: BaseException) -> bool:
    text = str(error)
    if 'No space left on device' not in text:
        return False
    if '</torch_' in text or 'shared memory' in text:
        return True
    # A semaphore of a queue to a loader process: it has no file name.
    frames = traceback.extract_tb(error.__traceback__)
    return getattr(error, 'errno', None) == errno.ENOSPC and any(
        'multiprocessing' in Path(frame.filename).parts for frame in frames[-1:]
    )


def _shared_memory_full() -> str:
    has_size = _SHARED_MEMORY.is_dir()
    size = f' ({sizeof_fmt(shutil.disk_usage(_SHARED_MEMORY).total)})' if has_size else ''
    return (
        f'/dev/shm{size}, the shared memory by which loader processes hand over batches, is full: '
        'enlarge it (docker run --shm-size=8g), or lower datasets.train.num_worker_per_gpu, '
        'batch_size_per_gpu or gt_size. num_worker_per_gpu: 0 with prefetch_mode: ~ and '
        'pin_memory: false starts no loader process.'
    )


def _out_of_memory(text: str, phase: str) -> str:
    is_gpu = bool(_GPU.search(text))
    lines = [line for line in text.splitlines() if _NO_MEMORY.search(line) or 'MemoryError' in line]
    said = lines[-1].partition(' Of the allocated memory')[0].strip()
    training = _LESS if is_gpu else f'{_LESS}; then lower {_FEWER}'
    remedy = _WHOLE if phase == 'validation' else training
    return f'Out of memory of the {"GPU" if is_gpu else "machine"} ({said}): {remedy}.'

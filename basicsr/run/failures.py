"""Explain out-of-memory errors, a full /dev/shm and killed DataLoader workers to the user.

Low-level errors of PyTorch and the system become a message that names the options to change.
"""

import errno
import re
import shutil
import signal
import traceback
from pathlib import Path

from basicsr.utils.dead_worker import dead_worker, error_chain
from basicsr.utils.text import sizeof_fmt

_SHARED_MEMORY = Path('/dev/shm')
_NUMBERS = {signal.strsignal(number): number for number in signal.valid_signals()}
_SENT = [getattr(signal, name, None) for name in ('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1')]
# Out-of-memory messages of torch on CPUs and GPUs, cuBLAS, cuDNN, numpy, and OpenCV.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|_STATUS_ALLOC_FAILED|Unable to allocate [\d.]+ \w*B|"
    r'Insufficient memory|Cannot allocate memory',
    re.IGNORECASE,
)
_GPU = re.compile(r'CUDA|CUDNN|CUBLAS|HIP|MPS|XPU')

_LESS = (
    'lower datasets.train.batch_size_per_gpu or gt_size, or set train.accumulate (micro-batches), '
    'train.amp: bf16 or train.checkpoint_activations: true'
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
    """Explain an error caused by lack of memory or a killed worker; else return None.

    Args:
        phase: What the process was doing, see ``progress.note``.
    """
    if dead := why_worker_died(error):
        return dead
    for link in error_chain(error):
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
    """Explain the death of a loader process without a Python error; else return None."""
    if (dead := dead_worker(error)) is None:
        return None
    pid, name = dead
    if name is not None:
        return _killed(pid, name)
    return (
        f'DataLoader worker (pid {pid}) ended without an error, as if it had been killed. Where '
        f'the machine ran out of memory, {_LESS}; then lower {_FEWER}. {_ALONE}'
    )


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
    # A semaphore of a worker's queue, whose error has no file name.
    frames = traceback.extract_tb(error.__traceback__)
    return getattr(error, 'errno', None) == errno.ENOSPC and any(
        'multiprocessing' in Path(frame.filename).parts for frame in frames[-1:]
    )


def _shared_memory_full() -> str:
    has_size = _SHARED_MEMORY.is_dir()
    size = f' ({sizeof_fmt(shutil.disk_usage(_SHARED_MEMORY).total)})' if has_size else ''
    return (
        f'/dev/shm{size}, the shared memory that loader processes pass batches in, is full: '
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

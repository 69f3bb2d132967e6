"""Saying why a loader process has died."""

import re
import signal

# As torch names them: by the signal, where it has seen one, or as processes that are gone.
_BY_SIGNAL = re.compile(r'DataLoader worker \(pid (\d+)\) is killed by signal: (.+?)\. ')
_GONE = re.compile(r'DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) exited unexpectedly')
_NUMBERS = {signal.strsignal(number): number for number in signal.valid_signals()}


def why_worker_died(error: BaseException | None) -> str | None:
    """What to tell the user if a loader process ended without a Python error; else None."""
    while error is not None:
        text = f'{error} '
        if found := _BY_SIGNAL.search(text):
            return _killed(found[1], found[2])
        if found := _GONE.search(text):
            return (
                f'DataLoader worker (pid {found[1]}) ended without an error, as if it had been '
                f'killed. {_MEMORY} {_ALONE}'
            )
        error = error.__cause__ or error.__context__
    return None


_MEMORY = (
    'Where the machine ran out of memory, lower datasets.train.num_worker_per_gpu or '
    'num_prefetch_queue.'
)
_ALONE = (
    'To see where it happens, train with num_worker_per_gpu: 0, prefetch_mode: ~ and '
    'pin_memory: false.'
)


def _killed(pid: str, name: str) -> str:
    number = _NUMBERS.get(name, 0)
    who = f'DataLoader worker (pid {pid})'
    if number == signal.SIGKILL:
        return (
            f'{who} was killed (signal 9), most likely because the machine ran out of memory: '
            'lower datasets.train.num_worker_per_gpu or num_prefetch_queue.'
        )
    if number == signal.SIGBUS:
        return (
            f'{who} was killed (signal {int(number)}, {name}), most likely because /dev/shm is '
            'full: enlarge it (docker run --shm-size), or lower datasets.train.num_worker_per_gpu.'
        )
    return f'{who} crashed (signal {int(number)}, {name}) in compiled code. {_ALONE}'

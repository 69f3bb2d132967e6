"""Recognise the errors that torch raises when a DataLoader worker process has died."""

import re
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

# Torch's two messages: with the signal, if it saw one, or only that processes are gone.
_BY_SIGNAL = re.compile(r'DataLoader worker \(pid (\d+)\) is killed by signal: (.+?)\. ')
_GONE = re.compile(r'DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) exited unexpectedly')


def dead_worker(error: BaseException | None) -> tuple[str, str | None] | None:
    """Process ID of the worker whose death an error reports, and the signal's name, if known.

    None for any other error.
    """
    # An outer error may say only that a worker is gone while an inner one has the signal.
    texts = [
        f'{text} '
        for link in error_chain(error)
        for text in (link, *getattr(link, '__notes__', ()))
    ]
    for pattern in (_BY_SIGNAL, _GONE):
        for text in texts:
            if found := pattern.search(text):
                return found[1], found[2] if pattern is _BY_SIGNAL else None
    return None


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, then its causes and contexts."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def note_signals(error: Exception, workers: Sequence[Any]) -> None:
    """Add to the error of a loader which signals killed its workers.

    torch learns of it from a SIGCHLD handler. If the loader's thread notices the loss first, or
    a fork server is the parent, only the exit status tells.
    """
    if workers and isinstance(error, ConnectionError | EOFError):  # it may still be about to end
        connection.wait([worker.sentinel for worker in workers], timeout=5)
    for worker in workers:
        status = _exit_status(worker)
        if status < 0:
            name = signal.strsignal(-status)
            error.add_note(f'DataLoader worker (pid {worker.pid}) is killed by signal: {name}.')


def _exit_status(worker: Any) -> int:
    """The exit status of a process; 0 if it runs."""
    for _ in range(20):
        if worker.exitcode is not None:
            return worker.exitcode
        if not connection.wait([worker.sentinel], timeout=0):
            break
        time.sleep(0.05)  # another thread has just been told the status, and is storing it
    return 0

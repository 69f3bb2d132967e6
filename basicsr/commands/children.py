"""Modules of this package as child processes, which end with all that they have started."""

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def start(arguments: Sequence[str], log: BinaryIO, **environment: str) -> subprocess.Popen:
    """Start ``python -m <arguments>``, whose output goes to a file.

    Args:
        environment: Variables to set besides those of this process.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get('PYTHONPATH')]))
    return subprocess.Popen(
        [sys.executable, '-m', *arguments],
        env={**os.environ, 'PYTHONPATH': path, **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that it can be ended with all of its workers
    )


def end(process: subprocess.Popen) -> None:
    """Kill a process that ``start`` has started and, at once, all below it."""
    below = _descendants(process.pid)  # torchrun gives its ranks sessions of their own
    if hasattr(os, 'killpg'):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Numbers of the processes below one; without /proc, none are found."""
    children = defaultdict(list)
    for file in Path('/proc').glob('[0-9]*/stat'):
        with suppress(OSError):  # it has ended meanwhile
            _, parent = file.read_text().rpartition(')')[2].split()[:2]
            children[int(parent)].append(int(file.parent.name))
    found = [pid]
    for number in found:
        found += children[number]
    return found[1:]


def end_with_children() -> None:
    """Have this process end as by Ctrl-C, and its children with it, also by other signals."""
    for name in ('SIGTERM', 'SIGHUP'):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)

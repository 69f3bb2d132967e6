"""Run modules of this package as child processes, and kill them with all their descendants."""

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
    """Start ``python -m <arguments>`` with its output redirected to a file.

    Args:
        environment: Environment variables to set in addition to those of this process.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get('PYTHONPATH')]))
    return subprocess.Popen(
        [sys.executable, '-m', *arguments],
        env={**os.environ, 'PYTHONPATH': path, **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that it can be killed together with its workers
    )


def end(process: subprocess.Popen) -> None:
    """Kill a process started by ``start`` together with all its descendants."""
    below = _descendants(process.pid)  # torchrun runs its ranks in separate sessions
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
    """Process ids of all descendants of a process; empty without /proc."""
    children = defaultdict(list)
    for file in Path('/proc').glob('[0-9]*/stat'):
        with suppress(OSError):  # it has exited in the meantime
            _, parent = file.read_text().rpartition(')')[2].split()[:2]
            children[int(parent)].append(int(file.parent.name))
    found = [pid]
    for number in found:
        found += children[number]
    return found[1:]


def end_with_children() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that this process also ends its children."""
    for name in ('SIGTERM', 'SIGHUP'):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)

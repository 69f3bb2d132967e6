"""Preemption: stop all ranks after the same iteration on SIGTERM, SIGUSR1 or Ctrl-C, and resume.

A run that torchrun restarts resumes automatically.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from basicsr.utils import progress
from basicsr.utils.checkpoint_series import numbered_states
from basicsr.utils.dist_util import (
    from_master,
    gather_lists,
    get_dist_info,
    limit_of_operations,
)
from basicsr.utils.options import command_line

logger = logging.getLogger(__name__)

# Windows has no SIGUSR1.
SIGNALS = tuple(getattr(signal, name) for name in ('SIGTERM', 'SIGUSR1') if hasattr(signal, name))
STATUS = 75  # exit status of a run that saved its state and stopped; EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # after Ctrl-C: 128 plus the number of the signal
_AGENTS = '.torchrun'
_NOTE = 'basicsr/preemption'


class PreemptionWatch:
    """Records signals in the block, which would otherwise end the process.

    Ranks receive signals at different times, or only on one node. Each step all-reduces
    the flags of all ranks in the background, and reads the result of the previous step: no step
    waits, and all ranks stop after the same one. It may be the second after the signal.

    Args:
        timeout: Seconds after which a rank that does not answer is an error; None: torch's.

    Attributes:
        is_stepping: Whether steps are running, after which the state can be saved.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.signal = 0  # the one this rank has received, if any
        self.is_stepping = False
        self._before: dict = {}
        self._note = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._group: Any = None
        if get_dist_info()[1] > 1:
            limit = None if timeout is None else limit_of_operations(timeout)
            # On the CPU, so that it does not wait for the GPUs.
            self._group = dist.new_group(timeout=limit, backend='gloo')

    def __enter__(self) -> 'PreemptionWatch':
        if threading.current_thread() is threading.main_thread():  # where signals are handled
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored by background jobs
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        self.signal = number

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first Ctrl-C while steps run requests a stop; any other one interrupts.

        An exception at an arbitrary moment may be lost in a callback, or truncate a message of a
        worker.
        """
        before = self._before[number]
        if not self.is_stepping or self.signal == number:
            if callable(before):
                before(number, frame)
            return
        self._take(number, frame)
        if get_dist_info()[0] == 0:
            _say(b'\nInterrupted: saving the state first; Ctrl-C again ends at once.\n')

    def asked(self) -> int:
        """The signal to stop for after this step, or 0; every rank calls it once per step."""
        if self._group is None:
            return self.signal
        if self._pending is not None:
            self._pending.wait()
            if number := int(self._note.item()):
                return number
        self._note.fill_(self.signal)
        self._pending = dist.all_reduce(
            self._note, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return 0

    def noticed(self) -> int:
        """Like ``asked``, from the signals that this rank knows of, without waiting for others."""
        if self._group is not None:
            store = _get_default_store()
            if self.signal:
                store.set(_NOTE, str(self.signal))
            elif store.check([_NOTE]):
                self.signal = int(store.get(_NOTE))
        return self.signal


def _say(text: bytes) -> None:
    """Write to standard error from a signal handler, which must not raise.

    The reader may have ended by the same signal, as with ``2>&1 | tee``; and the descriptor of a
    closed stream may belong to another file.
    """
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), text)


def leave(iteration: int, number: int) -> NoReturn:
    """Exit as a signal asks, and say how to resume from the state that has been saved."""
    is_interrupt = number == signal.SIGINT
    cause, again = 'Interrupted' if is_interrupt else 'Asked to stop', command_line('--auto_resume')
    logger.warning(
        '%s: the state of iteration %d is saved. Resume with: %s', cause, iteration, again
    )
    sys.exit(INTERRUPTED if is_interrupt else STATUS)


def last_state(opt: Mapping[str, Any]) -> str:
    """The last state that an interrupted run has saved, and how to resume from it; or ''."""
    states = numbered_states(opt['path']['training_states'])
    # At the start the folder may be that of an earlier run.
    if not states or progress.current.phase == 'start':
        return ''
    again = command_line('--auto_resume')
    return f'The last state is that of iteration {states[-1].stem}: {again}'


def was_begun_by_launcher(folder: str | Path) -> bool:
    """Whether the torchrun that started this process, on any node, has begun the run of a folder.

    The restart count would not tell: nodes that join later have counts of their own, and a run that
    failed before it had a folder must not resume the run of an earlier launch.
    """
    agents = _agents()
    file = Path(folder) / _AGENTS
    known = file.read_text(errors='replace').split() if agents and file.is_file() else ()
    begun = not agents.isdisjoint(known)
    return from_master(begun)


def note_launcher(folder: str | Path) -> None:
    """Leave the mark that ``was_begun_by_launcher`` looks for; every rank calls it."""
    agents = _agents()
    if agents and get_dist_info()[0] == 0:
        (Path(folder) / _AGENTS).write_text('\n'.join(sorted(agents)))


def _agents() -> set[str]:
    """The torchrun processes of all nodes; they outlive the ranks that they start."""
    if not dist.is_torchelastic_launched():
        return set()
    agent = os.getppid()
    begin = os.environ.get('TORCHELASTIC_RUN_ID', '')
    with suppress(OSError):  # pids repeat across containers, so add the start time (Linux)
        stat = Path(f'/proc/{agent}/stat').read_text()
        begin = stat.rpartition(')')[2].split()[19]
    return set(gather_lists([f'{socket.gethostname()}:{agent}:{begin}']))

"""Watchdog for hangs in distributed training: ends a stalled run and names the rank at fault.

When one process hangs, all others block in their next collective operation, forever or until a
timeout that does not name the culprit. So a thread in each process reports its progress through
the process group's TCP store. Rank 0 watches all ranks; the others watch rank 0.
"""

import datetime
import faulthandler
import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from basicsr.utils.dist_util import START_TIMEOUT
from basicsr.utils.progress import Progress, current
from basicsr.utils.text import some

logger = logging.getLogger(__name__)

HANG_STATUS = 3  # the exit status of processes that a watchdog ends
_LAST_MOMENT = 60.0  # seconds for an orderly shutdown before the process is killed
_FIRST_STEPS = 2  # the host may run one step ahead of a GPU
# Files that the main thread is in while it waits for other ranks.
_WAITING = ('torch/distributed/', 'torch/autograd/graph.py')


@dataclass
class Report(Progress):
    """The progress report of a process.

    Attributes:
        rank, who: Its rank, host and process id.
        beat: Heartbeat counter: a process that stops reporting is stopped, dead or disconnected.
        place: File, line and function of its main thread.
        waits: Whether the main thread is inside a collective operation.
    """

    rank: int = 0
    who: str = ''
    beat: int = 0
    place: str = ''
    waits: bool = False

    def __str__(self) -> str:
        where = f'iteration {self.iteration} (phase: {self.phase})'
        return f'rank {self.rank} ({self.who}): last seen in {where}, at {self.place}'


_watchdog: 'Watchdog | None' = None
_rank = 0  # of this process, still valid after it has left the process group


def _own_report(beat: int = 0) -> Report:
    """The report of this process."""
    place, waits = _place_of_main_thread()
    who = f'{socket.gethostname()}, pid {os.getpid()}'
    return Report(**vars(current), rank=_rank, who=who, beat=beat, place=place, waits=waits)


def start(timeout: float) -> None:
    """Start watching the processes of the process group.

    Args:
        timeout: Seconds without any progress after which the run is ended.
    """
    global _watchdog
    if _watchdog is None and dist.is_initialized() and dist.get_world_size() > 1:
        _watchdog = Watchdog(timeout)
        _watchdog.start()


def stop() -> None:
    """Stop watching, but still end this process if its shutdown exceeds the timeout."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.stopped.set()
        _watchdog.join(1)  # it may block on a store that is gone
        faulthandler.dump_traceback_later(_watchdog.timeout + _LAST_MOMENT, exit=True)
        threading.Thread(target=_end_late, args=(_watchdog.timeout,), daemon=True).start()
        _watchdog = None


def _end_late(timeout: float) -> None:
    """End this process if it is still running after a timeout, e.g. in an ``atexit`` handler."""
    time.sleep(timeout)
    report = _own_report()
    logger.error('%s. Its training is over, and it has not ended for %g s.', report, timeout)
    _show_stacks()
    _exit(HANG_STATUS)


def _show_stacks() -> None:
    sys.stderr.write(f'Stacks of the threads of rank {_rank}, latest call first:\n')
    sys.stderr.flush()
    faulthandler.dump_traceback()


def _exit(status: int) -> NoReturn:
    for worker in multiprocessing.active_children():
        worker.kill()  # a hanging worker would outlive this process
    os._exit(status)


def tell_of_failure(error: BaseException) -> bool:
    """Notify the other processes that this one failed; from then on it counts as ended, not hung.

    Returns:
        Whether the error was caused by another process, whose failure has been logged.
    """
    return _watchdog is not None and _watchdog.tell_of_failure(error)


class Watchdog(threading.Thread):
    """The watchdog thread of a process: reports progress, watches other ranks, ends the process.

    Args:
        timeout: See ``start``.
    """

    def __init__(self, timeout: float):
        super().__init__(name='watchdog', daemon=True)
        global _rank
        _rank = self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.stopped = threading.Event()
        self.timeout = timeout
        self.interval = min(timeout / 20, 1.0)
        self._beat = 0
        self._reports: dict[int, Report] = {}
        self._moved: dict[int, float] = {}  # time of a rank's last progress
        self._beaten: dict[int, float] = {}  # time of its last report
        self.verdict: dict[str, Any] | None = None
        self._answered = time.monotonic()
        self._store = self._connect()

    @property
    def limit(self) -> float:
        """Seconds without progress after which the run is ended."""
        # In its first steps this process may wait for one that has not completed any.
        starts = current.phase == 'start' or (
            current.phase == 'step' and current.steps <= _FIRST_STEPS
        )
        return max(self.timeout, START_TIMEOUT * starts)

    @property
    def patience(self) -> float:
        """Like ``limit``, but below the timeout of collectives, which does not name the culprit."""
        return self.limit - 3 * self.interval

    def _connect(self) -> Store:
        """A separate connection, because a request of one thread blocks those of others."""
        host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
        wait = datetime.timedelta(seconds=5)
        tcp_store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - it is documented
            host, port, is_master=False, wait_for_workers=False, timeout=wait
        )
        # The store of torchrun survives a restart of the processes, so keys must be unique.
        run = [f'watchdog/{os.urandom(8).hex()}']
        dist.broadcast_object_list(run)
        store = PrefixStore(run[0], tcp_store)
        if self.rank == 0:
            store.set('end', '')
        self._say(store)
        dist.barrier()  # all keys have been set
        return store

    def _say(self, store: Store) -> None:
        self._beat += 1
        store.set(f'{self.rank}', json.dumps(asdict(_own_report(self._beat))))

    def run(self) -> None:
        # Store requests may block forever, so a separate thread makes them.
        threading.Thread(target=self._talk, name='watchdog talks', daemon=True).start()
        got_on, notes = time.monotonic(), current.notes
        while not self.stopped.wait(self.interval):
            # If the interpreter hangs, so does this thread; faulthandler's C thread does not.
            faulthandler.dump_traceback_later(self.timeout + _LAST_MOMENT, exit=True)
            now = time.monotonic()
            if notes != current.notes:
                notes, got_on = current.notes, now
            if self.verdict is None and now - got_on > self.patience:
                self.verdict = self._judge(now)
            if self.verdict:
                self._end(**self.verdict)
                return

    def _talk(self) -> None:
        while not self.stopped.wait(self.interval):
            with suppress(RuntimeError):  # the store is gone: a run may continue without it
                self._say(self._store)
                self.verdict = self._listen() or self.verdict
                self._answered = time.monotonic()

    def _listen(self) -> dict[str, Any] | None:
        """Read the reports of other ranks; returns the verdict of another process, if any."""
        ranks = range(self.world_size) if self.rank == 0 else [0]
        end, *texts = self._store.multi_get(['end', *map(str, ranks)])
        now = time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            report, before = Report(**json.loads(text)), self._reports.get(rank)
            if before is None or report.notes != before.notes:
                self._moved[rank] = now
            if before is None or report.beat != before.beat:
                self._beaten[rank] = now
            self._reports[rank] = report
        return json.loads(end) if end else None

    def _judge(self, now: float) -> dict[str, Any] | None:
        """The verdict, if no other process makes progress either."""
        if now - self._answered > self.patience - 2 * self.interval:
            host = f'{os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]}'
            reason = (
                f'rank {self.rank} ({_own_report().who}) waits for others, and the store at {host} '
                f'has not answered for {self.limit:g} s: its process is stopped, dead or '
                f'disconnected. Its last report: {self._reports.get(0, "none")}.'
            )
            return {'reason': reason, 'ranks': [self.rank], 'judge': self.rank}
        silent = self._silent(now, self.patience)
        if not silent and (self.rank > 0 or now - max(self._moved.values()) <= self.patience):
            return None
        reason, ranks = verdict(self._reports, silent, self.limit)
        end = {'reason': reason, 'ranks': ranks, 'judge': self.rank}
        with suppress(RuntimeError):  # the store has gone in the meantime
            end = self._publish(end)
        return end

    def _silent(self, now: float, patience: float) -> list[int]:
        return [rank for rank, beaten in list(self._beaten.items()) if now - beaten > patience]

    def _publish(self, end: dict[str, Any]) -> dict[str, Any]:
        """Publish ``end`` as the reason why the run ends; the first one published is returned."""
        return json.loads(self._store.compare_set('end', '', json.dumps(end)))

    def _end(self, reason: str, ranks: list[int], judge: int) -> None:
        """End this process because a rank of the run has failed or hangs.

        Args:
            reason: Why.
            ranks: Ranks that dump their stacks; empty after an error, whose traceback was shown.
            judge: The rank that logs the reason; after an error the one that failed.
        """
        faulthandler.dump_traceback_later(_LAST_MOMENT, exit=True)  # in case the code below hangs
        if judge == self.rank and ranks:
            logger.error('%s', reason)
        elif self.rank == 0 and judge != 0:
            logger.warning('The run ends: %s', reason)
        if self.rank in ranks:
            _show_stacks()
        # torchrun kills all processes of a host as soon as one exits: leave time for the others to
        # log, and for a process that ends by itself to shut down cleanly.
        pause = 3 * self.interval if ranks else min(_LAST_MOMENT / 2, self.timeout)
        if self.stopped.wait(pause):
            return
        _exit(HANG_STATUS if ranks else 1)

    def tell_of_failure(self, error: BaseException) -> bool:
        """See the module-level function."""
        faulthandler.dump_traceback_later(min(_LAST_MOMENT, self.timeout + 10), exit=True)
        own = self._failure(f'rank {self.rank} ({_own_report().who}) {_how_it_ends(error)}')
        try:
            if _is_of_communication(error):
                end = self.verdict or self._reason_of_silence()
            else:
                end = self._publish(own)
                time.sleep(2 * self.interval)  # time for rank 0 to log it
        except RuntimeError:  # the store is gone, most likely with rank 0
            end = self.verdict
            if end is None and _is_of_communication(error):
                end = self._sudden_end([0])
                logger.error('%s', end['reason'])
        if end and end['ranks']:
            self.join()  # the watchdog thread is about to end the process, with its own status
        return end not in (None, own)

    def _failure(self, reason: str) -> dict[str, Any]:
        return {'reason': reason, 'ranks': [], 'judge': self.rank}

    def _sudden_end(self, ranks: Sequence[int]) -> dict[str, Any]:
        who = '; '.join(str(self._reports.get(rank, f'rank {rank}')) for rank in ranks[:5])
        reason = f'{who}. It has ended without a message: killed, crashed or out of memory.'
        return self._failure(reason)

    def _reason_of_silence(self) -> dict[str, Any] | None:
        """Why a connection was lost: an error in another process, or its sudden death."""
        silence = 4 * self.interval
        begin = time.monotonic()
        while time.monotonic() < begin + 2 * silence:
            end = self._store.get('end')
            if end:
                return json.loads(end)
            silent = self._silent(time.monotonic(), silence)
            if silent:
                end = self._publish(self._sudden_end(silent))
                if end['judge'] == self.rank:
                    logger.error('%s', end['reason'])
                return end
            time.sleep(self.interval / 2)
        return None


def _how_it_ends(error: BaseException) -> str:
    kind, text = type(error).__name__, str(error).strip().partition('\n')[0]
    if isinstance(error, KeyboardInterrupt):
        return 'was interrupted (SIGINT)'
    if isinstance(error, SystemExit):
        return f'has left the program: sys.exit({error.code!r})'
    return f'has failed: {kind}: {text}'


def verdict(
    reports: Mapping[int, Report], silent: Sequence[int], timeout: float
) -> tuple[str, list[int]]:
    """Find the ranks that all others wait for; returns the message and the ranks.

    Args:
        reports: The latest report of each known rank.
        silent: Ranks that no longer report.
        timeout: For the message, in seconds.
    """
    blamed = [reports[rank] for rank in silent]
    if not blamed:
        # Most ranks wait for the others; in a loop on a GPU they may be steps ahead.
        blamed = [report for report in reports.values() if not report.waits]
        blamed = blamed or list(reports.values())
        behind = min(map(_progress, blamed))
        blamed = [report for report in blamed if _progress(report) == behind]
    names = ', '.join(str(report.rank) for report in blamed)
    lines = [
        f'rank {names} has not made progress for {timeout:g} s, and all others wait '
        '(dist_params.timeout); the run ends.'
    ]
    dead = ' It does not answer: stopped, dead or disconnected.' if silent else ''
    lines += [f'{report}.{dead}' for report in blamed[:8]]
    waiting = [str(report) for report in reports.values() if report not in blamed]
    if waiting:
        lines.append(f'Waiting: {some(waiting, 3)}.')
    return '\n'.join(lines), [report.rank for report in blamed]


def _progress(report: Report) -> tuple[int, int]:
    order = ('start', 'data', 'step', 'saving', 'validation', 'end')
    return report.iteration, order.index(report.phase)


def _is_of_communication(error: BaseException) -> bool:
    """Whether another process may have caused the error."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and '/gloo/' in str(error)
    )


def _place_of_main_thread() -> tuple[str, bool]:
    """File, line and function that the main thread is in, and whether it waits for other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return 'unknown', False
    file = Path(frame.f_code.co_filename)
    waits = any(part in file.as_posix() for part in _WAITING)
    name = '/'.join(file.parts[-2:])
    return f'{name}:{frame.f_lineno} in {frame.f_code.co_name}', waits

"""Ends a run of several processes that no longer gets on, and says which of them is to blame.

A process that hangs makes all others wait in their next collective operation, for ever or until a
timeout that names nobody. So a thread in each process tells the others, through the store by which
they found each other, how far the process is. Rank 0 watches all; the others watch rank 0.
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
_LAST_MOMENT = 60.0  # seconds for an orderly end, before the process is ended in any case
_FIRST_STEPS = 2  # one may be made ahead of a GPU
# Where the main thread of a process is that waits for the others.
_WAITING = ('torch/distributed/', 'torch/autograd/graph.py')


@dataclass
class Report(Progress):
    """What a process says of itself.

    Attributes:
        rank, who: Its rank, host and process id.
        beat: Counts the reports: a process whose reports end is stopped, dead or cut off.
        place: Where its main thread is: file, line and function.
        waits: Whether that is inside a collective operation.
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
_rank = 0  # of this process, also when it has left the process group


def _own_report(beat: int = 0) -> Report:
    """The report of this process."""
    place, waits = _place_of_main_thread()
    who = f'{socket.gethostname()}, pid {os.getpid()}'
    return Report(**vars(current), rank=_rank, who=who, beat=beat, place=place, waits=waits)


def start(timeout: float) -> None:
    """Watch the processes of the process group from now on.

    Args:
        timeout: Seconds without progress of any process after which the run is ended.
    """
    global _watchdog
    if _watchdog is None and dist.is_initialized() and dist.get_world_size() > 1:
        _watchdog = Watchdog(timeout)
        _watchdog.start()


def stop() -> None:
    """Watch no longer but for the end of this process, which shall not take longer either."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.stopped.set()
        _watchdog.join(1)  # it may wait for a store that is gone
        faulthandler.dump_traceback_later(_watchdog.timeout + _LAST_MOMENT, exit=True)
        threading.Thread(target=_end_late, args=(_watchdog.timeout,), daemon=True).start()
        _watchdog = None


def _end_late(timeout: float) -> None:
    """End this process if it still runs after a time, as in a handler of ``atexit``."""
    time.sleep(timeout)
    report = _own_report()
    logger.error('%s. Its training is over, and it has not ended for %g s.', report, timeout)
    _show_stacks()
    _exit(HANG_STATUS)


def _show_stacks() -> None:
    sys.stderr.write(f'Stacks of rank {_rank}, of its threads the latest call first:\n')
    sys.stderr.flush()
    faulthandler.dump_traceback()


def _exit(status: int) -> NoReturn:
    for worker in multiprocessing.active_children():
        worker.kill()  # one that hangs would outlive this process
    os._exit(status)


def tell_of_failure(error: BaseException) -> bool:
    """Tell the other processes that this one ends by an error; from then on it cannot hang.

    Returns:
        Whether the error follows from what happened to another process, which has been logged.
    """
    return _watchdog is not None and _watchdog.tell_of_failure(error)


class Watchdog(threading.Thread):
    """The thread of one process: it reports, watches, and ends the process.

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
        self._moved: dict[int, float] = {}  # when the report of a rank had last got on
        self._beaten: dict[int, float] = {}  # when it last came
        self.verdict: dict[str, Any] | None = None
        self._answered = time.monotonic()
        self._store = self._connect()

    @property
    def limit(self) -> float:
        """Seconds without progress after which the run is ended."""
        # In its first steps this process may wait for another one that has made none.
        starts = current.phase == 'start' or (
            current.phase == 'step' and current.steps <= _FIRST_STEPS
        )
        return max(self.timeout, START_TIMEOUT * starts)

    @property
    def patience(self) -> float:
        """As ``limit``, but less than the timeout of operations, which names nobody."""
        return self.limit - 3 * self.interval

    def _connect(self) -> Store:
        """A connection of our own: one thread's request would block another's."""
        host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
        wait = datetime.timedelta(seconds=5)
        tcp_store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - it is documented
            host, port, is_master=False, wait_for_workers=False, timeout=wait
        )
        # A store of torchrun's outlives a restart of the processes.
        run = [f'watchdog/{os.urandom(8).hex()}']
        dist.broadcast_object_list(run)
        store = PrefixStore(run[0], tcp_store)
        if self.rank == 0:
            store.set('end', '')
        self._say(store)
        dist.barrier()  # all keys are there
        return store

    def _say(self, store: Store) -> None:
        self._beat += 1
        store.set(f'{self.rank}', json.dumps(asdict(_own_report(self._beat))))

    def run(self) -> None:
        # Requests may never be answered: this thread does not make them.
        threading.Thread(target=self._talk, name='watchdog talks', daemon=True).start()
        got_on, notes = time.monotonic(), current.notes
        while not self.stopped.wait(self.interval):
            # If Python itself hangs, this thread does too; a thread in C does not.
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
            with suppress(RuntimeError):  # the store is gone: a run may get on without it
                self._say(self._store)
                self.verdict = self._listen() or self.verdict
                self._answered = time.monotonic()

    def _listen(self) -> dict[str, Any] | None:
        """Read how far others are; returns the verdict of another process, if there is one."""
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
        """The verdict, if no other process gets on either."""
        if now - self._answered > self.patience - 2 * self.interval:
            host = f'{os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]}'
            reason = (
                f'rank {self.rank} ({_own_report().who}) waits for others, and the store at {host} '
                f'has not answered for {self.limit:g} s: what runs there is stopped, dead or cut '
                f'off. From there came: {self._reports.get(0, "nothing")}.'
            )
            return {'reason': reason, 'ranks': [self.rank], 'judge': self.rank}
        silent = self._silent(now, self.patience)
        if not silent and (self.rank > 0 or now - max(self._moved.values()) <= self.patience):
            return None
        reason, ranks = verdict(self._reports, silent, self.limit)
        end = {'reason': reason, 'ranks': ranks, 'judge': self.rank}
        with suppress(RuntimeError):  # the store went meanwhile
            end = self._publish(end)
        return end

    def _silent(self, now: float, patience: float) -> list[int]:
        return [rank for rank, beaten in list(self._beaten.items()) if now - beaten > patience]

    def _publish(self, end: dict[str, Any]) -> dict[str, Any]:
        """Make ``end`` the reason why the run ends, unless there is one; returns the one."""
        return json.loads(self._store.compare_set('end', '', json.dumps(end)))

    def _end(self, reason: str, ranks: list[int], judge: int) -> None:
        """End this process, as one of its run has failed or hangs.

        Args:
            reason: Why.
            ranks: Whose stacks are of interest; none after an error, which was shown.
            judge: The rank that speaks; after an error the one that has failed.
        """
        faulthandler.dump_traceback_later(_LAST_MOMENT, exit=True)  # whatever hangs below
        if judge == self.rank and ranks:
            logger.error('%s', reason)
        elif self.rank == 0 and judge != 0:
            logger.warning('The run ends: %s', reason)
        if self.rank in ranks:
            _show_stacks()
        # torchrun ends all of a host as soon as one ends: each shall have said what it has to say,
        # and a process that ends by itself shall do so in order.
        pause = 3 * self.interval if ranks else min(_LAST_MOMENT / 2, self.timeout)
        if self.stopped.wait(pause):
            return
        _exit(HANG_STATUS if ranks else 1)

    def tell_of_failure(self, error: BaseException) -> bool:
        """See the function of that name."""
        faulthandler.dump_traceback_later(min(_LAST_MOMENT, self.timeout + 10), exit=True)
        own = self._failure(f'rank {self.rank} ({_own_report().who}) {_how_it_ends(error)}')
        try:
            if _is_of_communication(error):
                end = self.verdict or self._reason_of_silence()
            else:
                end = self._publish(own)
                time.sleep(2 * self.interval)  # rank 0 writes it into the log meanwhile
        except RuntimeError:  # the store is gone, most likely with rank 0
            end = self.verdict
            if end is None and _is_of_communication(error):
                end = self._sudden_end([0])
                logger.error('%s', end['reason'])
        if end and end['ranks']:
            self.join()  # this thread is about to end the process, with its own status
        return end not in (None, own)

    def _failure(self, reason: str) -> dict[str, Any]:
        return {'reason': reason, 'ranks': [], 'judge': self.rank}

    def _sudden_end(self, ranks: Sequence[int]) -> dict[str, Any]:
        who = '; '.join(str(self._reports.get(rank, f'rank {rank}')) for rank in ranks[:5])
        reason = f'{who}. It has ended without a word: killed, crashed or out of memory.'
        return self._failure(reason)

    def _reason_of_silence(self) -> dict[str, Any] | None:
        """Why a connection was lost: an error of another process, or its sudden end."""
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
    """Which ranks keep all others waiting: the message, and the ranks.

    Args:
        reports: The last one of each rank that is known of.
        silent: Ranks that do not report any more.
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
    dead = ' It does not answer: stopped, dead or cut off.' if silent else ''
    lines += [f'{report}.{dead}' for report in blamed[:8]]
    waiting = [str(report) for report in reports.values() if report not in blamed]
    if waiting:
        lines.append(f'Waiting: {some(waiting, 3)}.')
    return '\n'.join(lines), [report.rank for report in blamed]


def _progress(report: Report) -> tuple[int, int]:
    order = ('start', 'data', 'step', 'saving', 'validation', 'end')
    return report.iteration, order.index(report.phase)


def _is_of_communication(error: BaseException) -> bool:
    """Whether another process may be the reason."""
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

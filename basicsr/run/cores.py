"""Divide the CPU cores of a host among its ranks, their threads and DataLoader workers."""

import logging
import os
import socket
import time
from pathlib import Path

import torch

from basicsr.utils.dist_util import gather_lists, get_dist_info

logger = logging.getLogger(__name__)

_DELAYS = Path('/proc/thread-self/schedstat')
_WORTH_SAYING = 0.2  # share of the time


def usable_cores() -> set[int]:
    """The cores this process may use (CPU affinity): a batch job may have only some of them."""
    if hasattr(os, 'sched_getaffinity'):  # not on every system
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def ranks_on_cores() -> int:
    """How many ranks of this host, including this one, share cores with this rank.

    Every rank has to call it.
    """
    host, cores = socket.gethostname(), usable_cores()
    ranks = gather_lists([(host, cores)])
    return sum(name == host and not cores.isdisjoint(others) for name, others in ranks)


def share_cores() -> int:
    """This rank's share of the cores, which also becomes torch's number of threads.

    The number of threads is unchanged with a single process, or if ``OMP_NUM_THREADS`` is set.
    Every rank has to call it.
    """
    world_size = get_dist_info()[1]
    share = max(1, len(usable_cores()) // (ranks_on_cores() if world_size > 1 else 1))
    if world_size > 1 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(share)
    return share


def report_cores(workers: int, on_gpu: bool) -> None:
    """Log if threads and loader processes oversubscribe the cores, or leave some idle.

    The larger of a rank's numbers of threads and loader processes counts, since either waits for
    the other. Every rank has to call it.

    Args:
        workers: Loader processes per rank.
        on_gpu: Whether the rank computes on a GPU, so that it occupies one core, not one per
            thread.
    """
    cores, ranks = len(usable_cores()), ranks_on_cores()
    threads = 1 if on_gpu else torch.get_num_threads()
    each = max(threads, workers)
    some_idle = not on_gpu and ranks > 1 and each < cores // ranks
    if ranks * each <= cores and not some_idle:
        return
    logger.info(
        'Cores: %d on this host, for %d ranks of %d threads and %d loader processes. '
        'OMP_NUM_THREADS (torchrun sets it to 1) and num_worker_per_gpu change that.',
        cores,
        ranks,
        threads,
        workers,
    )


class CoreWait:
    """Logs once if the main thread often waits for a core, because others are computing.

    On Linux, whose scheduler counts that; elsewhere nothing is logged.
    """

    def __init__(self) -> None:
        self._has_told = False
        self._last = time.perf_counter(), _seconds_waited()

    def report(self) -> None:
        """Log a line if the share of the time since the last call is worth it."""
        before, waited_before = self._last
        now, waited = self._last = time.perf_counter(), _seconds_waited()
        if waited is None or waited_before is None or self._has_told:
            return
        share = (waited - waited_before) / max(now - before, 1e-9)
        if share < _WORTH_SAYING:
            return
        self._has_told = True
        logger.info(
            'Waiting for a core %.0f %% of the time: other programs, or the threads and loader '
            'processes of this one, want more than the %d cores. Fewer of them may be faster '
            '(OMP_NUM_THREADS, %d threads now; num_worker_per_gpu).',
            *(100 * share, len(usable_cores()), torch.get_num_threads()),
        )


def _seconds_waited() -> float | None:
    """How long this thread was ready to run, and did not; None where that is not counted."""
    try:
        return int(_DELAYS.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None

"""How the cores of a host are shared out among its ranks, their threads and loader processes."""

import logging
import os
import socket

import torch

from basicsr.utils.dist_util import gather_lists, get_dist_info

logger = logging.getLogger(__name__)


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may use: a batch job has some of all."""
    if hasattr(os, 'sched_getaffinity'):  # not on every system
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def ranks_on_cores() -> int:
    """How many ranks of this host may use the cores of this one, which is among them.

    Every rank has to call it.
    """
    host, cores = socket.gethostname(), usable_cores()
    ranks = gather_lists([(host, cores)])
    return sum(name == host and not cores.isdisjoint(others) for name, others in ranks)


def share_cores() -> int:
    """The share of the cores that is this rank's, which torch takes as its number of threads.

    Threads are left alone in a run of one process, and where ``OMP_NUM_THREADS`` says how many.
    Every rank has to call it.
    """
    world_size = get_dist_info()[1]
    share = max(1, len(usable_cores()) // (ranks_on_cores() if world_size > 1 else 1))
    if world_size > 1 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(share)
    return share


def report_cores(workers: int, on_gpu: bool) -> None:
    """Log that the threads, or loader processes, of all ranks are more than the cores, or fewer.

    Of a rank's threads and loader processes the larger number counts: one waits for the other.
    Every rank has to call it.

    Args:
        workers: Loader processes of a rank.
        on_gpu: Whether a GPU computes, so that a rank keeps one core busy, not one per thread.
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

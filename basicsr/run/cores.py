"""Divide the CPU cores of a host among its ranks, their threads and DataLoader workers."""

import logging
import os
import socket

import torch

from basicsr.utils.dist_util import gather_lists, get_dist_info

logger = logging.getLogger(__name__)


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

    The larger of a rank's numbers of threads and loader processes counts, since one waits for the
    other. Every rank has to call it.

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

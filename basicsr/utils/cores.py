"""How the cores of a host are shared out among its ranks, their threads and loader processes."""

import logging
import os
import socket

import torch

from .dist_util import gather_lists

logger = logging.getLogger(__name__)


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may use: a batch job has some of all."""
    if hasattr(os, 'sched_getaffinity'):  # not on every system
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _sharing(cores: set[int]) -> int:
    """How many ranks of this host may use the same cores as this one, which is among them."""
    host = socket.gethostname()
    ranks = gather_lists([(host, cores)])
    return sum(name == host and not cores.isdisjoint(others) for name, others in ranks)


def share_cores(opt: dict) -> None:
    """Give this rank its share of the cores, as threads of torch and, by default, loader processes.

    Threads are left alone in a run of one process, and where ``OMP_NUM_THREADS`` says how many.
    Every rank has to call it.
    """
    cores = usable_cores()
    share = max(1, len(cores) // (_sharing(cores) if opt['dist'] else 1))
    if opt['dist'] and opt['world_size'] > 1 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(share)
    train_set = opt['datasets'].get('train', {})
    if train_set.get('num_worker_per_gpu', 0) is None:
        train_set['num_worker_per_gpu'] = min(4, share)


def report_cores(workers: int, on_gpu: bool) -> None:
    """Log that cores are too few for the threads and loader processes of all ranks, or idle.

    Every rank has to call it.

    Args:
        workers: Loader processes of a rank.
        on_gpu: Whether a GPU computes, so that a rank keeps one core busy, not one per thread.
    """
    cores = usable_cores()
    ranks, threads = _sharing(cores), 1 if on_gpu else torch.get_num_threads()
    used = ranks * (threads + workers)
    idle_threads = len(cores) // ranks - workers - threads
    if used <= len(cores) and (on_gpu or ranks == 1 or idle_threads < 1):
        return
    logger.info(
        'Cores: %d of %d used on this host: %d ranks x (%d threads + %d loader processes). '
        'OMP_NUM_THREADS (torchrun sets it to 1) and num_worker_per_gpu change that.',
        used,
        len(cores),
        ranks,
        threads,
        workers,
    )

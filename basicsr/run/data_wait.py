"""Detect data-loading bottlenecks: log the share of time spent waiting for data, with advice."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from .cores import usable_cores

logger = logging.getLogger(__name__)

_WORTH_SAYING = 0.1  # share of the time spent waiting for data
_AT_LEAST = 10  # minimum number of iterations to measure the share
_REPEATED_AFTER = 1000  # iterations


class DataWait:
    """Logs how much of the time a run waits for data, and what to do about it.

    Args:
        dataset_opt: Completed options of the training set.
        shares: GPUs (or processes, without GPUs) whose loader processes share these cores.
        decoded: Returns the number of cached images and of all images; None without a cache.
    """

    def __init__(
        self,
        dataset_opt: Mapping[str, Any],
        shares: int,
        decoded: Callable[[], tuple[int, int] | None],
    ):
        self._workers = dataset_opt['num_worker_per_gpu']
        self._shares = shares
        self._cache_off = dataset_opt['cache'] in ('off', False)
        self._decoded = decoded
        self._seen = 0  # images in the caches at the last report
        self._is_start = True  # the first interval includes the start of the workers
        self._said, self._said_at = '', 0
        self._begin()

    def _begin(self) -> None:
        self._count, self._waiting, self._total = 0, 0.0, 0.0

    def record(self, waiting: float, total: float) -> None:
        """Add an iteration: seconds spent waiting for its batch, and in total."""
        self._count += 1
        self._waiting += waiting
        self._total += total

    def report(self, current_iter: int) -> None:
        """Log a line if the advice for the iterations since the last call is new."""
        if self._count < _AT_LEAST:
            return
        share = self._waiting / self._total
        was_start, self._is_start = self._is_start, False
        self._begin()
        if share < _WORTH_SAYING and not was_start:
            return
        decoded = self._decoded()
        filling = decoded is not None and self._seen < decoded[0] < decoded[1]
        self._seen = decoded[0] if decoded else 0
        if was_start:
            return
        cores = len(usable_cores())
        text = advice(self._workers, self._shares, cores, self._cache_off, decoded, filling)
        kind = text.partition('(')[0]  # a mere change of numbers is not new
        if kind != self._said or current_iter >= self._said_at + _REPEATED_AFTER:
            self._said, self._said_at = kind, current_iter
            logger.info('Waiting for data %.0f %% of the time: %s', 100 * share, text)


def advice(
    workers: int,
    shares: int,
    cores: int,
    cache_off: bool,
    decoded: tuple[int, int] | None,
    filling: bool,
) -> str:
    """How to speed up data loading; numbers that vary come last, in brackets.

    Args:
        workers: ``num_worker_per_gpu``.
        shares: GPUs (or processes, without GPUs) on this machine, each with that many workers.
        cores: Cores of this machine.
        cache_off: Whether the option file disables the cache of decoded images.
        decoded: Number of cached images and of all images; None without a cache.
        filling: Whether the cache is still being filled.
    """
    if cache_off:
        return 'switch datasets.train.cache on: images are decoded each time'
    if filling and decoded:
        return f'images are still being decoded (cache: {decoded[0]} of {decoded[1]})'
    if (workers + 1) * shares <= cores:
        for_each = f' for each of {shares}' if shares > 1 else ''
        return f'raise datasets.train.num_worker_per_gpu ({workers} now{for_each}; {cores} cores)'
    if decoded is None:
        return f'use smaller images, or sub-images; every core has a worker ({cores} cores)'
    if decoded[0] < decoded[1]:
        return (
            'name a folder with more space in datasets.train.cache, or use smaller images, or '
            f'sub-images (cache: {decoded[0]} of {decoded[1]})'
        )
    return (
        'every core has a worker, and every image is decoded; batches of bytes '
        f'(datasets.train.uint8_batch) and smaller crops are cheaper ({cores} cores)'
    )

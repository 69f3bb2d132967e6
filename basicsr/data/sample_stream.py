"""Training on an IterableDataset: sharding over ranks and workers, resuming, seeding."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from basicsr.utils.errors import UserError
from basicsr.utils.rng import seed_cpu, seeded

from .bad_images import MOST_ATTEMPTS, BadImages


class SampleStream(IterableDataset):
    """The share of a dataset's items for one rank and one worker, repeated endlessly.

    Every process reads all items in the same order and keeps its own, so the batches do not depend
    on the number of workers, and a resumed run continues with the next sample. A dataset may yield
    functions without arguments; they are called only in the process that keeps the item, so that
    only this one decodes it. Random generators are seeded from the sample number before an item is
    read, and before it is called.

    Attributes of the wrapped dataset are accessible through it.

    If calling an item shows that it is unreadable, ``bad_images`` may replace it by the next one.

    Args:
        dataset: Must give the same items, in the same order, in every process. If it has
            ``set_epoch(epoch)``, that is called before each pass. If it has ``skip(count)`` and a
            length, that is called before the first pass of a resumed run, which then begins after
            ``count`` items; otherwise they are read and dropped.
        seed: Seed of the samples' randomness.
        batch_size: Samples per batch of this rank.
        num_replicas, rank: Number of ranks, and this one.
        start: Samples that all ranks together have already seen; None: only one pass.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        seed: int,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        start: int | None = None,
    ):
        self.dataset = dataset
        self.seed = seed
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.rank = rank
        self.start = start
        self.bad_images = BadImages()

    def __iter__(self) -> Iterator[Any]:
        number, first_epoch = self._skip()
        due: list[int] = []  # samples that wait for a readable item
        failed = 0  # unreadable items in a row
        for epoch in itertools.count(first_epoch):
            if hasattr(self.dataset, 'set_epoch'):
                self.dataset.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            first = number
            with self._randomness(number):
                items = iter(self.dataset)
            while True:
                with self._randomness(number):
                    try:
                        item = next(items)
                    except StopIteration:
                        break
                if self._keeps(number):
                    due.append(number)
                while due:
                    try:
                        made = self._make(item, due[0])
                    except Exception as error:
                        if not self.bad_images.passes_over(error, number):
                            raise
                        failed += 1
                        if failed == MOST_ATTEMPTS:
                            raise self.bad_images.none_found(due[0]) from error
                        break
                    failed = 0
                    del due[0]
                    yield made
                number += 1
            if number == first:
                raise UserError('the training set is empty: its iterator yields nothing.')
            if self.start is None:
                return

    def _make(self, item: Any, number: int) -> Any:
        if not callable(item):
            return item
        with self._randomness(number):  # reading it may have drawn random numbers
            return item()

    def _skip(self) -> tuple[int, int]:
        """Skip items already seen, if the dataset can; returns the sample and epoch to begin at."""
        if not self.start or not hasattr(self.dataset, 'skip'):
            return 0, 0
        epoch, count = divmod(self.start, self.total_size)
        self.dataset.skip(count)  # pyright: ignore[reportAttributeAccessIssue]
        return self.start, epoch

    def _randomness(self, number: int) -> Any:
        if get_worker_info() is None:  # the global generators are the model's
            return seeded(self.seed, number)
        seed_cpu(self.seed, number)
        return nullcontext()

    def _keeps(self, number: int) -> bool:
        """Whether a sample is for this rank, and for the batches that this worker makes."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        position, rank = divmod(number - (self.start or 0), self.num_replicas)
        batch = position // self.batch_size
        return position >= 0 and rank == self.rank and batch % workers == worker

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or name == 'dataset':  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def total_size(self) -> int:
        """Samples of an epoch: those of the set, if it has a length."""
        has_length = hasattr(self.dataset, '__len__')
        return len(self.dataset) if has_length else sys.maxsize  # pyright: ignore[reportArgumentType]

"""Samplers: shuffled order per epoch for each rank, and the endless, resumable batch stream."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sized

import torch
from torch.utils.data import Sampler

from basicsr.utils.errors import UserError
from basicsr.utils.rng import mix


class EnlargedSampler(Sampler[int]):
    """A rank's share of a shuffled set, repeated ``ratio`` times in one epoch.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; each gets the same number of indices.
        rank: This rank.
        ratio: Repeats of the set in an epoch.
        seed: Seed of the order; 0 seeds only with the epoch number, as upstream did.
    """

    def __init__(
        self, dataset: Sized, num_replicas: int, rank: int, ratio: float = 1, seed: int = 0
    ):
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.epoch = 0
        self.num_samples = math.ceil(len(dataset) * ratio / num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        # A generator takes 32 bits of its seed.
        seed = mix(self.seed, self.epoch) >> 32 if self.seed else self.epoch
        number = torch.int32 if self.total_size < 2**31 else torch.int64
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.total_size, generator=generator, dtype=number)
        share = order[self.rank :: self.num_replicas]
        if self.num_replicas > 1:  # one rank's share of many is small
            share = share.clone()
        del order
        for part in share.split(4096):
            yield from (part % len(self.dataset)).tolist()

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class BatchStream(Sampler[list[tuple[int, ...]]]):
    """Endless batches of (sample number, index), continuing across the epochs of a sampler.

    The sample number is the position in the order that all ranks share, so the share of a rank
    is every ``num_replicas``-th number, and resuming needs one integer.

    Args:
        sampler: One rank's sampler; ``set_epoch`` is called if it has one. One with a ``stream``
            (see ``samplers``) starts at any number without delay; with others the first indices of
            an epoch are read and discarded.
        batch_size: Samples per batch of this rank.
        num_replicas, rank: Number of ranks, and this one.
        start: Number of samples that all ranks together have already seen.
        schedule: Endless pairs of batch size, in place of ``batch_size``, and crop size (see
            ``progressive``); batches are then of (sample number, index, crop size).
    """

    def __init__(
        self,
        sampler: Sampler,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        start: int = 0,
        schedule: Iterable[tuple[int, int]] | None = None,
    ):
        if len(sampler) == 0:  # pyright: ignore[reportArgumentType] (our samplers have a length)
            raise UserError('the training set is empty: there is nothing to sample from.')
        self.sampler = sampler
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.rank = rank
        self.start = start
        self.schedule = schedule

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        if hasattr(self.sampler, 'stream'):
            first = self.start + self.rank
            indices = self.sampler.stream(first, self.num_replicas)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            position = math.ceil(self.start / self.num_replicas)
            first = position * self.num_replicas + self.rank
            indices = self._indices(position)
        pairs = zip(itertools.count(first, self.num_replicas), indices, strict=False)
        for batch_size, *gt_size in self.schedule or itertools.repeat((self.batch_size,)):
            yield [(*pair, *gt_size) for pair in itertools.islice(pairs, batch_size)]

    def _indices(self, position: int) -> Iterator[int]:
        first_epoch, skip = divmod(position, len(self.sampler))  # pyright: ignore[reportArgumentType]
        for epoch in itertools.count(first_epoch):
            if hasattr(self.sampler, 'set_epoch'):
                self.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            yield from itertools.islice(self.sampler, skip, None)
            skip = 0


class NumberedSampler(Sampler[tuple[int, int]]):
    """The indices of a sampler, pass after pass, each with its sample number."""

    def __init__(self, sampler: Sampler, num_replicas: int = 1, rank: int = 0):
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self._passes = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        position = self._passes * len(self)
        self._passes += 1
        for index in self.sampler:
            yield position * self.num_replicas + self.rank, index
            position += 1

    def __len__(self) -> int:
        return len(self.sampler)  # pyright: ignore[reportArgumentType]

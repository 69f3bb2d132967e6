"""Training samplers: weighted, random subset and others (``datasets.train.sampler``).

The index of a sample is determined by the seed and the sample number (its position in the order
shared by all ranks), so a run can resume anywhere, with any number of ranks.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from basicsr.utils.errors import UserError
from basicsr.utils.registry import import_name
from basicsr.utils.rng import mix, mix_array

from .data_sampler import EnlargedSampler

_LARGEST_BLOCK = 1024  # indices computed at once


def build_sampler(
    dataset: Sized, dataset_opt: dict, num_replicas: int = 1, rank: int = 0, seed: int = 0
) -> Any:
    """Build the sampler of one rank's share of a training set.

    Args:
        dataset: The dataset; only its length is used.
        dataset_opt: Reads ``sampler`` (its ``type``, and arguments of that class) and
            ``dataset_enlarge_ratio``.
        num_replicas, rank: Number of ranks, and this one.
        seed: Seed of the order.
    """
    options = dict(dataset_opt.get('sampler') or {})
    name = options.pop('type', 'enlarged')
    ratio = dataset_opt.get('dataset_enlarge_ratio', 1)
    if name == 'enlarged':
        sampler_class, options['ratio'] = EnlargedSampler, ratio
    elif ratio != 1:
        raise UserError(
            f'datasets.train.dataset_enlarge_ratio {ratio} is only for the sampler enlarged: leave '
            f'it out with {name}, whose epochs have no such length.'
        )
    elif ':' in name:
        sampler_class = import_name(name, 'datasets.train.sampler', Iterable)
    elif name in ORDERS:
        sampler_class = ORDERS[name]
    else:
        raise UserError(
            f"datasets.train.sampler: unknown type '{name}'; choose enlarged, {', '.join(ORDERS)}, "
            'or your own class as module:Class.'
        )
    try:
        sampler = sampler_class(dataset, num_replicas=num_replicas, rank=rank, seed=seed, **options)
        size = len(sampler)
    except (TypeError, ValueError) as error:
        raise UserError(f'datasets.train.sampler {name}: {error}') from error
    if not hasattr(sampler, 'total_size'):
        sampler.total_size = size * num_replicas
    return sampler


class NumberedOrder(Sampler[int]):
    """Base class of the orders; a subclass maps positions of an epoch to indices.

    An epoch has ``total_size`` samples, whatever the number of ranks. A pass of one rank has
    ``len(self)``: the epoch's share, rounded up, so that the passes of all ranks are equally long.

    Args:
        dataset: Anything with a length.
        num_replicas, rank: Number of ranks, and this one.
        seed: Seed of the order.
    """

    def __init__(self, dataset: Sized, num_replicas: int = 1, rank: int = 0, seed: int = 0):
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.passes = 0
        self.total_size = len(dataset)

    def indices(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Indices of the samples at ``places`` (int64) of an epoch, all below ``total_size``."""
        raise NotImplementedError(f'{type(self).__name__} defines no indices.')

    def stream(self, number: int, step: int) -> Iterator[int]:
        """Indices of the samples ``number``, ``number + step``, …, endlessly."""
        block = 16  # small at first, so that training starts without delay
        while True:
            numbers = number + step * np.arange(block, dtype=np.int64)
            epochs, places = np.divmod(numbers, self.total_size)
            cuts = np.flatnonzero(np.diff(epochs)) + 1
            for first, part in zip((0, *cuts), np.split(places, cuts), strict=True):
                yield from self.indices(int(epochs[first]), part).tolist()
            number += step * block
            block = min(2 * block, _LARGEST_BLOCK)

    def __iter__(self) -> Iterator[int]:
        start = self.passes * len(self) * self.num_replicas + self.rank
        return itertools.islice(self.stream(start, self.num_replicas), len(self))

    def __len__(self) -> int:
        return -(-self.total_size // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Continue with pass ``epoch``."""
        self.passes = epoch


class SequentialOrder(NumberedOrder):
    """The set from its first to its last sample, repeated."""

    def indices(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return places


class RandomOrder(NumberedOrder):
    """Every sample once per epoch, reshuffled each time: eight bytes of memory per sample."""

    _order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def indices(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            self._order = epoch, self.shuffled(epoch, generator)
        return self._order[1][places]

    def shuffled(self, epoch: int, generator: torch.Generator) -> np.ndarray:
        """The indices of an epoch."""
        return torch.randperm(self.total_size, generator=generator).numpy()


class SubsetRandomOrder(RandomOrder):
    """A subset, reshuffled for each epoch.

    Args:
        indices: The subset: a list, or a file with one index per line (or a ``.npy`` array).
        fraction: Instead of ``indices``: the share of the set; ``seed`` selects the samples.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        indices: Sequence[int] | str | None = None,
        fraction: float | None = None,
    ):
        super().__init__(dataset, num_replicas, rank, seed)
        if (indices is None) == (fraction is None):
            raise UserError('give either indices or fraction.')
        if fraction is not None:
            if not 0 < fraction <= 1:
                raise UserError(f'fraction {fraction} is not in (0, 1].')
            count = max(round(fraction * len(dataset)), 1)
            self.subset = permuted(np.arange(count), len(dataset), mix(seed))
        else:
            numbers = _numbers(indices)
            self.subset = numbers.astype(np.int64)
            if (self.subset != numbers).any():
                raise UserError('an index must be a whole number.')
        if len(self.subset) and not 0 <= self.subset.min() <= self.subset.max() < len(dataset):
            raise UserError(
                f'an index must be from 0 to {len(dataset) - 1}; they range from '
                f'{self.subset.min()} to {self.subset.max()}.'
            )
        self.total_size = len(self.subset)

    def shuffled(self, epoch: int, generator: torch.Generator) -> np.ndarray:
        return self.subset[super().shuffled(epoch, generator)]


class WeightedRandomOrder(RandomOrder):
    """Samples drawn with individual weights.

    Args:
        weights: One for each sample, in any unit: a list, or a file with one per line (or a
            ``.npy`` array).
        replacement: Whether a sample may be drawn again within an epoch.
        num_samples: Draws in an epoch; default: the length of the set, or without replacement the
            number of samples with a weight above 0.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        weights: Sequence[float] | str = (),
        replacement: bool = True,
        num_samples: int | None = None,
    ):
        super().__init__(dataset, num_replicas, rank, seed)
        self.weights = _numbers(weights).astype(np.float64)
        if len(self.weights) != len(dataset):
            raise UserError(
                f'there are {len(self.weights)} weights for {len(dataset)} samples: give one each.'
            )
        if not np.isfinite(self.weights).all() or self.weights.min() < 0 or not self.weights.any():
            raise UserError('weights must be finite, not negative, and not all 0.')
        self.replacement = replacement
        eligible = np.count_nonzero(self.weights)
        self.total_size = num_samples or (len(dataset) if replacement else eligible)
        if not replacement and self.total_size > eligible:
            raise UserError(
                f'num_samples {num_samples} is more than the {eligible} samples with a weight: '
                'draw fewer, or set replacement: true.'
            )
        self._bounds = np.cumsum(self.weights / self.weights.max())

    def indices(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if not self.replacement:
            return super().indices(epoch, places)
        draws = _uniform(places, mix(self.seed, epoch)) * self._bounds[-1]
        # Rounding must not lead beyond the last sample with a weight.
        last = np.flatnonzero(self.weights)[-1]
        return np.minimum(np.searchsorted(self._bounds, draws, side='right'), last)

    def shuffled(self, epoch: int, generator: torch.Generator) -> np.ndarray:
        """Draws without replacement, by exponential clocks (Efraimidis and Spirakis 2006)."""
        eligible = np.flatnonzero(self.weights)
        times = -np.log1p(-_uniform(eligible, mix(self.seed, epoch))) / self.weights[eligible]
        return eligible[np.argsort(times, kind='stable')][: self.total_size]


class StreamedOrder(NumberedOrder):
    """Every sample once per epoch, in a pseudo-random order that needs no memory at any size."""

    def indices(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return permuted(places, self.total_size, mix(self.seed, epoch))


ORDERS = {
    'sequential': SequentialOrder,
    'random': RandomOrder,
    'subset_random': SubsetRandomOrder,
    'weighted_random': WeightedRandomOrder,
    'streamed': StreamedOrder,
}


def permuted(places: np.ndarray, count: int, seed: int, rounds: int = 12) -> np.ndarray:
    """The elements at given positions of a pseudo-random permutation of ``range(count)``.

    A Feistel network permutes the numbers of as many bits as ``count`` has; one that leaves the
    range is permuted again until it is back (Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002), on average less than twice.

    Args:
        places: int64, each in ``range(count)``.
        count: Length of the permutation, below 2 ** 62.
        seed: Which permutation.
        rounds: Rounds of the network; with few, small permutations would not look random.
    """
    bits = max((count - 1).bit_length(), 2)
    low, high = bits // 2, bits - bits // 2
    keys = [mix(seed, number) for number in range(rounds)]
    result = _feistel(places.astype(np.uint64), low, high, keys)
    while (outside := np.flatnonzero(result >= count)).size:
        result[outside] = _feistel(result[outside], low, high, keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, low: int, high: int, keys: list[int]) -> np.ndarray:
    left, right = values >> np.uint64(low), values & np.uint64(2**low - 1)
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (mix_array(left, key) >> np.uint64(64 - low))
        else:
            left = left ^ (mix_array(right, key) >> np.uint64(64 - high))
    return (left << np.uint64(low)) | right


def _uniform(places: np.ndarray, seed: int) -> np.ndarray:
    """A pseudo-random number in [0, 1) for each position."""
    return (mix_array(places.astype(np.uint64), seed) >> np.uint64(11)) * 2.0**-53


def _numbers(source: Sequence[float] | str | None) -> np.ndarray:
    """The numbers of a list, or of a file: one per line, or a .npy array."""
    if not isinstance(source, str):
        return np.asarray(source)
    path = Path(source).expanduser()
    try:
        if path.suffix == '.npy':
            return np.load(path, allow_pickle=False).ravel()
        return np.loadtxt(path, ndmin=1)
    except (ValueError, EOFError) as error:
        raise UserError(f'{path} holds no numbers, one per line or as .npy: {error}') from error

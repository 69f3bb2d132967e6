"""Progressive learning: schedules of crop and batch sizes (``datasets.train.progressive``).

Syed Waqas Zamir, Aditya Arora, Salman Khan, Munawar Hayat, Fahad Shahbaz Khan, Ming-Hsuan Yang,
"Restormer: Efficient Transformer for High-Resolution Image Restoration" (2022), section
"Progressive Learning", https://arxiv.org/abs/2111.09881
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from basicsr.utils.errors import UserError
from basicsr.utils.rng import mix


@dataclass(frozen=True)
class Stage:
    """A stage: consecutive iterations with the same crop and batch size.

    Attributes:
        first: Its first iteration, counted from 1.
        batch_size: Samples per GPU.
        sizes: Sides of the GT crops in pixels; each batch has one of them. Empty without
            ``progressive``, when the dataset has a single size.
    """

    first: int
    batch_size: int
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = ' or '.join(map(str, self.sizes))
        return f'From iteration {self.first} on: crops of {sizes}, {self.batch_size} per GPU.'


class Schedule:
    """The batch size and the crop size of every iteration.

    The crop size follows from the seed and the iteration, so it is the same on all ranks.

    Args:
        dataset_opt: Options of the training set.
        seed: Seed of the choice among the sizes of a stage.
        gpus: Number of GPUs that share a batch.
        start_iter: Iterations already done; iterating begins with the next one.

    Raises:
        ValueError: A stage has no crop size, nor has the training set.
    """

    def __init__(
        self, dataset_opt: Mapping[str, Any], seed: int = 0, gpus: int = 1, start_iter: int = 0
    ):
        self.seed = seed
        self.gpus = gpus
        self.start_iter = start_iter
        self.stages = training_stages(dataset_opt)
        self._firsts = [stage.first for stage in self.stages]

    def stage(self, iteration: int) -> Stage:
        """The stage of an iteration, counted from 1."""
        return self.stages[bisect_right(self._firsts, iteration) - 1]

    def batch_size(self, iteration: int) -> int:
        """Samples of the batch of all ``gpus``."""
        return self.stage(iteration).batch_size * self.gpus

    def gt_size(self, iteration: int) -> int:
        """Side of the GT crops of an iteration, in training with ``progressive``."""
        sizes = self.stage(iteration).sizes
        return sizes[mix(self.seed, iteration) % len(sizes)]

    def samples(self, iterations: int) -> int:
        """Samples of the first ``iterations`` batches of all ``gpus``."""
        ends = [*self._firsts[1:], iterations + 1]
        return sum(
            self.gpus * stage.batch_size * max(min(end, iterations + 1) - stage.first, 0)
            for stage, end in zip(self.stages, ends, strict=True)
        )

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The batch and crop sizes of a training with ``progressive``, endlessly."""
        for iteration in itertools.count(self.start_iter + 1):
            yield self.batch_size(iteration), self.gt_size(iteration)

    def check(self, dataset: Dataset) -> None:
        """Refuse a dataset that cannot crop to the sizes of all stages."""
        where = 'datasets.train.progressive'
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f'{where}: {type(dataset).__name__} is an IterableDataset, whose samples are not '
                'requested one by one, and so have no crop size: leave it out.'
            )
        for size in dict.fromkeys(size for stage in self.stages for size in stage.sizes):
            try:
                dataset.set_gt_size(size)  # pyright: ignore[reportAttributeAccessIssue]
            except AttributeError as error:
                if error.name != 'set_gt_size':
                    raise
                raise UserError(
                    f'{where}: {type(error.obj).__name__} has no crop size to change: give it a '
                    'method set_gt_size(gt_size), or leave the option out.'
                ) from error
            except ValueError as error:
                raise UserError(f'{where}: {error}') from error


def crop_sizes(dataset_opt: Mapping[str, Any]) -> list[int]:
    """All sides of the GT crops that a training set makes; empty if its options say none."""
    if dataset_opt.get('progressive'):
        stages = training_stages(dataset_opt)
        return sorted({size for stage in stages for size in stage.sizes})
    size = dataset_opt.get('gt_size')
    return [] if size is None else [size]


def training_stages(dataset_opt: Mapping[str, Any]) -> list[Stage]:
    """The stages of ``progressive``; without it, a single one that never ends.

    Raises:
        UserError: A stage has no crop size, and the training set has none either.
    """
    own_batch = dataset_opt['batch_size_per_gpu']
    if not dataset_opt.get('progressive'):
        return [Stage(1, own_batch)]
    stages, first = [], 1
    for number, options in enumerate(dataset_opt['progressive']):
        sizes = options.get('gt_size') or dataset_opt.get('gt_size')
        if sizes is None:
            raise UserError(
                f'datasets.train.progressive.{number}: gt_size is neither given here nor in '
                'datasets.train: give one.'
            )
        sizes = tuple(sizes) if isinstance(sizes, list) else (sizes,)
        stages.append(Stage(first, options.get('batch_size_per_gpu') or own_batch, sizes))
        first += options.get('iters') or 0
    return stages

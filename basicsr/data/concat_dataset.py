"""Concatenate several datasets, with optional sampling weights."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from basicsr.utils.errors import UserError
from basicsr.utils.registry import DATASET_REGISTRY

from . import build_dataset
from .batch_memory import StoredSample, gives_stored

# Options of the whole; parts inherit all others that they do not have themselves.
_OWN_OPTIONS = ('type', 'name', 'parts', 'weights')


@DATASET_REGISTRY.register(suffix='basicsr')
class ConcatDataset(Dataset):
    """The samples of several datasets, one dataset after the other.

    Args:
        opt: Options with the keys

            * ``parts``: a list of options of datasets, each with its ``type``. An option that a
              part lacks is taken from ``opt``;
            * ``weights``: in training, a number for each part: its share of an epoch, relative to
              the others'. Default: its length. An epoch has as many samples as all parts together.

    With weights, a part with more samples than its share gives a different selection in each epoch;
    one with fewer repeats them. The samples of all parts must have the same keys and sizes, so that
    they can be collated.
    """

    def __init__(self, opt: dict):
        self.opt = opt
        if not opt['parts']:
            raise UserError('parts is empty: give it the options of at least one dataset.')
        shared = {key: value for key, value in opt.items() if key not in _OWN_OPTIONS}
        self.parts = []
        for number, part in enumerate(opt['parts']):
            name = f'{opt.get("name", "mix")}_{number}'
            self.parts.append(build_dataset({**shared, 'name': name, **part}))
            if isinstance(self.parts[-1], IterableDataset):
                raise UserError(
                    f'parts: {part["type"]} is read sequentially, and cannot be mixed with '
                    'others: give it a training set of its own.'
                )
        self.gives_stored = all(map(gives_stored, self.parts))
        self.lengths = [len(part) for part in self.parts]
        weights = opt.get('weights')
        if weights is not None and opt.get('phase', 'train') != 'train':
            raise UserError('weights mix the parts at random, for training: leave them out here.')
        self.counts = shares(self.lengths, self.lengths if weights is None else weights)
        self.ends = np.cumsum(self.counts)

    def locate(self, index: int, rng: Any = random) -> tuple[int, int]:
        """The part that a sample is from, and its index there.

        The index is random if a part has fewer or more samples than its share.
        """
        part = int(np.searchsorted(self.ends, index, side='right'))
        place = index - int(self.ends[part] - self.counts[part])
        length, count = self.lengths[part], self.counts[part]
        if length == count:
            return part, place
        return part, min(int((place + rng.random()) * length / count), length - 1)

    def set_gt_size(self, gt_size: int) -> None:
        """Let all parts crop to ``gt_size`` from now on."""
        for part in self.parts:
            part.set_gt_size(gt_size)

    def __getitem__(self, index: int) -> Any:
        part, index = self._located(index, random)
        return part[index]

    def stored(self, index: int, rng: Any = random) -> StoredSample:
        """The sample before its conversion, if all parts support that."""
        part, index = self._located(index, rng)
        return part.stored(index, rng)

    def _located(self, index: int, rng: Any) -> tuple[Any, int]:
        if not 0 <= index < len(self):
            raise IndexError(f'sample {index} of {len(self)}.')
        part, index = self.locate(index, rng)
        return self.parts[part], index

    def __len__(self) -> int:
        return int(self.ends[-1])


def shares(lengths: list[int], weights: Sequence[float]) -> list[int]:
    """How many of ``sum(lengths)`` samples each part gives, in proportion to its weight."""
    if len(weights) != len(lengths) or min(weights) < 0 or not any(weights):
        raise UserError(
            f'weights {weights} must be {len(lengths)} numbers, one for each part, not negative '
            'and not all of them 0.'
        )
    for part, (length, weight) in enumerate(zip(lengths, weights, strict=True)):
        if weight and not length:
            raise UserError(f'parts: number {part} is empty.')
    ends = np.cumsum(weights) / sum(weights) * sum(lengths)
    return np.diff(np.rint(ends), prepend=0).astype(int).tolist()

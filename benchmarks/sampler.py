"""Time to the first index of an epoch, and the memory that an order of all indices takes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from basicsr.data.data_sampler import EnlargedSampler

from .measure import Result, Row, in_child, in_turn, seconds, with_peak


def measure(folder: Path, quick: bool) -> Result:
    """EnlargedSampler, and a list of all indices."""
    count = 30_000 if quick else 30_000_000
    sides = {
        name: partial(in_child, _seconds_and_peak, side, count)
        for name, side in (('ours', first_index), ('list', first_of_list))
    }
    raw = in_turn(sides, 1 if quick else 3)
    (time, peak), (list_time, list_peak) = (map(min, zip(*raw[n], strict=True)) for n in sides)
    rows = [
        Row(f'first of {count:,} indices / list', time, 's', list_time),
        Row(f'memory of {count:,} indices / list', peak, 'MB', list_peak),
    ]
    return Result(rows, raw)


def first_index(count: int) -> int:
    return next(iter(EnlargedSampler(range(count), 1, 0)))


def first_of_list(count: int) -> int:
    return torch.randperm(count).tolist()[0]


def _seconds_and_peak(side: Callable[[int], int], count: int) -> tuple[float, float]:
    return with_peak(seconds, side, count)

"""Samples per second of one process and one thread, from a PNG pair to two float tensors."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.utils.data import Dataset

from basicsr.data import build_dataset

from .measure import Result, Row, in_turn, seconds
from .photos import photo_pairs
from .plain import GT_SIZE, SCALE, DecodedPairs, RawPairs

SIZES = {(480, 480): 24, (1024, 800): 12, (2040, 1356): 6}  # of the GT; how many of them


def measure(folder: Path, quick: bool) -> Result:
    """Our dataset with its cache filled, filling and off; decoding each time; the limit."""
    sides = {}
    for (width, height), count in SIZES.items():
        roots = photo_pairs(folder, width, height, 1 if quick else count)
        for side, call in _sides(folder, roots, quick).items():
            sides[f'{width}x{height}', side] = call
    # Short rounds, and many: a slow moment of the machine then spoils few of them.
    times = in_turn(sides, 1 if quick else 15)
    rates = {key: 1 / min(found) for key, found in times.items()}  # of the least disturbed round

    sizes = list(dict.fromkeys(size for size, _ in sides))
    rows = []
    for size in sizes:
        filled, decoded, limit = (rates[size, side] for side in ('filled', 'decoded', 'limit'))
        goal = 60 if size == sizes[0] else None
        rows += [
            _row(f'{size}, cache filled / decoding', filled, decoded, goal),
            _row(f'{size}, cache filled / limit', filled, limit, 0.6),
            _row(f'{size}, cache filling / decoding', rates[size, 'filling'], decoded, 0.87),
            _row(f'{size}, cache off / decoding', rates[size, 'off'], decoded),
        ]
    for size in sizes[1:]:
        filled, smallest = (rates[which, 'filled'] for which in (size, sizes[0]))
        rows.append(_row(f'{size} / {sizes[0]}, cache filled', filled, smallest, 0.8))
    return Result(rows, {' '.join(key): found for key, found in times.items()})


def _row(what: str, value: float, reference: float, goal: float | None = None) -> Row:
    return Row(what, value, 'samples/s', reference, ('>=', goal) if goal else None)


def paired_dataset(roots: tuple[Path, Path], cache: str) -> Any:
    """Our training set of two folders."""
    options: dict[str, Any] = {'type': 'PairedImageDataset', 'phase': 'train', 'cache': cache}
    gt, lq = map(str, roots)
    return build_dataset(
        {**options, 'dataroot_gt': gt, 'dataroot_lq': lq, 'gt_size': GT_SIZE, 'scale': SCALE}
    )


def run_through(dataset: Dataset, indices: Iterable[int]) -> None:
    for index in indices:
        dataset[index]


def _sides(folder: Path, roots: tuple[Path, Path], quick: bool) -> dict[str, Callable[[], float]]:
    """What is compared, on the images of one size; each call gives seconds per sample."""
    filled = paired_dataset(roots, str(folder / 'cache'))
    decoded, limit = DecodedPairs(*roots), RawPairs(*roots)
    run_through(filled, range(len(decoded)))
    few = range(max(len(decoded) // 3, 1))
    every = [index % len(decoded) for index in range(10 if quick else 300)]
    return {
        'limit': partial(_per_sample, limit, every),
        'filled': partial(_per_sample, filled, every),
        'filling': partial(_filling, folder, roots, few),
        'off': partial(_per_sample, paired_dataset(roots, 'off'), few),
        'decoded': partial(_per_sample, decoded, few),
    }


def _filling(folder: Path, roots: tuple[Path, Path], indices: Sequence[int]) -> float:
    with TemporaryDirectory(dir=folder) as cache:
        return _per_sample(paired_dataset(roots, cache), indices)


def _per_sample(dataset: Dataset, indices: Sequence[int]) -> float:
    return seconds(run_through, dataset, indices) / len(indices)

"""Samples per second of one process and one thread, from a PNG pair to two float tensors.

For what the loader delivers, seconds are those that processors spend, in its worker too.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from basicsr.data import build_dataloader, build_dataset
from basicsr.data.data_sampler import EnlargedSampler

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
    delivered, found = _delivered(folder, 1 if quick else 10)
    return Result(rows + delivered, {' '.join(key): found for key, found in times.items()} | found)


def _row(what: str, value: float, reference: float, goal: float | None = None) -> Row:
    return Row(what, value, 'samples/s', reference, ('>=', goal) if goal else None)


def paired_dataset(roots: tuple[Path, Path], cache: str, uint8_batch: bool = False) -> Any:
    """Our training set of two folders."""
    options: dict[str, Any] = {'type': 'PairedImageDataset', 'phase': 'train', 'cache': cache}
    options |= {'gt_size': GT_SIZE, 'scale': SCALE, 'uint8_batch': uint8_batch}
    gt, lq = map(str, roots)
    return build_dataset({**options, 'dataroot_gt': gt, 'dataroot_lq': lq})


class RawBytes(RawPairs):
    """The limit of batches of bytes."""

    @staticmethod
    def to_tensor(img: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(img[..., ::-1].transpose(2, 0, 1)))


def _delivered(folder: Path, rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    """What arrives in the process of the training, with one worker, against raw pixels."""
    width, height = next(iter(SIZES))
    roots = photo_pairs(folder, width, height, SIZES[width, height])
    limits = {'float': RawPairs(*roots), 'bytes': RawBytes(*roots)}
    sides: dict[str, Callable[[], float]] = {}
    for kind, limit in limits.items():
        dataset = paired_dataset(roots, str(folder / 'cache'), kind == 'bytes')
        run_through(dataset, range(len(dataset)))
        options = {'batch_size_per_gpu': 32, 'num_worker_per_gpu': 1, 'prefetch_mode': 'cpu'}
        sampler = EnlargedSampler(dataset, 1, 0, ratio=1000)
        loader = build_dataloader(
            dataset, {'phase': 'train', **options}, 0, sampler=sampler, seed=1, start=0
        )
        sides[f'{kind} limit'] = partial(_raw_rate, limit)
        sides[kind] = partial(_delivered_rate, *_started(loader))
    found = in_turn(sides, rounds)
    best = {side: max(rates) for side, rates in found.items()}
    rows = [
        Row(f'delivered, {kind} / raw pixels', best[kind], 'per CPU s', best[f'{kind} limit'], goal)
        for kind, goal in (('float', ('>=', 0.65)), ('bytes', ('>=', 0.95)))
    ]
    return rows, {f'delivered {side}': rates for side, rates in found.items()}


def _started(loader: Any) -> tuple[Iterator, list[int]]:
    """The batches of a loader, of which the first are there, and its processes."""
    before = set(_children())
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    return batches, [pid for pid in _children() if pid not in before]


def _children() -> list[int]:
    tasks = Path('/proc/self/task').glob('*/children')
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _delivered_rate(batches: Iterator, workers: Sequence[int], count: int = 50) -> float:
    before = _processor_seconds(workers)
    samples = sum(len(next(batches)['gt']) for _ in range(count))
    return samples / (_processor_seconds(workers) - before)


def _raw_rate(dataset: Dataset, count: int = 1000) -> float:
    before = time.process_time()
    run_through(dataset, (index % len(dataset) for index in range(count)))  # pyright: ignore[reportArgumentType]
    return count / (time.process_time() - before)


def _processor_seconds(workers: Sequence[int]) -> float:
    """Of this process and its workers."""
    ticks = 0
    for pid in workers:
        fields = Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf('SC_CLK_TCK')


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

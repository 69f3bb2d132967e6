"""Time of one training iteration: ours, the bare step, and training that decodes each sample."""

import itertools
import json
import os
import re
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from basicsr.train import train_pipeline

from .measure import Result, Row, in_child, in_turn
from .photos import photo_pairs
from .plain import GT_SIZE, LR, NETWORK, SCALE, DecodedPairs, train
from .samples import paired_dataset, run_through

SIZES = {(480, 480): 24, (1024, 800): 12, (2040, 1356): 6}  # of the GT; how many of them
TINY = {(400, 400): 1}  # for --quick
BATCH, WORKERS = 16, 2


def measure_step(folder: Path, quick: bool) -> Result:
    """An iteration with workers, EMA, log and a checkpoint, and the two plain loops."""
    sizes = TINY if quick else SIZES
    largest = list(sizes)[-1]
    roots, count, skip = _prepare(folder, largest, quick)
    cores = os.cpu_count() or 1
    sides = {}
    for threads in sorted({1, cores}):
        sides['ours', threads] = partial(in_child, ours, folder, roots, count, skip, {}, threads)
        sides['bare', threads] = partial(in_child, bare, roots, count, skip, threads)
    for size, images in sizes.items():
        files = photo_pairs(folder, *size, images)
        sides[size, cores] = partial(in_child, decoded, files, 4 if quick else 24, cores)
    raw = in_turn(sides, 1 if quick else 5)
    least = {side: 1000 * min(times) for side, times in raw.items()}
    rows = [
        Row(
            f'iteration / bare step, {threads} of {cores} threads',
            least['ours', threads],
            'ms',
            least['bare', threads],
            ('<=', 1.08),
        )
        for threads in sorted({1, cores})
    ]
    for width, height in sizes:
        decoding = least[(width, height), cores]
        goal = ('>=', 2.5) if (width, height) == (1024, 800) else None
        what = f'iteration, decoding {width}x{height} / ours, {cores} threads'
        rows.append(Row(what, decoding, 'ms', least['ours', cores], goal))
    return Result(rows, {' '.join(map(str, side)): times for side, times in raw.items()})


def measure_uint8(folder: Path, quick: bool) -> Result:
    """The same training with batches that come as bytes, and as floats."""
    roots, count, skip = _prepare(folder, list(TINY if quick else SIZES)[-1], quick)
    cores = os.cpu_count() or 1
    sides = {
        name: partial(
            in_child, ours, folder, roots, count, skip, {'uint8_batch': name == 'bytes'}, cores
        )
        for name in ('bytes', 'floats')
    }
    raw = in_turn(sides, 1 if quick else 5)
    times = [1000 * min(raw[side]) for side in sides]
    return Result([Row('iteration, batches of bytes / of floats', times[0], 'ms', times[1])], raw)


def _prepare(
    folder: Path, size: tuple[int, int], quick: bool
) -> tuple[tuple[Path, Path], int, int]:
    """The images, decoded in a cache; iterations, and how many of them do not count."""
    roots = photo_pairs(folder, *size, (TINY if quick else SIZES)[size])
    dataset = paired_dataset(roots, str(folder / 'cache'))
    run_through(dataset, range(len(dataset)))
    count, skip = (4, 2) if quick else (80, 20)
    return roots, count, skip


def on_gpu(folder: str) -> list[float]:
    """Seconds of an iteration of ours, and of the bare step, on the GPU."""
    roots, _, _ = _prepare(Path(folder), (480, 480), quick=False)
    threads = os.cpu_count() or 1
    return [
        ours(Path(folder), roots, 300, 100, {}, threads, num_gpu=1),
        bare(roots, 300, 100, threads, device='cuda'),
    ]


def ours(
    folder: Path,
    roots: tuple[Path, Path],
    count: int,
    skip: int,
    extra: dict,
    threads: int,
    num_gpu: int = 0,
) -> float:
    """Seconds per iteration of ``train_pipeline``: between the first and the last log line."""
    torch.set_num_threads(threads)
    dataset: dict[str, Any] = {
        'type': 'PairedImageDataset',
        'dataroot_gt': str(roots[0]),
        'dataroot_lq': str(roots[1]),
        'gt_size': GT_SIZE,
        'cache': str(folder / 'cache'),
        'batch_size_per_gpu': BATCH,
        'num_worker_per_gpu': WORKERS,
    }
    opt = {
        'name': 'step',
        'model_type': 'SRModel',
        'scale': SCALE,
        'num_gpu': num_gpu,
        'datasets': {'train': dataset | extra},
        'network_g': NETWORK,
        'train': {
            'total_iter': count,
            'ema_decay': 0.999,
            'optim_g': {'type': 'Adam', 'lr': LR},
            'scheduler': {'type': 'MultiStepLR', 'milestones': [count]},
            'pixel_opt': {'type': 'L1Loss'},
        },
        'logger': {'print_freq': skip, 'save_checkpoint_freq': count // 2},
    }
    option_file = folder / 'step.yml'
    option_file.write_text(json.dumps(opt))  # JSON is YAML
    sys.argv = ['train.py', '-opt', str(option_file)]
    train_pipeline(folder)

    log = max((folder / 'experiments/step').glob('*.log')).read_text()
    lines = re.findall(r'^([-\d]+ [\d:,]+) INFO: .*iter: *([\d,]+), lr', log, re.MULTILINE)
    (first, begin), (last, end) = (
        (datetime.fromisoformat(when), int(iteration.replace(',', '')))
        for when, iteration in (lines[0], lines[-1])
    )
    return (last - first).total_seconds() / (end - begin)


def bare(
    roots: tuple[Path, Path], count: int, skip: int, threads: int, device: str = 'cpu'
) -> float:
    """Seconds per step on one batch that stays in memory."""
    torch.set_num_threads(threads)
    dataset = DecodedPairs(*roots)
    batch = default_collate([dataset[i % len(dataset)] for i in range(BATCH)])
    batch = {key: value.to(device) for key, value in batch.items()}
    return train(itertools.repeat(batch, count), skip, device)


def decoded(roots: tuple[Path, Path], count: int, threads: int) -> float:
    """Seconds per step where as many workers decode both images of each sample."""
    torch.set_num_threads(threads)
    dataset = DecodedPairs(*roots)
    sampler = RandomSampler(dataset, replacement=True, num_samples=count * BATCH)
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS)
    return train(loader, skip=count // 4)

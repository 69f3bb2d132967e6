"""A training set of a million pairs: building its loader, and the memory of a worker process."""

import itertools
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from basicsr.data import build_dataloader, build_dataset
from basicsr.data.data_sampler import EnlargedSampler

from .measure import Result, Row, in_child, memory, with_peak
from .photos import photo_pairs
from .plain import GT_SIZE, SCALE

MOST_LINKS = 50_000  # of one file; ext4 allows 65,000
BATCHES = 20  # that the workers have made when they are looked at


def measure(folder: Path, quick: bool) -> Result:
    """Loaders of one pair and of very many, these without and with a cache."""
    count = 2000 if quick else 1_000_000
    roots = photo_pairs(folder, GT_SIZE, GT_SIZE, 1)
    many = linked_copies(folder / 'many', roots, count)
    raw = {
        'one': in_child(_look, roots, 'off'),
        'many': in_child(_look, many, 'off'),
        'many, cached': in_child(_look, many, str(folder / 'cache')),
    }
    shutil.rmtree(folder / 'many')
    rows = []
    for name, cache in (('many', 'off'), ('many, cached', 'on')):
        what = f'{count:,} pairs, cache {cache}'
        rows += [
            Row(f'{what}: loader built', raw[name]['seconds'], 's'),
            Row(f'{what}: memory to build it', raw[name]['peak'], 'MB'),
        ]
        for kind in ('rss', 'pss', 'uss'):
            more = raw[name][kind] - raw['one'][kind]
            goal = ('<=', 150) if kind == 'rss' else None
            rows.append(
                Row(f'{what}: {kind} of a worker, above that with 1 pair', more, 'MB', goal=goal)
            )
    return Result(rows, raw)


def linked_copies(folder: Path, roots: tuple[Path, Path], count: int) -> tuple[Path, Path]:
    """Folders with ``count`` names of the one image of each root, all links to a few files."""
    made = []
    for root in roots:
        target = folder / root.name
        target.mkdir(parents=True)
        content = next(root.iterdir()).read_bytes()
        for start in range(0, count, MOST_LINKS):
            first = target / f'image_{start:08d}.png'
            first.write_bytes(content)
            for number in range(start + 1, min(start + MOST_LINKS, count)):
                os.link(first, f'{target}/image_{number:08d}.png')
        made.append(target)
    return made[0], made[1]


def _look(roots: tuple[Path, Path], cache: str) -> dict[str, float]:
    """Build a loader and use it; the memory is the mean over its workers."""
    start = time.perf_counter()
    loader, peak = with_peak(build, roots, cache)
    built = time.perf_counter() - start
    batches = iter(loader)
    for _ in itertools.islice(batches, BATCHES):
        pass
    workers = [memory(process.pid) for process in multiprocessing.active_children()]
    means = {kind: sum(w[kind] for w in workers) / len(workers) for kind in workers[0]}
    return {'seconds': built, 'peak': peak, **means}


def build(roots: tuple[Path, Path], cache: str) -> DataLoader:
    """The loader of a training run."""
    gt, lq = map(str, roots)
    opt: dict[str, Any] = {
        'type': 'PairedImageDataset',
        'phase': 'train',
        'dataroot_gt': gt,
        'dataroot_lq': lq,
        'scale': SCALE,
        'gt_size': GT_SIZE,
        'cache': cache,
        'batch_size_per_gpu': 16,
        'num_worker_per_gpu': 2,
    }
    dataset = build_dataset(opt)
    return build_dataloader(dataset, opt, sampler=EnlargedSampler(dataset, 1, 0), start=0)

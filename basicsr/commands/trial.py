"""One trial of ``basicsr tune``: benchmark a short training in a separate process."""

import copy
import functools
import json
import operator
import os
import sys
import time
from collections.abc import Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from basicsr.data import gpus_per_process
from basicsr.data.samplers import SubsetRandomOrder
from basicsr.models import build_model
from basicsr.run.cores import usable_cores
from basicsr.run.loaders import build_loaders, prefetch, schedule_of_all_ranks
from basicsr.run.program import prepare, run
from basicsr.utils.registry import DATASET_REGISTRY
from basicsr.utils.yaml_util import OptionError

from .tune import KEYS, Report

# The first iterations start workers, decode images, select kernels and compile, so they are not
# timed; their losses are compared.
WARM_UP = 8
_BLOCKS = 5  # blocks of iterations, whose median is reported
_IMAGES = 64  # maximum number of images, read repeatedly; also at most four batches


class FewImages(SubsetRandomOrder):
    """Repeats ``count`` samples of a set, so that they load as fast as in later epochs."""

    def __init__(self, dataset: Sized, count: int, **options: Any):
        super().__init__(dataset, fraction=min(count / max(len(dataset), 1), 1.0), **options)


def steady(durations: list[float]) -> tuple[float, float]:
    """Seconds per iteration, and their relative standard error.

    The median over blocks is robust against other load on the machine. A median over single
    iterations would be biased, since batches arrive in bursts, one from each worker.
    """
    means = np.array([block.mean() for block in np.array_split(durations, _BLOCKS)])
    return float(np.median(means)), float(means.std(ddof=1) / _BLOCKS**0.5 / means.mean())


def measure(request: dict[str, Any], root_path: Path) -> None:
    """Train with the options of the command line, and write a ``Report`` for ``basicsr tune``."""
    opt, folder = prepare(root_path, is_train=True)[0], Path(request['folder'])
    settings = {
        name: functools.reduce(operator.getitem, path.split(':'), opt)
        for name, path in KEYS.items()
    }
    is_gpu = opt['num_gpu'] > 0
    if is_gpu:
        torch.cuda.set_per_process_memory_fraction(request['memory'])
    timing = train_shortly(on_few_images(opt, str(folder / 'cache')), request['seconds'])
    cores = len(usable_cores()) // gpus_per_process(opt['num_gpu'], opt['dist'])
    report = Report(settings=settings, cores=cores, **timing, **(_gpu() if is_gpu else _cpu()))
    (folder / 'report.json').write_text(json.dumps(report._asdict()), encoding='utf-8')


def _gpu() -> dict[str, Any]:
    is_made_for_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {
        'device': torch.cuda.get_device_name(),
        'memory': torch.cuda.max_memory_allocated(),
        'total_memory': torch.cuda.get_device_properties().total_memory,
        'half': 'bf16' if is_made_for_bf16 else 'fp16',
    }


def _cpu() -> dict[str, Any]:
    import resource  # POSIX only

    unit = 1 if sys.platform == 'darwin' else 1024
    return {
        'device': 'the CPU',
        'memory': unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        'total_memory': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
        'half': None,
    }


def on_few_images(opt: dict, cache: str) -> dict:
    """The options without validation and with only a few images, cached in ``cache``."""
    dataset_opt = copy.deepcopy(opt['datasets']['train'])
    for owner in (dataset_opt, *(dataset_opt.get('parts') or ())):  # of a ConcatDataset
        if owner.get('cache', 'off') not in ('off', False):
            owner['cache'] = cache
    if not issubclass(DATASET_REGISTRY.get(dataset_opt['type']), IterableDataset):
        count = min(4 * schedule_of_all_ranks(opt).batch_size(1), _IMAGES)
        dataset_opt['sampler'] = {'type': 'basicsr.commands.trial:FewImages', 'count': count}
        dataset_opt['dataset_enlarge_ratio'] = 1
    return {**opt, 'datasets': {'train': dataset_opt}, 'val': None}


def train_shortly(opt: dict, seconds: float) -> dict[str, Any]:
    """Run training steps; returns the timing and losses for a ``Report``."""
    first = opt['train'].get('net_d_init_iters') or 0  # until then only net_d is trained
    numbers = range(first + 1, opt['train']['total_iter'] + 1)
    if len(numbers) < WARM_UP + _BLOCKS:
        raise OptionError(f'train.total_iter: tuning needs {first + WARM_UP + _BLOCKS} at least.')
    loaders, model = build_loaders(opt), build_model(opt)
    losses, durations, waited = [], [], 0.0
    begin = last = time.perf_counter()
    for current_iter, data in zip(numbers, prefetch(loaders.train, opt), strict=False):
        arrival = time.perf_counter()
        model.begin_iteration(data, current_iter, loaders.schedule.batch_size(current_iter))
        model.optimize_parameters(current_iter)
        model.end_iteration(current_iter)
        if len(losses) < WARM_UP:
            log = model.get_current_log()  # synchronizes with the device
            losses.append({name: value for name, value in log.items() if name.startswith('l_')})
            begin = last = time.perf_counter()
            continue
        waited += arrival - last
        durations.append(time.perf_counter() - last)
        last += durations[-1]
        if len(durations) >= _BLOCKS and last - begin >= seconds:
            break
    if model.device.type == 'cuda':
        torch.cuda.synchronize()
        durations[-1] += time.perf_counter() - last
    per_iteration, noise = steady(durations)
    return {
        'speed': loaders.schedule.batch_size(1) / per_iteration,
        'noise': noise,
        'waiting': waited / sum(durations),
        'losses': losses,
    }


if __name__ == '__main__':
    run(functools.partial(measure, json.loads(sys.argv.pop(1))), Path.cwd())

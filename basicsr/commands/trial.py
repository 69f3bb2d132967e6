"""One trial of ``basicsr tune``: a short training in a process of its own, and what it took."""

import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from basicsr.data import gpus_per_process
from basicsr.data.samplers import SubsetRandomOrder
from basicsr.models import build_model
from basicsr.run.cores import usable_cores
from basicsr.run.loaders import build_loaders, prefetch, schedule_of_all_ranks
from basicsr.run.program import prepare
from basicsr.utils.registry import DATASET_REGISTRY
from basicsr.utils.yaml_util import OptionError

from .tuning import KEYS, Report

# The first iterations start workers, decode the images, choose kernels and compile; their losses
# are compared.
WARM_UP = 8
_AT_LEAST = 5  # iterations that are timed
_IMAGES = 64  # at most, that are read again and again; no more than four batches
_BLOCKS = 5  # of iterations, of which the median one counts


class FewImages(SubsetRandomOrder):
    """Some samples of a set, again and again, so that they are as quick as in a later epoch.

    Args:
        count: Of the samples, if the set has so many.
    """

    def __init__(
        self, dataset: Sized, num_replicas: int = 1, rank: int = 0, seed: int = 0, count: int = 1
    ):
        share = min(count / max(len(dataset), 1), 1.0)
        super().__init__(dataset, num_replicas, rank, seed, fraction=share)


def steady(durations: list[float]) -> tuple[float, float]:
    """Seconds per iteration, and their relative standard error.

    It is the median of the means of a few blocks of iterations: what else the machine did meanwhile
    is in one block or the other. A median of single iterations would be wrong, since batches come
    in bursts, one from each worker.
    """
    count = min(_BLOCKS, len(durations))
    bounds = [round(number * len(durations) / count) for number in range(count + 1)]
    means = [statistics.fmean(durations[i:k]) for i, k in itertools.pairwise(bounds)]
    error = statistics.stdev(means) / math.sqrt(count) / statistics.fmean(means)
    return statistics.median(means), error


def measure(root_path: Path, request: dict[str, Any]) -> None:
    """Train as the command line says, and write a ``Report``.

    Args:
        root_path: As for a training.
        request: ``seconds`` to train for, ``memory``, the share of a GPU's that may be taken,
            ``cache``, the folder for decoded images, and ``report``, the file to write.
    """
    opt, _ = prepare(root_path, is_train=True)
    settings = {
        name: functools.reduce(lambda section, key: section[key], path.split(':'), opt)
        for name, path in KEYS.items()
    }
    opt = _for_trial(opt, request)
    has_gpu = opt['num_gpu'] > 0
    if has_gpu:
        torch.cuda.set_per_process_memory_fraction(request['memory'])
    loader = build_loaders(opt).train
    model = build_model(opt)
    durations, waiting, losses = _train(opt, model, loader, request['seconds'])
    seconds, noise = steady(durations)
    gpus = gpus_per_process(opt['num_gpu'], opt['dist'])
    report = Report(
        speed=schedule_of_all_ranks(opt).batch_size(1) / seconds,
        noise=noise,
        waiting=waiting,
        memory=torch.cuda.max_memory_allocated() if has_gpu else _resident(),
        losses=losses,
        settings=settings,
        device=torch.cuda.get_device_name() if has_gpu else 'the CPU',
        total_memory=_memory(has_gpu),
        half=_half() if has_gpu else None,
        cores=len(usable_cores()) // gpus,
        seed=opt['manual_seed'],
    )
    Path(request['report']).write_text(json.dumps(vars(report)), encoding='utf-8')


def _for_trial(opt: dict, request: dict[str, Any]) -> dict:
    """The options without validation, on a few images, whose pixels are kept aside."""
    dataset_opt = dict(opt['datasets']['train'])
    if dataset_opt['progressive']:  # the stages that follow are other trainings
        dataset_opt['progressive'] = [{**dataset_opt['progressive'][0], 'iters': None}]
    if dataset_opt.get('parts'):  # of a ConcatDataset
        dataset_opt['parts'] = [dict(part) for part in dataset_opt['parts']]
    for owner in (dataset_opt, *(dataset_opt.get('parts') or ())):
        if owner.get('cache', 'off') not in ('off', False):
            owner['cache'] = request['cache']
    if not issubclass(DATASET_REGISTRY.get(dataset_opt['type']), IterableDataset):
        count = min(4 * schedule_of_all_ranks(opt).batch_size(1), _IMAGES)
        dataset_opt['sampler'] = {'type': 'basicsr.commands.trial:FewImages', 'count': count}
        dataset_opt['dataset_enlarge_ratio'] = 1
    Path(opt['path']['experiments_root']).mkdir(parents=True, exist_ok=True)
    return {**opt, 'datasets': {'train': dataset_opt}, 'val': None}


def _train(
    opt: dict, model: Any, loader: Any, seconds: float
) -> tuple[list[float], float, list[dict[str, float]]]:
    """Make steps as a training does.

    Returns:
        Seconds of each iteration after the first ones, the share of them spent waiting for data,
        and the losses of the first ones.
    """
    # Before, only the discriminator is trained.
    first, total_iter = opt['train'].get('net_d_init_iters') or 0, opt['train']['total_iter']
    if total_iter < first + WARM_UP + _AT_LEAST:
        raise OptionError(
            f'train.total_iter: {total_iter} is too short a run to be tuned; a trial makes '
            f'{first + WARM_UP + _AT_LEAST} iterations at least.'
        )
    schedule = schedule_of_all_ranks(opt)
    losses, durations, waited = [], [], []
    begin = last = time.perf_counter()
    numbers = range(first + 1, total_iter + 1)
    for current_iter, data in zip(numbers, prefetch(loader, opt), strict=False):
        waited.append(time.perf_counter() - last)
        model.begin_iteration(data, current_iter, schedule.batch_size(current_iter))
        model.optimize_parameters(current_iter)
        model.end_iteration(current_iter)
        if len(waited) <= WARM_UP:
            log = model.get_current_log()  # waits for the device
            losses.append({name: value for name, value in log.items() if name.startswith('l_')})
            begin = last = time.perf_counter()
            continue
        durations.append(time.perf_counter() - last)
        last += durations[-1]
        if len(durations) >= _AT_LEAST and last - begin >= seconds:
            break
    if model.device.type == 'cuda':
        torch.cuda.synchronize()
        durations[-1] += time.perf_counter() - last
    return durations, sum(waited[WARM_UP:]) / sum(durations), losses


def _resident() -> int:
    """Largest resident memory of this process in bytes."""
    import resource  # POSIX alone

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == 'darwin' else 1024 * size


def _memory(has_gpu: bool) -> int:
    """Memory of the GPU, or of the machine, in bytes."""
    if has_gpu:
        return torch.cuda.get_device_properties().total_memory
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def _half() -> str:
    return 'bf16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'fp16'


if __name__ == '__main__':
    from basicsr.run.program import run

    order = json.loads(sys.argv.pop(1))
    run(functools.partial(measure, request=order), Path.cwd())

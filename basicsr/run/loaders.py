"""Build the datasets, samplers and data loaders of a training run."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from basicsr.data import build_dataloader, build_dataset, gpus_per_process
from basicsr.data.bad_images import BadImages
from basicsr.data.prefetch_dataloader import CPUPrefetcher, CUDAPrefetcher, images_to_float
from basicsr.data.progressive import Schedule
from basicsr.data.samplers import build_sampler
from basicsr.utils.errors import UserError

from .agreement import check_same_data
from .cores import report_cores

logger = logging.getLogger(__name__)


@dataclass
class Loaders:
    """The loaders of a training run.

    Attributes:
        train: The training loader; it never ends.
        sampler: The training sampler; for an IterableDataset, its sample stream.
        val: The loaders of the validation sets.
        schedule: Batch and crop sizes of all ranks, step by step.
        samples_before: Training samples seen before the run resumed.
    """

    train: Any
    sampler: Any
    val: list[Any]
    schedule: Schedule
    samples_before: int

    def epoch(self, samples: int) -> int:
        """The epoch after ``samples`` samples, counted from 0."""
        return samples // self.sampler.total_size


def build_loaders(opt: dict, resume_state: Mapping[str, Any] | None = None) -> Loaders:
    """Build all datasets and their loaders."""
    if 'train' not in opt['datasets']:
        raise UserError('datasets has no train section: there is nothing to train on.')
    schedule = schedule_of_all_ranks(opt)
    before = (resume_state or {}).get('iter', 0)
    samples = (resume_state or {}).get('samples', schedule.samples(before))
    if resume_state:
        _warn_of_another_batch(schedule.batch_size(before), resume_state.get('batch'))
    datasets = {key: build_dataset(options) for key, options in opt['datasets'].items()}
    check_same_data(datasets)
    train, sampler = _training_loader(opt, datasets['train'], samples, before)
    _log_statistics(opt, datasets, sampler, schedule)
    return Loaders(train, sampler, _validation_loaders(opt, datasets), schedule, samples)


def schedule_of_all_ranks(opt: dict) -> Schedule:
    """The schedule of batches over all processes, step by step."""
    gpus = gpus_per_process(opt['num_gpu'], opt['dist']) * opt['world_size']
    return Schedule(opt['datasets']['train'], opt['manual_seed'], gpus)


def _training_loader(opt: dict, dataset: Any, samples: int, iteration: int) -> tuple[Any, Any]:
    options, seed, sampler = opt['datasets']['train'], opt['manual_seed'], None
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream and options['sampler']:
        raise UserError('datasets.train.sampler: an IterableDataset has its own order.')
    if not is_stream:
        sampler = build_sampler(dataset, options, opt['world_size'], opt['rank'], seed)
    file = Path(opt['path']['experiments_root']) / 'skipped.jsonl'
    bad_images = BadImages(
        file if options['on_error'] == 'skip' else None, None if is_stream else len(dataset)
    )
    gpus = opt['num_gpu'], opt['dist']
    loader = build_dataloader(
        *(dataset, options, *gpus, sampler, seed, samples, iteration), bad_images=bad_images
    )
    report_cores(loader.num_workers, opt['num_gpu'] > 0)
    return loader, loader.dataset if is_stream else sampler


def _validation_loaders(opt: dict, datasets: Mapping[str, Any]) -> list[Any]:
    loaders = []
    for key, options in opt['datasets'].items():
        if options['phase'] != 'val':
            continue
        if opt['val'] is None:
            logger.warning('%s is not used: there is no val section.', options['name'])
            continue
        loaders.append(build_dataloader(datasets[key], options, opt['num_gpu'], opt['dist']))
    return loaders


def _log_statistics(
    opt: dict, datasets: Mapping[str, Any], sampler: Any, schedule: Schedule
) -> None:
    total_iter, stages = opt['train']['total_iter'], schedule.stages
    begun = sum(stage.first <= total_iter for stage in stages)
    if begun < len(stages):
        logger.warning(
            'datasets.train.progressive: %d of %d stages begin, as the run ends after iteration '
            '%d.',
            *(begun, len(stages), total_iter),
        )
    per_step = [schedule.gpus * stage.batch_size for stage in stages]
    per_epoch = [f'{sampler.total_size / size:.1f}' for size in per_step]
    is_stream = isinstance(datasets['train'], IterableDataset)
    number = 'unknown' if is_stream else f'{len(datasets["train"]):,d}'
    others = [(options['name'], key) for key, options in opt['datasets'].items() if key != 'train']
    counts = ''.join(f', {len(datasets[key]):,d} in {name}' for name, key in others)
    epochs = math.ceil(schedule.samples(total_iter) / sampler.total_size)
    logger.info(
        'Data: %s images to train on%s. %s iterations of %s samples: %s epochs.',
        *(number, counts, f'{total_iter:,d}', _listed(per_step), f'{epochs:,d}'),
    )
    logger.info(
        'Training statistics:'
        f'\n\tNumber of train images: {number}'
        f'\n\tDataset enlarge ratio: {opt["datasets"]["train"]["dataset_enlarge_ratio"]}'
        f'\n\tBatch size per gpu: {_listed(stage.batch_size for stage in stages)}'
        f'\n\tWorld size (gpu number): {opt["world_size"]}'
        f'\n\tSamples per iteration: {_listed(per_step)}'
        f'\n\tRequire iter number per epoch: {_listed(per_epoch)}'
        f'\n\tTotal epochs: {epochs}; iters: {total_iter}.',
        extra={'file_only': True},
    )


def _listed(values: Any) -> str:
    """The values of the training stages, in order."""
    return ', '.join(map(str, values))


def _warn_of_another_batch(size: int, before: int | None) -> None:
    """Warn if the global batch size of a resumed run has changed, e.g. with the number of GPUs."""
    if before is not None and before != size:
        logger.warning(
            'Resume: %d samples per iteration, and %d before. datasets.train.batch_size_total: %d '
            'keeps the total.',
            *(size, before, before),
        )


def prefetch(train_loader: Any, opt: dict) -> Iterator[dict]:
    """The batches of the loader, prefetched to the GPU with ``prefetch_mode: cuda``."""
    dataset_opt = opt['datasets']['train']
    batches, are_bytes = CPUPrefetcher(train_loader), dataset_opt['uint8_batch']
    if dataset_opt['prefetch_mode'] == 'cuda':
        if opt['num_gpu'] == 0:
            logger.warning('prefetch_mode cuda has no effect on the CPU.')
        elif not dataset_opt['pin_memory']:
            raise UserError('prefetch_mode cuda needs datasets.train.pin_memory: true.')
        if opt['num_gpu'] and getattr(train_loader.dataset, 'takes_stored', False):
            train_loader.to_float, are_bytes = False, True  # a quarter to copy, converted there
        batches = CUDAPrefetcher(train_loader, opt)
    return map(images_to_float, batches) if are_bytes else iter(batches)


def create_train_val_dataloader(
    opt: dict, logger: Any, resume_state: Mapping[str, Any] | None = None
) -> tuple[Any, Any, list, int, int]:
    """``build_loaders`` with the interface of BasicSR 1.x.

    Returns:
        The endless training loader, its sampler, the validation loaders, and the total numbers of
        epochs and iterations.
    """
    loaders, total_iter = build_loaders(opt, resume_state), opt['train']['total_iter']
    epochs = math.ceil(loaders.schedule.samples(total_iter) / loaders.sampler.total_size)
    return loaders.train, loaders.sampler, loaders.val, epochs, total_iter

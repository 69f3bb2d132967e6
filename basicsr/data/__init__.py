"""Build datasets and data loaders for training, validation and test."""

import functools
import logging
import random
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.errors import MissingKeyError, UserError
from basicsr.utils.lazy import lazy_exports
from basicsr.utils.option_section import place_of
from basicsr.utils.registry import DATASET_REGISTRY, building, import_name, plugin_modules
from basicsr.utils.rng import mix, seed_cpu, seeded

from .bad_images import MOST_ATTEMPTS, BadImages, ReportedDataset, collate_reported
from .batch_memory import BatchMemory, StoredSample, gives_stored, warn_of_large_batches
from .data_sampler import BatchStream, NumberedSampler
from .data_util import ImageReader
from .device_set import DeviceSetLoader
from .image_cache import ImageCache
from .prefetch_dataloader import PrefetchDataLoader
from .progressive import Schedule
from .sample_stream import SampleStream
from .shared import DatasetWrapper
from .workers import worker_init_fn

__all__ = ['build_dataloader', 'build_dataset']

logger = logging.getLogger(__name__)

__getattr__ = lazy_exports(
    __name__, {'basicsr.utils.logger': 'get_root_logger', 'basicsr.utils.misc': 'scandir'}
)


def build_dataset(dataset_opt: dict) -> Any:
    """Build the dataset named by ``dataset_opt['type']`` from a copy of the options."""
    dataset_opt = deepcopy(dataset_opt)
    name = dataset_opt.get('name', dataset_opt['type'])
    section = place_of(dataset_opt) or f'datasets.{dataset_opt.get("phase", "?")}'
    where = f'{section} ({name})'
    dataset_class = DATASET_REGISTRY.get(dataset_opt['type'])
    try:
        with building(f'{where} from {dataset_opt}'):
            dataset = dataset_class(dataset_opt)
    except KeyError as error:
        raise MissingKeyError(
            f'{where}: {dataset_opt["type"]} needs the option {error}.'
        ) from error
    except OSError as error:
        raise type(error)(f'{_where_named(dataset_opt, str(error)) or where}: {error}') from error
    except ValueError as error:  # subclasses take other arguments
        raise UserError(f'{where}: {error}') from error
    logger.info(
        'Dataset [%s] - %s is built.', type(dataset).__name__, name, extra={'file_only': True}
    )
    return dataset


def _where_named(dataset_opt: dict, message: str) -> str:
    """The option whose path a message names, with the folder that relative paths start from."""
    for key, value in dict.items(dataset_opt):
        if 'dataroot' not in key and 'meta_info' not in key:
            continue
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and path in message:
                start = '' if Path(path).is_absolute() else f', looked up from {Path.cwd()}'
                return f'{place_of(dataset_opt, key)}{start}'
    return ''


def build_dataloader(
    dataset: Dataset,
    dataset_opt: dict,
    num_gpu: int = 1,
    dist: bool = False,
    sampler: Sampler | None = None,
    seed: int | None = None,
    start: int | None = None,
    start_iter: int = 0,
    bad_images: BadImages | None = None,
) -> DataLoader:
    """Build the loader of a dataset for its phase.

    In training every random decision about a sample is determined by ``seed`` and the sample number
    (its position in the order of the run), independent of the worker. Validation and test load the
    images one at a time, in order, with a thread that reads ahead.

    Args:
        dataset: Any dataset; an IterableDataset only in training, and without ``sampler``.
        dataset_opt: Its completed options.
        num_gpu: Without ``dist``, number of GPUs that the batch of one process is for.
        dist: Whether each GPU has its own process.
        sampler: Order of the samples in training; default: shuffled.
        seed: Seed of the samples' randomness; default 0.
        start: If given, the loader is endless: batches continue across epochs, starting after this
            many samples (counted over all ranks).
        start_iter: Number of batches before ``start``, for ``progressive``.
        bad_images: In training, whether unreadable images are replaced; default: they end the run.
    """
    phase = dataset_opt['phase']
    if phase not in ('train', 'val', 'test'):
        raise UserError(f"phase is '{phase}'; it must be 'train', 'val' or 'test'.")
    rank, world_size = get_dist_info()
    workers = dataset_opt.get('num_worker_per_gpu', 0)
    # In training, a thread without worker processes would share random generators with the step.
    reads_ahead = workers > 0 and dataset_opt.get('prefetch_mode') in ('cpu', 'cuda')
    prefetch = phase != 'train' or reads_ahead
    options: dict[str, Any] = {
        'pin_memory': dataset_opt.get('pin_memory', False),
        'generator': torch.Generator(),  # for the workers' seeds; the global one is the model's
    }
    if phase == 'train':
        seed, bad_images = seed or 0, bad_images or BadImages()
        workers *= gpus_per_process(num_gpu, dist)
        batch_size = dataset_opt['batch_size_per_gpu'] * gpus_per_process(num_gpu, dist)
        schedule = None
        if dataset_opt.get('progressive'):
            schedule = Schedule(dataset_opt, seed, gpus_per_process(num_gpu, dist), start_iter)
            schedule.check(dataset)
        if isinstance(dataset, IterableDataset):
            dataset = SampleStream(dataset, seed, batch_size, world_size, rank, start)
            dataset.bad_images = bad_images
            options.update(batch_size=batch_size, drop_last=True)
        else:
            ranks = world_size, rank
            options |= _batching(dataset, sampler, seed, batch_size, *ranks, start, schedule)
            dataset = SeededDataset(dataset, seed, sampler, bad_images)
        if dataset_opt.get('collate_fn') is not None:
            name = dataset_opt['collate_fn']
            options['collate_fn'] = import_name(name, 'datasets.train.collate_fn')
        elif prefetch and start is not None:
            options['collate_fn'] = BatchMemory()
            if isinstance(dataset, SeededDataset):
                dataset.takes_stored = gives_stored(dataset.dataset)
    elif isinstance(dataset, IterableDataset):
        raise UserError(
            f'{type(dataset).__name__} is an IterableDataset, whose images have no indices: it can '
            f'be trained on, not used in datasets.{phase}.'
        )
    else:
        dataset = ReportedDataset(dataset)
        options.update(batch_size=1, shuffle=False, collate_fn=collate_reported)
    if phase == 'train' and dataset_opt.get('cache') == 'device':
        device = torch.device('cuda' if num_gpu and torch.cuda.is_available() else 'cpu')
        return _device_loader(dataset, dataset_opt, device, workers, options)
    if phase == 'train':
        warn_of_large_batches(dataset_opt, gpus_per_process(num_gpu, dist), workers)
    if workers:
        # An endless loader is iterated only once.
        keeps_workers = dataset_opt.get('persistent_workers', False) and start is None
        options['persistent_workers'] = keeps_workers
        options['worker_init_fn'] = functools.partial(
            worker_init_fn,
            num_workers=workers,
            rank=rank,
            seed=seed or 0,
            modules=tuple(plugin_modules),
        )
    options.update(dataset=dataset, num_workers=workers)
    if prefetch:
        return PrefetchDataLoader(dataset_opt.get('num_prefetch_queue', 1), **options)
    return DataLoader(**options)


def _device_loader(
    dataset: Any, dataset_opt: dict, device: torch.device, workers: int, options: dict[str, Any]
) -> DataLoader:
    """The loader of a training with ``cache: device``."""
    images = dataset.dataset
    if not (isinstance(dataset, SeededDataset) and gives_stored(images)):
        raise UserError(
            'cache: device is for PairedImageDataset and mixes of it, not '
            f'{type(images).__name__}: use cache: auto.'
        )
    if dataset_opt.get('collate_fn') is not None or 'batch_sampler' not in options:
        raise UserError('cache: device makes the batches of a run itself: leave collate_fn out.')
    dataset.takes_stored = True
    options |= {'dataset': dataset, 'collate_fn': None, 'pin_memory': False}
    queue, caches = dataset_opt.get('num_prefetch_queue', 1), caches_of(images)
    return DeviceSetLoader(queue, caches, device, workers, **options)


def _batching(
    dataset: Dataset,
    sampler: Sampler | None,
    seed: int,
    batch_size: int,
    world_size: int,
    rank: int,
    start: int | None,
    schedule: Schedule | None,
) -> dict[str, Any]:
    """DataLoader arguments that determine the batches of the training loader."""
    if sampler is None:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))  # pyright: ignore[reportArgumentType]
    if start is not None:
        stream = BatchStream(sampler, batch_size, world_size, rank, start, schedule)
        return {'batch_sampler': stream}
    if schedule is not None:
        raise UserError(
            'datasets.train.progressive follows the iterations of a run: give build_dataloader '
            'its start, or leave the option out.'
        )
    numbered = NumberedSampler(sampler, world_size, rank)
    return {'sampler': numbered, 'batch_size': batch_size, 'drop_last': True}


def gpus_per_process(num_gpu: int, dist: bool) -> int:
    """How many GPUs the batch of one process is for: several only with DataParallel."""
    return 1 if dist else max(num_gpu, 1)


def decoded_images(dataset: Dataset) -> tuple[int, int] | None:
    """The number of cached images of a dataset and of all its images; None without a cache."""
    caches = caches_of(dataset)
    if not caches:
        return None
    return sum(cache.decoded for cache in caches), sum(cache.count for cache in caches)


def caches_of(dataset: Any) -> list[ImageCache]:
    """All caches of a dataset, and of those that it holds."""
    caches: list[ImageCache] = []
    pending: list[Any] = [dataset]
    known = set()  # a dataset may wrap one that holds it
    while pending:
        owner = pending.pop()
        known.add(id(owner))
        for value in vars(owner).values():
            items = value if isinstance(value, list) else [value]
            caches += [item for item in items if isinstance(item, ImageCache)]
            inner = [item for item in items if isinstance(item, Dataset | ImageReader)]
            pending += [item for item in inner if id(item) not in known]
    return caches


def shard(loader: DataLoader, rank: int, world_size: int, name: str | None = None) -> DataLoader:
    """A loader of one rank's share of a validation set: every ``world_size``-th image.

    Args:
        name: Name of the set in this loader; default: unchanged.
    """
    dataset: Any = loader.dataset
    if name is not None:
        dataset = copy(dataset)
        dataset.opt = {**dataset.opt, 'name': name}
    return PrefetchDataLoader(
        num_prefetch_queue=1,
        dataset=dataset,
        batch_size=1,
        sampler=range(rank, len(dataset), world_size),  # pyright: ignore[reportArgumentType]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        worker_init_fn=loader.worker_init_fn,
    )


class SeededDataset(DatasetWrapper):
    """Wraps a dataset to seed all random generators from the sample number.

    It is indexed by (sample number, index), or by (sample number, index, crop size) to set the size
    of the crops. Attributes of the wrapped dataset are accessible through it.

    Args:
        dataset: Any map-style dataset.
        seed: Seed of the samples' randomness.
        sampler: The sampler of the indices.
        bad_images: Whether unreadable images are replaced; default: they are not.

    Attributes:
        takes_stored: Let workers hand out a ``StoredSample``, which ``BatchMemory`` converts.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        sampler: Sampler | None = None,
        bad_images: BadImages | None = None,
    ):
        super().__init__(dataset)
        self.seed = seed
        self.sampler = sampler
        self.bad_images = bad_images or BadImages()
        self.takes_stored = False

    def __getitem__(self, sample: tuple[int, ...]) -> Any:
        return self._sample(sample, self._read)

    def stored(self, sample: tuple[int, ...]) -> StoredSample:
        """A sample before its conversion, drawn without touching the global generators."""
        return self._sample(sample, self._read_stored)

    def _sample(self, sample: tuple[int, ...], read: Callable[[int, int], Any]) -> Any:
        number, index, *gt_size = sample
        if gt_size:
            self.dataset.set_gt_size(*gt_size)  # pyright: ignore[reportAttributeAccessIssue] (checked)
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                return read(number, index)
            except Exception as error:
                if not self.bad_images.passes_over(error, number):
                    raise
            index = self._another(number, attempt)
        raise self.bad_images.none_found(number)

    def _another(self, number: int, attempt: int) -> int:
        """The replacement for the index of a sample, chosen deterministically.

        It is the index of a later sample, so that images excluded by the sampler stay excluded; if
        that is not known in advance, any index of the set.
        """
        if hasattr(self.sampler, 'stream'):
            return next(self.sampler.stream(number + attempt, 1))  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        return mix(self.seed, number, attempt) % len(self)

    def _read(self, number: int, index: int) -> Any:
        if torch.utils.data.get_worker_info() is None:
            with seeded(self.seed, number):  # the global generators are the model's
                return self.dataset[index]
        if self.takes_stored:
            return self._read_stored(number, index)
        seed_cpu(self.seed, number)
        return self.dataset[index]

    def _read_stored(self, number: int, index: int) -> StoredSample:
        rng = random.Random(mix(self.seed, number))  # gives what ``random`` gives after seed_cpu
        return self.dataset.stored(index, rng)  # pyright: ignore[reportAttributeAccessIssue]

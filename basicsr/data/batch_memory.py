"""Reuse shared memory for the batches of DataLoader workers.

DataLoader allocates shared memory for every batch and frees it after use. That costs more than
collating crops: each page is zeroed, and mapped by two processes. Here each worker keeps a few
batches of shared memory and fills them in turn; the main process copies them. Crops of 8-bit images
are stored there as bytes, straight from the cache, and become floats in that copy or on the GPU:
workers then move a quarter of the memory, and each value only once.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from basicsr.utils.text import sizeof_fmt

from .data_util import image_tensor
from .progressive import crop_sizes, training_stages
from .transforms import turn, turned_planes

logger = logging.getLogger(__name__)


class StoredSample(NamedTuple):
    """A sample before its conversion to tensors.

    Attributes:
        images: Views (h, w, c) of stored images, BGR or gray.
        how: Arguments of ``image_tensor``: color, mean, std, keep_uint8, orientation.
        rest: The other entries of the sample.
    """

    images: Mapping[str, np.ndarray]
    how: tuple
    rest: Mapping[str, Any]

    def tensors(self) -> dict[str, Any]:
        """The sample as the dataset returns it."""
        return {k: image_tensor(image, *self.how) for k, image in self.images.items()} | self.rest

    def view(self, key: str) -> np.ndarray:
        """A view of the turned planes (c, h, w), RGB, of an image."""
        planes = turn(self.images[key], self.how[-1]).transpose(2, 0, 1)
        return planes[::-1] if len(planes) == 3 else planes

    @property
    def is_bytes(self) -> bool:
        """Whether the tensors hold the stored bytes, or these divided by 255."""
        color, mean, *_ = self.how
        bytes_only = all(image.dtype == np.uint8 for image in self.images.values())
        return bytes_only and color != 'y' and mean is None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes (c, h, w) of the tensors."""
        order = (2, 1, 0) if self.how[-1][2] else (2, 0, 1)
        return {key: tuple(i.shape[n] for n in order) for key, i in self.images.items()}


def gives_stored(dataset: Any) -> bool:
    """Whether a dataset has ``stored(index)``, and ``dataset[index]`` is its result as tensors.

    A subclass that overrides only ``__getitem__`` may do anything to its samples.
    """
    owners = [
        next((cls for cls in type(dataset).__mro__ if name in vars(cls)), None)
        for name in ('__getitem__', 'stored')
    ]
    return owners[0] is owners[1] and getattr(dataset, 'gives_stored', True)


@dataclass
class _Filled:
    """A worker's message that one of its slots has been filled.

    ``batch`` has None in place of each tensor; the tensors are sent with the slot's first use.
    ``floats`` names those whose bytes stand for floats in [0, 1].
    """

    worker: int
    slot: int
    batch: dict[str, Any]
    tensors: dict[str, Tensor] | None
    floats: tuple[str, ...] = ()


class BatchMemory:
    """A ``collate_fn`` whose batches, read through ``unpack``, equal those of ``default_collate``.

    Args:
        prefetch_factor: That of the loader, which requests at most so many batches of a worker
            ahead. With one slot more, no slot is refilled before its batch has been copied.
    """

    def __init__(self, prefetch_factor: int = 2):
        self._slots: list[dict[str, Tensor]] = [{}] * (prefetch_factor + 1)
        self._next = 0

    def __call__(self, samples: list[Any]) -> Any:
        worker = get_worker_info()
        if worker and all(type(s) is StoredSample and s.is_bytes for s in samples):
            return self._of_bytes(samples, worker.id)
        samples = [s.tensors() if type(s) is StoredSample else s for s in samples]
        if worker is None or type(samples[0]) is not dict:
            return default_collate(samples)
        keys = [key for key, value in samples[0].items() if type(value) is Tensor]
        if not keys:
            return default_collate(samples)
        slot, tensors = self._next_slot(), None
        if _fits(samples, keys, self._slots[slot]):
            for key, tensor in self._slots[slot].items():
                torch.stack([sample[key] for sample in samples], out=tensor)
        else:  # in a worker default_collate allocates shared memory
            tensors = default_collate([{key: sample[key] for key in keys} for sample in samples])
            self._slots[slot] = tensors
        rest = [{k: v for k, v in sample.items() if k not in keys} for sample in samples]
        batch = dict.fromkeys(samples[0]) | default_collate(rest)
        return _Filled(worker.id, slot, batch, tensors)

    def _of_bytes(self, samples: list[StoredSample], worker: int) -> Any:
        """Fill a slot with the stored bytes of the samples."""
        shapes = samples[0].shapes
        if any(sample.shapes != shapes for sample in samples):
            return self([sample.tensors() for sample in samples])
        slot, tensors = self._next_slot(), None
        sizes = {key: (torch.uint8, (len(samples), *shape)) for key, shape in shapes.items()}
        if {key: (t.dtype, tuple(t.shape)) for key, t in self._slots[slot].items()} != sizes:
            tensors = {
                key: torch.empty(size, dtype=dtype).share_memory_()
                for key, (dtype, size) in sizes.items()
            }
            self._slots[slot] = tensors
        for key, tensor in self._slots[slot].items():
            for sample, out in zip(samples, tensor.numpy(), strict=True):
                turned_planes(sample.images[key], sample.how[-1], out)
        batch = dict.fromkeys(shapes) | default_collate([sample.rest for sample in samples])
        keeps_bytes = samples[0].how[3]
        return _Filled(worker, slot, batch, tensors, () if keeps_bytes else tuple(shapes))

    def _next_slot(self) -> int:
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        return slot

    @staticmethod
    def unpack(batches: Iterable[Any], pin_memory: bool, to_float: bool = True) -> Iterator[Any]:
        """The batches, each copied to memory of its own.

        Args:
            pin_memory: Whether that memory is page-locked.
            to_float: Convert bytes that stand for floats.
        """
        known: dict[tuple[int, int], dict[str, Tensor]] = {}
        for item in batches:
            if not isinstance(item, _Filled):
                yield item
                continue
            if item.tensors is not None:
                known[item.worker, item.slot] = item.tensors
            tensors = known[item.worker, item.slot].items()
            floats = item.floats if to_float else ()
            yield item.batch | {k: copied(v, pin_memory, k in floats) for k, v in tensors}


def warn_of_large_batches(dataset_opt: Mapping[str, Any], gpus: int, workers: int) -> None:
    """Warn if the prefetched batches do not fit into the memory.

    Args:
        dataset_opt: Completed options of the training set; one without ``gt_size`` is skipped.
        gpus: Number of GPUs that share a batch.
        workers: Number of loader processes.
    """
    sizes, memory = crop_sizes(dataset_opt), _memory()
    if not sizes or memory is None:
        return
    stages = training_stages(dataset_opt)
    samples, size = max(
        ((gpus * stage.batch_size, max(stage.sizes or sizes)) for stage in stages),
        key=lambda batch: batch[0] * batch[1] ** 2,
    )
    channels = 3 * (1 + 1 / dataset_opt.get('scale', 1) ** 2)
    batch = samples * size**2 * channels * (1 if dataset_opt.get('uint8_batch') else 4)
    # Each worker has two batches ready and builds one, of samples that it holds meanwhile.
    count = 4 * workers + dataset_opt.get('num_prefetch_queue', 1) + 1 if workers else 2
    if count * batch > memory:
        logger.warning(
            'A batch of %d samples with gt_size %d takes %s, and %d of them are in memory at a '
            'time, more than its %s: lower datasets.train.batch_size_per_gpu or gt_size, or '
            'num_worker_per_gpu (%d).',
            *(samples, size, sizeof_fmt(batch), count, sizeof_fmt(memory), workers),
        )


def _memory() -> int | None:
    """Memory in bytes that this process may use; None if the system does not report it."""
    limits = []
    with suppress(AttributeError, ValueError):  # not on Windows
        limits.append(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))
    with suppress(OSError, ValueError):  # of a container; 'max' without a limit
        limits.append(int(Path('/sys/fs/cgroup/memory.max').read_text()))
    return min(limits, default=None)


def copied(tensor: Tensor, pin_memory: bool = False, to_float: bool = False) -> Tensor:
    """Copy a contiguous tensor in the calling thread only; ``to_float`` divides bytes by 255.

    For torch's copy, OpenMP would start a second team of threads. With more threads than cores,
    OpenMP lets all of them sleep instead of spin while they wait, in the training step too.
    """
    if to_float:
        copy = torch.empty_like(tensor, dtype=torch.float32, pin_memory=pin_memory)
        np.divide(tensor.numpy(), np.float32(255), out=copy.numpy(), dtype=np.float32)
        return copy
    copy = torch.empty_like(tensor, pin_memory=pin_memory)
    copy.view(torch.uint8).numpy()[:] = tensor.view(torch.uint8).numpy()
    return copy


def _fits(
    samples: Sequence[Mapping[str, Any]], keys: Sequence[str], tensors: Mapping[str, Tensor]
) -> bool:
    """Whether the samples' tensors, stacked, have the shapes and types of ``tensors``."""
    return list(tensors) == keys and all(
        len(samples) == len(tensor)
        and all(s[k].shape == tensor.shape[1:] and s[k].dtype == tensor.dtype for s in samples)
        for k, tensor in tensors.items()
    )

"""Keep the decoded images of a training set in the memory of the device (``cache: device``).

The cache of decoded images is copied to the GPU once, and batches are then gathered there: crops,
flips and conversion in one step, in the training process, without loader processes. On the CPU the
memory map of the cache serves as it is. Random decisions are those of any other loader: a crop is
drawn as a view of the map, and the address and strides of the view locate its pixels in the copy.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from basicsr.utils.errors import UserError
from basicsr.utils.text import sizeof_fmt

from .batch_memory import StoredSample, copied
from .image_cache import ImageCache
from .prefetch_dataloader import PrefetchGenerator, images_to_float
from .transforms import turned_planes

logger = logging.getLogger(__name__)

_BLOCK = 2**26  # bytes copied to the device at a time


class DeviceSetLoader(DataLoader):
    """Makes training batches from images in the memory of a device.

    Batches of anything but 8-bit crops from the caches (16-bit, luma, normalised or padded images)
    are made on the CPU; their values are the same.

    Args:
        num_prefetch_queue: Batches kept ready by a thread.
        caches: All caches of the dataset.
        device: Where batches are made.
        workers: Number of processes that first decode the images missing from the caches.
        **kwargs: Arguments of DataLoader; ``dataset`` is a SeededDataset.

    Attributes:
        to_float: Whether bytes become floats in [0, 1], unless ``uint8_batch`` keeps them.
    """

    def __init__(
        self,
        num_prefetch_queue: int,
        caches: Sequence[ImageCache],
        device: torch.device,
        workers: int,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.num_prefetch_queue = num_prefetch_queue
        self.device = device
        self.to_float = True
        fill(self.dataset.dataset, caches, workers)  # pyright: ignore[reportAttributeAccessIssue]
        self._pixels = None if device.type == 'cpu' else DevicePixels(caches, device)

    def __iter__(self) -> Iterator:  # pyright: ignore[reportIncompatibleMethodOverride]
        what = f'a thread makes batches on {self.device}'
        producer = PrefetchGenerator(self._batches(), self.num_prefetch_queue, what)
        try:
            yield from producer
        finally:
            producer.stop()

    def _batches(self) -> Iterator[dict[str, Any]]:
        for numbers in self.batch_sampler or ():
            samples = [self.dataset.stored(number) for number in numbers]  # pyright: ignore[reportAttributeAccessIssue]
            shapes = samples[0].shapes
            if any(not s.is_bytes or s.shapes != shapes for s in samples):
                yield default_collate([sample.tensors() for sample in samples])
                continue
            images = {key: self._images(samples, key) for key in shapes}
            yield images | default_collate([dict(sample.rest) for sample in samples])

    def _images(self, samples: list[StoredSample], key: str) -> Tensor:
        """The images of samples as a batch (b, c, h, w) on the device."""
        to_float = self.to_float and not samples[0].how[3]
        if self._pixels is not None:
            batch = self._pixels.gather([sample.view(key) for sample in samples])
            if batch is not None:
                return images_to_float({'gt': batch})['gt'] if to_float else batch
        planes = np.empty((len(samples), *samples[0].shapes[key]), np.uint8)
        for sample, out in zip(samples, planes, strict=True):
            turned_planes(sample.images[key], sample.how[-1], out)
        return copied(torch.from_numpy(planes), to_float=to_float).to(self.device)


class DevicePixels:
    """The pixels of caches in the memory of a device.

    Args:
        caches: Complete ones.
        device: Where they are copied to.
    """

    def __init__(self, caches: Sequence[ImageCache], device: torch.device):
        maps = [cache.pixels() for cache in caches]
        ends = np.cumsum([len(pixels) for pixels in maps])
        # Address and size of each map, and where its copy begins.
        self._places = [
            (pixels.__array_interface__['data'][0], len(pixels), int(end) - len(pixels))
            for pixels, end in zip(maps, ends, strict=True)
        ]
        self._maps = maps  # kept mapped, so that no other memory gets their addresses
        self._copy = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
        for pixels, (_, size, start) in zip(maps, self._places, strict=True):
            for first in range(0, size, _BLOCK):
                # A copy, since torch cannot wrap read-only arrays.
                block = torch.from_numpy(pixels[first : first + _BLOCK].copy())
                self._copy[start + first : start + first + len(block)] = block.to(device)
        logger.info('%s of decoded images are on %s.', sizeof_fmt(int(ends[-1])), device)

    def gather(self, views: Sequence[np.ndarray]) -> Tensor | None:
        """The pixels of views as a batch (b, c, h, w); None if one is not a view of these maps."""
        starts = [self._start(view) for view in views]
        if None in starts:
            return None
        numbers = [[start, *view.strides] for start, view in zip(starts, views, strict=True)]
        table = torch.tensor(numbers, device=self._copy.device)[..., None, None, None]
        start, plane, row, column = table.unbind(1)  # (b, 1, 1, 1)
        c, h, w = (torch.arange(length, device=table.device) for length in views[0].shape)
        return self._copy[start + plane * c[:, None, None] + row * h[:, None] + column * w]

    def _start(self, view: np.ndarray) -> int | None:
        """Position of the first pixel of a view in the copy."""
        address = view.__array_interface__['data'][0]
        for begin, size, start in self._places:
            if begin <= address < begin + size:
                return address - begin + start
        return None


def fill(dataset: Any, caches: Sequence[ImageCache], workers: int) -> None:
    """Decode the images that are missing from the caches.

    Raises:
        ValueError: Some cannot be decoded, or the caches have no room for them.
    """
    if not caches:
        raise UserError('cache: device needs images whose decoded pixels can be kept.')
    if any(cache.decoded < cache.count for cache in caches):
        logger.info('Decoding the training set (cache: device).')
        own = torch.Generator()  # the global one also initialises networks
        for part in getattr(dataset, 'parts', [dataset]):
            reading = _Reading(part)
            for _ in DataLoader(reading, batch_size=None, num_workers=workers, generator=own):
                pass
    for cache in caches:
        if cache.decoded < cache.count:
            raise UserError(
                f'cache: device: {cache.count - cache.decoded} of {cache.count} images are not in '
                f'{cache.folder}: they cannot be decoded, or the disk has no room for them. Leave '
                'them out, or use cache: auto.'
            )


class _Reading(Dataset):
    """Reads samples only to fill the caches."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, index: int) -> int:
        with suppress(ValueError, OSError):  # such as a too small image; reported when it is drawn
            self.dataset.stored(index, random.Random(0))
        return index

    def __len__(self) -> int:
        return len(self.dataset)

"""Prefetch batches in the background: threads on the CPU, asynchronous copies to the GPU."""

import logging
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from basicsr.utils.dead_worker import note_signals

from .batch_memory import BatchMemory

logger = logging.getLogger(__name__)


class PrefetchGenerator(threading.Thread):
    """A thread that keeps the next items of an iterable ready.

    An error of the iterable is raised in order, after the items before it.

    Args:
        generator: Any iterable.
        num_prefetch_queue: Items kept ready.
        what: What is being waited for, for the log.

    Attributes:
        patience: Seconds of waiting for an item before a warning is logged.
    """

    patience = 30.0

    def __init__(self, generator: Iterable, num_prefetch_queue: int, what: str = 'a thread'):
        super().__init__(daemon=True)
        self.generator = generator
        self.what = what
        self._queue: queue.Queue = queue.Queue(num_prefetch_queue)
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            for item in self.generator:
                self._put((item, None))
                if self._stopped.is_set():
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # passed on: the consumer raises it
            self._put((None, error))

    def __next__(self) -> Any:
        item, error = self._get()
        if error is None:
            return item
        self._queue.put((None, error))  # an ended iterator stays ended
        raise error

    def __iter__(self) -> Iterator:
        return self

    def stop(self) -> None:
        """Stop the thread, even if the iterable is not exhausted."""
        self._stopped.set()
        self.join()
        # This drops the last reference to a loader's iterator, and so ends its worker processes.
        self.generator = ()

    def _get(self) -> tuple:
        waited, wait = 0.0, self.patience
        while True:
            try:
                return self._queue.get(timeout=wait)
            except queue.Empty:
                waited += wait
                wait = waited  # half as often each time
                logger.info('Still waiting for data after %g s: %s.', waited, self.what)

    def _put(self, entry: tuple) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._queue.put(entry, timeout=0.1)
                break


class PrefetchDataLoader(DataLoader):
    """A DataLoader whose batches a thread collects ahead of time.

    Args:
        num_prefetch_queue: Batches kept ready.
        **kwargs: Arguments of DataLoader.

    Attributes:
        to_float: Whether ``BatchMemory`` converts bytes that stand for floats; if not, the
            consumer does, on the GPU.
    """

    def __init__(self, num_prefetch_queue: int, **kwargs: Any):
        self.num_prefetch_queue = num_prefetch_queue
        self.to_float = True
        super().__init__(**kwargs)

    def __iter__(self) -> Iterator:  # pyright: ignore[reportIncompatibleMethodOverride]
        batches: Iterator = super().__iter__()
        workers = getattr(batches, '_workers', ())  # torch has no public name for them
        if isinstance(self.collate_fn, BatchMemory):
            # Without a GPU there is no page-locked memory, and the option has no effect.
            pin_memory = self.pin_memory and torch.cuda.is_available()
            batches = BatchMemory.unpack(batches, pin_memory, self.to_float)
        size = self.batch_size or getattr(self.batch_sampler, 'batch_size', None)
        makers = f'{self.num_workers} loader processes' if self.num_workers else 'a thread'
        what = f'{makers} make batches of {size or "some"} samples'
        producer = PrefetchGenerator(batches, self.num_prefetch_queue, what)
        try:
            yield from producer
        except Exception as error:
            note_signals(error, workers)
            raise
        finally:
            producer.stop()


class CPUPrefetcher:
    """Batches of a loader through ``next()``, which returns None at the end of a pass."""

    def __init__(self, loader: Iterable):
        self.ori_loader = loader
        self.loader: Iterator | None = None

    def next(self) -> Any:
        if self.loader is None:
            self.reset()
        return next(self.loader, None)  # pyright: ignore[reportArgumentType] (set by reset)

    def reset(self) -> None:
        """Begin a new pass."""
        self.loader = iter(self.ori_loader)

    def __iter__(self) -> Iterator:
        """The batches of a new pass."""
        self.reset()
        while (batch := self.next()) is not None:
            yield batch


class CUDAPrefetcher(CPUPrefetcher):
    """As CPUPrefetcher, with the tensors of the next batch copied to the GPU on a side stream.

    Without a GPU the batches pass through unchanged.

    Args:
        loader: A loader with pinned memory; without it the copies do not overlap.
        opt: Reads ``num_gpu``.
    """

    def __init__(self, loader: Iterable, opt: dict):
        super().__init__(loader)
        self.opt = opt
        self.device = torch.device('cuda' if opt['num_gpu'] != 0 else 'cpu')
        self.stream = torch.cuda.Stream() if self.device.type == 'cuda' else None
        self.batch: Any = None
        self._error: Exception | None = None

    def preload(self) -> None:
        """Fetch the next batch and start its copy."""
        try:
            self.batch = super().next()
        except Exception as error:  # raised when its batch is due, so no good batch is lost
            self.batch, self._error = None, error
            return
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.batch = _map_tensors(
                    self.batch, lambda tensor: tensor.to(self.device, non_blocking=True)
                )

    def next(self) -> Any:
        if self.loader is None:
            self.reset()
        if self._error is not None:
            raise self._error
        batch = self.batch
        if self.stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self.stream)
            # The allocator must not reuse this memory while the current stream reads it.
            _map_tensors(batch, lambda tensor: tensor.record_stream(current) or tensor)
        if batch is not None:
            self.preload()
        return batch

    def reset(self) -> None:
        super().reset()
        self._error = None
        self.preload()


def images_to_float(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with uint8 images ``lq`` and ``gt`` as float32 in [0, 1], on their device."""
    images = {
        key: value.float()
        for key, value in batch.items()
        if key in ('lq', 'gt') and value.dtype == torch.uint8
    }
    for image in images.values():
        # For a Python number, a GPU would multiply by the rounded reciprocal, unlike the CPU.
        image.div_(torch.full((), 255.0, device=image.device))
    return batch | images


def _map_tensors(value: Any, function: Any) -> Any:
    """``value`` with every tensor in nested dicts, lists and tuples replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
    return value

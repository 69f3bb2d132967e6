"""Batches that come from worker processes in memory that is used again.

DataLoader makes shared memory for every batch and gives it back after use. That costs more than
putting crops together: each page of it is cleared, and mapped by two processes. Here a worker
keeps a few batches of shared memory and fills them in turn; the loader's process copies what it
gets.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info


@dataclass
class _Filled:
    """A worker's message that one of its slots is filled.

    ``batch`` has None in place of each tensor; the tensors come with the slot's first use.
    """

    worker: int
    slot: int
    batch: dict[str, Any]
    tensors: dict[str, Tensor] | None


class BatchMemory:
    """A ``collate_fn`` that gives what ``default_collate`` gives, when read through ``unpack``.

    Args:
        prefetch_factor: That of the loader: it asks a worker for a batch when it has handed out
            the one so many before. With one slot more, none is filled before it has been copied.
    """

    def __init__(self, prefetch_factor: int = 2):
        self._slots: list[dict[str, Tensor]] = [{}] * (prefetch_factor + 1)
        self._next = 0

    def __call__(self, samples: list[Any]) -> Any:
        worker = get_worker_info()
        if worker is None or type(samples[0]) is not dict:
            return default_collate(samples)
        keys = [key for key, value in samples[0].items() if type(value) is Tensor]
        if not keys:
            return default_collate(samples)
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        tensors = None
        if _fits(samples, keys, self._slots[slot]):
            for key, tensor in self._slots[slot].items():
                torch.stack([sample[key] for sample in samples], out=tensor)
        else:  # in a worker default_collate allocates shared memory
            tensors = default_collate([{key: sample[key] for key in keys} for sample in samples])
            self._slots[slot] = tensors
        rest = [{k: v for k, v in sample.items() if k not in keys} for sample in samples]
        batch = dict.fromkeys(samples[0]) | default_collate(rest)
        return _Filled(worker.id, slot, batch, tensors)

    @staticmethod
    def unpack(batches: Iterable[Any], pin_memory: bool) -> Iterator[Any]:
        """The batches in memory of their own, page-locked if asked for."""
        known: dict[tuple[int, int], dict[str, Tensor]] = {}
        for item in batches:
            if not isinstance(item, _Filled):
                yield item
                continue
            if item.tensors is not None:
                known[item.worker, item.slot] = item.tensors
            tensors = known[item.worker, item.slot].items()
            yield item.batch | {key: _copy(value, pin_memory) for key, value in tensors}


def _copy(tensor: Tensor, pin_memory: bool) -> Tensor:
    """A copy of a contiguous tensor, made by the calling thread alone.

    Were it torch's, OpenMP would start threads of their own for the calling one, more than there
    are cores, and from then on let all of its threads sleep where they wait for each other.
    """
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

"""State that a dataset shares with its copies in worker processes."""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

Pair = dict[str, str]


class _Column(Sequence):
    """Paths, their names one after the other in one block; folders, which many share, apart."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._folders: list[str] = []
        self._folder = array('I')
        self._names = bytearray()
        self._ends = array('Q', [0])

    def append(self, path: str) -> None:
        head, separator, name = path.rpartition(os.sep)
        folder = head + separator
        if folder not in self._numbers:
            self._numbers[folder] = len(self._folders)
            self._folders.append(folder)
        self._folder.append(self._numbers[folder])
        self._names += name.encode('utf-8', 'surrogateescape')
        self._ends.append(len(self._names))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        name = self._names[self._ends[index] : self._ends[index + 1]]
        return self._folders[self._folder[index]] + str(name, 'utf-8', 'surrogateescape')

    def __len__(self) -> int:
        return len(self._folder)


class PathTable(Sequence):
    """A read-only list of paths, or of dicts of paths with the same keys, in a few objects.

    Reading an object of a Python list changes its reference count, so that worker processes would
    come to own a copy of every page of the list.
    """

    def __init__(self, items: Iterable[str | Pair]):
        self._columns: dict[str, _Column] = {}
        for item in items:
            paths = item if isinstance(item, dict) else {'': item}
            if not self._columns:
                self._columns = {key: _Column() for key in paths}
            for key, column in self._columns.items():
                column.append(paths[key])

    def column(self, key: str = '') -> Sequence[str]:
        """The paths under one key; of plain paths, without a key, all."""
        return self._columns[key] if self._columns else []

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not self._columns:
            raise IndexError(f'no item {index} in an empty table')
        if '' in self._columns:
            return self._columns[''][index]
        return {key: column[index] for key, column in self._columns.items()}

    def __iter__(self) -> Iterator:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))


class SaidOnce:
    """What a dataset or a copy of it in a worker process has said, so that it is said only once."""

    _THINGS = ('alpha', 'frames', 'depth', 'cut')

    def __init__(self) -> None:
        self._said = torch.zeros(len(self._THINGS), dtype=torch.bool).share_memory_()

    def __contains__(self, thing: str) -> bool:
        return bool(self._said[self._THINGS.index(thing)])

    def add(self, thing: str) -> None:
        self._said[self._THINGS.index(thing)] = True


class DatasetAround(Dataset):
    """Base of datasets around another one, whose attributes are reached through them."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or name == 'dataset':  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

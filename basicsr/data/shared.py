"""State that a dataset shares with its copies in worker processes."""

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import Dataset

Pair = dict[str, str]


class PathColumn(Sequence):
    """A compact list of paths: the names joined in one buffer, each folder stored once."""

    def __init__(self, paths: Iterable[str] = ()):
        self._numbers: dict[str, int] = {}
        self._folders: list[str] = []
        self._folder = array('I')
        self._names = bytearray()
        self._ends = array('Q', [0])
        for path in paths:
            self.append(path)

    def append(self, path: str) -> None:
        head, separator, name = path.rpartition(os.sep)
        self._folder.append(self._number(head + separator))
        self._names += _encoded(name)
        self._ends.append(len(self._names))

    def extend(self, folder: str, names: Sequence[str]) -> None:
        """Append ``os.path.join(folder, name)`` for each name."""
        block = ''.join(names)
        if os.sep in block:
            for name in names:
                self.append(os.path.join(folder, name))
            return
        encoded = _encoded(block)
        is_ascii = len(encoded) == len(block)
        lengths = map(len, names if is_ascii else map(_encoded, names))
        self._ends.extend(accumulate(lengths, initial=self._ends.pop()))
        self._folder.extend(array('I', [self._number(os.path.join(folder, ''))]) * len(names))
        self._names += encoded

    def _number(self, folder: str) -> int:
        number = self._numbers.setdefault(folder, len(self._folders))
        if number == len(self._folders):
            self._folders.append(folder)
        return number

    def digest(self, kind: str, location: str) -> str:
        """A hash of ``kind`` and all paths, made absolute by ``location``."""
        digest = hashlib.blake2b(kind.encode(), digest_size=10)
        for folder in self._folders:
            digest.update(b'\0' + _encoded(os.path.join(location, folder)))
        for part in (self._folder, self._ends, self._names):
            digest.update(part)
        return digest.hexdigest()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        name = self._names[self._ends[index] : self._ends[index + 1]]
        return self._folders[self._folder[index]] + str(name, 'utf-8', 'surrogateescape')

    def __len__(self) -> int:
        return len(self._folder)


class PathTable(Sequence):
    """A read-only list of paths, or of dicts of paths with the same keys, in few objects.

    Reading an object of a Python list changes its reference count, so worker processes would
    gradually copy every page of the list.
    """

    def __init__(self, items: Iterable[str | Pair] = ()):
        self._columns: dict[str, PathColumn] = {}
        for item in items:
            paths = item if isinstance(item, dict) else {'': item}
            if not self._columns:
                self._columns = {key: PathColumn() for key in paths}
            for key, column in self._columns.items():
                column.append(paths[key])

    def extend(self, names: Mapping[str, tuple[str, Sequence[str]]]) -> None:
        """Append items at once: for each key a folder and the names in it."""
        for key, (folder, of_key) in names.items():
            self._columns.setdefault(key, PathColumn()).extend(folder, of_key)

    def column(self, key: str = '') -> PathColumn:
        """The paths of one key; all paths if the items are plain paths."""
        return self._columns[key] if self._columns else PathColumn()

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


def _encoded(path: str) -> bytes:
    return path.encode('utf-8', 'surrogateescape')


class SaidOnce:
    """Kinds of messages that a dataset has logged, shared with its copies in worker processes."""

    _THINGS = ('alpha', 'frames', 'depth', 'cut')

    def __init__(self) -> None:
        self._said = torch.zeros(len(self._THINGS), dtype=torch.bool).share_memory_()

    def __contains__(self, thing: str) -> bool:
        return bool(self._said[self._THINGS.index(thing)])

    def add(self, thing: str) -> None:
        self._said[self._THINGS.index(thing)] = True


class DatasetWrapper(Dataset):
    """Base of datasets that wrap another one and give access to its attributes."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or name == 'dataset':  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

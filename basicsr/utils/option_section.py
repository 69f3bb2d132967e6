"""Option dict that records the file line of each key, and which keys have been read."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Self

from .errors import UserError

KeyPath = tuple[str, ...]


class OptionSection(dict):
    """A section of the options: a dict that records which keys it has been asked for.

    Copies and the results of ``|`` share the record of the original.

    Args:
        content: Keys and values.
        places: Where the keys of all sections were given, 'file:line', by key path.
        path: Key path of the section.

    Attributes:
        asked: Every key that was asked for, missing ones included.
    """

    def __init__(
        self, content: Mapping, places: Mapping[KeyPath, str] | None = None, path: KeyPath = ()
    ):
        super().__init__(content)
        self.places, self.path = places or {}, path
        self.asked: set[str] = set()

    def unread(self) -> list[str]:
        """Keys that were given with a value but never asked for."""
        given = (key for key, value in dict.items(self) if value is not None)
        return [key for key in given if key not in self.asked and (*self.path, key) in self.places]

    def place(self, *keys: str) -> str:
        """Where a key below this section was given, or the longest given part of its path."""
        path = (*self.path, *keys)
        found = (path[:length] for length in range(len(path), 0, -1))
        return next((self.places[part] for part in found if part in self.places), '')

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.asked.add(key)
        return super().pop(key, *default)

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator:  # without this override, {**section} would bypass the record
        return super().__iter__()

    def items(self) -> Any:
        self.asked.update(self)
        return super().items()

    def values(self) -> Any:
        self.asked.update(self)
        return super().values()

    def copy(self) -> Self:
        return self._with(dict(dict.items(self)))

    __copy__ = copy

    def __reduce__(self) -> tuple:
        return type(self), (dict(dict.items(self)), self.places, self.path)

    def __or__(self, other: Mapping) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._with({**dict(dict.items(self)), **other})

    def __deepcopy__(self, memo: dict) -> Self:
        return self._with({key: deepcopy(value, memo) for key, value in dict.items(self)})

    def _with(self, content: Mapping) -> Self:
        section = type(self)(content, self.places, self.path)
        section.asked = self.asked
        return section


def place_of(opt: Mapping, *keys: str) -> str:
    """``file:line: a.b`` of an option, or ``a.b`` if its place is unknown, to begin a message."""
    place = opt.place(*keys) if isinstance(opt, OptionSection) else ''
    path = (*getattr(opt, 'path', ()), *keys)
    return f'{place}: {".".join(path)}' if place else '.'.join(path)


def flag(opt: Mapping, key: str, default: bool) -> bool:
    """The value of a boolean option that no table declares; None (``~``) means ``default``.

    Raises:
        ValueError: The value is not true or false.
    """
    value = opt.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f'{place_of(opt, key)} must be true or false, got {value!r}.')
    return value

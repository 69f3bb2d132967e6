"""Lazy imports: export names from a package without importing their modules until first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package, from modules to the blank-separated names in them."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        return getattr(import_module(f'.{home_of[name]}', package), name)

    return load

"""Lazy imports: export names from a package without importing their modules until first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package or module.

    Args:
        package: Its name.
        homes: By module, the names that it defines, separated by blanks. A module is one of the
            package, or given by its full name, ``basicsr.…``.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        home = home_of[name]
        is_full = home.startswith('basicsr.')
        return getattr(import_module(home if is_full else f'{package}.{home}'), name)

    return load

"""A progress bar that can never end the program whose progress it shows."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from tqdm import tqdm


class _Stderr:
    """Standard error, which may be closed, or whose reader may be gone, as with ``2>&1 | head``."""

    @property
    def encoding(self) -> str | None:  # decides whether bars are drawn of blocks or of digits
        return getattr(sys.stderr, 'encoding', None)

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def __eq__(self, other: object) -> bool:  # the log is printed above bars of its own stream
        return other is self or other is sys.stderr

    __hash__ = object.__hash__


def progress_bar(items: Iterable, *, disable: bool | None, **options: Any) -> tqdm:
    """``tqdm`` on standard error.

    Args:
        disable: None disables the bar if standard error is not a terminal.
        **options: Passed to ``tqdm``.
    """
    return tqdm(items, file=_Stderr(), disable=True if sys.stderr is None else disable, **options)

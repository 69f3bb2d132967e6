"""Format messages: lists of names, file sizes, printable text."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence

# Besides those of ASCII, also the marks that change the text direction.
_CONTROL = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]'
)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """``; did you mean 'x'?`` if a known name is close, else a full stop."""
    close = difflib.get_close_matches(str(name), sorted(map(str, known)), n=1)
    return f"; did you mean '{close[0]}'?" if close else '.'


def printable(text: str) -> str:
    """The text with control characters, except tabs and line breaks, escaped as ``\\x1b``.

    A terminal obeys some of them, and file names may contain any.
    """
    return _CONTROL.sub(lambda found: found[0].encode('unicode_escape').decode('ascii'), text)


def write_out(text: str) -> None:
    """Write printable text to the standard output, and exit if nobody reads it (``| head``)."""
    try:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None  # the status of a program that SIGPIPE ends


def some(items: Sequence[str], count: int = 5) -> str:
    """The first items, and how many more there are."""
    more = f' and {len(items) - count} more' if len(items) > count else ''
    return ', '.join(items[:count]) + more


def sizeof_fmt(size: float, suffix: str = 'B') -> str:
    """A number of bytes in readable units: ``1.5 KB``, ``3.2 GB``."""
    for unit in ('', 'K', 'M', 'G', 'T', 'P', 'E', 'Z'):
        if abs(size) < 1024:
            return f'{size:3.1f} {unit}{suffix}'
        size /= 1024
    return f'{size:3.1f} Y{suffix}'

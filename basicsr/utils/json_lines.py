"""Read JSON Lines files that a killed run or a bad disk may have damaged, and remove rows."""

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .misc import atomic_path, get_time_str

logger = logging.getLogger(__name__)


def read_rows(path: str | Path, number: str | None = None) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, without the partial line that a killed run may end with.

    Args:
        number: Key of an integer that every row must have; lines without it count as damaged.
    """
    return [row for row in _parsed_rows(path, number) if row is not None]


def keep_rows(
    path: Path, number: str, is_kept: Callable[[dict[str, Any]], bool] = lambda _: True
) -> None:
    """Remove some rows from a file; a damaged original is kept beside it, under another name.

    Args:
        number: As of ``read_rows``.
    """
    aside = path.with_name(f'{path.name}_damaged_{get_time_str()}')
    try:
        rows = _parsed_rows(path, number)
    except OSError as error:  # a folder, or on an unreadable part of the disk
        path.rename(aside)
        logger.warning('%s is unreadable and has been renamed to %s: %s', path, aside, error)
        rows = []
    damaged = sum(row is None for row in rows)
    if damaged:
        shutil.copy2(path, aside)
        logger.warning('%s: %d damaged lines removed; the original is %s', path, damaged, aside)
    kept = (json.dumps(row) + '\n' for row in rows if row is not None and is_kept(row))
    with atomic_path(path) as temporary:
        temporary.write_text(''.join(kept), encoding='utf-8')


def _parsed_rows(path: str | Path, number: str | None) -> list[dict[str, Any] | None]:
    """The rows of a JSON Lines file; None for a damaged one, except a partial line at the end."""
    *lines, last = Path(path).read_bytes().split(b'\n')
    rows = [_parsed(line, number) for line in lines]
    return [*rows, *filter(None, [_parsed(last, number)])]


def _parsed(line: bytes, number: str | None) -> dict[str, Any] | None:
    row = None
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
    is_row = isinstance(row, dict) and (number is None or type(row.get(number)) is int)
    return row if is_row else None

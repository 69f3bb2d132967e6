"""Files and folders of a run: creating, locking, listing, atomic writes; and its seed."""

import errno
import logging
import os
import random
import shutil
import threading
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .dead_worker import dead_worker
from .dist_util import master_only
from .errors import UserError
from .text import printable, sizeof_fmt

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

logger = logging.getLogger(__name__)

_LONG_NAME = 180  # bytes; file systems allow 255

_claims: list[IO] = []  # locks are held as long as their files are open


def set_random_seed(seed: int) -> None:
    """Seed ``random``, ``numpy.random`` and torch (every device) with one number."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_time_str() -> str:
    """Local time as ``YYYYmmdd_HHMMSS``."""
    return time.strftime('%Y%m%d_%H%M%S', time.localtime())


def mkdir_and_rename(path: str | Path) -> Path | None:
    """Make the folder ``path``; returns the archive name that an existing one is moved to."""
    path, archive = Path(path), None
    if os.path.lexists(path):  # a link itself is moved, not its target
        archive = path.with_name(f'{path.name}_archived_{get_time_str()}')
        while os.path.lexists(archive):
            archive = archive.with_name(f'{archive.name}_1')
        logger.info('Path already exists. Rename it to %s', archive)
        path.rename(archive)
    path.mkdir(parents=True)
    return archive


@master_only
def make_exp_dirs(opt: dict) -> Path | None:
    """Make the folders of a fresh run; returns where an earlier run of this name was moved to."""
    path = opt['path']
    root = Path(path['experiments_root' if opt['is_train'] else 'results_root'])
    if root.is_dir() and not root.is_symlink():
        remove_stale_temporaries(root)
    archive = mkdir_and_rename(root)
    for key in ('models', 'training_states', 'visualization'):
        if key in path:
            Path(path[key]).mkdir(parents=True, exist_ok=True)
    return archive


def claim_folder(folder: str | Path) -> None:
    """Mark a run's folder as in use, until this process ends.

    The mark is a lock on a file beside the folder, which the system releases when a process dies.
    Where there are no such locks (Windows, some network file systems) the folder is unprotected.

    Raises:
        BlockingIOError: Another process has claimed it.
    """
    if fcntl is None:
        return
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(f'.{folder.name}.lock').open('a')
    try:
        # Not flock: worker processes would inherit it and outlive a killed trainer by seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(
                f'another process is writing to {folder}: wait for it, or choose another name.'
            ) from error
        logger.warning(
            'The file system of %s has no locks (%s): do not start two runs of this name at once.',
            folder,
            error.strerror,
        )
        return
    _claims.append(file)


@contextmanager
def locked(path: str | Path) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if necessary.

    Yields:
        Whether it is locked: some network file systems have no locks.
    """
    if fcntl is None:
        from filelock import FileLock

        with FileLock(path):
            yield True
        return
    with open(path, 'a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone


def scandir(
    dir_path: str | Path,
    suffix: str | tuple[str, ...] | None = None,
    recursive: bool = False,
    full_path: bool = False,
    broken_links: bool = False,
) -> Iterator[str]:
    """Files of a folder, hidden ones left out, in arbitrary order.

    Args:
        suffix: Ending or endings of the names to keep; None keeps all.
        recursive: Look into sub-folders too, hidden ones left out.
        full_path: Yield ``dir_path/…`` instead of paths relative to ``dir_path``.
        broken_links: Also yield broken links: reading one reports the missing file.
    """
    if suffix is not None and not isinstance(suffix, str | tuple):
        raise TypeError(f'suffix must be a string or a tuple of strings, got {suffix!r}.')
    prefix = os.path.join(dir_path, '') if full_path else ''
    return _scan(str(dir_path), prefix, suffix, recursive, broken_links, ())


def _leads_nowhere(entry: os.DirEntry) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _scan(
    folder: str,
    prefix: str,
    suffix: str | tuple[str, ...] | None,
    recursive: bool,
    broken_links: bool,
    above: tuple[tuple[int, int], ...],
) -> Iterator[str]:
    if recursive:
        status = os.stat(folder)
        above = *above, (status.st_dev, status.st_ino)
        if above[-1] in above[:-1]:
            raise UserError(f'{folder} is a link to one of its parent folders: remove the link.')
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith('.'):
                continue
            if entry.is_file() or (broken_links and _leads_nowhere(entry)):
                if suffix is None or entry.name.endswith(suffix):
                    yield prefix + entry.name
            elif recursive and entry.is_dir():
                inside = os.path.join(prefix, entry.name, '')
                yield from _scan(entry.path, inside, suffix, recursive, broken_links, above)


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Turn an error in the block into one warning: a run is worth more than its pictures."""
    try:
        yield
    except Exception as error:
        if dead_worker(error):  # which torch may raise anywhere
            raise
        reason = printable(f'{type(error).__name__}: {error}'.partition('\n')[0])
        logger.warning('%s could not be made: %s', what, reason)


@contextmanager
def atomic_path(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside ``path``, which replaces it when the block ends without error.

    A crash at any moment leaves either the old file or the new one.

    Args:
        durable: Flush it to the disk, so that this also holds after a power failure.

    Raises:
        OSError: The file could not be written; says where, and how much space is free.
    """
    path = Path(path)
    writer = f'{os.getpid()}-{threading.get_ident()}'
    # A valid name must not become too long by what is added here.
    is_long = len(os.fsencode(path.name)) > _LONG_NAME
    name = f'{zlib.crc32(os.fsencode(path.name)):08x}' if is_long else path.name
    temporary = path.with_name(f'.{name}.{writer}.tmp')
    try:
        yield temporary
        if durable:
            with temporary.open('rb+') as file:
                os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except UserError:  # a complete message already
        raise
    except OSError as error:
        free = sizeof_fmt(shutil.disk_usage(path.parent).free) if path.parent.is_dir() else 'none'
        message = f'cannot write {path} (free space: {free}): {error.strerror or error}'
        raise OSError(*filter(None, [error.errno]), message) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale_temporaries(folder: str | Path) -> None:
    """Remove the temporary files of processes that were killed while writing."""
    for file in Path(folder).rglob('.*.tmp'):
        if not file.is_dir():
            file.unlink(missing_ok=True)


def check_resume(opt: dict, resume_iter: int, files: Collection[str] = ()) -> None:
    """Point ``path.pretrain_network_*`` at the networks saved with a training state.

    The pretrained weights in the option file (file, key, strictness) are for the first start; a
    resumed run continues from its own files. Networks in ``path.ignore_resume_networks`` keep those
    of the option file.

    Args:
        files: Names of the files that the state records.
    """
    path = opt['path']
    if not path.get('resume_state'):
        return
    models = folder_of_networks(path)
    ignored = path.get('ignore_resume_networks') or []
    for network in [key for key in opt if key.startswith('network_') and opt[key] is not None]:
        if network in ignored:
            continue
        label = network.removeprefix('network_')
        file = network_file(models, label, resume_iter, files)
        if file is None:
            continue
        path[f'pretrain_{network}'] = str(file)
        path[f'param_key_{label}'] = 'params'
        path[f'strict_load_{label}'] = True
        logger.info('Resume %s from %s', network, path[f'pretrain_{network}'])


def network_file(
    models: Path, label: str, iteration: int, files: Collection[str] = ()
) -> Path | None:
    """Where ``network_<label>`` of an iteration is, in either format.

    Args:
        files: Names of the files that the training state of the iteration records. If there are
            some without this network, because the model does not save it, the result is None.
    """
    torch_file, other = (
        models / f'net_{label}_{iteration}{ending}' for ending in ('.pth', '.safetensors')
    )
    if files:
        return next((file for file in (torch_file, other) if file.name in files), None)
    return other if other.is_file() and not torch_file.is_file() else torch_file


def folder_of_networks(path: dict) -> Path:
    """Where the networks that belong to ``path.resume_state`` are."""
    models = Path(path['resume_state']).resolve().parents[1] / 'models'
    return models if models.is_dir() else Path(path['models'])

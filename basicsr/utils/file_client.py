"""Storage backends: read bytes from a folder, an LMDB or a memcached server.

The clients hold only paths, so a dataset that owns one can be pickled for worker processes.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import CheckError, MissingKeyError, MissingPackageError, UserError
from .lmdb_check import check_lmdb
from .text import some

_READING_OPTIONS = ('max_readers', 'max_spare_txns')
# Size and modification time, in ns.
Stamp = tuple[int, int]


class BaseStorageBackend:
    """Interface of a backend: ``get`` returns bytes, ``get_text`` a string."""

    def get(self, filepath: str | Path) -> bytes | None:
        raise NotImplementedError(f'{type(self).__name__} cannot read bytes.')

    def get_text(self, filepath: str | Path) -> str:
        raise NotImplementedError(f'{type(self).__name__} cannot read texts.')


class HardDiskBackend(BaseStorageBackend):
    """Files of a file system."""

    def location(self, client_key: str = 'default') -> str:
        """Folder that relative names start from."""
        return os.getcwd()

    def stamp(self, filepath: str | Path, client_key: str = 'default') -> Stamp:
        """A stamp that changes with the content of a file."""
        status = os.stat(filepath)
        return status.st_size, status.st_mtime_ns

    def get(self, filepath: str | Path) -> bytes:
        return Path(filepath).read_bytes()

    def get_text(self, filepath: str | Path) -> str:
        return Path(filepath).read_text(encoding='utf-8')


class MemcachedBackend(BaseStorageBackend):
    """A memcached server, through the ``mc`` package of the cluster.

    Args:
        server_list_cfg, client_cfg: Configuration files of the server list and the client.
        sys_path: Folder of the ``mc`` package, if it is not installed.
    """

    def __init__(self, server_list_cfg: str, client_cfg: str, sys_path: str | None = None):
        if sys_path is not None:
            sys.path.append(sys_path)
        try:
            import mc  # pyright: ignore[reportMissingImports] (exists on such clusters only)
        except ImportError as error:
            raise MissingPackageError(
                'io_backend type memcached needs the package mc of a memcached cluster; '
                'name its folder as sys_path.'
            ) from error
        self._mc = mc
        self._client = mc.MemcachedClient.GetInstance(server_list_cfg, client_cfg)

    def get(self, filepath: str | Path) -> memoryview:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = self._mc.pyvector()
        self._client.Get(str(filepath), value)
        return self._mc.ConvertBuffer(value)


class LmdbBackend(BaseStorageBackend):
    """One LMDB or several, told apart by client keys.

    Args:
        db_paths: Folder of a database, or a list of them.
        client_keys: A name for each.
        readonly, lock: Only reading without lock files is possible here.
        readahead, max_readers, max_spare_txns: As in ``lmdb.open``.

    Raises:
        ValueError: An option would allow writing, or is unknown.
    """

    def __init__(
        self,
        db_paths: str | Path | Sequence[str | Path],
        client_keys: str | Sequence[str] = 'default',
        readonly: bool = True,
        lock: bool = False,
        readahead: bool = False,
        **kwargs: Any,
    ):
        paths = [db_paths] if isinstance(db_paths, str | Path) else list(db_paths)
        keys = [client_keys] if isinstance(client_keys, str) else list(client_keys)
        if len(paths) != len(keys):
            raise CheckError(f'{len(paths)} db_paths need as many client_keys, got {keys}.')
        for path in paths:
            check_lmdb(path)
            _forget_replaced(str(Path(path).resolve()))
        self.db_paths = {
            key: str(Path(path).resolve()) for key, path in zip(keys, paths, strict=True)
        }
        others = [name for name in kwargs if name not in _READING_OPTIONS]
        if not readonly or lock or others:
            wrong = 'readonly: false' if not readonly else 'lock: true' if lock else some(others)
            raise UserError(
                f'io_backend: {wrong}: an LMDB is only read here, so options that write to it are '
                f'refused; there are readahead, {", ".join(_READING_OPTIONS)}.'
            )
        self._options = {'readonly': True, 'lock': False, 'readahead': readahead, **kwargs}

    def get(self, filepath: str | Path, client_key: str = 'default') -> bytes | None:
        """Value of the key ``filepath``; None if the database has no such key."""
        if client_key not in self.db_paths:
            raise MissingKeyError(f"client_key '{client_key}' is not one of {list(self.db_paths)}.")
        path = self.db_paths[client_key]
        database, error_class = _open_lmdb(path, self._options)
        try:
            with database.begin(write=False) as transaction:
                return transaction.get(str(filepath).encode())
        except error_class as error:
            raise UserError(f"{path}: cannot read the key '{filepath}': {error}.") from error

    def location(self, client_key: str = 'default') -> str:
        """Folder of the database."""
        return self.db_paths[client_key]

    def stamp(self, filepath: str | Path, client_key: str = 'default') -> Stamp:
        """A stamp that changes with the content of the database."""
        status = os.stat(os.path.join(self.db_paths[client_key], 'data.mdb'))
        return status.st_size, status.st_mtime_ns


# LMDB allows a database to be opened once per process: all backends share these handles, by path
# and options. The second value identifies the file that the handle has open.
_opened: dict[tuple[str, str], tuple[Any, tuple[int, int]]] = {}


def _open_lmdb(path: str, options: Mapping[str, Any]) -> tuple[Any, type[Exception]]:
    """The database, and the class of its errors."""
    import lmdb

    key = path, repr(sorted(options.items()))
    if key not in _opened:
        try:
            _opened[key] = lmdb.open(path, **options), _file_of(path)
        except (lmdb.Error, TypeError, OverflowError) as error:
            raise UserError(f'cannot open the LMDB {path} with {options}: {error}.') from error
    return _opened[key][0], lmdb.Error


def _forget_replaced(path: str) -> None:
    """Drop handles of a database that has since been removed and created anew at the same path."""
    for key, (_, file) in list(_opened.items()):
        # The inode of an open file is not reused. If a thread is still reading, the old database
        # is closed when it is done.
        if key[0] == path and file != _file_of(path):
            del _opened[key]


def _file_of(path: str) -> tuple[int, int]:
    status = os.stat(os.path.join(path, 'data.mdb'))
    return status.st_dev, status.st_ino


class FileClient:
    """A backend chosen by name.

    Args:
        backend: 'disk', 'lmdb' or 'memcached'.
        **kwargs: Arguments of that backend.
    """

    _backends = {  # noqa: RUF012 (a constant table; dependents extend it by subclassing)
        'disk': HardDiskBackend,
        'memcached': MemcachedBackend,
        'lmdb': LmdbBackend,
    }

    def __init__(self, backend: str = 'disk', **kwargs: Any):
        if backend not in self._backends:
            raise UserError(
                f"io_backend type '{backend}' is unknown; choose from {', '.join(self._backends)}."
            )
        self.backend = backend
        self.client = self._backends[backend](**kwargs)

    def get(self, filepath: str | Path, client_key: str = 'default') -> bytes | None:
        """Bytes of a file or a key; None for a key that an LMDB lacks."""
        if isinstance(self.client, LmdbBackend):
            return self.client.get(filepath, client_key)
        return self.client.get(filepath)

    def get_text(self, filepath: str | Path) -> str:
        return self.client.get_text(filepath)

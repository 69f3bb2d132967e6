"""Check that an LMDB is intact before opening it in this process.

The library maps the file into memory and follows the offsets in its pages: in a truncated or
damaged file they may point anywhere, and crash the process without a message. So a child process
reads all keys first, as a training does later, and may crash instead.
"""

import functools
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

from .errors import MissingPackageError, UserError

# Values take nearly all of a file, and are not read: the last byte of the last one shows that the
# others are present. The map has room for any value beyond the file, where all reading is an error.
_WALK = """
import ctypes, os, sys
import lmdb

view = (ctypes.c_void_p * 16)()  # a Py_buffer, which begins with the address

def end_of(value):
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(value), view, 0)
    ctypes.pythonapi.PyBuffer_Release(view)
    return view[0] + len(value)

room = os.path.getsize(f'{sys.argv[1]}/data.mdb') + 2**32
options = {'readonly': True, 'lock': False, 'readahead': False, 'map_size': room}
with lmdb.open(sys.argv[1], **options) as database, database.begin(buffers=True) as transaction:
    before, end, last = b'', 0, b''
    for key in transaction.cursor().iternext(values=False):
        value, key = transaction.get(key), bytes(key)
        if value is None or key <= before:  # a tree that turns back on itself has no end
            sys.exit(f'the key {key} is misplaced')
        before = key
        if value and end_of(value) > end:
            end, last = end_of(value), value
    bytes(last[-1:])
"""


def check_lmdb(folder: str | Path) -> None:
    """Refuse a database that would make the library read outside of the file.

    Raises:
        FileNotFoundError: ``folder`` has no data.mdb.
        ValueError: It is truncated or damaged.
    """
    file = Path(folder) / 'data.mdb'
    if not file.is_file():
        raise FileNotFoundError(f'no LMDB at {folder} (a folder with data.mdb).')
    if importlib.util.find_spec('lmdb') is None:
        raise MissingPackageError('an LMDB needs: pip install lmdb')
    status = file.stat()
    _check(str(file.resolve()), status.st_size, status.st_mtime_ns)


@functools.cache
def _check(file: str, size: int, modified: int) -> None:
    walk = subprocess.run(
        [sys.executable, '-P', '-c', _WALK, str(Path(file).parent)],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    if walk.returncode:
        said = walk.stderr.strip().splitlines() or [f'exit status {walk.returncode}']
        reason = signal.strsignal(-walk.returncode) if walk.returncode < 0 else said[-1]
        raise UserError(f'{file}: the LMDB is truncated or damaged ({reason}); create it again.')

"""Whether an LMDB is whole, before its library reads it.

The library maps the file into memory and follows the numbers in its pages: those of a file that is
cut off or damaged may lead anywhere, and end the process without a message. Here they are checked
first, in the pages that hold keys; the values, which take nearly all of the file, are not read. The
layout is that of ``lmdb.h`` and ``mdb.c``, version 0.9 (Howard Chu, "LMDB: Lightning Memory-Mapped
Database", http://www.lmdb.tech/doc/).
"""

import functools
import mmap
import os
import struct
from pathlib import Path

from .errors import UserError

_PAGE = struct.Struct('<QHHHH')  # number, unused, flags, end of the offsets, begin of the nodes
_META = struct.Struct('<II8xQ')  # magic, version, bytes to map
_TREE = struct.Struct('<IHH32xQ')  # page size (of the first tree), flags, depth, root
_NODE = struct.Struct('<HHHH')  # size of the value or number of the page, flags, length of the key
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _META_PAGE = 1, 2, 8
_ELSEWHERE = 1  # flag of a node whose value has pages of its own
_NONE = 2**64 - 1  # root of an empty tree
_DEEPEST = 32  # more than any real one, and all that the library has room for


def check_lmdb(folder: str | Path) -> None:
    """Refuse a database that would lead its library out of the file.

    Raises:
        FileNotFoundError: ``folder`` has no data.mdb.
        ValueError: It is cut off or damaged.
    """
    file = Path(folder) / 'data.mdb'
    if not file.is_file():
        raise FileNotFoundError(f'no LMDB at {folder} (a folder with data.mdb).')
    status = file.stat()
    _check(str(file.resolve()), status.st_size, status.st_mtime_ns)


@functools.cache
def _check(file: str, size: int, modified: int) -> None:
    with open(file, 'rb') as opened:
        if os.fstat(opened.fileno()).st_size < 1024:
            raise UserError(f'{file}: {size} bytes are no LMDB; make it again.')
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _check_tree(data)
            except (struct.error, IndexError) as error:
                raise UserError(
                    f'{file}: the LMDB is cut off or damaged ({error}); make it again.'
                ) from error


def _check_tree(data: mmap.mmap) -> None:
    page_size = _TREE.unpack_from(data, _PAGE.size + _META.size)[0]
    if page_size.bit_count() != 1 or not 512 <= page_size <= 65536:
        raise IndexError(f'pages of {page_size} bytes')
    trees = [_tree_of(data, page * page_size, page_size) for page in (0, 1)]
    _, flags, depth, root = max(trees, key=lambda tree: tree[0])[1]  # the first one if equal
    if root == _NONE:
        return
    if flags or not 1 <= depth <= _DEEPEST:
        raise IndexError(f'a tree with the flags {flags} and the depth {depth}')
    pages, seen = [root], set()
    for level in range(depth):
        kind = _LEAF if level == depth - 1 else _BRANCH
        pages = [inner for page in pages for inner in _check_page(data, page, page_size, kind)]
        if len(set(pages) | seen) < len(pages) + len(seen):
            raise IndexError('a page has two places')
        seen.update(pages)


def _tree_of(data: mmap.mmap, start: int, page_size: int) -> tuple[int, tuple[int, int, int, int]]:
    """Age of one of the two descriptions of the database, and the tree that it describes."""
    flags = _PAGE.unpack_from(data, start)[2]
    *found, mapped = _META.unpack_from(data, start + _PAGE.size)
    if not flags & _META_PAGE or found != [_MAGIC, _VERSION]:
        raise IndexError('no description of a database')
    trees = start + _PAGE.size + _META.size
    tree = _TREE.unpack_from(data, trees + _TREE.size)
    last, age = struct.unpack_from('<QQ', data, trees + 2 * _TREE.size)
    if (last + 1) * page_size > mapped:
        raise IndexError(f'{last + 1} pages in {mapped} bytes')
    return age, tree


def _check_page(data: mmap.mmap, page: int, page_size: int, kind: int) -> list[int]:
    """The pages below a branch; none below a leaf."""
    start, below = page * page_size, []
    if start + page_size > len(data):
        raise IndexError(f'page {page} is missing')
    number, _, flags, lower, upper = _PAGE.unpack_from(data, start)
    count = (lower - _PAGE.size) // 2
    if number != page or flags & 15 != kind or not _PAGE.size < lower <= upper <= page_size:
        raise IndexError(f'page {page} is none')
    if kind == _BRANCH and count < 2:
        raise IndexError(f'page {page} has one branch')
    for offset in struct.unpack_from(f'<{count}H', data, start + _PAGE.size):
        if not upper <= offset <= page_size - _NODE.size:
            raise IndexError(f'page {page} has a node outside')
        low, high, node_flags, key = _NODE.unpack_from(data, start + offset)
        if kind == _BRANCH:
            below.append(low | high << 16 | node_flags << 32)
            end = offset + _NODE.size + key
        else:
            size, away = low | high << 16, node_flags & _ELSEWHERE
            end = offset + _NODE.size + key + (8 if away else size)
        if end > page_size:
            raise IndexError(f'page {page} has a node that is too long')
        if kind == _LEAF and away:
            first = struct.unpack_from('<Q', data, start + end - 8)[0]
            if first * page_size + _PAGE.size + size > len(data):
                raise IndexError(f'a value of {size} bytes is missing')
    return below

"""Cache of decoded images: raw pixels in a memory-mapped file, so each image is decoded once.

A cache is a folder with two files: ``pixels.bin`` holds images in sequence, each preceded by a
header that describes it, plane by plane as in tensors; ``offsets.bin`` holds the position at which
each image of the list starts, 0 for those not yet added. Images are added when they are first read.
An offset is written after its pixels, so a process killed at any moment leaves no partial image
to be read; two processes that add the same image at once add it twice, and either copy is valid.
(Clear it after a power failure.)
"""

import errno
import json
import logging
import mmap
import os
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from basicsr.utils.errors import UserError
from basicsr.utils.file_client import Stamp
from basicsr.utils.img_util import cv2
from basicsr.utils.misc import atomic_path, locked, remove_stale_temporaries
from basicsr.utils.text import sizeof_fmt

from .shared import PathColumn

logger = logging.getLogger(__name__)

# magic, index of the image, size and time of its source, height, width, channels, bytes per value
_HEADER = struct.Struct('<8sQqqIIII')
_MAGIC = b'basicsr2'
# Part of the name of the folder: change it with the layout of pixels or the way of decoding.
_LAYOUT = 'planes as stored'
_ALIGN = 64  # bytes, of headers and pixels
_FILES = ('offsets.bin', 'pixels.bin', 'about.json', 'lock')
_NO_FOLDERS = ('', 'on', 'none', 'true', 'false', 'yes', 'no')  # probably not meant as folders
_KEEP_DAYS = 30  # caches of ``auto`` are removed this long after their last use


def default_root() -> Path:
    """Where caches are kept unless an option names a folder.

    Raises:
        FileNotFoundError: The user has no home folder, as in some containers.
    """
    folder = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    if folder.startswith('~'):
        raise FileNotFoundError(
            'there is no home folder: set HOME, or XDG_CACHE_HOME for caches only.'
        )
    return Path(folder) / 'basicsr' / 'images'


def open_cache(
    option: str | bool, sources: Sequence[str], kind: str, what: str, location: str = ''
) -> 'ImageCache | None':
    """The cache that the option ``cache`` of a dataset asks for, unless it is 'off'.

    Args:
        option: 'auto' or 'device': in the user's cache folder. Such a cache takes at most half of
            the disk's free space, is removed after 30 days without use, and is left out if that
            folder cannot be written. Otherwise a folder.
        sources: Names of the images.
        kind: How they are decoded.
        what: Name of the images in the log.
        location: Folder that relative names start from.
    """
    if isinstance(option, str) and option.lower() in _NO_FOLDERS:
        raise UserError(f"cache is '{option}'; it must be auto, off, or a folder.")
    automatic = option in ('auto', 'device', True)
    try:
        if automatic:
            freed = clear_caches(default_root(), unused_for=_KEEP_DAYS)
            if freed:
                logger.info(
                    'Image caches unused for %d days: %s freed.', _KEEP_DAYS, sizeof_fmt(freed)
                )
        root, share = (default_root(), 0.5) if automatic else (str(option), None)
        try:
            cache = ImageCache(root, sources, kind, share, location)
            about = str(cache)
        except FileNotFoundError:  # cleared in the meantime
            cache = ImageCache(root, sources, kind, share, location)
            about = str(cache)
    except (OSError, NotImplementedError) as error:  # such as a file system without locks
        if not automatic:
            raise
        logger.warning('No image cache, images are decoded each time: %s', error)
        return None
    logger.info('Image cache of %s: %s', what, about)
    return cache


class ImageCache:
    """The decoded images of one list of sources.

    Processes and runs with the same list share it.

    Args:
        root: Folder of caches.
        sources: Paths or keys, one per image.
        kind: How they are decoded, such as 'color'.
        share: Largest part of the disk's free space to take; None for no limit.
        location: Folder that relative paths start from.
    """

    def __init__(
        self,
        root: str | Path,
        sources: Sequence[str],
        kind: str = 'color',
        share: float | None = None,
        location: str = '',
    ):
        column = sources if isinstance(sources, PathColumn) else PathColumn(sources)
        key = column.digest(f'{_LAYOUT} {kind}', location)
        self.folder = Path(root).expanduser().resolve() / key
        self.count = len(sources)
        self.share = share
        self._full = False
        self._open = False
        self._prepare(os.path.join(location, sources[0]) if sources else '', kind)

    @property
    def decoded(self) -> int:
        """Number of cached images; 0 if the cache has been cleared."""
        try:
            return int(np.count_nonzero(np.fromfile(self.folder / 'offsets.bin', np.uint64)))
        except FileNotFoundError:
            return 0

    def __str__(self) -> str:
        size = sizeof_fmt((self.folder / 'pixels.bin').stat().st_size)
        limit = f', takes {self.share:.0%} of the free space at most' if self.share else ''
        return f'{self.decoded} of {self.count} images are decoded in {self.folder} ({size}{limit})'

    def _prepare(self, first: str, kind: str) -> None:
        # Private unless a folder was given: whoever can write here controls what networks see.
        self.folder.mkdir(mode=0o777 if self.share is None else 0o700, parents=True, exist_ok=True)
        if self.share is not None and _belongs_to_others(self.folder):
            raise PermissionError(f'{self.folder} belongs to another user.')
        with self._exclusive():
            remove_stale_temporaries(self.folder)  # every writer holds the lock
            about = {'kind': kind, 'images': self.count, 'first': first}
            with atomic_path(self.folder / 'about.json', durable=False) as temporary:
                temporary.write_text(json.dumps(about), encoding='utf-8')
            offsets = self.folder / 'offsets.bin'
            if not offsets.exists() or offsets.stat().st_size != 8 * self.count:
                # A new file, since a run may have mapped the old one; without holes, since a map
                # cannot report a full disk.
                with atomic_path(offsets, durable=False) as temporary:
                    temporary.write_bytes(bytes(8 * self.count))
            with (self.folder / 'pixels.bin').open('ab') as file:
                if file.tell() == 0:
                    file.write(_MAGIC.ljust(_ALIGN, b'\0'))

    def get(self, index: int, stamp: Stamp) -> np.ndarray | None:
        """The image as a read-only view (h, w, c) of the file, or None if it is not cached.

        Args:
            stamp: Current size and modification time of the source; if they differ from those of
                the decoded image, the source has changed.
        """
        try:
            if not self._open:
                self._map()
            offset = self._offsets[index]
            if offset == 0 or not self._reaches(offset + _ALIGN):
                return None
            magic, number, *saved, height, width, channels, itemsize = _HEADER.unpack_from(
                self._pixels, offset
            )
            is_image = itemsize in (1, 2) and height and width and channels in (1, 3)
            known = magic == _MAGIC and number == index and is_image
            if not known or tuple(saved) != stamp:
                return None
            start = offset + _ALIGN
            if not self._reaches(start + height * width * channels * itemsize):
                return None
        except OSError as error:  # the cache has been cleared
            self._stop(str(error))
            return None
        dtype = np.uint8 if itemsize == 1 else np.uint16
        planes = np.ndarray((channels, height, width), dtype, self._pixels, start)
        return planes.transpose(1, 2, 0)

    def pixels(self) -> np.ndarray:
        """The file of pixels as bytes: the map that the images of ``get`` are views of."""
        self._map()
        return np.frombuffer(self._pixels, np.uint8)

    def put(self, index: int, stamp: Stamp, img: np.ndarray) -> None:
        """Add an image (h, w, c); skipped if there is no space or it is not of 8 or 16 bits."""
        if self._full or img.dtype not in (np.uint8, np.uint16):
            return
        header = _HEADER.pack(_MAGIC, index, *stamp, *img.shape, img.itemsize).ljust(_ALIGN, b'\0')
        planes = np.empty((img.shape[2], *img.shape[:2]), img.dtype)
        cv2.split(img, list(planes))  # pyright: ignore (its stubs do not know arrays)
        try:
            if not self._open:
                self._map()
            offset = self._append(header, planes)
        except OSError as error:  # the disk is full, or the cache has been cleared
            self._stop(str(error))
            return
        if offset:
            self._offsets[index] = offset

    def _append(self, header: bytes, planes: np.ndarray) -> int:
        """Write an image at the end of the pixels; returns where, or 0 if there is no room."""
        path = self.folder / 'pixels.bin'
        with path.open('r+b', buffering=0) as file, self._exclusive():
            end = file.seek(0, os.SEEK_END)
            offset = -(-end // _ALIGN) * _ALIGN
            if not self._has_room(offset, len(header) + planes.nbytes):
                return 0
            try:
                file.seek(offset)
                if file.write(header) + file.write(planes.data) < len(header) + planes.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.truncate(file.fileno(), end)
                raise
        return offset

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other processes from writing, as one would overwrite what another appends."""
        with locked(self.folder / 'lock') as is_alone:
            if not is_alone:
                raise OSError(errno.ENOLCK, f'the file system of {self.folder} has no locks')
            yield

    def _has_room(self, size: int, more: int) -> bool:
        if self.share is None:
            return True
        free = shutil.disk_usage(self.folder).free
        if size + more <= self.share * (size + free):
            return True
        self._stop(f'it has {sizeof_fmt(size)}, and the disk has only {sizeof_fmt(free)} left')
        return False

    def _stop(self, reason: str) -> None:
        if not self._full:
            logger.warning('Image cache %s grows no further: %s.', self.folder, reason)
        self._full = True

    def _reaches(self, end: int) -> bool:
        """Whether the mapping covers ``end`` bytes, extended if the file has grown since."""
        if end <= len(self._pixels):
            return True
        self._map()
        return end <= len(self._pixels)

    def _map(self) -> None:
        offsets = np.memmap(self.folder / 'offsets.bin', np.uint64, 'r+', shape=self.count)
        self._offsets = offsets.data  # faster item by item
        with (self.folder / 'pixels.bin').open('rb') as file:
            self._pixels = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._open = True

    def __getstate__(self) -> dict[str, Any]:
        """A spawned worker process maps the files itself."""
        state = self.__dict__.copy()
        state.pop('_offsets', None)
        state.pop('_pixels', None)
        return state | {'_open': False}


def _belongs_to_others(folder: Path) -> bool:
    """Whether another user made the folder or a file in it, or it is a link."""
    if not hasattr(os, 'getuid'):  # Windows
        return False
    return any(path.lstat().st_uid != os.getuid() for path in (folder, *folder.iterdir()))


def list_caches(root: str | Path | None = None) -> list[dict[str, Any]]:
    """The existing caches: folder, size in bytes, number of images, first source."""
    root = Path(root).expanduser() if root else default_root()
    found = []
    for pixels in sorted(root.glob('*/pixels.bin')):
        about = pixels.with_name('about.json')
        with suppress(FileNotFoundError), pixels.open('rb') as file:  # cleared by others meanwhile
            if about.exists() and file.read(len(_MAGIC)) == _MAGIC:
                size = pixels.stat().st_size
                found.append({'folder': pixels.parent, 'size': size, **_read_about(about)})
    return found


def _read_about(file: Path) -> dict[str, Any]:
    """The description stored in a cache; it may be missing after a power failure."""
    unknown = {'kind': 'unknown', 'images': 0, 'first': ''}
    try:
        about = json.loads(file.read_bytes())
    except ValueError:
        return unknown
    return about if isinstance(about, dict) and about.keys() >= unknown.keys() else unknown


def clear_caches(root: str | Path | None = None, unused_for: float = 0) -> int:
    """Remove the caches below ``root``; returns the bytes freed.

    Args:
        unused_for: Remove only those that no run has opened for this many days.
    """
    freed = 0
    for cache in list_caches(root):
        folder = cache['folder']
        with suppress(FileNotFoundError):  # cleared by others meanwhile
            if time.time() - (folder / 'about.json').stat().st_mtime < unused_for * 86400:
                continue
            remove_stale_temporaries(folder)
            for name in _FILES:
                (folder / name).unlink(missing_ok=True)
            freed += cache['size']
            if not any(folder.iterdir()):
                folder.rmdir()
    return freed

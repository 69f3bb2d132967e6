"""Create image LMDBs: PNG bytes by key, with a human-readable list of keys.

``<name>.lmdb/meta_info.txt`` has a line ``<key>.png (<h>,<w>,<c>) <compression level>`` per image.
It appears last: a database without it is incomplete, and readers refuse it.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from .errors import MissingPackageError, UserError
from .img_util import cv2, read_unchanged
from .lmdb_check import check_lmdb
from .misc import atomic_path
from .parallel import map_in_order
from .text import some

_LONGEST_KEY = 511  # bytes, by LMDB
_MOST_PENDING_BYTES = 2**28  # committed earlier than the batch is full

Shape = tuple[int, int, int]


def read_img_worker(path: str | Path, key: str, compress_level: int) -> tuple[str, bytes, Shape]:
    """Read an image and encode it as PNG: (key, bytes, (height, width, channels)).

    Raises:
        FileNotFoundError: No such file.
        ValueError: The file is not a complete image, or PNG cannot hold it; the message names it.
    """
    try:
        img = read_unchanged(path)
    except ValueError as error:
        raise UserError(f'cannot decode {path}: {error}') from error
    if img.dtype not in ('uint8', 'uint16'):
        raise UserError(f'{path}: PNG cannot hold {img.dtype}, only uint8 and uint16.')
    height, width = img.shape[:2]
    channels = 1 if img.ndim == 2 else img.shape[2]
    _, encoded = cv2.imencode('.png', img, [cv2.IMWRITE_PNG_COMPRESSION, compress_level])
    return key, encoded.tobytes(), (height, width, channels)


def make_lmdb_from_imgs(
    data_path: str | Path,
    lmdb_path: str | Path,
    img_path_list: Sequence[str],
    keys: Sequence[str],
    batch: int = 5000,
    compress_level: int = 1,
    multiprocessing_read: bool = False,
    n_thread: int = 40,
    map_size: int | None = None,
    resume: bool = False,
) -> None:
    """Write the images ``data_path/<img_path>`` into an LMDB under ``keys``.

    Images written before an error or an interruption are kept, but without the list of keys.

    Args:
        batch: Images per commit: as many may be lost if the process is killed.
        compress_level: PNG compression, 0 to 9.
        multiprocessing_read: Read and encode with ``n_thread`` threads (OpenCV releases the GIL);
            a few images per thread are in memory.
        map_size: Largest size of the database in bytes; it grows as needed if not given.
        resume: Continue an existing database; the keys in it are skipped.

    Raises:
        FileExistsError: ``lmdb_path`` exists, without ``resume``; nothing is overwritten.
        ValueError: The lists differ in length, keys repeat, the name does not end with .lmdb, a
            file is not an image, or the database to continue holds other keys.
    """
    if len(img_path_list) != len(keys):
        raise UserError(f'{len(img_path_list)} images need as many keys, got {len(keys)}.')
    if len(set(keys)) < len(keys):
        repeated = sorted(key for key, count in Counter(keys).items() if count > 1)
        raise UserError(f'each image needs a key of its own, got twice: {some(repeated, 3)}.')
    for path, key in zip(img_path_list, keys, strict=True):
        if not 0 < len(key.encode('utf-8', 'replace')) <= _LONGEST_KEY:
            raise UserError(
                f"{path}: its key '{key}' must have 1 to {_LONGEST_KEY} bytes: rename the file."
            )
    growing = map_size is None
    maker = LmdbMaker(lmdb_path, map_size or 2**26, batch, compress_level, growing, resume)
    try:
        others = sorted(maker.shapes.keys() - set(keys))
        if others:
            raise UserError(f'{lmdb_path} holds other images: {some(others, 3)}. Replace it.')
        paths = [Path(data_path) / path for path in img_path_list]
        missing = [item for item in zip(paths, keys, strict=True) if item[1] not in maker.shapes]
        threads = n_thread if multiprocessing_read else 1
        images = map_in_order(lambda item: read_img_worker(*item, compress_level), missing, threads)
        done = len(keys) - len(missing)
        for key, data, shape in tqdm(
            images, initial=done, total=len(keys), unit='image', disable=None
        ):
            maker.put(data, key, shape)
        maker.shapes = {key: maker.shapes[key] for key in keys}
    except BaseException:
        maker.suspend()
        raise
    maker.close()


class LmdbMaker:
    """Writer of an image LMDB.

    Args:
        lmdb_path: New folder, named ``*.lmdb``.
        map_size: Largest size of the database in bytes.
        batch: Images per commit.
        compress_level: PNG level, written to the list.
        grow: Double ``map_size`` whenever it is reached.
        resume: Continue an existing database of PNG images.

    Attributes:
        shapes: (height, width, channels) by key, in the order of the list.
    """

    def __init__(
        self,
        lmdb_path: str | Path,
        map_size: int = 1024**4,
        batch: int = 5000,
        compress_level: int = 1,
        grow: bool = False,
        resume: bool = False,
    ):
        try:
            import lmdb
        except ImportError as error:
            raise MissingPackageError('writing an LMDB needs: pip install lmdb') from error

        lmdb_path = Path(lmdb_path)
        if lmdb_path.suffix != '.lmdb':
            raise UserError(f"the folder {lmdb_path} must be named with the ending '.lmdb'.")
        if lmdb_path.exists() and not resume:
            raise FileExistsError(
                f'{lmdb_path} already exists; remove it, choose another name, or continue it '
                '(resume=True).'
            )
        if (lmdb_path / 'data.mdb').exists():
            check_lmdb(lmdb_path)
        lmdb_path.parent.mkdir(parents=True, exist_ok=True)
        self.batch = batch
        self.compress_level = compress_level
        self._grow = grow
        self._full_error = lmdb.MapFullError
        self._list_file = lmdb_path / 'meta_info.txt'
        self._env = lmdb.open(str(lmdb_path), map_size=map_size)
        with self._env.begin(buffers=True) as transaction:
            self.shapes = {
                str(key, 'utf-8'): _shape_of_png(value) for key, value in transaction.cursor()
            }
        self._pending: list[tuple[str, bytes]] = []
        self._pending_bytes = 0

    def put(self, img_byte: bytes, key: str, img_shape: Shape) -> None:
        """Add one encoded image of shape (height, width, channels)."""
        self.shapes[key] = img_shape
        self._pending.append((key, img_byte))
        self._pending_bytes += len(img_byte)
        if len(self._pending) >= self.batch or self._pending_bytes > _MOST_PENDING_BYTES:
            self._commit()

    def close(self) -> None:
        """Write the pending images, then the list of keys, which marks the database as complete."""
        self.suspend()
        lines = [
            f'{key}.png ({height},{width},{channels}) {self.compress_level}\n'
            for key, (height, width, channels) in self.shapes.items()
        ]
        with atomic_path(self._list_file) as temporary:
            temporary.write_text(''.join(lines), encoding='utf-8')

    def suspend(self) -> None:
        """Write the pending images but no list: another maker may continue (``resume``)."""
        try:
            self._commit()
        finally:
            self._env.close()

    def _commit(self) -> None:
        if self._pending:  # a list of the earlier images would pass for a complete one
            self._list_file.unlink(missing_ok=True)
        try:
            with self._env.begin(write=True) as transaction:
                for key, data in self._pending:
                    transaction.put(key.encode(), data)
        except self._full_error:
            if not self._grow:
                raise
            self._env.set_mapsize(self._env.info()['map_size'] * 2)
            self._commit()
            return
        self._pending, self._pending_bytes = [], 0


def _shape_of_png(data: bytes | memoryview) -> Shape:
    """Height, width and channels from the header of a PNG; OpenCV writes no palettes."""
    channels = {0: 1, 2: 3, 6: 4}.get(data[25] if len(data) > 25 else -1)
    if data[:8] != b'\x89PNG\r\n\x1a\n' or channels is None:
        raise UserError('the database holds images other than PNG: replace it.')
    width, height = struct.unpack('>II', data[16:24])
    return height, width, channels

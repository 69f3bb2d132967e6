"""Writing image LMDBs: PNG bytes under keys, with a readable list beside them.

``<name>.lmdb/meta_info.txt`` has a line ``<key>.png (<h>,<w>,<c>) <compression level>`` per image.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .img_util import cv2

_MOST_PENDING_BYTES = 2**28  # committed earlier than the batch is full


def read_img_worker(
    path: str | Path, key: str, compress_level: int
) -> tuple[str, bytes, tuple[int, int, int]]:
    """Read an image and encode it as PNG: (key, bytes, (height, width, channels))."""
    img = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if img is None:
        raise ValueError(f'cannot decode {path}: not an image, truncated, or missing.')
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
) -> None:
    """Write the images ``data_path/<img_path>`` into a new LMDB under ``keys``.

    Args:
        batch: Images per commit.
        compress_level: PNG compression, 0 to 9.
        multiprocessing_read: Read and encode with ``n_thread`` threads (OpenCV releases the lock);
            only as many images as threads are in memory.
        map_size: Largest size of the database in bytes; it grows as needed if not given.

    Raises:
        FileExistsError: ``lmdb_path`` exists; nothing is overwritten.
        ValueError: The lists differ in length, the name does not end with .lmdb, or a file is
            not an image; what has been written is removed.
    """
    if len(img_path_list) != len(keys):
        raise ValueError(f'{len(img_path_list)} images need as many keys, got {len(keys)}.')
    maker = LmdbMaker(lmdb_path, map_size or 2**26, batch, compress_level, grow=map_size is None)
    try:
        paths = [Path(data_path) / path for path in img_path_list]
        threads = n_thread if multiprocessing_read else 1
        for key, data, shape in _read_in_order(paths, keys, compress_level, threads):
            maker.put(data, key, shape)
        maker.close()
    except BaseException:
        shutil.rmtree(lmdb_path)
        raise


def _read_in_order(
    paths: Sequence[Path], keys: Sequence[str], compress_level: int, threads: int
) -> Iterator[tuple[str, bytes, tuple[int, int, int]]]:
    levels = [compress_level] * threads
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(paths), threads):
            window = slice(start, start + threads)
            yield from pool.map(read_img_worker, paths[window], keys[window], levels)


class LmdbMaker:
    """Writer of an image LMDB.

    Args:
        lmdb_path: New folder, named ``*.lmdb``.
        map_size: Largest size of the database in bytes.
        batch: Images per commit.
        compress_level: PNG level, written to the list.
        grow: Double ``map_size`` whenever it is reached.
    """

    def __init__(
        self,
        lmdb_path: str | Path,
        map_size: int = 1024**4,
        batch: int = 5000,
        compress_level: int = 1,
        grow: bool = False,
    ):
        import lmdb

        lmdb_path = Path(lmdb_path)
        if lmdb_path.suffix != '.lmdb':
            raise ValueError(f"the folder {lmdb_path} must be named with the ending '.lmdb'.")
        if lmdb_path.exists():
            raise FileExistsError(f'{lmdb_path} already exists; remove it or choose another name.')
        self.batch = batch
        self.compress_level = compress_level
        self._grow = grow
        self._full_error = lmdb.MapFullError
        self._env = lmdb.open(str(lmdb_path), map_size=map_size)
        self._meta = (lmdb_path / 'meta_info.txt').open('w', encoding='utf-8')
        self._pending: list[tuple[str, bytes, tuple[int, int, int]]] = []
        self._pending_bytes = 0

    def put(self, img_byte: bytes, key: str, img_shape: tuple[int, int, int]) -> None:
        """Add one encoded image of shape (height, width, channels)."""
        self._pending.append((key, img_byte, img_shape))
        self._pending_bytes += len(img_byte)
        if len(self._pending) >= self.batch or self._pending_bytes > _MOST_PENDING_BYTES:
            self._commit()

    def close(self) -> None:
        self._commit()
        self._env.close()
        self._meta.close()

    def _commit(self) -> None:
        """Write what is pending, then its lines: the list names only what is there."""
        try:
            with self._env.begin(write=True) as transaction:
                for key, data, _ in self._pending:
                    transaction.put(key.encode(), data)
        except self._full_error:
            if not self._grow:
                raise
            self._env.set_mapsize(self._env.info()['map_size'] * 2)
            self._commit()
            return
        for key, _, (height, width, channels) in self._pending:
            self._meta.write(f'{key}.png ({height},{width},{channels}) {self.compress_level}\n')
        self._pending, self._pending_bytes = [], 0

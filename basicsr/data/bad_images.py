"""Handle unreadable images: training replaces them with others, validation reports them."""

import errno
import json
import logging
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from basicsr.utils.errors import UserError, image_error
from basicsr.utils.img_util import cv2
from basicsr.utils.json_lines import read_rows
from basicsr.utils.misc import locked

from .data_util import image_name
from .shared import DatasetWrapper

logger = logging.getLogger(__name__)

# More bad images than this, and than a tenth of those seen so far, mean that the set is broken.
_FEW, _SHARE = 10, 0.1
MOST_ATTEMPTS = 100  # images tried for one sample
BAD_DATA = (OSError, ValueError, EOFError, cv2.error, zlib.error, struct.error)
# These errors are not caused by the image and would recur with the next one.
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


def is_bad_data(error: Exception) -> bool:
    """Whether an error of a dataset is due to a damaged file instead of a bug in its code."""
    if isinstance(error, ConnectionError | TimeoutError):
        return False
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return False
    lmdb = sys.modules.get('lmdb')
    return isinstance(error, (*BAD_DATA, *([lmdb.Error] if lmdb else [])))


class BadImages:
    """The list of unreadable images of a training set, each recorded once.

    Processes share the file, and a resumed run reads it again.

    Args:
        file: JSON lines of ``path``, ``reason`` and ``sample``, the number of the sample for which
            the image was first read; None: unreadable images are not replaced.
        length: Number of images in the set; None if unknown.
    """

    def __init__(self, file: Path | None = None, length: int | None = None):
        self.file = file
        self.length = length
        self._known: dict[str, int] = {}  # by path, the sample it was first read for
        self._told = 0

    def passes_over(self, error: Exception, number: int) -> bool:
        """Whether the unreadable image of a sample may be replaced by another one.

        Raises:
            ValueError: There are too many.
        """
        if self.file is None or not is_bad_data(error):
            return False
        reason = str(error) or type(error).__name__
        path = str(getattr(error, 'filename', None) or '')
        key = path or reason
        if key not in self._known:
            self._record(self.file, key, {'path': path, 'reason': reason, 'sample': number})
        seen = min(number + 1, self.length or number + 1)
        # After a resume the file may list samples that this run has not reached yet.
        count = sum(sample <= number for sample in self._known.values())
        if count > max(_FEW, _SHARE * seen):
            raise UserError(
                f'{count} of the first {seen} images are unreadable, which is too many '
                f'for datasets.train.on_error: skip. They are listed in {self.file}; the last one: '
                f'{reason}'
            )
        return True

    def none_found(self, number: int) -> UserError:
        """The error of a sample for which ``MOST_ATTEMPTS`` images in a row are unreadable."""
        return UserError(
            f'sample {number}: no image was found for it in {MOST_ATTEMPTS} attempts; the '
            f'unreadable ones are listed in {self.file}.'
        )

    def report(self) -> None:
        """Log the number of unreadable images whenever it has doubled."""
        if self.file is None:
            return
        self._read(self.file)
        if len(self._known) >= max(2 * self._told, 1):
            self._told = len(self._known)
            logger.warning(
                '%d images are unreadable and replaced by others: see %s', self._told, self.file
            )

    def _record(self, file: Path, key: str, row: dict) -> None:
        """Add an image to the list, unless another process has added it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(f'.{file.name}.lock')):
            self._read(file)
            if key not in self._known:
                with file.open('a', encoding='utf-8') as rows:
                    rows.write(json.dumps(row) + '\n')
                self._known[key] = row['sample']

    def _read(self, file: Path) -> None:
        """Read the entries that other processes have written."""
        if file.exists():
            for row in read_rows(file, 'sample'):
                name = row.get('path') or row.get('reason')
                if isinstance(name, str):
                    self._known.setdefault(name, row['sample'])


class BadItem(dict):
    """Placeholder for an unreadable image in a validation loader.

    ``error`` holds the reason; using it as a batch raises the error of the image.
    """

    def __missing__(self, key: str) -> Any:
        raise image_error(self['path'], self['error'])


class ReportedDataset(DatasetWrapper):
    """A validation dataset: its items have a name, and unreadable images are BadItems."""

    def __getitem__(self, index: int) -> Any:
        try:
            item = self.dataset[index]
        except Exception as error:
            if isinstance(error, IndexError) or not is_bad_data(error):
                raise
            path = str(getattr(error, 'filename', None) or '')
            name = image_name(path, self._options) if path else ''
            return BadItem(error=str(error) or type(error).__name__, path=path, name=name)
        if isinstance(item, dict) and 'name' not in item and 'lq_path' in item:
            item['name'] = image_name(item['lq_path'], self._options)
        return item

    @property
    def _options(self) -> dict:
        return getattr(self.dataset, 'opt', {})


def collate_reported(items: list) -> Any:
    """A batch of one item of a ReportedDataset."""
    return items[0] if isinstance(items[0], BadItem) else default_collate(items)

"""Write checkpoints in a background thread, so that training does not wait for the disk."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .checkpoint import save_checkpoint

logger = logging.getLogger(__name__)


class BackgroundSaver:
    """Writes checkpoints in a background thread, one at a time, from copies in main memory.

    Queued files are still written if the program ends with an exception or Ctrl-C, unless a
    launcher kills it first because another rank has ended.
    """

    _MOST_PENDING = 4  # the files of one iteration; more would only pile up in memory

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, 'checkpoints')
        self._pending: deque[Future] = deque()
        self._failed = False

    def save(
        self, content: dict, path: str | Path, write: Callable[[dict, Any], Any] | None = None
    ) -> None:
        """Copy the content and return; it is written later, by ``write`` or ``save_checkpoint``.

        Raises:
            OSError: An earlier file could not be written.
        """
        self._finish(self._MOST_PENDING - 1)
        write = write or save_checkpoint
        self._pending.append(self._pool.submit(self._write, write, copy_to_cpu(content), path))

    def check(self) -> None:
        """Raise the error of a file that could not be written, without waiting for others."""
        self._finish(self._MOST_PENDING)

    def close(self) -> None:
        """Wait until all files are written; errors as for ``save``."""
        self._finish(0)
        self._pool.shutdown()

    def _write(self, write: Callable[[dict, Any], Any], content: dict, path: str | Path) -> None:
        if self._failed:  # a state without its networks is worse than none
            return
        try:
            write(content, path)
        except BaseException as error:
            self._failed = True
            logger.error('%s', error)  # at once, since the result may never be asked for
            raise

    def _finish(self, most_pending: int) -> None:
        """Wait until at most ``most_pending`` files are left; raise the errors of finished ones."""
        while self._pending and (len(self._pending) > most_pending or self._pending[0].done()):
            self._pending.popleft().result()


def copy_to_cpu(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples, with all tensors in main memory.

    NumPy scalars, such as scores of users' metrics, become Python numbers, which are safe to read.
    """
    if isinstance(value, Tensor):
        return value.detach().to('cpu', copy=True)
    if isinstance(value, dict):
        result = copy(value)  # of the same class: a Counter stays a Counter
        for key, item in value.items():
            result[key] = copy_to_cpu(item)
        return result
    if isinstance(value, list | tuple):
        return type(value)(map(copy_to_cpu, value))
    return value.item() if isinstance(value, np.generic) else deepcopy(value)

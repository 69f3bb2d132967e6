"""Destinations of a run's scalars and images: ``metrics.jsonl``, TensorBoard and wandb."""

import json
import logging
import math
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MissingPackageError, UserError
from .json_lines import keep_rows
from .misc import atomic_path

logger = logging.getLogger(__name__)


class ScalarWriter:
    """Writes scalars and images to every chosen destination; used like TensorBoard's writer.

    A destination that fails (disk full, server gone) is dropped with one warning: a run is
    worth more than its curves.
    """

    def __init__(self, *writers: Any):
        self._writers = list(writers)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._each('add_scalar', tag, float(value), step)

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Add ``image``: (h, w, 3) RGB uint8."""
        self._each('add_image', tag, image, step)

    def flush(self) -> None:
        self._each('flush')

    def close(self) -> None:
        self._each('close')

    def _each(self, method: str, *args: Any) -> None:
        for writer in self._writers[:]:
            try:
                getattr(writer, method)(*args)
            except Exception as error:  # a server, a disk, another package: anything may fail
                self._writers.remove(writer)
                logger.warning(
                    '%s failed and is switched off for the rest of the run: %s',
                    type(writer).__name__,
                    error,
                )


class _RowWriter:
    """Gathers the scalars of one iteration; ``flush`` hands them to ``_write`` as one row."""

    def __init__(self) -> None:
        self._row: dict[str, Any] = {}

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        if self._row.get('iter', step) != step:
            self.flush()
        self._row = {'iter': step, **self._row, tag: value}

    def flush(self) -> None:
        row, self._row = self._row, {}
        if row:
            self._write(row)

    def close(self) -> None:
        self.flush()

    def _write(self, row: dict[str, Any]) -> None:
        raise NotImplementedError(f'{type(self).__name__} defines no _write.')


class JsonlWriter(_RowWriter):
    """Rows as lines ``{"iter": 20, "lr": 0.001, …}`` of a file; null stands for infinity and NaN.

    Args:
        path: The file; a resumed run appends to it.
        resume_iter: Iteration of the resumed state; rows of later iterations (and
            of the validation at that iteration, which is repeated) are removed.
    """

    def __init__(self, path: str | Path, resume_iter: int = 0):
        super().__init__()
        self.path = Path(path)

        def is_kept(row: dict[str, Any]) -> bool:
            is_validation = any(key.startswith('metrics/') for key in row)
            return row['iter'] <= resume_iter - is_validation

        if resume_iter and self.path.exists():
            keep_rows(self.path, 'iter', is_kept)
        else:
            with atomic_path(self.path) as temporary:
                temporary.write_text('', encoding='utf-8')

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Images have their own files."""

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no infinity, which is the PSNR of equal images, and no NaN.
        row = {key: value if math.isfinite(value) else None for key, value in row.items()}
        with self.path.open('a', encoding='utf-8') as file:
            file.write(json.dumps(row) + '\n')


class TensorBoardWriter:
    """torch's SummaryWriter, taking images as (h, w, 3) RGB uint8."""

    def __init__(self, log_dir: str | Path, resume_iter: int = 0):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                'logger.use_tb_logger needs: pip install tensorboard (or set it to false)'
            ) from error
        # Events past the resumed iteration are hidden: they will be written again.
        purge_step = resume_iter + 1 if resume_iter else None
        threads = set(threading.enumerate())
        self._writer = SummaryWriter(str(log_dir), purge_step=purge_step)
        _silence_disk_errors(set(threading.enumerate()) - threads)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self._writer.add_image(tag, image, step, dataformats='HWC')

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _silence_disk_errors(threads: set[threading.Thread]) -> None:
    """On a full disk print no traceback of TensorBoard's threads: ``flush`` raises the error."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.thread not in threads or not isinstance(args.exc_value, OSError):
            before(args)

    threading.excepthook = hook


class WandbWriter(_RowWriter):
    """A wandb run; its id is kept in the experiment folder and reused only by a resume."""

    def __init__(self, opt: dict, resumed: bool = False):
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise MissingPackageError(
                'logger.wandb needs: pip install wandb (or remove logger.wandb.project)'
            ) from error
        given = opt['logger']['wandb'].items()
        options = {key: value for key, value in given if value is not None}
        run_id = options.pop('resume_id', None)
        folder = Path(opt['path'].get('experiments_root') or opt['path']['results_root'])
        id_file = folder / 'wandb_run_id.txt'
        if resumed and not run_id and id_file.exists():
            run_id = id_file.read_text(encoding='utf-8', errors='replace').strip()
            if not re.fullmatch(r'[\w. -]+', run_id, re.ASCII):
                logger.warning('%s is damaged: wandb starts a new run.', id_file)
                run_id = None
        settings = {'name': opt['name'], 'dir': str(folder), 'reinit': 'finish_previous', **options}
        resume = 'allow' if run_id else 'never'
        try:
            self._run = wandb.init(config=opt, id=run_id, resume=resume, **settings)
        except wandb.Error as error:
            raise UserError(
                f'logger.wandb: {error}. Without a server: logger.wandb.mode: offline.'
            ) from error
        self._wandb = wandb
        self._run.define_metric('iter')
        self._run.define_metric('*', step_metric='iter')
        id_file.write_text(f'{self._run.id}\n', encoding='utf-8')
        logger.info('Use wandb logger with id=%s; project=%s.', self._run.id, options['project'])

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self.add_scalar(tag, self._wandb.Image(image), step)

    def close(self) -> None:
        super().close()
        self._run.finish()

    def _write(self, row: dict[str, Any]) -> None:
        self._run.log(row)

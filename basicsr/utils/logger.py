"""Logging of a run: text log, TensorBoard, wandb and ``metrics.jsonl``."""

import datetime
import json
import logging
import math
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .dead_worker import dead_worker
from .dist_util import get_dist_info
from .errors import MissingPackageError, UserError
from .misc import atomic_path, get_time_str, mkdir_and_rename
from .text import printable

logger = logging.getLogger(__name__)

_FORMAT = '%(asctime)s %(levelname)s: %(message)s'


class _PlainFormatter(logging.Formatter):
    """Escapes control characters, which a terminal would obey: messages hold names of files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Handler(logging.StreamHandler):
    """Re-raises the error by which torch, in a signal handler, reports a dead worker."""

    def handleError(self, record: logging.LogRecord) -> None:
        if dead_worker(sys.exc_info()[1]):
            raise
        super().handleError(record)


class _ConsoleHandler(_Handler):
    """Prints above a progress bar instead of through it; details only if ``is_verbose``.

    A detail is logged with ``extra={'file_only': True}``.
    """

    is_verbose = False

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        return (self.is_verbose or not hasattr(record, 'file_only')) and super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _LogFile(logging.FileHandler, _Handler):
    """A text log; on a full disk it warns once, and lines are lost."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            logger.warning(
                'Lines of the log file are lost: cannot write %s: %s', self.baseFilename, error
            )


class _EarlyLines(logging.Handler):
    """Buffers what is logged before there is a log file."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=1000)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record) + '\n')


def get_root_logger(
    logger_name: str = 'basicsr', log_level: int = logging.INFO, log_file: str | Path | None = None
) -> logging.Logger:
    """The logger that every module's ``logging.getLogger(__name__)`` reports to.

    The first call sets up the console; a call with ``log_file`` adds that file, which begins with
    what was logged before. Ranks above 0 print errors only and write no file.
    """
    root = logging.getLogger(logger_name)
    rank = get_dist_info()[0]
    root.setLevel(log_level if rank == 0 else logging.ERROR)
    root.propagate = False
    if not any(isinstance(handler, _ConsoleHandler) for handler in root.handlers):
        _add_handler(root, _ConsoleHandler())
        _add_handler(root, _EarlyLines())
    open_files = [h.baseFilename for h in root.handlers if isinstance(h, logging.FileHandler)]
    if log_file is not None and rank == 0 and str(Path(log_file).absolute()) not in open_files:
        early = [line for h in root.handlers if isinstance(h, _EarlyLines) for line in h.lines]
        with atomic_path(log_file, durable=False) as temporary:
            temporary.write_text(''.join(early), encoding='utf-8')
        for handler in root.handlers[:]:
            if not isinstance(handler, _ConsoleHandler):  # the file of an earlier run, too
                handler.close()
                root.removeHandler(handler)
        _add_handler(root, _LogFile(log_file, encoding='utf-8'))
    return root


def show_details() -> None:
    """Print on the console what otherwise stands in the log file only."""
    for handler in get_root_logger().handlers:
        if isinstance(handler, _ConsoleHandler):
            handler.is_verbose = True


def _add_handler(root: logging.Logger, handler: logging.Handler) -> None:
    handler.setFormatter(_PlainFormatter(_FORMAT))
    root.addHandler(handler)


def device_name() -> str:
    """The GPU of this process, or ``CPU``."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'


def versions() -> str:
    """Those of this package and of PyTorch."""
    import torch

    from basicsr.version import __version__

    return f'BasicSR {__version__}, PyTorch {torch.__version__}'


def get_env_info() -> str:
    """Versions, and the folder that basicsr was imported from."""
    from importlib.metadata import version

    import torch
    import torch.distributed as dist

    from basicsr.version import __version__

    processes = '1'
    if dist.is_initialized():
        processes = f'{dist.get_world_size()} (backend {dist.get_backend()})'
    return (
        f'\nVersion Information:'
        f'\n\tBasicSR: {__version__} from {Path(__file__).resolve().parents[1]}'
        f'\n\tPyTorch: {torch.__version__}'
        f'\n\tTorchVision: {version("torchvision")}'  # importing it costs seconds
        f'\n\tDevice: {device_name()}'
        f'\n\tProcesses: {processes}'
    )


class AvgTimer:
    """Seconds between ``start`` and ``record``: the last one and the mean of recent ones."""

    def __init__(self, window: int = 200):
        self.window = window  # the mean is restarted after so many records, to follow changes
        self.current_time = 0.0
        self.total_time = 0.0
        self.count = 0
        self.start()

    def start(self) -> None:
        self.start_time = self.tic = time.perf_counter()

    def record(self) -> None:
        if self.count >= self.window:
            self.total_time, self.count = 0.0, 0
        self.current_time = time.perf_counter() - self.tic
        self.tic += self.current_time
        self.total_time += self.current_time
        self.count += 1

    def get_current_time(self) -> float:
        return self.current_time

    def get_avg_time(self) -> float:
        return self.total_time / max(self.count, 1)


class MessageLogger:
    """One text line per logged iteration, with the time left; the scalars go to ``tb_logger`` too.

    Args:
        opt: Reads ``name``, ``train.total_iter`` and ``logger``.
        start_iter: Iteration after which the clock is started, for the time left.
        tb_logger: A ScalarWriter or SummaryWriter; None for only the text log.
    """

    def __init__(self, opt: dict, start_iter: int = 1, tb_logger: Any = None):
        self.exp_name = opt['name']
        self.max_iters = opt['train']['total_iter']
        self.start_iter = start_iter
        self.tb_logger = tb_logger
        self._has_warned = False
        self.reset_start_time()

    def reset_start_time(self) -> None:
        self.start_time = time.perf_counter()

    def __call__(self, log_vars: Mapping[str, Any]) -> None:
        """Write one line.

        Args:
            log_vars: ``epoch``, ``iter``, ``lrs`` (list), optionally ``time`` and ``data_time``
                (seconds per iteration), and any number of scalars.
        """
        scalars = dict(log_vars)
        epoch, current_iter = scalars.pop('epoch'), scalars.pop('iter')
        lrs = scalars.pop('lrs')
        iter_time, data_time = scalars.pop('time', None), scalars.pop('data_time', None)
        scalars = {name: float(value) for name, value in scalars.items()}

        message = f'[{self.exp_name[:5]}..][epoch:{epoch:3d}, iter:{current_iter:8,d}, lr:('
        message += ''.join(f'{lr:.3e},' for lr in lrs) + ')] '
        if iter_time is not None:
            message += f'[eta: {self.time_left(current_iter, iter_time)}, '
            message += f'time (data): {iter_time:.3f} ({data_time or 0:.3f})] '
        message += ''.join(f'{name}: {value:.4e} ' for name, value in scalars.items())
        logger.info(message)
        broken = [name for name, value in scalars.items() if not math.isfinite(value)]
        if broken and not self._has_warned:
            self._has_warned = True
            logger.warning('%s is not finite at iteration %d.', ', '.join(broken), current_iter)

        if self.tb_logger is None:
            return
        values = {(f'losses/{k}' if k.startswith('l_') else k): v for k, v in scalars.items()}
        values |= {f'lr_{i}' if i else 'lr': lr for i, lr in enumerate(lrs)}
        if iter_time is not None:
            values |= {'time/iteration': iter_time, 'time/data': data_time or 0.0}
        for tag, value in values.items():
            self.tb_logger.add_scalar(tag, value, current_iter)
        self.tb_logger.flush()

    def time_left(self, current_iter: int, iter_time: float) -> str:
        """The time that the remaining iterations take, as ``h:mm:ss``."""
        done = current_iter - self.start_iter
        # The clock starts after the first iteration.
        per_iter = (time.perf_counter() - self.start_time) / done if done > 0 else iter_time
        left = per_iter * max(self.max_iters - current_iter, 0)
        return str(datetime.timedelta(seconds=int(left)))


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


def read_rows(path: str | Path, number: str | None = None) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, without the partial line that a killed run may end with.

    Args:
        number: A key that every row has, with a whole number; lines that have none are damaged.
    """
    return [row for row in _parsed_rows(path, number) if row is not None]


def keep_rows(
    path: Path, number: str, is_kept: Callable[[dict[str, Any]], bool] = lambda _: True
) -> None:
    """Remove some rows from a file; a damaged original is kept beside it, under another name.

    Args:
        number: As of ``read_rows``.
    """
    aside = path.with_name(f'{path.name}_damaged_{get_time_str()}')
    try:
        rows = _parsed_rows(path, number)
    except OSError as error:  # a folder, or on an unreadable part of the disk
        path.rename(aside)
        logger.warning('%s is unreadable and has been renamed to %s: %s', path, aside, error)
        rows = []
    damaged = sum(row is None for row in rows)
    if damaged:
        shutil.copy2(path, aside)
        logger.warning('%s: %d damaged lines removed; the original is %s', path, damaged, aside)
    kept = (json.dumps(row) + '\n' for row in rows if row is not None and is_kept(row))
    with atomic_path(path) as temporary:
        temporary.write_text(''.join(kept), encoding='utf-8')


def _parsed_rows(path: str | Path, number: str | None) -> list[dict[str, Any] | None]:
    """The rows of a JSON Lines file; None for a damaged one, except a partial line at the end."""
    *lines, last = Path(path).read_bytes().split(b'\n')
    rows = [_parsed(line, number) for line in lines]
    return [*rows, *filter(None, [_parsed(last, number)])]


def _parsed(line: bytes, number: str | None) -> dict[str, Any] | None:
    row = None
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
    is_row = isinstance(row, dict) and (number is None or type(row.get(number)) is int)
    return row if is_row else None


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
        _leave_errors_to_flush(set(threading.enumerate()) - threads)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self._writer.add_image(tag, image, step, dataformats='HWC')

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _leave_errors_to_flush(threads: set[threading.Thread]) -> None:
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


def init_tb_logger(log_dir: str | Path) -> ScalarWriter:
    """A writer for TensorBoard only, on rank 0; on other ranks it writes nothing."""
    return ScalarWriter(*([TensorBoardWriter(log_dir)] if get_dist_info()[0] == 0 else []))


def init_wandb_logger(opt: dict) -> WandbWriter | None:
    """Start the wandb run that ``logger.wandb`` describes, on rank 0."""
    resumed = bool(opt['path'].get('resume_state'))
    return WandbWriter(opt, resumed) if get_dist_info()[0] == 0 else None


def init_tb_loggers(opt: dict, resume_iter: int = 0) -> ScalarWriter:
    """The writers of a training run, on rank 0; on other ranks none.

    ``metrics.jsonl`` is always written, TensorBoard and wandb as ``logger`` asks, and not in debug
    runs.
    """
    if get_dist_info()[0] > 0:
        return ScalarWriter()
    metrics_file = Path(opt['path']['experiments_root']) / 'metrics.jsonl'
    writers: list[Any] = [JsonlWriter(metrics_file, resume_iter)]
    if 'debug' not in opt['name']:
        if opt['logger']['use_tb_logger']:
            writers.append(_try_tensorboard(tb_folder(opt), resume_iter))
        if opt['logger']['wandb']['project']:
            writers.append(WandbWriter(opt, resumed=bool(resume_iter)))
    return ScalarWriter(*filter(None, writers))


def tb_folder(opt: dict) -> Path:
    """The folder of a run's TensorBoard events."""
    return Path(opt['root_path']) / 'tb_logger' / opt['name']


def _try_tensorboard(tb_dir: Path, resume_iter: int) -> TensorBoardWriter | None:
    try:
        if resume_iter == 0:
            mkdir_and_rename(tb_dir)
        return TensorBoardWriter(tb_dir, resume_iter)
    except OSError as error:
        logger.warning('No TensorBoard events are written: %s', error)
        return None

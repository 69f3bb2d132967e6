"""Logging of a run: the text log, its line per iteration, and the writers of scalars."""

import datetime
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .dead_worker import dead_worker
from .dist_util import get_dist_info
from .misc import atomic_path, mkdir_and_rename
from .scalar_writers import JsonlWriter, ScalarWriter, TensorBoardWriter, WandbWriter
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
    """The versions of this package and of PyTorch."""
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

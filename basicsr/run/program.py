"""Run a pipeline as a program: options, process group, seeds; errors become an exit status."""

import argparse
import functools
import logging
import os
import random
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from basicsr.utils import progress
from basicsr.utils.dist_util import from_master, get_dist_info, init_dist
from basicsr.utils.errors import UserError
from basicsr.utils.logger import (
    device_name,
    get_env_info,
    get_root_logger,
    show_details,
    versions,
)
from basicsr.utils.misc import set_random_seed
from basicsr.utils.options import OptionFile, Process, dict2str, launcher_of, parse_args
from basicsr.utils.registry import BUILDING, import_plugins, plugin_modules
from basicsr.utils.trained_run import as_test, option_file_in
from basicsr.utils.yaml_util import OptionError

from . import watchdog
from .agreement import check_same_options, warn_of_other_programs
from .cores import share_cores
from .failures import explain
from .option_checks import check_components
from .preemption import INTERRUPTED, STATUS

logger = logging.getLogger(__name__)


def prepare(root_path: str | Path, is_train: bool = True) -> tuple[dict, argparse.Namespace]:
    """Prepare this process: import plug-ins, join the process group, divide the cores, seed.

    Args:
        root_path: Parent of ``experiments/`` and ``results/``.
        is_train: Whether the option file describes a training or a test run.

    Returns:
        The complete options and the flags, as ``parse_options`` gives them.
    """
    args = parse_args(is_train=is_train)
    if is_train:
        file = OptionFile(args.opt, is_train, args.force_yml)
    else:
        args.opt = option_file_in(args.opt)
        edit = functools.partial(
            as_test, option_file=args.opt, root=root_path, weights=args.weights
        )
        file = OptionFile(args.opt, is_train, args.force_yml, edit)
    import_plugins(file.plugin_folders())
    opt = file.checked()
    launcher = launcher_of(args)
    if launcher != 'none':
        backend = {'backend': 'gloo'} if opt['num_gpu'] == 0 else {}
        init_dist(launcher, **opt['dist_params'] | backend)
        if 'init_method' not in opt['dist_params']:  # the watchdog needs the store at MASTER_ADDR
            watchdog.start(opt['dist_params']['timeout'])
        check_same_options(opt, auto_resume=args.auto_resume, debug=args.debug, training=is_train)
    get_root_logger()
    if args.verbose:
        show_details()
    seed = from_master(random.SystemRandom().randint(1, 10000))
    process = Process(launcher, *get_dist_info(), share_cores(), seed)
    opt = file.complete(opt, args, root_path, process)
    check_components(opt)
    _seed(opt)
    return opt, args


def log_setting(opt: dict) -> None:
    """Log what runs where; in the log file, also the versions and all options."""
    ranks, threads = opt['world_size'], torch.get_num_threads()
    device = 'the CPU' if opt['num_gpu'] == 0 else device_name()
    each = f' of {threads} thread{"s" if threads > 1 else ""}' if opt['num_gpu'] == 0 else ''
    logger.info(
        '%s: %s on %s, %d process%s%s; %s. --verbose prints all options.',
        *(opt['name'], opt['model_type'], device, ranks, 'es' if ranks > 1 else '', each),
        versions(),
    )
    logger.info(get_env_info(), extra={'file_only': True})
    logger.info(dict2str(opt), extra={'file_only': True})
    warn_of_other_programs()


def _seed(opt: dict) -> None:
    """Seed all generators, and set determinism and TF32."""
    set_random_seed(opt['manual_seed'] + opt['rank'])
    torch.backends.cudnn.benchmark = not opt['deterministic']
    tf32 = opt['train']['tf32'] if opt['is_train'] else None
    if tf32 is not None:
        torch.set_float32_matmul_precision('high' if tf32 else 'highest')
        torch.backends.cudnn.allow_tf32 = tf32
    if opt['deterministic']:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)


def run(pipeline: Callable[[Path], None], root_path: Path) -> None:
    """Run a pipeline as a program: a user's mistake ends in one message, not a traceback.

    The exit status is 2 for a wrong option file, 1 for other errors, 130 after Ctrl-C, and
    ``basicsr.run.preemption.STATUS`` for a training that was asked to stop.
    """
    # Exit only after the error, and the frames that hold a loader, are gone: then the loader's
    # workers end before this process, without error messages.
    status = _run(pipeline, root_path)
    if status:
        sys.exit(status)


def _run(pipeline: Callable[[Path], None], root_path: Path) -> int:
    """Run a pipeline; returns the exit status."""
    root_logger, status = get_root_logger(), 0
    try:
        pipeline(root_path)
    except KeyboardInterrupt as interrupt:
        watchdog.tell_of_failure(interrupt)
        root_logger.error('%s', ' '.join(['Interrupted.', *filter(None, map(str, interrupt.args))]))
        return INTERRUPTED
    except SystemExit as stop:
        if stop.code not in (STATUS, INTERRUPTED):  # those of all ranks that were asked to stop
            watchdog.tell_of_failure(stop)
            raise
        status = int(stop.code)
    except Exception as error:
        message, (rank, world_size) = message_for_users(error), get_dist_info()
        status = 2 if isinstance(error, OptionError) else 1
        if watchdog.tell_of_failure(error):
            return status
        prefix = f'rank {rank}: ' if world_size > 1 else ''
        if message is None:
            if prefix:
                root_logger.error('%s%s', prefix, error)
            _log_traceback(root_logger)
            raise
        root_logger.error('%s%s', prefix, message)
        return status
    close_process_group()
    return status


def _log_traceback(root_logger: logging.Logger) -> None:
    """Write the traceback of an error to the log file; Python prints it to the console."""
    text = traceback.format_exc()
    record = root_logger.makeRecord(root_logger.name, logging.ERROR, '', 0, text, (), None)
    for handler in root_logger.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def message_for_users(error: Exception) -> str | None:
    """What to tell the user in place of a traceback; None for errors that need one."""
    if explained := explain(error, progress.current.phase):
        return explained
    if _passed_through_plugins(error):
        return None
    message = str(error)
    if message.startswith('Caught ') and 'DataLoader worker' in message.partition('\n')[0]:
        # The worker's traceback is part of the text; the message stands behind it.
        message = re.split(rf'\n(?:[\w.]+\.)?{type(error).__name__}: ', message)[-1].strip()
    # From a component that cannot be built from its options.
    notes = [note for note in getattr(error, '__notes__', []) if note.startswith(BUILDING)]
    is_meant = isinstance(error, UserError | OSError)
    if notes and not is_meant and not isinstance(error, TypeError):
        message = f'{type(error).__name__}: {message}'
    return '\n'.join([message, *notes]) if is_meant or notes else None


def _passed_through_plugins(error: BaseException | None) -> bool:
    """Whether the error passed through the user's own code, who then wants to see where."""
    files = {getattr(sys.modules.get(name), '__file__', None) for name in plugin_modules}
    while error is not None:
        if any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__)):
            return True
        error = error.__cause__
    return False


def close_process_group() -> None:
    """Leave the process group, if this process is in one."""
    watchdog.stop()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()

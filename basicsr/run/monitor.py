"""Supervise the training loop: timing, logging, non-finite values, preemption, final plots."""

import datetime
import functools
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from basicsr.data import decoded_images, gpus_per_process
from basicsr.utils.background_saver import BackgroundSaver
from basicsr.utils.dist_util import barrier
from basicsr.utils.figures import write_comparison, write_curves
from basicsr.utils.json_lines import keep_rows
from basicsr.utils.logger import (
    AvgTimer,
    MessageLogger,
    get_root_logger,
    init_tb_loggers,
)
from basicsr.utils.misc import best_effort, get_time_str, make_exp_dirs, remove_stale_temporaries
from basicsr.utils.options import copy_opt_file
from basicsr.utils.progress import note
from basicsr.utils.progress_bar import progress_bar
from basicsr.utils.scalar_writers import ScalarWriter

from .cores import CoreWait, ranks_on_cores
from .data_wait import DataWait
from .incidents import Guard
from .loaders import Loaders, prefetch
from .option_checks import check_unread
from .preemption import PreemptionWatch, leave, note_launcher
from .report import write_report
from .report_record import baselines_of, names_of_rates, record_validation

logger = logging.getLogger(__name__)

_ESTIMATE_AFTER = 20  # iterations; the first ones are slower


class Monitor:
    """Supervises one training run.

    Args:
        model: The trained model; its ``saver`` and ``noticed_signal`` are set here.
        loaders: The loaders of the run.
        preemption: Reports signals to stop.
        start_iter: Iterations completed before this start.
        begin: The training state given in the options, if any.
        epoch: Epoch of the last completed iteration.

    Attributes:
        writer: Writer for the scalars of the run.
        epoch: Epoch of the current iteration, counted from 0.
        stop: The signal to stop after this iteration, or 0.
    """

    def __init__(
        self,
        model: Any,
        loaders: Loaders,
        preemption: PreemptionWatch,
        start_iter: int,
        begin: str | None,
        epoch: int,
    ):
        self.model, self.loaders, self._preemption = model, loaders, preemption
        self._start_iter, self.epoch, self.stop = start_iter, epoch, 0
        self.writer = _start_run(model, start_iter)
        self._guard = Guard(model, self.writer, start_iter, begin)
        model.saver, model.noticed_signal = BackgroundSaver(), preemption.noticed
        opt = model.opt
        self._print_freq = opt['logger']['print_freq']
        self._log_line = MessageLogger(opt, start_iter + 1, self.writer)
        self._iter_timer, self._data_timer = AvgTimer(), AvgTimer()
        self._data_wait = DataWait(
            opt['datasets']['train'],
            gpus_per_process(opt['num_gpu'], opt['dist']) * ranks_on_cores(),
            functools.partial(decoded_images, loaders.train.dataset),
        )
        self._core_wait = CoreWait()
        self._has_reported_unread = False
        self._begun = time.perf_counter()

    def iterations(self) -> Iterator[tuple[int, dict]]:
        """Yield the remaining iterations and their batches.

        Rank 0 shows a progress bar on a terminal.
        """
        opt, first = self.model.opt, self._start_iter + 1
        total_iter = opt['train']['total_iter']
        bar = progress_bar(
            range(first, total_iter + 1),
            initial=self._start_iter,
            total=total_iter,
            disable=None if opt['rank'] == 0 else True,
            unit='iter',
        )
        note('start', first)
        self.batches = prefetch(self.loaders.train, opt)
        self._preemption.is_stepping = True
        # The iterations come first in zip, so no batch is requested after the last step.
        for current_iter, data in zip(bar, self.batches, strict=False):
            self._data_timer.record()
            self.epoch = self.loaders.epoch(self.model.samples_seen)
            stage = self.loaders.schedule.stage(current_iter)
            if stage.sizes and current_iter in (stage.first, first):
                logger.info('%s', stage)
            yield current_iter, data
            note('data', current_iter + 1)
            self._data_timer.start()
            self._iter_timer.start()
        self._preemption.is_stepping = False

    def record(self, current_iter: int, data: dict) -> None:
        """Record a completed iteration, and log if due.

        Raises:
            RollBack, FloatingPointError: Losses or gradients were non-finite.
        """
        self._guard.note(current_iter, data)
        self._iter_timer.record()
        waited, took = (t.get_current_time() for t in (self._data_timer, self._iter_timer))
        self._data_wait.record(waited, took)
        if current_iter == self._start_iter + 1:
            # Exclude the first step, which also starts workers and selects kernels.
            self._log_line.reset_start_time()
        if current_iter % self._print_freq == 0:
            self._log(current_iter)
        elif current_iter == self._start_iter + _ESTIMATE_AFTER:
            mean = self._iter_timer.get_avg_time()
            left = self._log_line.time_left(current_iter, mean)
            logger.info('%.3f s per iteration: about %s to go, without validation.', mean, left)
        self.stop = self._preemption.asked()

    def _log(self, current_iter: int) -> None:
        model = self.model
        model.saver.check()
        losses = model.get_current_log()
        self._log_line(
            {
                'epoch': self.epoch,
                'iter': current_iter,
                'lrs': model.get_current_learning_rate(),
                'time': self._iter_timer.get_avg_time(),
                'data_time': self._data_timer.get_avg_time(),
                **losses,
            }
        )
        self._guard.note_losses(current_iter, losses)
        self._report_unread()
        self._data_wait.report(current_iter)
        self._core_wait.report()
        self.loaders.train.dataset.bad_images.report()

    def _report_unread(self) -> None:
        """Warn once of options that users' classes have not read in the steps until now."""
        if not self._has_reported_unread:
            self._has_reported_unread = True
            check_unread(self.model.opt, of_users=True)

    def check(self) -> None:
        """Check all iterations and the weights for non-finite values before saving or scoring."""
        self._guard.check()

    def end_early(self, current_iter: int, number: int) -> NoReturn:
        """Exit after a signal to stop, once the state of the iteration has been written."""
        self.close()
        barrier()  # as soon as one rank exits, the launcher kills the others
        leave(current_iter, number)

    def say_time(self) -> None:
        """Log how long the training took."""
        self._report_unread()  # of a run that ends before its first line
        elapsed = datetime.timedelta(seconds=int(time.perf_counter() - self._begun))
        since = f', since iteration {self._start_iter}' if self._start_iter else ''
        logger.info('End of training. Time consumed: %s%s', elapsed, since)

    def close(self) -> None:
        """Wait until all pending checkpoints and scalars have been written."""
        self.model.saver.close()
        self.writer.close()


def _start_run(model: Any, start_iter: int) -> ScalarWriter:
    """Create the folders of the run, open its log file, and return its scalar writer."""
    opt = model.opt
    path = opt['path']
    barrier()  # no rank is still reading what rank 0 is about to move or remove
    if start_iter == 0:
        make_exp_dirs(opt)
    elif opt['rank'] == 0:
        for key in ('models', 'training_states', 'visualization'):
            Path(path[key]).mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(path['experiments_root'])
        for skipped in Path(path['experiments_root']).glob('skipped.jsonl'):
            keep_rows(skipped, 'sample')
        model.drop_later_files(start_iter)
        model.checkpoints.prune(path['training_states'], start_iter)
    note_launcher(path['experiments_root'])
    barrier()  # no rank writes before this is done
    if opt['rank'] == 0:
        copy_opt_file(opt['option_file'], path['experiments_root'])
    log_file = Path(path['log']) / f'train_{opt["name"]}_{get_time_str()}.log'
    get_root_logger(log_file=log_file).info('Experiment folder: %s', path['experiments_root'])
    return init_tb_loggers(opt, start_iter)


def refresh_report(model: Any, current_iter: int) -> None:
    """Keep what the report takes from the last validation, and write its page anew."""
    if model.opt['rank'] > 0:
        return
    folder = Path(model.opt['path']['experiments_root'])
    with best_effort('report.html'):
        record_validation(model, current_iter)
        write_report([folder], folder / 'report.html')


def draw_results(model: Any) -> None:
    """Plot the curves of the run and its last validation images, and log where the results are."""
    if model.opt['rank'] > 0:
        return
    folder = Path(model.opt['path']['experiments_root'])
    made = ['models/', 'metrics.jsonl']
    with best_effort('curves.png'):
        names, baselines = names_of_rates(model), baselines_of(model)
        if write_curves(folder / 'curves.png', folder / 'metrics.jsonl', names, baselines):
            made.append('curves.png')
    if model.panels:
        with best_effort('comparison.png'):
            write_comparison(folder / 'comparison.png', model.panels, model.score_images)
            made.append('comparison.png')
    with suppress(OSError):
        (folder / 'visualization').rmdir()  # nothing was saved into it
    with best_effort('report.html'):
        write_report([folder], folder / 'report.html')
        made.append('report.html')
    logger.info('Results are in %s: %s', folder, ', '.join(made))
    weights = (folder / f'models/net_g_{name}.pth' for name in ('best', 'latest'))
    if file := next(filter(Path.is_file, weights), None):
        command = f'basicsr restore -i IMAGES -o restored -m {shlex.quote(str(file))}'
        logger.info('To restore images with it: %s', command)

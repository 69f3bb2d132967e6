"""What stands beside the training loop: timers, log lines, the guard, and signals to stop."""

import datetime
import functools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from basicsr.data import decoded_images, gpus_per_process
from basicsr.utils.checkpoint import BackgroundSaver
from basicsr.utils.dist_util import barrier
from basicsr.utils.figures import write_comparison, write_curves
from basicsr.utils.logger import (
    AvgTimer,
    MessageLogger,
    ScalarWriter,
    get_root_logger,
    init_tb_loggers,
    keep_rows,
)
from basicsr.utils.misc import best_effort, get_time_str, make_exp_dirs, remove_stale_temporaries
from basicsr.utils.options import copy_opt_file
from basicsr.utils.progress import note
from basicsr.utils.progress_bar import progress_bar

from .cores import ranks_on_cores
from .data_wait import DataWait
from .incidents import Guard
from .loaders import Loaders, prefetch
from .preemption import PreemptionWatch, leave, note_launcher

logger = logging.getLogger(__name__)


class Monitor:
    """Watches over one training.

    Args:
        model: What is trained; it is given what it needs of the run.
        loaders: Where the batches come from.
        preemption: Tells of signals to stop.
        start_iter: Iterations that were made before.
        begin: The training state that the run was to begin with, if any.
        epoch: Of the last iteration that was made before.

    Attributes:
        writer: Of the run's scalars.
        epoch: Of the iteration, counted from 0.
        stop: The signal to stop for after this iteration, 0 without.
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
        self._begun = time.perf_counter()

    def iterations(self) -> Iterator[tuple[int, dict]]:
        """The numbers of the iterations to make, and their batches.

        With a progress bar if rank 0 runs on a terminal.
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
        # The iterations come first: after the last step no batch is asked for.
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
        """Count an iteration that has been made, and log what is due.

        Raises:
            RollBack, FloatingPointError: Its losses or gradients were not finite.
        """
        self._guard.note(current_iter, data)
        self._iter_timer.record()
        waited, took = (t.get_current_time() for t in (self._data_timer, self._iter_timer))
        self._data_wait.record(waited, took)
        if current_iter == self._start_iter + 1:
            # The first step also starts workers and chooses kernels.
            self._log_line.reset_start_time()
        if current_iter % self._print_freq == 0:
            self._log(current_iter)
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
        self._data_wait.report(current_iter)
        self.loaders.train.dataset.bad_images.report()

    def check(self) -> None:
        """Look at all iterations and at the weights, before these are saved or scored."""
        self._guard.check()

    def end_early(self, current_iter: int, number: int) -> NoReturn:
        """Leave the program, as a signal asks for, when the state of an iteration is written."""
        self.close()
        barrier()  # where one rank ends, its launcher ends the others
        leave(current_iter, number)

    def say_time(self) -> None:
        """Log how long the training took."""
        elapsed = datetime.timedelta(seconds=int(time.perf_counter() - self._begun))
        since = f', since iteration {self._start_iter}' if self._start_iter else ''
        logger.info('End of training. Time consumed: %s%s', elapsed, since)

    def close(self) -> None:
        """Wait until all that was handed over has been written."""
        self.model.saver.close()
        self.writer.close()


def _start_run(model: Any, start_iter: int) -> ScalarWriter:
    """Make the folders of the run, open its log file, and return its writers."""
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
    barrier()  # none writes before that is done
    if opt['rank'] == 0:
        copy_opt_file(opt['option_file'], path['experiments_root'])
    log_file = Path(path['log']) / f'train_{opt["name"]}_{get_time_str()}.log'
    get_root_logger(log_file=log_file).info('Experiment folder: %s', path['experiments_root'])
    return init_tb_loggers(opt, start_iter)


def draw_results(model: Any) -> None:
    """Write the curves of the run and its last validation images, and say where all is."""
    if model.opt['rank'] > 0:
        return
    folder = Path(model.opt['path']['experiments_root'])
    made = ['models/', 'metrics.jsonl']
    with best_effort('curves.png'):
        if write_curves(folder / 'curves.png', folder / 'metrics.jsonl'):
            made.append('curves.png')
    if model.panels:
        with best_effort('comparison.png'):
            write_comparison(folder / 'comparison.png', model.panels, model.score_images)
            made.append('comparison.png')
    logger.info('Results are in %s: %s', folder, ', '.join(made))

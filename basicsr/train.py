"""Train a network from an option file: ``python basicsr/train.py -opt options/x.yml``."""

import sys
from pathlib import Path

if __name__ == '__main__':  # Python put basicsr/ itself on the path; the package is one level up
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from basicsr.utils.openmp import spin_briefly
    from basicsr.utils.options import parse_args

    spin_briefly()
    parse_args()  # --help and mistyped flags are answered before torch is imported

import functools
import logging

from basicsr.models import build_model
from basicsr.models.averaging import finish_swa, validate_swa
from basicsr.models.optimization import evaluation_weights
from basicsr.run.data_checks import check_run
from basicsr.run.incidents import with_rollbacks
from basicsr.run.loaders import build_loaders, create_train_val_dataloader
from basicsr.run.monitor import Monitor, draw_results, refresh_report
from basicsr.run.preemption import PreemptionWatch, last_state
from basicsr.run.program import log_setting, prepare
from basicsr.run.resume import load_resume_state, resume
from basicsr.utils.dist_util import barrier
from basicsr.utils.logger import init_tb_loggers
from basicsr.utils.misc import claim_folder
from basicsr.utils.progress import Preempted, note

__all__ = [
    'create_train_val_dataloader',
    'init_tb_loggers',
    'load_resume_state',
    'train_pipeline',
]

logger = logging.getLogger('basicsr.train')  # also as a script, when __name__ is '__main__'


def train_pipeline(root_path: str | Path) -> None:
    """Run the whole training described by the option file on the command line.

    Args:
        root_path: Parent of ``experiments/`` and ``tb_logger/``.
    """
    opt, _ = prepare(root_path, is_train=True)
    log_setting(opt)
    note('start', 0)
    try:
        with PreemptionWatch(opt['dist_params']['timeout']) as preemption:
            with_rollbacks(functools.partial(train, preemption), opt)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(last_state(opt)) from interrupt


def train(preemption: PreemptionWatch, opt: dict, first_sample: int | None = None) -> None:
    """Build loaders and model, resume if there is a training state, and run the training loop.

    Args:
        preemption: Reports signals to stop.
        opt: The complete options.
        first_sample: After a rollback, the position in the sample order to continue from; None
            continues with the first sample that the training state has not seen.
    """
    if opt['rank'] == 0:  # before choosing a state, so that no other run can add or move one
        claim_folder(opt['path']['experiments_root'])
    begin = opt['path']['resume_state']
    opt, resume_state = resume(opt, first_sample)
    start_iter, epoch = (resume_state or {}).get('iter', 0), (resume_state or {}).get('epoch', 0)
    loaders = build_loaders(opt, resume_state)
    model = build_model(opt)
    check_run(model, loaders)
    if resume_state:
        model.resume_training(resume_state)
        del resume_state  # a second copy of the optimizer state
    model.samples_seen = loaders.samples_before
    # Creates folders and moves an earlier run aside, so only after everything has been built.
    monitor = Monitor(model, loaders, preemption, start_iter, begin, epoch)
    verb = 'Resuming' if start_iter else 'Start'
    logger.info('%s training from epoch: %d, iter: %d.', verb, epoch, start_iter)
    if start_iter >= opt['train']['total_iter']:
        logger.info('This run is complete: a larger train.total_iter would continue it.')
    total_iter, save_freq = opt['train']['total_iter'], opt['logger']['save_checkpoint_freq']
    val_freq = opt['val'] and opt['val']['val_freq']

    def is_due(current_iter: int) -> bool:
        # The final validation runs after the last checkpoint has been written.
        return bool(val_freq) and current_iter < total_iter and current_iter % val_freq == 0

    if start_iter and is_due(start_iter):
        validate(monitor, start_iter)  # the state was saved before its iteration was validated
    for current_iter, data in monitor.iterations():
        model.begin_iteration(data, current_iter, loaders.schedule.batch_size(current_iter))
        model.optimize_parameters(current_iter)
        model.end_iteration(current_iter)
        monitor.record(current_iter, data)
        if current_iter % save_freq == 0 or current_iter == total_iter or monitor.stop:
            save(monitor, current_iter)
        if monitor.stop:
            monitor.end_early(current_iter, monitor.stop)
        if is_due(current_iter):
            validate(monitor, current_iter)

    monitor.say_time()
    finish_swa(model, monitor.batches, loaders.schedule)
    save(monitor, -1)
    if opt['val']:
        validate(monitor, total_iter)
    monitor.close()
    note('end')
    draw_results(model)
    barrier()


def save(monitor: Monitor, current_iter: int) -> None:
    """Write the checkpoint of an iteration; -1 writes ``latest`` networks without a state."""
    note('saving')
    monitor.check()
    is_last = current_iter == -1
    logger.info('Save the latest model.' if is_last else 'Saving models and training states.')
    with evaluation_weights(monitor.model.optimizers):
        monitor.model.save(-1 if is_last else monitor.epoch, current_iter)


def validate(monitor: Monitor, current_iter: int) -> None:
    """Validate on every set; a signal to stop interrupts it between two images."""
    model, opt = monitor.model, monitor.model.opt
    total_iter, save_freq = opt['train']['total_iter'], opt['logger']['save_checkpoint_freq']
    monitor.check()
    try:
        for loader in monitor.loaders.val if current_iter == total_iter else ():
            validate_swa(model, loader, current_iter, monitor.writer)
        model.validate(monitor.loaders.val, current_iter, monitor.writer, opt['val']['save_img'])
    except Preempted as preempted:
        if current_iter % save_freq and current_iter < total_iter:
            save(monitor, current_iter)
        monitor.end_early(current_iter, preempted.signal)
    model.save_best(current_iter)
    refresh_report(model, current_iter)


if __name__ == '__main__':
    from basicsr.run.program import run

    run(train_pipeline, Path(__file__).resolve().parents[1])

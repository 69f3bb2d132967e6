"""Train a network from an option file: ``python basicsr/train.py -opt options/x.yml``."""

import sys
from pathlib import Path

if __name__ == '__main__':  # Python put basicsr/ itself on the path; the package is one level up
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from basicsr.utils.options import parse_args

    parse_args()  # --help and mistyped flags are answered before torch is imported

import datetime
import functools
import math
import time
from collections.abc import Iterator, Sized
from typing import Any, NoReturn

from torch.utils.data import IterableDataset
from tqdm import tqdm

from basicsr.data import build_dataloader, build_dataset, decoded_images, gpus_per_process
from basicsr.data.bad_images import BadImages
from basicsr.data.prefetch_dataloader import CPUPrefetcher, CUDAPrefetcher, images_to_float
from basicsr.data.progressive import Schedule
from basicsr.data.samplers import build_sampler
from basicsr.models import build_model
from basicsr.models.optimization import evaluation_weights
from basicsr.models.swa import finish_swa, validate_swa
from basicsr.run.agreement import check_same_data
from basicsr.run.cores import ranks_on_cores, report_cores
from basicsr.run.data_checks import look_through, try_metrics, try_training_batches
from basicsr.run.data_wait import DataWait
from basicsr.run.incidents import Guard, with_rollbacks
from basicsr.run.option_checks import check_unread
from basicsr.run.preemption import (
    PreemptionWatch,
    last_state,
    leave,
    note_launcher,
)
from basicsr.run.program import log_setting, prepare
from basicsr.run.resume import resume
from basicsr.utils.checkpoint import BackgroundSaver
from basicsr.utils.dist_util import barrier
from basicsr.utils.errors import UserError
from basicsr.utils.figures import write_comparison, write_curves
from basicsr.utils.logger import (
    AvgTimer,
    MessageLogger,
    ScalarWriter,
    get_root_logger,
    init_tb_loggers,
    keep_rows,
)
from basicsr.utils.misc import (
    best_effort,
    claim_folder,
    get_time_str,
    make_exp_dirs,
    remove_stale_temporaries,
)
from basicsr.utils.options import copy_opt_file
from basicsr.utils.progress import Preempted, note
from basicsr.utils.rng import seed_all


def train_pipeline(root_path: str | Path) -> None:
    """Train from the command line's option file to the last checkpoint.

    Args:
        root_path: Parent of ``experiments/`` and ``tb_logger/``.
    """
    opt, args = prepare(root_path, is_train=True)
    log_setting(opt)
    note('start', 0)
    preemption = PreemptionWatch(opt['dist_params']['timeout'])
    try:
        with preemption:
            with_rollbacks(functools.partial(train, args.opt, preemption), opt)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(last_state(opt)) from interrupt


def train(
    option_file: str, preemption: PreemptionWatch, opt: dict, first_sample: int | None = None
) -> None:
    """Train as the options say.

    Args:
        option_file: Where they were read, to be copied into the folder of the run.
        preemption: Tells whether to stop.
        opt: The complete options.
        first_sample: Where to go on in the order of the samples after a rollback; None: with those
            that the training state has not seen.
    """
    logger = get_root_logger()
    if opt['rank'] == 0:  # before a state is chosen: no other process adds or moves one then
        claim_folder(opt['path']['experiments_root'])
    begin = opt['path']['resume_state']
    # Folders are made, and an earlier run moved aside, only when all parts have been built.
    opt, resume_state = resume(opt, is_rollback=first_sample is not None)
    if resume_state and first_sample is not None:
        resume_state['samples'] = first_sample
    start_iter = resume_state['iter'] if resume_state else 0
    schedule = schedule_of_all_ranks(opt)
    if resume_state:
        warn_of_another_batch(schedule.batch_size(start_iter), resume_state.get('batch'))
    start = samples_before(resume_state, schedule)
    train_loader, sampler, val_loaders, _, total_iter = create_train_val_dataloader(
        opt, logger, resume_state
    )
    model = build_model(opt)
    check_unread(opt)
    try_training_batches(model, train_loader)
    look_through(opt, val_loaders)
    try_metrics(opt, val_loaders)
    if resume_state:
        model.resume_training(resume_state)
    model.samples_seen = start
    writer = start_run(model, option_file, start_iter)
    guard = Guard(model, writer, start_iter, begin)
    if resume_state:
        epoch = resume_state['epoch']
        logger.info('Resuming training from epoch: %d, iter: %d.', epoch, start_iter)
        del resume_state  # a second copy of the optimizer state
    else:
        logger.info('Start training from epoch: 0, iter: 0')

    def validate(current_iter: int) -> None:
        guard.check()
        try:
            for val_loader in val_loaders:
                if current_iter == total_iter:
                    validate_swa(model, val_loader, current_iter, writer)
                model.validation(val_loader, current_iter, writer, opt['val']['save_img'])
        except Preempted as stop:
            if current_iter % save_freq and current_iter < total_iter:
                save(model.samples_seen // sampler.total_size, current_iter)
            end_early(model, writer, current_iter, stop.signal)
        model.save_best(current_iter)

    def save(epoch: int, current_iter: int) -> None:
        note('saving')
        guard.check()
        is_last = current_iter == -1
        logger.info('Save the latest model.' if is_last else 'Saving models and training states.')
        with evaluation_weights(model.optimizers):
            model.save(epoch, current_iter)

    def is_due(current_iter: int) -> bool:
        frequency = opt['val'] and opt['val']['val_freq']
        # The last one comes when all else is done.
        return bool(frequency) and current_iter < total_iter and current_iter % frequency == 0

    model.saver, model.noticed_signal = BackgroundSaver(), preemption.noticed
    save_freq, print_freq = opt['logger']['save_checkpoint_freq'], opt['logger']['print_freq']
    if start_iter and is_due(start_iter):
        validate(start_iter)  # a state is saved before the validation of its iteration

    log_line, begin = MessageLogger(opt, start_iter + 1, writer), time.perf_counter()
    batches = prefetch(train_loader, opt)
    iter_timer, data_timer = AvgTimer(), AvgTimer()
    data_wait = DataWait(
        opt['datasets']['train'],
        gpus_per_process(opt['num_gpu'], opt['dist']) * ranks_on_cores(),
        functools.partial(decoded_images, train_loader.dataset),
    )

    note('start', start_iter + 1)
    # The iterations come first: after the last step no batch is asked for.
    steps = iterations(opt, start_iter, preemption)
    for current_iter, data in zip(steps, batches, strict=False):
        data_timer.record()
        epoch = model.samples_seen // sampler.total_size
        stage = schedule.stage(current_iter)
        if stage.sizes and current_iter in (stage.first, start_iter + 1):
            logger.info('%s', stage)
        make_step(model, data, current_iter, schedule)
        guard.note(current_iter, data)
        iter_timer.record()
        data_wait.record(data_timer.get_current_time(), iter_timer.get_current_time())

        if current_iter == start_iter + 1:
            log_line.reset_start_time()  # the first step also starts workers and chooses kernels
        if current_iter % print_freq == 0:
            model.saver.check()
            log_vars = {'epoch': epoch, 'iter': current_iter}
            log_vars['lrs'] = model.get_current_learning_rate()
            log_vars['time'] = iter_timer.get_avg_time()
            log_vars['data_time'] = data_timer.get_avg_time()
            losses = model.get_current_log()
            log_line(log_vars | losses)
            guard.note_losses(current_iter, losses)
            data_wait.report(current_iter)
            train_loader.dataset.bad_images.report()
        stop = preemption.asked()
        if current_iter % save_freq == 0 or current_iter == total_iter or stop:
            save(epoch, current_iter)
        if stop:
            end_early(model, writer, current_iter, stop)
        if is_due(current_iter):
            validate(current_iter)
        note('data', current_iter + 1)
        data_timer.start()
        iter_timer.start()

    elapsed = datetime.timedelta(seconds=int(time.perf_counter() - begin))
    logger.info('End of training. Time consumed: %s', elapsed)
    finish_swa(model, batches, schedule)
    save(epoch=-1, current_iter=-1)
    if opt['val']:
        validate(total_iter)
    model.saver.close()
    writer.close()
    note('end')
    draw_results(opt, model, logger)
    barrier()


def end_early(model: Any, writer: ScalarWriter, current_iter: int, number: int) -> NoReturn:
    """Leave the program, as a signal asks for, when the state of an iteration has been written."""
    model.saver.close()
    writer.close()
    barrier()  # where one rank ends, its launcher ends the others
    leave(current_iter, number)


def make_step(model: Any, data: dict, current_iter: int, schedule: Schedule) -> None:
    """Make one iteration of a training on a batch.

    Args:
        schedule: The batches of all ranks.
    """
    opt = model.opt
    note('step', current_iter)
    seed_all(opt['manual_seed'], opt['rank'], current_iter)
    model.batch_size = schedule.batch_size(current_iter)
    model.samples_seen += model.batch_size
    model.update_learning_rate(current_iter, opt['train']['warmup_iter'])
    model.precision.watch.begin(model.trained_networks)
    model.feed_data(data)
    model.mix_batch()
    model.optimize_parameters(current_iter)
    model.update_averages(current_iter)


def start_run(model: Any, option_file: str, start_iter: int) -> ScalarWriter:
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
        copy_opt_file(option_file, path['experiments_root'])
    log_file = Path(path['log']) / f'train_{opt["name"]}_{get_time_str()}.log'
    get_root_logger(log_file=log_file).info('Experiment folder: %s', path['experiments_root'])
    return init_tb_loggers(opt, start_iter)


def create_train_val_dataloader(
    opt: dict, logger: Any, resume_state: dict | None = None
) -> tuple[Any, Any, list, int, int]:
    """Build the loaders.

    Returns:
        The endless training loader, its sampler (of an IterableDataset, the stream of its samples),
        the validation loaders, and how many epochs and iterations the run has.
    """
    total_iter, total_epochs = opt['train']['total_iter'], 0
    train_loader, val_loaders = None, []
    sampler: Any = None
    datasets = {key: build_dataset(dataset_opt) for key, dataset_opt in opt['datasets'].items()}
    check_same_data(datasets)
    for key, dataset_opt in opt['datasets'].items():
        dataset: Any = datasets[key]
        if dataset_opt['phase'] == 'val':
            if opt['val'] is None:
                logger.warning('%s is not used: there is no val section.', dataset_opt['name'])
                continue
            val_loaders.append(build_dataloader(dataset, dataset_opt, opt['num_gpu'], opt['dist']))
            logger.info('Number of val images in %s: %d', dataset_opt['name'], len(dataset))
            continue
        schedule, seed = schedule_of_all_ranks(opt), opt['manual_seed']
        start_iter = resume_state['iter'] if resume_state else 0
        start = samples_before(resume_state, schedule)
        is_stream = isinstance(dataset, IterableDataset)
        if is_stream and dataset_opt['sampler']:
            raise UserError('datasets.train.sampler: an IterableDataset has its own order.')
        if not is_stream:
            sampler = build_sampler(dataset, dataset_opt, opt['world_size'], opt['rank'], seed)
        file = Path(opt['path']['experiments_root']) / 'skipped.jsonl'
        skips = dataset_opt['on_error'] == 'skip'
        train_loader = build_dataloader(
            *(dataset, dataset_opt, opt['num_gpu'], opt['dist'], sampler, seed, start, start_iter),
            bad_images=BadImages(file if skips else None, None if is_stream else len(dataset)),
        )
        report_cores(train_loader.num_workers, opt['num_gpu'] > 0)
        if is_stream:
            sampler = train_loader.dataset
        total_epochs = math.ceil(schedule.samples(total_iter) / sampler.total_size)
        per_gpu = [stage.batch_size for stage in schedule.stages]
        per_step = [schedule.gpus * size for size in per_gpu]
        per_epoch = [f'{sampler.total_size / size:.1f}' for size in per_step]
        begun = sum(stage.first <= total_iter for stage in schedule.stages)
        if begun < len(per_gpu):
            logger.warning(
                'datasets.train.progressive: %d of %d stages begin, as the run ends after '
                'iteration %d.',
                *(begun, len(per_gpu), total_iter),
            )
        number = len(dataset) if isinstance(dataset, Sized) else 'unknown'
        logger.info(
            'Training statistics:'
            f'\n\tNumber of train images: {number}'
            f'\n\tDataset enlarge ratio: {dataset_opt["dataset_enlarge_ratio"]}'
            f'\n\tBatch size per gpu: {listed(per_gpu)}'
            f'\n\tWorld size (gpu number): {opt["world_size"]}'
            f'\n\tSamples per iteration: {listed(per_step)}'
            f'\n\tRequire iter number per epoch: {listed(per_epoch)}'
            f'\n\tTotal epochs: {total_epochs}; iters: {total_iter}.'
        )
    if train_loader is None or sampler is None:
        raise UserError('datasets has no train section: there is nothing to train on.')
    return train_loader, sampler, val_loaders, total_epochs, total_iter


def listed(values: list) -> str:
    """The values, of one stage of the training after the other."""
    return ', '.join(map(str, values))


def schedule_of_all_ranks(opt: dict) -> Schedule:
    """The batches that all processes together take, step by step."""
    gpus = gpus_per_process(opt['num_gpu'], opt['dist']) * opt['world_size']
    return Schedule(opt['datasets']['train'], opt['manual_seed'], gpus)


def warn_of_another_batch(size: int, before: int | None) -> None:
    """Say that a resumed run has another batch than it had, as with another number of GPUs."""
    if before is not None and before != size:
        get_root_logger().warning(
            'Resume: %d samples per iteration, and %d before. datasets.train.batch_size_total: %d '
            'keeps the total.',
            *(size, before, before),
        )


def samples_before(resume_state: dict | None, schedule: Schedule) -> int:
    """Samples that the run has seen before it goes on."""
    if resume_state is None:
        return 0
    return resume_state.get('samples', schedule.samples(resume_state['iter']))


def prefetch(train_loader: Any, opt: dict) -> Iterator[dict]:
    """The batches of the loader, copied ahead to the GPU with ``prefetch_mode: cuda``."""
    dataset_opt = opt['datasets']['train']
    batches = CPUPrefetcher(train_loader)
    if dataset_opt['prefetch_mode'] == 'cuda':
        if opt['num_gpu'] == 0:
            get_root_logger().warning('prefetch_mode cuda has no effect on the CPU.')
        elif not dataset_opt['pin_memory']:
            raise UserError('prefetch_mode cuda needs datasets.train.pin_memory: true.')
        batches = CUDAPrefetcher(train_loader, opt)
    return map(images_to_float, batches) if dataset_opt['uint8_batch'] else iter(batches)


def iterations(opt: dict, start_iter: int, preemption: PreemptionWatch) -> Iterator[int]:
    """The numbers of the steps to make, with a progress bar if rank 0 runs on a terminal."""
    total_iter = opt['train']['total_iter']
    bar = tqdm(
        range(start_iter + 1, total_iter + 1),
        initial=start_iter,
        total=total_iter,
        disable=None if opt['rank'] == 0 else True,
        unit='iter',
    )
    preemption.is_stepping = True
    yield from bar
    preemption.is_stepping = False


def draw_results(opt: dict, model: Any, logger: Any) -> None:
    """Write the curves of the run and its last validation images, and say where all is."""
    if opt['rank'] > 0:
        return
    folder = Path(opt['path']['experiments_root'])
    made = ['models/', 'metrics.jsonl']
    with best_effort('curves.png'):
        if write_curves(folder / 'curves.png', folder / 'metrics.jsonl'):
            made.append('curves.png')
    if panels := getattr(model, 'panels', None):
        with best_effort('comparison.png'):
            write_comparison(folder / 'comparison.png', panels, model.score_images)
            made.append('comparison.png')
    logger.info('Results are in %s: %s', folder, ', '.join(made))


if __name__ == '__main__':
    from basicsr.run.program import run

    run(train_pipeline, Path(__file__).resolve().parents[1])

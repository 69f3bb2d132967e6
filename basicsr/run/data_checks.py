"""Checks of data, sizes and schedules before a run starts and any folder is touched."""

import itertools
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from basicsr.data.bad_images import BadItem, is_bad_data
from basicsr.data.prefetch_dataloader import images_to_float
from basicsr.data.progressive import crop_sizes
from basicsr.metrics.metric import defined_score, find_metric, is_set_metric, needs_reference
from basicsr.models.preparation import warn_of_own_results
from basicsr.models.sr_model import SRModel
from basicsr.utils.dist_util import gather_lists, get_dist_info
from basicsr.utils.errors import UserError
from basicsr.utils.img_util import tensor2img
from basicsr.utils.parallel import map_in_order
from basicsr.utils.progress import note
from basicsr.utils.registry import METRIC_REGISTRY
from basicsr.utils.rng import seeded
from basicsr.utils.text import some

from .option_checks import check_unread

logger = logging.getLogger(__name__)

_SAMPLES = (
    2  # of a batch, at most: kernels that are compiled treat a single one in a way of its own
)
_MOST = 10  # samples to try, since some may be bad
_MOST_LOOKED_AT = 1000  # images of a validation set


def check_run(model: Any, loaders: Any) -> None:
    """Find mistakes of options and data that show only now, before any folder is touched."""
    check_unread(model.opt)
    try_schedules(model)
    logger.info('Trying a batch and the validation images before the first step.')
    try_training_batches(model, loaders.train)
    look_through(model.opt, loaders.val)
    try_metrics(model.opt, loaders.val)
    _warn_of_vain_options(model, loaders)


def try_schedules(model: Any) -> None:
    """Step every schedule at the start, around its milestones and restarts, and at the end.

    Raises:
        ValueError: It fails, as it would otherwise do after days of training.
    """
    total_iter = model.opt['train']['total_iter']
    for scheduler in model.schedulers:
        groups = scheduler.optimizer.param_groups
        before = [{k: v for k, v in group.items() if k != 'params'} for group in groups]
        state = deepcopy(scheduler.state_dict())
        keys = 'milestones', '_milestones', 'restarts', 'cumulative_period'
        marks = [mark for key in keys for mark in state.get(key, ())]
        points = {1, 2, 3, total_iter - 1, *(int(m) + i for m in marks for i in (0, 1))}
        can_jump = 'last_epoch' in state  # the parts of a ChainedScheduler count by themselves
        try:
            with warnings.catch_warnings(action='ignore'):  # of steps before the optimizer's
                for point in sorted(p for p in points if 0 < p < total_iter):
                    if can_jump:
                        scheduler.last_epoch = point - 1
                    scheduler.step()
                    if wrong := [g['lr'] for g in groups if not 0 <= g['lr'] < math.inf]:
                        raise ValueError(f'a learning rate of {wrong[0]:g}')
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f'train.scheduler: {type(scheduler).__name__} fails at iteration {point + 1} of '
                f'{total_iter}: {error}'
            ) from error
        finally:
            scheduler.load_state_dict(state)
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def _warn_of_vain_options(model: Any, loaders: Any) -> None:
    """Name options that this model, or this run, cannot honour."""
    name, train_opt = type(model).__name__, model.opt['train']
    warn_of_own_results(model)
    if (model.opt['val'] or {}).get('val_freq') and not loaders.val and not model.draws_samples:
        logger.warning(
            'val.val_freq: there is no validation set, and %s draws no samples: nothing is '
            'validated.',
            name,
        )
    asked = [key for key in ('ema_decay', 'swa', 'posthoc_ema') if train_opt.get(key)]
    has_own = any(key.startswith('net_') and key.endswith('_ema') for key in vars(model))
    if asked and not any(model.averages.values()) and not has_own:
        logger.warning(
            'train.%s: %s keeps no average of a network (add_network with ema=True): no effect.',
            *(', train.'.join(asked), name),
        )


def try_training_batches(model: Any, loader: Any) -> None:
    """Send a small batch of every crop size through the model, without a training step.

    This changes nothing that the training depends on. A user's iterable datasets are left alone,
    as some can be iterated over only once.

    Raises:
        ValueError: The network, a loss or the ground truth does not fit the size.
    """
    dataset_opt, dataset = model.opt['datasets']['train'], loader.dataset
    images = dataset.dataset
    if isinstance(images, IterableDataset):
        if type(images).__module__.startswith('basicsr.'):
            _try_batch(model, loader, (item() if callable(item) else item for item in images))
        return
    sizes = crop_sizes(dataset_opt) if dataset_opt.get('progressive') else [None]
    for size in sizes:
        if size is not None:
            images.set_gt_size(size)
        _try_batch(model, loader, _usable_samples(dataset))


def _try_batch(model: Any, loader: Any, samples: Iterator[Any]) -> None:
    with seeded(model.opt['manual_seed'], 0):
        dataset_opt = model.opt['datasets']['train']
        count = min(_SAMPLES, dataset_opt['batch_size_per_gpu'])
        chosen = list(itertools.islice(samples, count))
        if chosen:
            has_own = dataset_opt.get('collate_fn') is not None
            batch = (loader.collate_fn if has_own else default_collate)(chosen)
            try_batch(model, images_to_float(batch))


@torch.no_grad()
def try_batch(model: Any, data: Mapping[str, Any]) -> None:
    """Restore a batch and compute its losses, without a step and without changing the model.

    A user's models may treat a batch in any way, and are left alone.

    Raises:
        ValueError: The network cannot restore images of this size, its output does not match the
            ground truth, or a loss cannot compare them.
    """
    hooks = (type(model).feed_data, type(model).optimize_parameters)
    is_ours = all(hook.__module__.startswith('basicsr.') for hook in hooks)
    if not (is_ours and isinstance(model, SRModel)):
        return
    nets = [(net, net.training) for net in model.trained_networks().values()]
    trial = model.trial_copy()  # which has the attributes of the batch
    try:
        for net, _ in nets:
            net.eval()
        with model.uncompiled(), model.autocast():
            trial.feed_data(data)
            _try_losses(trial)
    finally:
        for net, was_training in nets:
            net.train(was_training)


def _try_losses(model: SRModel) -> None:
    size = f'{model.lq.shape[-1]}x{model.lq.shape[-2]}'
    where = f'the first batch (LQ {size}, {model.lq.shape[1]} channels)'
    net = model.get_bare_model(model.net_g)
    with explained(f'network_g ({type(net).__name__}) cannot restore {where}'):
        output = net(model.lq)
    if output.shape != model.gt.shape:
        raise UserError(
            f'network_g ({type(net).__name__}) makes images of {_size(output)} from {where}, and '
            f'the GT has {_size(model.gt)}: {_advice_on_sizes(model.opt)}'
        )
    with explained(f'the losses cannot be computed of {where} and GT {_size(model.gt)}'):
        model.restore_and_compare()


def _advice_on_sizes(opt: Mapping[str, Any]) -> str:
    upscale, scale = opt['network_g'].get('upscale'), opt.get('scale')
    if upscale is not None and upscale != scale:
        return f'network_g.upscale is {upscale}, and scale is {scale}; make the two equal.'
    return 'look at the arguments of network_g, and at scale and gt_size.'


def _size(images: Tensor) -> str:
    return f'{images.shape[-1]}x{images.shape[-2]} with {images.shape[1]} channels'


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Let errors about shapes and values in the block say ``what`` has failed."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        *(ArithmeticError, AssertionError, AttributeError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        raise UserError(f'{what}: {error}') from error


def _usable_samples(dataset: Any) -> Iterator[Any]:
    """Samples of a map-style training set; bad images are skipped where the run would skip them."""
    for index in range(min(_MOST, len(dataset))):
        try:
            yield dataset.dataset[index]
        except Exception as error:
            if dataset.bad_images.file is None or not is_bad_data(error):
                raise


def try_metrics(opt: Mapping[str, Any], loaders: Iterable[Any]) -> None:
    """Compute this package's metrics between a GT image of every validation set and itself.

    Raises:
        ValueError: A metric can be computed for none of the first images.
    """
    metrics = (opt['val'] or {}).get('metrics') or {}
    for dataset in (loader.dataset for loader in loaders):
        some_items = (dataset[index] for index in range(min(_MOST, len(dataset))))
        items = [item for item in some_items if 'gt' in item]  # unreadable ones are reported later
        for name, options in metrics.items():
            if not (METRIC_REGISTRY.is_users(options['type']) or is_set_metric(options)):
                _try_metric(name, options, items)


def _try_metric(name: str, options: Mapping[str, Any], items: list[Any]) -> None:
    """Refuse a metric that cannot score any of these images; a validation reports single ones."""
    errors = []
    for data in items:
        image = tensor2img([data['gt']])
        try:
            with explained(f'val.metrics.{name} of {data.get("gt_path", data["lq_path"])}'):
                defined_score({'img': image, 'img2': image}, options)
            return
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def look_through(opt: Mapping[str, Any], loaders: Iterable[Any]) -> None:
    """Read the images of the validation sets, a thousand of each, shared among the ranks.

    Raises:
        ValueError: Some cannot be read, or a set gives ``logger.keep_best`` no score to go by.
    """
    rank, world_size = get_dist_info()
    problems: list[str] = []
    for dataset in (loader.dataset for loader in loaders):
        name, count = dataset.opt['name'], len(dataset)
        _check_best(opt, dataset)
        indices = range(0, count, max(-(-count // _MOST_LOOKED_AT), 1))
        if len(indices) < count:
            logger.info('%s: %d of %d images are looked through.', name, len(indices), count)
        # A user's dataset may not be thread-safe.
        is_ours = type(dataset.dataset).__module__.startswith('basicsr.')
        read = map_in_order(
            lambda index, dataset=dataset: _problem_of(dataset, index),
            indices[rank::world_size],
            min(4, torch.get_num_threads()) if is_ours else 1,  # each has whole images in memory
        )
        with seeded(opt['manual_seed'], 0):
            problems += [f'{name}: {problem}' for problem in read if problem]
    problems = gather_lists(problems)
    if problems:
        raise UserError(
            f'{len(problems)} images of the validation sets are unreadable: {some(problems, 5)}'
        )


def _check_best(opt: Mapping[str, Any], dataset: Any) -> None:
    """Refuse a set that ``logger.keep_best`` uses, and that gives it no score."""
    best, name = opt['logger']['keep_best'], dataset.opt['name']
    if not best or best['dataset'] != name:
        return
    if len(dataset) == 0:
        raise UserError(f'logger.keep_best goes by {name}, and that set is empty.')
    metric, item = find_metric(opt['val']['metrics'][best['metric']]['type']), dataset[0]
    if needs_reference(metric) and not isinstance(item, BadItem) and 'gt' not in item:
        raise UserError(
            f'logger.keep_best goes by {best["metric"]}, which compares with the GT, and the '
            f'images of {name} have none.'
        )


def _problem_of(dataset: Any, index: int) -> str:
    note('start')
    item = dataset[index]
    return item['error'] if isinstance(item, BadItem) else ''

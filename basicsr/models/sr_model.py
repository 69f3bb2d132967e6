"""Restoration by regression: one network, pixel and perceptual losses."""

import inspect
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from basicsr.archs import build_network
from basicsr.data import gpus_per_process, shard
from basicsr.data.bad_images import BadItem
from basicsr.data.data_util import image_name
from basicsr.data.progressive import Schedule
from basicsr.losses import build_loss
from basicsr.metrics import calculate_metric
from basicsr.utils.dist_util import barrier, gather_lists, get_dist_info, share_buffers
from basicsr.utils.errors import UserError
from basicsr.utils.figures import side_by_side
from basicsr.utils.img_util import imwrite, tensor2img
from basicsr.utils.logger import ScalarWriter
from basicsr.utils.misc import best_effort
from basicsr.utils.parallel import map_in_order
from basicsr.utils.progress import Preempted, note
from basicsr.utils.registry import METRIC_REGISTRY, MODEL_REGISTRY
from basicsr.utils.text import did_you_mean, some

from .averaging import PowerAverages
from .base_model import BaseModel
from .optimization import (
    has_two_weights,
    optimizer_problems,
    parameter_groups,
    train_weights,
)
from .preparation import compile_if_asked, use_channels_last
from .swa import StochasticAverage, let_swa_take_over

logger = logging.getLogger(__name__)

# Names of losses that have an option of their own.
_OWN_LOSSES = ('pix', 'percep', 'style', 'gan', 'ldl')


@dataclass
class _Result:
    """An image of a validation on its way from the network to its scores."""

    index: int
    name: str
    visuals: Mapping[str, Tensor] = field(default_factory=dict)
    path: str | None = None
    images: dict[str, np.ndarray] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    problem: str = ''


@MODEL_REGISTRY.register()
class SRModel(BaseModel):
    """A network ``net_g`` from LQ to GT, and with ``train.ema_decay`` its average ``net_g_ema``.

    Attributes:
        lq, gt, output: The batch and its result, (b, c, h, w) RGB in [0, 1].
        image_results: Of the last validation: scores per image, by image name.
        panels: Of the last validation of each set: the first images, as (h, w, c) BGR uint8 arrays.
        loss_prefix: What the names of this network's losses begin with in the log.
        needs_fidelity_loss: Whether a loss between ``output`` and ``gt`` has to be given.
    """

    loss_prefix = 'l_'
    needs_fidelity_loss = True

    def __init__(self, opt: dict):
        super().__init__(opt)
        self._check_metrics()
        if not opt.get('network_g'):
            raise UserError('network_g: required, and not given.')
        self.net_g = self.model_to_device(build_network(opt['network_g']))
        self.print_network(self.net_g)
        self._load_pretrained(self.net_g, 'g', opt['path'].get('param_key_g', 'params'))
        self.image_results: dict[str, dict[str, float]] = {}
        self._undefined: dict[str, str] = {}  # by metric: which image has none, and why
        self._told: set[str] = set()
        self.panels: list[dict[str, Any]] = []
        self._gpu = torch.cuda.current_device() if self.device.type == 'cuda' else None
        if self.is_train:
            self.init_training_settings()
            self.setup_averages()

    def _check_metrics(self) -> None:
        """Refuse metrics that do not exist or lack an argument, before anything is trained."""
        for name, options in ((self.opt.get('val') or {}).get('metrics') or {}).items():
            problems = METRIC_REGISTRY.problems(options, ('img', 'img2'))
            if options['type'].endswith('_pt'):
                problems = [f'{options["type"]} takes tensors, not images.']
            if problems:
                raise UserError(f'val.metrics.{name}: {" ".join(problems)}')

    def _load_pretrained(self, net: torch.nn.Module, label: str, param_key: str | None) -> None:
        """Load what ``path.pretrain_network_<label>`` names, if it names anything."""
        path = self.opt['path']
        load_path = path.get(f'pretrain_network_{label}')
        strict = path.get(f'strict_load_{label}', True)
        if load_path is not None:
            self.load_network(net, load_path, strict, param_key)

    def init_training_settings(self) -> None:
        self.net_g.train()
        train_opt = self.opt['train']
        self.ema_decay = train_opt.get('ema_decay', 0)
        self.ema_warmup = train_opt.get('ema_warmup', False)
        if self.ema_decay > 0:
            logger.info('Use Exponential Moving Average with decay: %s', self.ema_decay)
            self.net_g_ema = build_network(self.opt['network_g']).to(self.device)
            if self.channels_last:
                use_channels_last(self.net_g_ema)
            if self.sharding:
                self.net_g_ema = self.sharding.shard(self.net_g_ema)
            self.model_ema(0)  # a copy: where weights are loaded in part, both begin alike
            self._load_pretrained(self.net_g_ema, 'g', 'params_ema')
            self.net_g_ema.eval()
        self._warn_of_own_step()
        self.init_losses()
        self._check_sums()
        self.setup_optimizers()
        train_weights(self.optimizers)
        self.setup_schedulers()

    def setup_averages(self) -> None:
        """Build what ``train.swa`` and ``train.posthoc_ema`` ask for."""
        swa, lengths = (self.opt['train'].get(key) for key in ('swa', 'posthoc_ema'))
        if self.sharding and (swa or lengths):
            raise UserError(
                'train.swa and train.posthoc_ema average whole networks, and train.sharding splits '
                'them: leave one of these out.'
            )
        has_average = swa or lengths or self.ema_decay > 0
        if has_average and any(map(has_two_weights, self.optimizers)):
            raise UserError(
                'train.ema_decay, swa and posthoc_ema average the weights that gradients are taken '
                'at, and a schedule-free optimizer has an average of its own: set ema_decay: 0, '
                'and leave the others out.'
            )
        if swa:
            self.swa = StochasticAverage(
                swa, self.opt['train']['total_iter'], self._copy_of_net_g()
            )
            logger.info('SWA: the weights from iteration %d on enter.', self.swa.start)
            if swa['lr'] is not None:
                rate = {**swa, 'lr': swa['lr'] * self._learning_rate_factor()}
                let_swa_take_over(self.schedulers, self.optimizer_g, rate, self.swa.start)
        if lengths:
            lengths = [0.05, 0.1] if lengths is True else lengths
            self.power_averages = PowerAverages(lengths, self._copy_of_net_g)

    def _copy_of_net_g(self) -> torch.nn.Module:
        copy = build_network(self.opt['network_g']).to(self.device)
        copy.load_state_dict(self.get_bare_model(self.net_g).state_dict())
        return copy.eval()

    def _warn_of_own_step(self) -> None:
        """Say which options a subclass passes by that makes its steps itself."""
        train_opt = self.opt['train']
        names = [n for n in ('amp', 'clip_grad_norm', 'clip_grad_value') if train_opt.get(n)]
        names += ['channels_last: auto'] if self.channels_last is None else []
        names += ['accumulate'] if self.accumulate > 1 else []
        names += ['on_nonfinite: skip'] if self.precision.watch.policy == 'skip' else []
        if names and not type(self).optimize_parameters.__module__.startswith('basicsr.'):
            logger.warning(
                '%s has an optimize_parameters of its own: train.%s have no effect unless it calls '
                'self.step().',
                type(self).__name__,
                ', train.'.join(names),
            )

    def _check_sums(self) -> None:
        """Refuse a sum over the batch where a mean of the parts of the batch would be taken."""
        for name, loss in {**vars(self), **self.cri_others}.items():
            if self.accumulate > 1 and getattr(loss, 'reduction', 'mean') == 'sum':
                raise UserError(
                    f'train.accumulate takes means of losses, and {name} is a sum: leave '
                    'reduction: sum out, and raise its loss_weight.'
                )

    def init_losses(self) -> None:
        """Build ``cri_pix``, ``cri_perceptual``, and ``cri_others`` by name."""
        train_opt = self.opt['train']
        self.cri_pix, self.cri_perceptual = (
            self._build_loss(train_opt[key]) if train_opt.get(key) else None
            for key in ('pixel_opt', 'perceptual_opt')
        )
        self.cri_others: dict[str, torch.nn.Module] = {}
        more = train_opt.get('losses') or []
        if not isinstance(more, list) or not all(
            isinstance(options, dict) and 'type' in options for options in more
        ):
            raise UserError(
                f'train.losses must be a list of losses, such as [{{type: L1Loss}}], got {more}.'
            )
        for options in map(dict, more):
            name = options.pop('name', None) or options['type'].removesuffix('Loss').lower()
            if name in self.cri_others:
                raise UserError(f"train.losses: two are called '{name}'; give each a name.")
            if name in _OWN_LOSSES:
                raise UserError(f"train.losses: '{name}' is another loss; give a new name.")
            self.cri_others[name] = self._build_loss(options)
            if is_adversarial(self.cri_others[name]):
                raise UserError(
                    'train.losses: an adversarial loss has its own place, train.gan_opt, in the '
                    'options of an adversarial model.'
                )
        self._num_images = {name: _number_of_images(loss) for name, loss in self.cri_others.items()}
        if self.needs_fidelity_loss and not (
            self.cri_pix or self.cri_perceptual or self.cri_others
        ):
            raise UserError('no loss: give train.pixel_opt, train.perceptual_opt or train.losses.')

    def _build_loss(self, options: dict) -> torch.nn.Module:
        loss = build_loss(options).to(self.device)
        compile_if_asked(loss, self.opt['train'])
        return loss

    def setup_optimizers(self) -> None:
        self.optimizer_g = self._optimizer_of(self.net_g, 'optim_g')
        self.optimizers.append(self.optimizer_g)

    def _optimizer_of(self, net: torch.nn.Module, key: str) -> torch.optim.Optimizer:
        """The optimizer of a network that ``train.<key>`` describes."""
        options = dict(self.opt['train'].get(key) or {})
        if problems := optimizer_problems(options):
            raise UserError(f'train.{key}: {" ".join(problems)}')
        name = options.pop('type')
        frozen = [n for n, p in net.named_parameters() if not p.requires_grad]
        if frozen:
            logger.warning('Params %s will not be optimized.', ', '.join(frozen))
        groups, options = parameter_groups(self.get_bare_model(net), options)
        if isinstance(options.get('others'), dict):
            options['others'] = dict(options['others'])
        factor = self._learning_rate_factor()
        for described in (options, options.get('others') or {}, *groups):
            if 'lr' in described:
                described['lr'] *= factor
        optimizer = self.get_optimizer(name, groups, **options)
        given = {argument for group in groups for argument in group}
        for unknown in given - {'params', *optimizer.defaults}:
            if optimizer.defaults:  # of several there are none
                hint = did_you_mean(unknown, optimizer.defaults)
                raise UserError(f"train.{key}: groups have no argument '{unknown}'{hint}")
        return optimizer

    def _learning_rate_factor(self) -> float:
        """What ``train.scale_lr`` multiplies the learning rates by, for this run's batch."""
        rule = self.opt['train'].get('scale_lr')
        if not rule:
            return 1.0
        gpus = gpus_per_process(self.opt['num_gpu'], self.opt['dist']) * get_dist_info()[1]
        first_batch = Schedule(self.opt['datasets']['train'], gpus=gpus).batch_size(1)
        ratio = first_batch / rule['batch']
        factor = math.sqrt(ratio) if rule['rule'] == 'sqrt' else ratio
        logger.info('Learning rates are multiplied by %g (train.scale_lr).', factor)
        return factor

    def feed_data(self, data: Mapping[str, Any]) -> None:
        self.lq = self._to_device(data['lq'])
        if 'gt' in data:
            self.gt = self._to_device(data['gt'])
        elif hasattr(self, 'gt'):
            del self.gt  # of the batch before

    def _to_device(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        return images.to(self.device, non_blocking=True, memory_format=layout)

    @torch.no_grad()
    def try_batch(self, data: Mapping[str, Any]) -> None:
        """Restore a batch and compute its losses, without a step and without a trace in the model.

        Subclasses that are not of this package and have their own ways with a batch are left alone.

        Raises:
            ValueError: The network cannot restore images of this size, gives others than the ground
                truth, or a loss cannot compare them.
        """
        hooks = (type(self).feed_data, type(self).optimize_parameters)
        if not all(hook.__module__.startswith('basicsr.') for hook in hooks):
            return
        nets = [(net, net.training) for net in self.trained_networks().values()]
        trial = copy(self)  # which has the attributes of the batch
        try:
            for net, _ in nets:
                net.eval()
            with self._uncompiled(), self.autocast():
                trial.feed_data(data)
                trial._try_losses()
        finally:
            for net, was_training in nets:
                net.train(was_training)

    def _try_losses(self) -> None:
        size = f'{self.lq.shape[-1]}x{self.lq.shape[-2]}'
        where = f'the first batch (LQ {size}, {self.lq.shape[1]} channels)'
        net = self.get_bare_model(self.net_g)
        with explained(f'network_g ({type(net).__name__}) cannot restore {where}'):
            output = net(self.lq)
        if output.shape != self.gt.shape:
            raise UserError(
                f'network_g ({type(net).__name__}) makes images of {_size(output)} from {where}, '
                f'and the GT has {_size(self.gt)}: {self._advice_on_sizes()}'
            )
        with explained(f'the losses cannot be computed of {where} and GT {_size(self.gt)}'):
            self.restore_and_compare()

    def _advice_on_sizes(self) -> str:
        upscale, scale = self.opt['network_g'].get('upscale'), self.opt.get('scale')
        if upscale is not None and upscale != scale:
            return f'network_g.upscale is {upscale}, and scale is {scale}; make the two equal.'
        return 'look at the arguments of network_g, and at scale and gt_size.'

    def optimize_parameters(self, current_iter: int) -> None:
        losses = self.step('g', self.net_g, self.optimizer_g, self.restore_and_compare)
        self.log_dict = self.reduce_loss_dict(losses)
        self.update_ema()

    def restore_and_compare(self) -> OrderedDict[str, Tensor]:
        """Restore ``lq`` into ``output``; returns the losses of ``net_g``."""
        self.output = self.net_g(self.lq)
        return self.fidelity_losses()

    def fidelity_losses(self) -> OrderedDict[str, Tensor]:
        """The losses between ``output`` and the ground truth, by their names in the log."""
        values: dict[str, Tensor | None] = {}
        if self.cri_pix is not None:
            values['pix'] = self.cri_pix(self.output, self.target('pix'))
        if self.cri_perceptual is not None:
            values['percep'], values['style'] = self.cri_perceptual(
                self.output, self.target('percep')
            )
        for name, loss in self.cri_others.items():
            arguments = [self.output, self.target(name)][: self._num_images[name]]
            value = loss(*arguments)
            if isinstance(value, tuple):  # a perceptual loss
                value, values[f'{name}_style'] = value
            values[name] = value
        return OrderedDict(
            (f'{self.loss_prefix}{name}', value)
            for name, value in values.items()
            if value is not None
        )

    def target(self, loss: str) -> Tensor:
        """The ground truth for 'pix', 'percep', or another loss by its name in the log."""
        return self.gt

    def update_ema(self) -> None:
        if self.ema_decay > 0:
            # So early that the average would mostly be of the first weights, it is of fewer.
            early = (1 + self.current_iter) / (10 + self.current_iter)
            self.model_ema(min(self.ema_decay, early) if self.ema_warmup else self.ema_decay)

    def _network(self) -> torch.nn.Module:
        """The network that restores: the averaged one, if there is one."""
        return self.net_g_ema if hasattr(self, 'net_g_ema') else self.get_bare_model(self.net_g)

    def _run(self, lq: Tensor) -> Tensor:
        """The network's result, in eval mode."""
        net = self._network()
        was_training = net.training
        if was_training:  # networks may keep things from one evaluation to the next
            net.eval()
        with torch.no_grad(), self._uncompiled():
            output = net(lq)
        if was_training:
            net.train()
        return output

    def _uncompiled(self) -> AbstractContextManager:
        """Images of a validation vary in size, and each would be compiled anew."""
        compiled = self.is_train and self.opt['train'].get('compile')
        return torch.compiler.set_stance('force_eager') if compiled else nullcontext()

    def test(self) -> None:
        """Restore ``lq`` into ``output``."""
        self.output = self._run(self.lq)

    def test_selfensemble(self) -> None:
        """Restore ``lq`` into the mean over its eight flips and rotations."""
        lq, outputs = self.lq, []
        for turns in range(4):
            for flip in (False, True):
                turned = torch.rot90(lq.flip(-1) if flip else lq, turns, (-2, -1))
                self.lq = turned
                self.test()
                back = torch.rot90(self.output, -turns, (-2, -1))
                outputs.append(back.flip(-1) if flip else back)
        self.lq = lq
        self.output = torch.stack(outputs).mean(0)

    def get_current_visuals(self) -> OrderedDict[str, Tensor]:
        visuals = OrderedDict(lq=self.lq.detach().cpu(), result=self.output.detach().cpu())
        if hasattr(self, 'gt'):
            visuals['gt'] = self.gt.detach().cpu()
        return visuals

    def dist_validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool
    ) -> None:
        """Share the images among the ranks; the results equal those of one process."""
        rank, world_size = get_dist_info()
        net = self._network()
        with self.sharding.whole(net) if self.sharding else nullcontext():
            if type(self).nondist_validation is SRModel.nondist_validation:
                share_buffers(net)
                share = shard(dataloader, rank, world_size)
                self._validate(share, current_iter, tb_logger, save_img, rank, world_size)
                return
            try:
                if rank == 0:  # a subclass has its own loop, which knows nothing of ranks
                    self.nondist_validation(dataloader, current_iter, tb_logger, save_img)
            finally:
                barrier()

    def nondist_validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool
    ) -> None:
        self._validate(dataloader, current_iter, tb_logger, save_img)

    def _validate(
        self,
        dataloader: Any,
        current_iter: int | str,
        tb_logger: Any,
        save_img: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Restore, score and save the images ``rank, rank + world_size, …`` of the set."""
        dataset_opt = dataloader.dataset.opt
        dataset_name = dataset_opt['name']
        val_opt = self.opt['val']
        note('validation')
        restore = self.test_selfensemble if val_opt.get('self_ensemble') else self.test
        self._initialize_best_metric_results(dataset_name)
        self.panels = [panel for panel in self.panels if panel['set'] != dataset_name]
        shown = 0

        hide_bar = rank > 0 or not val_opt.get('pbar', False)

        def restored() -> Iterator[_Result]:
            for position, data in enumerate(tqdm(dataloader, unit='image', disable=hide_bar)):
                note('validation')
                if number := self.noticed_signal():
                    signals.append(number)
                    return
                index = rank + position * world_size
                if isinstance(data, BadItem):
                    name = image_name(data['path'], dataset_opt) if data['path'] else f'#{index}'
                    yield _Result(index, name, problem=data['error'])
                    continue
                name = image_name(data['lq_path'][0], dataset_opt)
                path = self._image_path(dataset_name, name, current_iter) if save_img else None
                if hasattr(self, 'gt'):
                    del self.gt  # whatever feed_data a subclass has, no other GT is scored
                self.feed_data(data)
                restore()
                visuals = self.get_current_visuals()
                # Nothing of this image stays on the device while the next one is restored.
                del self.lq, self.output
                yield _Result(index, name, visuals, path)

        rows, signals = [], []
        threads = min(4, os.cpu_count() or 1)
        for result in map_in_order(self._finish_image, restored(), threads):
            rows.append((result.index, result.name, result.scores, result.problem))
            if not result.problem and shown < val_opt.get('log_images', 0):
                about = {'set': dataset_name, 'name': result.name, 'metrics': result.scores}
                self.panels.append({**about, **result.images})
                shown += 1

        self.noticed_signal()  # tells ranks that have more images
        if signals := gather_lists(signals):
            raise Preempted(max(signals))
        self._warn_of_undefined()
        rows = sorted(gather_lists(rows))
        self.image_results = {name: scores for _, name, scores, problem in rows if not problem}
        self.failed_images = {name: problem for _, name, _, problem in rows if problem}
        scores = [scores for _, _, scores, problem in rows if not problem]  # names may be alike
        self._finish_validation(scores, dataset_name, current_iter, tb_logger)

    def _finish_image(self, result: '_Result') -> '_Result':
        """Turn the tensors of one result into images, write and score them; runs in a thread."""
        if result.problem:
            return result
        if self.device.type == 'cuda':  # a thread begins with the first GPU
            torch.cuda.set_device(self._gpu)
        visuals, result.visuals = result.visuals, {}
        if not visuals['result'].isfinite().all():
            result.problem = 'the network gives values that are not finite'
            return result
        result.images = {key: tensor2img([value]) for key, value in visuals.items()}
        if result.path is not None:
            imwrite(result.images['result'], result.path)
        try:
            result.scores = self.score_images(result.images, result.name)
        except AssertionError as error:  # images of unlike shapes
            result.problem = str(error)
        return result

    def _image_path(self, dataset_name: str, name: str, current_iter: int | str) -> str:
        folder = Path(self.opt['path']['visualization'])
        if self.is_train:
            if sum(o.get('phase') == 'val' for o in self.opt['datasets'].values()) > 1:
                folder = folder / dataset_name  # the sets may share names of images
            return str(folder / name / f'{Path(name).name}_{current_iter}.png')
        suffix = self.opt['val'].get('suffix') or self.opt['name']
        return str(folder / dataset_name / f'{name}_{suffix}.png')

    def score_images(self, images: Mapping[str, np.ndarray], name: str) -> dict[str, float]:
        """Every metric of ``val.metrics`` for one image; those that need a GT only with one.

        Called from several threads at once.
        """
        data, values = {'img': images['result']}, {}
        if 'gt' in images:
            data['img2'] = images['gt']
        for metric, options in (self.opt['val'].get('metrics') or {}).items():
            if 'gt' not in images and needs_reference(METRIC_REGISTRY.get(options['type'])):
                continue
            reason = '.'
            try:
                values[metric] = float(calculate_metric(data, options))
            except (AssertionError, TypeError, ValueError) as error:
                # One of ours cannot do with this image, which is too small, say.
                if not isinstance(error, ValueError) or METRIC_REGISTRY.is_users(options['type']):
                    raise type(error)(f'metric {metric} of image {name}: {error}') from error
                values[metric], reason = math.nan, f': {error}'
            except Exception as error:
                error.add_note(f'while computing the metric {metric} of image {name}')
                raise
            if math.isnan(values[metric]):
                text = f'Metric {metric} of image {name} is NaN{reason}'
                self._undefined.setdefault(metric, text)
        return values

    def _warn_of_undefined(self) -> None:
        """Say of each metric, once, which image on any rank has none."""
        for metric, text in sorted(gather_lists(list(self._undefined.items()))):
            if metric not in self._told:
                self._told.add(metric)
                logger.warning('%s', text)

    def _finish_validation(
        self,
        scores: list[dict[str, float]],
        dataset_name: str,
        current_iter: int | str,
        tb_logger: Any,
    ) -> None:
        """Average the scores over the images, keep the best ones, and log them."""
        self.metric_results = {}
        metrics = self.opt['val'].get('metrics') or {}
        if self.failed_images:
            self._report_failures(dataset_name)
            # A mean without them is not that of the other validations, nor a best one.
            metrics = {} if self.is_train else metrics
        for metric in metrics:
            given = [values[metric] for values in scores if metric in values]
            values = [value for value in given if not math.isnan(value)]
            if len(values) < len(given):
                undefined = len(given) - len(values)
                logger.info(
                    '%s: NaN for %d of %d images, which are left out.',
                    *(metric, undefined, len(given)),
                )
            if given and not values:
                continue
            if not values:
                if scores:
                    logger.info('No GT: %s, which compares with it, is left out.', metric)
                continue
            # Equal images have an infinite PSNR; the mean is over the others.
            finite = [value for value in values if not math.isinf(value)]
            if len(finite) < len(values):
                equal = len(values) - len(finite)
                logger.info('%s: %d of %d images equal the GT.', metric, equal, len(values))
            mean = math.fsum(finite) / len(finite) if finite else values[0]
            self.metric_results[metric] = mean
            self._update_best_metric_result(dataset_name, metric, mean, current_iter)
        if not scores and not self.failed_images:
            logger.warning('Validation %s: the set is empty.', dataset_name)
        self._log_validation_metric_values(current_iter, dataset_name, tb_logger)

    def _report_failures(self, dataset_name: str) -> None:
        named = [f'{name} ({problem})' for name, problem in self.failed_images.items()]
        logger.warning(
            'Validation %s: %d images have no result%s: %s',
            *(dataset_name, len(named), ', so it has no scores' if self.is_train else ''),
            some(named),
        )

    def _log_validation_metric_values(
        self, current_iter: int | str, dataset_name: str, tb_logger: Any
    ) -> None:
        text = f'Validation {dataset_name}\n'
        for metric, value in self.metric_results.items():
            text += f'\t # {metric}: {value:.4f}'
            if self.is_train:
                best = self.best_metric_results[dataset_name][metric]
                text += f'\tBest: {best["val"]:.4f} @ {best["iter"]} iter'
            text += '\n'
        logger.info(text)
        if tb_logger is None:
            return
        step = int(current_iter)
        for metric, value in self.metric_results.items():
            tb_logger.add_scalar(f'metrics/{dataset_name}/{metric}', value, step)
        if isinstance(tb_logger, ScalarWriter):
            with best_effort('Images of a validation'):
                for panel in self.panels:
                    if panel['set'] == dataset_name:
                        tag = f'{dataset_name}/{panel["name"]}'
                        tb_logger.add_image(tag, side_by_side(panel), step)
        tb_logger.flush()

    def save(self, epoch: int, current_iter: int) -> None:
        self.save_generator(current_iter)
        self.save_training_state(epoch, current_iter)

    def save_generator(self, label: int | str) -> None:
        """Write ``net_g_<label>`` with its averages; -1 stands for 'latest'."""
        nets, keys = [self.net_g], ['params']
        if hasattr(self, 'net_g_ema'):
            nets, keys = [*nets, self.net_g_ema], [*keys, 'params_ema']
        if self.swa is not None and self.swa.count:
            nets, keys = [*nets, self.swa.network], [*keys, 'params_swa']
        self.save_network(nets, 'net_g', label, keys)


def is_adversarial(loss: torch.nn.Module) -> bool:
    """Whether a loss judges logits as those of real images or not, as GANLoss does."""
    return 'target_is_real' in inspect.signature(loss.forward).parameters


def _number_of_images(loss: torch.nn.Module) -> int:
    """1 for a loss of ``output`` alone, 2 for one that compares it with the ground truth."""
    parameters = inspect.signature(loss.forward).parameters.values()
    return sum(
        p.default is inspect.Parameter.empty for p in parameters if p.kind < p.VAR_POSITIONAL
    )


def _size(images: Tensor) -> str:
    return f'{images.shape[-1]}x{images.shape[-2]} with {images.shape[1]} channels'


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Within the block errors about shapes and values say ``what`` has failed."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise UserError(f'{what}: {error}') from error


def needs_reference(metric: Callable) -> bool:
    """Whether a metric cannot do without a second image."""
    parameter = inspect.signature(metric).parameters.get('img2')
    return parameter is not None and parameter.default is inspect.Parameter.empty

"""What every model needs: devices, processes, optimizers, the averaged copy, checkpoints."""

import hashlib
import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from basicsr.utils.checkpoint import (
    BackgroundSaver,
    copy_to_cpu,
    load_checkpoint,
    select_params,
    strip_wrapper_prefixes,
    take_below_prefix,
)
from basicsr.utils.checkpoint_series import CheckpointSeries, set_aside_later
from basicsr.utils.dist_util import from_master, get_dist_info, master_only
from basicsr.utils.errors import UserError
from basicsr.utils.misc import folder_of_networks
from basicsr.utils.safetensors_file import require_safetensors
from basicsr.utils.text import some
from basicsr.utils.wrong_weights import advice

from .averaging import (
    PowerAverages,
    drop_later_snapshots,
    load_snapshot,
    move_average,
    snapshot_file,
)
from .mixing import BatchMixing
from .optimization import (
    align_state,
    arguments_of,
    build_optimizer,
    build_scheduler,
    evaluation_weights,
    train_weights,
)
from .precision import Precision
from .preparation import (
    build_sharding,
    channels_last_is_faster,
    prepare_for_training,
    use_channels_last,
)
from .swa import StochasticAverage

logger = logging.getLogger(__name__)

# What a resumed scheduler or parameter group must have from the state, and never from the options.
_PROGRESS = {
    *('last_epoch', '_step_count', '_last_lr', '_get_lr_called_within_step', '_is_initial'),
    *('T_cur', 'T_i'),  # of CosineAnnealingWarmRestarts
}
_GROUP_PROGRESS = {'params', 'initial_lr', 'lr_before_warmup', 'fused'}


class BaseModel:
    """Base of the models; a subclass owns the networks and one step.

    Attributes:
        opt: The completed options.
        device: Where networks and batches live.
        optimizers, schedulers: In the order in which a training state stores them.
        log_dict: Scalars of the last step, as tensors on the device.
        saver: Set by the training loop, which must not wait for the disk: a BackgroundSaver through
            which checkpoints are written; None: they are written at once.
        noticed_signal: Set by the training loop: gives the signal that asks the run to stop, or 0.
            A validation is left for it between two images.
        channels_last: The memory layout of networks and batches; None until it is chosen.
        batch_tensors: Names of the attributes that hold a batch, which is split to accumulate
            gradients.
        swa, power_averages: The averages of ``train.swa`` and ``train.posthoc_ema``, or None.
        sharding: With ``train.sharding`` what splits the networks over the processes, else None.
        samples_seen: Training samples that all ranks together have taken; the loop counts them.
        batch_size: Samples of the last batch of all ranks.
        metric_results: Scores of the last validation; there only after one, since models with a
            loop of their own ask for that.
        failed_images: Of the last validation: why images have no result, by image name.
    """

    metric_results: dict[str, float]
    batch_tensors: tuple[str, ...] = ('lq', 'gt')

    def __init__(self, opt: dict):
        self.opt = opt
        self.device = torch.device('cuda' if opt['num_gpu'] != 0 else 'cpu')
        self.is_train = opt['is_train']
        self.schedulers: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.log_dict: Mapping[str, Any] = OrderedDict()
        self.saver: BackgroundSaver | None = None
        self.noticed_signal: Callable[[], int] = lambda: 0
        self.swa: StochasticAverage | None = None
        self.power_averages: PowerAverages | None = None
        self.samples_seen = 0
        self.batch_size = 0
        self.current_iter = 0
        train_opt = opt.get('train') or {}
        self.precision = Precision(train_opt, self.device)
        self.accumulate = train_opt.get('accumulate', 1)
        layout = train_opt.get('channels_last', False)
        self.channels_last = None if layout == 'auto' else layout
        mixing = train_opt.get('mixing')
        self.mixing = BatchMixing(mixing, opt['manual_seed'], opt['rank']) if mixing else None
        self.sharding = build_sharding(opt, self.device)
        self.best_metric_results: dict[str, dict[str, dict[str, Any]]] = {}
        self.failed_images: dict[str, str] = {}
        self._begin_checkpoints(opt.get('logger') or {})

    def _begin_checkpoints(self, options: Mapping[str, Any]) -> None:
        models = self.opt['path'].get('models', '')  # a test writes none
        self.checkpoints = CheckpointSeries(
            models,
            options.get('keep_last'),
            options.get('save_checkpoint_freq', 1),
            (self.opt.get('train') or {}).get('total_iter'),
        )
        self._network_suffix = f'.{options.get("checkpoint_format", "pth")}'
        if self._network_suffix == '.safetensors':
            require_safetensors()  # now, not at the first checkpoint
        self._best = options.get('keep_best')

    def feed_data(self, data: Mapping[str, Any]) -> None:
        """Take over a batch."""
        raise NotImplementedError(f'{type(self).__name__} defines no feed_data.')

    def try_batch(self, data: Mapping[str, Any]) -> None:
        """Refuse a batch whose sizes do not fit, before a training begins with such batches."""

    def mix_batch(self) -> None:
        """Mix the samples of the batch, before a step: ``train.mixing``."""
        if self.mixing is not None:
            self.lq, self.gt = self.mixing(self.lq, self.gt, self.current_iter)  # pyright: ignore[reportAttributeAccessIssue]

    def optimize_parameters(self, current_iter: int) -> None:
        """Make one step on the batch."""
        raise NotImplementedError(f'{type(self).__name__} defines no optimize_parameters.')

    def get_current_visuals(self) -> Mapping[str, Tensor]:
        """The images of the batch, on the CPU."""
        raise NotImplementedError(f'{type(self).__name__} defines no get_current_visuals.')

    def save(self, epoch: int, current_iter: int) -> None:
        """Write the networks and, unless ``current_iter`` is -1, the training state."""
        raise NotImplementedError(f'{type(self).__name__} defines no save.')

    def dist_validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool
    ) -> None:
        raise NotImplementedError(f'{type(self).__name__} defines no dist_validation.')

    def nondist_validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool
    ) -> None:
        raise NotImplementedError(f'{type(self).__name__} defines no nondist_validation.')

    def validation(
        self, dataloader: Any, current_iter: int | str, tb_logger: Any, save_img: bool = False
    ) -> None:
        """Restore the images of a set and score them.

        Args:
            dataloader: Loader of single images.
            current_iter: The iteration, or in a test the name of the experiment.
            tb_logger: Where scores go; None for the text log alone.
            save_img: Write the results as images.
        """
        validate = self.dist_validation if self.opt['dist'] else self.nondist_validation
        self.failed_images = {}
        try:
            with evaluation_weights(self.optimizers):
                validate(dataloader, current_iter, tb_logger, save_img)
        except (FloatingPointError, ValueError) as error:
            has_own_loop = not type(self).nondist_validation.__module__.startswith('basicsr.')
            path = getattr(error, 'filename', None)
            if not has_own_loop or not (path or isinstance(error, FloatingPointError)):
                raise
            vars(self).pop('metric_results', None)
            self.failed_images = {Path(path).stem if path else 'an image': str(error)}
            logger.warning('The validation ends at an image, without scores: %s', error)

    def _initialize_best_metric_results(self, dataset_name: str) -> None:
        """Start the record of a set's best scores, for the metrics that have none."""
        record = self.best_metric_results.setdefault(dataset_name, {})
        for name, options in (self.opt['val'].get('metrics') or {}).items():
            better = options.get('better', 'higher')
            worst = -math.inf if better == 'higher' else math.inf
            record.setdefault(name, {'better': better, 'val': worst, 'iter': -1})

    def _update_best_metric_result(
        self, dataset_name: str, metric: str, val: float, current_iter: int | str
    ) -> None:
        record = self.best_metric_results[dataset_name][metric]
        higher = record['better'] == 'higher'
        if val >= record['val'] if higher else val <= record['val']:
            record['val'], record['iter'] = val, current_iter

    def model_to_device(self, net: nn.Module) -> nn.Module:
        """Move a network to the device and wrap it for several processes or GPUs."""
        net = net.to(self.device)
        if self.is_train:
            net = prepare_for_training(net, self.opt['train'], self.opt['dist'])
        if self.sharding:
            return self.sharding.shard(net)
        if self.opt['dist'] and any(p.requires_grad for p in net.parameters()):
            # It would sort the gradients anew after its first step, that of a resume as well; and
            # sums of three numbers or more depend on where these stand.
            exact = self.opt.get('deterministic') and get_dist_info()[1] > 2
            return DistributedDataParallel(
                net,
                device_ids=[torch.cuda.current_device()] if self.device.type == 'cuda' else None,
                find_unused_parameters=bool(self.opt.get('find_unused_parameters') or exact),
            )
        if self.opt['num_gpu'] > 1 and not self.opt['dist']:
            logger.info(
                'DataParallel on %d GPUs; one process per GPU is faster: torchrun '
                '--nproc_per_node=%d basicsr/train.py -opt FILE',
                self.opt['num_gpu'],
                self.opt['num_gpu'],
            )
            return DataParallel(net, device_ids=list(range(self.opt['num_gpu'])))
        return net

    def get_bare_model(self, net: nn.Module) -> nn.Module:
        """The network inside its wrapper."""
        if isinstance(net, DataParallel | DistributedDataParallel):
            return net.module
        return net

    def trained_networks(self) -> dict[str, nn.Module]:
        """The networks and their averages by the names of the attributes, without wrappers."""
        nets = {
            name: self.get_bare_model(net)
            for name, net in vars(self).items()
            if name.startswith('net_') and isinstance(net, nn.Module)
        }
        return nets | ({'swa': self.swa.network} if self.swa is not None else {})

    def autocast(self) -> torch.autocast:
        """The context in which a step computes networks and losses: ``train.amp``."""
        return self.precision.autocast()

    def step(
        self,
        label: str,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Callable[[], Mapping[str, Tensor]],
    ) -> OrderedDict[str, Tensor]:
        """Make a step of an optimizer.

        Args:
            label: Of the network in the log, such as 'g'.
            net: The network that is trained.
            optimizer: Its optimizer.
            compute: Gives the losses of the batch, or of the part of it that ``parts`` has set.

        Returns:
            The losses, detached, of several parts their mean; and the norm of the gradient if it
            is clipped.
        """
        if self.channels_last is None:
            self._choose_layout()
        totals: OrderedDict[str, Tensor] = OrderedDict()

        def gradients() -> Tensor:
            optimizer.zero_grad()
            totals.clear()
            for share in self.parts(net):
                with self.autocast():
                    losses = compute()
                    total: Any = sum(losses.values())
                self.precision.backward(share * total, label)
                for name, loss in losses.items():
                    totals[name] = totals.get(name, 0) + share * loss.detach()
            return sum(totals.values())  # pyright: ignore[reportReturnType] (there is a loss)

        norms = self.minimise(label, optimizer, gradients)
        return OrderedDict(totals, **norms)

    def _choose_layout(self) -> None:
        """``train.channels_last: auto``: measure ``net_g``, in the first step."""
        net: nn.Module = self.get_bare_model(self.net_g)  # pyright: ignore[reportAttributeAccessIssue]
        part: Tensor = self.lq.chunk(self.accumulate)[0]  # pyright: ignore[reportAttributeAccessIssue]
        self._set_layout(from_master(channels_last_is_faster(net, part, self.autocast())))

    def _set_layout(self, channels_last: bool) -> None:
        self.channels_last = channels_last
        for name, net in vars(self).items():
            if channels_last and name.startswith('net_') and isinstance(net, nn.Module):
                use_channels_last(net)
        align_state(self.optimizers)

    def minimise(
        self, label: str, optimizer: torch.optim.Optimizer, gradients: Callable[[], Tensor]
    ) -> dict[str, Tensor]:
        """Make a step of an optimizer with the gradients that ``gradients`` computes anew.

        It returns the loss. Returns the norm of the gradient if it is clipped.
        """

        def gradients_and_loss() -> Tensor:
            loss = gradients()
            world_size = get_dist_info()[1]
            if world_size > 1:  # ranks that saw different losses would end with different weights
                dist.all_reduce(loss)
                loss /= world_size
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            self.precision.step_of_several(optimizer, label, gradients_and_loss)
            return {}
        return self.precision.step(optimizer, label, gradients())

    def parts(self, net: nn.Module, *more: str) -> Iterator[float]:
        """The batch in ``train.accumulate`` parts, to add up the gradients of ``net``.

        Within the loop ``batch_tensors``, and the attributes named as ``more``, are a part of the
        batch. It gives the part's share of the batch, which its losses are to be multiplied by, so
        that the gradients are those of the whole. They are averaged over the ranks in the last one.
        """
        if self.accumulate == 1:
            yield 1.0
            return
        whole = {n: getattr(self, n) for n in (*self.batch_tensors, *more) if hasattr(self, n)}
        count = min(self.accumulate, len(whole['lq']))
        chunks = {name: value.chunk(count) for name, value in whole.items()}
        outputs = []
        for number, part in enumerate(chunks['lq']):
            for name in whole:
                setattr(self, name, chunks[name][number])
            last = number == len(chunks['lq']) - 1
            if self.sharding:
                net.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
            alone = isinstance(net, DistributedDataParallel) and not last
            with net.no_sync() if alone else nullcontext():  # pyright: ignore[reportCallIssue]
                yield len(part) / len(whole['lq'])
            outputs.append(self.output.detach())  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in whole.items():
            setattr(self, name, value)
        self.output = torch.cat(outputs)

    @contextmanager
    def frozen(self, net: nn.Module) -> Iterator[nn.Module]:
        """Within the block gradients pass through the network, and none reach its parameters.

        The block gets it without DDP, which would wait for these gradients.
        """
        trained = [p for p in net.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield net.module if isinstance(net, DistributedDataParallel) else net
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    @master_only
    def print_network(self, net: nn.Module) -> None:
        """Log the class, the number of parameters and the layers."""
        bare = self.get_bare_model(net)
        name = type(bare).__name__
        if bare is not net:
            name = f'{type(net).__name__} - {name}'
        parameters = sum(p.numel() for p in bare.parameters())
        logger.info('Network: %s, with parameters: %s', name, f'{parameters:,d}')
        logger.info('%s', bare)

    def model_ema(self, decay: float = 0.999) -> None:
        """Move ``net_g_ema`` towards ``net_g``: ``ema = decay * ema + (1 - decay) * net``.

        Parameters are averaged; buffers, such as running statistics, are copied.
        """
        move_average(self.net_g_ema, self.get_bare_model(self.net_g), decay)  # pyright: ignore[reportAttributeAccessIssue]

    def update_averages(self, current_iter: int) -> None:
        """Let ``train.swa`` and ``train.posthoc_ema`` take in the weights after an iteration."""
        for average in (self.swa, self.power_averages):
            if average is not None:
                average.update(self.get_bare_model(self.net_g), current_iter)  # pyright: ignore[reportAttributeAccessIssue]

    def get_optimizer(
        self, optim_type: str, params: Any, lr: float, **kwargs: Any
    ) -> torch.optim.Optimizer:
        """An optimizer by name, see ``build_optimizer``."""
        optimizer = build_optimizer(optim_type, params, lr=lr, **kwargs)
        return self.sharding.prepare(optimizer) if self.sharding else optimizer

    def setup_schedulers(self) -> None:
        """One schedule per optimizer."""
        options = self.opt['train'].get('scheduler')
        if not options:
            return
        self.schedulers += [build_scheduler(optimizer, options) for optimizer in self.optimizers]
        last, total = sum(options.get('periods', [])), self.opt['train'].get('total_iter', 0)
        if 0 < last < total:
            logger.warning(
                'train.scheduler: the periods end after %d of %d iterations; from there on the '
                'learning rate stays at its minimum.',
                last,
                total,
            )

    def update_learning_rate(self, current_iter: int, warmup_iter: int = -1) -> None:
        """Set the rates for iteration ``current_iter``, counted from 1.

        In the warm-up the scheduled rate is multiplied by ``current_iter / warmup_iter``.
        """
        self.current_iter = current_iter
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group in groups:  # schedulers go on from the rate without the warm-up factor
            group['lr'] = group.get('lr_before_warmup', group['lr'])
        if current_iter > 1:
            for scheduler in self.schedulers:
                scheduler.step()
        factor = current_iter / warmup_iter if current_iter < warmup_iter else 1
        for group in groups:
            group['lr_before_warmup'] = group['lr']
            group['lr'] = group['lr'] * factor

    def get_current_learning_rate(self) -> list[float]:
        """The rate of every parameter group, optimizer by optimizer."""
        return [float(g['lr']) for optimizer in self.optimizers for g in optimizer.param_groups]

    def reduce_loss_dict(self, loss_dict: Mapping[str, Any]) -> OrderedDict:
        """The scalars of a step, cut from the graph and left on the device.

        They are averaged over the ranks, and made floats, only when a line is printed.
        """
        return OrderedDict(
            (name, value.detach() if isinstance(value, Tensor) else value)
            for name, value in loss_dict.items()
        )

    def get_current_log(self) -> OrderedDict:
        """The scalars of the last step as floats, averaged over the ranks.

        Every rank has to call it.
        """
        self.precision.check()
        if not self.log_dict:
            return OrderedDict()
        stacked = torch.stack(
            [
                torch.as_tensor(value, dtype=torch.float32, device=self.device).mean()
                for value in self.log_dict.values()
            ]
        )
        world_size = get_dist_info()[1]
        if world_size > 1:
            dist.all_reduce(stacked)
            stacked /= world_size
        return OrderedDict(zip(self.log_dict, stacked.tolist(), strict=True))

    def save_network(
        self,
        net: nn.Module | list[nn.Module],
        net_label: str,
        current_iter: int | str,
        param_key: str | list[str] = 'params',
    ) -> None:
        """Write one or several networks into ``<net_label>_<iter or latest>.pth``.

        Every rank has to call it, and rank 0 writes. ``logger.checkpoint_format`` may choose
        another format than ``pth``.

        Args:
            net: A network, or a list such as [net_g, net_g_ema].
            net_label: Such as 'net_g'.
            current_iter: -1 stands for 'latest'; a text for itself.
            param_key: Key or keys of the file.
        """
        nets = net if isinstance(net, list) else [net]
        keys = param_key if isinstance(param_key, list) else [param_key]
        if len(nets) != len(keys):
            raise UserError(f'{len(nets)} networks need as many param_keys, got {keys}.')
        label = 'latest' if current_iter == -1 else current_iter
        content = {
            key: dict(self.get_bare_model(n).state_dict())
            for n, key in zip(nets, keys, strict=True)
        }
        name = f'{net_label}_{label}{self._network_suffix}'
        self._save(content, Path(self.opt['path']['models']) / name)

    def _save(self, content: dict, path: Path) -> None:
        if self.sharding:
            content = self.sharding.gathered(content)
        if get_dist_info()[0] > 0:
            return
        if self.saver is not None:
            self.saver.save(content, path, self.checkpoints.write)
        else:
            self.checkpoints.write(copy_to_cpu(content), path)

    def load_network(
        self,
        net: nn.Module,
        load_path: str | Path,
        strict: bool = True,
        param_key: str | None = 'params',
    ) -> None:
        """Load weights into a network.

        Args:
            strict: All keys and shapes must agree; otherwise those that do are loaded.
            param_key: Key inside the file; None for a bare state dict. If the file has another
                of the usual keys instead, that one is taken and named.

        Raises:
            FileNotFoundError: No such file.
            ValueError: The file is damaged, does not fit (strict), or has nothing that fits.
        """
        net = self.get_bare_model(net)
        content = load_checkpoint(load_path)
        state, used_key = select_params(content, param_key, load_path)
        others = [k for k, v in content.items() if k != used_key and isinstance(v, Mapping)]
        own = net.state_dict()
        state = take_below_prefix(strip_wrapper_prefixes(state, own), own, load_path)
        with open(load_path, 'rb') as file:
            digest = hashlib.file_digest(file, 'sha256').hexdigest()[:8]
        logger.info(
            'Loading %s model from %s, with param key: [%s]%s. (sha256 %s…)',
            type(net).__name__,
            load_path,
            used_key,
            f' (also there: {", ".join(others)})' if others and used_key else '',
            digest,
        )
        if not self.is_train and used_key == 'params' and 'params_ema' in others:
            logger.warning(
                '%s also has the averaged weights, which validate while they are trained: '
                'path.param_key_g: params_ema tests those.',
                load_path,
            )
        if not strict:
            self._load_fitting(net, state, load_path)
            return
        try:
            net.load_state_dict(state, strict=True)
        except RuntimeError as error:
            text = '; '.join(self._differences(own, state)) or str(error).replace('\n', ' ')
            raise UserError(
                f'{load_path} does not fit {type(net).__name__}: {text}. {self._advice(net, state)}'
            ) from error

    def _load_fitting(
        self, net: nn.Module, state: Mapping[str, Tensor], load_path: str | Path
    ) -> None:
        own = net.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        logger.info(
            'Loaded %d of %d keys (%.0f %%).',
            len(fitting),
            len(own),
            100 * len(fitting) / max(len(own), 1),
        )
        for problem in self._differences(own, state):
            logger.warning('Not loaded: %s', problem)
        if not fitting:
            raise UserError(
                f'{load_path} has nothing that fits {type(net).__name__}. '
                f'{self._advice(net, state)}'
            )
        net.load_state_dict(fitting, strict=False)

    def _advice(self, net: nn.Module, state: Mapping[str, Tensor]) -> str:
        """What to do about weights that do not fit a network of this model."""
        if self.opt['path'].get('resume_state'):
            return 'A resume needs the network that was trained.'
        names = (name for name, other in self.trained_networks().items() if other is net)
        label = next(names, 'net_g').removeprefix('net_').removesuffix('_ema')
        options = self.opt.get(f'network_{label}') or {}
        scale = options.get('upscale') or options.get('scale') or self.opt.get('scale')
        return advice(net.state_dict(), state, label, scale)

    @staticmethod
    def _differences(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
        """What keeps ``state`` from fitting a network with the state dict ``own``, in words."""
        problems = []
        missing, unexpected = sorted(own.keys() - state), sorted(state.keys() - own.keys())
        if missing:
            problems.append(f'missing in the file: {some(missing)}')
        if unexpected:
            problems.append(f'not in the network: {some(unexpected)}')
        shapes = [
            f'{key} {tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the network'
            for key in own
            if key in state and state[key].shape != own[key].shape
        ]
        return problems + ([f'other shapes: {some(shapes)}'] if shapes else [])

    def save_training_state(self, epoch: int, current_iter: int) -> None:
        """Write ``<iter>.state``: all that a resume needs besides the networks.

        Randomness is counted (from ``manual_seed``, the iteration and the sample number), so no
        generator's state is part of it.
        """
        if current_iter == -1:
            return
        state = {
            'epoch': epoch,
            'iter': current_iter,
            'samples': self.samples_seen,
            'batch': self.batch_size,
            'manual_seed': self.opt.get('manual_seed'),
            'optimizers': [optimizer.state_dict() for optimizer in self.optimizers],
            'schedulers': [_without_functions(s.state_dict()) for s in self.schedulers],
            'best_metric_results': self.best_metric_results,
            'types': self._types(),
            'precision': self.precision.state_dict(),
            'channels_last': self.channels_last,
            **self.extra_state(),
        }
        if self.swa is not None:
            state['swa'] = self.swa.state_dict()
        if self.power_averages is not None:
            file = snapshot_file(self.opt['path']['models'], current_iter)
            self._save(self.power_averages.state_dict(), file)
        self._save(state, Path(self.opt['path']['training_states']) / f'{current_iter}.state')

    def save_best(self, current_iter: int) -> None:
        """After the validation of an iteration: ``logger.keep_best``.

        Every rank has to call it.
        """
        if self._best:
            record = self.best_metric_results.get(self._best['dataset'], {})
            best = record.get(self._best['metric'], {}).get('iter')
            if from_master(best == current_iter):
                with evaluation_weights(self.optimizers):
                    self.save_generator('best')

    def save_generator(self, label: int | str) -> None:
        """Write ``net_g_<label>``."""
        raise NotImplementedError(f'{type(self).__name__} defines no save_generator.')

    def extra_state(self) -> dict[str, Any]:
        """What else a training state has to hold: tensors and plain values.

        Every rank calls it, and what rank 0 returns is written.
        """
        return {}

    def load_extra_state(self, resume_state: Mapping[str, Any]) -> None:
        """Take back ``extra_state``."""

    def _types(self) -> dict[str, list[str]]:
        """Classes of the optimizers and schedules."""
        kinds = {'optimizers': self.optimizers, 'schedulers': self.schedulers}
        return {kind: [_type_of(part) for part in parts] for kind, parts in kinds.items()}

    def resume_training(self, resume_state: Mapping[str, Any]) -> None:
        """Continue optimizers, schedules and records from a training state.

        Raises:
            ValueError: It is of another kind of run.
        """
        try:
            self._resume(resume_state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            reason = f'{type(error).__name__}: {error}'
            raise UserError(f'the training state has what no run saves ({reason}).') from error
        self.load_extra_state(resume_state)

    def _resume(self, resume_state: Mapping[str, Any]) -> None:
        for kind in ('optimizers', 'schedulers'):
            if len(resume_state[kind]) != len(getattr(self, kind)):
                raise UserError(
                    f'the training state has {len(resume_state[kind])} {kind}, this model '
                    f'{len(getattr(self, kind))}: it belongs to another kind of run.'
                )
        types = resume_state.get('types', self._types())
        if types != self._types():
            raise UserError(
                f'the training state is one of {_listed(types)}, the option file asks for '
                f'{_listed(self._types())}. A resume goes on with the former; for the latter, '
                'begin a new run from the weights (path.pretrain_network_g).'
            )
        for optimizer, state in zip(self.optimizers, resume_state['optimizers'], strict=True):
            arguments = arguments_of(optimizer)
            for group, saved in zip(optimizer.param_groups, state['param_groups'], strict=False):
                rate = {'lr': saved.get('initial_lr', saved.get('lr_before_warmup', saved['lr']))}
                given = {k: v for k, v in group.items() if k in arguments}
                _warn_of_changes('optimizer', given, {**saved, **rate}, _GROUP_PROGRESS)
            try:
                optimizer.load_state_dict(deepcopy(state))
            except ValueError as error:
                raise UserError(
                    f'the training state does not fit the optimizer: {error}'
                ) from error
        align_state(self.optimizers)  # the run before may have had another layout
        train_weights(self.optimizers)
        for scheduler, state in zip(self.schedulers, resume_state['schedulers'], strict=True):
            _warn_of_changes('scheduler', scheduler.state_dict(), state, _PROGRESS)
            scheduler.load_state_dict(deepcopy(state))
        self.best_metric_results = deepcopy(resume_state.get('best_metric_results', {}))
        if 'precision' in resume_state:
            self.precision.load_state_dict(resume_state['precision'])
        if self.channels_last is None and resume_state.get('channels_last') is not None:
            self._set_layout(resume_state['channels_last'])
        if self.swa is not None and 'swa' in resume_state:
            self.swa.load_state_dict(resume_state['swa'])
        if self.power_averages is not None:
            models = folder_of_networks(self.opt['path'])
            self.power_averages.load_state_dict(load_snapshot(models, resume_state['iter']))

    def drop_later_files(self, iteration: int) -> None:
        """Take out of the run's folder what a run that goes on at an iteration makes again.

        ``samples_seen`` has been set to what was seen until then. Only rank 0 calls it, while no
        rank reads or writes there.
        """
        set_aside_later(self.opt['path'], iteration)
        drop_later_snapshots(self.opt['path']['models'], iteration)


def _without_functions(state: Any) -> Any:
    """The state of a schedule without functions, which some keep in it and a file cannot hold."""
    if type(state) is dict:
        return {k: _without_functions(v) for k, v in state.items() if not inspect.isroutine(v)}
    return [_without_functions(v) for v in state] if type(state) is list else state


def _type_of(part: Any) -> str:
    """The class of an optimizer or schedule, and in brackets of those it is made of."""
    inner = getattr(part, '_schedulers', getattr(part, 'optimizers', []))
    names = ', '.join(map(_type_of, inner))
    return f'{type(part).__name__}({names})' if inner else type(part).__name__


def _listed(types: Mapping[str, list[str]]) -> str:
    return ' and '.join(name for names in types.values() for name in names)


def _warn_of_changes(
    kind: str, current: Mapping[str, Any], saved: Mapping[str, Any], progress: set[str]
) -> None:
    """Say which edited options have no effect, since the state decides on a resume."""
    for key in current.keys() & saved.keys() - progress:
        if key == '_schedulers':
            for pair in zip(current[key], saved[key], strict=True):
                _warn_of_changes(kind, *pair, progress)
        elif current[key] != saved[key]:
            logger.warning(
                'Resume: %s.%s goes on as %s of the training state; %s of the option file is not '
                'used.',
                kind,
                key,
                saved[key],
                current[key],
            )

"""Networks of a model with their averages, optimizers and learning-rate schedules, by label."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from basicsr.archs import build_network
from basicsr.utils.dist_util import master_only
from basicsr.utils.errors import MissingKeyError, UserError
from basicsr.utils.option_section import place_of

from . import state
from .averaging import (
    Average,
    ExponentialAverage,
    PowerAverages,
    StochasticAverage,
    let_swa_take_over,
    move_average,
)
from .lr_scheduler import build_scheduler, warn_of_early_end
from .optimization import (
    align_state,
    build_optimizer,
    check_freeze,
    check_group_arguments,
    described_optimizer,
    has_two_weights,
    learning_rate_factor,
)
from .preparation import prepare_for_training, use_channels_last, wrapped

logger = logging.getLogger(__name__)


class Networks:
    """Builds, loads, averages and optimizes the networks of a model; see ``BaseModel``."""

    def __init__(self, opt: dict):
        self.opt = opt
        self.device = torch.device('cuda' if opt['num_gpu'] != 0 else 'cpu')
        self.is_train = opt['is_train']
        self.labels: list[str] = []
        self.averages: dict[str, list[Average]] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.current_iter = 0
        self.sharding = build_sharding(opt, self.device)
        layout = (opt.get('train') or {}).get('channels_last', False)
        self.channels_last = None if layout == 'auto' else layout
        self._placed: list[nn.Module] = []  # networks passed to model_to_device
        self._trained_by: dict[str, list[str]] = {}  # labels of networks, by label of the optimizer
        self._keys_in: dict[str, set[str | None]] = {}  # keys of state dicts, by file of weights
        self._has_moved_ema = False
        self._averaged_at = 0  # iteration

    def add_network(self, label: str, *, ema: bool = False) -> nn.Module:
        """Build ``network_<label>``, move it to the device, and load any pretrained weights.

        It becomes the attribute ``net_<label>`` and is then saved, resumed, and checked for
        non-finite values.

        Args:
            ema: When training, also keep the averages requested by ``train.ema_decay``, ``swa``
                and ``posthoc_ema``.
        """
        options = self.opt.get(f'network_{label}')
        if not options:
            raise MissingKeyError(
                f'network_{label}: required by {type(self).__name__}, and not given.'
            )
        net = self.model_to_device(build_network(options))
        setattr(self, f'net_{label}', net)
        self.labels.append(label)
        self.print_network(net)
        self._load_pretrained(net, label, self.opt['path'].get(f'param_key_{label}', 'params'))
        net.train(self.is_train)
        if ema and self.is_train:
            self.add_ema(label)
            self.add_averages(label)
        return net

    def add_ema(self, label: str) -> None:
        """Create ``net_<label>_ema`` if ``train.ema_decay`` is set."""
        train_opt = self.opt['train']
        if not train_opt.get('ema_decay'):
            return
        decay = train_opt['ema_decay']
        logger.info('Use Exponential Moving Average with decay: %s', decay)
        net = self._copy_of(label)  # a copy, so both start alike if weights are partially loaded
        self._load_average(net, label)
        setattr(self, f'net_{label}_ema', net)
        self.adopt_ema(label)

    def adopt_ema(self, label: str) -> None:
        """Register ``net_<label>_ema``, also one that a subclass has built, as an average.

        From then on it is saved, and updated in each iteration that does not call ``model_ema``.
        """
        net, train_opt = getattr(self, f'net_{label}_ema', None), self.opt['train']
        averages = self.averages.setdefault(label, [])
        if net is None or any(isinstance(average, ExponentialAverage) for average in averages):
            return
        decay, warmup = train_opt.get('ema_decay', 0), train_opt.get('ema_warmup', False)
        averages.insert(0, ExponentialAverage(net, decay, warmup))

    def add_averages(self, label: str) -> None:
        """Create the averages of ``train.swa`` and ``train.posthoc_ema``."""
        train_opt = self.opt['train']
        swa, lengths = train_opt.get('swa'), train_opt.get('posthoc_ema')
        averages = self.averages.setdefault(label, [])
        if self.sharding and (swa or lengths):
            raise UserError(
                'train.swa and train.posthoc_ema average whole networks, and train.sharding splits '
                'them: leave one of these out.'
            )
        if swa:
            average = StochasticAverage(self._copy_of(label), swa, train_opt['total_iter'])
            averages.append(average)
            logger.info('SWA: averages the weights from iteration %d on.', average.start)
        if lengths:
            lengths = [0.05, 0.1] if lengths is True else lengths
            averages.append(PowerAverages(lengths, lambda: self._copy_of(label)))

    def _copy_of(self, label: str) -> nn.Module:
        net = build_network(self.opt[f'network_{label}']).to(self.device)
        if self.channels_last:
            use_channels_last(net)
        net = self.sharding.shard(net) if self.sharding else net
        move_average(net, self.get_bare_model(self.network(label)), 0)
        return net.eval()

    def network(self, label: str) -> nn.Module:
        """The trained network of a label, in its wrapper."""
        return getattr(self, f'net_{label}')

    def evaluated_network(self, label: str) -> nn.Module:
        """The network of a label used for inference: its average, if there is one."""
        return getattr(self, f'net_{label}_ema', None) or self.get_bare_model(self.network(label))

    def trained_networks(self) -> dict[str, nn.Module]:
        """The unwrapped networks and averages, by attribute name."""
        placed = {id(net) for net in self._placed}
        nets = {
            name: self.get_bare_model(value)
            for name, value in vars(self).items()
            if isinstance(value, nn.Module) and id(value) in placed
        }
        for label, averages in self.averages.items():
            for average in averages:
                if average.weights is not None:
                    nets[f'net_{label}{average.key.removeprefix("params")}'] = average.weights
        return nets

    def model_to_device(self, net: nn.Module) -> nn.Module:
        """Move a network to the device and wrap it for several processes or GPUs."""
        net = net.to(self.device)
        if self.is_train:
            net = prepare_for_training(net, self.opt['train'], self.opt['dist'])
        net = self.sharding.shard(net) if self.sharding else wrapped(net, self.opt, self.device)
        self._placed.append(net)
        return net

    def get_bare_model(self, net: nn.Module) -> nn.Module:
        """The network inside its wrapper."""
        if isinstance(net, DataParallel | DistributedDataParallel):
            return net.module
        return net

    @master_only
    def print_network(self, net: nn.Module) -> None:
        """Log the class, the number of parameters and the layers."""
        bare = self.get_bare_model(net)
        name = type(bare).__name__
        if bare is not net:
            name = f'{type(net).__name__} - {name}'
        parameters = sum(p.numel() for p in bare.parameters())
        logger.info('Network: %s, with parameters: %s', name, f'{parameters:,d}')
        logger.info('%s', bare, extra={'file_only': True})

    def _load_pretrained(self, net: nn.Module, label: str, param_key: str | None) -> None:
        """Load the weights of ``path.pretrain_network_<label>``, if it is set."""
        path = self.opt['path']
        file, strict = path.get(f'pretrain_network_{label}'), path.get(f'strict_load_{label}', True)
        if file is not None and not isinstance(file, str | Path):
            where = place_of(path, f'pretrain_network_{label}')
            raise UserError(f'{where} must be the name of a file: {file!r}')
        if not isinstance(param_key, str | None):
            where = place_of(path, f'param_key_{label}')
            raise UserError(f'{where} must be a key of the file: {param_key!r}')
        if not isinstance(strict, bool):
            where = place_of(path, f'strict_load_{label}')
            raise UserError(f'{where} must be true or false: {strict!r}')
        if file is not None:
            self.load_network(net, file, strict, param_key)

    def _load_average(self, net: nn.Module, label: str) -> None:
        """Load ``params_ema`` into a copy of the network, if the file has them."""
        file = self.opt['path'].get(f'pretrain_network_{label}')
        keys = self._keys_in.get(str(file))
        if keys is None or 'params_ema' in keys:
            self._load_pretrained(net, label, 'params_ema')
            return
        level = logging.WARNING if self.opt['path'].get('resume_state') else logging.INFO
        text = 'Loading: %s has no params_ema; the average of net_%s begins with the weights above.'
        logger.log(level, text, file, label)

    def load_network(
        self,
        net: nn.Module,
        load_path: str | Path,
        strict: bool = True,
        param_key: str | None = 'params',
    ) -> None:
        """Load weights into a network.

        Args:
            strict: All keys and shapes must match; otherwise only matching ones are loaded.
            param_key: Key inside the file, or the prefix of the names of one of several networks in
                it; None for a bare state dict. If the file has another of the usual keys instead,
                that one is used, with a warning.

        Raises:
            FileNotFoundError: No such file.
            ValueError: The file is damaged, does not fit (strict), or has nothing that fits.
        """
        name = next((name for name, value in vars(self).items() if value is net), 'net_g')
        label = name.removeprefix('net_').removesuffix('_ema')
        bare = self.get_bare_model(net)
        key, others = state.load_weights(bare, load_path, param_key, strict, label, self.opt)
        self._keys_in[str(load_path)] = {key, *others}
        if not self.is_train and key == 'params' and 'params_ema' in others:
            logger.warning(
                '%s: this test uses params, the trained weights; validations of the training used '
                'their average. To test that, set path.param_key_g: params_ema.',
                load_path,
            )

    @contextmanager
    def frozen(self, net: nn.Module) -> Iterator[nn.Module]:
        """Freeze a network's parameters while gradients still flow through to its input.

        Yields the network without DDP, which would wait for the parameters' gradients.
        """
        trained = [p for p in net.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield net.module if isinstance(net, DistributedDataParallel) else net
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    def set_layout(self, channels_last: bool) -> None:
        """Choose the memory layout of networks and batches."""
        self.channels_last = channels_last
        for net in self.trained_networks().values() if channels_last else ():
            use_channels_last(net)
        align_state(self.optimizers)

    def update_averages(self, current_iter: int) -> None:
        """Update all averages with the current weights, once per iteration."""
        if self._averaged_at == current_iter:
            return
        self._averaged_at = current_iter
        for label, averages in self.averages.items():
            net = self.get_bare_model(self.network(label))
            for average in averages:
                is_moved = label == 'g' and isinstance(average, ExponentialAverage)
                if not (is_moved and self._has_moved_ema):
                    average.update(net, current_iter)

    def model_ema(self, decay: float = 0.999) -> None:
        """Move ``net_g_ema`` towards ``net_g``: ``ema = decay * ema + (1 - decay) * net``.

        Parameters are averaged; buffers, such as running statistics, are copied.
        """
        self._has_moved_ema = True
        average: nn.Module = vars(self)['net_g_ema']
        move_average(average, self.get_bare_model(self.network('g')), decay)

    def add_optimizer(self, label: str, nets: Iterable[str] = ()) -> torch.optim.Optimizer:
        """Build the optimizer that ``train.optim_<label>`` describes, as ``optimizer_<label>``.

        Args:
            nets: Labels of the networks it trains; default: the network of the same label.
        """
        self._trained_by[label] = list(nets) or [label]
        trained = {
            name: self.get_bare_model(self.network(name)) for name in self._trained_by[label]
        }
        name, groups, options = described_optimizer(self.opt, f'optim_{label}', trained)
        optimizer = self.get_optimizer(name, groups, **options)
        check_group_arguments(optimizer, groups, f'optim_{label}')
        setattr(self, f'optimizer_{label}', optimizer)
        self.optimizers.append(optimizer)
        return optimizer

    def get_optimizer(
        self, optim_type: str, params: Any, lr: float, **kwargs: Any
    ) -> torch.optim.Optimizer:
        """Build an optimizer by name, see ``build_optimizer``."""
        optimizer = build_optimizer(optim_type, params, lr=lr, **kwargs)
        return self.sharding.prepare(optimizer) if self.sharding else optimizer

    def setup_schedulers(self) -> None:
        """Build one schedule per optimizer, after all networks and optimizers have been added."""
        train_opt = self.opt['train']
        if options := train_opt.get('scheduler'):
            self.schedulers += [build_scheduler(own, options) for own in self.optimizers]
            warn_of_early_end(options, train_opt.get('total_iter', 0))
        averaged = [average for averages in self.averages.values() for average in averages]
        if averaged and any(map(has_two_weights, self.optimizers)):
            raise UserError(
                'train.ema_decay, swa and posthoc_ema average the weights that gradients are taken '
                'at, and a schedule-free optimizer has an average of its own: set ema_decay: 0, '
                'and leave the others out.'
            )
        nets = {label: self.get_bare_model(self.network(label)) for label in self.labels}
        check_freeze(train_opt.get('freeze') or [], nets)
        swa = train_opt.get('swa') or {}
        for label, optimizer in self._optimizers_by_label().items() if swa.get('lr') else ():
            for average in self.averages.get(label, ()):
                if isinstance(average, StochasticAverage):
                    rates = {**swa, 'lr': swa['lr'] * learning_rate_factor(self.opt)}
                    let_swa_take_over(self.schedulers, optimizer, rates, average.start)

    def _optimizers_by_label(self) -> dict[str, torch.optim.Optimizer]:
        named = {label: getattr(self, f'optimizer_{label}', None) for label in self.labels}
        return {label: optimizer for label, optimizer in named.items() if optimizer is not None}

    def update_learning_rate(self, current_iter: int, warmup_iter: int = -1) -> None:
        """Set the learning rates for iteration ``current_iter``, counted from 1.

        During warm-up the scheduled rate is multiplied by ``current_iter / warmup_iter``.
        """
        self.current_iter = current_iter
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group in groups:  # schedulers continue from the rate without the warm-up factor
            group['lr'] = group.get('lr_before_warmup', group['lr'])
        if current_iter > 1:
            for scheduler in self.schedulers:
                scheduler.step()
        factor = current_iter / warmup_iter if current_iter < warmup_iter else 1
        for group in groups:
            group['lr_before_warmup'] = group['lr']
            group['lr'] = group['lr'] * factor

    def get_current_learning_rate(self) -> list[float]:
        """The learning rates of all parameter groups, optimizer by optimizer."""
        return [float(g['lr']) for optimizer in self.optimizers for g in optimizer.param_groups]


def build_sharding(opt: Mapping[str, Any], device: torch.device) -> Any:
    """Build the ``Sharding`` of a model.

    Returns None unless ``train.sharding`` is set and there are several processes.
    """
    train_opt = opt.get('train') or {}
    if not train_opt.get('sharding'):
        return None
    if not opt['dist']:
        if opt['num_gpu'] > 1:
            raise UserError(
                f'train.sharding needs one process per GPU, and num_gpu is {opt["num_gpu"]} in a '
                f'single one: torchrun --nproc_per_node={opt["num_gpu"]} basicsr/train.py -opt FILE'
            )
        logger.info('train.sharding has no effect: this is the only process.')
        return None
    if train_opt.get('channels_last'):
        raise UserError('train.sharding needs contiguous weights: leave channels_last out.')
    from .sharding import Sharding  # takes a second to import

    return Sharding(device)

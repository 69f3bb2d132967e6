"""Weight averaging: EMA, SWA (stochastic weight averaging) and post-hoc EMA.

SWA: Pavel Izmailov, Dmitrii Podoprikhin, Timur Garipov, Dmitry Vetrov, Andrew Gordon Wilson,
"Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018,
https://arxiv.org/abs/1803.05407. Post-hoc EMA: see ``posthoc``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR
from torch.optim.swa_utils import SWALR, get_ema_multi_avg_fn, update_bn

from basicsr.data import shard
from basicsr.data.progressive import Schedule
from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.errors import UserError
from basicsr.utils.rng import seed_all

from .posthoc import exponent

logger = logging.getLogger(__name__)


@torch.no_grad()
def move_average(average: nn.Module, net: nn.Module, decay: float) -> None:
    """``average = decay * average + (1 - decay) * net``; buffers are copied."""
    get_ema_multi_avg_fn(decay)(list(average.parameters()), list(net.parameters()), None)
    copy_buffers(average, net)


@torch.no_grad()
def copy_buffers(average: nn.Module, net: nn.Module) -> None:
    """Copy the buffers of a network, such as running statistics, to its average."""
    for own, current in zip(average.buffers(), net.buffers(), strict=True):
        own.copy_(current)


class Average:
    """An average of the weights of one network.

    Attributes:
        networks: The averaged networks, on the device of the trained one.
        key: Key of ``weights`` in the network's checkpoint.
    """

    key = ''

    def __init__(self, networks: list[nn.Module]):
        self.networks = networks

    @property
    def weights(self) -> nn.Module | None:
        """The averaged network saved with the trained one; None if there is none, or not yet."""
        return None

    def update(self, net: nn.Module, iteration: int) -> None:
        """Add the weights after an iteration, counted from 1; call it for every iteration."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs in addition to the network's checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""


class ExponentialAverage(Average):
    """Exponential moving average of the weights (``train.ema_decay``).

    Args:
        network: A copy of the network.
        decay: Decay per iteration.
        warmup: Whether to lower the decay at first, to (1 + n) / (10 + n) at iteration n;
            otherwise the initial weights dominate early averages.
    """

    key = 'params_ema'

    def __init__(self, network: nn.Module, decay: float, warmup: bool = False):
        super().__init__([network])
        self.decay, self.warmup = decay, warmup

    @property
    def weights(self) -> nn.Module:
        return self.networks[0]

    def update(self, net: nn.Module, iteration: int) -> None:
        early = (1 + iteration) / (10 + iteration)
        move_average(self.weights, net, min(self.decay, early) if self.warmup else self.decay)


class StochasticAverage(Average):
    """Stochastic weight averaging: the mean of periodically sampled weights (``train.swa``).

    Args:
        network: A copy of the network.
        options: All of ``train.swa``.
        total_iter: Iterations of the run.

    Attributes:
        start: The first iteration whose weights are averaged.
        count: How many sets of weights have been averaged.
    """

    key = 'params_swa'

    def __init__(self, network: nn.Module, options: Mapping[str, Any], total_iter: int):
        super().__init__([network])
        self.start = _first_iteration(options['start'], total_iter)
        self.every, self.bn_batches = options['every'], options['bn_batches']
        self.count = 0

    @property
    def network(self) -> nn.Module:
        return self.networks[0]

    @property
    def weights(self) -> nn.Module | None:
        return self.network if self.count else None

    def update(self, net: nn.Module, iteration: int) -> None:
        if iteration < self.start:
            return
        if (iteration - self.start) % self.every == 0:
            move_average(self.network, net, self.count / (self.count + 1))
            self.count += 1
        else:
            copy_buffers(self.network, net)

    def state_dict(self) -> dict[str, Any]:
        return {'count': self.count, 'params': dict(self.network.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state['params'])
        self.count = state['count']


def _first_iteration(start: int | float, total_iter: int) -> int:
    first = max(1, round(start * total_iter)) if start < 1 else int(start)
    if first > total_iter or (start >= 1 and first != start):
        raise UserError(
            f'train.swa.start is {start}: give a fraction of the run below 1, or an iteration up '
            f'to train.total_iter, {total_iter}.'
        )
    return first


class PowerAverages(Average):
    """Averages with power-function profiles, stored as snapshots (``train.posthoc_ema``).

    Args:
        lengths: The relative length of each average; one network each.
        copy_network: Returns a copy of the network.
    """

    def __init__(self, lengths: Sequence[float], copy_network: Callable[[], nn.Module]):
        if len(set(lengths)) < 2:
            raise UserError(
                f'train.posthoc_ema needs two lengths or more, such as [0.05, 0.1], got {lengths}.'
            )
        try:
            self._exponents = [exponent(length) for length in lengths]
        except ValueError as error:
            raise UserError(f'train.posthoc_ema: {error}') from error
        self.lengths = list(lengths)
        super().__init__([copy_network() for _ in lengths])

    def update(self, net: nn.Module, iteration: int) -> None:
        for g, average in zip(self._exponents, self.networks, strict=True):
            move_average(average, net, (1 - 1 / iteration) ** (g + 1))

    def state_dict(self) -> dict[str, Any]:
        """The snapshot, written for ``basicsr average`` and for a resume."""
        return {
            'lengths': self.lengths,
            'averages': [dict(network.state_dict()) for network in self.networks],
            'buffers': [name for name, _ in self.networks[0].named_buffers()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state['lengths'] != self.lengths:
            raise UserError(
                f'train.posthoc_ema: the run that is resumed has the lengths {state["lengths"]}, '
                f'not {self.lengths}. They cannot be changed within a run.'
            )
        for network, average in zip(self.networks, state['averages'], strict=True):
            network.load_state_dict(average)


def let_swa_take_over(
    schedulers: list[Any], optimizer: Optimizer, options: Mapping[str, Any], start: int
) -> None:
    """Anneal the rates of an optimizer to ``train.swa.lr`` after iteration ``start``.

    Args:
        schedulers: Schedulers of all optimizers; the one of this optimizer, if any, ends at
            ``start``.
    """
    index = next((i for i, s in enumerate(schedulers) if s.optimizer is optimizer), None)
    before = ConstantLR(optimizer, factor=1) if index is None else schedulers[index]
    if isinstance(before, SequentialLR | ChainedScheduler):  # torch would restart it
        raise UserError(
            f'train.swa.lr cannot take over from a {type(before).__name__}: leave lr out, and let '
            'train.scheduler itself end with the rate for SWA.'
        )
    after = SWALR(optimizer, options['lr'], options['anneal_iters'], options['anneal'])
    both = SequentialLR(optimizer, [before, after], [start])
    if index is None:
        schedulers.insert(0, both)
    else:
        schedulers[index] = both


def finish_swa(model: Any, batches: Iterator[Mapping[str, Any]], schedule: Schedule) -> None:
    """Recompute the batch-norm statistics of averaged networks on training batches.

    The trained network's statistics do not match the averaged weights. Every rank has to call it.

    Args:
        batches: The training batches after the last step.
        schedule: The sizes of the batches of all ranks.
    """
    for label, averages in model.averages.items():
        for average in averages:
            if isinstance(average, StochasticAverage):
                _finish_swa(model, label, average, batches, schedule)


def _finish_swa(
    model: Any,
    label: str,
    swa: StochasticAverage,
    batches: Iterator[Mapping[str, Any]],
    schedule: Schedule,
) -> None:
    if swa.count == 0:
        logger.warning('train.swa: no weights have entered the average; it is not written.')
        return
    if swa.bn_batches == 0 or not _learns_statistics(model.network(label)):
        return
    logger.info('SWA: statistics of batch norms from %d batches.', swa.bn_batches)
    update_bn(_inputs(model, label, swa.bn_batches, batches, schedule), swa.network)
    world_size = get_dist_info()[1]
    if world_size == 1:
        return
    norms: list[Any] = [module for module in swa.network.modules() if _has_statistics(module)]
    for norm in norms:
        for statistic in (norm.running_mean, norm.running_var):
            dist.all_reduce(statistic)
            statistic /= world_size


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.track_running_stats


def _learns_statistics(net: nn.Module) -> bool:
    """Whether the network has batch norms, none of them frozen."""
    norms = [module for module in net.modules() if _has_statistics(module)]
    return bool(norms) and all(norm.training for norm in norms)


def _inputs(
    model: Any,
    label: str,
    count: int,
    batches: Iterator[Mapping[str, Any]],
    schedule: Schedule,
) -> Iterator[Tensor]:
    first = model.opt['train']['total_iter'] + 1
    for number in range(first, first + count):
        model.samples_seen += schedule.batch_size(number)
        seed_all(model.opt['manual_seed'], get_dist_info()[0], number)
        model.feed_data(next(batches))
        yield model.input_of(label)


def validate_swa(model: Any, dataloader: Any, current_iter: int, tb_logger: Any) -> None:
    """Score the averaged networks, if there are any, as the set ``<name> (SWA)``.

    Its images are not written.
    """
    averaged = {
        f'net_{label}_ema': average.weights
        for label, averages in model.averages.items()
        for average in averages
        if isinstance(average, StochasticAverage) and average.weights is not None
    }
    if not averaged:
        return
    # Validation loops use net_g_ema for inference, if the model has it.
    before = {key: value for key, value in vars(model).items() if key in averaged}
    vars(model).update(averaged)
    try:
        name = f'{dataloader.dataset.opt["name"]} (SWA)'
        model.validation(shard(dataloader, 0, 1, name), current_iter, tb_logger)
    finally:
        for key in averaged:
            delattr(model, key)
        vars(model).update(before)

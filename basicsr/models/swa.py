"""Stochastic weight averaging (SWA): Pavel Izmailov, Dmitrii Podoprikhin, Timur Garipov, Dmitry
Vetrov, Andrew Gordon Wilson, "Averaging Weights Leads to Wider Optima and Better Generalization",
UAI 2018, https://arxiv.org/abs/1803.05407
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR
from torch.optim.swa_utils import SWALR, update_bn

from basicsr.data import shard
from basicsr.data.progressive import Schedule
from basicsr.utils.dist_util import get_dist_info
from basicsr.utils.errors import UserError
from basicsr.utils.rng import seed_all

from .averaging import copy_buffers, move_average

logger = logging.getLogger(__name__)


class StochasticAverage:
    """The mean of a network's weights after every so many iterations, for ``train.swa``.

    Args:
        options: All of ``train.swa``.
        total_iter: Iterations of the run.
        network: A copy of the network, which is to hold the mean.

    Attributes:
        start: The first iteration whose weights enter.
        count: How many weights have entered.
    """

    def __init__(self, options: Mapping[str, Any], total_iter: int, network: nn.Module):
        self.start = _first_iteration(options['start'], total_iter)
        self.every, self.bn_batches = options['every'], options['bn_batches']
        self.network = network
        self.count = 0

    def update(self, net: nn.Module, iteration: int) -> None:
        """Take in the weights after an iteration, if it is their turn."""
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
            f'train.swa.start is {start}: give a share of the run below 1, or a whole iteration up '
            f'to train.total_iter, {total_iter}.'
        )
    return first


def let_swa_take_over(
    schedulers: list[Any], optimizer: Optimizer, options: Mapping[str, Any], start: int
) -> None:
    """Have the rates of an optimizer go over to ``train.swa.lr`` after iteration ``start``.

    Args:
        schedulers: Of all optimizers; that of this one, if any, ends at ``start``.
    """
    index = next((i for i, s in enumerate(schedulers) if s.optimizer is optimizer), None)
    before = ConstantLR(optimizer, factor=1) if index is None else schedulers[index]
    if isinstance(before, SequentialLR | ChainedScheduler):  # torch would begin it a second time
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
    """Let the averaged network's batch norms take their statistics from training batches.

    Those of the trained network belong to other weights. Every rank has to call it.

    Args:
        batches: The training batches after the last step.
        schedule: Of the batches of all ranks.
    """
    swa = model.swa
    if swa is None:
        return
    if swa.count == 0:
        logger.warning('train.swa: no weights have entered the average; it is not written.')
    if swa.count == 0 or swa.bn_batches == 0 or not _learns_statistics(model.net_g):
        return
    logger.info('SWA: statistics of batch norms from %d batches.', swa.bn_batches)
    update_bn(_inputs(model, batches, schedule), swa.network)
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
    """Whether there are batch norms, and none of them frozen."""
    norms = [module for module in net.modules() if _has_statistics(module)]
    return bool(norms) and all(norm.training for norm in norms)


def _inputs(
    model: Any, batches: Iterator[Mapping[str, Any]], schedule: Schedule
) -> Iterator[Tensor]:
    first = model.opt['train']['total_iter'] + 1
    for number in range(first, first + model.swa.bn_batches):
        model.samples_seen += schedule.batch_size(number)
        seed_all(model.opt['manual_seed'], get_dist_info()[0], number)
        model.feed_data(next(batches))
        yield model.lq


def validate_swa(model: Any, dataloader: Any, current_iter: int, tb_logger: Any) -> None:
    """Score the averaged network, if there is one, as the set ``<name> (SWA)``.

    Its images are not written.
    """
    if model.swa is None or model.swa.count == 0:
        return
    # Validation loops restore with net_g_ema, if the model has it.
    before = {k: value for k, value in vars(model).items() if k == 'net_g_ema'}
    model.net_g_ema = model.swa.network
    try:
        name = f'{dataloader.dataset.opt["name"]} (SWA)'
        model.validation(shard(dataloader, 0, 1, name), current_iter, tb_logger)
    finally:
        del model.net_g_ema
        vars(model).update(before)

"""Learning-rate schedulers with restarts: multi-step decay and cosine annealing."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from basicsr.utils.errors import CheckError


class MultiStepRestartLR(LRScheduler):
    """Multi-step decay with restarts at a fraction of the initial rate.

    Args:
        milestones: Iterations after which the rate is multiplied by ``gamma``; one given twice
            counts twice.
        restarts: Iterations after which the rate is reset to the initial rate times its weight.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        restarts: Sequence[int] = (0,),
        restart_weights: Sequence[float] = (1,),
        last_epoch: int = -1,
    ):
        if len(restarts) != len(restart_weights):
            raise CheckError(
                f'restarts {restarts} need as many restart_weights: {restart_weights}.'
            )
        self.milestones = Counter(int(milestone) for milestone in milestones)
        self.gamma = gamma
        self.restarts = [int(restart) for restart in restarts]
        self.restart_weights = list(restart_weights)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        groups = self.optimizer.param_groups
        if self.last_epoch in self.restarts:
            weight = self.restart_weights[self.restarts.index(self.last_epoch)]
            return [group['initial_lr'] * weight for group in groups]
        factor = self.gamma ** self.milestones[self.last_epoch]
        return [group['lr'] * factor for group in groups]


def get_position_from_periods(iteration: int, cumulative_period: Sequence[int]) -> int:
    """Index of the period that contains ``iteration``; a boundary belongs to the period it ends.

    Beyond the last period it stays the index of the last.
    """
    return min(bisect_left(cumulative_period, iteration), len(cumulative_period) - 1)


class CosineAnnealingRestartLR(LRScheduler):
    """Cosine decay to ``eta_min`` in each period, from the initial rate times the period's weight.

    After the last period the rate stays at ``eta_min``. SGDR: Loshchilov & Hutter, ICLR 2017,
    https://arxiv.org/abs/1608.03983.

    Args:
        periods: Lengths in iterations.
        restart_weights: A weight for each period.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        periods: Sequence[int],
        restart_weights: Sequence[float] = (1,),
        eta_min: float = 0,
        last_epoch: int = -1,
    ):
        if len(periods) != len(restart_weights):
            raise CheckError(f'periods {periods} need as many restart_weights: {restart_weights}.')
        self.periods = [int(period) for period in periods]
        self.restart_weights = list(restart_weights)
        self.eta_min = eta_min
        self.cumulative_period = list(accumulate(self.periods))
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        index = get_position_from_periods(self.last_epoch, self.cumulative_period)
        period, weight = self.periods[index], self.restart_weights[index]
        elapsed = self.last_epoch - (self.cumulative_period[index] - period)
        share = 0.5 * (1 + math.cos(math.pi * min(elapsed / period, 1)))
        return [self.eta_min + weight * share * (rate - self.eta_min) for rate in self.base_lrs]

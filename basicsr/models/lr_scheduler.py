"""Learning-rate schedulers with restarts, and building any scheduler from options."""

import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from basicsr.utils.errors import ArgumentError, CheckError, UserError
from basicsr.utils.registry import argument_problems, wrong_kinds
from basicsr.utils.text import did_you_mean

logger = logging.getLogger(__name__)

_OF_SCHEDULERS = ('SequentialLR', 'ChainedScheduler')


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


def build_scheduler(optimizer: Optimizer, options: Mapping[str, Any]) -> Any:
    """A scheduler of this package or of ``torch.optim.lr_scheduler``, stepped once per iteration.

    ``SequentialLR`` and ``ChainedScheduler`` have ``schedulers``, a list of such options.

    Raises:
        ValueError: There is no such scheduler, or it cannot be built from the options.
    """
    if problems := scheduler_problems(options):
        raise UserError(f'train.scheduler: {" ".join(problems)}')
    options = dict(options)
    name = options.pop('type')
    schedule = _schedulers()[name]
    try:
        if name in _OF_SCHEDULERS:
            inner = [build_scheduler(optimizer, part) for part in options.pop('schedulers')]
            parts = {'schedulers': inner, 'optimizer': optimizer}
            return schedule(**parts, **options)
        return schedule(optimizer, **options)
    except (LookupError, TypeError, ValueError) as error:
        raise ArgumentError(
            f'train.scheduler: {error}, while building {name} from {options}'
        ) from error


def warn_of_early_end(options: Mapping[str, Any], total_iter: int) -> None:
    """Warn if the periods of a schedule end before the run."""
    last = sum(options.get('periods', []))
    if 0 < last < total_iter:
        logger.warning(
            'train.scheduler: the periods end after %d of %d iterations; from there on the '
            'learning rate stays at its minimum.',
            *(last, total_iter),
        )


def scheduler_problems(options: Mapping[str, Any]) -> list[str]:
    """What keeps ``build_scheduler`` from building these options."""
    name, known = options.get('type'), _schedulers()
    if name is None:
        return [f'needs a type, got {dict(options)}.']
    if name == 'ReduceLROnPlateau':
        return [
            'ReduceLROnPlateau follows a score, but learning rates here follow the iteration; use '
            'MultiStepLR.'
        ]
    if name not in known:
        return [f"'{name}' is unknown{did_you_mean(name, known)} There are {', '.join(known)}."]
    given = [key for key in options if key != 'type']
    problems = argument_problems(known[name], given, ('optimizer',))
    problems += [f'{key} {problem}' for key, problem in wrong_kinds(known[name], options)]
    if name in _OF_SCHEDULERS and 'schedulers' in options:
        inner = options['schedulers']
        if not (isinstance(inner, list) and inner and all(isinstance(p, Mapping) for p in inner)):
            return [*problems, f'schedulers must be a list of sections with a type, got {inner!r}.']
        problems += [problem for part in inner for problem in scheduler_problems(part)]
    return problems


def _schedulers() -> dict[str, type]:
    """Scheduler classes by the names that options use."""
    known = {
        key: value
        for key, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, LRScheduler)
    }
    for unusable in ('LRScheduler', '_LRScheduler', 'ReduceLROnPlateau'):
        known.pop(unusable, None)
    return known | {
        'MultiStepLR': MultiStepRestartLR,  # equal without restarts
        'MultiStepRestartLR': MultiStepRestartLR,
        'CosineAnnealingRestartLR': CosineAnnealingRestartLR,
    }

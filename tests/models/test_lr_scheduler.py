"""Learning-rate schedules against the reference and beyond it."""

import pytest
import torch
from golden import call, params, recipe, target

from basicsr.models.lr_scheduler import CosineAnnealingRestartLR, MultiStepRestartLR


def optimizer(*rates):
    groups = [{'params': [torch.nn.Parameter(torch.zeros(1))], 'lr': rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def rates(scheduler_class, steps, lrs=(1.0,), **kwargs):
    sgd = optimizer(*lrs)
    scheduler = scheduler_class(sgd, **kwargs)
    history = []
    for _ in range(steps):
        history.append([group['lr'] for group in sgd.param_groups])
        sgd.step()
        scheduler.step()
    return history


@pytest.mark.parametrize('case', params('schedulers', lambda c: c['kind'] == 'lr_class'))
def test_rates_are_those_of_the_reference(case):
    history = rates(target(case), case['iters'], case['lrs'], **case['kwargs'])
    assert recipe.compare(case, torch.tensor(history, dtype=torch.float64)) is None


@pytest.mark.parametrize('case', params('schedulers', lambda c: c['kind'] == 'call'))
def test_positions_in_periods_are_those_of_the_reference(case):
    assert recipe.compare(case, call(case)) is None


@pytest.mark.parametrize(
    ('scheduler', 'kwargs', 'expected'),
    [
        (
            MultiStepRestartLR,
            {'milestones': [3, 6, 6], 'gamma': 0.5},
            [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.125, 0.125, 0.125],
        ),
        (
            MultiStepRestartLR,
            {'milestones': [2, 4], 'restarts': [0, 6], 'restart_weights': [1, 0.5], 'gamma': 0.1},
            [1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.5, 0.5, 0.5],
        ),
        (
            CosineAnnealingRestartLR,
            {'periods': [4, 4], 'restart_weights': [1, 0.5], 'eta_min': 0.1},
            [
                *[1.0, 0.8681980515, 0.55, 0.2318019485, 0.1],
                *[0.4840990258, 0.325, 0.1659009742, 0.1],
            ],
        ),
    ],
)
def test_rates_of_the_reference_for_base_rate_one(scheduler, kwargs, expected):
    history = [rate[0] for rate in rates(scheduler, len(expected), **kwargs)]
    assert history == pytest.approx(expected, abs=1e-9)


def test_after_the_last_period_the_cosine_stays_at_its_minimum():
    history = rates(CosineAnnealingRestartLR, 16, periods=[10], eta_min=1e-3)
    assert [rate[0] for rate in history[10:]] == pytest.approx([1e-3] * 6, abs=1e-12)


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match='as many restart_weights'):
        CosineAnnealingRestartLR(optimizer(1.0), periods=[4, 4])
    with pytest.raises(ValueError, match='as many restart_weights'):
        MultiStepRestartLR(optimizer(1.0), [1], restarts=[0, 2])

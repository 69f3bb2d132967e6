"""Learning-rate schedules against the reference and beyond it."""

import pytest
import torch
from golden import call, params, recipe, target
from runs import checkpoint, differences, log_text
from torch import nn

from basicsr.models.lr_scheduler import (
    CosineAnnealingRestartLR,
    MultiStepRestartLR,
    build_scheduler,
)


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


def built_rates(options, count):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, options)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        scheduler.step()
    return found, scheduler


def test_schedules_follow_each_other_and_multiply():
    sequence = {
        'type': 'SequentialLR',
        'milestones': [3],
        'schedulers': [
            {'type': 'ConstantLR', 'factor': 0.1, 'total_iters': 100},
            {'type': 'MultiStepLR', 'milestones': [2], 'gamma': 0.5},
        ],
    }
    assert built_rates(sequence, 6)[0] == pytest.approx([0.1, 0.1, 0.1, 1.0, 1.0, 0.5])
    chain = {
        'type': 'ChainedScheduler',
        'schedulers': [
            {'type': 'ExponentialLR', 'gamma': 0.5},
            {'type': 'ConstantLR', 'factor': 0.1, 'total_iters': 2},
        ],
    }
    assert built_rates(chain, 4)[0] == pytest.approx([0.1, 0.05, 0.25, 0.125])


SEQUENCE = {
    'type': 'SequentialLR',
    'milestones': [2],
    'schedulers': [
        {'type': 'LinearLR', 'start_factor': 0.1, 'total_iters': 2},
        {'type': 'CosineAnnealingLR', 'T_max': 4},
    ],
}
CHAIN = {
    'type': 'ChainedScheduler',
    'schedulers': [
        {'type': 'MultiStepLR', 'milestones': [4], 'gamma': 0.5},
        {'type': 'ExponentialLR', 'gamma': 0.9},
    ],
}


@pytest.mark.parametrize(
    'scheduler',
    [
        SEQUENCE,
        CHAIN,
        {'type': 'CosineAnnealingWarmRestarts', 'T_0': 2, 'T_mult': 2},
        {'type': 'OneCycleLR', 'max_lr': 1e-2, 'total_steps': 6},
        {'type': 'PolynomialLR', 'total_iters': 6},
    ],
    ids=lambda options: options['type'],
)
def test_schedules_are_resumed(run, train_opt, scheduler):
    whole = run(train_opt(name='whole', train__scheduler=scheduler))
    run(train_opt(name='cut', train__scheduler=scheduler, train__total_iter=3))
    cut = run(train_opt(name='cut', train__scheduler=scheduler), '--auto_resume')
    assert differences(checkpoint(whole, '6.state'), checkpoint(cut, '6.state')) == []
    assert 'scheduler' not in ''.join(
        line for line in log_text(cut).splitlines() if 'not used' in line
    )


def test_another_schedule_inside_is_no_resume(run, train_opt):
    run(train_opt(train__scheduler=SEQUENCE, train__total_iter=2))
    other = {**SEQUENCE, 'schedulers': [SEQUENCE['schedulers'][0], {'type': 'ConstantLR'}]}
    with pytest.raises(ValueError, match=r'SequentialLR\(LinearLR, CosineAnnealingLR\)'):
        run(train_opt(train__scheduler=other), '--auto_resume')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'milestones': [2]}, 'needs a type'),
        (
            {'type': 'SequentialLR', 'milestones': [2]},
            "SequentialLR needs the argument 'schedulers'",
        ),
        (
            {'type': 'SequentialLR', 'milestones': [2], 'schedulers': [5]},
            r'schedulers must be a list of sections with a type, got \[5\]',
        ),
        ({'type': 'ChainedScheduler', 'schedulers': 'abc'}, 'schedulers must be a list'),
        ({'type': 'MultiStepLR', 'milestones': '23'}, "milestones must be a list, got '23'"),
        ({'type': 'MultiStepLR', 'milestones': [2, '3']}, 'milestones must be a list of numbers'),
        ({'type': 'StepLR'}, "StepLR needs the argument 'step_size'"),
        ({'type': 'MultistepLR'}, "did you mean 'MultiStepLR'"),
        ({'type': 'ReduceLROnPlateau'}, 'follows a score'),
    ],
)
def test_a_schedule_that_cannot_be_is_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        built_rates(options, 1)

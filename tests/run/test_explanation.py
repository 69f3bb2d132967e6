"""Learning rates, sizes and amounts that are computed ahead are those of the training."""

import math
from pathlib import Path

import pytest
import torch
from runs import rows

from basicsr.run import explanation
from basicsr.run.explanation import amounts, datasets, halo, learning_rates, size_of
from basicsr.utils.options import OptionFile, Process


@pytest.fixture
def complete(write, tmp_path):
    """The complete options of a training, without the process that belongs to it."""

    def complete(opt):
        class Flags:
            opt, force_yml, auto_resume, debug = '', (), False, False

        file = OptionFile(write(opt))
        return file.complete(file.checked(), Flags, tmp_path, Process('none', 0, 1, 1, 0))

    return complete


def test_a_rate_in_steps_is_told_at_the_iterations_where_it_changes(complete, train_opt):
    schedule = {'type': 'MultiStepLR', 'milestones': [250_000, 400_000], 'gamma': 0.5}
    opt = train_opt(train__total_iter=500_000, train__scheduler=schedule, train__warmup_iter=1000)
    rates = learning_rates(complete(opt))
    assert rates.names == ['g']
    assert {point: rates.at[point][0] for point in rates.rows} == pytest.approx(
        {1: 1e-6, 1000: 1e-3, 250_001: 5e-4, 400_001: 2.5e-4, 500_000: 2.5e-4}
    )


def test_a_cosine_is_told_at_its_quarters(complete, train_opt):
    schedule = {'type': 'CosineAnnealingRestartLR', 'periods': [400], 'eta_min': 1e-5}
    rates = learning_rates(complete(train_opt(train__total_iter=400, train__scheduler=schedule)))
    assert rates.rows == [1, 100, 200, 300, 400]
    for point in rates.rows:
        share = 0.5 * (1 + math.cos(math.pi * (point - 1) / 400))
        assert rates.at[point][0] == pytest.approx(1e-5 + share * (1e-3 - 1e-5))


def test_a_restart_is_told_at_the_iteration_that_begins_it(complete, train_opt):
    schedule = {'type': 'CosineAnnealingRestartLR', 'periods': [100, 300]}
    schedule |= {'restart_weights': [1, 0.5], 'eta_min': 1e-6}
    rates = learning_rates(complete(train_opt(train__total_iter=400, train__scheduler=schedule)))
    assert rates.rows == [1, 100, 102, 200, 300, 400]
    assert rates.at[101][0] == pytest.approx(1e-6)
    assert rates.at[102][0] == pytest.approx(5e-4, rel=1e-2)


@pytest.mark.parametrize(
    'changes',
    [
        {
            'train__scheduler': {
                'type': 'CosineAnnealingRestartLR',
                'periods': [2, 4],
                'restart_weights': [1, 0.5],
            }
        },
        {'train__scheduler': {'type': 'MultiStepLR', 'milestones': [2, 4], 'gamma': 0.5}},
        {'train__scheduler': {'type': 'StepLR', 'step_size': 2}, 'train__warmup_iter': 3},
        {'train__swa': {'start': 4, 'every': 1, 'lr': 1e-4, 'anneal_iters': 2}},
    ],
)
def test_the_rates_are_those_of_the_training(complete, train_opt, run, changes):
    opt = train_opt(val=None, **changes)
    rates = learning_rates(complete(opt))
    trained = {row['iter']: row['lr'] for row in rows(run(opt)) if 'lr' in row}
    assert trained and {i: rates.at[i][0] for i in trained} == pytest.approx(trained)


def test_groups_have_rates_of_their_own(complete, train_opt):
    optimizer = {'type': 'Adam', 'lr': 1e-3, 'groups': [{'pattern': 'body.0', 'lr': 1e-4}]}
    opt = train_opt(train__optim_g=optimizer, train__scheduler=None)
    rates = learning_rates(complete(opt))
    assert rates.names == ['g.0', 'g.1']
    assert rates.at[6] == [1e-4, 1e-3]


def test_multiply_adds_and_memory_are_those_counted_by_hand(complete, train_opt):
    size = size_of(complete(train_opt()), 'g')
    # 3x3 convolutions 3 -> 4 -> 4 -> 12 on crops of 16 / 2 = 8 pixels
    weights = 9 * (3 * 4 + 4 * 4 + 4 * 12)
    assert size.macs == weights * 8 * 8
    assert size.parameters == size.trained == weights + (4 + 4 + 12) + 2 * 4
    assert (size.input, size.output) == ((2, 3, 8, 8), (2, 3, 16, 16))
    # weights, gradient, two moments of Adam and the average
    assert size.state == 4 * 5 * size.parameters
    # inputs of the convolutions and of the PReLUs, of two images
    assert size.activations == 4 * 2 * 64 * (3 + 4 + 4 + 4 + 4)


def test_other_optimizers_and_micro_batches_take_less(complete, train_opt):
    sgd = {'type': 'SGD', 'lr': 1e-3}
    opt = train_opt(train__optim_g=sgd, train__ema_decay=0, train__accumulate=2)
    size = size_of(complete(opt), 'g')
    assert size.state == 4 * 2 * size.parameters
    assert size.input[0] == 1


def test_a_network_that_cannot_be_traced_is_told(complete, train_opt, monkeypatch):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return x * x.mean().item()

    monkeypatch.setattr(explanation.ARCH_REGISTRY, 'build', lambda options: Odd())
    with pytest.raises(ValueError, match='cannot be traced without values'):
        size_of(complete(train_opt()), 'g')


def test_the_receptive_field_is_measured_unless_that_takes_long(complete, train_opt):
    opt = complete(train_opt())
    assert halo(opt, macs=0) == 16  # three pixels, rounded up
    with pytest.raises(ValueError, match='takes a while'):
        halo(opt, macs=10**9, limit=10**9)


def test_samples_and_epochs_are_counted(complete, train_opt):
    stages = [{'iters': 4, 'gt_size': 8, 'batch_size_per_gpu': 5}, {'gt_size': 16}]
    opt = complete(train_opt(datasets__train__progressive=stages, train__total_iter=10))
    sets = dict(datasets(opt))
    found = amounts(opt, sets['train'])
    assert (found.images, found.samples, found.samples_per_iteration) == (5, 4 * 5 + 6 * 2, 5)
    assert found.epochs == pytest.approx(32 / 5)
    assert len(sets['val']) == 3


def test_a_set_that_is_not_there_is_told_in_its_place(complete, train_opt):
    opt = complete(train_opt(datasets__train__dataroot_gt='nowhere'))
    assert 'nowhere' in str(dict(datasets(opt))['train'])
    assert amounts(opt, None)[:3] == (None, 12, None)
    assert not Path('nowhere').exists()

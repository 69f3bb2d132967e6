"""One step: what is minimised, what is split, what is frozen. Precision is in test_precision.py."""

import pytest
import torch
from runs import checkpoint, differences, rows
from torch import nn

from basicsr.models.step import Stepper

CPU = torch.device('cpu')


class Linear:
    """A model of one linear layer, whose batch has tensors of several ranks and names."""

    batch_tensors = ('clip', 'mask')
    current_iter = 1

    def __init__(self, count=5):
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.clip = torch.rand(count, 2, 3, 2, 4)
        self.mask = torch.rand(count, 1)
        self.fixed = torch.rand(1, 4)
        self.seen = []

    def losses(self):
        self.made = self.net(self.clip).flatten(1)
        self.seen.append((tuple(self.clip.shape), tuple(self.mask.shape), tuple(self.fixed.shape)))
        return {'l': (self.made * self.mask).mean(), 'count': torch.tensor(float(len(self.clip)))}

    def step(self, losses=None, **train_opt):
        stepper = Stepper(train_opt, CPU)
        losses = losses or self.losses
        return stepper.step(self, 'g', [self.net], self.optimizer, losses)


def test_every_tensor_of_the_batch_is_split_whatever_its_name_and_rank():
    whole, parts = Linear(), Linear()
    expected = whole.step()['l']
    assert parts.step(accumulate=3)['l'] == pytest.approx(expected.item(), abs=1e-6)
    assert parts.seen == [((2, 2, 3, 2, 4), (2, 1), (1, 4))] * 2 + [
        ((1, 2, 3, 2, 4), (1, 1), (1, 4))
    ]
    assert parts.clip.shape[0] == 5
    torch.testing.assert_close(parts.made, whole.made.detach())
    assert parts.batch_tensors == ('clip', 'mask', 'made'), 'a following step splits it, too'
    for a, b in zip(parts.net.parameters(), whole.net.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_values_without_gradient_are_logged_and_not_minimised():
    with_count, alone = Linear(), Linear()
    log = with_count.step()
    assert log['count'] == 5
    alone.step(lambda: {'l': alone.losses()['l']})
    assert differences(list(with_count.net.parameters()), list(alone.net.parameters())) == []


def test_the_gradients_of_a_generators_losses_are_those_of_their_sum():
    one_by_one, together = Linear(), Linear()
    order = []

    def generated():
        yield {'a': one_by_one.losses()['l']}
        order.append(one_by_one.net.weight.grad.clone())
        yield {'b': one_by_one.losses()['l'] ** 2}

    log = one_by_one.step(generated)
    assert order[0].abs().sum() > 0, 'of the first, before the second is computed'
    together.step(lambda: {'a': together.losses()['l'], 'b': together.losses()['l'] ** 2})
    assert log['b'] == pytest.approx(log['a'].item() ** 2)
    for a, b in zip(one_by_one.net.parameters(), together.net.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def weights(folder, iteration):
    return checkpoint(folder, f'net_g_{iteration}.pth')['params']


def test_frozen_parameters_begin_to_train_at_their_iteration_also_after_a_resume(run, train_opt):
    freeze = [{'pattern': r'^body\.0\.', 'until': 4}]
    whole = run(train_opt(name='whole', train__freeze=freeze))
    two, four, six = (weights(whole, iteration) for iteration in (2, 4, 6))
    assert {key for key in two if not torch.equal(two[key], four[key])} >= {'body.2.weight'}
    for key in ('body.0.weight', 'body.0.bias'):
        assert torch.equal(two[key], four[key])
        assert not torch.equal(four[key], six[key])
    run(train_opt(name='cut', train__freeze=freeze, train__total_iter=2))
    cut = run(train_opt(name='cut', train__freeze=freeze), '--auto_resume')
    assert differences(weights(cut, 6), six) == []


@pytest.mark.parametrize(
    ('pattern', 'message'), [('nothing', "no parameter has 'nothing'"), ('(', "pattern '\\('")]
)
def test_a_pattern_that_freezes_nothing_is_refused(run, train_opt, pattern, message):
    with pytest.raises(ValueError, match=rf'train\.freeze: {message}'):
        run(train_opt(train__freeze=[{'pattern': pattern, 'until': 4}]))


def test_tiles_of_a_validation_score_as_the_whole_image(run, train_opt):
    scores = [
        [row['metrics/val/psnr'] for row in rows(run(opt)) if 'metrics/val/psnr' in row]
        for opt in (train_opt(name='whole'), train_opt(name='tiles', val__tile=5))
    ]
    assert scores[0] == scores[1] != []

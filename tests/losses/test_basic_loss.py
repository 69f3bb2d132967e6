import math

import pytest
import torch
from golden import params, recipe, resolve

from basicsr.losses import build_loss
from basicsr.losses.basic_loss import (
    CharbonnierLoss,
    L1Loss,
    MSELoss,
    WeightedTVLoss,
    charbonnier_loss,
    l1_loss,
    mse_loss,
)

PIXEL_LOSSES = ('L1Loss', 'MSELoss', 'CharbonnierLoss', 'WeightedTVLoss')


def is_pixel_loss(case):
    return case['kind'] == 'loss' and case['opt']['type'] in PIXEL_LOSSES


@pytest.mark.parametrize('case', params('losses', is_pixel_loss))
def test_value_and_gradient_equal_the_reference(case):
    args = resolve(case['args'])
    if 'grad' in case:
        args[case['grad']].requires_grad_()
    out = {'value': build_loss(case['opt'])(*args)}
    if 'grad' in case:
        out['grad'] = torch.autograd.grad(out['value'].sum(), args[case['grad']])[0]
    assert recipe.compare(case, out) is None


def wave(shape, phase):
    """0.5 + 0.5 sin(0.37 i + phase), i the flat index."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.5 + 0.5 * torch.sin(0.37 * index + phase)).view(shape).float()


@pytest.mark.parametrize(
    'loss_class, reduction, plain, one_channel, three_channels',
    [
        (L1Loss, 'mean', 0.2533632, 0.2541444, 0.252969),
        (L1Loss, 'sum', 54.7264519, 28.8657379, 27.3554707),
        (MSELoss, 'mean', 0.0395489, 0.0396117, 0.0392487),
        (MSELoss, 'sum', 8.542552, 4.4991002, 4.244266),
        (CharbonnierLoss, 'mean', 0.2533632, 0.2541444, 0.252969),
        (CharbonnierLoss, 'sum', 54.7264519, 28.8657379, 27.3554707),
    ],
)
def test_losses_give_the_numbers_measured_on_upstream(
    loss_class, reduction, plain, one_channel, three_channels
):
    loss = loss_class(2.0, reduction)
    pred, target = wave((2, 3, 6, 6), 0), wave((2, 3, 6, 6), 0.4)
    assert loss(pred, target).item() == pytest.approx(plain, rel=1e-5)
    weighted = loss(pred, target, wave((2, 1, 6, 6), 1)).item()
    assert weighted == pytest.approx(one_channel, rel=1e-5)
    weighted = loss(pred, target, weight=wave((2, 3, 6, 6), 1)).item()
    assert weighted == pytest.approx(three_channels, rel=1e-5)


@pytest.mark.parametrize(
    'reduction, plain, weighted', [('mean', 0.6838099, 0.6820588), ('sum', 123.0857697, 59.418251)]
)
def test_total_variation_gives_the_numbers_measured_on_upstream(reduction, plain, weighted):
    loss, pred = WeightedTVLoss(reduction=reduction), wave((2, 3, 6, 6), 0)
    assert loss(pred).item() == pytest.approx(plain, rel=1e-5)
    assert loss(pred, wave((2, 1, 6, 6), 1)).item() == pytest.approx(weighted, rel=1e-5)


@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('loss', [l1_loss, mse_loss, charbonnier_loss])
def test_gradients_are_those_of_the_value(loss, reduction):
    pred, target, weight = torch.rand(3, 2, 3, 4, 3, dtype=torch.float64)
    pred.requires_grad_()
    weight = weight[:, :1]
    assert torch.autograd.gradcheck(lambda p: loss(p, target, weight, reduction=reduction), pred)


def test_gradient_of_total_variation_is_that_of_its_value():
    pred, weight = torch.rand(2, 2, 3, 4, 3, dtype=torch.float64)
    pred.requires_grad_()
    assert torch.autograd.gradcheck(lambda p: WeightedTVLoss(0.5)(p, weight), pred)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('loss', [l1_loss, mse_loss, charbonnier_loss])
def test_half_precision_is_computed_in_float32(loss, dtype):
    pred, target = torch.rand(2, 2, 3, 16, 16).to(dtype)
    pred.requires_grad_()
    value = loss(pred, target)
    assert value.dtype == torch.float32
    assert value == loss(pred.float(), target.float())
    value.backward()
    assert pred.grad is not None and pred.grad.dtype == dtype


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_charbonnier_has_a_finite_gradient_where_the_images_agree(dtype):
    pred = torch.ones(1, 3, 4, 4, dtype=dtype, requires_grad=True)
    charbonnier_loss(pred, torch.ones_like(pred)).backward()
    assert pred.grad is not None and pred.grad.abs().max() == 0


@pytest.mark.parametrize('loss', [l1_loss, mse_loss, charbonnier_loss])
def test_shapes_that_only_broadcast_are_refused(loss):
    with pytest.raises(ValueError, match=r'\(2, 3, 8, 8\) and \(2, 1, 8, 8\)'):
        loss(torch.rand(2, 3, 8, 8), torch.rand(2, 1, 8, 8))


def test_a_wrong_reduction_is_refused_when_the_loss_is_built():
    for loss_class in (L1Loss, MSELoss, CharbonnierLoss, WeightedTVLoss):
        with pytest.raises(ValueError, match="'average'"):
            loss_class(reduction='average')
    with pytest.raises(ValueError, match="'none'"):
        WeightedTVLoss(reduction='none')


def test_further_keyword_arguments_are_ignored():
    pred, target = torch.rand(2, 1, 3, 4, 4)
    for loss in (L1Loss(), MSELoss(), CharbonnierLoss()):
        assert loss(pred, target, current_iter=3) == loss(pred, target)

import inspect

import pytest
import torch
from golden import call, params, recipe

from basicsr.losses.loss_util import (
    get_local_weights,
    get_refined_artifact_map,
    reduce_loss,
    weight_reduce_loss,
    weighted_loss,
)


@pytest.mark.parametrize('case', params('losses', lambda c: 'loss_util' in c.get('target', '')))
def test_function_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


def test_reduction_is_none_mean_or_sum():
    loss = torch.tensor([1.0, 2.0, 6.0])
    assert reduce_loss(loss, 'none') is loss
    assert (reduce_loss(loss, 'mean'), reduce_loss(loss, 'sum')) == (3, 9)
    with pytest.raises(ValueError, match="'average'"):
        reduce_loss(loss, 'average')


@pytest.mark.parametrize('shape', [(2, 3, 4, 5), (2, 1, 4, 5), (1, 1, 4, 5), (2, 3, 1, 1)])
def test_the_weighted_mean_of_a_constant_is_that_constant(shape):
    loss = torch.full((2, 3, 4, 5), 7.0)
    assert weight_reduce_loss(loss, torch.rand(shape), 'mean').item() == pytest.approx(7)


def test_weights_may_be_a_mask():
    loss = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.tensor([[True, False], [False, True]])
    assert weight_reduce_loss(loss, mask) == 2.5


def test_weights_that_are_all_0_give_loss_0_and_gradient_0():
    loss = torch.rand(1, 3, 4, 4, requires_grad=True)
    value = weight_reduce_loss(loss, torch.zeros(1, 1, 4, 4))
    value.backward()
    assert value == 0 and loss.grad is not None and not loss.grad.any()


@pytest.mark.parametrize('shape', [(3, 4, 4), (2, 2, 4, 4), (2, 3, 4, 3)])
def test_weights_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r'\(2, 3, 4, 4\)'):
        weight_reduce_loss(torch.rand(2, 3, 4, 4), torch.rand(shape))


def test_a_decorated_function_keeps_its_name_signature_and_options():
    @weighted_loss
    def power_loss(pred, target, power=2):
        return (pred - target).abs() ** power

    assert power_loss.__name__ == 'power_loss'
    assert list(inspect.signature(power_loss).parameters) == ['pred', 'target', 'power']
    ones = torch.ones(1, 1, 2, 2)
    assert power_loss(3 * ones, ones, 0.5 * ones, 'sum', power=3) == 16


def test_local_weights_are_variances_of_reflected_windows():
    residual = torch.rand(1, 1, 5, 6)
    out = get_local_weights(residual, 3)
    assert out[0, 0, 2, 3].item() == pytest.approx(residual[0, 0, 1:4, 2:5].var().item())
    corner = residual[0, 0][[1, 0, 1]][:, [1, 0, 1]].var().item()
    assert out[0, 0, 0, 0].item() == pytest.approx(corner)


@pytest.mark.parametrize('ksize', [4, 9])
def test_a_window_that_has_no_centre_or_exceeds_the_reflected_image_is_refused(ksize):
    with pytest.raises(ValueError, match=f'ksize .* {ksize} for'):
        get_local_weights(torch.rand(1, 1, 4, 4), ksize)


def test_the_artifact_map_is_0_where_the_output_beats_the_average():
    gt, output, ema = torch.rand(3, 2, 3, 9, 8)
    output[..., :4], ema[..., 4:] = gt[..., :4], gt[..., 4:]
    out = get_refined_artifact_map(gt, output, ema, 7)
    assert out.shape == (2, 1, 9, 8)
    assert not out[..., :4].any() and (out[..., 4:] > 0).all()


def test_a_perfect_output_has_no_artifacts_and_a_finite_gradient():
    gt = torch.rand(1, 3, 8, 8)
    output = gt.clone().requires_grad_()
    out = get_refined_artifact_map(gt, output, gt, 7)
    out.sum().backward()
    assert not out.any()
    assert output.grad is not None and output.grad.isfinite().all()

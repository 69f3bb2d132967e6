import math

import pytest
import torch
from golden import fill, params, recipe, resolve
from runs import rows
from torch import nn

from basicsr.archs.vgg_arch import VGGFeatureExtractor
from basicsr.losses import build_loss
from basicsr.losses.basic_loss import (
    CharbonnierLoss,
    L1Loss,
    MSELoss,
    PerceptualLoss,
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
    with pytest.raises(ValueError, match=r'\(2, 3, 8, 8\) and a GT of \(2, 1, 8, 8\)'):
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


# features


def perceptual(layer_weights, **options):
    """A loss with the smallest network, untrained."""
    return PerceptualLoss(layer_weights, **{'vgg_type': 'vgg11', 'weights': 'random', **options})


@pytest.mark.parametrize('case', params('losses', lambda c: c['kind'] == 'perceptual'))
def test_perceptual_loss_and_its_gradient_equal_the_reference(case):
    loss = build_loss({**case['opt'], 'weights': 'random'})
    fill(loss.vgg, case)
    pred = resolve(case['pred']).requires_grad_()
    percep, style = loss(pred, resolve(case['gt']))
    grad = torch.autograd.grad(percep + style, pred)[0]
    out = {'percep': percep, 'style': style, 'grad': grad}
    assert recipe.compare(case, out) is None


class Identity(nn.Module):
    """Stands for VGG: the features are the images."""

    def forward(self, x):
        return {'conv1_1': x, 'conv2_1': 2 * x}


@pytest.mark.parametrize(
    ('criterion', 'distance'),
    [
        ('l1', lambda d: d.abs().mean()),
        ('l2', lambda d: d.square().mean()),
        ('fro', lambda d: d.square().sum().sqrt()),
    ],
)
def test_perceptual_and_style_loss_are_weighted_sums_over_the_layers(criterion, distance):
    weights = {'conv1_1': 0.5, 'conv2_1': 3.0}
    loss = perceptual(weights, criterion=criterion, perceptual_weight=7.0, style_weight=11.0)
    loss.vgg = Identity()
    x, gt = torch.rand(2, 2, 3, 4, 5)
    want = 7 * (0.5 * distance(x - gt) + 3 * distance(2 * x - 2 * gt))
    gram = torch.einsum('bihw,bjhw->bij', x, x) - torch.einsum('bihw,bjhw->bij', gt, gt)
    want_style = 11 * (0.5 * distance(gram / 60) + 3 * distance(4 * gram / 60))
    percep, style = loss(x, gt)
    assert percep.item() == pytest.approx(want.item(), rel=1e-5)
    assert style.item() == pytest.approx(want_style.item(), rel=1e-5)


def test_a_part_of_weight_0_is_none():
    x, gt = torch.rand(2, 1, 3, 8, 8)
    percep, style = perceptual({'conv1_1': 1})(x, gt)
    assert percep > 0 and style is None
    percep, style = perceptual({'conv1_1': 1}, perceptual_weight=0, style_weight=1)(x, gt)
    assert percep is None and style > 0


def test_neither_the_ground_truth_nor_the_network_gets_a_gradient():
    loss = perceptual({'conv2_1': 1}, style_weight=1).train()
    x, gt = torch.rand(2, 1, 3, 8, 8)
    x.requires_grad_(), gt.requires_grad_()
    sum(loss(x, gt)).backward()
    assert x.grad.abs().max() > 0 and gt.grad is None
    assert not any(p.requires_grad for p in loss.parameters())
    assert not any(module.training for module in loss.vgg.modules())


@pytest.mark.parametrize('criterion', ['l1', 'l2', 'fro'])
def test_equal_images_have_perceptual_loss_0_and_gradient_0(criterion):
    loss = perceptual({'relu1_1': 1}, style_weight=1, criterion=criterion)
    x = torch.rand(1, 3, 8, 8, requires_grad=True)
    percep, style = loss(x, x.detach().clone())
    (percep + style).backward()
    assert percep == 0 and style == 0 and x.grad.abs().max() == 0


def test_correlations_keep_their_digits_and_range_under_autocast():
    loss = perceptual({'conv1_1': 1, 'conv2_1': 1}, style_weight=1)
    loss.vgg = Identity()
    x, gt = 1000 * torch.rand(2, 1, 3, 8, 8)
    want = loss(x, gt)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast('cpu', dtype=dtype):
            assert loss(x, gt) == want
        half = loss(x.to(dtype), gt.to(dtype))
        assert half[1].dtype == torch.float32 and half[1].isfinite()


def test_perceptual_loss_runs_under_autocast():
    loss = perceptual({'conv2_1': 1}, style_weight=1)
    x, gt = torch.rand(2, 1, 3, 16, 16)
    x.requires_grad_()
    exact = loss(x, gt)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        percep, style = loss(x, gt)
    (percep + style).backward()
    assert percep.item() == pytest.approx(exact[0].item(), rel=0.05)
    assert x.grad.isfinite().all()


def test_perceptual_loss_refuses_wrong_arguments_and_images():
    with pytest.raises(ValueError, match="'l3'"):
        perceptual({'conv1_1': 1}, criterion='l3')
    with pytest.raises(ValueError, match="'conv9_1'"):
        perceptual({'conv9_1': 1})
    with pytest.raises(ValueError, match=r'\(1, 3, 8, 8\) and a GT of \(1, 1, 8, 8\)'):
        perceptual({'conv1_1': 1})(torch.rand(1, 3, 8, 8), torch.rand(1, 1, 8, 8))


def test_training_runs_with_a_local_file_and_else_ends_before_its_first_iteration(
    train_opt, run, tmp_path, monkeypatch
):
    def offline(url, path, *args, **kwargs):
        raise OSError('no route to host')

    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    monkeypatch.setattr('basicsr.archs.vgg_arch.load_file_from_url', offline)
    loss = {'type': 'PerceptualLoss', 'layer_weights': {'conv2_1': 1.0}, 'vgg_type': 'vgg11'}
    with pytest.raises(FileNotFoundError, match=r'vgg11-8a719046.pth.*perceptual_opt.weights'):
        run(train_opt(name='missing', train__perceptual_opt=loss))
    assert not list(tmp_path.rglob('net_g_*.pth'))

    layers = VGGFeatureExtractor(['pool5'], 'vgg11', weights='random').vgg_net
    state = nn.Sequential(*layers).state_dict()
    torch.save({f'features.{key}': value for key, value in state.items()}, tmp_path / 'vgg.pth')
    loss['weights'] = str(tmp_path / 'vgg.pth')
    folder = run(train_opt(train__perceptual_opt=loss))
    steps = [row for row in rows(folder) if 'losses/l_percep' in row]
    assert len(steps) == 6 and all(row['losses/l_percep'] > 0 for row in steps)


def test_a_perceptual_loss_of_nothing_is_refused():
    with pytest.raises(ValueError, match='perceptual_weight or style_weight must be above 0'):
        PerceptualLoss({'conv1_1': 1}, perceptual_weight=0, weights='random')

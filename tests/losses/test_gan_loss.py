import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden import params, recipe, resolve, seed

from basicsr.losses import build_loss
from basicsr.losses.gan_loss import (
    GAN_TYPES,
    GANFeatLoss,
    GANLoss,
    MultiScaleGANLoss,
    g_path_regularize,
    gradient_penalty_loss,
    r1_penalty,
)

TWICE = {'GANFeatLoss-weight10'}  # the reference multiplies by loss_weight twice


def is_gan_loss(case):
    return 'GAN' in case.get('opt', {}).get('type', '') and case['id'] not in TWICE


@pytest.mark.parametrize('case', params('losses', is_gan_loss))
def test_value_and_gradient_equal_the_reference(case):
    args = resolve(case['args'])
    if 'grad' in case:
        args[case['grad']].requires_grad_()
    out = {'value': build_loss(case['opt'])(*args)}
    if 'grad' in case:
        out['grad'] = torch.autograd.grad(out['value'].sum(), args[case['grad']])[0]
    assert recipe.compare(case, out) is None


@pytest.mark.parametrize('case', params('losses', lambda c: c['kind'] == 'r1'))
def test_r1_penalty_equals_the_reference(case):
    x, w = resolve(case['x']).requires_grad_(), resolve(case['w']).requires_grad_()
    scores = torch.tanh(F.conv2d(x, w, padding=1)).mean(dim=(1, 2, 3))
    value = r1_penalty(scores, x)
    out = {'value': value, 'grad_w': torch.autograd.grad(value, w)[0]}
    assert recipe.compare(case, out) is None


@pytest.mark.parametrize('case', params('losses', lambda c: c['kind'] == 'path_regularize'))
def test_path_length_regularisation_equals_the_reference(case):
    latents, w = resolve(case['latents']).requires_grad_(), resolve(case['w'])
    image = torch.tanh(latents.flatten(1) @ w).view(case['image'])
    seed(case)
    penalty, lengths, mean = g_path_regularize(image, latents, resolve(case['mean_path_length']))
    assert not lengths.requires_grad and not mean.requires_grad
    grad = torch.autograd.grad(penalty, latents)[0]
    out = {'penalty': penalty, 'lengths': lengths, 'mean': mean, 'grad_latents': grad}
    assert recipe.compare(case, out) is None


def wave(shape, phase):
    """0.5 + 0.5 sin(0.37 i + phase), i the flat index."""
    index = np.arange(math.prod(shape))
    return torch.from_numpy(0.5 + 0.5 * np.sin(0.37 * index + phase)).view(shape).float()


# GANLoss


@pytest.mark.parametrize('gan_type', GAN_TYPES)
def test_only_the_generators_loss_is_weighted(gan_type):
    logits = torch.randn(2, 1, 4, 4)
    full, tenth = GANLoss(gan_type), GANLoss(gan_type, loss_weight=0.1)
    assert tenth(logits, True) == 0.1 * full(logits, True)
    assert tenth(logits, True, is_disc=True) == full(logits, True, is_disc=True)


@pytest.mark.parametrize('gan_type', GAN_TYPES)
def test_a_generator_lowers_its_loss_by_raising_the_logits(gan_type):
    logits = torch.randn(2, 1, 4, 4).clamp_max(0.9).requires_grad_()
    GANLoss(gan_type)(logits, True).backward()
    assert logits.grad is not None and (logits.grad < 0).all()


@pytest.mark.parametrize(
    ('gan_type', 'real', 'fake'),
    [
        ('vanilla', math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.5))),
        ('lsgan', 0.25, 0.25),
        ('wgan', -0.5, 0.5),
        ('wgan_softplus', math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.5))),
        ('hinge', 0.5, 1.5),
    ],
)
def test_the_discriminators_loss_of_a_logit_of_one_half(gan_type, real, fake):
    loss, logit = GANLoss(gan_type, loss_weight=7), torch.full((3, 1), 0.5)
    assert loss(logit, True, is_disc=True).item() == pytest.approx(real)
    assert loss(logit, False, is_disc=True).item() == pytest.approx(fake)


def test_labels_can_be_smoothed_and_follow_the_type_of_the_logits():
    loss = GANLoss('lsgan', real_label_val=0.9, fake_label_val=0.2)
    logits = torch.zeros(2, 3, dtype=torch.float64)
    label = loss.get_target_label(logits, True)
    assert (label.dtype, label.shape) == (torch.float64, (2, 3))
    assert loss(logits, True).item() == pytest.approx(0.81)
    assert loss(logits, False).item() == pytest.approx(0.04)
    assert GANLoss('wgan').get_target_label(logits, False) is False


@pytest.mark.parametrize('gan_type', GAN_TYPES)
def test_labels_are_made_on_the_device_of_the_logits(gan_type):
    logits = torch.zeros(2, 1, device='meta')
    assert GANLoss(gan_type)(logits, True).device.type == 'meta'


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('gan_type', GAN_TYPES)
def test_half_precision_is_computed_in_float32(gan_type, dtype):
    logits = (30 * torch.randn(2, 1, 8, 8)).to(dtype).requires_grad_()
    value = GANLoss(gan_type)(logits, False, is_disc=True)
    assert value.dtype == torch.float32
    assert value == GANLoss(gan_type)(logits.float(), False, is_disc=True)
    value.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_an_unknown_type_gets_a_suggestion():
    with pytest.raises(ValueError, match="'lsgna' is not one of vanilla, .*; did you mean 'lsgan'"):
        GANLoss('lsgna')


# several scales


def test_scales_count_equally_whatever_their_size():
    big, small = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 2, 2)
    assert MultiScaleGANLoss('lsgan', loss_weight=3)([big, small], True) == 1.5
    assert MultiScaleGANLoss('lsgan')(big, True) == 1


def test_the_logits_of_a_scale_are_its_last_features():
    x = wave((2, 1, 6, 6), 0)
    scales = [[x, 2 * x], [x]]
    want = ((2 * x - 1).square().mean() + (x - 1).square().mean()) / 2
    value = MultiScaleGANLoss('lsgan', loss_weight=3)(scales, True, is_disc=True)
    assert value.item() == pytest.approx(want.item(), rel=1e-6)


def test_feature_matching_leaves_the_logits_out_and_averages_the_scales():
    fake = [[torch.full((1, 2, 4, 4), 3.0), torch.full((1, 1, 2, 2), 99.0)]] * 2
    real = [[torch.ones(1, 2, 4, 4), torch.zeros(1, 1, 2, 2)]] * 2
    assert GANFeatLoss()(fake, real) == 2
    assert GANFeatLoss('l2')(fake, real) == 4
    assert GANFeatLoss(reduction='sum')(fake, real) == 64


def test_feature_matching_is_weighted_once():
    case = next(c for c in recipe.load('losses') if c['id'] in TWICE)
    args = resolve(case['args'])
    assert case['opt']['loss_weight'] == 10
    value, plain = build_loss(case['opt'])(*args), GANFeatLoss(case['opt']['criterion'])(*args)
    assert value.item() == pytest.approx(10 * plain.item(), rel=1e-6)


def test_feature_matching_gives_no_gradient_to_the_real_features():
    fake, real = torch.rand(2, 1, 2, 4, 4).requires_grad_()
    value = GANFeatLoss()([[fake, fake]], [[real, real]])
    assert torch.autograd.grad(value, fake, retain_graph=True)[0].abs().max() > 0
    assert torch.autograd.grad(value, real, allow_unused=True) == (None,)


def test_feature_matching_refuses_wrong_settings():
    with pytest.raises(ValueError, match="'huber'"):
        GANFeatLoss('huber')
    for reduction in ('none', 'average'):
        with pytest.raises(ValueError, match='reduction'):
            GANFeatLoss(reduction=reduction)


# regularisers


def test_r1_is_the_squared_norm_of_the_whole_gradient():
    slope = torch.randn(3, 4, 5)
    x = torch.rand(6, 3, 4, 5).requires_grad_()
    value = r1_penalty((x * slope).sum(dim=(1, 2, 3)), x)
    assert value.item() == pytest.approx(slope.square().sum().item(), rel=1e-5)


def test_r1_of_half_precision_does_not_overflow():
    x = torch.full((1, 1, 8, 8), 300.0, dtype=torch.float16, requires_grad=True)
    assert r1_penalty(x.square(), x).item() == pytest.approx(64 * 600**2)


def test_gradient_penalty_takes_the_norm_over_a_whole_sample():
    slope = torch.randn(3, 4, 5)
    real, fake = torch.rand(2, 6, 3, 4, 5)
    value = gradient_penalty_loss(lambda x: (x * slope).sum(dim=(1, 2, 3)), real, fake)
    assert value.item() == pytest.approx((slope.norm().item() - 1) ** 2, rel=1e-5)


@pytest.mark.parametrize('case', params('losses', lambda c: c['kind'] == 'gradient_penalty'))
def test_gradient_penalty_is_that_of_the_definition(case):
    real, fake, w = (resolve(case[key]) for key in ('real', 'fake', 'w'))

    def discriminator(x):
        return torch.tanh(F.conv2d(x, w, padding=1))

    seed(case)
    share = torch.rand(3, 1, 1, 1)
    mixed = share * real + (1 - share) * fake
    rows = torch.func.vmap(torch.func.grad(lambda x: discriminator(x).sum()))(mixed)
    want = np.mean([(row.norm().item() - 1) ** 2 for row in rows])
    seed(case)
    value = gradient_penalty_loss(discriminator, real, fake)
    assert value.item() == pytest.approx(want, rel=1e-5)


def test_gradient_penalty_counts_only_the_weighted_region():
    slope, mask = torch.ones(1, 4, 4), torch.zeros(1, 1, 4, 4)
    mask[..., :2, :2] = 1
    real, fake = torch.rand(2, 2, 1, 4, 4)
    value = gradient_penalty_loss(lambda x: (x * slope).sum(dim=(1, 2, 3)), real, fake, mask)
    assert value.item() == pytest.approx((2 - 1) ** 2)


def test_gradient_penalty_mixes_each_sample_by_its_own_share_and_reaches_no_image():
    real, fake, mixed = torch.zeros(8, 1, 2, 2), torch.ones(8, 1, 2, 2).requires_grad_(), []
    w = torch.ones((), requires_grad=True)

    def discriminator(x):
        mixed.append(x)
        return w * x.square().sum(dim=(1, 2, 3))

    gradient_penalty_loss(discriminator, real, fake).backward()
    rows = mixed[0].detach().flatten(1)
    assert (rows == rows[:, :1]).all() and rows[:, 0].unique().numel() == 8
    assert fake.grad is None and w.grad is not None and w.grad != 0


def test_a_path_length_is_the_norm_per_layer_of_the_gradient():
    latents = torch.rand(3, 2, 5).requires_grad_()
    image = (2 * latents.sum(dim=(1, 2))).view(3, 1, 1, 1)
    torch.manual_seed(4)
    noise = torch.randn(3, 1, 1, 1)
    torch.manual_seed(4)
    penalty, length, mean = g_path_regularize(image, latents, 0.0, decay=0.1)
    lengths = (2 * noise.flatten()).abs() * math.sqrt(5)
    assert length.item() == pytest.approx(lengths.mean().item(), rel=1e-6)
    assert mean.item() == pytest.approx(0.1 * lengths.mean().item(), rel=1e-6)
    want = (lengths - 0.1 * lengths.mean()).square().mean().item()
    assert penalty.item() == pytest.approx(want, rel=1e-5)


def of_r1(w, x):
    return r1_penalty(torch.tanh(F.conv2d(x, w, padding=1)).square(), x)


def of_gradient_penalty(w, x):
    torch.manual_seed(0)
    return gradient_penalty_loss(
        lambda mixed: torch.tanh(F.conv2d(mixed, w, padding=1)), x, x.detach().flip(0) + 0.3
    )


def of_path_length(w, x):
    torch.manual_seed(0)
    latents = x[:, 0] * w.mean()
    return g_path_regularize(torch.tanh(F.conv2d(latents[:, None], w[:, :1])), latents, 0.7)[0]


@pytest.mark.parametrize('regulariser', [of_r1, of_gradient_penalty, of_path_length])
def test_gradients_of_a_regulariser_are_those_of_its_value(regulariser):
    w = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.rand(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: regulariser(w, x), w)
    assert torch.autograd.gradgradcheck(lambda w: regulariser(w, x), w)

"""Training with a relativistic average discriminator."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from blind import adversarial

from basicsr.models import build_model


@pytest.fixture
def model(train_opt):
    def make(**overrides):
        opt = adversarial(train_opt(**overrides), 'ESRGANModel')
        return build_model(opt | {'dist': False, 'is_train': True})

    return make


def batch():
    return {'lq': torch.rand(2, 3, 8, 8), 'gt': torch.rand(2, 3, 16, 16)}


def relativistic(pred, others, label):
    """Whether each logit is above the mean of the others, as a loss."""
    pred = pred - others.mean()
    return F.binary_cross_entropy_with_logits(pred, torch.full_like(pred, label))


def test_five_iterations_equal_a_plain_loop(model):
    """Both networks, the average, and every logged value."""
    gan = model()
    net_g, net_d, ema = (copy.deepcopy(net) for net in (gan.net_g, gan.net_d, gan.net_g_ema))
    adam_g, adam_d = (torch.optim.Adam(n.parameters(), 1e-3, fused=True) for n in (net_g, net_d))

    for iteration in range(1, 6):
        data = batch()
        gan.feed_data(data)
        gan.optimize_parameters(iteration)

        output = net_g(data['lq'])
        l_g_pix = (output - data['gt']).abs().mean()
        real, fake = net_d(data['gt']).detach(), net_d(output)
        # The generator wants generated images to look more real than real ones.
        l_g_gan = 0.1 * (relativistic(real, fake, 0) + relativistic(fake, real, 1)) / 2
        adam_g.zero_grad()
        (l_g_pix + l_g_gan).backward()
        adam_g.step()

        output = output.detach()
        adam_d.zero_grad()
        fake = net_d(output).detach()
        pred_real = net_d(data['gt'])
        l_d_real = relativistic(pred_real, fake, 1) / 2
        l_d_real.backward()
        pred_fake = net_d(output)
        l_d_fake = relativistic(pred_fake, pred_real.detach(), 0) / 2
        l_d_fake.backward()
        adam_d.step()
        with torch.no_grad():
            for average, current in zip(ema.parameters(), net_g.parameters(), strict=True):
                average.mul_(0.9).add_(0.1 * current)

        expected = {'l_g_pix': l_g_pix, 'l_g_gan': l_g_gan}
        expected |= {'l_d_real': l_d_real, 'out_d_real': pred_real.mean()}
        expected |= {'l_d_fake': l_d_fake, 'out_d_fake': pred_fake.mean()}
        assert gan.get_current_log() == {
            name: pytest.approx(value.item(), abs=1e-6) for name, value in expected.items()
        }
        for ours, plain in ((gan.net_g, net_g), (gan.net_d, net_d), (gan.net_g_ema, ema)):
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(ours.state_dict()[name], value, atol=1e-6, rtol=0)


REAL, FAKE = [1.0, 2.0, -0.5, 3.0], [0.5, -1.5, 1.0, -2.0]


@pytest.fixture
def judged(model):
    """A model whose discriminator has given logits of real and of generated images."""
    gan = model()
    gan.net_d = lambda images: images * 1
    gan.gt, gan.output = (
        torch.tensor(logits).view(4, 1, 1, 1).requires_grad_() for logits in (REAL, FAKE)
    )
    return gan


def d_ra(logits, others):
    """The probability that an image is more realistic than the others are on average."""
    return 1 / (1 + np.exp(-(np.array(logits) - np.mean(others))))


def test_the_loss_of_the_generator_is_equation_2(judged):
    """Half of it, by the weight: it learns from generated and from real images."""
    loss = judged.g_gan_loss(judged.net_d)
    equation = -np.log(1 - d_ra(REAL, FAKE)).mean() - np.log(d_ra(FAKE, REAL)).mean()
    assert loss.item() == pytest.approx(0.1 * equation / 2, rel=1e-6)
    loss.backward()
    # d/dC(x_f): through its own term, and through the mean in the term of the real images.
    gradient = -(d_ra(REAL, FAKE).mean() + 1 - d_ra(FAKE, REAL)) / 4
    assert judged.output.grad.ravel().numpy() == pytest.approx(0.1 * gradient / 2, rel=1e-5)
    assert judged.gt.grad is None, 'real images are what they are'


def test_the_losses_of_the_discriminator_are_equation_1(judged):
    """Half of each term, without the weight of the generator's loss."""
    l_d_real, real = judged.d_real_loss()
    l_d_fake, fake = judged.d_fake_loss(real.detach())
    assert (real.ravel().tolist(), fake.ravel().tolist()) == (REAL, FAKE)
    assert l_d_real.item() == pytest.approx(-np.log(d_ra(REAL, FAKE)).mean() / 2, rel=1e-6)
    assert l_d_fake.item() == pytest.approx(-np.log(1 - d_ra(FAKE, REAL)).mean() / 2, rel=1e-6)
    # Neither term teaches through the mean of the others.
    l_d_real.backward()
    assert judged.output.grad is None
    assert judged.gt.grad.ravel().numpy() == pytest.approx((d_ra(REAL, FAKE) - 1) / 8, rel=1e-5)
    judged.gt.grad = None
    l_d_fake.backward()
    assert judged.output.grad.ravel().numpy() == pytest.approx(d_ra(FAKE, REAL) / 8, rel=1e-5)
    assert judged.gt.grad is None


def test_the_generator_minimises_equation_3(model):
    """Perceptual, adversarial and pixel loss, by their weights: the log has the terms."""
    vgg = {'vgg_type': 'vgg11', 'layer_weights': {'conv1_1': 1}, 'weights': 'random'}
    gan = model(
        train__perceptual_opt={'type': 'PerceptualLoss', **vgg},
        train__pixel_opt={'type': 'L1Loss', 'loss_weight': 0.01},
    )
    data = batch()
    net_g, net_d = copy.deepcopy(gan.net_g), copy.deepcopy(gan.net_d)
    features = gan.cri_perceptual.vgg
    gan.feed_data(data)
    losses = gan.restore_and_compare()
    sum(losses.values()).backward()

    output = net_g(data['lq'])
    real, fake = (features(images)['conv1_1'] for images in (data['gt'], output))
    l_percep = (fake - real.detach()).abs().mean()
    real, fake = net_d(data['gt']).detach(), net_d(output)
    l_gan = (relativistic(real, fake, 0) + relativistic(fake, real, 1)) / 2
    l_pix = (output - data['gt']).abs().mean()
    (l_percep + 0.1 * l_gan + 0.01 * l_pix).backward()
    expected = {'l_g_pix': 0.01 * l_pix, 'l_g_percep': l_percep, 'l_g_gan': 0.1 * l_gan}
    assert {name: loss.item() for name, loss in losses.items()} == {
        name: pytest.approx(value.item(), rel=1e-5) for name, value in expected.items()
    }
    for ours, plain in zip(gan.net_g.parameters(), net_g.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, atol=1e-6, rtol=1e-4)


def test_a_hinge_loss_whose_terms_would_cancel_is_refused(train_opt):
    opt = adversarial(train_opt(), 'ESRGANModel') | {'dist': False, 'is_train': True}
    opt['train']['gan_opt']['gan_type'] = 'hinge'
    with pytest.raises(ValueError, match='two relativistic terms cancel'):
        build_model(opt)

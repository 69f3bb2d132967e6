"""Training with a relativistic average discriminator."""

import copy

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


def test_the_generator_learns_from_real_images_too(model):
    """Its loss depends on how real they look."""
    gan = model()
    gan.feed_data(batch())
    gan.output = gan.net_g(gan.lq)
    with gan.frozen(gan.net_d) as net_d, torch.no_grad():
        loss = gan.g_gan_loss(net_d).item()
        gan.gt = torch.rand_like(gan.gt) * 0.1
        assert gan.g_gan_loss(net_d).item() != loss


def test_a_hinge_loss_whose_terms_would_cancel_is_refused(train_opt):
    opt = adversarial(train_opt(), 'ESRGANModel') | {'dist': False, 'is_train': True}
    opt['train']['gan_opt']['gan_type'] = 'hinge'
    with pytest.raises(ValueError, match='two relativistic terms cancel'):
        build_model(opt)

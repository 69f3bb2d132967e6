import pytest
import torch

from basicsr.archs.discriminator_arch import UNetDiscriminatorSN, VGGStyleDiscriminator


@pytest.mark.parametrize('size', [(192, 192), (128, 96), (96, 128)])
def test_vgg_style_discriminator_checks_both_sides_and_names_the_options(size):
    net = VGGStyleDiscriminator(3, 4, input_size=128)
    with pytest.raises(ValueError, match=rf'{size[0]}x{size[1]}.* is 128.*gt_size and input_size'):
        net(torch.rand(1, 3, *size))


def test_vgg_style_discriminator_is_built_for_128_or_256_pixels_only():
    with pytest.raises(ValueError, match=r'input_size 192 must be 128 or 256.*gt_size'):
        VGGStyleDiscriminator(3, 4, input_size=192)


def test_vgg_style_discriminator_gives_finite_gradients():
    net = VGGStyleDiscriminator(1, 4)
    out = net(torch.rand(2, 1, 128, 128))
    assert out.shape == (2, 1)
    out.mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


@torch.no_grad()
def test_unet_discriminator_crops_the_scores_of_a_padded_image():
    torch.manual_seed(0)
    net = UNetDiscriminatorSN(3, 4).eval()
    x = torch.rand(1, 3, 13, 18)
    whole = torch.nn.functional.pad(x, (0, 6, 0, 3), 'reflect')
    assert torch.equal(net(x), net(whole)[..., :13, :18])


@torch.no_grad()
def test_unet_discriminator_uses_its_skips_on_request():
    torch.manual_seed(0)
    net, plain = UNetDiscriminatorSN(3, 4), UNetDiscriminatorSN(3, 4, skip_connection=False)
    plain.load_state_dict(net.state_dict())
    x = torch.rand(1, 3, 16, 16)
    assert not torch.allclose(net.eval()(x), plain.eval()(x))

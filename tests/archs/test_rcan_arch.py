import pytest
import torch

from basicsr.archs.rcan_arch import RCAB, RCAN, ResidualGroup


def test_a_mean_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match='give one value per channel'):
        RCAN(4, 4, rgb_mean=(0.5, 0.5, 0.5))


@pytest.mark.parametrize('upscale', [5, 6])
def test_scales_it_cannot_do_are_refused(upscale):
    with pytest.raises(ValueError, match=f'cannot enlarge by {upscale}'):
        RCAN(3, 3, num_feat=4, num_group=1, num_block=1, upscale=upscale)


@torch.no_grad()
def test_res_scale_weighs_the_residual_of_a_block():
    torch.manual_seed(0)
    x = torch.rand(1, 8, 5, 5)
    full, half = RCAB(8, 4), RCAB(8, 4, res_scale=0.5)
    half.load_state_dict(full.state_dict())
    assert torch.allclose(half(x) - x, (full(x) - x) / 2, atol=1e-6)


@torch.no_grad()
def test_a_group_adds_its_convolution_to_its_input():
    group = ResidualGroup(8, num_block=2, squeeze_factor=4)
    torch.nn.init.zeros_(group.conv.weight)
    torch.nn.init.ones_(group.conv.bias)
    x = torch.rand(1, 8, 5, 5)
    assert torch.equal(group(x), x + 1)

import pytest
import torch
import torch.nn.functional as F

from basicsr.archs.srresnet_arch import MSRResNet


@pytest.mark.parametrize('upscale', [1, 5, 8])
def test_scales_it_cannot_do_are_refused(upscale):
    with pytest.raises(ValueError, match=f'upscale {upscale}; choose 2, 3 or 4'):
        MSRResNet(upscale=upscale)


@torch.no_grad()
def test_without_residual_the_output_is_the_interpolated_input():
    net = MSRResNet(num_feat=4, num_block=1, upscale=3)
    torch.nn.init.zeros_(net.conv_last.weight)
    x = torch.rand(1, 3, 5, 7)
    want = F.interpolate(x, scale_factor=3, mode='bilinear', align_corners=False)
    assert torch.equal(net(x), want)

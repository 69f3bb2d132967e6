import pytest
import torch

from basicsr.archs.edsr_arch import EDSR

TINY = {'num_feat': 4, 'num_block': 1, 'upscale': 2}


def test_the_mean_is_no_weight_but_follows_device_and_type():
    net = EDSR(3, 3, **TINY)
    assert 'mean' not in net.state_dict()
    assert net.mean.flatten().tolist() == pytest.approx([0.4488, 0.4371, 0.404])
    assert net.to('meta', torch.float64).mean.device.type == 'meta'
    assert net.mean.dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize(
    ('channels', 'mean', 'want'),
    [
        ((3, 3), (0.5, 0.25, 0.125), [0.5, 0.25, 0.125]),
        ((1, 1), (0.5,), [0.5]),
        ((1, 3), (0.5,), [0.5, 0.5, 0.5]),
        ((4, 4), (0.4488, 0.4371, 0.404), [0, 0, 0, 0]),
        ((3, 1), (0.5, 0.25, 0.125), [0]),
    ],
)
def test_the_mean_comes_back_where_it_fits_the_output(channels, mean, want):
    net = EDSR(*channels, rgb_mean=mean, **TINY)
    torch.nn.init.zeros_(net.conv_last.weight)
    torch.nn.init.zeros_(net.conv_last.bias)
    out = net(torch.rand(1, channels[0], 4, 4))
    assert out[0, :, 0, 0].tolist() == pytest.approx(want)


def test_a_mean_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match='give one value per channel'):
        EDSR(1, 1, rgb_mean=(0.5, 0.5, 0.5))

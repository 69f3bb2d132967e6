import pytest
import torch

from basicsr.archs.ridnet_arch import ChannelAttention, MeanShift, RIDNet


def test_mean_shift_subtracts_and_adds_in_the_images_range():
    x = torch.full((1, 2, 1, 1), 100.0)
    minus, plus = (MeanShift(255, (0.2, 0.4), (1.0, 2.0), sign) for sign in (-1, 1))
    assert minus(x).flatten().tolist() == pytest.approx([100 - 51, (100 - 102) / 2])
    assert plus(x).flatten().tolist() == pytest.approx([100 + 51, (100 + 102) / 2])


def test_mean_shift_needs_a_mean_and_a_deviation_for_each_channel():
    with pytest.raises(ValueError, match='rgb_mean has 3 values and rgb_std 2'):
        MeanShift(255, (0, 0, 0), (1, 1))


def test_the_mean_is_frozen_and_still_part_of_the_weights():
    net = RIDNet(3, 16, 3, num_block=1)
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    assert frozen == ['sub_mean.weight', 'sub_mean.bias', 'add_mean.weight', 'add_mean.bias']
    assert set(frozen) <= set(net.state_dict())


def test_a_mean_shift_on_its_own_trains_if_asked():
    assert all(p.requires_grad for p in MeanShift(255, (0,), (1,)).parameters())


@pytest.mark.parametrize('channels', [(1, 1), (4, 4), (4, 1)])
def test_other_channels_than_rgb_have_mean_zero(channels):
    net = RIDNet(channels[0], 8, channels[1], num_block=1)
    x = torch.rand(1, channels[0], 2, 2)
    assert torch.equal(net.sub_mean(x), x)
    assert net.add_mean.weight.shape == (channels[1], channels[1], 1, 1)


def test_a_deviation_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match='rgb_std 3'):
        RIDNet(1, 8, 1, rgb_std=(0.5, 0.5, 0.5))


def test_channel_attention_takes_its_arguments_by_name():
    block = ChannelAttention(mid_channels=32, squeeze_factor=8)
    assert block.attention[1].out_channels == 4

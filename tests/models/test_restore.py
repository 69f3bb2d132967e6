"""Restoring images and clips in one piece or in many."""

import pytest
import torch
from torch import nn

from basicsr.archs import build_network
from basicsr.models.restore import receptive_halo, restore

# type and arguments, scale, multiple
CONVOLUTIONAL = {
    'MSRResNet': ({'num_feat': 8, 'num_block': 2, 'upscale': 4}, 4, 1),
    'EDSR': ({'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 8, 'num_block': 2, 'upscale': 3}, 3, 1),
    'RRDBNet': ({'num_in_ch': 3, 'num_out_ch': 3, 'scale': 2, 'num_feat': 8, 'num_block': 1}, 2, 2),
    'SRVGGNetCompact': ({'num_feat': 8, 'num_conv': 4, 'upscale': 4}, 4, 1),
    'ECBSR': (
        {
            **{'num_in_ch': 3, 'num_out_ch': 3, 'num_block': 2, 'num_channel': 8},
            **{'with_idt': True, 'act_type': 'prelu', 'scale': 2},
        },
        2,
        1,
    ),
    # Windows that are not shared by tiles are as far away as the halo.
    'SwinIR': (
        {
            **{'upscale': 2, 'img_size': 16, 'window_size': 8, 'depths': [2], 'embed_dim': 12},
            **{'num_heads': [2], 'mlp_ratio': 2, 'upsampler': 'pixelshuffle'},
        },
        2,
        8,
    ),
}
GLOBAL = {
    'RCAN': (
        {
            'num_in_ch': 3,
            'num_out_ch': 3,
            'num_feat': 16,
            'num_group': 1,
            'num_block': 1,
            'upscale': 2,
        },
        2,
    ),
    'RIDNet': ({'in_channels': 3, 'mid_channels': 16, 'out_channels': 3, 'num_block': 1}, 1),
}


def images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


class Upscale(nn.Module):
    """Nearest-neighbour enlargement that records the sizes of its inputs."""

    def __init__(self, scale=2):
        super().__init__()
        self.scale, self.sizes = scale, []

    def forward(self, x):
        self.sizes.append(tuple(x.shape))
        return x.repeat_interleave(self.scale, -1).repeat_interleave(self.scale, -2)


@pytest.mark.parametrize('name', CONVOLUTIONAL)
def test_tiles_give_exactly_what_the_whole_image_gives(name):
    arguments, scale, multiple = CONVOLUTIONAL[name]
    net = build_network({'type': name, **arguments})
    lq = images(2, 3, 75, 101)
    whole = restore(net, lq, scale, multiple=multiple)
    assert whole.shape == (2, 3, 75 * scale, 101 * scale)
    assert torch.equal(restore(net, lq, scale, multiple=multiple, tile=32), whole)
    assert net.training


@pytest.mark.parametrize('name', GLOBAL)
def test_tiles_of_a_network_that_looks_at_the_whole_image_need_an_overlap(name):
    arguments, scale = GLOBAL[name]
    net = build_network({'type': name, **arguments})
    with pytest.raises(ValueError, match=f'{name} looks at the whole image.*give an overlap'):
        restore(net, images(1, 3, 40, 40), scale, tile=16)


def test_the_halo_is_the_reach_of_the_network():
    """Three 3 x 3 convolutions look 3 pixels far, a dilated one 2 x 40."""
    convs = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))
    assert receptive_halo(convs, 3, 1) == 16
    assert receptive_halo(nn.Conv2d(3, 3, 5, padding=80, dilation=40), 3, 1) == 80
    assert receptive_halo(nn.Conv2d(3, 3, 1), 3, 1) == 0


def test_blended_tiles_have_no_seams():
    net = build_network({'type': 'RCAN', **GLOBAL['RCAN'][0]})
    lq = images(1, 3, 96, 96)
    tiled = restore(net, lq, 2, tile=32, overlap=8)
    steps = (tiled[..., 1:] - tiled[..., :-1]).abs().mean((0, 1, 2))
    seams = steps[[63, 127]]
    assert seams.max() <= steps.quantile(0.99)
    assert (tiled - restore(net, lq, 2)).abs().max() < 0.02


def test_weights_of_blended_tiles_add_up_to_one():
    lq = images(1, 3, 50, 70)
    assert torch.allclose(restore(Upscale(), lq, 2, tile=16, overlap=5), restore(Upscale(), lq, 2))


def test_tiles_are_no_larger_than_asked_for_with_their_overlap():
    net = Upscale()
    restore(net, images(1, 3, 50, 70), 2, tile=20, overlap=4)
    assert max(net.sizes)[-2:] == (16 + 2 * 4, 16 + 2 * 4)
    net.sizes.clear()
    restore(net, images(1, 3, 50, 70), 2, tile=512, overlap=4)
    assert net.sizes == [(1, 3, 50, 70)]


def test_images_of_a_batch_do_not_mix_in_tiles():
    net = build_network({'type': 'SRVGGNetCompact', **CONVOLUTIONAL['SRVGGNetCompact'][0]})
    lq = images(2, 3, 40, 56)
    single = [restore(net, image[None], 4, tile=16) for image in lq]
    assert torch.allclose(restore(net, lq, 4, tile=16), torch.cat(single), atol=1e-6)


def test_sizes_are_padded_to_a_multiple_and_cut_again():
    net = Upscale(3)
    result = restore(net, images(1, 3, 13, 9), 3, multiple=8)
    assert net.sizes == [(1, 3, 16, 16)]
    assert torch.equal(result, Upscale(3)(images(1, 3, 13, 9)))


def test_the_ensemble_of_a_network_without_a_direction_is_its_result():
    lq = images(1, 3, 12, 20)
    assert torch.allclose(restore(Upscale(), lq, 2, ensemble=True), Upscale()(lq))


def test_a_clip_in_chunks_is_the_clip_where_the_overlap_reaches_as_far_as_the_network():
    class Blur(nn.Module):
        """A mean over three frames, zeros beyond the ends."""

        def forward(self, clip):
            padded = nn.functional.pad(clip, (0, 0, 0, 0, 0, 0, 1, 1))
            return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3

    clip = images(2, 11, 3, 8, 8)
    whole = restore(Blur(), clip, 1)
    assert torch.equal(restore(Blur(), clip, 1, frames=4, frame_overlap=1), whole)
    assert not torch.equal(restore(Blur(), clip, 1, frames=4), whole)


def test_a_clip_is_restored_in_tiles():
    clip = images(1, 5, 3, 40, 50)
    tiled = restore(Upscale(), clip, 2, tile=16, overlap=4, frames=2)
    assert torch.allclose(tiled, Upscale()(clip))


def test_no_gradients_are_kept_and_the_mode_is_put_back():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    assert not restore(net, images(1, 3, 8, 8), 1).requires_grad
    assert not net.training
    net.train()
    before = net[1].running_mean.clone()
    restore(net, images(1, 3, 8, 8), 1)
    assert net.training and torch.equal(net[1].running_mean, before)

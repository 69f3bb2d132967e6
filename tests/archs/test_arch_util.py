import golden
import pytest
import torch
from golden import recipe
from torch import nn
from torchvision.ops import deform_conv2d

from basicsr.archs import arch_util


def is_ours(case):
    return case['target'].startswith('basicsr.archs.arch_util:')


def of_kind(kind):
    return golden.params('blocks', lambda case: is_ours(case) and case['kind'] == kind)


@pytest.mark.parametrize('case', of_kind('call'))
def test_functions_give_the_references_values(case):
    assert recipe.compare(case, golden.call(case)) is None


@pytest.mark.parametrize('case', of_kind('module'))
@torch.no_grad()
def test_blocks_give_the_references_values(case):
    block = golden.target(case)(*case.get('init_args', []), **case.get('init', {}))
    if case.get('weights'):
        golden.fill(block, case)
    assert recipe.compare(case, block(*golden.resolve(case['args']))) is None


def wave(*shape):
    """A tensor whose neighbouring values differ, between 0 and 1."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (0.5 + 0.5 * torch.sin(0.37 * index)).float().reshape(shape)


def test_pixel_unshuffle_takes_scale_by_name_and_undoes_pixel_shuffle():
    x = wave(1, 3, 4, 6)
    assert torch.equal(nn.PixelShuffle(2)(arch_util.pixel_unshuffle(x, scale=2)), x)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_flow_warp_in_half_precision_moves_by_whole_pixels_exactly(dtype):
    # Column 301 does not exist in bfloat16: positions need float32.
    x = torch.arange(400, dtype=torch.float32).remainder(7).to(dtype).expand(1, 2, 3, 400)
    flow = torch.zeros(1, 3, 400, 2, dtype=dtype)
    flow[..., 0] = 1
    out = arch_util.flow_warp(x, flow, padding_mode='border')
    assert out.dtype == dtype
    assert torch.allclose(out[..., :-1].float(), x[..., 1:].float(), atol=1e-2)


def test_flow_warp_keeps_double_precision_and_passes_gradients():
    x = wave(1, 2, 5, 4).double().requires_grad_()
    flow = (wave(1, 5, 4, 2).double() - 0.3).requires_grad_()
    assert torch.autograd.gradcheck(arch_util.flow_warp, (x, flow))


def test_flow_warp_refuses_a_flow_of_another_size():
    with pytest.raises(ValueError, match=r'must be \(n, 5, 4, 2\)'):
        arch_util.flow_warp(wave(1, 2, 5, 4), wave(1, 4, 5, 2))


def test_resize_flow_leaves_its_input_and_scales_each_direction():
    flow = torch.ones(1, 2, 4, 6)
    out = arch_util.resize_flow(flow, 'shape', (8, 18))
    assert torch.equal(flow, torch.ones(1, 2, 4, 6))
    assert torch.equal(out[0, :, 0, 0], torch.tensor([3.0, 2.0]))


def test_resize_flow_refuses_an_unknown_size_type():
    with pytest.raises(ValueError, match="'ratio' or 'shape', not 'size'"):
        arch_util.resize_flow(torch.ones(1, 2, 4, 6), 'size', (8, 8))


@pytest.mark.parametrize(('scale', 'layers'), [(1, 0), (2, 2), (3, 2), (4, 4), (8, 6)])
def test_upsample_enlarges_by_powers_of_two_and_three(scale, layers):
    block = arch_util.Upsample(scale, 4)
    assert len(block) == layers
    assert block(torch.rand(1, 4, 3, 5)).shape == (1, 4, 3 * scale, 5 * scale)


@pytest.mark.parametrize('scale', [0, -2, 5, 6, 2.5])
def test_upsample_refuses_other_scales(scale):
    with pytest.raises(ValueError, match=f'cannot enlarge by {scale}'):
        arch_util.Upsample(scale, 4)


def test_default_init_weights_scales_kaiming_and_fills_biases():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(64, 64, 3), nn.BatchNorm2d(4)
    nn.init.zeros_(norm.weight)
    arch_util.default_init_weights([nn.Sequential(conv), norm], 0.1, bias_fill=0.5)
    # Kaiming: variance 2 / fan_in.
    assert conv.weight.std().item() == pytest.approx(0.1 * (2 / (64 * 9)) ** 0.5, rel=0.02)
    assert norm.weight.tolist() == [1] * 4
    assert {*conv.bias.tolist(), *norm.bias.tolist()} == {0.5}


def test_default_init_weights_takes_one_module_and_kaiming_options():
    torch.manual_seed(0)
    linear = nn.Linear(1000, 10, bias=False)
    arch_util.default_init_weights(linear, mode='fan_out')
    assert linear.weight.std().item() == pytest.approx((2 / 10) ** 0.5, rel=0.05)


def test_residual_block_keeps_pytorchs_weights_on_request():
    torch.manual_seed(0)
    small, plain = arch_util.ResidualBlockNoBN(), arch_util.ResidualBlockNoBN(pytorch_init=True)
    assert small.conv1.bias.count_nonzero() == 0
    assert plain.conv1.bias.count_nonzero() > 0


def test_make_layer_builds_each_block_anew():
    layer = arch_util.make_layer(arch_util.ResidualBlockNoBN, 3, num_feat=4, res_scale=0.2)
    assert [block.res_scale for block in layer] == [0.2] * 3
    assert layer[0].conv1 is not layer[1].conv1


def test_make_activation_lists_its_choices():
    with pytest.raises(ValueError, match=r"'swish' is unknown; choose one of .*'prelu', 'relu'"):
        arch_util.make_activation('swish', 4)


def test_channel_attention_has_a_hidden_channel_however_few_features():
    block = arch_util.ChannelAttention(8, squeeze_factor=16)
    assert block.attention[1].weight.shape == (1, 8, 1, 1)
    x = wave(1, 8, 3, 3)
    assert ((block(x) > 0) == (x > 0)).all()
    assert (block(x) <= x).all()


@pytest.mark.parametrize('size', [(1, 1), (3, 9), (5, 5), (8, 16)])
def test_pad_to_multiple_pads_bottom_and_right_from_the_image(size):
    x = wave(1, 2, *size)
    out = arch_util.pad_to_multiple(x, 8)
    assert out.shape[-2:] == ((size[0] + 7) // 8 * 8, (size[1] + 7) // 8 * 8)
    assert torch.equal(out[..., : size[0], : size[1]], x)
    assert torch.isin(out, x).all()


def test_pad_to_multiple_mirrors_without_repeating_the_edge():
    x = torch.arange(6.0).view(1, 1, 1, 6).expand(1, 1, 4, 6)
    assert arch_util.pad_to_multiple(x, 4)[0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 4, 3]


def test_mean_per_channel_is_zero_for_images_that_are_not_rgb():
    mean = [0.4488, 0.4371, 0.4040]
    assert arch_util.mean_per_channel(mean, 3) == tuple(mean)
    assert arch_util.mean_per_channel(mean, 4) == (0, 0, 0, 0)
    assert arch_util.mean_per_channel([0.5], 1) == (0.5,)


def test_mean_per_channel_refuses_another_mean_of_the_wrong_length():
    with pytest.raises(ValueError, match='has 3 values, but the image has 1 channels'):
        arch_util.mean_per_channel((0.5, 0.5, 0.5), 1)


def test_dcnv2_takes_offsets_and_masks_from_the_other_features():
    torch.manual_seed(0)
    block = arch_util.DCNv2Pack(4, 6, 3, padding=1, deformable_groups=2)
    nn.init.uniform_(block.conv_offset.weight)
    x, feat = wave(1, 4, 5, 6), wave(1, 4, 5, 6).flip(3)
    predicted = block.conv_offset(feat)
    offset, mask = predicted[:, :36], predicted[:, 36:].sigmoid()
    want = deform_conv2d(x, offset, block.weight, block.bias, padding=1, mask=mask)
    assert torch.allclose(block(x, feat), want)
    assert not torch.allclose(block(x, x), want)


def test_dcnv2_never_reads_a_value_back_from_the_device():
    # The meta device has no values: anything that asks for one fails there.
    block = arch_util.DCNv2Pack(4, 4, 3, padding=1, deformable_groups=2).to('meta')
    x = torch.empty(1, 4, 5, 6, device='meta')
    assert block(x, x).shape == (1, 4, 5, 6)


def test_tuples_repeat_a_value_and_keep_an_iterable():
    assert arch_util.to_2tuple(3) == (3, 3)
    assert arch_util.to_2tuple((4, 5)) == (4, 5)
    assert arch_util.to_ntuple(3)(1) == (1, 1, 1)
    assert [len(f(0)) for f in (arch_util.to_1tuple, arch_util.to_3tuple, arch_util.to_4tuple)] == [
        1,
        3,
        4,
    ]

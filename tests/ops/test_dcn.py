import golden
import pytest
import torch
import torch.nn.functional as F
from golden import recipe
from torchvision.ops import deform_conv2d

from basicsr.ops import dcn


def of_kind(kind):
    return golden.params(
        'blocks', lambda c: c['target'].startswith('basicsr.ops.dcn:') and c['kind'] == kind
    )


@pytest.mark.parametrize('case', of_kind('call'))
def test_functions_give_the_references_values(case):
    assert recipe.compare(case, golden.call(case)) is None


@pytest.mark.parametrize('case', of_kind('module'))
@torch.no_grad()
def test_layers_give_the_references_values(case):
    layer = golden.fill(golden.target(case)(**case['init']), case)
    assert recipe.compare(case, layer(*golden.resolve(case['args']))) is None


def test_gradients_are_those_of_finite_differences():
    shapes = [(1, 2, 4, 5), (1, 18, 4, 5), (1, 9, 4, 5), (3, 2, 3, 3), (3,)]
    # Apart from whole pixels, where the interpolation has corners.
    tensors = [(0.2 + 0.6 * random(*s)).double().requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *args: dcn.modulated_deform_conv(*args, 1, 1), tensors)


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_values_and_gradients_are_torchvisions():
    x, offset, mask = random(2, 4, 6, 7), 3 * random(2, 36, 6, 7), random(2, 18, 6, 7)
    weight, bias = random(6, 4, 3, 3), random(6)
    ours = [t.clone().requires_grad_() for t in (x, offset, mask, weight, bias)]
    theirs = [t.clone().requires_grad_() for t in (x, offset, mask, weight, bias)]
    out = dcn.modulated_deform_conv(*ours, padding=1, deformable_groups=2)
    x, offset, mask, weight, bias = theirs
    want = deform_conv2d(x, offset, weight, bias, padding=1, mask=mask)
    assert torch.allclose(out, want, atol=1e-5)
    out.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_give_nearly_the_same_output_in_their_type(dtype):
    torch.manual_seed(0)
    layer = dcn.ModulatedDeformConvPack(4, 6, 3, padding=1, deformable_groups=2)
    x = random(1, 4, 6, 7)
    want = layer(x)
    out = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert torch.allclose(out.float(), want, atol=0.02)


def test_autocast_runs():
    layer = dcn.ModulatedDeformConvPack(4, 6, 3, padding=1)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = layer(random(1, 4, 6, 7))
    out.float().mean().backward()
    assert layer.conv_offset.weight.grad.isfinite().all()


def test_a_new_layer_is_a_plain_convolution():
    x = random(1, 4, 6, 7)
    first = dcn.DeformConvPack(4, 6, 3, padding=1, deformable_groups=2)
    second = dcn.ModulatedDeformConvPack(4, 6, 3, padding=1, deformable_groups=2)
    plain = F.conv2d(x, first.weight, padding=1)
    halved = F.conv2d(x, second.weight, padding=1) / 2  # every mask is 1/2
    assert torch.allclose(first(x), plain, atol=1e-5)
    assert torch.allclose(second(x), halved, atol=1e-5)


def test_groups_stride_and_dilation_reach_the_convolution():
    layer = dcn.DeformConvPack(4, 6, (3, 1), stride=2, padding=(2, 0), dilation=2, groups=2)
    x = random(1, 4, 9, 8)
    want = F.conv2d(x, layer.weight, None, 2, (2, 0), 2, 2)
    assert torch.allclose(layer(x), want, atol=1e-5)


@pytest.mark.parametrize(
    ('layer', 'shapes'),
    [
        (
            dcn.ModulatedDeformConvPack(8, 6, 3, padding=1, deformable_groups=2),
            {
                'weight': (6, 8, 3, 3),
                'bias': (6,),
                'conv_offset.weight': (54, 8, 3, 3),
                'conv_offset.bias': (54,),
            },
        ),
        (
            dcn.DeformConvPack(8, 6, 3, padding=1, deformable_groups=2),
            {
                'weight': (6, 8, 3, 3),
                'conv_offset.weight': (36, 8, 3, 3),
                'conv_offset.bias': (36,),
            },
        ),
    ],
    ids=['v2', 'v1'],
)
def test_keys_and_shapes_are_those_of_published_weights(layer, shapes):
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == shapes


def test_initialisation_is_uniform_within_one_over_root_fan_in():
    layer = dcn.ModulatedDeformConvPack(16, 64, 3)
    bound = 1 / (16 * 9) ** 0.5
    assert 0.98 * bound < layer.weight.abs().max() <= bound
    torch.nn.init.ones_(layer.conv_offset.weight)
    layer.init_weights()
    zeros = (layer.bias, layer.conv_offset.weight, layer.conv_offset.bias)
    assert not any(value.any() for value in zeros)


def test_init_offset_sets_offsets_to_zero_again():
    layer = dcn.DeformConvPack(4, 4, 3)
    torch.nn.init.ones_(layer.conv_offset.weight)
    torch.nn.init.ones_(layer.conv_offset.bias)
    layer.init_offset()
    offsets = layer.conv_offset(torch.rand(1, 4, 5, 6))
    assert offsets.shape == (1, 18, 3, 4)
    assert offsets.abs().max() == 0


@pytest.mark.parametrize(
    ('name', 'channels'), [('x', (5, 18, 9)), ('offset', (4, 36, 9)), ('mask', (4, 18, 18))]
)
def test_channels_that_do_not_fit_are_named(name, channels):
    x, offset, mask = (random(1, c, 5, 5) for c in channels)
    with pytest.raises(ValueError, match=f'{name} has'):
        dcn.modulated_deform_conv(x, offset, mask, random(4, 4, 3, 3), padding=1)


def test_channels_must_be_multiples_of_groups():
    with pytest.raises(ValueError, match='multiples of groups 3'):
        dcn.DeformConv(4, 6, 3, groups=3)

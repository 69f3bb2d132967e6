import json
import math

import golden
import pytest
import torch
from golden import recipe
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from basicsr.archs import build_network
from basicsr.archs.swinir_arch import (
    BasicLayer,
    DropPath,
    PatchMerging,
    SwinIR,
    SwinTransformerBlock,
    UpsampleOneStep,
    WindowAttention,
    window_partition,
    window_reverse,
)

STATES = json.loads((recipe.HERE / 'archs_state.json').read_text(encoding='utf-8'))
HEADS = [('pixelshuffle', 3), ('pixelshuffledirect', 2), ('nearest+conv', 4), ('', 1)]


def tiny(**options):
    torch.manual_seed(0)
    net = SwinIR(
        **{
            'img_size': 16,
            'embed_dim': 12,
            'depths': [2, 2],
            'num_heads': [2, 3],
            'window_size': 8,
            'mlp_ratio': 2,
            'upsampler': 'pixelshuffledirect',
            **options,
        }
    )
    for name, parameter in net.named_parameters():
        if 'bias' in name:  # zero or nearly so at first, which would hide their effect
            nn.init.normal_(parameter, std=0.5)
    return net.eval()


def image(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize('case', golden.params('archs', lambda case: case['network'] == 'SwinIR'))
def test_keys_outputs_and_gradients_are_the_references(case):
    with torch.device('meta' if case.get('structure_only') else 'cpu'):
        net = build_network(case['net'] | {'type': 'SwinIR'}).eval()
    assert {n: list(v.shape) for n, v in net.state_dict().items()} == STATES[case['state']]
    if case.get('structure_only'):
        return
    leaves = {'out': golden.fill(net, case)(*golden.resolve(case['args']))}
    if case.get('grads'):
        leaves['out'].square().mean().backward()
        grads = {n: p.grad for n, p in sorted(net.named_parameters()) if p.grad is not None}
        leaves['grad_names'] = '\n'.join(grads)
        leaves['grad_norms'] = torch.stack([grad.double().norm() for grad in grads.values()])
    assert recipe.compare(case, leaves) is None


@pytest.mark.parametrize(
    ('options', 'size', 'total', 'mean_square'),
    [
        (
            {'upscale': 4, 'depths': [2, 2], 'num_heads': [2, 2], 'upsampler': 'pixelshuffle'},
            (3, 16, 24),
            1704.825392655,
            0.04163484789,
        ),
        ({'upscale': 2}, (3, 16, 16), 1407.3694040328, 0.339326749395),
        (
            {'upscale': 4, 'upsampler': 'nearest+conv', 'resi_connection': '3conv'},
            (3, 16, 24),
            2586.3994896254,
            15.310395795682,
        ),
        (
            {
                'upscale': 1,
                'in_chans': 1,
                'img_size': 14,
                'window_size': 7,
                'img_range': 255.0,
                'upsampler': '',
            },
            (1, 14, 21),
            129.8070981448,
            0.362484272208,
        ),
    ],
)
@torch.no_grad()
def test_double_precision_outputs_are_those_recorded_from_the_reference(
    options, size, total, mean_square
):
    net = tiny(**{'depths': [2], 'num_heads': [2], **options}).double()
    for i, (name, parameter) in enumerate(sorted(net.named_parameters())):
        fan = parameter[0].numel() if parameter.ndim > 1 else 4
        value = torch.cos(0.7 * torch.arange(parameter.numel(), dtype=torch.float64) + 0.3 * i)
        value = value.view_as(parameter) / fan**0.5
        is_norm_scale = parameter.ndim == 1 and name.endswith('weight')
        parameter.copy_(1 + 0.1 * value if is_norm_scale else value)
    x = 0.5 + 0.4 * torch.sin(0.9 * torch.arange(math.prod(size), dtype=torch.float64))
    out = net(x.view(1, *size))
    assert out.sum().item() == pytest.approx(total, rel=1e-9)
    assert out.square().mean().item() == pytest.approx(mean_square, rel=1e-9)


@pytest.mark.parametrize('size', [(64, 64), (48, 48), (17, 23), (8, 8), (5, 40), (1, 1)])
@torch.no_grad()
def test_the_output_does_not_depend_on_img_size(size):
    net, other = tiny(img_size=48), tiny(img_size=64)
    other.load_state_dict(net.state_dict(), strict=True)
    x = image(2, 3, *size)
    torch.testing.assert_close(other(x), net(x), rtol=0, atol=1e-5)


def test_strict_loading_keeps_the_mask_of_the_networks_own_img_size():
    net, other = tiny(img_size=48), tiny(img_size=[24, 16])
    want = other.state_dict()
    name = 'layers.0.residual_group.blocks.1.attn_mask'
    mask = want[name].clone()
    other.load_state_dict(net.state_dict(), strict=True)
    assert mask.shape == (6, 64, 64)
    assert torch.equal(other.state_dict()[name], mask)
    assert net.state_dict()[name].shape == (36, 64, 64)


@pytest.mark.parametrize(('size', 'times'), [((16, 16), 0), ((9, 16), 0), ((32, 16), 1)])
@torch.no_grad()
def test_the_mask_of_another_size_is_made_once_per_forward(size, times, monkeypatch):
    calls = []
    calculate_mask = SwinTransformerBlock.calculate_mask
    monkeypatch.setattr(
        SwinTransformerBlock,
        'calculate_mask',
        lambda self, x_size: calls.append(x_size) or calculate_mask(self, x_size),
    )
    net = tiny()
    calls.clear()
    net(image(1, 3, *size))
    assert len(calls) == times


def test_the_mask_of_another_size_is_made_on_the_networks_device():
    net = tiny().to('meta')
    assert net(torch.empty(1, 3, 32, 20, device='meta')).shape == (1, 3, 64, 40)


@torch.no_grad()
def test_a_network_without_shifted_blocks_makes_no_mask(monkeypatch):
    monkeypatch.delattr(SwinTransformerBlock, 'calculate_mask')
    net = tiny(depths=[1, 1])
    assert not any('attn_mask' in name for name in net.state_dict())
    assert net(image(1, 3, 20, 9)).isfinite().all()


@torch.no_grad()
def test_a_block_alone_gives_the_same_with_a_mask_of_its_own_and_a_shared_one():
    block = tiny().layers[0].residual_group.blocks[1]
    x = image(2, 24 * 16, 12)
    shared = block.calculate_mask((24, 16))
    assert torch.equal(block(x, (24, 16)), block(x, (24, 16), shared))
    x = image(2, 16 * 16, 12)
    assert torch.equal(block(x, (16, 16)), block(x, (16, 16), block.calculate_mask((16, 16))))


@pytest.mark.parametrize(('img_size', 'window'), [(4, 4), (8, 8), ([8, 24], 8), (9, 8)])
@torch.no_grad()
def test_a_window_that_covers_img_size_is_not_shifted(img_size, window):
    net = tiny(img_size=img_size)
    names = [name for name in net.state_dict() if 'attn_mask' in name]
    assert len(names) == (2 if img_size == 9 else 0)
    table = net.layers[0].residual_group.blocks[1].attn.relative_position_bias_table
    assert len(table) == (2 * window - 1) ** 2
    assert net(image(1, 3, 12, 11)).shape == (1, 3, 24, 22)


@pytest.mark.parametrize('in_chans', [1, 3, 4])
@pytest.mark.parametrize(('upsampler', 'upscale'), HEADS)
@torch.no_grad()
def test_every_head_gives_exactly_scale_times_an_odd_size(upsampler, upscale, in_chans):
    net = tiny(upsampler=upsampler, upscale=upscale, in_chans=in_chans)
    out = net(image(1, in_chans, 5, 13))
    assert out.shape == (1, in_chans, 5 * upscale, 13 * upscale)
    assert out.isfinite().all()


@torch.no_grad()
def test_padding_reflects_the_image_at_the_bottom_and_right():
    net, x = tiny(), image(1, 3, 13, 11)
    padded = torch.cat([x, x[..., 9:12, :].flip(-2)], dim=-2)
    padded = torch.cat([padded, padded[..., 5:10].flip(-1)], dim=-1)
    assert torch.equal(net(x), net(padded)[..., :26, :22])


@torch.no_grad()
def test_without_upsampler_the_network_adds_to_its_input():
    net, x = tiny(upsampler=None, img_range=255.0), image(1, 3, 9, 10)
    nn.init.zeros_(net.conv_last.weight)
    nn.init.zeros_(net.conv_last.bias)
    torch.testing.assert_close(net(x), x)


def test_checkpointing_changes_neither_output_nor_gradients():
    results = []
    for use_checkpoint in (False, True):
        net = tiny(use_checkpoint=use_checkpoint, drop_path_rate=0.5).train()
        torch.manual_seed(7)
        out = net(image(4, 3, 9, 20))
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ('dtype', 'tolerance'), [(torch.float64, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.1)]
)
@torch.no_grad()
def test_other_precisions_give_nearly_the_same_output_in_their_type(dtype, tolerance):
    net, x = tiny(), image(1, 3, 12, 25)
    want = net(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert (net(x) - want).norm() < 0.1 * want.norm()
    out = net.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert (out.float() - want).norm() < tolerance * want.norm()


@torch.no_grad()
def test_features_beyond_the_range_of_float16_stay_finite_in_bfloat16():
    net = tiny()
    net.conv_first.weight.mul_(1e6)
    x = image(1, 3, 16, 16)
    assert net.conv_first(x).abs().max() > 1e5
    assert net.bfloat16()(x.bfloat16()).isfinite().all()


@torch.no_grad()
def test_attention_is_a_softmax_over_the_window_with_bias_and_mask():
    torch.manual_seed(0)
    attention = WindowAttention(12, (2, 3), 3)
    nn.init.normal_(attention.relative_position_bias_table)
    x, mask = image(4, 6, 12), -100.0 * (image(2, 6, 6) > 0.6)
    mask.diagonal(dim1=1, dim2=2).zero_()
    for i, tokens in enumerate(x):
        q, k, v = attention.qkv(tokens).view(6, 3, 3, 4).unbind(1)
        logits = torch.einsum('ihc,jhc->hij', q, k) / 2
        for a in range(6):
            for b in range(6):
                dy, dx = a // 3 - b // 3, a % 3 - b % 3
                row = (dy + 1) * 5 + dx + 2
                logits[:, a, b] += attention.relative_position_bias_table[row]
        weights = (logits + mask[i % 2]).softmax(-1)
        want = attention.proj(torch.einsum('hij,jhc->ihc', weights, v).flatten(1))
        torch.testing.assert_close(attention(x, mask)[i], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('is_masked', [False, True])
def test_gradients_of_the_fused_attention_are_those_of_the_formula(is_masked):
    torch.manual_seed(0)
    attention = WindowAttention(12, 4, 3, qk_scale=0.7)
    x = image(4, 16, 12).requires_grad_()
    mask = -100.0 * (image(2, 16, 16) > 0.6) if is_masked else None
    inputs = [x, *attention.parameters()]

    q, k, v = attention.qkv(x).view(4, 16, 3, 3, 4).permute(2, 0, 3, 1, 4)
    table = attention.relative_position_bias_table[attention.relative_position_index]
    logits = 0.7 * q @ k.transpose(2, 3) + table.permute(2, 0, 1)
    if mask is not None:
        logits = logits + mask.repeat(2, 1, 1)[:, None]
    want = attention.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    got = attention(x, mask)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    for ours, formula in zip(
        torch.autograd.grad(got.square().sum(), inputs),
        torch.autograd.grad(want.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, formula, rtol=1e-5, atol=1e-6)


def test_dropout_of_the_attention_keeps_its_mean():
    torch.manual_seed(0)
    attention = WindowAttention(12, 4, 3, attn_drop=0.3)
    x = image(1, 16, 12)
    with torch.no_grad():
        mean = attention(x.repeat(4000, 1, 1)).mean(0)
        torch.testing.assert_close(mean, attention.eval()(x)[0], rtol=0, atol=5e-3)


def test_dropout_of_the_attention_acts_in_training_only():
    attention = WindowAttention(12, 4, 3, attn_drop=0.5)
    x = image(2, 16, 12)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    layer, x = DropPath(0.25), torch.ones(4000, 2, 3)
    out = layer(x)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(out.amin((1, 2)), out.amax((1, 2)))
    assert out.mean() == pytest.approx(1, abs=0.03)
    assert layer.eval()(x) is x
    assert DropPath()(x) is x


def test_stochastic_depth_grows_linearly_over_all_blocks():
    net = tiny(depths=[2, 3], drop_path_rate=0.4)
    blocks = [m for m in net.modules() if isinstance(m, SwinTransformerBlock)]
    assert [b.drop_path.drop_prob for b in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_windows_are_cut_row_by_row_and_joined_again():
    x = torch.arange(2 * 4 * 6).view(2, 4, 6, 1)
    windows = window_partition(x, 2)
    assert windows[1].flatten().tolist() == [2, 3, 8, 9]
    assert windows[3].flatten().tolist() == [12, 13, 18, 19]
    assert torch.equal(window_reverse(windows, 2, 4, 6), x)


@torch.no_grad()
def test_patch_merging_joins_each_square_of_tokens():
    merge = PatchMerging((2, 4), 1, norm_layer=nn.Identity)
    merge.reduction.weight.copy_(torch.tensor([[1.0, 10, 100, 1000], [0, 0, 0, 1]]))
    out = merge(torch.arange(1.0, 9).view(1, 8, 1))
    assert out.tolist() == [[[6251, 6], [8473, 8]]]


def test_a_layer_with_patch_merging_halves_its_tokens():
    layer = BasicLayer(12, (8, 8), 2, 3, window_size=4, downsample=PatchMerging)
    assert layer(image(1, 64, 12), (8, 8)).shape == (1, 16, 24)


@torch.no_grad()
def test_the_position_embedding_is_resized_for_other_sizes():
    net = tiny(ape=True)
    assert net.no_weight_decay() == {'absolute_pos_embed'}
    x = image(1, 3, 16, 16)
    before = net(x), net(image(1, 3, 9, 30))
    ramp = torch.arange(16.0).repeat_interleave(16)  # the row of each token
    net.absolute_pos_embed.copy_(ramp.view(1, 256, 1).expand(1, 256, 12))
    after = net(x), net(image(1, 3, 9, 30))
    assert all(not torch.allclose(a, b) for a, b in zip(before, after, strict=True))
    assert net._position_embedding((16, 16)) is net.absolute_pos_embed
    resized = net._position_embedding((32, 24)).view(32, 24, 12)
    # Twice the rows: a ramp again, of half the slope, but for what the border repeats. The bicubic
    # kernel of PyTorch (a = -0.75) bends it by 3/64.
    expected = (torch.arange(32) - 0.5) / 2
    torch.testing.assert_close(resized[4:-4, 3, 5], expected[4:-4], rtol=0, atol=0.05)
    torch.testing.assert_close(resized, resized[:, :1, :1].expand(32, 24, 12), rtol=0, atol=1e-4)


def test_the_defaults_build_although_their_window_does_not_divide_img_size():
    with torch.device('meta'):
        net = SwinIR()
        assert net(torch.empty(2, 3, 64, 64)).shape == (2, 3, 64, 64)
    assert net.state_dict()['layers.0.residual_group.blocks.1.attn_mask'].shape == (100, 49, 49)


def test_unknown_options_are_ignored_with_one_warning(caplog):
    tiny(num_feat=64, dropout=0.1)
    assert caplog.messages == ['SwinIR ignores unknown options: dropout, num_feat.']


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'num_heads': [2, 5]}, r'12 channels \(embed_dim\).*5 heads'),
        ({'num_heads': [2]}, 'depths .* num_heads .* differ in length'),
        ({'upsampler': 'pixelshuffel'}, "unknown upsampler 'pixelshuffel'"),
        ({'resi_connection': '2conv'}, "unknown resi_connection '2conv'"),
        ({'upsampler': 'nearest+conv', 'upscale': 2}, "'nearest\\+conv' has scale 4, not 2"),
        ({'upsampler': 'pixelshuffle', 'upscale': 5}, '5'),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_parts_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match='shift_size 4'):
        SwinTransformerBlock(12, (16, 16), 2, window_size=4, shift_size=4)
    with pytest.raises(ValueError, match='even sides'):
        PatchMerging((3, 4), 12)
    with pytest.raises(ValueError, match='input_resolution'):
        UpsampleOneStep(2, 12, 3).flops()


@pytest.mark.parametrize('resi_connection', ['1conv', '3conv'])
@pytest.mark.parametrize(('upsampler', 'upscale'), HEADS)
@torch.no_grad()
def test_flops_are_half_of_what_pytorch_counts(upsampler, upscale, resi_connection):
    options = {'upsampler': upsampler, 'upscale': upscale, 'resi_connection': resi_connection}
    net = tiny(img_size=[16, 20], **options)
    # PyTorch counts the products of its plain attention, not those of the fused one on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        net(image(1, 3, 16, 20))
    assert 2 * net.flops() == counter.get_total_flops()


@torch.no_grad()
def test_flops_of_a_layer_include_its_patch_merging():
    layer = BasicLayer(12, (8, 8), 2, 3, window_size=4, downsample=PatchMerging)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(image(1, 64, 12), (8, 8))
    assert 2 * layer.flops() == counter.get_total_flops()

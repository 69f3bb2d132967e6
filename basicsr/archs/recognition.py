"""Recognise the network that weights belong to by their names and shapes.

Published files usually do not describe their network.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

Shapes = Mapping[str, tuple[int, ...]]


class _Guess(NamedTuple):
    """Type and arguments of a network, and those arguments that no weight shows."""

    options: dict[str, Any]
    unknown: tuple[str, ...] = ()


def options_from_weights(state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Type and arguments of the network that has such weights; None if it is unknown.

    Arguments that no weight shows, such as a factor of residuals, are those of published networks.

    Raises:
        ValueError: No published network has these sizes, so such arguments cannot be known.
    """
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    for guess in _guesses(shapes):
        if _shapes_of(guess.options) != shapes:
            continue
        if not guess.unknown:
            return guess.options
        text = yaml.safe_dump(
            guess.options, default_flow_style=True, sort_keys=False, width=math.inf
        ).strip()
        raise UserError(
            f'the weights are of {guess.options["type"]}, and do not show '
            f'{" and ".join(guess.unknown)}. With the right values, its options are: {text}'
        )
    return None


def _guesses(shapes: Shapes) -> Iterator[_Guess]:
    for name, guess in _NETWORKS.items():
        if name in shapes:
            try:
                yield guess(shapes)
            except (ArithmeticError, LookupError, ValueError):  # another network has that name
                continue


def _shapes_of(options: Mapping[str, Any]) -> Shapes | None:
    """Names and shapes of the weights of a network; None if it cannot be built."""
    try:
        with torch.device('meta'):
            net = ARCH_REGISTRY.build(options)
    except (RuntimeError, UserError):
        return None
    return {name: tuple(value.shape) for name, value in net.state_dict().items()}


def _count(shapes: Shapes, pattern: str) -> int:
    """One more than the largest number in names that match, such as ``body\\.(\\d+)\\.``."""
    return max(int(match[1]) for name in shapes if (match := re.match(pattern, name))) + 1


def _root(number: float) -> int:
    """The square root of a square number.

    Raises:
        ValueError: It is not a square.
    """
    root = math.isqrt(int(number))
    if root**2 != number or not root:
        raise ValueError(f'{number} is not a square')
    return root


def _upscale(shapes: Shapes) -> int:
    """The factor of an ``Upsample``: each of its convolutions enlarges by 2 or 3."""
    convolutions = (v for k, v in shapes.items() if re.fullmatch(r'upsample\.\d+\.weight', k))
    return math.prod(_root(shape[0] / shape[1]) for shape in convolutions)


def _channels(shapes: Shapes, first: str = 'conv_first', last: str = 'conv_last') -> dict[str, int]:
    features, channels = shapes[f'{first}.weight'][:2]
    out = shapes[f'{last}.weight'][0]
    return {'num_in_ch': channels, 'num_out_ch': out, 'num_feat': features}


def _rrdbnet(shapes: Shapes) -> _Guess:
    channels = _channels(shapes)
    block = _root(channels['num_in_ch'] / channels['num_out_ch'])  # moved into the channels
    options = {
        **channels,
        'num_in_ch': channels['num_out_ch'],
        'scale': {1: 4, 2: 2, 4: 1}[block],
        'num_block': _count(shapes, r'body\.(\d+)\.'),
        'num_grow_ch': shapes['body.0.rdb1.conv1.weight'][0],
    }
    return _Guess({'type': 'RRDBNet', **options})


def _msrresnet(shapes: Shapes) -> _Guess:
    channels = _channels(shapes)
    factor = _root(shapes['upconv1.weight'][0] / channels['num_feat'])
    upscale = 4 if 'upconv2.weight' in shapes else factor
    blocks = _count(shapes, r'body\.(\d+)\.')
    return _Guess({'type': 'MSRResNet', **channels, 'num_block': blocks, 'upscale': upscale})


def _edsr(shapes: Shapes) -> _Guess:
    channels, blocks = _channels(shapes), _count(shapes, r'body\.(\d+)\.')
    # The two published sizes.
    res_scale = {(64, 16): 1, (256, 32): 0.1}.get((channels['num_feat'], blocks))
    options = {'type': 'EDSR', **channels, 'num_block': blocks, 'upscale': _upscale(shapes)}
    return _Guess(options | {'res_scale': res_scale or 1}, () if res_scale else ('res_scale',))


def _rcan(shapes: Shapes) -> _Guess:
    channels = _channels(shapes)
    hidden = shapes['body.0.residual_group.0.rcab.3.attention.1.weight'][0]
    options = {
        **channels,
        'num_group': _count(shapes, r'body\.(\d+)\.'),
        'num_block': _count(shapes, r'body\.0\.residual_group\.(\d+)\.'),
        'squeeze_factor': channels['num_feat'] // hidden,
        'upscale': _upscale(shapes),
    }
    return _Guess({'type': 'RCAN', **options})


def _srvgg(shapes: Shapes) -> _Guess:
    # Some formats sort the names, and put body.10 before body.2.
    numbered = sorted((int(name.split('.')[1]), shape) for name, shape in shapes.items())
    convolutions = [shape for _, shape in numbered if len(shape) == 4]
    features, channels = convolutions[0][:2]
    is_prelu = 'body.1.weight' in shapes
    options = {
        **{'num_in_ch': channels, 'num_out_ch': channels, 'num_feat': features},
        'num_conv': len(convolutions) - 2,
        'upscale': _root(convolutions[-1][0] / channels),
        'act_type': 'prelu' if is_prelu else 'relu',
    }
    return _Guess({'type': 'SRVGGNetCompact', **options}, () if is_prelu else ('act_type',))


def _ecbsr(shapes: Shapes) -> _Guess:
    blocks = _count(shapes, r'backbone\.(\d+)\.')
    features, channels = shapes['backbone.0.conv3x3.weight'][:2]
    is_prelu = 'backbone.0.act.weight' in shapes
    options = {
        **{'num_in_ch': channels, 'num_out_ch': channels},
        **{'num_block': blocks - 2, 'num_channel': features, 'with_idt': False},
        'act_type': 'prelu' if is_prelu else 'relu',
        'scale': _root(shapes[f'backbone.{blocks - 1}.conv3x3.weight'][0] / channels),
    }
    unknown = ('with_idt',) if is_prelu else ('with_idt', 'act_type')
    return _Guess({'type': 'ECBSR', **options}, unknown)


def _ridnet(shapes: Shapes) -> _Guess:
    channels = _channels(shapes, 'head', 'tail')
    options = {
        'in_channels': channels['num_in_ch'],
        'mid_channels': channels['num_feat'],
        'out_channels': channels['num_out_ch'],
        'num_block': _count(shapes, r'body\.(\d+)\.'),
    }
    return _Guess({'type': 'RIDNet', **options})


def _swinir(shapes: Shapes) -> _Guess:
    features, channels = shapes['conv_first.weight'][:2]
    block = 'layers.{}.residual_group.blocks.{}'
    table, first = f'{block}.attn.relative_position_bias_table', block.format(0, 0)
    groups = range(_count(shapes, r'layers\.(\d+)\.'))
    window = (_root(shapes[table.format(0, 0)][0]) + 1) // 2
    windows = next((v[0] for k, v in shapes.items() if k.endswith('.attn_mask')), 1)
    # Published networks for JPEG artefacts have windows of 7 and this range, the others 8 and 1.
    img_range = {7: 255.0, 8: 1.0}.get(window)
    options = {
        **{'img_size': window * _root(windows), 'in_chans': channels, 'embed_dim': features},
        'depths': [_count(shapes, block.format(g, r'(\d+)') + r'\.') for g in groups],
        'num_heads': [shapes[table.format(g, 0)][1] for g in groups],
        **{'window_size': window, 'mlp_ratio': shapes[f'{first}.mlp.fc1.weight'][0] / features},
        'qkv_bias': f'{first}.attn.qkv.bias' in shapes,
        'ape': 'absolute_pos_embed' in shapes,
        'patch_norm': 'patch_embed.norm.weight' in shapes,
        'img_range': img_range or 1.0,
        'resi_connection': '1conv' if 'layers.0.conv.weight' in shapes else '3conv',
        **_swinir_head(shapes, channels),
    }
    return _Guess({'type': 'SwinIR', **options}, () if img_range else ('img_range',))


def _swinir_head(shapes: Shapes, channels: int) -> dict[str, Any]:
    if 'conv_up1.weight' in shapes:
        return {'upsampler': 'nearest+conv', 'upscale': 4}
    if 'conv_before_upsample.0.weight' in shapes:
        return {'upsampler': 'pixelshuffle', 'upscale': _upscale(shapes)}
    if 'upsample.0.weight' in shapes:
        upscale = _root(shapes['upsample.0.weight'][0] / channels)
        return {'upsampler': 'pixelshuffledirect', 'upscale': upscale}
    return {'upsampler': '', 'upscale': 1}


def _spynet(shapes: Shapes) -> _Guess:
    return _Guess({'type': 'SpyNet'})


def _toflow(shapes: Shapes) -> _Guess:
    return _Guess({'type': 'TOFlow', 'adapt_official_weights': False}, ('adapt_official_weights',))


def _duf(shapes: Shapes) -> _Guess:
    blocks = _count(shapes, r'dense_block1\.dense_blocks\.(\d+)\.')
    options = {
        'scale': _root(shapes['conv3d_r2.weight'][0] / 3),
        'num_layer': {3: 16, 9: 28, 21: 52}[blocks],
        'adapt_official_weights': False,
    }
    return _Guess({'type': 'DUF', **options}, ('adapt_official_weights',))


def _edvr(shapes: Shapes) -> _Guess:
    with_predeblur, with_tsa = 'conv_1x1.weight' in shapes, 'fusion.weight' not in shapes
    first = 'predeblur.conv_first' if with_predeblur else 'conv_first'
    fusion = shapes['fusion.feat_fusion.weight' if with_tsa else 'fusion.weight']
    options = {
        **_channels(shapes, first),
        'num_frame': fusion[1] // fusion[0],
        'deformable_groups': shapes['pcd_align.cas_dcnpack.conv_offset.bias'][0] // 27,
        'num_extract_block': _count(shapes, r'feature_extraction\.(\d+)\.'),
        'num_reconstruct_block': _count(shapes, r'reconstruction\.(\d+)\.'),
        'hr_in': 'predeblur.stride_conv_hr1.weight' in shapes,
        **{'with_predeblur': with_predeblur, 'with_tsa': with_tsa},
    }
    return _Guess({'type': 'EDVR', **options})


def _basicvsr(shapes: Shapes) -> _Guess:
    features = shapes['backward_trunk.main.0.weight'][0]
    blocks = _count(shapes, r'backward_trunk\.main\.2\.(\d+)\.')
    options = {'num_feat': features, 'num_block': blocks}
    if 'backward_fusion.weight' not in shapes:
        return _Guess({'type': 'BasicVSR', **options})
    frames = shapes['edvr.fusion.feat_fusion.weight'][1] // features
    options |= {'keyframe_stride': 5, 'temporal_padding': frames // 2}
    is_published = (features, blocks) == (64, 30)
    return _Guess({'type': 'IconVSR', **options}, () if is_published else ('keyframe_stride',))


def _basicvsrpp(shapes: Shapes) -> _Guess:
    features = shapes['backbone.backward_1.main.0.weight'][0]
    blocks = _count(shapes, r'backbone\.backward_1\.main\.2\.(\d+)\.')
    options = {
        **{'mid_channels': features, 'num_blocks': blocks, 'max_residue_magnitude': 10},
        'is_low_res_input': 'feat_extract.main.0.weight' in shapes,
    }
    unknown = () if (features, blocks) == (64, 7) else ('max_residue_magnitude',)
    return _Guess({'type': 'BasicVSRPlusPlus', **options}, unknown)


# By the name of a weight that the network has.
_NETWORKS: dict[str, Callable[[Shapes], _Guess]] = {
    'body.0.rdb1.conv1.weight': _rrdbnet,
    'upconv1.weight': _msrresnet,
    'body.0.conv1.weight': _edsr,
    'body.0.residual_group.0.rcab.0.weight': _rcan,
    'backbone.0.conv3x3.weight': _ecbsr,
    'body.0.merge.dilation1.0.weight': _ridnet,
    'layers.0.residual_group.blocks.0.attn.relative_position_bias_table': _swinir,
    'body.0.weight': _srvgg,
    'basic_module.5.basic_module.8.weight': _spynet,
    'spynet.basic_module.3.basic_module.12.weight': _toflow,
    'conv3d_r2.weight': _duf,
    'pcd_align.cas_dcnpack.weight': _edvr,
    'backward_trunk.main.0.weight': _basicvsr,
    'backbone.backward_1.main.0.weight': _basicvsrpp,
}

"""Weights of our networks as spandrel expects them, where it has others for the same function."""

import re

import torch
from torch import Tensor, nn

from basicsr.archs.ecbsr_arch import ECBSR
from basicsr.archs.rcan_arch import RCAN
from basicsr.archs.srvgg_arch import SRVGGNetCompact
from basicsr.utils.errors import UserError

_SLOPES = {nn.ReLU: 0.0, nn.Identity: 1.0}


def weights_for_spandrel(net: nn.Module) -> tuple[dict[str, Tensor], bool]:
    """The weights, and whether they are others than those of the state dict."""
    if isinstance(net, RCAN):
        return _rcan(net), True
    if isinstance(net, ECBSR):  # merged, its blocks are the layers of SRVGGNetCompact
        convolutions = [block.rep_params() for block in net.backbone]
        return _compact(convolutions, [block.act for block in net.backbone[:-1]]), True
    if isinstance(net, SRVGGNetCompact) and net.act_type != 'prelu':
        convolutions = [tuple(layer.parameters()) for layer in net.body[::2]]
        return _compact(convolutions, list(net.body[1::2])), True
    return net.state_dict(), False


def _compact(
    convolutions: list[tuple[Tensor, ...]], activations: list[nn.Module]
) -> dict[str, Tensor]:
    """Those of SRVGGNetCompact with PReLU, of which other activations are special cases."""
    state = {}
    for number, (weight, bias) in enumerate(convolutions):
        state |= {f'body.{2 * number}.weight': weight, f'body.{2 * number}.bias': bias}
    for number, act in enumerate(activations):
        slope = getattr(act, 'weight', getattr(act, 'negative_slope', _SLOPES.get(type(act))))
        if slope is None:
            raise UserError(f'spandrel knows this network with PReLU alone, not {act}.')
        width = len(convolutions[number][1])
        state[f'body.{2 * number + 1}.weight'] = torch.as_tensor(slope).expand(width).clone()
    return {name: value.detach() for name, value in state.items()}


def _rcan(net: RCAN) -> dict[str, Tensor]:
    """Those of the program of its authors, whose range is 255 and whose mean is a convolution."""
    groups, blocks = len(net.body), len(net.body[0].residual_group)
    names = {
        r'body\.(\d+)\.residual_group\.(\d+)\.rcab\.': r'body.\1.body.\2.body.',
        r'\.3\.attention\.1\.': '.3.conv_du.0.',
        r'\.3\.attention\.3\.': '.3.conv_du.2.',
        r'body\.(\d+)\.conv\.': rf'body.\1.body.{blocks}.',
        r'conv_first\.': 'head.0.',
        r'conv_after_body\.': f'body.{groups}.',
        r'upsample\.': 'tail.0.',
        r'conv_last\.': 'tail.1.',
    }
    state = net.state_dict()
    for old, new in names.items():
        state = {re.sub(old, new, name): value for name, value in state.items()}
    channels = net.mean.shape[1]
    ratio = net.img_range / (255 if channels == 3 else 1)
    state['head.0.weight'] = state['head.0.weight'] * ratio
    for name in ('tail.1.weight', 'tail.1.bias'):
        state[name] = state[name] / ratio
    if channels == 3:
        for name, sign in (('sub_mean', -1), ('add_mean', 1)):
            state[f'{name}.weight'] = torch.eye(3)[..., None, None]
            state[f'{name}.bias'] = sign * 255 * net.mean.flatten()
    return state

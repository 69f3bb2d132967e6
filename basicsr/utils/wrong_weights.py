"""What a file of weights that cannot be loaded is, and what to do about it."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .text import some

# Names in each file of a network, and in none of a generator.
_DISCRIMINATORS = {
    'conv0_0.weight': 'VGGStyleDiscriminator',
    'conv9.weight': 'UNetDiscriminatorSN',
}


def why_no_state_dict(content: Mapping[Any, Any], param_key: str | None) -> str:
    """Why the content of a file is not weights of a network, to follow the file's name."""
    if {'iter', 'optimizers'} <= content.keys():
        return (
            'is a training state, which holds no network weights: these are beside it, in '
            f'models/net_g_{content["iter"]}.pth. To resume its run, set path.resume_state.'
        )
    if {'lengths', 'averages'} <= content.keys():
        return 'holds averages of train.posthoc_ema: make a network from them with basicsr average.'
    keys = some([str(key) for key in content])
    text = f"has no key '{param_key}' and is not a bare state dict; its keys are {keys}."
    states = [str(key) for key, value in content.items() if _has_tensors(value)]
    if not states:
        return f'{text} It holds no weights.'
    return f'{text} Set path.param_key_* to {" or ".join(states)}.'


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def why_unusable(name: Any, tensor: Tensor) -> str:
    """Why a network cannot take a tensor, '' if it can."""
    if not isinstance(name, str):
        return f'the name {name!r}, but names of weights are strings, such as body.0.weight'
    if tensor.is_meta:
        return f'{name} on the meta device, without values: save the network when it has weights'
    if tensor.is_quantized:
        return f'{name} quantized: save what tensor.dequantize() returns'
    if tensor.layout != torch.strided:
        return f'{name} as a sparse tensor: save what tensor.to_dense() returns'
    return ''


def advice(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], label: str, scale: float | None
) -> str:
    """What to do about a state dict that does not fit a network.

    Args:
        own: The network's state dict.
        label: Of the network in the options: g, d.
        scale: Of the network.
    """
    if not state:
        return 'It holds no weights.'
    fitting = sum(name in own and own[name].shape == value.shape for name, value in state.items())
    kind = next((kind for name, kind in _DISCRIMINATORS.items() if name in state), None)
    if not fitting or (kind and label != 'd'):
        found = f'a {kind}, a discriminator' if kind else 'another network'
        return (
            f'It is the file of {found}: path.pretrain_network_{label} needs one of this network.'
        )
    load = f'set path.strict_load_{label} to false to load the {fitting} of {len(own)} that fit.'
    if 2 * fitting < len(own):
        return f'Make network_{label} as it was when the file was trained; or {load}'
    other = _other_scale(own, state, scale)
    if other:
        which = f'take one for x{scale:g}, make network_{label} for that scale, or'
        return f'It is the file of a network for {other}: {which} {load}'
    return f'If that is intended, {load}'


def _other_scale(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], scale: float | None
) -> str:
    """The scale that the weights are for, if it differs from that of the network; else ''."""
    if scale is None:
        return ''
    unlike = own.keys() ^ state.keys()
    if unlike:  # an upsampling in steps of 2 and 3
        return 'another scale' if all(re.search(r'(^|\.)up', name) for name in unlike) else ''
    scales = set()
    for name, value in state.items():
        theirs, ours = value.shape, own[name].shape
        if theirs[:1] == ours[:1] and theirs[2:] == ours[2:]:  # RRDBNet takes images folded to x4
            theirs, ours = ours[1:], theirs[1:]
        if theirs[1:] == ours[1:] and theirs != ours:
            scales.add(round(scale * math.sqrt(theirs[0] / ours[0]), 6))
    number = scales.pop() if len(scales) == 1 else 0.5
    return f'x{number:g}' if number.is_integer() else ''

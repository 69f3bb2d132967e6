"""Diagnose weight files that cannot be loaded: what they are, and what to do about it."""

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError
from .text import some

# A name that every file of the discriminator has, and no file of a generator.
_DISCRIMINATORS = {
    'conv0_0.weight': 'VGGStyleDiscriminator',
    'conv9.weight': 'UNetDiscriminatorSN',
}

_MOST_DEPTH = 4  # how deep in nested dicts to look for weights


def why_no_checkpoint(path: str | Path) -> str:
    """Why a file is clearly not a checkpoint, to follow its name; '' if it may be one."""
    with open(path, 'rb') as file:
        start = file.read(512).lstrip(b'\xef\xbb\xbf \t\r\n').lower()
    if not Path(path).stat().st_size:
        return 'it is damaged: it has 0 bytes, as after a failed download. Download it again.'
    if start.startswith((b'<!doctype', b'<html', b'<?xml', b'<head')):
        return (
            'it is a web page (HTML), not weights: download the file itself, by its raw or '
            'download link.'
        )
    if start.startswith(b'version https://git-lfs'):
        return 'it is a git-lfs pointer, not the file itself: run git lfs pull in its repository.'
    return ''


def why_no_state_dict(content: Mapping[Any, Any], param_key: str | None) -> str:
    """Why the content of a file is not the weights of a network, to follow the file's name."""
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
    if not states and (deeper := next(_deeper(content), '')):
        return f'{text} {take_out(deeper)}'
    if not states:
        return f'{text} It holds no weights.'
    return f'{text} Set path.param_key_* to {" or ".join(states)}.'


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _deeper(content: Mapping[Any, Any], path: str = '') -> Iterator[str]:
    """Where weights are in nested dicts, such as ['model']['params']."""
    for key, value in content.items():
        if _has_tensors(value):
            yield f'{path}[{key!r}]'
        elif isinstance(value, Mapping) and path.count('[') < _MOST_DEPTH:
            yield from _deeper(value, f'{path}[{key!r}]')


def why_nested(key: Any, state: Mapping[Any, Any]) -> str:
    """What to do about a state dict that has no tensors but nests one that has; else ''."""
    if any(isinstance(value, Tensor) for value in state.values()):
        return ''
    deeper = next(_deeper(state), '')
    return take_out(f'[{key!r}]{deeper}') if deeper else ''


def take_out(where: str) -> str:
    """How to save weights that are nested in a file to a file of their own."""
    return (
        f'Its weights are nested, at {where}: save only these, '
        f"torch.save({{'params': torch.load(file){where}}}, other_file)."
    )


def unlike_kinds(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Which floats of a network would be filled with integers or complex numbers, '' if none."""
    found = [
        f'{name} as {str(value.dtype).removeprefix("torch.")}'
        for name, value in state.items()
        if name in own and own[name].is_floating_point() and not value.is_floating_point()
    ]
    if not found:
        return ''
    return (
        f'holds {some(found)} where the network has floats: it is quantized, or damaged. Save the '
        'weights as floats.'
    )


def load_fitting(net: nn.Module, state: Mapping[str, Tensor], source: str, target: str) -> None:
    """Load weights into a network, all of them.

    Args:
        source: What the weights are of, for messages, such as their file.
        target: What the network is.

    Raises:
        ValueError: They do not fit.
    """
    if problem := unlike_kinds(net.state_dict(), state):
        raise UserError(f'{source} {problem}')
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error), 500)
        raise UserError(f'{source} does not fit {target}: {reason}') from error


def why_unusable(name: Any, tensor: Tensor) -> str:
    """Why a network cannot use a tensor; '' if it can."""
    if not isinstance(name, str):
        return f'the name {name!r}, but names of weights are strings, such as body.0.weight'
    if tensor.is_meta:
        return f'{name} on the meta device, without values: save the network when it has weights'
    if tensor.is_quantized:
        return f'{name} quantized: save what tensor.dequantize() returns'
    if tensor.layout != torch.strided:
        return f'{name} as a sparse tensor: save what tensor.to_dense() returns'
    if tensor.is_floating_point() and tensor.numel() and tensor.isnan().all():
        return f'only NaN in {name}: its training diverged. Use an earlier checkpoint'
    return ''


def advice(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], label: str, scale: float | None
) -> str:
    """What to do about a state dict that does not fit a network.

    Args:
        own: The network's state dict.
        label: Label of the network in the options: g, d.
        scale: Upscaling factor of the network.
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
        return f'Configure network_{label} as it was when the file was trained, or {load}'
    other = _other_scale(own, state, scale)
    if other:
        which = f'use one for x{scale:g}, configure network_{label} for that scale, or'
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

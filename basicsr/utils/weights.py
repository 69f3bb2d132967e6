"""Process network files: interpolate, average, convert, strip for publication, describe."""

import hashlib
import inspect
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import load_checkpoint, save_checkpoint, select_params, state_dicts
from .errors import UserError
from .registry import ARCH_REGISTRY, check_known
from .safetensors_file import DESCRIPTION, split_description
from .text import sizeof_fmt, some
from .wrong_weights import why_no_state_dict

logger = logging.getLogger(__name__)

_ALIKE = 0.8  # share of the names that a network and a file must have in common
# Values for required arguments; of these only the number of blocks changes names of weights.
_SMALL = {'int': 3, 'bool': False, 'str': 'prelu'}


def check_target(target: str | Path, overwrite: bool = False) -> None:
    """Check that ``target`` can be the name of a new network file.

    Raises:
        FileExistsError: ``target`` exists, and is not to be overwritten.
        ValueError: It ends in neither .pth nor .safetensors.
    """
    if Path(target).suffix not in ('.pth', '.safetensors'):
        raise UserError(f'{target} must end in .pth or .safetensors.')
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(f'{target} exists: remove it, give another name, or --overwrite.')


def convert(
    source: str | Path, target: str | Path, key: str | None = None, overwrite: bool = False
) -> None:
    """Write a checkpoint in the format that the ending of ``target`` names.

    Args:
        key: The state dict to write by itself, as other programs expect it; None for the whole
            file. The description of the network is kept, except beside bare weights in a .pth.

    Raises:
        FileExistsError: ``target`` exists.
        FileNotFoundError, ValueError: ``source`` cannot be read, or the format cannot hold it.
    """
    check_target(target, overwrite)
    content = load_checkpoint(source)
    if not isinstance(content, dict):
        raise UserError(f'{source} holds a {type(content).__name__}; a dict is needed.')
    content, described = split_description(content)
    if key is not None:
        content = _state_dict(content, key, source)
    is_bare = not any(isinstance(value, Mapping) for value in content.values())
    if described and not (is_bare and Path(target).suffix == '.pth'):  # it would pass for a weight
        content = {**content, DESCRIPTION: described}
    save_checkpoint(dict(content), target)


def _state_dict(content: Mapping[str, Any], key: str, source: str | Path) -> Mapping[str, Any]:
    if not isinstance(content.get(key), Mapping):
        found = some(list(map(str, content)), 10) or 'none'
        raise UserError(f"{source} has no state dict '{key}'; its keys are: {found}.")
    return content[key]


def combine(
    sources: Sequence[str | Path],
    shares: Sequence[float],
    target: str | Path,
    overwrite: bool = False,
) -> list[str]:
    """Write the weighted sum of files of one network; returns the keys of its state dicts.

    Sums are computed in float64. Integer tensors are taken from the file of the largest share. With
    equal shares the result is a uniform soup: Wortsman et al., "Model soups", ICML 2022,
    https://arxiv.org/abs/2203.05482; two files are interpolated in Wang et al., "ESRGAN", 2018,
    https://arxiv.org/abs/1809.00219.

    Args:
        shares: A factor for each file; they sum to 1.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: The files are not of the same network.
    """
    check_target(target, overwrite)
    files = [_networks(source) for source in sources]
    shared = [key for key in files[0][0] if all(key in states for states, _ in files)]
    if not shared:
        found = '; '.join(
            f'{source}: {some(list(map(str, states)))}'
            for source, (states, _) in zip(sources, files, strict=True)
        )
        raise UserError(f'the files have no state dict in common ({found}).')
    _check_one_network(sources, [described for _, described in files])
    content: dict[str, Any] = {
        key: _weighted_sum(sources, [states[key] for states, _ in files], shares) for key in shared
    }
    described = next((described for _, described in files if described), None)
    save_checkpoint(content | ({DESCRIPTION: described} if described else {}), target)
    return shared


def _networks(source: str | Path) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
    """The state dicts of a file by key, bare weights as ``params``, and the description."""
    content = load_checkpoint(source)
    state, key = select_params(content, None, source)
    found = state_dicts(content) if key is not None else {'params': state}
    usual: dict[str, Mapping[str, Tensor]] = {
        name: {n: value for n, value in values.items() if isinstance(value, Tensor)}
        for name, values in found.items()
        if name.startswith('params') or name == key
    }
    return usual, split_description(content)[1]


def _check_one_network(
    sources: Sequence[str | Path], descriptions: Sequence[dict[str, Any]]
) -> None:
    """Compare the descriptions: networks may differ in what no name or shape shows."""
    given = {
        str(source): described['network']
        for source, described in zip(sources, descriptions, strict=True)
        if described.get('network')
    }
    first = next(iter(given), '')
    for source, network in given.items():
        if network != given[first]:
            raise UserError(
                f'{first} holds {given[first]}, and {source} holds {network}: only weights of the '
                'same network can be mixed.'
            )


def _weighted_sum(
    sources: Sequence[str | Path], states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> dict[str, Tensor]:
    for source, state in zip(sources, states, strict=True):
        unlike = state.keys() ^ states[0].keys() or {
            name for name, value in state.items() if value.shape != states[0][name].shape
        }
        if unlike:
            raise UserError(
                f'{sources[0]} and {source} are not of the same network: names or shapes differ '
                f'({some(sorted(unlike))}).'
            )
    largest = states[max(range(len(shares)), key=shares.__getitem__)]
    result = {}
    for name, value in largest.items():
        total = torch.zeros_like(value, dtype=torch.float64)
        for share, state in zip(shares, states, strict=True):
            total += share * state[name].double()
        result[name] = total.to(value.dtype) if value.is_floating_point() else value
    return result


def strip(
    source: str | Path,
    target: str | Path,
    key: str | None = None,
    with_hash: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write one state dict of a file and the description of its network; returns the file.

    Args:
        key: Name of the state dict; None: ``params_ema`` if there is one, else ``params``.
        with_hash: Add the first eight digits of the file's SHA-256 to its name.

    Raises:
        FileExistsError: The file exists.
    """
    target = Path(target)
    check_target(target, overwrite or with_hash)
    content = load_checkpoint(source)
    if key is not None:
        _state_dict(content, key, source)
    state, used = select_params(content, key, source)
    described = split_description(content)[1]
    kept = {used or 'params': dict(state), **({DESCRIPTION: described} if described else {})}
    if not with_hash:
        save_checkpoint(kept, target)
        return target
    unnamed = target.with_name(f'.{target.stem}.{os.getpid()}{target.suffix}')
    try:
        digest = save_checkpoint(kept, unnamed)['sha256']
        target = target.with_name(f'{target.stem}-{digest[:8]}{target.suffix}')
        check_target(target, overwrite)
        unnamed.replace(target)
    finally:
        unnamed.unlink(missing_ok=True)
    return target


def report(file: str | Path) -> Iterator[str]:
    """Describe a file in lines: entries, network, and names, shapes and dtypes of weights."""
    content = load_checkpoint(file)
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    yield f'{file}: {sizeof_fmt(Path(file).stat().st_size)}, sha256 {digest[:8]}…'
    if not isinstance(content, Mapping):
        yield f'It holds a {type(content).__name__}.'
        return
    states = state_dicts(content)
    weights, described = split_description(content)
    if not states and all(isinstance(value, Tensor) for value in weights.values()):
        states = {'(bare)': weights}
    for key, value in weights.items() if '(bare)' not in states else states.items():
        yield f'  {key}: {_kind(value)}'
    yield from _described(described)
    try:
        state, _ = select_params(content, None, file)
    except UserError:
        yield f'The file {why_no_state_dict(weights, None)}'
        return
    yield f'Fits: {what_fits(state, described.get("network"))}'
    shown: list[Mapping[str, Any]] = []
    for value in states.values():
        if _has_shapes_of(value, shown):
            continue
        shown.append(value)
        alike = [str(k) for k, other in states.items() if _has_shapes_of(other, [value])]
        yield f'{", ".join(alike)}:'
        yield from _rows(value)


def _has_shapes_of(state: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    return any(list(_rows(state)) == list(_rows(other)) for other in others)


def _rows(state: Mapping[str, Any]) -> Iterator[str]:
    width = max(map(len, map(str, state)), default=0)
    for name, value in state.items():
        if isinstance(value, Tensor):
            kind = str(value.dtype).removeprefix('torch.')
            yield f'  {name:<{width}}  {tuple(value.shape)!s}  {kind}'
        else:
            yield f'  {name:<{width}}  {type(value).__name__}'


def _kind(value: Any) -> str:
    """A short description of the value of a key."""
    if isinstance(value, Tensor):
        return f'a tensor {tuple(value.shape)}'
    items = value.values() if isinstance(value, Mapping) else ()
    tensors = [item for item in items if isinstance(item, Tensor)]
    if not tensors:
        text = repr(value)
        return text if len(text) <= 60 else f'{type(value).__name__} of {len(value)}'
    parameters = sum(t.numel() for t in tensors if t.is_floating_point())
    kinds = Counter(str(t.dtype).removeprefix('torch.') for t in tensors)
    return f'{len(tensors)} tensors, {parameters:,} numbers, {", ".join(kinds)}'


def _described(described: Mapping[str, Any]) -> Iterator[str]:
    if not described:
        yield 'The file does not say which network it holds.'
        return
    network = described.get('network')
    options = dict(network) if isinstance(network, Mapping) else {}
    name = options.pop('type', 'unknown')
    arguments = ', '.join(f'{key}: {value}' for key, value in options.items())
    scale, version = described.get('scale'), described.get('version')
    yield f'Network: {name} ({arguments}), scale {scale}, written by basicsr {version}'


def what_fits(state: Mapping[str, Tensor], options: Mapping[str, Any] | None = None) -> str:
    """Which network the weights belong to.

    Args:
        options: The network's options in the description of the file. Without them the names of
            the weights are compared with those of all networks, numbers of layers aside.
    """
    if isinstance(options, Mapping) and options:
        try:
            check_known(options.get('type'), ARCH_REGISTRY)
            own = _on_meta(options).state_dict()
        except Exception as error:  # a constructor may raise anything
            return f'no network here: {options.get("type")} cannot be built ({error})'
        unlike = list(own.keys() ^ state.keys())
        unlike += [n for n in own.keys() & state.keys() if own[n].shape != state[n].shape]
        name = options['type']
        return f'{name}, but for {some(sorted(unlike))}' if unlike else f'{name}, as described'
    likeness = {name: _likeness(net, state) for name, net in _examples()}
    best = max(likeness, key=lambda name: likeness[name])
    if likeness[best] < _ALIKE:
        return 'no network here'
    share = math.floor(100 * likeness[best])
    return f'{best}, by its names ({share} % of them, numbers of layers aside)'


def _on_meta(options: Mapping[str, Any]) -> nn.Module:
    with torch.device('meta'):
        return ARCH_REGISTRY.build(options)


def _examples() -> Iterator[tuple[str, nn.Module]]:
    """Small instances of all networks, on the meta device, with their names."""
    for name, entry in ARCH_REGISTRY:
        parameters = inspect.signature(entry).parameters
        needed = {
            p.name: getattr(p.annotation, '__name__', '')
            for p in parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        }
        if not set(needed.values()) <= _SMALL.keys():
            continue
        arguments: dict[str, Any] = {key: _SMALL[kind] for key, kind in needed.items()}
        arguments |= {key: 1 for key in ('num_block', 'num_group') if key in parameters}
        try:
            net = _on_meta({'type': name, **arguments})
        except Exception as error:  # a constructor may raise anything
            logger.info('%s is not compared: %s', name, error)
            continue
        yield name.removesuffix('_basicsr'), net


def _likeness(net: nn.Module, state: Mapping[str, Any]) -> float:
    """Jaccard similarity of the names of weights, all numbers in them taken as equal."""
    own, theirs = ({re.sub(r'\d+', '#', n) for n in names} for names in (net.state_dict(), state))
    return len(own & theirs) / max(len(own | theirs), 1)


def describe_weights(file: str | Path, key: str | None = None) -> str:
    """The key of the weights that are used, and the first digits of the SHA-256 of their file."""
    found = state_dicts(load_checkpoint(file))
    used = next((name for name in (key, 'params_ema', 'params') if name in found), 'bare')
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return f'{used} {digest[:8]}'

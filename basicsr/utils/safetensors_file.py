"""Networks as safetensors files, which hold nothing but named tensors.

The format: https://github.com/huggingface/safetensors
It is flat, so the names of several state dicts begin with the key of theirs, as in
``params_ema.conv.weight``; the file's metadata lists the keys, and has a checksum. It is a single
entry, as the order of several would differ from file to file.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import MissingPackageError, UserError

_ENTRY = 'basicsr'  # of the metadata: the checksum, a blank, and the keys as JSON


def require_safetensors() -> Any:
    """The package's module for torch.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingPackageError('safetensors files need: pip install safetensors') from error
    return safetensors.torch


def as_safetensors(content: Mapping[str, Any]) -> bytes:
    """A safetensors file of a state dict, or of a dict of state dicts.

    Tensors that share memory become separate ones; all are contiguous.

    Raises:
        ValueError: The content has other values.
    """
    keys = [key for key, value in content.items() if isinstance(value, Mapping)]
    if keys and len(keys) < len(content):
        raise UserError(_refusal(content.keys() - keys))
    named = {f'{key}.{name}': value for key in keys for name, value in content[key].items()}
    if len(named) < sum(len(content[key]) for key in keys):
        raise UserError(
            f'the keys {", ".join(keys)} and names below them are ambiguous when joined.'
        )
    named = named if keys else dict(content)
    others = [name for name, value in named.items() if not _can_be_kept(name, value)]
    if others:
        raise UserError(_refusal(others))
    tensors, listed = _separate(named), json.dumps(keys)
    return require_safetensors().save(tensors, {_ENTRY: f'{_checksum(tensors, listed)} {listed}'})


def _refusal(names: Any) -> str:
    return (
        'a safetensors file holds networks alone (dense tensors, under names that are texts), and '
        f'no {", ".join(sorted(map(str, names)))}.'
    )


def _can_be_kept(name: Any, value: Any) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_meta)
    )


def _separate(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each with memory of its own."""
    tensors, seen = {}, set()
    for name, value in named.items():
        tensor = value.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    return tensors


def _checksum(tensors: Mapping[str, Tensor], keys: str) -> str:
    """CRC-32 of the listed keys and of names, kinds, shapes and values of the tensors."""
    value = zlib.crc32(keys.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        head = f'{name} {tensor.dtype} {tuple(tensor.shape)}'
        value = zlib.crc32(head.encode(), value)
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return f'{value:08x}'


def read_safetensors(path: str | Path) -> dict[str, Any]:
    """What ``as_safetensors`` was given; of a file of another program, its state dict.

    Raises:
        ValueError: The file is damaged, or of another format.
    """
    package = require_safetensors()
    from safetensors import safe_open

    try:
        with safe_open(path, framework='pt') as file:
            metadata = file.metadata() or {}
        tensors = package.load(Path(path).read_bytes())  # load_file would go on reading the file
    except Exception as error:  # what is no such file can make a reader fail in any way
        raise UserError(f'cannot load {path}: it is damaged ({error}).') from error
    if _ENTRY not in metadata:
        return tensors
    checksum, _, keys = metadata[_ENTRY].partition(' ')
    if checksum != _checksum(tensors, keys):
        raise UserError(f'cannot load {path}: it is damaged (wrong checksum).')
    try:
        content: dict[str, Any] = {key: {} for key in json.loads(keys)}
        for name, tensor in tensors.items() if content else ():
            key = max((key for key in content if name.startswith(f'{key}.')), key=len)
            content[key][name.removeprefix(f'{key}.')] = tensor
    except (ValueError, TypeError) as error:
        raise UserError(f'cannot load {path}: it lists no keys ({error}).') from error
    return content or tensors

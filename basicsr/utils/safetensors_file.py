"""Read and write networks as safetensors files, which hold only named tensors.

The format: https://github.com/huggingface/safetensors
It is flat: one state dict has plain names, as other programs expect, and names of several begin
with the key of theirs, as in ``params_ema.conv.weight``. The file's metadata lists the keys, with
the description of the network, if any, and a checksum, all in one entry: the order of several would
vary between files.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import MissingPackageError, UserError

# Key of the description of the network, beside the state dicts. Also the key of the entry in the
# metadata: checksum, blank, and JSON, an object of keys, description, and whether the names are
# plain although there is a key. Earlier files may have the list of keys alone.
DESCRIPTION = 'basicsr'


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


def split_description(content: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], dict[str, Any]]:
    """Split the content of a file into its weights and the description of the network, or {}."""
    described = content.get(DESCRIPTION)
    if not isinstance(described, Mapping):
        return content, {}
    return {key: value for key, value in content.items() if key != DESCRIPTION}, dict(described)


def as_safetensors(content: Mapping[str, Any]) -> bytes:
    """A safetensors file of a state dict or a dict of state dicts, with or without a description.

    Tensors that share memory become separate ones; all are contiguous.

    Raises:
        ValueError: The content has other values.
    """
    content, described = split_description(content)
    keys = [key for key, value in content.items() if isinstance(value, Mapping)]
    if keys and len(keys) < len(content):
        raise UserError(_refusal(content.keys() - keys))
    named = {f'{key}.{name}': value for key in keys for name, value in content[key].items()}
    if len(named) < sum(len(content[key]) for key in keys):
        raise UserError(
            f'the keys {", ".join(keys)} and names below them are ambiguous when joined.'
        )
    is_plain = len(keys) == 1
    named = content[keys[0]] if is_plain else named if keys else content
    others = [name for name, value in named.items() if not _can_be_kept(name, value)]
    if others:
        raise UserError(_refusal(others))
    try:
        entries = {'keys': keys} | ({'plain': True} if is_plain else {})
        listed = json.dumps(entries | ({'description': described} if described else {}))
    except (TypeError, ValueError) as error:
        raise UserError(_refusal([DESCRIPTION])) from error
    tensors = _separate(named)
    entry = f'{_checksum(tensors, listed)} {listed}'
    return require_safetensors().save(tensors, {DESCRIPTION: entry})


def _refusal(names: Any) -> str:
    return (
        'a safetensors file holds only networks (dense tensors, named by strings), and '
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


def _checksum(tensors: Mapping[str, Tensor], listed: str) -> str:
    """CRC-32 of the JSON and of the names, dtypes, shapes and values of the tensors."""
    value = zlib.crc32(listed.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        head = f'{name} {tensor.dtype} {tuple(tensor.shape)}'
        value = zlib.crc32(head.encode(), value)
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return f'{value:08x}'


def is_safetensors(path: str | Path) -> bool:
    """Whether a file of any name begins as this format does: a length, and JSON of that length."""
    with open(path, 'rb') as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], 'little')
    return start[8:] == b'{' and length <= Path(path).stat().st_size - 8


def read_safetensors(path: str | Path) -> dict[str, Any]:
    """The content given to ``as_safetensors``; for a file of another program, its state dict.

    Raises:
        ValueError: The file is damaged, or of another format.
    """
    package = require_safetensors()
    from safetensors import safe_open

    try:
        with safe_open(path, framework='pt') as file:
            metadata = file.metadata() or {}
        tensors = package.load(Path(path).read_bytes())  # load_file would keep it mapped
    except Exception as error:  # a damaged file can make the reader fail in any way
        raise UserError(f'cannot load {path}: it is damaged ({error}).') from error
    if DESCRIPTION not in metadata:
        return tensors
    checksum, _, text = metadata[DESCRIPTION].partition(' ')
    if checksum != _checksum(tensors, text):
        raise UserError(f'cannot load {path}: it is damaged (wrong checksum).')
    try:
        listed = json.loads(text)
        listed = listed if isinstance(listed, dict) else {'keys': listed}
        described = {DESCRIPTION: listed['description']} if 'description' in listed else {}
        if listed.get('plain'):
            return {listed['keys'][0]: tensors, **described}
        content: dict[str, Any] = {key: {} for key in listed['keys']}
        for name, tensor in tensors.items() if content else ():
            key = max((key for key in content if name.startswith(f'{key}.')), key=len)
            content[key][name.removeprefix(f'{key}.')] = tensor
        return (content or tensors) | described
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f'cannot load {path}: it lists no keys ({error}).') from error

"""Checkpoint files: atomic writes, checksums, and loading that never runs code."""

import errno
import hashlib
import io
import itertools
import logging
import re
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basicsr.version import __version__

from .errors import UserError
from .misc import atomic_path
from .safetensors_file import (
    DESCRIPTION,
    as_safetensors,
    is_safetensors,
    read_safetensors,
    split_description,
)
from .text import sizeof_fmt, some
from .wrong_weights import why_nested, why_no_checkpoint, why_no_state_dict, why_unusable

logger = logging.getLogger(__name__)

# Wrappers prepend these to every key: DistributedDataParallel and torch.compile.
_WRAPPER_PREFIXES = ('module.', '_orig_mod.')

_USUAL_KEYS = ('params_ema', 'params', 'state_dict')
_SEAL = b'sha256 '  # start of the ZIP comment in files written here
_FOLDER = 0x10  # attribute of a ZIP entry for which torch would return uninitialised memory


class _HashedFile(io.BufferedWriter):
    """A new file that counts and hashes the bytes as they are written, in order."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, 'w'))
        self.size, self._sha256 = 0, hashlib.sha256()
        self._end = b''  # the last two bytes, not hashed yet: a ZIP ends in its comment's length
        self.error: OSError | None = None

    def sha256(self) -> str:
        digest = self._sha256.copy()
        digest.update(self._end)
        return digest.hexdigest()

    def seal(self) -> None:
        """Add a comment to the finished ZIP: the SHA-256 of all bytes before its length field."""
        seal = _seal(self._sha256.hexdigest())
        self.size -= len(self._end)
        self.seek(self.size)
        self._end = b''
        self.write(seal)

    def write(self, data: Any) -> int:
        self._sha256.update(self._end)
        self._sha256.update(memoryview(data)[:-2])
        self._end = bytes(data[-2:])
        self.size += len(data)
        try:
            return super().write(data)
        except OSError as error:  # torch reports only an unexpected position
            self.error = error
            raise


def save_checkpoint(content: dict, path: str | Path) -> dict[str, Any]:
    """Write tensors and plain Python values to ``path``, atomically.

    Args:
        content: For a ``*.safetensors`` file only a state dict or a dict of state dicts, with or
            without the ``description`` of the network.

    Returns:
        ``size`` in bytes and ``sha256`` of the file.

    Raises:
        OSError: The file cannot be written; a lack of space is found before writing begins.
    """
    path = Path(path)
    with atomic_path(path) as temporary, _HashedFile(temporary) as file:
        _check_space(content, path)
        try:
            if path.suffix == '.safetensors':
                file.write(as_safetensors(content))
            else:
                torch.save(content, file)
                file.seal()
        except RuntimeError as error:  # how torch reports a full disk
            raise file.error or OSError(str(error)) from error
    if path.suffix != '.safetensors':
        _warn_of_objects(path)
    return {'size': file.size, 'sha256': file.sha256()}


def _warn_of_objects(path: Path) -> None:
    """Warn of objects that a user's model has stored and that safe loading refuses."""
    if found := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        logger.warning(
            'Saving: %s holds objects (%s) and will be refused when it is loaded: store only '
            'tensors and plain values.',
            *(path, some(found)),
        )


def description(network_options: Mapping[str, Any], scale: int | None) -> dict[str, Any]:
    """Describe a network in its file, under the key ``DESCRIPTION``; other programs ignore it.

    Options that are not plain values cannot be read back safely: the network is then None, with a
    warning.

    Args:
        network_options: Type and arguments, such as the section ``network_g``.
        scale: Size of the output over that of the input.
    """
    try:
        network = _plain(network_options)
    except TypeError as error:
        network = None
        logger.warning(
            'Saving: the network %s has %s among its arguments, and files hold only plain values: '
            'load_network_from cannot rebuild it from this file.',
            *(network_options.get('type'), error),
        )
    return {'network': network, 'scale': scale, 'version': __version__}


def _plain(value: Any) -> Any:
    """A value as it would come back from JSON."""
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f'{value!r:.80}')


def _check_space(content: dict, path: Path) -> None:
    dense = (tensor for tensor in tensors_in(content) if tensor.layout == torch.strided)
    storages = [tensor.untyped_storage() for tensor in dense]
    needed = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    usage = shutil.disk_usage(path.parent)
    if usage.total > 0 and usage.free < needed:  # some network drives report nothing
        raise OSError(
            errno.ENOSPC,
            f'it needs {sizeof_fmt(needed)}. Free some space, or keep fewer checkpoints '
            '(logger.keep_last), and resume with --auto_resume.',
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def load_checkpoint(path: str | Path) -> Any:
    """Read a checkpoint onto the CPU; code inside the file is refused, never run.

    Raises:
        FileNotFoundError: No such file.
        ValueError: The file is damaged, or holds more than tensors and plain values.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f'no checkpoint file {path}.')
    if reason := why_no_checkpoint(path):
        raise UserError(f'cannot load {path}: {reason}')
    if Path(path).suffix == '.safetensors' or is_safetensors(path):
        return read_safetensors(path)
    check_archive(path)
    try:
        return torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # a damaged file can make a parser fail in any way
        reason = re.sub(r'\x1b\[[0-9;]*m', '', str(error)).strip().partition('. ')[0]
        raise UserError(
            f'cannot load {path}: it is damaged, or holds objects other than tensors and plain '
            f'values ({reason}). If you trust its origin, read it once with '
            'torch.load(…, weights_only=False) and save its tensors.'
        ) from error


def check_archive(path: str | Path) -> None:
    """Verify the checksum of a torch file, which torch ignores.

    Files written here have one for the whole file; in others each entry may have one. Files other
    than ZIP archives are skipped.

    Raises:
        ValueError: The file is damaged, or its entries claim more bytes than it has: torch does
            not compress.
    """
    is_sealed = _check_seal(Path(path))
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            if archive.comment and not is_sealed:
                raise UserError('wrong checksum')
            size = sum(part.file_size for part in parts)
            if size > Path(path).stat().st_size:
                raise UserError(f'its parts have {size} bytes, more than the file')
            if any(part.external_attr & _FOLDER for part in parts):
                raise UserError('a part of it is marked as a folder')
            has_checksums = not is_sealed and any(part.CRC for part in parts)
            if has_checksums and (wrong := archive.testzip()):
                raise UserError(f'wrong checksum of {wrong}')
    except Exception as error:  # as in load_checkpoint
        raise UserError(f'cannot load {path}: it is damaged ({error}).') from error


def _seal(sha256: str) -> bytes:
    """The end of a ZIP: the length of its comment, and the comment."""
    comment = _SEAL + sha256.encode()
    return struct.pack('<H', len(comment)) + comment


def _check_seal(path: Path) -> bool:
    """Whether a file has the checksum that ``save_checkpoint`` adds.

    Raises:
        ValueError: It has one, and it does not match.
    """
    seal = _seal('0' * 64)
    left = max(path.stat().st_size - len(seal), 0)
    with path.open('rb') as file:
        file.seek(left)
        end = file.read()
        if not end.startswith(seal.rstrip(b'0')):
            return False
        file.seek(0)
        digest = hashlib.sha256()
        while left and (block := file.read(min(left, 2**20))):
            digest.update(block)
            left -= len(block)
    if end != _seal(digest.hexdigest()):
        raise UserError(f'cannot load {path}: it is damaged (wrong checksum).')
    return True


def strip_wrapper_prefixes(
    state_dict: Mapping[str, Any], expected: Container[str]
) -> Mapping[str, Any]:
    """The state dict without the prefixes of DDP and torch.compile, in any nesting.

    A prefix is removed only while no key is an ``expected`` one: a network may have a layer of its
    own called ``module``.
    """
    while state_dict and not any(key in expected for key in state_dict):
        prefix = next(
            (p for p in _WRAPPER_PREFIXES if all(k.startswith(p) for k in state_dict)), ''
        )
        if not prefix:
            break
        state_dict = {key.removeprefix(prefix): value for key, value in state_dict.items()}
    return state_dict


def take_below_prefix(
    state_dict: Mapping[str, Any], expected: Container[str], path: str | Path
) -> Mapping[str, Any]:
    """The part of a state dict whose keys are the ``expected`` ones behind a prefix, if any.

    Networks inside a larger module have such keys (``net_g.conv.weight``), and so have those of
    torch's AveragedModel, beside ``n_averaged``. A warning names the prefix.

    Raises:
        ValueError: Several prefixes match equally well.
    """
    if any(name in expected for name in state_dict):
        return state_dict
    ends = [(name, dot.end()) for name in state_dict for dot in re.finditer(r'\.', name)]
    counts = Counter(name[:end] for name, end in ends if name[end:] in expected)
    prefixes = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if not prefixes:
        return state_dict
    if len(prefixes) > 1:
        raise UserError(
            f'{path} holds several such networks: set path.param_key_* to one of '
            f'{some([prefix[:-1] for prefix in prefixes])}.'
        )
    (prefix,) = prefixes
    found = _below(prefix, state_dict)
    logger.warning(
        'Loading: of %s only the keys with the prefix %s are used, without it; %d others are not.',
        *(path, prefix, len(state_dict) - len(found)),
    )
    return found


def state_dicts(content: Mapping[Any, Any]) -> dict[Any, Mapping[str, Any]]:
    """The state dicts of a file by their keys, without the description of the network."""
    return {k: v for k, v in content.items() if isinstance(v, Mapping) and k != DESCRIPTION}


def select_params(content: Any, param_key: str | None, path: str | Path) -> tuple:
    """Find the state dict in a checkpoint file: (state dict, key used or None).

    The requested key is used if it is there; otherwise, with a warning, the first of
    ``params_ema``, ``params``, ``state_dict``; otherwise the file must be a bare state dict. If the
    requested key is a prefix of names in that state dict, up to a dot, those names are selected:
    one of several networks.

    Raises:
        ValueError: None of these is there, or it has tensors that no network can use.
    """
    if not isinstance(content, Mapping):
        raise UserError(f'{path} holds a {type(content).__name__}; a state dict is needed.')
    states = state_dicts(content)
    content, _ = split_description(content)
    key = next((k for k in (param_key, *_USUAL_KEYS) if k in states), None)
    if key is not None:
        state = states[key]
        if nested := why_nested(key, state):
            raise UserError(f'{path} has no weights directly below {key!r}. {nested}')
    elif not states and any(isinstance(value, Tensor) for value in content.values()):
        state = content
    else:
        raise UserError(f'{path} {why_no_state_dict(content, param_key)}')
    if param_key in (None, key):
        return _tensors_alone(state, path), key
    if param_key not in _USUAL_KEYS and (part := _below(f'{param_key}.', state)):
        return _tensors_alone(part, path), param_key
    if key is not None:
        logger.warning(
            'Loading: %s has no key %s; using %s (it has: %s).',
            *(path, param_key, key, some(list(map(str, content)))),
        )
    return _tensors_alone(state, path), key


def _below(prefix: str, state: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries whose keys begin with a prefix, under keys without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if str(k).startswith(prefix)}


def _tensors_alone(state: Mapping[Any, Any], path: str | Path) -> Mapping[str, Tensor]:
    """The state dict without non-tensors, such as a number of steps; a warning names them."""
    others = [str(name) for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        logger.warning('Loading: %s has non-tensors, which are left out: %s.', path, some(others))
        state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    reason = next(filter(None, itertools.starmap(why_unusable, state.items())), '')
    if reason:
        raise UserError(f'{path} holds {reason}.')
    return state

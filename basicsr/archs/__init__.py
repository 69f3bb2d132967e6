"""Network architectures: ``type`` selects one, the other options are its constructor arguments."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from basicsr.utils.checkpoint import (
    load_checkpoint,
    select_params,
    split_description,
    state_dicts,
)
from basicsr.utils.errors import MissingKeyError, UserError
from basicsr.utils.lazy import lazy_exports
from basicsr.utils.registry import ARCH_REGISTRY, check_known
from basicsr.utils.text import some
from basicsr.utils.wrong_weights import load_fitting

from .outside import copy_input

__all__ = ['ARCH_REGISTRY', 'build_network', 'load_network_from']

logger = logging.getLogger(__name__)

# Options that name files of weights to start from, which those of a checkpoint replace.
_FIRST_WEIGHTS = ('spynet_path', 'edvr_path', 'load_path')

__getattr__ = lazy_exports(
    __name__, {'basicsr.utils.logger': 'get_root_logger', 'basicsr.utils.misc': 'scandir'}
)


def build_network(opt: Mapping[str, Any]) -> nn.Module:
    """The network ``opt['type']``, built from the other options; see ``Registry.build``.

    One of another package, ``module:Class``, gets a copy of its input.
    """
    net = ARCH_REGISTRY.build(opt)
    if ':' in opt['type']:
        net.register_forward_pre_hook(copy_input)
    logger.info('Network [%s] is created.', type(net).__name__, extra={'file_only': True})
    return net


def load_network_from(file: str | Path, param_key: str | None = None) -> nn.Module:
    """The network that a checkpoint of this package holds: on the CPU, in eval mode.

    Args:
        param_key: Which of its weights to load; None: ``params_ema`` if there are any, else
            ``params``.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It is damaged, has no such weights, does not say which network it holds, or
            that network cannot be built or does not fit the weights.
    """
    content = load_checkpoint(file)
    keys = state_dicts(content) if isinstance(content, Mapping) else ()
    if param_key is not None and param_key not in keys:
        found = some(list(map(str, keys))) or 'none'
        raise UserError(f"{file} has no weights '{param_key}'; it has: {found}.")
    state, used_key = select_params(content, param_key, file)
    _, described = split_description(content)
    options = described.get('network')
    if not isinstance(options, Mapping) or 'type' not in options:
        which = f"['{used_key}']" if used_key else ''
        raise UserError(
            f'{file} does not say which network it holds; files of other programs do not. '
            "Build it, net = build_network({'type': …}), and load its weights, "
            f'net.load_state_dict(load_checkpoint(file){which}).'
        )
    net = _build_described(options, file)
    source = f'{file}, written by basicsr {described.get("version")},'
    load_fitting(net, state, source, f'the network that is built here from {dict(options)}')
    return net.eval()


def _build_described(options: Mapping[str, Any], file: str | Path) -> nn.Module:
    try:
        check_known(options['type'], ARCH_REGISTRY)
        return build_network({k: None if k in _FIRST_WEIGHTS else v for k, v in options.items()})
    except MissingKeyError as error:
        raise UserError(
            f'{file} holds {dict(options)}. {error.args[0]} From Python, '
            'basicsr.utils.registry.import_plugins([folder]) does that.'
        ) from error
    except Exception as error:  # constructors fail in many ways on bad arguments
        raise UserError(f'{file} holds {dict(options)}, which cannot be built: {error}') from error

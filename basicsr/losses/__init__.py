"""Losses; the names that dependents import from here are loaded when they are first asked for."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any

from torch import nn

from basicsr.utils.registry import LOSS_REGISTRY

_HOMES = {
    'basic_loss': 'CharbonnierLoss L1Loss MSELoss WeightedTVLoss',
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ['LOSS_REGISTRY', 'build_loss', *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll] (served by __getattr__)

logger = logging.getLogger(__name__)


def build_loss(opt: Mapping[str, Any]) -> nn.Module:
    """Build the loss ``opt['type']`` from the other entries of ``opt``, which stays as it is.

    Raises:
        KeyError: No loss has that name.
        TypeError: The loss does not take one of the options, or misses one.
    """
    options = deepcopy(dict(opt))
    if 'type' not in options:
        raise KeyError(f"The options {options} of a loss lack 'type', the loss's name.")
    name = options.pop('type')
    loss_class = LOSS_REGISTRY.get(name)
    try:
        loss = loss_class(**options)
    except TypeError as error:
        error.add_note(f"while building loss '{name}' from {dict(opt)}")
        raise
    logger.info(f'Loss [{type(loss).__name__}] is created.')
    return loss


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'.{_HOME_OF[name]}', __name__), name)

"""Networks. An option ``type`` names one; its other options are its constructor's arguments."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from basicsr.utils.registry import ARCH_REGISTRY

__all__ = ['ARCH_REGISTRY', 'build_network']

logger = logging.getLogger(__name__)


def build_network(opt: Mapping[str, Any]) -> nn.Module:
    """Build the network ``opt['type']`` from the other entries of ``opt``, which stays as it is.

    Raises:
        KeyError: No network has that name.
        TypeError: The network does not take one of the options, or misses one.
    """
    options = deepcopy(dict(opt))
    if 'type' not in options:
        raise KeyError(f"The options {options} of a network lack 'type', the network's name.")
    name = options.pop('type')
    network_class = ARCH_REGISTRY.get(name)
    try:
        net = network_class(**options)
    except TypeError as error:
        error.add_note(f"while building arch '{name}' from {dict(opt)}")
        raise
    logger.info(f'Network [{type(net).__name__}] is created.')
    return net

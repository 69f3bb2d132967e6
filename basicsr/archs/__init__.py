"""Networks. An option ``type`` names one; its other options are its constructor's arguments."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from basicsr.utils.registry import ARCH_REGISTRY

__all__ = ['ARCH_REGISTRY', 'build_network']

logger = logging.getLogger(__name__)


def build_network(opt: Mapping[str, Any]) -> nn.Module:
    """The network ``opt['type']``, built from the other options; see ``Registry.build``."""
    net = ARCH_REGISTRY.build(opt)
    logger.info('Network [%s] is created.', type(net).__name__)
    return net

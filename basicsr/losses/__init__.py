"""Losses; names imported from here are loaded lazily."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from basicsr.utils.lazy import lazy_exports
from basicsr.utils.registry import LOSS_REGISTRY

__all__ = ['LOSS_REGISTRY', 'build_loss']

logger = logging.getLogger(__name__)

__getattr__ = lazy_exports(
    __name__,
    {
        'basic_loss': 'CharbonnierLoss L1Loss MSELoss PerceptualLoss WeightedTVLoss',
        'gan_loss': (
            'GANFeatLoss GANLoss MultiScaleGANLoss '
            'g_path_regularize gradient_penalty_loss r1_penalty'
        ),
        'basicsr.utils.logger': 'get_root_logger',
        'basicsr.utils.misc': 'scandir',
    },
)


def build_loss(opt: Mapping[str, Any]) -> nn.Module:
    """The loss ``opt['type']``, built from the other options; see ``Registry.build``."""
    loss = LOSS_REGISTRY.build(opt)
    logger.info('Loss [%s] is created.', type(loss).__name__, extra={'file_only': True})
    return loss

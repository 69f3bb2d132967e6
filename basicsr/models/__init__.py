"""Models: what is trained, and one step of it."""

import logging
from copy import deepcopy
from typing import Any

from basicsr.utils.registry import MODEL_REGISTRY

__all__ = ['build_model']

logger = logging.getLogger(__name__)


def build_model(opt: dict) -> Any:
    """The model that ``opt['model_type']`` names, built from a copy of the options."""
    opt = deepcopy(opt)
    model = MODEL_REGISTRY.get(opt['model_type'])(opt)
    logger.info('Model [%s] is created.', type(model).__name__)
    return model

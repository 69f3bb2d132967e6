"""Models: networks with their losses, optimizers and training step."""

import logging
from copy import deepcopy
from typing import Any

from basicsr.utils.lazy import lazy_exports
from basicsr.utils.registry import MODEL_REGISTRY

__all__ = ['build_model']

logger = logging.getLogger(__name__)

__getattr__ = lazy_exports(
    __name__, {'basicsr.utils.logger': 'get_root_logger', 'basicsr.utils.misc': 'scandir'}
)


def build_model(opt: dict) -> Any:
    """Build the model named by ``opt['model_type']`` from a copy of the options."""
    opt = deepcopy(opt)
    model = MODEL_REGISTRY.get(opt['model_type'])(opt)
    logger.info('Model [%s] is created.', type(model).__name__, extra={'file_only': True})
    return model

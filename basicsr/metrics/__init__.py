"""Image quality metrics; names imported from here are loaded lazily."""

from collections.abc import Mapping
from typing import Any

from basicsr.utils.lazy import lazy_exports
from basicsr.utils.registry import METRIC_REGISTRY

__all__ = ['METRIC_REGISTRY', 'calculate_metric']

__getattr__ = lazy_exports(
    __name__, {'niqe': 'calculate_niqe', 'psnr_ssim': 'calculate_psnr calculate_ssim'}
)


def calculate_metric(data: Mapping[str, Any], opt: Mapping[str, Any]) -> float:
    """The metric ``opt['type']`` of the images in ``data``; see ``Registry.build``.

    Args:
        data: Arguments that hold images, usually ``img`` and ``img2``.
        opt: ``type`` and the other arguments; ``better`` may be among them.
    """
    return METRIC_REGISTRY.build(opt, **data)

"""Metrics; the names that dependents import from here are loaded when they are first asked for."""

from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any

from basicsr.utils.registry import METRIC_REGISTRY

_HOMES = {
    'niqe': 'calculate_niqe',
    'psnr_ssim': 'calculate_psnr calculate_ssim',
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ['METRIC_REGISTRY', 'calculate_metric', *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll] (served by __getattr__)


def calculate_metric(data: Mapping[str, Any], opt: Mapping[str, Any]) -> float:
    """Value of the metric ``opt['type']`` for the images in ``data``; both stay as they are.

    Args:
        data: Arguments of the metric that hold images, usually ``img`` and ``img2``.
        opt: ``type`` and the other arguments of the metric; ``better`` may stand among them.

    Raises:
        KeyError: No metric has that name.
        TypeError: The metric misses an argument.
    """
    options = deepcopy(dict(opt))
    if 'type' not in options:
        raise KeyError(f"The options {options} of a metric lack 'type', the metric's name.")
    name = options.pop('type')
    metric = METRIC_REGISTRY.get(name)
    try:
        return metric(**data, **options)
    except TypeError as error:
        error.add_note(f"while calculating metric '{name}' with {dict(opt)}")
        raise


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'.{_HOME_OF[name]}', __name__), name)

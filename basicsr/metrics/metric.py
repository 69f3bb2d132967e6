"""Validation metrics: per-image functions such as PSNR, and set metrics such as FID.

A function scores one image; the score of a set is the mean over its images, or over the means of
its clips. A class, such as one from torchmetrics, is updated with the images of a set and computes
a single number.
"""

import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import (
    METRIC_REGISTRY,
    argument_problems,
    building,
    import_name,
    wrong_kinds,
)

from . import calculate_metric


class SetMetric(Protocol):
    """Interface of a class in ``val.metrics``; torchmetrics' ``merge_state`` may replace merge.

    Images are (1, c, h, w) in [0, 1], RGB, rounded to 8 bits, on the device of the metric if it is
    a module.
    """

    def update(self, result: Tensor, gt: Tensor) -> None:
        """Add an image; a no-reference metric has no ``gt``."""

    def merge(self, other: Self) -> None:
        """Merge the state of another rank's metric into this one."""

    def compute(self) -> float | Tensor:
        """The score of all images."""
        ...


def find_metric(name: str) -> Callable:
    """Look up a metric by ``type``: a registered function or class, or ``module:Class``.

    Raises:
        ValueError, KeyError: There is none.
    """
    if ':' not in name:
        return METRIC_REGISTRY.get(name)
    metric = import_name(name, 'metric', object)
    if not (hasattr(metric, 'update') and hasattr(metric, 'compute')):
        raise UserError(f"metric '{name}' must have update(result, gt) and compute().")
    return metric


def metric_problems(options: Mapping[str, Any]) -> list[str]:
    """The mistakes in an entry of ``val.metrics``."""
    try:
        metric = find_metric(options['type'])
    except (KeyError, UserError) as error:
        return [str(error)]
    if options['type'].endswith('_pt'):
        return [f'{options["type"]} takes tensors, not images.']
    given = [key for key in options if key not in ('type', 'better')]
    problems = argument_problems(metric, given, () if inspect.isclass(metric) else ('img', 'img2'))
    problems += [f'{key} {problem}' for key, problem in wrong_kinds(metric, options)]
    if options.get('better', 'higher') not in ('higher', 'lower'):
        problems.append(f"better: '{options['better']}': it must be higher or lower.")
    return problems


def is_set_metric(options: Mapping[str, Any]) -> bool:
    """Whether the options of a metric name a class instead of a function."""
    return inspect.isclass(find_metric(options['type']))


def needs_reference(metric: Callable) -> bool:
    """Whether a metric requires a ground truth (full-reference)."""
    if inspect.isclass(metric):
        return len(inspect.signature(metric.update).parameters) > 2  # pyright: ignore
    parameter = inspect.signature(metric).parameters.get('img2')
    return parameter is not None and parameter.default is inspect.Parameter.empty


def defined_score(data: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """As ``calculate_metric``, but built-in metrics raise an error where they are not defined."""
    if METRIC_REGISTRY.is_users(options['type']):
        return calculate_metric(data, options)
    metric = inspect.unwrap(METRIC_REGISTRY.get(options['type']))
    return metric(**data, **{key: value for key, value in options.items() if key != 'type'})


class ImageScores:
    """Computes the per-image metrics of ``val.metrics``; thread-safe.

    Args:
        metrics: All of ``val.metrics``, by name.

    Attributes:
        undefined: For each metric, the first image without a score, and why.
    """

    def __init__(self, metrics: Mapping[str, Mapping[str, Any]]):
        self._metrics = {k: options for k, options in metrics.items() if not is_set_metric(options)}
        self._lock = threading.Lock()
        self.undefined: dict[str, str] = {}

    def __call__(self, images: Mapping[str, np.ndarray], name: str) -> dict[str, float]:
        """Score ``images['result']``; full-reference metrics are skipped without ``images['gt']``.

        Args:
            images: (h, w, c) in [0, 255], BGR.
            name: For messages.
        """
        data, scores = {'img': images['result']}, {}
        if 'gt' in images:
            data['img2'] = images['gt']
        for metric, options in self._metrics.items():
            if 'gt' in images or not needs_reference(find_metric(options['type'])):
                scores[metric] = self._score(metric, options, data, name)
        return scores

    def _score(
        self, metric: str, options: Mapping[str, Any], data: dict[str, np.ndarray], name: str
    ) -> float:
        reason, score = '.', math.nan
        try:
            score = float(defined_score(data, options))
        except (AssertionError, TypeError, ValueError) as error:
            # A built-in metric cannot score this image, e.g. because it is too small.
            undefined = isinstance(error, ValueError) and not isinstance(error, AssertionError)
            if not undefined or METRIC_REGISTRY.is_users(options['type']):
                raise type(error)(f'metric {metric} of image {name}: {error}') from error
            reason = f': {error}'
        except Exception as error:
            error.add_note(f'while computing the metric {metric} of image {name}')
            raise
        if math.isnan(score):
            with self._lock:
                self.undefined.setdefault(metric, f'Metric {metric} of image {name} is NaN{reason}')
        return score


class SetScores:
    """The set metrics of ``val.metrics``, instantiated anew for each set.

    Args:
        metrics: All of ``val.metrics``, by name.
        device: Device of metrics that are modules.
    """

    def __init__(self, metrics: Mapping[str, Mapping[str, Any]], device: torch.device):
        self._device = device
        self.metrics: dict[str, Any] = {}
        self._updated: set[str] = set()
        for name, options in metrics.items():
            if is_set_metric(options):
                arguments = {k: v for k, v in options.items() if k not in ('type', 'better')}
                with building(f'val.metrics.{name} from {dict(options)}'):
                    metric: Any = find_metric(options['type'])(**arguments)
                if isinstance(metric, nn.Module):
                    metric.to(device)
                    metric.sync_on_compute = False  # ``merged`` combines the ranks
                self.metrics[name] = metric

    def update(self, images: Mapping[str, np.ndarray]) -> None:
        """Add an image, in the format of ``ImageScores``."""
        for name, metric in self.metrics.items():
            tensors = [_tensor(images['result'])]
            if needs_reference(type(metric)):
                if 'gt' not in images:
                    continue
                tensors.append(_tensor(images['gt']))
            on_device = isinstance(metric, nn.Module)
            metric.update(*(x.to(self._device) if on_device else x for x in tensors))
            self._updated.add(name)

    def parts(self) -> list[dict[str, Any]]:
        """The metrics of this rank that were given images, as input of ``merged``."""
        for metric in self.metrics.values():
            if isinstance(metric, nn.Module):
                metric.cpu()
        return [{name: m for name, m in self.metrics.items() if name in self._updated}]

    @staticmethod
    def merged(parts: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Merge the metrics of all ranks, in the order of ``parts``; returns scores by metric."""
        of_ranks = defaultdict(list)
        for part in parts:
            for name, metric in part.items():
                of_ranks[name].append(metric)
        scores = {}
        for name, (metric, *others) in of_ranks.items():
            merge = getattr(metric, 'merge', None) or getattr(metric, 'merge_state', None)
            if others and merge is None:
                raise UserError(
                    f'val.metrics.{name}: {type(metric).__name__} has no merge(other), which '
                    'several processes need: add it, or validate with one process.'
                )
            for other in others:
                merge(other)  # pyright: ignore[reportOptionalCall] (refused above)
            scores[name] = float(metric.compute())
        return scores


def _tensor(image: np.ndarray) -> Tensor:
    """Convert (h, w, c) BGR in [0, 255] to (1, c, h, w) RGB in [0, 1]."""
    image = image if image.ndim == 3 else image[..., None]
    return torch.from_numpy(image[..., ::-1].copy()).permute(2, 0, 1)[None].float() / 255


def mean_of_groups(scores: Iterable[tuple[str, float]]) -> tuple[float, dict[str, float]]:
    """The mean over groups of their mean scores, and the mean score of each group.

    Args:
        scores: Group and score of each image, at least one. Infinite scores, such as the PSNR of
            identical images, are excluded from the mean of a group.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for group, score in scores:
        groups[group].append(score)
    means = {group: _finite_mean(values) for group, values in groups.items()}
    return _finite_mean(list(means.values())), means


def _finite_mean(values: list[float]) -> float:
    finite = [value for value in values if not math.isinf(value)]
    return math.fsum(finite) / len(finite) if finite else values[0]

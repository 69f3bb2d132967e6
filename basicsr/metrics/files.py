"""Score images in files: pair them by name, compute per-image metrics, list the scores."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from basicsr.utils.errors import UserError
from basicsr.utils.img_util import cv2, read_unchanged
from basicsr.utils.parallel import map_in_order
from basicsr.utils.progress_bar import progress_bar
from basicsr.utils.text import some

from .metric import ImageScores, mean_of_groups
from .metric_util import to_255

logger = logging.getLogger(__name__)


def pair_names(gt: Sequence[str], restored: Sequence[str], suffix: str = '') -> dict[str, str]:
    """Pair images by their names without extension: the restored name of each GT name.

    Args:
        gt, restored: Paths of images, relative to their folders.
        suffix: Appended to restored names, before the extension. If it is empty and the names
            differ, it is the one ending that all restored names share.

    Raises:
        ValueError: A GT image has no restored one, or two names differ only in the extension.
    """
    found, wanted = _by_stem(restored), _by_stem(gt)
    if not suffix and not found.keys() >= wanted.keys():
        suffix = _common_suffix(list(wanted), list(found))
    missing = [name for stem, name in wanted.items() if stem + suffix not in found]
    if missing:
        raise UserError(
            f'{len(missing)} of {len(wanted)} GT images have no restored image with the suffix '
            f"'{suffix}': {some(missing)}. The restored images are {some(restored)}."
        )
    if len(found) > len(wanted):
        logger.warning('%d restored images have no GT.', len(found) - len(wanted))
    return {name: found[stem + suffix] for stem, name in wanted.items()}


def _by_stem(names: Sequence[str]) -> dict[str, str]:
    stems: dict[str, str] = {}
    for name in names:
        stem = Path(name).with_suffix('').as_posix()
        if stem in stems:
            raise UserError(f'{stems[stem]} and {name} differ only in the extension: rename one.')
        stems[stem] = name
    return stems


def _common_suffix(wanted: Sequence[str], found: Sequence[str]) -> str:
    """The ending that turns all wanted names into found ones; empty if there is not exactly one."""
    ends = [name.removeprefix(wanted[0]) for name in found if name.startswith(wanted[0])]
    fitting = [end for end in ends if set(found).issuperset(name + end for name in wanted)]
    return fitting[0] if len(fitting) == 1 else ''


def score_files(
    files: Mapping[str, Mapping[str, Path]],
    metrics: Mapping[str, Mapping[str, Any]],
    workers: int,
    correct_mean_var: bool = False,
) -> dict[str, dict[str, float]]:
    """Scores of images by their names, with a progress bar.

    Transparency is left out, with a warning. A gray image that is compared with a colour one gets
    three equal channels. An image that a metric cannot score, such as one that is too small, has
    the score NaN, with a warning.

    Args:
        files: For each name a file as ``result`` and, for full-reference metrics, one as ``gt``.
        metrics: Options of each metric, as in ``val.metrics``.
        workers: Number of threads.
        correct_mean_var: First give each channel of the result the GT's mean and deviation.

    Raises:
        ValueError: A file is not an image, or the images of a pair have different sizes.
    """
    scores = ImageScores(metrics)

    def score(name: str) -> dict[str, float]:
        images = _alike({kind: _read(path) for kind, path in files[name].items()})
        if correct_mean_var:
            images['result'] = _with_statistics_of(images['result'], images['gt'])
        try:
            return scores(images, name)
        except AssertionError as error:  # the sizes differ
            raise UserError(str(error)) from error

    results = map_in_order(score, files, workers)
    bar = progress_bar(results, total=len(files), unit='image', disable=None)
    scored = dict(zip(files, bar, strict=True))
    for reason in scores.undefined.values():
        logger.warning('%s', reason)
    return scored


def score_lines(scores: Mapping[str, Mapping[str, float]], units: Mapping[str, str]) -> str:
    """A line with the scores of each image, and a last one with the averages.

    The averages leave out NaN, and infinite scores such as the PSNR of equal images.

    Args:
        units: Unit of each metric that has one, by name.
    """
    lines = []
    for number, (name, values) in enumerate(scores.items(), 1):
        lines.append(f'{number:3d}: {name}. \t' + ', \t'.join(_scores(values, units)))
    means = {
        name: _mean([v[name] for v in scores.values()]) for name in next(iter(scores.values()))
    }
    return '\n'.join([*lines, 'Average: ' + ', '.join(_scores(means, units))])


def _mean(values: Sequence[float]) -> float:
    known = [('', value) for value in values if not math.isnan(value)]
    return mean_of_groups(known)[0] if known else math.nan


def _scores(values: Mapping[str, float], units: Mapping[str, str]) -> list[str]:
    shown = {name: f' {units[name]}' if name in units else '' for name in values}
    return [f'{name.upper()}: {value:.6f}{shown[name]}' for name, value in values.items()]


def _read(path: Path) -> np.ndarray:
    """Colour or gray image in [0, 255] or 16 bits, without transparency."""
    try:
        img = read_unchanged(path)
    except ValueError as error:
        raise UserError(f'{path}: {error}') from error
    if img.ndim == 3 and img.shape[2] == 4:
        logger.warning('Transparency is left out: %s', path)
        img = img[..., :3]
    return img * 255 if img.dtype == np.float32 else img


def _alike(images: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Images with three channels each, unless all are gray."""
    if all(img.ndim == 2 for img in images.values()):
        return images
    gray = {kind for kind, img in images.items() if img.ndim == 2}
    return {k: cv2.merge([img] * 3) if k in gray else img for k, img in images.items()}


def _with_statistics_of(img: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The image with mean and standard deviation of the reference, channel by channel."""
    img, reference = (to_255(x).astype(np.float64) for x in (img, reference))
    mean, deviation = img.mean((0, 1)), img.std((0, 1))
    scale = reference.std((0, 1)) / np.where(deviation > 0, deviation, 1)
    return (img - mean) * scale + reference.mean((0, 1))

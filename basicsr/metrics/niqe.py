"""NIQE, a no-reference image quality metric; lower is better.

Anish Mittal, Rajiv Soundararajan, Alan C. Bovik, "Making a 'Completely Blind' Image Quality
Analyzer" (2013), https://doi.org/10.1109/LSP.2012.2227726

``niqe_pris_params.npz`` holds the model of natural images that the authors published with the paper
(mean and covariance of 36 features), as packaged in MMagic 1.2.0 (Apache License 2.0), and the
window of the local statistics, a Gaussian of 7 x 7 pixels with sigma 7/6.
"""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from basicsr.utils.errors import UserError
from basicsr.utils.img_util import cv2
from basicsr.utils.matlab_functions import imresize
from basicsr.utils.registry import METRIC_REGISTRY

from .metric_util import (
    UndefinedScoreError,
    crop,
    nan_if_undefined,
    reorder_image,
    to_255,
    to_y_channel,
)

# Shifts to the neighbours of a pixel whose products are used: beside, below, on both diagonals.
SHIFTS = ((0, 1), (1, 0), (1, 1), (1, -1))


def estimate_aggd_param(block: np.ndarray) -> tuple[float, float, float]:
    """Fit an asymmetric generalized Gaussian to a block (h, w): shape, left and right scale.

    Nour-Eddine Lasmar, Youssef Stitou, Yannick Berthoumieu, "Multiscale Skewed Heavy Tailed Model
    for Texture Analysis" (2009), https://doi.org/10.1109/ICIP.2009.5414404
    """
    shape, left, right, _ = _fit_aggd(block[None])
    return float(shape[0]), float(left[0]), float(right[0])


def compute_feature(block: np.ndarray) -> list[float]:
    """The 18 features of one normalised block (h, w)."""
    return _features(block[None])[0].tolist()


def niqe(
    img: np.ndarray,
    mu_pris_param: np.ndarray,
    cov_pris_param: np.ndarray,
    gaussian_window: np.ndarray,
    block_size_h: int = 96,
    block_size_w: int = 96,
) -> float:
    """Distance of an image from the model of natural images.

    Args:
        img: Gray or luma image (h, w) in [0, 255]; only whole blocks from its top left count.
        mu_pris_param: Mean (1, 36) of the features of natural images.
        cov_pris_param: Their covariance (36, 36).
        gaussian_window: Window of the local mean and deviation, (7, 7).
        block_size_h, block_size_w: Even sides of a block.

    Raises:
        ValueError: The image has fewer than two blocks, or fewer than two that are not flat.
    """
    if img.ndim != 2:
        raise UserError(f'NIQE takes one gray or luma image (h, w), got shape {img.shape}.')
    rows, columns = img.shape[0] // block_size_h, img.shape[1] // block_size_w
    if rows * columns < 2:
        raise UndefinedScoreError(
            f'NIQE needs at least two blocks of {block_size_h} x {block_size_w} pixels after '
            f'cropping, got an image of {img.shape[0]} x {img.shape[1]} (height x width).'
        )
    img = img[: rows * block_size_h, : columns * block_size_w].astype(np.float64)

    features = np.hstack(
        [
            _features(_blocks(_normalise(scaled, gaussian_window), rows, columns))
            for scaled in (img, 255 * imresize(img / 255, 0.5))
        ]
    )
    known = features[~np.isnan(features).any(axis=1)]
    if len(known) < 2:
        raise UndefinedScoreError(
            f'NIQE is not defined for an image without texture: {len(known)} of {len(features)} '
            'blocks have some, two are needed.'
        )
    difference = mu_pris_param.reshape(-1) - np.nanmean(features, axis=0)
    covariance = (cov_pris_param + np.cov(known, rowvar=False)) / 2
    return math.sqrt(difference @ np.linalg.pinv(covariance) @ difference)


@METRIC_REGISTRY.register()
@nan_if_undefined
def calculate_niqe(
    img: np.ndarray,
    crop_border: int,
    input_order: str = 'HWC',
    convert_to: str = 'y',
    **kwargs: Any,
) -> float:
    """NIQE with the pristine model of its authors; lower is better.

    Model and steps are those of the authors' release, on the rounded luma. MATLAB's built-in
    ``niqe`` has another model and gives other values.

    Args:
        img: BGR or gray image in [0, 255]; uint16 is scaled to that range.
        crop_border: Pixels to leave out at each side.
        input_order: 'HWC', 'CHW' or 'HW'.
        convert_to: 'y' for the luma (BT.601, [16, 235]), 'gray' for full-range gray.

    Returns:
        The distance; NaN for an image that is too small or flat, see ``niqe``.
    """
    if convert_to not in ('y', 'gray'):
        raise UserError(f"convert_to must be 'y' or 'gray', got {convert_to!r}.")
    if input_order != 'HW':
        img = reorder_image(img, input_order)
    img = crop(to_255(img), crop_border)
    if img.ndim == 3 and img.shape[2] == 3:
        to_gray = to_y_channel if convert_to == 'y' else _to_gray
        img = to_gray(img)
    if img.ndim == 3 and img.shape[2] == 1:
        img = img[..., 0]
    return niqe(img.round(), *_pristine_model())


def _to_gray(img: np.ndarray) -> np.ndarray:
    """Full-range gray (h, w) of a BGR image in [0, 255]."""
    return 255 * cv2.cvtColor(img.astype(np.float32) / 255, cv2.COLOR_BGR2GRAY)


@functools.cache
def _pristine_model() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(Path(__file__).with_name('niqe_pris_params.npz'), allow_pickle=False) as model:
        return model['mu_pris_param'], model['cov_pris_param'], model['gaussian_window']


def _normalise(img: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Mean-subtracted, contrast-normalised coefficients (eq. 1 to 3) of an image (h, w)."""

    def blur(x: np.ndarray) -> np.ndarray:
        return cv2.filter2D(x, -1, window[::-1, ::-1], borderType=cv2.BORDER_REPLICATE)

    mean = blur(img)
    deviation = np.sqrt(np.abs(blur(img * img) - mean * mean))
    difference = img - mean
    # Rounding leaves about 1e-14 in flat regions, whose sign would enter the fit.
    difference[np.abs(difference) < 1e-9] = 0
    return difference / (deviation + 1)


def _blocks(img: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Cut an image into (rows * columns, block height, block width)."""
    blocks = img.reshape(rows, img.shape[0] // rows, columns, img.shape[1] // columns)
    return blocks.swapaxes(1, 2).reshape(rows * columns, *blocks.shape[1::2])


def _features(blocks: np.ndarray) -> np.ndarray:
    """The 18 features of each block, (n, 18); NaN among those of a flat block."""
    shape, left, right, _ = _fit_aggd(blocks)
    features = [shape, (left + right) / 2]
    for shift in SHIFTS:
        neighbours = blocks * np.roll(blocks, shift, axis=(1, 2))
        shape, left, right, mean = _fit_aggd(neighbours)
        features += [shape, mean, left, right]
    return np.stack(features, axis=1)


@functools.cache
def _gamma_table() -> tuple[np.ndarray, ...]:
    """Candidate shapes and, for each, the gamma function at 1, 2 and 3 over the shape."""
    shapes = np.arange(0.2, 10.001, 0.001)
    return shapes, *(np.array([math.gamma(k / shape) for shape in shapes]) for k in (1, 2, 3))


def _fit_aggd(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Shape, left scale, right scale and mean of the distribution in each block, (n,) each."""
    shapes, gamma1, gamma2, gamma3 = _gamma_table()
    flat = blocks.reshape(len(blocks), -1)
    squares = flat**2
    with np.errstate(invalid='ignore', divide='ignore'):  # blocks without one sign: NaN
        left = np.sqrt(np.sum(squares * (flat < 0), 1) / np.sum(flat < 0, 1))
        right = np.sqrt(np.sum(squares * (flat > 0), 1) / np.sum(flat > 0, 1))
        skew = left / right
        ratio = np.abs(flat).mean(1) ** 2 / squares.mean(1)
        ratio *= (skew**3 + 1) * (skew + 1) / (skew**2 + 1) ** 2

    # The ratio grows with the shape, so the nearest candidate is found between midpoints. NaN
    # becomes the first one, as in the authors' code.
    ratios = gamma2**2 / (gamma1 * gamma3)
    nearest = np.searchsorted((ratios[1:] + ratios[:-1]) / 2, np.nan_to_num(ratio))
    spread = np.sqrt(gamma1[nearest] / gamma3[nearest])
    left, right = left * spread, right * spread
    mean = (right - left) * gamma2[nearest] / gamma1[nearest]
    return shapes[nearest], left, right, mean

"""Forensics of LQ and GT pairs: the downsampling kernel, shifts, and whether they match.

Images are as in ``forensics``.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .forensics import as_bytes, luma, thumbnail
from .img_util import cv2
from .matlab_functions import cubic, imresize

_FARTHEST = 8  # largest shift that is found, in whole pixels


def central_pair(
    gt: np.ndarray, lq: np.ndarray, scale: int, side: int = 128
) -> tuple[np.ndarray, np.ndarray]:
    """Views of the centres of a pair, that of the LQ at most ``side`` high and wide."""
    top, left = (max(length - side, 0) // 2 for length in lq.shape[:2])
    lq = lq[top : top + side, left : left + side]
    top, left = top * scale, left * scale
    return gt[top : top + lq.shape[0] * scale, left : left + lq.shape[1] * scale], lq


def pair_shift(gt: np.ndarray, lq: np.ndarray, scale: int) -> tuple[float, float]:
    """Shift of the LQ against the GT, reduced as MATLAB does, in LQ pixels.

    By phase correlation: whole pixels from its peak, fractions from the slope of the phase at low
    frequencies, which aliasing does not reach; Stone et al., "A Fast Direct Fourier-Based Algorithm
    for Subpixel Registration of Images" (2001), https://doi.org/10.1109/36.957286

    Returns:
        (down, right), from -8 to 8; (0, 0) if the shift explains less than a tenth of the
        difference.
    """
    target = luma(lq)
    source = luma(gt) if scale == 1 else imresize(luma(gt), 1 / scale)
    if min(target.shape) < 16:
        return 0.0, 0.0
    window = np.outer(*(np.hanning(length) for length in target.shape))
    one, two = (np.fft.fft2((image - image.mean()) * window) for image in (source, target))
    cross = two * one.conj()
    frequencies = np.meshgrid(*map(np.fft.fftfreq, target.shape), indexing='ij')
    radius = np.hypot(*frequencies)
    shift = _peak(cross, radius)
    turned = cross * np.exp(
        2j * np.pi * sum(f * s for f, s in zip(frequencies, shift, strict=True))
    )
    low = (radius > 0) & (radius < 0.25)
    weights = np.sqrt(np.abs(cross[low]))
    slopes = np.stack([-2 * np.pi * f[low] * weights for f in frequencies], axis=1)
    rest = np.linalg.lstsq(slopes, np.angle(turned[low]) * weights, rcond=None)[0]
    down, right = (float(whole + part) for whole, part in zip(shift, rest, strict=True))
    gain = _explained(source, target, down, right)
    return (down, right) if gain > 0.1 else (0.0, 0.0)


def _peak(cross: np.ndarray, radius: np.ndarray) -> tuple[int, int]:
    """The shift in whole pixels from a cross-power spectrum, at most ``_FARTHEST`` each way."""
    phases = cross / np.maximum(np.abs(cross), 1e-9) * np.exp(-((radius / 0.2) ** 2))
    correlation = np.fft.ifft2(phases).real
    near = np.arange(-_FARTHEST, _FARTHEST + 1)
    window = correlation[np.ix_(near % cross.shape[0], near % cross.shape[1])]
    row, column = np.unravel_index(int(window.argmax()), window.shape)
    return int(near[row]), int(near[column])


def _explained(source: np.ndarray, target: np.ndarray, down: float, right: float) -> float:
    """Share of the squared difference of two images that a shift of the first one removes."""
    move = np.array([[1, 0, right], [0, 1, down]], np.float32)
    height, width = source.shape
    moved = cv2.warpAffine(source, move, (width, height), flags=cv2.INTER_CUBIC)
    margin = slice(8, -8) if min(source.shape) > 32 else slice(4, -4)
    before, after = (
        float(((image - target)[margin, margin] ** 2).mean()) for image in (source, moved)
    )
    return 1 - after / before if before > 0 else 0.0


def agreement(one: np.ndarray, two: np.ndarray, side: int = 16) -> float:
    """Correlation of two images, each reduced to ``side`` x ``side``; 1 if one has no contrast."""
    small = [thumbnail(img, side) for img in (one, two)]
    if min(image.std() for image in small) < 2:
        return 1.0
    return float(np.corrcoef(*(image.ravel() for image in small))[0, 1])


def reduced_by(gt: np.ndarray, lq: np.ndarray, scale: int) -> dict[str, float]:
    """How well each known downsampling kernel reproduces the LQ from the GT.

    Returns:
        Root mean squared difference in levels by kernel, best first. 4 pixels at the edges are
        left out: there kernels of one family differ, and crops of larger images match none.
    """
    gt, lq = as_bytes(gt), as_bytes(lq).astype(np.float32)
    inner = slice(4, -4)
    found = {}
    for name, reduce in KERNELS.items():
        made = reduce(gt, scale).reshape(lq.shape)
        found[name] = float(np.sqrt(((made - lq)[inner, inner] ** 2).mean()))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _weighted_sums(
    kernel: Callable[[np.ndarray], np.ndarray], reach: int, axes: Sequence[int], rounds: bool
) -> Callable[[np.ndarray, int], np.ndarray]:
    """Separable downsampling, one axis after the other.

    Args:
        kernel: Weight at a distance in pixels of the reduced image.
        reach: Radius of the kernel, in the same pixels.
        rounds: Round to 8 bits after each axis, not only at the end.
    """

    def reduce(img: np.ndarray, scale: int) -> np.ndarray:
        middle = (scale - 1) / 2  # of the first pixel of the result
        taps = np.arange(np.ceil(middle - reach * scale), middle + reach * scale).astype(int)
        weights = kernel((taps - middle) / scale)
        values = img.astype(np.float64)
        for axis in axes:
            lines = np.moveaxis(values, axis, 0)
            count, edges = len(lines) // scale, [(-taps[0], taps[-1])]
            lines = np.pad(lines, edges + [(0, 0)] * (lines.ndim - 1), 'edge')
            shifted = (lines[i : i + count * scale : scale] for i in range(len(taps)))
            sums = sum(w * part for w, part in zip(weights / weights.sum(), shifted, strict=True))
            values = np.moveaxis(np.asarray(sums), 0, axis)
            if rounds or axis == axes[-1]:
                values = np.clip(np.floor(values + 0.5), 0, 255)
        return values

    return reduce


def _cubic(distance: np.ndarray) -> np.ndarray:
    return cubic(torch.from_numpy(distance)).numpy()


def _lanczos(distance: np.ndarray) -> np.ndarray:
    return np.sinc(distance) * np.sinc(distance / 3)


def _by_opencv(interpolation: int) -> Callable[[np.ndarray, int], np.ndarray]:
    def reduce(img: np.ndarray, scale: int) -> np.ndarray:
        size = img.shape[1] // scale, img.shape[0] // scale
        return cv2.resize(img, size, interpolation=interpolation)

    return reduce


# Kernels of one family differ only in rounding. Pillow starts with the rows, MATLAB with the
# columns, and ``imresize`` in Python rounds once.
_FAMILIES: dict[str, dict[str, Callable[[np.ndarray, int], np.ndarray]]] = {
    'antialiased bicubic': {
        'MATLAB bicubic': _weighted_sums(_cubic, 2, (0, 1), rounds=True),
        'Pillow bicubic': _weighted_sums(_cubic, 2, (1, 0), rounds=True),
        'bicubic rounded once': _weighted_sums(_cubic, 2, (0, 1), rounds=False),
    },
    'Lanczos': {'Pillow Lanczos': _weighted_sums(_lanczos, 3, (1, 0), rounds=True)},
    'OpenCV cubic': {'OpenCV cubic': _by_opencv(cv2.INTER_CUBIC)},
    'OpenCV area': {'OpenCV area': _by_opencv(cv2.INTER_AREA)},
    'OpenCV linear': {'OpenCV linear': _by_opencv(cv2.INTER_LINEAR)},
}
KERNELS = {name: reduce for family in _FAMILIES.values() for name, reduce in family.items()}
FAMILY_OF = {name: family for family, kernels in _FAMILIES.items() for name in kernels}

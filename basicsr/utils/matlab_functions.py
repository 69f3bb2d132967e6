"""Bicubic resizing that matches MATLAB's ``imresize``.

The kernel, with a = -0.5, is that of Robert G. Keys, "Cubic Convolution Interpolation for Digital
Image Processing" (1981), https://doi.org/10.1109/TASSP.1981.1163711
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Older code imports these from here.
from .color_util import bgr2ycbcr, rgb2ycbcr, ycbcr2bgr, ycbcr2rgb
from .errors import UserError

__all__ = [
    'bgr2ycbcr',
    'calculate_weights_indices',
    'cubic',
    'imresize',
    'reduce_image',
    'rgb2ycbcr',
    'ycbcr2bgr',
    'ycbcr2rgb',
]


def cubic(x: Tensor) -> Tensor:
    """Value of the cubic convolution kernel at the distances ``x``, in pixels."""
    x = x.abs()
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return near * (x <= 1) + far * ((x > 1) & (x <= 2))


def calculate_weights_indices(
    in_length: int,
    out_length: int,
    scale: float,
    kernel: str,
    kernel_width: float,
    antialiasing: bool,
) -> tuple[Tensor, Tensor, int, int]:
    """Weights and indices of the input pixels that make each pixel of a resized line.

    Args:
        kernel: 'cubic'.
        kernel_width: Support of the kernel in pixels, 4 for 'cubic'.
        antialiasing: Widen the kernel when shrinking.

    Returns:
        Weights and indices, both (out_length, taps), and the numbers of pixels by which to extend
        the line symmetrically (edge pixels included) before and after; the indices, from 0, are
        those of the extended line.
    """
    if kernel != 'cubic':
        raise UserError(f"kernel must be 'cubic', got {kernel!r}.")
    stretch = max(1.0, 1 / scale) if antialiasing else 1.0
    kernel_width = kernel_width * stretch

    # Centre of each output pixel in input coordinates, where pixel i lies at i.
    centre = (torch.arange(out_length, dtype=torch.float64) + 0.5) / scale - 0.5
    first = torch.floor(centre - kernel_width / 2) + 1
    taps = torch.arange(math.ceil(kernel_width))
    indices = first.long()[:, None] + taps
    weights = cubic((centre[:, None] - indices) / stretch)
    weights = weights / weights.sum(1, keepdim=True)

    used = weights.any(0)
    weights, indices = weights[:, used], indices[:, used]
    before = max(0, -int(indices.min()))
    after = max(0, int(indices.max()) - (in_length - 1))
    return weights, indices + before, before, after


def imresize(img: np.ndarray | Tensor, scale: float, antialiasing: bool = True) -> Any:
    """Resize by ``scale`` to ceil(size * scale) pixels, bicubic, neither clipped nor rounded.

    Args:
        img: Array (h, w) or (h, w, c), or tensor (..., h, w), in any range.
        scale: Factor of both sides.
        antialiasing: Widen the kernel when shrinking, as MATLAB does unless told otherwise.

    Returns:
        Image of the kind and floating type of ``img``; integers become float32.
    """
    if scale <= 0:
        raise UserError(f'scale must be positive, got {scale}.')
    if isinstance(img, np.ndarray):
        x, axes = torch.from_numpy(np.ascontiguousarray(img)), (0, 1)
    else:
        x, axes = img, (-2, -1)
    dtype = x.dtype if x.is_floating_point() else torch.float32
    x = x.to(torch.promote_types(dtype, torch.float32))
    for axis in axes:
        x = _resize_axis(x, axis, scale, antialiasing)
    x = x.to(dtype)
    return x.numpy() if isinstance(img, np.ndarray) else x


def reduce_image(img: np.ndarray, scale: int) -> np.ndarray:
    """Make the low-quality image of a super-resolution pair, as MATLAB made the published sets.

    MATLAB rounded integer images after each axis and repeated the edges; ``imresize`` mirrors
    edges and does not round. The published LQ images of Set5 are reproduced exactly.

    Args:
        img: (h, w) or (h, w, c), uint8 or uint16, with sides that are multiples of ``scale``.

    Returns:
        The image, ``scale`` times smaller, of the same type.
    """
    if img.dtype not in (np.uint8, np.uint16) or any(side % scale for side in img.shape[:2]):
        raise UserError(
            f'an image of {img.dtype} {img.shape} cannot be reduced to 1/{scale}: it must be uint8 '
            'or uint16, with sides that are multiples of the scale.'
        )
    white = np.iinfo(img.dtype).max
    for axis in (0, 1):
        lines, size = np.moveaxis(img, axis, -1), img.shape[axis]
        weights, taps, before, _ = calculate_weights_indices(
            size, size // scale, 1 / scale, 'cubic', 4, antialiasing=True
        )
        taps = (taps - before).clamp(0, size - 1)
        sums = sum(
            w * lines[..., i] for w, i in zip(weights.T.numpy(), taps.T.numpy(), strict=True)
        )
        rounded = np.clip(np.floor(sums + 0.5), 0, white).astype(img.dtype)
        img = np.moveaxis(rounded, -1, axis)
    return np.ascontiguousarray(img)


def _resize_axis(x: Tensor, axis: int, scale: float, antialiasing: bool) -> Tensor:
    in_length = x.shape[axis]
    weights, indices, before, after = calculate_weights_indices(
        in_length, math.ceil(in_length * scale), scale, 'cubic', 4, antialiasing
    )
    extended = np.pad(np.arange(in_length), (before, after), mode='symmetric')
    source = torch.from_numpy(extended)[indices].to(x.device)
    lines = x.movedim(axis, 0)
    # An embedding bag sums weighted rows without storing a copy of the rows.
    out = F.embedding_bag(source, lines.flatten(1), per_sample_weights=weights.to(x), mode='sum')
    return out.reshape(-1, *lines.shape[1:]).movedim(0, axis).contiguous()

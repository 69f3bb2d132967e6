"""PSNR and SSIM.

SSIM: Zhou Wang, Alan C. Bovik, Hamid R. Sheikh, Eero P. Simoncelli, "Image Quality Assessment:
From Error Visibility to Structural Similarity" (2004), https://doi.org/10.1109/TIP.2003.819861

``calculate_psnr`` and ``calculate_ssim`` take numpy images in [0, 255], the ``_pt`` versions
tensors in [0, 1]. All cut ``crop_border`` pixels off each side, then take the luma (BT.601, from 16
to 235) if ``test_y_channel`` is set and there are three channels, and then compute in float64. The
score of an image that is too small for ``crop_border``, or for the window of SSIM, is NaN; the
first such image is logged.
"""

import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from basicsr.utils.color_util import rgb2ycbcr_pt
from basicsr.utils.errors import CheckError
from basicsr.utils.img_util import cv2
from basicsr.utils.registry import METRIC_REGISTRY

from .metric_util import (
    UndefinedScoreError,
    crop,
    nan_if_undefined,
    reorder_image,
    to_255,
    to_y_channel,
)

_WINDOW = 11
_SIGMA = 1.5
_STRIP = 64  # rows computed at a time, so that their planes stay in the processor's cache
_C1 = (0.01 * 255) ** 2
_C2 = (0.03 * 255) ** 2


@METRIC_REGISTRY.register()
@nan_if_undefined
def calculate_psnr(
    img: np.ndarray,
    img2: np.ndarray,
    crop_border: int,
    input_order: str = 'HWC',
    test_y_channel: bool = False,
    **kwargs: Any,
) -> float:
    """Peak signal-to-noise ratio in dB; infinite for equal images.

    Args:
        img, img2: Images of equal shape in [0, 255], BGR or gray; uint16 is scaled to that range.
        crop_border: Pixels to leave out at each side.
        input_order: 'HWC' or 'CHW'.
        test_y_channel: Compare the luma.
    """
    img, img2 = _prepare(img, img2, crop_border, input_order, test_y_channel)
    if img.dtype == img2.dtype == np.uint8:
        mse = cv2.norm(img, img2, cv2.NORM_L2SQR) / img.size  # exact: it adds integers
    else:
        difference = np.subtract(img, img2, dtype=np.float64)
        mse = float(np.vdot(difference, difference)) / difference.size
    return math.inf if mse == 0 else 10 * math.log10(255**2 / mse)


@METRIC_REGISTRY.register()
@nan_if_undefined
def calculate_psnr_pt(
    img: Tensor, img2: Tensor, crop_border: int, test_y_channel: bool = False, **kwargs: Any
) -> Tensor:
    """Peak signal-to-noise ratio in dB of each sample, (n,) float64; 80 for equal images.

    Args:
        img, img2: Tensors (n, c, h, w) of equal shape, RGB or gray, in [0, 1].
        crop_border: Pixels to leave out at each side.
        test_y_channel: Compare the luma.
    """
    img, img2 = _prepare_pt(img, img2, crop_border, test_y_channel)
    mse = ((img - img2) ** 2).mean(dim=(1, 2, 3))
    return 10 * torch.log10(1 / (mse + 1e-8))


@METRIC_REGISTRY.register()
@nan_if_undefined
def calculate_ssim(
    img: np.ndarray,
    img2: np.ndarray,
    crop_border: int,
    input_order: str = 'HWC',
    test_y_channel: bool = False,
    **kwargs: Any,
) -> float:
    """Structural similarity, the mean over channels; 1 for equal images. Arguments: as for PSNR.

    Only windows of 11 x 11 pixels that lie in the image count.
    """
    img, img2 = _prepare(img, img2, crop_border, input_order, test_y_channel=False)
    _check_window(img.shape[:2])
    return _ssim(img, img2, luma=test_y_channel and img.shape[2] == 3)


@METRIC_REGISTRY.register()
@nan_if_undefined
def calculate_ssim_pt(
    img: Tensor, img2: Tensor, crop_border: int, test_y_channel: bool = False, **kwargs: Any
) -> Tensor:
    """Structural similarity of each sample, (n,) float64. Arguments: as for PSNR."""
    img, img2 = _prepare_pt(img, img2, crop_border, test_y_channel)
    _check_window(img.shape[-2:])
    return _ssim_pth(img * 255, img2 * 255)


def _prepare(
    img: np.ndarray, img2: np.ndarray, border: int, input_order: str, test_y_channel: bool
) -> list[np.ndarray]:
    """Both images cropped, (h, w, c), in [0, 255]."""
    _check_shapes(img, img2)
    images = crop([reorder_image(x, input_order) for x in (img, img2)], border)
    return [to_y_channel(x) if test_y_channel else to_255(x) for x in images]


def _prepare_pt(img: Tensor, img2: Tensor, border: int, test_y_channel: bool) -> list[Tensor]:
    """Both tensors cropped, in float64."""
    _check_shapes(img, img2)
    images = []
    for x in (img, img2):
        if not x.is_floating_point():
            raise TypeError(f'Tensors must be floating point in [0, 1], got {x.dtype}.')
        x = crop(x.permute(2, 3, 0, 1), border).permute(2, 3, 0, 1).double()  # it wants h, w first
        images.append(rgb2ycbcr_pt(x, y_only=True) if test_y_channel and x.shape[1] == 3 else x)
    return images


def _check_shapes(img: Any, img2: Any) -> None:
    if img.shape != img2.shape:
        raise CheckError(
            f'Images must have one shape, got {tuple(img.shape)} and {tuple(img2.shape)}: is the '
            'ground truth an exact multiple of the input, and the scale right?'
        )


def _check_window(size: tuple[int, ...]) -> None:
    if min(size) < _WINDOW:
        raise UndefinedScoreError(
            f'SSIM needs at least {_WINDOW} x {_WINDOW} pixels after cropping, got '
            f'{size[0]} x {size[1]} (height x width): lower crop_border or use larger images.'
        )


def _gaussian() -> np.ndarray:
    x = np.arange(_WINDOW) - _WINDOW // 2
    kernel = np.exp(-(x**2) / (2 * _SIGMA**2))
    return kernel / kernel.sum()


def _ssim(img: np.ndarray, img2: np.ndarray, luma: bool) -> float:
    """SSIM of two images (h, w, c) in [0, 255]: eq. 13, averaged over windows and channels."""
    height, width, channels = img.shape
    if luma:
        channels = 1
    strips = list(itertools.product(range(channels), range(0, height - _WINDOW + 1, _STRIP)))
    threads = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        shares = [strips[i::threads] for i in range(threads)]
        sums = pool.map(lambda share: _ssim_sums(img, img2, share, luma), shares)
        total = math.fsum(itertools.chain.from_iterable(sums))
    return total / ((height - _WINDOW + 1) * (width - _WINDOW + 1) * channels)


def _ssim_sums(
    img: np.ndarray, img2: np.ndarray, strips: Sequence[tuple[int, int]], luma: bool
) -> list[float]:
    """Sums of the SSIM of the windows of each strip (channel, first row).

    All arithmetic is in place, since allocating arrays would take longer.
    """
    kernel, margin = _gaussian(), _WINDOW // 2
    memory = np.empty((5, _STRIP + 2 * margin, img.shape[1]))
    sums = []
    for channel, top in strips:
        rows = slice(top, top + _STRIP + 2 * margin)
        strip = img[rows], img2[rows]
        x, y, squares, product, spare = memory[:, : len(strip[0])]
        x[:], y[:] = ((to_y_channel(i) if luma else i)[..., channel] for i in strip)
        np.multiply(x, x, out=squares)
        squares += np.multiply(y, y, out=spare)
        np.multiply(x, y, out=product)
        planes = x, y, squares, product
        means = spare, x, y, squares  # each overwrites a plane that is no longer needed
        for plane, mean in zip(planes, means, strict=True):
            cv2.sepFilter2D(plane, -1, kernel, kernel, mean)
        # Whole rows are faster in numpy, although windows at their ends extend beyond the image.
        inside = (plane[margin:-margin] for plane in (*means, product))
        mean_x, mean_y, mean_squares, mean_product, result = inside
        np.multiply(mean_x, mean_y, out=result)
        mean_product -= result  # the covariance
        mean_x *= mean_x
        mean_x += np.multiply(mean_y, mean_y, out=mean_y)
        mean_squares -= mean_x  # the sum of the variances
        result += _C1 / 2
        mean_product += _C2 / 2
        result *= mean_product
        mean_x += _C1
        mean_squares += _C2
        mean_x *= mean_squares
        result /= mean_x
        sums.append(4 * float(result[:, margin:-margin].sum()))
    return sums


def _ssim_pth(img: Tensor, img2: Tensor) -> Tensor:
    """SSIM of each sample of two tensors (n, c, h, w) in [0, 255], in float64."""
    n, c = img.shape[:2]
    kernel = torch.from_numpy(_gaussian()).to(img.device)

    def blur(x: Tensor) -> Tensor:
        x = x.reshape(n * c, 1, *x.shape[-2:])
        x = F.conv2d(F.conv2d(x, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))
        return x.view(n, c, *x.shape[-2:])

    x, y = img.double(), img2.double()
    mean_x, mean_y, mean_squares, mean_product = map(blur, (x, y, x * x + y * y, x * y))
    # Eq. 13 for each window.
    product, squares = mean_x * mean_y, mean_x**2 + mean_y**2
    luminance = (2 * product + _C1) / (squares + _C1)
    structure = (2 * (mean_product - product) + _C2) / (mean_squares - squares + _C2)
    return (luminance * structure).mean(dim=(1, 2, 3))

"""Filter images with a kernel (by FFT), and sharpen them by unsharp masking (USM).

The sharpening is that of Real-ESRGAN's targets: Xintao Wang, Liangbin Xie, Chao Dong, Ying Shan,
"Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data" (2021),
https://arxiv.org/abs/2107.10833
"""

import numpy as np
import torch
import torch.nn.functional as F
from scipy.fft import next_fast_len
from torch import Tensor, nn

from .errors import UserError
from .img_util import cv2


def filter2D(img: Tensor, kernel: Tensor) -> Tensor:
    """Correlate each image with its kernel; the borders are reflected.

    Computed by FFT, so the cost hardly depends on the size of the kernel: with 21 x 21 pixels it is
    a quarter of that of a convolution on the CPU.

    Args:
        img: (b, c, h, w), of any size from 1 x 1.
        kernel: (b, k, k), or (1, k, k) for all images; k is odd. Not flipped.

    Returns:
        Images of the shape and dtype of ``img``, computed in float32 at least.
    """
    (b, _, h, w), k = img.shape, kernel.shape[-1]
    if kernel.shape not in ((1, k, k), (b, k, k)) or k % 2 == 0:
        raise UserError(
            f'kernel has shape {tuple(kernel.shape)}; {b} image(s) need ({b}, k, k) or (1, k, k) '
            'with odd k.'
        )
    padded = _reflect_pad(img.to(torch.promote_types(img.dtype, torch.float32)), k // 2)
    size = [next_fast_len(side, real=True) for side in padded.shape[-2:]]
    spectrum = torch.fft.rfft2(kernel.to(padded), s=size).conj()[:, None]
    filtered = torch.fft.irfft2(torch.fft.rfft2(padded, s=size) * spectrum, s=size)
    return filtered[..., :h, :w].to(img.dtype).contiguous()


def _reflect_pad(img: Tensor, pad: int) -> Tensor:
    """Reflect ``img`` at its border pixels, again and again where it is smaller than ``pad``."""
    h, w = img.shape[-2:]
    if pad < min(h, w):
        return F.pad(img, [pad] * 4, mode='reflect')
    rows, columns = (_reflected(size, pad, img.device) for size in (h, w))
    return img[..., rows[:, None], columns]


def _reflected(size: int, pad: int, device: torch.device) -> Tensor:
    """Index of the pixel of a line that is seen at each place from -pad to size + pad - 1."""
    place = torch.arange(-pad, size + pad, device=device) % max(2 * size - 2, 1)
    return size - 1 - (place - (size - 1)).abs()


def usm_sharp(
    img: np.ndarray, weight: float = 0.5, radius: int = 50, threshold: float = 10
) -> np.ndarray:
    """Sharpen an image by unsharp masking: add what a blur removes.

    Args:
        img: (h, w, c) or (h, w), floating, in [0, 1].
        weight: How much of the difference is added.
        radius: Size of the Gaussian window; an even one is made odd by adding 1.
        threshold: Pixels that differ by less, in units of 1/255, are left unchanged; the mask of
            the others is blurred by the same window.
    """
    size = _odd(radius)

    def blur(x: np.ndarray) -> np.ndarray:
        return cv2.GaussianBlur(x, (size, size), 0).reshape(img.shape)

    residual = img - blur(img)
    mask = blur((np.abs(residual) * 255 > threshold).astype(img.dtype))
    sharp = np.clip(img + weight * residual, 0, 1)
    return mask * sharp + (1 - mask) * img


class USMSharp(nn.Module):
    """``usm_sharp`` for batches of images (b, c, h, w).

    Args:
        radius: Size of the Gaussian window; an even one is made odd by adding 1.
        sigma: Width of the Gaussian; 0 means the one that OpenCV gives to a window of this size.
    """

    kernel: Tensor

    def __init__(self, radius: int = 50, sigma: float = 0):
        super().__init__()
        self.radius = _odd(radius)
        window = torch.from_numpy(cv2.getGaussianKernel(self.radius, sigma)).float()
        self.register_buffer('kernel', (window @ window.T)[None])

    def forward(self, img: Tensor, weight: float = 0.5, threshold: float = 10) -> Tensor:
        residual = img - filter2D(img, self.kernel)
        mask = filter2D((residual.abs() * 255 > threshold).to(img.dtype), self.kernel)
        sharp = (img + weight * residual).clamp(0, 1)
        return mask * sharp + (1 - mask) * img


def _odd(size: int) -> int:
    return size + 1 - size % 2

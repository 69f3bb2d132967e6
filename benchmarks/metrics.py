"""Images per second of the metrics, and of SSIM and PSNR written down directly."""

from functools import partial
from pathlib import Path

import cv2
import numpy as np

from basicsr.metrics import calculate_niqe, calculate_psnr, calculate_ssim

from .measure import Result, Row, in_turn, seconds
from .photos import photograph

WIDTH, HEIGHT = 1024, 644


def measure(folder: Path, quick: bool) -> Result:
    """SSIM of colour and of luma, PSNR, NIQE, on one image."""
    width, height = (96 * 2, 96) if quick else (WIDTH, HEIGHT)
    a, b = (photograph(number, width, height) for number in range(2))
    sides = {
        'ssim': partial(seconds, calculate_ssim, a, b, 0),
        'ssim direct': partial(seconds, direct_ssim, a, b),
        'ssim luma': partial(seconds, partial(calculate_ssim, test_y_channel=True), a, b, 0),
        'ssim luma direct': partial(seconds, luma_ssim, a, b),
        'psnr': partial(seconds, calculate_psnr, a, b, 0),
        'psnr direct': partial(seconds, direct_psnr, a, b),
        'niqe': partial(seconds, calculate_niqe, a, 0),
    }
    raw = in_turn(sides, 1 if quick else 21)
    rate = {side: 1 / min(times) for side, times in raw.items()}
    rows = [
        Row('SSIM, RGB / direct', rate['ssim'], 'images/s', rate['ssim direct'], ('>=', 5)),
        Row('SSIM, Y / direct', rate['ssim luma'], 'images/s', rate['ssim luma direct'], ('>=', 5)),
        Row('PSNR, RGB / float64 copies', rate['psnr'], 'images/s', rate['psnr direct']),
        Row('NIQE', rate['niqe'], 'images/s'),
    ]
    return Result(rows, raw)


def direct_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """SSIM of images (h, w, c) in [0, 255], each mean over the whole 11 x 11 window."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    gaussian = cv2.getGaussianKernel(11, 1.5)
    window = gaussian @ gaussian.T
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2

    def mean(x: np.ndarray) -> np.ndarray:
        return cv2.filter2D(x, -1, window)[5:-5, 5:-5]

    scores = []
    for channel in range(a.shape[2]):
        x, y = a[..., channel], b[..., channel]
        mean_x, mean_y = mean(x), mean(y)
        variance_x, variance_y = mean(x**2) - mean_x**2, mean(y**2) - mean_y**2
        covariance = mean(x * y) - mean_x * mean_y
        luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
        structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
        scores.append((luminance * structure).mean())
    return float(np.mean(scores))


def luma_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """SSIM of the luma (BT.601) of two BGR images in [0, 255]."""
    weights = np.array([24.966, 128.553, 65.481]) / 255
    return direct_ssim(*(img.astype(np.float64) @ weights[:, None] + 16 for img in (a, b)))


def direct_psnr(a: np.ndarray, b: np.ndarray) -> float:
    """PSNR in dB of two images in [0, 255]."""
    mse = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float(10 * np.log10(255**2 / mse))

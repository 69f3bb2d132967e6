"""Image degradations: blur kernels, noise and JPEG compression for synthetic training inputs.

Xintao Wang, Liangbin Xie, Chao Dong, Ying Shan, "Real-ESRGAN: Training Real-World Blind
Super-Resolution with Pure Synthetic Data" (2021), https://arxiv.org/abs/2107.10833

The generalized Gaussian and plateau-shaped kernels: Yu-Qi Liu, Xin Du, Hui-Liang Shen, Shu-Jie
Chen, "Estimating Generalized Gaussian Blur Kernels for Out-of-Focus Image Deblurring" (2021),
https://doi.org/10.1109/TCSVT.2020.2990623

Kernels are arrays (k, k) in float64 that sum to 1. Images are arrays (h, w, c) or (h, w), BGR, or
with ``_pt`` tensors (b, c, h, w), RGB; both floating, in [0, 1], with 3 or 1 channels. No function
changes its inputs. Random numbers come from ``random`` and ``numpy.random`` for arrays,
from torch for tensors.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from basicsr.utils.errors import UserError
from basicsr.utils.img_util import cv2

Range = Sequence[float]
PerImage = float | Tensor  # a number, or a tensor (b,)

# Of R, G, B, for gray noise on tensors: BT.601 as torchvision rounds it.
LUMA = (0.2989, 0.587, 0.114)


# kernels


def sigma_matrix2(sig_x: float, sig_y: float, theta: float) -> np.ndarray:
    """Covariance (2, 2) of a Gaussian with these widths in pixels, rotated by ``theta`` radians."""
    cos, sin = math.cos(theta), math.sin(theta)
    rotation = np.array([[cos, -sin], [sin, cos]])
    return rotation @ np.diag([sig_x**2, sig_y**2]) @ rotation.T


def mesh_grid(kernel_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates of a kernel's pixels: (x, y) as (k, k, 2), then x and y separately, (k, k).

    0 is in the middle of an odd size.
    """
    line = np.arange(-kernel_size // 2 + 1.0, kernel_size // 2 + 1.0)
    xx, yy = np.meshgrid(line, line)
    return np.stack([xx, yy], axis=-1), xx, yy


def pdf2(sigma_matrix: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Density of the centred Gaussian at the points of ``grid`` (k, k, 2), up to a factor."""
    return np.exp(-0.5 * _squared_distance(sigma_matrix, grid))


def cdf2(d_matrix: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Standard normal probability of the quadrant below each point of ``grid`` @ ``d_matrix``.

    Multiplied with the density it gives skewed kernels. The two coordinates are independent, so it
    is the product of their distribution functions.
    """
    return special.ndtr(grid @ d_matrix).prod(axis=-1)


def bivariate_Gaussian(
    kernel_size: int,
    sig_x: float,
    sig_y: float,
    theta: float,
    grid: np.ndarray | None = None,
    isotropic: bool = True,
) -> np.ndarray:
    """A Gaussian kernel.

    Args:
        kernel_size: Number of pixels k of a side.
        sig_x: Width in pixels.
        sig_y: Width across; not used for isotropic kernels.
        theta: Rotation in radians; not used for isotropic kernels.
        grid: (x, y) of the pixels, (k, k, 2); default: those of ``mesh_grid``.
        isotropic: Make a round kernel, of width ``sig_x``.
    """
    return _normalized(np.exp(-0.5 * _distance(kernel_size, sig_x, sig_y, theta, grid, isotropic)))


def bivariate_generalized_Gaussian(
    kernel_size: int,
    sig_x: float,
    sig_y: float,
    theta: float,
    beta: float,
    grid: np.ndarray | None = None,
    isotropic: bool = True,
) -> np.ndarray:
    """exp(-d^beta / 2) for the squared distance d: a Gaussian for ``beta`` 1, flatter above.

    The other arguments are those of ``bivariate_Gaussian``.
    """
    distance = _distance(kernel_size, sig_x, sig_y, theta, grid, isotropic)
    return _normalized(np.exp(-0.5 * distance**beta))


def bivariate_plateau(
    kernel_size: int,
    sig_x: float,
    sig_y: float,
    theta: float,
    beta: float,
    grid: np.ndarray | None = None,
    isotropic: bool = True,
) -> np.ndarray:
    """1 / (1 + d^beta) for the squared distance d: a plateau with slopes steeper with ``beta``.

    The other arguments are those of ``bivariate_Gaussian``.
    """
    distance = _distance(kernel_size, sig_x, sig_y, theta, grid, isotropic)
    return _normalized(1 / (1 + distance**beta))


def _distance(
    kernel_size: int,
    sig_x: float,
    sig_y: float,
    theta: float,
    grid: np.ndarray | None,
    isotropic: bool,
) -> np.ndarray:
    """Squared distance of each pixel from the centre, in units of the widths."""
    sigma = sig_x**2 * np.eye(2) if isotropic else sigma_matrix2(sig_x, sig_y, theta)
    return _squared_distance(sigma, mesh_grid(kernel_size)[0] if grid is None else grid)


def _squared_distance(sigma_matrix: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """x' S^-1 x of the points x (..., 2)."""
    return (grid @ np.linalg.inv(sigma_matrix) * grid).sum(axis=-1)


def _normalized(kernel: np.ndarray) -> np.ndarray:
    return kernel / kernel.sum()


def random_bivariate_Gaussian(
    kernel_size: int,
    sigma_x_range: Range,
    sigma_y_range: Range,
    rotation_range: Range,
    noise_range: Range | None = None,
    isotropic: bool = True,
) -> np.ndarray:
    """A Gaussian kernel with widths and rotation drawn from ranges.

    Args:
        kernel_size: Number of pixels of a side, odd.
        sigma_x_range: Lowest and highest width in pixels.
        sigma_y_range: The same across; not used for isotropic kernels.
        rotation_range: Lowest and highest angle in radians; not used for isotropic kernels.
        noise_range: Lowest and highest factor by which each pixel is multiplied, if any.
        isotropic: Draw a round kernel.
    """
    drawn = _draw(sigma_x_range, sigma_y_range, rotation_range, None, isotropic)
    return _noisy(bivariate_Gaussian(_odd(kernel_size), **drawn), noise_range)


def random_bivariate_generalized_Gaussian(
    kernel_size: int,
    sigma_x_range: Range,
    sigma_y_range: Range,
    rotation_range: Range,
    beta_range: Range,
    noise_range: Range | None = None,
    isotropic: bool = True,
) -> np.ndarray:
    """A generalized Gaussian kernel with parameters drawn from ranges.

    ``beta_range`` holds the lowest exponent (below 1) and the highest (above 1); both sides of 1
    are equally likely. The other arguments are those of ``random_bivariate_Gaussian``.
    """
    drawn = _draw(sigma_x_range, sigma_y_range, rotation_range, beta_range, isotropic)
    return _noisy(bivariate_generalized_Gaussian(_odd(kernel_size), **drawn), noise_range)


def random_bivariate_plateau(
    kernel_size: int,
    sigma_x_range: Range,
    sigma_y_range: Range,
    rotation_range: Range,
    beta_range: Range,
    noise_range: Range | None = None,
    isotropic: bool = True,
) -> np.ndarray:
    """A plateau-shaped kernel; arguments as of ``random_bivariate_generalized_Gaussian``."""
    drawn = _draw(sigma_x_range, sigma_y_range, rotation_range, beta_range, isotropic)
    return _noisy(bivariate_plateau(_odd(kernel_size), **drawn), noise_range)


def random_mixed_kernels(
    kernel_list: Sequence[str],
    kernel_prob: Sequence[float],
    kernel_size: int = 21,
    sigma_x_range: Range = (0.6, 5),
    sigma_y_range: Range = (0.6, 5),
    rotation_range: Range = (-math.pi, math.pi),
    betag_range: Range = (0.5, 8),
    betap_range: Range = (0.5, 8),
    noise_range: Range | None = None,
) -> np.ndarray:
    """A kernel of a kind drawn from a list, with parameters drawn from ranges.

    Args:
        kernel_list: Names 'iso', 'aniso', 'generalized_iso', 'generalized_aniso', 'plateau_iso',
            'plateau_aniso'.
        kernel_prob: A weight for each of them.
        kernel_size: Number of pixels of a side, odd.
        sigma_x_range: Lowest and highest width in pixels.
        sigma_y_range: The same across.
        rotation_range: Lowest and highest angle in radians.
        betag_range: Lowest and highest exponent of generalized kernels.
        betap_range: Lowest and highest exponent of plateaus.
        noise_range: Lowest and highest factor of each pixel, if any; plateaus have none.
    """
    return draw_mixed_kernel(
        kernel_list,
        kernel_prob,
        kernel_size,
        sigma_x_range,
        sigma_y_range,
        rotation_range,
        betag_range,
        betap_range,
        noise_range,
    )[0]


def draw_mixed_kernel(
    kernel_list: Sequence[str],
    kernel_prob: Sequence[float],
    kernel_size: int,
    sigma_x_range: Range,
    sigma_y_range: Range,
    rotation_range: Range,
    betag_range: Range,
    betap_range: Range,
    noise_range: Range | None = None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """As ``random_mixed_kernels``, with what was drawn: the kind, and the kernel's parameters."""
    families = {
        '': (bivariate_Gaussian, None, noise_range),
        'generalized': (bivariate_generalized_Gaussian, betag_range, noise_range),
        'plateau': (bivariate_plateau, betap_range, None),
    }
    kind = random.choices(kernel_list, kernel_prob)[0]
    family, _, shape = kind.rpartition('_')
    if family not in families or shape not in ('iso', 'aniso'):
        raise UserError(
            f"There is no kernel '{kind}'. kernel_list may name iso, aniso, generalized_iso, "
            'generalized_aniso, plateau_iso, plateau_aniso.'
        )
    make, beta_range, noise_range = families[family]
    drawn = _draw(sigma_x_range, sigma_y_range, rotation_range, beta_range, shape == 'iso')
    kernel = _noisy(make(_odd(kernel_size), **drawn), noise_range)
    return kernel, {'kind': kind, 'kernel_size': kernel_size, **drawn}


def _draw(
    sigma_x_range: Range,
    sigma_y_range: Range,
    rotation_range: Range,
    beta_range: Range | None,
    isotropic: bool,
) -> dict[str, Any]:
    """Arguments of the ``bivariate_...`` functions, drawn in the order of the code."""
    drawn: dict[str, Any] = {'sig_x': _uniform(sigma_x_range), 'isotropic': isotropic}
    if isotropic:
        drawn |= {'sig_y': drawn['sig_x'], 'theta': 0.0}
    else:
        drawn['sig_y'] = _uniform(sigma_y_range)
        drawn['theta'] = _uniform(rotation_range)
    if beta_range is not None:
        # A uniform draw over the whole range would rarely give exponents below 1.
        low, high = beta_range
        below = np.random.uniform() < 0.5
        drawn['beta'] = _uniform((low, 1) if below else (1, high))
    return drawn


def _noisy(kernel: np.ndarray, noise_range: Range | None) -> np.ndarray:
    """The kernel with each pixel multiplied by a factor from ``noise_range``, if there is one."""
    if noise_range is None:
        return kernel
    low, high = noise_range
    return _normalized(kernel * np.random.uniform(low, high, kernel.shape))


def _uniform(bounds: Range) -> float:
    low, high = bounds
    return np.random.uniform(low, high)


def _odd(kernel_size: int) -> int:
    if kernel_size % 2 == 0:
        raise UserError(f'kernel_size is {kernel_size}; only odd kernels have a centre.')
    return kernel_size


def circular_lowpass_kernel(cutoff: float, kernel_size: int, pad_to: int = 0) -> np.ndarray:
    """The kernel of an ideal circular low-pass, a 2-D sinc, which causes ringing and overshoot.

    Args:
        cutoff: Highest frequency that passes, in radians per pixel, up to pi.
        kernel_size: Number of pixels k of a side, odd.
        pad_to: Zero-pad the kernel to this odd size, unless it is at least as large.
    """
    _, xx, yy = mesh_grid(_odd(kernel_size))
    radius = np.hypot(xx, yy)
    middle = kernel_size // 2
    radius[middle, middle] = 1  # avoids a division by 0
    kernel = cutoff * special.j1(cutoff * radius) / (2 * np.pi * radius)
    kernel[middle, middle] = cutoff**2 / (4 * np.pi)  # the limit
    kernel = _normalized(kernel)
    return pad_kernel(kernel, pad_to) if pad_to > kernel_size else kernel


def pad_kernel(kernel: np.ndarray, size: int) -> np.ndarray:
    """Zero-pad a kernel (k, k) with odd k to (size, size)."""
    pad, rest = divmod(size - kernel.shape[0], 2)
    if pad < 0 or rest:
        raise UserError(f'A kernel of shape {kernel.shape} cannot be padded evenly to {size}.')
    return np.pad(kernel, pad)


# Gaussian noise


def generate_gaussian_noise(
    img: np.ndarray, sigma: float = 10, gray_noise: bool = False
) -> np.ndarray:
    """Gaussian noise of the shape of ``img``, in float32.

    Args:
        img: Image; its values do not matter.
        sigma: Standard deviation, in units of 1/255.
        gray_noise: The same for all channels.
    """
    if not gray_noise:
        return np.random.randn(*img.shape).astype(np.float32) * sigma / 255
    noise = np.random.randn(*img.shape[:2]).astype(np.float32) * sigma / 255
    return _to_channels(noise, img)


def add_gaussian_noise(
    img: np.ndarray,
    sigma: float = 10,
    clip: bool = True,
    rounds: bool = False,
    gray_noise: bool = False,
) -> np.ndarray:
    """``img`` with Gaussian noise; ``clip`` to [0, 1], ``rounds`` to multiples of 1/255."""
    return _finished(img + generate_gaussian_noise(img, sigma, gray_noise), clip, rounds)


def generate_gaussian_noise_pt(
    img: Tensor,
    sigma: PerImage = 10,
    gray_noise: PerImage = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Gaussian noise of the shape and dtype of ``img``.

    Args:
        img: Images; their values do not matter.
        sigma: Standard deviation, in units of 1/255.
        gray_noise: 1 for noise that is the same in all channels of an image, else 0.
        generator: Of the random numbers, on the device of ``img``; default: torch's own.
    """

    def normal(count: int, channels: int) -> Tensor:
        shape = (count, channels, *img.shape[2:])
        return torch.randn(shape, generator=generator, dtype=img.dtype, device=img.device)

    b, c = img.shape[:2]
    sigma = _per_image(sigma, img)
    num_gray = _count(gray_noise, b)
    if not num_gray:
        return normal(b, c) * sigma / 255
    # Upstream gives one plane to all gray images of a batch and draws it before the colours. The
    # first gray image has that one; the planes of the others come after the colours.
    plane, colour = normal(1, 1), normal(b, c)
    gray = torch.cat([plane, normal(num_gray - 1, 1)])
    if isinstance(gray_noise, Tensor):
        gray = gray[((gray_noise > 0).cumsum(0) - 1).clamp(min=0)]
    return torch.lerp(colour, gray, _per_image(gray_noise, img)) * sigma / 255


def add_gaussian_noise_pt(
    img: Tensor,
    sigma: PerImage = 10,
    gray_noise: PerImage = 0,
    clip: bool = True,
    rounds: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``img`` with Gaussian noise; ``clip`` to [0, 1], ``rounds`` to multiples of 1/255."""
    noise = generate_gaussian_noise_pt(img, sigma, gray_noise, generator)
    return _finished(img + noise, clip, rounds)


def random_generate_gaussian_noise(
    img: np.ndarray, sigma_range: Range = (0, 10), gray_prob: float = 0
) -> np.ndarray:
    """Gaussian noise of a standard deviation from a range, gray with a probability."""
    return generate_gaussian_noise(img, *_draw_noise(sigma_range, gray_prob))


def random_add_gaussian_noise(
    img: np.ndarray,
    sigma_range: Range = (0, 1.0),
    gray_prob: float = 0,
    clip: bool = True,
    rounds: bool = False,
) -> np.ndarray:
    """``img`` with ``random_generate_gaussian_noise``, clipped and rounded if wanted."""
    noise = random_generate_gaussian_noise(img, sigma_range, gray_prob)
    return _finished(img + noise, clip, rounds)


def random_generate_gaussian_noise_pt(
    img: Tensor, sigma_range: Range = (0, 10), gray_prob: float = 0
) -> Tensor:
    """Gaussian noise; each image has its own standard deviation and may be gray by itself."""
    return generate_gaussian_noise_pt(img, *_draw_noise_pt(img, sigma_range, gray_prob))


def random_add_gaussian_noise_pt(
    img: Tensor,
    sigma_range: Range = (0, 1.0),
    gray_prob: float = 0,
    clip: bool = True,
    rounds: bool = False,
) -> Tensor:
    """``img`` with ``random_generate_gaussian_noise_pt``, clipped and rounded if wanted."""
    noise = random_generate_gaussian_noise_pt(img, sigma_range, gray_prob)
    return _finished(img + noise, clip, rounds)


# Poisson noise: the 8-bit image is the expected photon count, up to a factor


def generate_poisson_noise(
    img: np.ndarray, scale: float = 1.0, gray_noise: bool = False
) -> np.ndarray:
    """Poisson noise for an image, in float32.

    Args:
        img: Image, whose brightness is the variance of the noise.
        scale: Factor of the noise.
        gray_noise: Use the noise of the luma for all channels.
    """
    gray = gray_noise and not _is_gray(img)
    rates = _eight_bit(cv2.cvtColor(img.astype(np.float32), cv2.COLOR_BGR2GRAY) if gray else img)
    levels = 1 << (len(np.unique(rates)) - 1).bit_length()
    noise = (np.random.poisson(rates * levels) / levels).astype(np.float32) - rates
    return _to_channels(noise, img) * scale


def add_poisson_noise(
    img: np.ndarray,
    scale: float = 1.0,
    clip: bool = True,
    rounds: bool = False,
    gray_noise: bool = False,
) -> np.ndarray:
    """``img`` with Poisson noise; ``clip`` to [0, 1], ``rounds`` to multiples of 1/255."""
    return _finished(img + generate_poisson_noise(img, scale, gray_noise), clip, rounds)


def generate_poisson_noise_pt(
    img: Tensor,
    scale: PerImage = 1.0,
    gray_noise: PerImage = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Poisson noise for images, of their shape and dtype.

    Args:
        img: Images, whose brightness is the variance of the noise.
        scale: Factor of the noise.
        gray_noise: 1 for the noise of the luma, the same in all channels of an image, else 0.
        generator: Of the random numbers, on the device of ``img``; default: torch's own.
    """

    def poisson(image: Tensor) -> Tensor:
        rates = _eight_bit(image)
        levels = _gray_levels(rates)
        return torch.poisson(rates * levels, generator=generator) / levels - rates

    scale = _per_image(scale, img)
    if not _count(gray_noise, img.shape[0]):
        return poisson(img) * scale
    gray = poisson(_luma(img))
    return torch.lerp(poisson(img), gray, _per_image(gray_noise, img)) * scale


def add_poisson_noise_pt(
    img: Tensor,
    scale: PerImage = 1.0,
    clip: bool = True,
    rounds: bool = False,
    gray_noise: PerImage = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``img`` with Poisson noise; ``clip`` to [0, 1], ``rounds`` to multiples of 1/255."""
    noise = generate_poisson_noise_pt(img, scale, gray_noise, generator)
    return _finished(img + noise, clip, rounds)


def random_generate_poisson_noise(
    img: np.ndarray, scale_range: Range = (0, 1.0), gray_prob: float = 0
) -> np.ndarray:
    """Poisson noise times a factor from a range, gray with a probability."""
    return generate_poisson_noise(img, *_draw_noise(scale_range, gray_prob))


def random_add_poisson_noise(
    img: np.ndarray,
    scale_range: Range = (0, 1.0),
    gray_prob: float = 0,
    clip: bool = True,
    rounds: bool = False,
) -> np.ndarray:
    """``img`` with ``random_generate_poisson_noise``, clipped and rounded if wanted."""
    noise = random_generate_poisson_noise(img, scale_range, gray_prob)
    return _finished(img + noise, clip, rounds)


def random_generate_poisson_noise_pt(
    img: Tensor, scale_range: Range = (0, 1.0), gray_prob: float = 0
) -> Tensor:
    """Poisson noise; each image has its own factor and may be gray by itself."""
    return generate_poisson_noise_pt(img, *_draw_noise_pt(img, scale_range, gray_prob))


def random_add_poisson_noise_pt(
    img: Tensor,
    scale_range: Range = (0, 1.0),
    gray_prob: float = 0,
    clip: bool = True,
    rounds: bool = False,
) -> Tensor:
    """``img`` with ``random_generate_poisson_noise_pt``, clipped and rounded if wanted."""
    noise = random_generate_poisson_noise_pt(img, scale_range, gray_prob)
    return _finished(img + noise, clip, rounds)


# shared by both kinds of noise


def _draw_noise(level_range: Range, gray_prob: float) -> tuple[float, bool]:
    """Level and whether it is gray, in this order."""
    level = _uniform(level_range)
    return level, np.random.uniform() < gray_prob


def _draw_noise_pt(img: Tensor, level_range: Range, gray_prob: float) -> tuple[Tensor, Tensor]:
    """A level and whether it is gray for each image, in this order."""
    low, high = level_range
    level, gray = (torch.rand(img.shape[0], dtype=img.dtype, device=img.device) for _ in range(2))
    return level * (high - low) + low, (gray < gray_prob).to(img.dtype)


def _finished(img: Any, clip: bool, rounds: bool) -> Any:
    """An array or a tensor, rounded to multiples of 1/255 and clipped to [0, 1] if wanted."""
    if rounds:
        img = (img * 255.0).round() / 255.0
    return img.clip(0, 1) if clip else img


def _eight_bit(img: Any) -> Any:
    """An array or a tensor, clipped to [0, 1] and rounded to multiples of 1/255."""
    return (img * 255.0).round().clip(0, 255) / 255.0


def _is_gray(img: np.ndarray) -> bool:
    return img.ndim == 2 or img.shape[2] == 1


def _to_channels(noise: np.ndarray, img: np.ndarray) -> np.ndarray:
    """Noise (h, w), or already in the shape of the image, in the shape of the image."""
    return noise if noise.shape == img.shape else np.repeat(noise[..., None], img.shape[2], axis=2)


def _luma(img: Tensor) -> Tensor:
    """Luma (b, 1, h, w) of RGB images; gray images are returned as they are."""
    if img.shape[1] == 1:
        return img
    red, green, blue = img.split(1, 1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def _gray_levels(rates: Tensor) -> Tensor:
    """Number of values of each image in 8 bits, up to the next power of two: (b, 1, 1, 1)."""
    values = (rates * 255).round().long().flatten(1)
    seen = torch.zeros(len(values), 256, dtype=torch.bool, device=rates.device)
    count = seen.scatter_(1, values, True).sum(1)
    powers = 2 ** torch.arange(9, device=rates.device)
    return powers[torch.bucketize(count, powers)].to(rates.dtype).view(-1, 1, 1, 1)


def _per_image(value: PerImage, img: Tensor) -> PerImage:
    """A number, or a tensor (b,) in a shape that broadcasts with images (b, c, h, w)."""
    return value.to(img).view(-1, 1, 1, 1) if isinstance(value, Tensor) else value


def _count(gray_noise: PerImage, total: int) -> int:
    """How many of ``total`` images get gray noise."""
    if isinstance(gray_noise, Tensor):
        return int((gray_noise > 0).sum())
    return total if gray_noise else 0


# JPEG


def add_jpg_compression(img: np.ndarray, quality: float = 90) -> np.ndarray:
    """An image after JPEG compression and decompression, in float32.

    Args:
        img: Image in [0, 1]; values outside are clipped.
        quality: From 0 to 100; OpenCV takes integers, so a fraction is truncated.
    """
    if not 0 <= quality <= 100:
        raise UserError(f'The JPEG quality is {quality}; it must be from 0 to 100.')
    pixels = (img.clip(0, 1) * 255).round().astype(np.uint8)
    _, content = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, int(quality)])
    flag = cv2.IMREAD_GRAYSCALE if _is_gray(img) else cv2.IMREAD_COLOR
    return (np.asarray(cv2.imdecode(content, flag), np.float32) / 255).reshape(img.shape)


def random_add_jpg_compression(img: np.ndarray, quality_range: Range = (90, 100)) -> np.ndarray:
    """``img`` after JPEG compression of a quality from a range."""
    return add_jpg_compression(img, _uniform(quality_range))

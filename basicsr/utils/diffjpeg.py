"""Differentiable JPEG compression on batches of tensors.

Richard Shin, Dawn Song, "JPEG-resistant Adversarial Images" (2017),
https://machine-learning-and-computer-security.github.io/mlsec17_paper_54.pdf

The steps and the quantisation tables are those of JPEG itself (ITU-T T.81, Annex A and K,
https://www.w3.org/Graphics/JPEG/itu-t81.pdf) with the colours of JFIF; entropy coding is left out,
since it is lossless. Between the steps, colour images are (b, h, w, 3), in [0, 255], and planes
are cut into blocks (b, number, 8, 8), whose coefficients are indexed by vertical, then horizontal
frequency.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError

Rounding = Callable[[Tensor], Tensor]

# Table K.1 of T.81, transposed: BasicSR has always used it so, and its networks are trained on it.
y_table = torch.tensor(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ],
    dtype=torch.float32,
).T.contiguous()

# Table K.2, symmetric.
c_table = torch.full((8, 8), 99.0)
c_table[:4, :4] = torch.tensor(
    [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]
)

# Rows are Y, Cb, Cr; columns are R, G, B (JFIF 1.02: BT.601 in the full range).
RGB_TO_YCBCR = torch.tensor(
    [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]]
)
# Rows are R, G, B; columns are Y, Cb, Cr.
YCBCR_TO_RGB = torch.tensor([[1, 0, 1.402], [1, -0.344136, -0.714136], [1, 1.772, 0]])
YCBCR_OFFSET = torch.tensor([0.0, 128.0, 128.0])

# Quantisation steps vanish towards quality 100. This minimum changes no pixel; 0 would give NaN.
SMALLEST_STEP = 1e-3


def diff_round(x: Tensor) -> Tensor:
    """Differentiable rounding: the rounded value plus the cube of the rounding error."""
    rounded = x.round()
    return rounded + (x - rounded) ** 3


def quality_to_factor(quality: float | Tensor) -> float | Tensor:
    """The factor of the quantisation tables for a JPEG quality: 1 at 50, 0 at 100.

    Args:
        quality: A number in (0, 100], or a tensor of them, which is not modified.
    """
    if isinstance(quality, Tensor):
        return torch.where(quality < 50, 50 / quality, 2 - quality / 50)
    if not 0 < quality <= 100:
        raise UserError(f'The JPEG quality is {quality}; it must be above 0 and at most 100.')
    return 50 / quality if quality < 50 else 2 - quality / 50


class RGB2YCbCrJpeg(nn.Module):
    """RGB (b, 3, h, w) to YCbCr (b, h, w, 3), both in [0, 255]."""

    matrix: Tensor
    offset: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer('matrix', RGB_TO_YCBCR.clone(), persistent=False)
        self.register_buffer('offset', YCBCR_OFFSET.clone(), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        return image.permute(0, 2, 3, 1) @ self.matrix.T.to(image.dtype) + self.offset


class ChromaSubsampling(nn.Module):
    """YCbCr (b, h, w, 3) to Y (b, h, w), Cb and Cr (b, h/2, w/2), means of 2 x 2 pixels (4:2:0)."""

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, cb, cr = image.unbind(3)
        cb, cr = F.avg_pool2d(torch.stack([cb, cr], 1), 2).unbind(1)
        return y, cb, cr


class BlockSplitting(nn.Module):
    """A plane (b, h, w) to its blocks (b, h/8 * w/8, 8, 8), row by row."""

    def forward(self, image: Tensor) -> Tensor:
        blocks = image.unflatten(2, (-1, 8)).unflatten(1, (-1, 8)).transpose(2, 3)
        return blocks.flatten(1, 2)


class BlockMerging(nn.Module):
    """Blocks (b, height/8 * width/8, 8, 8) to the plane (b, height, width)."""

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        blocks = patches.unflatten(1, (height // 8, width // 8)).transpose(2, 3)
        return blocks.flatten(3).flatten(1, 2)


def dct_matrix() -> Tensor:
    """The cosine transform of flat blocks (T.81, A.3.3): an orthonormal matrix (64, 64).

    Rows are frequencies, columns are pixels.
    """
    frequency, pixel = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(8)
    line = torch.cos((2 * pixel + 1) * frequency * math.pi / 16) / 2
    line[0] /= math.sqrt(2)
    return torch.kron(line, line).float()


class DCT8x8(nn.Module):
    """Blocks in [0, 255] to the coefficients of their cosine transform, both (..., 8, 8)."""

    matrix: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer('matrix', dct_matrix(), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        matrix = self.matrix.to(image.dtype)
        return ((image - 128).flatten(-2) @ matrix.T).view(image.shape)


class iDCT8x8(nn.Module):
    """Coefficients to blocks: the inverse of ``DCT8x8``."""

    matrix: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer('matrix', dct_matrix(), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        matrix = self.matrix.to(image.dtype)
        return (image.flatten(-2) @ matrix).view(image.shape) + 128


class _Quantisation(nn.Module):
    """A table of steps; ``factor`` scales it, by a number or a tensor (b,) of one per image."""

    table: Tensor

    def __init__(self, table: Tensor):
        super().__init__()
        self.register_buffer('table', table.clone(), persistent=False)

    def steps(self, image: Tensor, factor: float | Tensor) -> Tensor:
        """Steps for blocks (b, number, 8, 8): (8, 8), or (b, 1, 8, 8)."""
        if isinstance(factor, Tensor):
            factor = factor.to(image).view(-1, 1, 1, 1)
        return (self.table.to(image.dtype) * factor).clamp(min=SMALLEST_STEP)


class _Quantize(_Quantisation):
    def __init__(self, table: Tensor, rounding: Rounding):
        super().__init__(table)
        self.rounding = rounding

    def forward(self, image: Tensor, factor: float | Tensor = 1) -> Tensor:
        return self.rounding(image / self.steps(image, factor))


class _Dequantize(_Quantisation):
    def forward(self, image: Tensor, factor: float | Tensor = 1) -> Tensor:
        return image * self.steps(image, factor)


class YQuantize(_Quantize):
    """Luma coefficients (b, number, 8, 8) to numbers of steps, rounded by ``rounding``."""

    def __init__(self, rounding: Rounding):
        super().__init__(y_table, rounding)


class CQuantize(_Quantize):
    """Chroma coefficients (b, number, 8, 8) to numbers of steps, rounded by ``rounding``."""

    def __init__(self, rounding: Rounding):
        super().__init__(c_table, rounding)


class YDequantize(_Dequantize):
    """Numbers of steps to luma coefficients, (b, number, 8, 8)."""

    def __init__(self):
        super().__init__(y_table)


class CDequantize(_Dequantize):
    """Numbers of steps to chroma coefficients, (b, number, 8, 8)."""

    def __init__(self):
        super().__init__(c_table)


class ChromaUpsampling(nn.Module):
    """Y (b, h, w), Cb and Cr (b, h/2, w/2) to YCbCr (b, h, w, 3), by repeating the chroma."""

    def forward(self, y: Tensor, cb: Tensor, cr: Tensor) -> Tensor:
        chroma = F.interpolate(torch.stack([cb, cr], 1), scale_factor=2, mode='nearest')
        return torch.stack([y, *chroma.unbind(1)], 3)


class YCbCr2RGBJpeg(nn.Module):
    """YCbCr (b, h, w, 3) to RGB (b, 3, h, w), both in [0, 255], not clipped."""

    matrix: Tensor
    offset: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer('matrix', YCBCR_TO_RGB.clone(), persistent=False)
        self.register_buffer('offset', YCBCR_OFFSET.clone(), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        rgb = (image - self.offset) @ self.matrix.T.to(image.dtype)
        return rgb.permute(0, 3, 1, 2)


class CompressJpeg(nn.Module):
    """RGB (b, 3, h, w) in [0, 1], with sides of multiples of 16, to coefficients of Y, Cb, Cr.

    Args:
        rounding: ``torch.round``, or a function with a gradient in its place.
    """

    def __init__(self, rounding: Rounding = torch.round):
        super().__init__()
        self.to_planes = nn.Sequential(RGB2YCbCrJpeg(), ChromaSubsampling())
        self.to_coefficients = nn.Sequential(BlockSplitting(), DCT8x8())
        self.y_quantize = YQuantize(rounding)
        self.c_quantize = CQuantize(rounding)

    def forward(self, image: Tensor, factor: float | Tensor = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Quantised coefficients of the three planes, (b, number, 8, 8) each."""
        y, cb, cr = (self.to_coefficients(plane) for plane in self.to_planes(image * 255))
        return (
            self.y_quantize(y, factor),
            self.c_quantize(cb, factor),
            self.c_quantize(cr, factor),
        )


class DeCompressJpeg(nn.Module):
    """Coefficients of Y, Cb, Cr to RGB (b, 3, imgh, imgw) in [0, 1].

    Args:
        rounding: Not used; the parameter is upstream's.
    """

    def __init__(self, rounding: Rounding = torch.round):
        super().__init__()
        self.y_dequantize = YDequantize()
        self.c_dequantize = CDequantize()
        self.idct = iDCT8x8()
        self.merge = BlockMerging()
        self.upsample = ChromaUpsampling()
        self.to_rgb = YCbCr2RGBJpeg()

    def forward(
        self,
        y: Tensor,
        cb: Tensor,
        cr: Tensor,
        imgh: int,
        imgw: int,
        factor: float | Tensor = 1,
    ) -> Tensor:
        y = self.merge(self.idct(self.y_dequantize(y, factor)), imgh, imgw)
        cb, cr = (
            self.merge(self.idct(self.c_dequantize(plane, factor)), imgh // 2, imgw // 2)
            for plane in (cb, cr)
        )
        image = self.to_rgb(self.upsample(y, cb, cr))
        return image.clamp(0, 255) / 255


class DiffJPEG(nn.Module):
    """JPEG compression and decompression of an image.

    It has no parameters and nothing in its state dict.

    Args:
        differentiable: Use ``diff_round``, so that gradients flow; else round as JPEG does.
    """

    def __init__(self, differentiable: bool = True):
        super().__init__()
        rounding = diff_round if differentiable else torch.round
        self.compress = CompressJpeg(rounding)
        self.decompress = DeCompressJpeg(rounding)
        self._round_trip = self._plain_round_trip

    def compile(self, *args: Any, **options: Any) -> None:
        """``torch.compile``, once for all sizes: images of other sizes do not recompile."""
        options.setdefault('dynamic', True)
        self._round_trip = torch.compile(self._plain_round_trip, *args, **options)

    def _plain_round_trip(self, image: Tensor, factor: float | Tensor) -> Tensor:
        planes = self.compress(image, factor)
        return self.decompress(*planes, *image.shape[-2:], factor)

    def forward(self, x: Tensor, quality: float | Tensor) -> Tensor:
        """Compress and decompress images.

        Args:
            x: RGB (b, 3, h, w), or gray (b, 1, h, w), in [0, 1], of any size. Computed in float32,
                or in float64 if it is float64; the result has its dtype.
            quality: From above 0 to 100: a number, or a tensor (b,).
        """
        b, c, h, w = x.shape
        if c not in (1, 3):
            raise UserError(f'JPEG takes images of 1 or 3 channels, got shape {tuple(x.shape)}.')
        image = x.to(torch.promote_types(x.dtype, torch.float32))
        image = F.pad(image.expand(b, 3, h, w), (0, -w % 16, 0, -h % 16))
        factor = quality_to_factor(quality)
        # Autocast would run the transform in half precision: an error of whole quantisation steps.
        with torch.autocast(x.device.type, enabled=False):
            image = self._round_trip(image, factor)
        return image[:, :c, :h, :w].to(x.dtype)

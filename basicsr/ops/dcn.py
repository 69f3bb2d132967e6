"""Deformable convolution (DCN v1 and v2) based on ``torchvision.ops.deform_conv2d``.

Papers: Deformable Convolutional Networks, Dai et al., ICCV 2017, https://arxiv.org/abs/1703.06211;
Deformable ConvNets v2: More Deformable, Better Results, Zhu et al., CVPR 2019,
https://arxiv.org/abs/1811.11168

Offsets are in pixels: (b, deformable_groups * 2 * kh * kw, h, w), for each kernel point first the
vertical shift, then the horizontal one. Masks are (b, deformable_groups * kh * kw, h, w).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from basicsr.utils.errors import UserError

Pair = int | tuple[int, int]


def modulated_deform_conv(
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    deformable_groups: int = 1,
) -> Tensor:
    """Convolve ``x`` at shifted points, each weighted by ``mask`` (deformable convolution v2).

    Half precision is computed in float32, since it cannot hold a sampling position exactly; the
    output has the type of ``x``.

    Args:
        x: (b, c, h, w).
        weight: (out, c / groups, kh, kw).
        mask: Weight of each sampled point; None: all ones, which is version 1.

    Raises:
        ValueError: Channels of ``x``, ``offset`` or ``mask`` do not fit the weight and the groups.
    """
    from torchvision.ops import deform_conv2d  # importing torchvision takes seconds

    points = deformable_groups * weight.shape[2] * weight.shape[3]
    _check_channels('x', x, weight.shape[1] * groups)
    _check_channels('offset', offset, 2 * points)
    if mask is not None:
        _check_channels('mask', mask, points)

    dtype = torch.promote_types(x.dtype, torch.float32)
    out = deform_conv2d(
        x.to(dtype),
        offset.to(dtype),
        weight.to(dtype),
        None if bias is None else bias.to(dtype),
        _pair(stride),
        _pair(padding),
        _pair(dilation),
        None if mask is None else mask.to(dtype),
    )
    return out.to(x.dtype)


def deform_conv(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    deformable_groups: int = 1,
    im2col_step: int = 64,
) -> Tensor:
    """Convolve ``x`` at shifted points (deformable convolution v1).

    ``im2col_step`` split the batch in upstream's compiled kernels; here it has no effect.
    """
    return modulated_deform_conv(
        x, offset, None, weight, None, stride, padding, dilation, groups, deformable_groups
    )


def _check_channels(name: str, tensor: Tensor, channels: int) -> None:
    if tensor.shape[1] != channels:
        raise UserError(
            f'deformable convolution: {name} has {tensor.shape[1]} channels, but weight, groups '
            f'and deformable_groups need {channels}.'
        )


class _DeformConvBase(nn.Module):
    """Weights and options that both versions share."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        deformable_groups: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise UserError(
                f'in_channels {in_channels} and out_channels {out_channels} must be multiples of '
                f'groups {groups}.'
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = _pair(kernel_size)
        self.stride = _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)
        self.groups = groups
        self.deformable_groups = deformable_groups
        self.weight = nn.Parameter(
            torch.empty(out_channels, in_channels // groups, *self.kernel_size)
        )
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def convolve(self, x: Tensor, offset: Tensor, mask: Tensor | None) -> Tensor:
        sizes = (self.stride, self.padding, self.dilation, self.groups, self.deformable_groups)
        return modulated_deform_conv(x, offset, mask, self.weight, self.bias, *sizes)

    def _zero_conv(self, values_per_point: int) -> nn.Conv2d:
        """A zero-initialised convolution with ``values_per_point`` outputs per sampled point."""
        conv = nn.Conv2d(
            self.in_channels,
            self.deformable_groups * values_per_point * math.prod(self.kernel_size),
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
        )
        _fill_zeros(conv)
        return conv


def _fill_zeros(conv: nn.Conv2d) -> None:
    for parameter in conv.parameters():
        nn.init.zeros_(parameter)


class DeformConv(_DeformConvBase):
    """Deformable convolution v1."""

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        return self.convolve(x, offset, None)


class DeformConvPack(DeformConv):
    """Deformable convolution v1 that predicts its offsets from its input; 0 at the start."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.conv_offset = self._zero_conv(2)

    def init_offset(self) -> None:
        _fill_zeros(self.conv_offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.conv_offset(x), None)


class ModulatedDeformConv(_DeformConvBase):
    """Deformable convolution v2."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        deformable_groups: int = 1,
        bias: bool = True,
    ):
        sizes = (kernel_size, stride, padding, dilation, groups, deformable_groups)
        super().__init__(in_channels, out_channels, *sizes, bias)

    def init_weights(self) -> None:
        self.reset_parameters()

    def forward(self, x: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        return self.convolve(x, offset, mask)


class ModulatedDeformConvPack(ModulatedDeformConv):
    """Deformable convolution v2 that predicts its offsets and masks; 0 and 1/2 at the start."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.conv_offset = self._zero_conv(3)

    def init_weights(self) -> None:
        super().init_weights()
        _fill_zeros(self.conv_offset)

    def offset_and_mask(self, feat: Tensor) -> tuple[Tensor, Tensor]:
        """Predict both from ``feat`` (b, in_channels, h, w); masks are in (0, 1)."""
        out = self.conv_offset(feat)
        num_masks = out.shape[1] // 3
        offset, mask = out.split((2 * num_masks, num_masks), dim=1)
        return offset, mask.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, *self.offset_and_mask(x))

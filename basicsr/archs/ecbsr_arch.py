"""ECBSR: Edge-oriented Convolution Block for Real-time Super Resolution on Mobile Devices.

Zhang, Zeng, Zhang, ACM Multimedia 2021, https://doi.org/10.1145/3474085.3475291
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import make_activation

EDGE_FILTERS = {
    'conv1x1-sobelx': ((1, 0, -1), (2, 0, -2), (1, 0, -1)),
    'conv1x1-sobely': ((1, 2, 1), (0, 0, 0), (-1, -2, -1)),
    'conv1x1-laplacian': ((0, 1, 0), (1, -4, 1), (0, 1, 0)),
}


class SeqConv3x3(nn.Module):
    """A 1x1 convolution and then a 3x3 one, which together equal a single 3x3 convolution.

    Args:
        seq_type: 'conv1x1-conv3x3' for two ordinary convolutions; 'conv1x1-sobelx',
            'conv1x1-sobely' or 'conv1x1-laplacian' for a fixed edge filter as the second, with a
            learned factor and bias for each channel.
        depth_multiplier: With 'conv1x1-conv3x3': channels between the two, over out_channels.
    """

    def __init__(
        self, seq_type: str, in_channels: int, out_channels: int, depth_multiplier: float = 1
    ):
        super().__init__()
        self.seq_type = seq_type
        if seq_type == 'conv1x1-conv3x3':
            mid_channels = int(out_channels * depth_multiplier)
            self.k0, self.b0 = nn.Conv2d(in_channels, mid_channels, 1).parameters()
            self.k1, self.b1 = nn.Conv2d(mid_channels, out_channels, 3).parameters()
        elif seq_type in EDGE_FILTERS:
            self.k0, self.b0 = nn.Conv2d(in_channels, out_channels, 1).parameters()
            self.scale = nn.Parameter(torch.randn(out_channels, 1, 1, 1) * 1e-3)
            self.bias = nn.Parameter(torch.randn(out_channels) * 1e-3)
            mask = torch.tensor(EDGE_FILTERS[seq_type], dtype=torch.float32)
            # A parameter, not a buffer, because published weights have it as one.
            self.mask = nn.Parameter(mask.repeat(out_channels, 1, 1, 1), requires_grad=False)
        else:
            choices = ['conv1x1-conv3x3', *EDGE_FILTERS]
            raise UserError(f'seq_type {seq_type!r} is unknown; choose one of {choices}.')

    def forward(self, x: Tensor) -> Tensor:
        # Zeros around the input become the first bias around the features, the only border with
        # which the two convolutions equal one that pads its input with zeros.
        x = F.conv2d(F.pad(x, (1, 1, 1, 1)), self.k0, self.b0)
        if self.seq_type in EDGE_FILTERS:
            return F.conv2d(x, self.scale * self.mask, self.bias, groups=x.shape[1])
        return F.conv2d(x, self.k1, self.b1)

    def rep_params(self) -> tuple[Tensor, Tensor]:
        """Return kernel (out, in, 3, 3) and bias (out) of the equivalent single convolution."""
        if self.seq_type in EDGE_FILTERS:
            filters = self.scale * self.mask
            return filters * self.k0, filters.sum((1, 2, 3)) * self.b0 + self.bias
        # Sums over the intermediate channels; unlike einsum they stay exact under autocast.
        kernel = (self.k1[:, :, None] * self.k0[None]).sum(1)
        return kernel, (self.k1 * self.b0[:, None, None]).sum((1, 2, 3)) + self.b1


class ECB(nn.Module):
    """Edge-oriented convolution block: five parallel branches, run as one 3x3 convolution.

    The sum of the branches is linear in the input, so their kernels are merged before the
    convolution, in training too: outputs and gradients are those of the branches, at a fraction of
    the cost. In ``eval()`` without gradients the merged kernel is kept until a parameter changes.

    Args:
        depth_multiplier: See ``SeqConv3x3``.
        with_idt: Also add the input, if it has ``out_channels`` channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        depth_multiplier: float,
        act_type: str = 'prelu',
        with_idt: bool = False,
    ):
        super().__init__()
        self.with_idt = with_idt and in_channels == out_channels
        channels = (in_channels, out_channels)
        self.conv3x3 = nn.Conv2d(*channels, 3, padding=1)
        self.conv1x1_3x3 = SeqConv3x3('conv1x1-conv3x3', *channels, depth_multiplier)
        self.conv1x1_sbx = SeqConv3x3('conv1x1-sobelx', *channels)
        self.conv1x1_sby = SeqConv3x3('conv1x1-sobely', *channels)
        self.conv1x1_lpl = SeqConv3x3('conv1x1-laplacian', *channels)
        self.act = make_activation(act_type, out_channels)
        self._merged: tuple[list, tuple[Tensor, Tensor]] | None = None

    def train(self, mode: bool = True) -> Self:
        self._merged = None  # edits through ``parameter.data`` do not change its version counter
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        kernel, bias = self._merged_params()
        return self.act(F.conv2d(x, kernel, bias, padding=1))

    def rep_params(self) -> tuple[Tensor, Tensor]:
        """Return kernel (out, in, 3, 3) and bias (out) equivalent to the sum of all branches."""
        kernel, bias = self.conv3x3.parameters()
        for branch in (self.conv1x1_3x3, self.conv1x1_sbx, self.conv1x1_sby, self.conv1x1_lpl):
            branch_kernel, branch_bias = branch.rep_params()
            kernel, bias = kernel + branch_kernel, bias + branch_bias
        if self.with_idt:
            kernel = kernel + nn.init.dirac_(torch.empty_like(kernel))
        return kernel, bias

    def _merged_params(self) -> tuple[Tensor, Tensor]:
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.rep_params()
        state = [
            (p.data_ptr(), p.dtype, None if p.is_inference() else p._version)
            for p in self.parameters()
        ]
        if self._merged is None or self._merged[0] != state:
            self._merged = state, self.rep_params()
        return self._merged[1]


@ARCH_REGISTRY.register()
class ECBSR(nn.Module):
    """Enlarge images (b, num_in_ch, h, w) to (b, num_out_ch, h * scale, w * scale).

    The enlarged input (nearest neighbour) is added to the output where their channels fit: where
    the input has ``num_out_ch`` channels or one.

    Args:
        num_block: Blocks between the first and the last.
        num_channel: Features between blocks.
        with_idt: Also add its input to the output of every block whose channels allow it.
        act_type: 'prelu', 'relu', 'leakyrelu', 'rrelu', 'softplus' or 'linear'.
        scale: Any integer of at least 1.
    """

    def __init__(
        self,
        num_in_ch: int,
        num_out_ch: int,
        num_block: int,
        num_channel: int,
        with_idt: bool,
        act_type: str,
        scale: int,
    ):
        super().__init__()
        if not isinstance(scale, int) or scale < 1:
            raise UserError(f'ECBSR: scale {scale} must be a whole number from 1.')
        self.scale = scale
        self.adds_input = num_in_ch in (1, num_out_ch)

        blocks = [
            ECB(in_channels, num_channel, 2.0, act_type, with_idt)
            for in_channels in (num_in_ch, *[num_channel] * num_block)
        ]
        last = ECB(num_channel, num_out_ch * scale**2, 2.0, 'linear', with_idt)
        self.backbone = nn.Sequential(*blocks, last)
        self.upsampler = nn.PixelShuffle(scale)

    def forward(self, x: Tensor) -> Tensor:
        out = self.upsampler(self.backbone(x))
        if not self.adds_input:
            return out
        return out + F.interpolate(x, scale_factor=self.scale, mode='nearest')

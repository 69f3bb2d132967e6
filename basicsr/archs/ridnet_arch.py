"""RIDNet: Real Image Denoising with Feature Attention.

Anwar, Barnes, ICCV 2019, https://arxiv.org/abs/1904.07396
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from . import arch_util
from .arch_util import DIV2K_RGB_MEAN, ResidualBlockNoBN, make_layer, mean_per_channel


class MeanShift(nn.Conv2d):
    """A 1x1 convolution x -> (x + sign * rgb_range * rgb_mean) / rgb_std, channel by channel.

    Args:
        rgb_mean, rgb_std: One value per channel, for images in [0, 1].
        sign: -1 to subtract the mean, 1 to add it.
        requires_grad: Whether the shift is trainable.
    """

    def __init__(
        self,
        rgb_range: float,
        rgb_mean: Sequence[float],
        rgb_std: Sequence[float],
        sign: int = -1,
        requires_grad: bool = True,
    ):
        if len(rgb_mean) != len(rgb_std):
            raise UserError(
                f'rgb_mean has {len(rgb_mean)} values and rgb_std {len(rgb_std)}; give one of each '
                'per channel.'
            )
        super().__init__(len(rgb_std), len(rgb_std), 1)
        weight, bias = self.parameters()
        std = torch.tensor(rgb_std)
        with torch.no_grad():
            weight.copy_(torch.diag(1 / std)[:, :, None, None])
            bias.copy_(sign * rgb_range * torch.tensor(rgb_mean) / std)
        self.requires_grad_(requires_grad)


class EResidualBlockNoBN(nn.Module):
    """Enhanced residual block: two 3x3 convolutions and a 1x1 one inside a skip connection."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 1),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + x)


class MergeRun(nn.Module):
    """Two branches, dilated by 1 and 2 and by 3 and 4, merged inside a skip connection."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int = 1,
    ):
        super().__init__()

        def conv(channels: int, dilation: int = 1) -> nn.Conv2d:
            return nn.Conv2d(
                channels, out_channels, kernel_size, stride, padding * dilation, dilation
            )

        def relu() -> nn.ReLU:
            return nn.ReLU(inplace=True)

        self.dilation1 = nn.Sequential(conv(in_channels), relu(), conv(out_channels, 2), relu())
        self.dilation2 = nn.Sequential(conv(in_channels, 3), relu(), conv(out_channels, 4), relu())
        self.aggregation = nn.Sequential(conv(2 * out_channels), relu())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.aggregation(torch.cat((self.dilation1(x), self.dilation2(x)), dim=1))


class ChannelAttention(arch_util.ChannelAttention):
    """The shared block under the argument names of this file."""

    def __init__(self, mid_channels: int, squeeze_factor: int = 16):
        super().__init__(mid_channels, squeeze_factor)


class EAM(nn.Module):
    """Enhancement attention module: merge-and-run, two residual blocks, channel attention."""

    def __init__(self, in_channels: int, mid_channels: int, out_channels: int):
        super().__init__()
        self.merge = MergeRun(in_channels, mid_channels)
        self.block1 = ResidualBlockNoBN(mid_channels)
        self.block2 = EResidualBlockNoBN(mid_channels, out_channels)
        self.ca = ChannelAttention(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.block1(self.merge(x)))
        return self.ca(self.block2(x))


@ARCH_REGISTRY.register()
class RIDNet(nn.Module):
    """Denoise images (b, in_channels, h, w) in [0, img_range] to (b, out_channels, h, w).

    The mean is subtracted before the network and added after it by frozen convolutions. The input
    is added to the output where their channels fit: if there are ``out_channels`` of them or one.

    Args:
        rgb_mean, rgb_std: Of images in [0, 1], one value per input channel. The defaults stand for
            mean 0 and deviation 1 where the input is not RGB. Where the output has other channels
            than the input, nothing is added to it.
    """

    def __init__(
        self,
        in_channels: int,
        mid_channels: int,
        out_channels: int,
        num_block: int = 4,
        img_range: float = 255.0,
        rgb_mean: Sequence[float] = DIV2K_RGB_MEAN,
        rgb_std: Sequence[float] = (1.0, 1.0, 1.0),
    ):
        super().__init__()
        self.adds_input = in_channels in (1, out_channels)
        mean = mean_per_channel(rgb_mean, in_channels)
        std = (1.0,) * in_channels if set(rgb_std) == {1.0} else tuple(rgb_std)
        self.sub_mean = MeanShift(img_range, mean, std, requires_grad=False)
        if out_channels != in_channels:
            mean, std = (0.0,) * out_channels, (1.0,) * out_channels
        self.add_mean = MeanShift(img_range, mean, std, sign=1, requires_grad=False)

        self.head = nn.Conv2d(in_channels, mid_channels, 3, padding=1)
        self.body = make_layer(
            EAM,
            num_block,
            in_channels=mid_channels,
            mid_channels=mid_channels,
            out_channels=mid_channels,
        )
        self.tail = nn.Conv2d(mid_channels, out_channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(self.relu(self.head(self.sub_mean(x))))
        out = self.add_mean(self.tail(out))
        return x + out if self.adds_input else out

"""RCAN: Image Super-Resolution Using Very Deep Residual Channel Attention Networks.

Zhang, Li, Li, Wang, Zhong, Fu, ECCV 2018, https://arxiv.org/abs/1807.02758
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import DIV2K_RGB_MEAN, ChannelAttention, Upsample, make_layer, mean_per_channel


class RCAB(nn.Module):
    """Residual channel attention block: two convolutions, their channels weighted."""

    def __init__(self, num_feat: int, squeeze_factor: int = 16, res_scale: float = 1):
        super().__init__()
        self.res_scale = res_scale
        self.rcab = nn.Sequential(
            nn.Conv2d(num_feat, num_feat, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_feat, num_feat, 3, padding=1),
            ChannelAttention(num_feat, squeeze_factor),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rcab(x) * self.res_scale


class ResidualGroup(nn.Module):
    """``num_block`` blocks and a convolution inside a skip connection."""

    def __init__(
        self, num_feat: int, num_block: int, squeeze_factor: int = 16, res_scale: float = 1
    ):
        super().__init__()
        self.residual_group = make_layer(
            RCAB,
            num_block,
            num_feat=num_feat,
            squeeze_factor=squeeze_factor,
            res_scale=res_scale,
        )
        self.conv = nn.Conv2d(num_feat, num_feat, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.residual_group(x))


@ARCH_REGISTRY.register()
class RCAN(nn.Module):
    """Enlarge images (b, num_in_ch, h, w) to (b, num_out_ch, h * upscale, w * upscale).

    Args:
        num_group, num_block: Residual groups, and blocks in each of them.
        squeeze_factor: Channel attention has ``num_feat // squeeze_factor`` hidden channels.
        upscale: A power of 2, or 3.
        res_scale: Factor of every block's residual.
        img_range: Images in [0, 1] are multiplied by it inside the network.
        rgb_mean: Mean of the images, one value per input channel. It is subtracted first and added
            to the output where that fits: if there are ``num_out_ch`` input channels or one. The
            default stands for 0 where the input is not RGB.
    """

    mean: Tensor

    def __init__(
        self,
        num_in_ch: int,
        num_out_ch: int,
        num_feat: int = 64,
        num_group: int = 10,
        num_block: int = 16,
        squeeze_factor: int = 16,
        upscale: int = 4,
        res_scale: float = 1,
        img_range: float = 255.0,
        rgb_mean: Sequence[float] = DIV2K_RGB_MEAN,
    ):
        super().__init__()
        self.img_range = img_range
        self.adds_mean = num_in_ch in (1, num_out_ch)
        mean = torch.tensor(mean_per_channel(rgb_mean, num_in_ch)).view(1, num_in_ch, 1, 1)
        self.register_buffer('mean', mean, persistent=False)

        self.conv_first = nn.Conv2d(num_in_ch, num_feat, 3, padding=1)
        self.body = make_layer(
            ResidualGroup,
            num_group,
            num_feat=num_feat,
            num_block=num_block,
            squeeze_factor=squeeze_factor,
            res_scale=res_scale,
        )
        self.conv_after_body = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.upsample = Upsample(upscale, num_feat)
        self.conv_last = nn.Conv2d(num_feat, num_out_ch, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_first((x - self.mean) * self.img_range)
        x = x + self.conv_after_body(self.body(x))
        x = self.conv_last(self.upsample(x)) / self.img_range
        return x + self.mean if self.adds_mean else x

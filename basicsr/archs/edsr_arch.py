"""EDSR: Enhanced Deep Residual Networks for Single Image Super-Resolution.

Lim, Son, Kim, Nah, Lee, CVPR Workshops 2017, https://arxiv.org/abs/1707.02921
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import DIV2K_RGB_MEAN, ResidualBlockNoBN, Upsample, make_layer, mean_per_channel


@ARCH_REGISTRY.register()
class EDSR(nn.Module):
    """Enlarge images (b, num_in_ch, h, w) to (b, num_out_ch, h * upscale, w * upscale).

    Args:
        upscale: A power of 2, or 3.
        res_scale: Factor of every residual; 0.1 keeps wide networks (256 features) stable.
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
        num_block: int = 16,
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
            ResidualBlockNoBN, num_block, num_feat=num_feat, res_scale=res_scale, pytorch_init=True
        )
        self.conv_after_body = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.upsample = Upsample(upscale, num_feat)
        self.conv_last = nn.Conv2d(num_feat, num_out_ch, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_first((x - self.mean) * self.img_range)
        x = x + self.conv_after_body(self.body(x))
        x = self.conv_last(self.upsample(x)) / self.img_range
        return x + self.mean if self.adds_mean else x

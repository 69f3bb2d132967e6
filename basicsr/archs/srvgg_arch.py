"""SRVGGNetCompact: the small generator of Real-ESRGAN, for video and for low-end hardware.

Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data, Wang et al., ICCV
Workshops 2021, https://arxiv.org/abs/2107.10833
"""

import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import make_activation


@ARCH_REGISTRY.register(suffix='basicsr')
class SRVGGNetCompact(nn.Module):
    """Enlarge images (b, num_in_ch, h, w) to (b, num_out_ch, h * upscale, w * upscale).

    A plain stack of convolutions at the input size. The enlarged input (nearest neighbour) is added
    to the output where their channels fit: where the input has ``num_out_ch`` channels or one.

    Args:
        num_conv: Convolutions between the first and the last.
        upscale: Any integer of at least 1.
        act_type: 'prelu', 'relu', 'leakyrelu', 'rrelu', 'softplus' or 'linear'.
    """

    def __init__(
        self,
        num_in_ch: int = 3,
        num_out_ch: int = 3,
        num_feat: int = 64,
        num_conv: int = 16,
        upscale: int = 4,
        act_type: str = 'prelu',
    ):
        super().__init__()
        if not isinstance(upscale, int) or upscale < 1:
            raise UserError(f'SRVGGNetCompact: upscale {upscale} must be a whole number from 1.')
        self.num_in_ch, self.num_out_ch, self.num_feat = num_in_ch, num_out_ch, num_feat
        self.num_conv, self.upscale, self.act_type = num_conv, upscale, act_type
        self.adds_input = num_in_ch in (1, num_out_ch)

        self.body = nn.ModuleList()
        for in_channels in (num_in_ch, *[num_feat] * num_conv):
            self.body.append(nn.Conv2d(in_channels, num_feat, 3, padding=1))
            self.body.append(make_activation(act_type, num_feat))
        self.body.append(nn.Conv2d(num_feat, num_out_ch * upscale**2, 3, padding=1))
        self.upsampler = nn.PixelShuffle(upscale)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer in self.body:
            out = layer(out)
        out = self.upsampler(out)
        if not self.adds_input:
            return out
        return out + F.interpolate(x, scale_factor=self.upscale, mode='nearest')

"""MSRResNet: SRResNet without BatchNorm.

Photo-Realistic Single Image Super-Resolution Using a Generative Adversarial Network, Ledig et al.,
CVPR 2017, https://arxiv.org/abs/1609.04802. Two changes follow ESRGAN (Wang et al., 2018,
https://arxiv.org/abs/1809.00219): there is no BatchNorm, and the network learns what the
interpolated input lacks.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import ResidualBlockNoBN, default_init_weights, make_layer


@ARCH_REGISTRY.register()
class MSRResNet(nn.Module):
    """Enlarge images (b, num_in_ch, h, w) to (b, num_out_ch, h * upscale, w * upscale).

    The interpolated input is added to the output where their channels fit: where the input has
    ``num_out_ch`` channels or one.

    Args:
        upscale: 2, 3 or 4.
    """

    def __init__(
        self,
        num_in_ch: int = 3,
        num_out_ch: int = 3,
        num_feat: int = 64,
        num_block: int = 16,
        upscale: int = 4,
    ):
        super().__init__()
        if upscale not in (2, 3, 4):
            raise UserError(f'MSRResNet cannot enlarge by upscale {upscale}; choose 2, 3 or 4.')
        self.upscale = upscale
        self.adds_input = num_in_ch in (1, num_out_ch)
        factor = 2 if upscale == 4 else upscale

        self.conv_first = nn.Conv2d(num_in_ch, num_feat, 3, padding=1)
        self.body = make_layer(ResidualBlockNoBN, num_block, num_feat=num_feat)
        self.upconv1 = nn.Conv2d(num_feat, num_feat * factor**2, 3, padding=1)
        if upscale == 4:
            self.upconv2 = nn.Conv2d(num_feat, num_feat * factor**2, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(factor)
        self.conv_hr = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.conv_last = nn.Conv2d(num_feat, num_out_ch, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.1, inplace=True)

        default_init_weights([m for m in self.children() if isinstance(m, nn.Conv2d)], 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(self.lrelu(self.conv_first(x)))
        out = self.lrelu(self.pixel_shuffle(self.upconv1(out)))
        if self.upscale == 4:
            out = self.lrelu(self.pixel_shuffle(self.upconv2(out)))
        out = self.conv_last(self.lrelu(self.conv_hr(out)))
        if not self.adds_input:
            return out
        return out + F.interpolate(
            x, scale_factor=self.upscale, mode='bilinear', align_corners=False
        )

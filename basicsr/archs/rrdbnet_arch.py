"""RRDBNet: residual in residual dense blocks, the generator of ESRGAN and Real-ESRGAN.

ESRGAN: Enhanced Super-Resolution Generative Adversarial Networks, Wang et al., ECCV Workshops 2018,
https://arxiv.org/abs/1809.00219. Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure
Synthetic Data, Wang et al., ICCV Workshops 2021, https://arxiv.org/abs/2107.10833, adds scales 2
and 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import default_init_weights, make_layer, pad_to_multiple, pixel_unshuffle


class ResidualDenseBlock(nn.Module):
    """Five convolutions, each of which sees the input and the output of all before it."""

    def __init__(self, num_feat: int = 64, num_grow_ch: int = 32):
        super().__init__()
        self.conv1 = nn.Conv2d(num_feat, num_grow_ch, 3, padding=1)
        self.conv2 = nn.Conv2d(num_feat + num_grow_ch, num_grow_ch, 3, padding=1)
        self.conv3 = nn.Conv2d(num_feat + 2 * num_grow_ch, num_grow_ch, 3, padding=1)
        self.conv4 = nn.Conv2d(num_feat + 3 * num_grow_ch, num_grow_ch, 3, padding=1)
        self.conv5 = nn.Conv2d(num_feat + 4 * num_grow_ch, num_feat, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)
        default_init_weights(self, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.lrelu(self.conv1(x))
        x2 = self.lrelu(self.conv2(torch.cat((x, x1), 1)))
        x3 = self.lrelu(self.conv3(torch.cat((x, x1, x2), 1)))
        x4 = self.lrelu(self.conv4(torch.cat((x, x1, x2, x3), 1)))
        x5 = self.conv5(torch.cat((x, x1, x2, x3, x4), 1))
        return x + x5 * 0.2  # a small residual keeps deep networks trainable without BatchNorm


class RRDB(nn.Module):
    """Three residual dense blocks inside a scaled skip connection."""

    def __init__(self, num_feat: int, num_grow_ch: int = 32):
        super().__init__()
        self.rdb1 = ResidualDenseBlock(num_feat, num_grow_ch)
        self.rdb2 = ResidualDenseBlock(num_feat, num_grow_ch)
        self.rdb3 = ResidualDenseBlock(num_feat, num_grow_ch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rdb3(self.rdb2(self.rdb1(x))) * 0.2


@ARCH_REGISTRY.register()
class RRDBNet(nn.Module):
    """Enlarge images (b, num_in_ch, h, w) to (b, num_out_ch, h * scale, w * scale).

    The network itself enlarges by 4. For scales 2 and 1 blocks of 2x2 and 4x4 pixels are first
    moved into the channels; an image that does not divide into blocks is padded, and the output
    cropped.

    Args:
        scale: 1, 2 or 4.
    """

    def __init__(
        self,
        num_in_ch: int,
        num_out_ch: int,
        scale: int = 4,
        num_feat: int = 64,
        num_block: int = 23,
        num_grow_ch: int = 32,
    ):
        super().__init__()
        if scale not in (1, 2, 4):
            raise UserError(f'RRDBNet cannot enlarge by scale {scale}; choose 1, 2 or 4.')
        self.scale = scale
        self.block_size = 4 // scale

        self.conv_first = nn.Conv2d(num_in_ch * self.block_size**2, num_feat, 3, padding=1)
        self.body = make_layer(RRDB, num_block, num_feat=num_feat, num_grow_ch=num_grow_ch)
        self.conv_body = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.conv_up1 = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.conv_up2 = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.conv_hr = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.conv_last = nn.Conv2d(num_feat, num_out_ch, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        feat = pixel_unshuffle(pad_to_multiple(x, self.block_size), self.block_size)
        feat = self.conv_first(feat)
        feat = feat + self.conv_body(self.body(feat))
        for conv_up in (self.conv_up1, self.conv_up2):
            feat = self.lrelu(conv_up(F.interpolate(feat, scale_factor=2, mode='nearest')))
        out = self.conv_last(self.lrelu(self.conv_hr(feat)))
        return out[..., : h * self.scale, : w * self.scale]

"""Discriminators: VGG style, for one image size, and U-Net, for images of any size.

VGGStyleDiscriminator: Photo-Realistic Single Image Super-Resolution Using a Generative Adversarial
Network, Ledig et al., CVPR 2017, https://arxiv.org/abs/1609.04802.
UNetDiscriminatorSN: Real-ESRGAN, Wang et al., ICCV Workshops 2021,
https://arxiv.org/abs/2107.10833, with the spectral normalisation of Miyato et al., ICLR 2018,
https://arxiv.org/abs/1802.05957.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from basicsr.utils.errors import CheckError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import pad_to_multiple


@ARCH_REGISTRY.register()
class VGGStyleDiscriminator(nn.Module):
    """Score images (b, num_in_ch, input_size, input_size) with one logit each, (b, 1).

    Args:
        input_size: 128 or 256; the size of the training patches (option ``gt_size``).
    """

    def __init__(self, num_in_ch: int, num_feat: int, input_size: int = 128):
        super().__init__()
        if input_size not in (128, 256):
            raise CheckError(
                f'VGGStyleDiscriminator: input_size {input_size} must be 128 or 256, and so must '
                'gt_size; UNetDiscriminatorSN takes images of any size.'
            )
        self.input_size = input_size
        widths = [num_feat * factor for factor in (1, 2, 4, 8, 8, 8)]
        self.num_stages = 5 if input_size == 128 else 6  # each halves the size, down to 4x4

        in_channels = num_in_ch
        for i, width in enumerate(widths[: self.num_stages]):
            self.add_module(f'conv{i}_0', nn.Conv2d(in_channels, width, 3, padding=1, bias=i == 0))
            if i > 0:
                self.add_module(f'bn{i}_0', nn.BatchNorm2d(width))
            self.add_module(f'conv{i}_1', nn.Conv2d(width, width, 4, 2, 1, bias=False))
            self.add_module(f'bn{i}_1', nn.BatchNorm2d(width))
            in_channels = width
        self.linear1 = nn.Linear(in_channels * 4 * 4, 100)
        self.linear2 = nn.Linear(100, 1)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.input_size, self.input_size):
            raise CheckError(
                f'VGGStyleDiscriminator: the image is {x.shape[-2]}x{x.shape[-1]}, but input_size '
                f'is {self.input_size}. Make gt_size and input_size equal (128 or 256), or use '
                'UNetDiscriminatorSN, which takes images of any size.'
            )
        for i in range(self.num_stages):
            for half in (0, 1):
                x = getattr(self, f'conv{i}_{half}')(x)
                if (i, half) != (0, 0):
                    x = getattr(self, f'bn{i}_{half}')(x)
                x = self.lrelu(x)
        return self.linear2(self.lrelu(self.linear1(x.flatten(1))))


@ARCH_REGISTRY.register(suffix='basicsr')
class UNetDiscriminatorSN(nn.Module):
    """Score every pixel of images (b, num_in_ch, h, w) with a logit, (b, 1, h, w).

    Images whose size is not a multiple of 8 are padded, and the scores cropped.

    Args:
        skip_connection: Add features of the encoder to those of the decoder.
    """

    def __init__(self, num_in_ch: int, num_feat: int = 64, skip_connection: bool = True):
        super().__init__()
        self.skip_connection = skip_connection

        def conv(in_factor: int, out_factor: int, kernel_size: int = 3, stride: int = 1):
            in_channels, out_channels = num_feat * in_factor, num_feat * out_factor
            # The older spectral_norm: its keys (weight_orig, weight_u) are in published weights.
            return spectral_norm(
                nn.Conv2d(in_channels, out_channels, kernel_size, stride, 1, bias=False)
            )

        self.conv0 = nn.Conv2d(num_in_ch, num_feat, 3, padding=1)
        self.conv1 = conv(1, 2, kernel_size=4, stride=2)
        self.conv2 = conv(2, 4, kernel_size=4, stride=2)
        self.conv3 = conv(4, 8, kernel_size=4, stride=2)
        self.conv4 = conv(8, 4)
        self.conv5 = conv(4, 2)
        self.conv6 = conv(2, 1)
        self.conv7 = conv(1, 1)
        self.conv8 = conv(1, 1)
        self.conv9 = nn.Conv2d(num_feat, 1, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        x0 = self.lrelu(self.conv0(pad_to_multiple(x, 8)))
        x1 = self.lrelu(self.conv1(x0))
        x2 = self.lrelu(self.conv2(x1))
        out = self.lrelu(self.conv3(x2))
        for conv, skip in ((self.conv4, x2), (self.conv5, x1), (self.conv6, x0)):
            out = F.interpolate(out, scale_factor=2, mode='bilinear', align_corners=False)
            out = self.lrelu(conv(out))
            if self.skip_connection:
                out = out + skip
        out = self.lrelu(self.conv8(self.lrelu(self.conv7(out))))
        return self.conv9(out)[..., :h, :w]

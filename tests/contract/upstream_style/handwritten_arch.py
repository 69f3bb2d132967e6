from torch import nn
from torch.nn import functional as F

from basicsr.archs.arch_util import ResidualBlockNoBN, default_init_weights, make_layer
from basicsr.utils.registry import ARCH_REGISTRY


@ARCH_REGISTRY.register()
class HandwrittenNet(nn.Module):
    def __init__(self, num_feat=4, num_block=1, upscale=2):
        super().__init__()
        self.upscale = upscale
        self.conv_first = nn.Conv2d(3, num_feat, 3, 1, 1)
        self.body = make_layer(ResidualBlockNoBN, num_block, num_feat=num_feat)
        self.conv_last = nn.Conv2d(num_feat, 3 * upscale**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale)
        default_init_weights([self.conv_first, self.conv_last], 0.1)

    def forward(self, x):
        out = self.pixel_shuffle(self.conv_last(self.body(self.conv_first(x))))
        return out + F.interpolate(x, scale_factor=self.upscale, mode='bilinear')

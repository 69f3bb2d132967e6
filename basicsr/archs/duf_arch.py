"""DUF: enlarge by a filter for each pixel, predicted from seven frames without any motion estimate.

Deep Video Super-Resolution Network Using Dynamic Upsampling Filters Without Explicit Motion
Compensation, Jo, Oh, Kang, Kim, CVPR 2018,
https://openaccess.thecvf.com/content_cvpr_2018/html/Jo_Deep_Video_Super-Resolution_CVPR_2018_paper.html
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import check_clip

# By number of layers: blocks of the first dense part, channels that each adds.
_SIZES = {16: (3, 32), 28: (9, 16), 52: (21, 16)}


def _norm(num_feat: int, adapt_official_weights: bool) -> nn.BatchNorm3d:
    if adapt_official_weights:
        return nn.BatchNorm3d(num_feat, eps=1e-3, momentum=1e-3)
    return nn.BatchNorm3d(num_feat)


def _block(num_feat: int, num_grow_ch: int, official: bool, temporal_padding: int) -> nn.Sequential:
    return nn.Sequential(
        _norm(num_feat, official),
        nn.ReLU(inplace=True),
        nn.Conv3d(num_feat, num_feat, 1),
        _norm(num_feat, official),
        nn.ReLU(inplace=True),
        nn.Conv3d(num_feat, num_grow_ch, 3, padding=(temporal_padding, 1, 1)),
    )


class DenseBlocksTemporalReduce(nn.Module):
    """Three dense blocks over (b, num_feat, t, h, w), each of which takes a frame off both ends."""

    def __init__(
        self, num_feat: int = 64, num_grow_ch: int = 32, adapt_official_weights: bool = False
    ):
        super().__init__()
        blocks = [
            _block(num_feat + i * num_grow_ch, num_grow_ch, adapt_official_weights, 0)
            for i in range(3)
        ]
        self.temporal_reduce1, self.temporal_reduce2, self.temporal_reduce3 = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.temporal_reduce1, self.temporal_reduce2, self.temporal_reduce3):
            x = torch.cat((x[:, :, 1:-1], block(x)), 1)
        return x


class DenseBlocks(nn.Module):
    """Dense blocks over (b, num_feat, t, h, w), each of which adds ``num_grow_ch`` channels."""

    def __init__(
        self,
        num_block: int,
        num_feat: int = 64,
        num_grow_ch: int = 16,
        adapt_official_weights: bool = False,
    ):
        super().__init__()
        self.dense_blocks = nn.ModuleList(
            _block(num_feat + i * num_grow_ch, num_grow_ch, adapt_official_weights, 1)
            for i in range(num_block)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.dense_blocks:
            x = torch.cat((x, block(x)), 1)
        return x


class DynamicUpsamplingFilter(nn.Module):
    """Apply a filter of its own to each pixel of ``x`` (b, c, h, w), for each pixel of a block.

    ``filters`` are (b, kh * kw, blocks, h, w), the output (b, c * blocks, h, w). Outside of the
    image is 0.

    Args:
        filter_size: kh and kw, odd.
    """

    def __init__(self, filter_size: tuple[int, int] = (5, 5)):
        super().__init__()
        if not isinstance(filter_size, tuple) or [n % 2 for n in filter_size] != [1, 1]:
            raise UserError(f'filter_size must be a pair of odd numbers, not {filter_size}.')
        self.filter_size = filter_size

    def forward(self, x: Tensor, filters: Tensor) -> Tensor:
        b, c, h, w = x.shape
        kh, kw = self.filter_size
        points = F.unfold(x, (kh, kw), padding=(kh // 2, kw // 2))
        points = points.view(b, c, kh * kw, h, w)
        return torch.einsum('bcphw,bpshw->bcshw', points, filters).flatten(1, 2)


@ARCH_REGISTRY.register()
class DUF(nn.Module):
    """Enlarge the middle one of seven frames: (b, 7, 3, h, w) to (b, 3, h * scale, w * scale).

    Args:
        scale: 2, 3 or 4 in the paper.
        num_layer: 16, 28 or 52.
        adapt_official_weights: Whether the weights are those that the authors published, converted;
            TensorFlow's batch normalisation has other constants.
    """

    def __init__(self, scale: int = 4, num_layer: int = 52, adapt_official_weights: bool = False):
        super().__init__()
        if num_layer not in _SIZES:
            raise UserError(f'DUF has no variant of num_layer {num_layer}; choose {list(_SIZES)}.')
        num_block, num_grow_ch = _SIZES[num_layer]
        official = adapt_official_weights
        self.scale = scale

        self.conv3d1 = nn.Conv3d(3, 64, (1, 3, 3), padding=(0, 1, 1))
        self.dense_block1 = DenseBlocks(num_block, 64, num_grow_ch, official)
        num_feat = 64 + num_block * num_grow_ch
        self.dense_block2 = DenseBlocksTemporalReduce(num_feat, num_grow_ch, official)
        num_feat += 3 * num_grow_ch
        self.bn3d2 = _norm(num_feat, official)
        self.conv3d2 = nn.Conv3d(num_feat, 256, (1, 3, 3), padding=(0, 1, 1))

        self.conv3d_r1 = nn.Conv3d(256, 256, 1)
        self.conv3d_r2 = nn.Conv3d(256, 3 * scale**2, 1)
        self.conv3d_f1 = nn.Conv3d(256, 512, 1)
        self.dynamic_filter = DynamicUpsamplingFilter((5, 5))
        self.conv3d_f2 = nn.Conv3d(512, 25 * scale**2, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        check_clip(x, 3, 7, 'DUF')
        feat = self.conv3d1(x.transpose(1, 2))
        feat = self.dense_block2(self.dense_block1(feat))
        feat = self.relu(self.conv3d2(self.relu(self.bn3d2(feat))))
        residual = self.conv3d_r2(self.relu(self.conv3d_r1(feat)))[:, :, 0]
        filters = self.conv3d_f2(self.relu(self.conv3d_f1(feat)))[:, :, 0]
        filters = filters.unflatten(1, (-1, self.scale**2)).softmax(1)
        return F.pixel_shuffle(self.dynamic_filter(x[:, 3], filters) + residual, self.scale)

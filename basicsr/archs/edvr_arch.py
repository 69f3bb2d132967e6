"""EDVR: neighbouring frames are aligned by deformable convolutions and fused by attention.

EDVR: Video Restoration with Enhanced Deformable Convolutional Networks, Wang, Chan, Yu, Dong, Loy,
CVPR Workshops 2019, https://arxiv.org/abs/1905.02716. The modules are those of its section 3: PCD
(pyramid, cascading and deformable alignment), TSA (temporal and spatial attention) and PreDeblur.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import (
    DCNv2Pack,
    FourfoldHead,
    ResidualBlockNoBN,
    check_clip,
    make_layer,
    pad_to_multiple,
    resize,
)


def _conv(num_in: int, num_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(num_in, num_out, 3, stride, 1)


class PCDAlignment(nn.Module):
    """Align features to those of a reference, from coarse to fine.

    Both inputs are lists of three levels (b, num_feat, h, w), each half as large as the one before;
    the output is as large as the first.
    """

    def __init__(self, num_feat: int = 64, deformable_groups: int = 8):
        super().__init__()
        self.offset_conv1 = nn.ModuleDict()
        self.offset_conv2 = nn.ModuleDict()
        self.offset_conv3 = nn.ModuleDict()
        self.dcn_pack = nn.ModuleDict()
        self.feat_conv = nn.ModuleDict()
        for level in ('l3', 'l2', 'l1'):
            is_coarsest = level == 'l3'
            self.offset_conv1[level] = _conv(num_feat * 2, num_feat)
            self.offset_conv2[level] = _conv(num_feat * (1 if is_coarsest else 2), num_feat)
            self.dcn_pack[level] = self._dcn(num_feat, deformable_groups)
            if not is_coarsest:
                self.offset_conv3[level] = _conv(num_feat, num_feat)
                self.feat_conv[level] = _conv(num_feat * 2, num_feat)
        self.cas_offset_conv1 = _conv(num_feat * 2, num_feat)
        self.cas_offset_conv2 = _conv(num_feat, num_feat)
        self.cas_dcnpack = self._dcn(num_feat, deformable_groups)
        self.lrelu = nn.LeakyReLU(0.1, inplace=True)

    @staticmethod
    def _dcn(num_feat: int, deformable_groups: int) -> DCNv2Pack:
        return DCNv2Pack(num_feat, num_feat, 3, padding=1, deformable_groups=deformable_groups)

    def forward(self, nbr_feat_l: Sequence[Tensor], ref_feat_l: Sequence[Tensor]) -> Tensor:
        lrelu = self.lrelu
        coarse_offset = coarse_feat = feat = None
        levels = zip(('l1', 'l2', 'l3'), nbr_feat_l, ref_feat_l, strict=True)
        for level, nbr, ref in reversed(list(levels)):
            offset = lrelu(self.offset_conv1[level](torch.cat((nbr, ref), 1)))
            if coarse_offset is None or coarse_feat is None:
                offset = lrelu(self.offset_conv2[level](offset))
                feat = self.dcn_pack[level](nbr, offset)
            else:
                offset = lrelu(self.offset_conv2[level](torch.cat((offset, coarse_offset), 1)))
                offset = lrelu(self.offset_conv3[level](offset))
                feat = self.dcn_pack[level](nbr, offset)
                feat = self.feat_conv[level](torch.cat((feat, coarse_feat), 1))
            if level != 'l1':
                feat = lrelu(feat)
                # Offsets are in pixels, which are half as large on the next level.
                coarse_offset, coarse_feat = 2 * resize(offset, 2), resize(feat, 2)
        offset = lrelu(self.cas_offset_conv1(torch.cat((feat, ref_feat_l[0]), 1)))
        return lrelu(self.cas_dcnpack(feat, lrelu(self.cas_offset_conv2(offset))))


class TSAFusion(nn.Module):
    """Fuse aligned features (b, num_frame, num_feat, h, w) to (b, num_feat, h, w).

    A frame counts the more, pixel by pixel, the more it resembles the centre frame; then an
    attention over space scales and shifts the features. h and w are multiples of 4.
    """

    def __init__(self, num_feat: int = 64, num_frame: int = 5, center_frame_idx: int = 2):
        super().__init__()
        self.center_frame_idx = center_frame_idx
        self.temporal_attn1 = _conv(num_feat, num_feat)
        self.temporal_attn2 = _conv(num_feat, num_feat)
        self.feat_fusion = nn.Conv2d(num_frame * num_feat, num_feat, 1)

        self.max_pool = nn.MaxPool2d(3, 2, 1)
        self.avg_pool = nn.AvgPool2d(3, 2, 1)
        self.spatial_attn1 = nn.Conv2d(num_frame * num_feat, num_feat, 1)
        self.spatial_attn2 = nn.Conv2d(num_feat * 2, num_feat, 1)
        self.spatial_attn3 = _conv(num_feat, num_feat)
        self.spatial_attn4 = nn.Conv2d(num_feat, num_feat, 1)
        self.spatial_attn5 = _conv(num_feat, num_feat)
        self.spatial_attn_l1 = nn.Conv2d(num_feat, num_feat, 1)
        self.spatial_attn_l2 = _conv(num_feat * 2, num_feat)
        self.spatial_attn_l3 = _conv(num_feat, num_feat)
        self.spatial_attn_add1 = nn.Conv2d(num_feat, num_feat, 1)
        self.spatial_attn_add2 = nn.Conv2d(num_feat, num_feat, 1)
        self.lrelu = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, aligned_feat: Tensor) -> Tensor:
        lrelu = self.lrelu
        feat = self._weighted(aligned_feat).flatten(1, 2)
        fused = lrelu(self.feat_fusion(feat))

        attn = lrelu(self.spatial_attn2(self._pooled(lrelu(self.spatial_attn1(feat)))))
        level = lrelu(self.spatial_attn_l2(self._pooled(lrelu(self.spatial_attn_l1(attn)))))
        level = resize(lrelu(self.spatial_attn_l3(level)), 2)
        attn = lrelu(self.spatial_attn3(attn)) + level
        attn = self.spatial_attn5(resize(lrelu(self.spatial_attn4(attn)), 2))
        shift = self.spatial_attn_add2(lrelu(self.spatial_attn_add1(attn)))
        return fused * attn.sigmoid() * 2 + shift  # the mean of a sigmoid is 1/2

    def _weighted(self, aligned: Tensor) -> Tensor:
        center = self.temporal_attn1(aligned[:, self.center_frame_idx])
        embedded = self.temporal_attn2(aligned.flatten(0, 1)).view(aligned.shape)
        likeness = (embedded * center[:, None]).sum(2, keepdim=True)
        return aligned * likeness.sigmoid()

    def _pooled(self, feat: Tensor) -> Tensor:
        return torch.cat((self.max_pool(feat), self.avg_pool(feat)), 1)


class PredeblurModule(nn.Module):
    """Features (b, num_feat, h, w) of images (b, num_in_ch, h, w), h and w multiples of 4.

    Args:
        hr_in: The output is a quarter as high and wide, and h and w are multiples of 16.
    """

    def __init__(self, num_in_ch: int = 3, num_feat: int = 64, hr_in: bool = False):
        super().__init__()
        self.hr_in = hr_in
        self.conv_first = _conv(num_in_ch, num_feat)
        if hr_in:
            self.stride_conv_hr1 = _conv(num_feat, num_feat, 2)
            self.stride_conv_hr2 = _conv(num_feat, num_feat, 2)
        self.stride_conv_l2 = _conv(num_feat, num_feat, 2)
        self.stride_conv_l3 = _conv(num_feat, num_feat, 2)
        self.resblock_l3 = ResidualBlockNoBN(num_feat)
        self.resblock_l2_1 = ResidualBlockNoBN(num_feat)
        self.resblock_l2_2 = ResidualBlockNoBN(num_feat)
        self.resblock_l1 = nn.ModuleList(ResidualBlockNoBN(num_feat) for _ in range(5))
        self.lrelu = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        feat_l1 = self.lrelu(self.conv_first(x))
        if self.hr_in:
            feat_l1 = self.lrelu(self.stride_conv_hr1(feat_l1))
            feat_l1 = self.lrelu(self.stride_conv_hr2(feat_l1))
        feat_l2 = self.lrelu(self.stride_conv_l2(feat_l1))
        feat_l3 = self.lrelu(self.stride_conv_l3(feat_l2))
        feat_l2 = self.resblock_l2_1(feat_l2) + resize(self.resblock_l3(feat_l3), 2)
        feat_l2 = resize(self.resblock_l2_2(feat_l2), 2)
        for i, block in enumerate(self.resblock_l1):
            feat_l1 = block(feat_l1 + feat_l2 if i == 2 else feat_l1)
        return feat_l1


class EDVRFeatures(nn.Module):
    """The part of EDVR in front of its reconstruction, which IconVSR has too."""

    def __init__(
        self,
        num_in_ch: int,
        num_feat: int,
        num_frame: int,
        deformable_groups: int,
        num_extract_block: int,
        center_frame_idx: int,
        hr_in: bool = False,
        with_predeblur: bool = False,
        with_tsa: bool = True,
    ):
        super().__init__()
        self.center_frame_idx = center_frame_idx
        self.with_predeblur = with_predeblur
        self.with_tsa = with_tsa
        if with_predeblur:
            self.predeblur = PredeblurModule(num_in_ch, num_feat, hr_in)
            self.conv_1x1 = nn.Conv2d(num_feat, num_feat, 1)
        else:
            self.conv_first = _conv(num_in_ch, num_feat)
        self.feature_extraction = make_layer(
            ResidualBlockNoBN, num_extract_block, num_feat=num_feat
        )
        self.conv_l2_1 = _conv(num_feat, num_feat, 2)
        self.conv_l2_2 = _conv(num_feat, num_feat)
        self.conv_l3_1 = _conv(num_feat, num_feat, 2)
        self.conv_l3_2 = _conv(num_feat, num_feat)
        self.pcd_align = PCDAlignment(num_feat, deformable_groups)
        if with_tsa:
            self.fusion = TSAFusion(num_feat, num_frame, center_frame_idx)
        else:
            self.fusion = nn.Conv2d(num_frame * num_feat, num_feat, 1)
        self.lrelu = nn.LeakyReLU(0.1, inplace=True)

    def fused(self, x: Tensor) -> Tensor:
        """The features (b, num_feat, h, w) of the centre frame of ``x`` (b, num_frame, c, h, w)."""
        b, t = x.shape[:2]
        frames = x.flatten(0, 1)
        if self.with_predeblur:
            feat_l1 = self.conv_1x1(self.predeblur(frames))
        else:
            feat_l1 = self.lrelu(self.conv_first(frames))
        feat_l1 = self.feature_extraction(feat_l1)
        feat_l2 = self.lrelu(self.conv_l2_2(self.lrelu(self.conv_l2_1(feat_l1))))
        feat_l3 = self.lrelu(self.conv_l3_2(self.lrelu(self.conv_l3_1(feat_l2))))

        levels = [feat_l1, feat_l2, feat_l3]
        aligned = self.pcd_align(levels, [self._center(level, b, t) for level in levels])
        if self.with_tsa:
            return self.fusion(aligned.unflatten(0, (b, t)))
        return self.fusion(aligned.reshape(b, -1, *aligned.shape[-2:]))

    def _center(self, feat: Tensor, b: int, t: int) -> Tensor:
        """The features of the centre frame in the place of those of each frame."""
        clip = feat.unflatten(0, (b, t))
        return clip[:, self.center_frame_idx, None].expand_as(clip).flatten(0, 1)


@ARCH_REGISTRY.register()
class EDVR(EDVRFeatures, FourfoldHead):
    """Restore one of the frames (b, num_frame, num_in_ch, h, w): (b, num_out_ch, 4h, 4w).

    A size that does not divide by 4 (16 with ``hr_in``) is padded, and the output cropped. The
    interpolated frame is added to the output where their channels fit: where the input has
    ``num_out_ch`` channels or one.

    Args:
        num_frame: Frames of the input.
        deformable_groups: Groups of features with offsets of their own.
        num_extract_block: Residual blocks for each frame, before the alignment.
        num_reconstruct_block: Residual blocks after the fusion.
        center_frame_idx: Which frame is restored; None: the middle one.
        hr_in: The output has the size of the input, for deblurring; needs ``with_predeblur``.
        with_predeblur: Whether PreDeblur makes the features, for blurred input.
        with_tsa: Whether attention fuses the frames, instead of one convolution.
    """

    def __init__(
        self,
        num_in_ch: int = 3,
        num_out_ch: int = 3,
        num_feat: int = 64,
        num_frame: int = 5,
        deformable_groups: int = 8,
        num_extract_block: int = 5,
        num_reconstruct_block: int = 10,
        center_frame_idx: int | None = None,
        hr_in: bool = False,
        with_predeblur: bool = False,
        with_tsa: bool = True,
    ):
        center = num_frame // 2 if center_frame_idx is None else center_frame_idx
        if not 0 <= center < num_frame:
            raise UserError(f'EDVR: center_frame_idx {center} is not below num_frame {num_frame}.')
        if hr_in and not with_predeblur:
            raise UserError('EDVR: hr_in: true needs with_predeblur: true, which reduces the size.')
        super().__init__(
            *(num_in_ch, num_feat, num_frame, deformable_groups, num_extract_block),
            *(center, hr_in, with_predeblur, with_tsa),
        )
        self.num_in_ch, self.num_frame, self.hr_in = num_in_ch, num_frame, hr_in
        self.adds_input = num_in_ch in (1, num_out_ch)
        self.reconstruction = make_layer(
            ResidualBlockNoBN, num_reconstruct_block, num_feat=num_feat
        )
        self.add_head(num_feat, num_out_ch)

    def forward(self, x: Tensor) -> Tensor:
        check_clip(x, self.num_in_ch, self.num_frame, 'EDVR')
        feat = self.fused(pad_to_multiple(x, 16 if self.hr_in else 4))
        center = x[:, self.center_frame_idx]
        base = center if self.hr_in else resize(center, 4)
        out = self.enlarge(self.reconstruction(feat))[..., : base.shape[-2], : base.shape[-1]]
        return out + base if self.adds_input else out

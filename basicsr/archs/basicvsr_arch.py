"""BasicVSR and IconVSR: features propagate through a whole clip, backward and then forward.

BasicVSR: The Search for Essential Components in Video Super-Resolution and Beyond, Chan, Wang, Yu,
Dong, Loy, CVPR 2021, https://arxiv.org/abs/2012.02181. IconVSR, of the same paper, adds features of
EDVR at keyframes, and passes those of the backward branch to the forward one.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import (
    FourfoldHead,
    ResidualBlockNoBN,
    check_clip,
    flow_warp,
    load_pretrained,
    make_layer,
    pad_to_multiple,
    resize,
)
from .edvr_arch import EDVRFeatures, PCDAlignment, TSAFusion  # noqa: F401 (older code imports them here)
from .spynet_arch import SpyNet


def neighbour_flow(spynet: nn.Module, x: Tensor, is_backward: bool) -> Tensor:
    """The flow (b, t - 1, 2, h, w) between the frames of ``x`` (b, t, c, h, w).

    Args:
        is_backward: From each frame to the next, which moves features backward in time; else from
            each frame to the one before.
    """
    b, t, _, h, w = x.shape
    if t == 1:
        return x.new_zeros(b, 0, 2, h, w)
    ref, supp = (x[:, :-1], x[:, 1:]) if is_backward else (x[:, 1:], x[:, :-1])
    return spynet(ref.flatten(0, 1), supp.flatten(0, 1)).unflatten(0, (b, t - 1))


def warp(feat: Tensor, flow: Tensor) -> Tensor:
    """Move ``feat`` (b, c, h, w) by a flow (b, 2, h, w)."""
    return flow_warp(feat, flow.permute(0, 2, 3, 1))


class ConvResidualBlocks(nn.Module):
    """A convolution and residual blocks: (b, num_in_ch, h, w) to (b, num_out_ch, h, w)."""

    def __init__(self, num_in_ch: int = 3, num_out_ch: int = 64, num_block: int = 15):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(num_in_ch, num_out_ch, 3, padding=1),
            nn.LeakyReLU(0.1, inplace=True),
            make_layer(ResidualBlockNoBN, num_block, num_feat=num_out_ch),
        )

    def forward(self, fea: Tensor) -> Tensor:
        return self.main(fea)


@ARCH_REGISTRY.register()
class BasicVSR(FourfoldHead):
    """Enlarge clips (b, t, 3, h, w), RGB in [0, 1], to (b, t, 3, 4h, 4w); any t, h and w.

    Args:
        num_block: Residual blocks of each of the two branches.
        spynet_path: File of weights of the flow network; None: random ones.
    """

    def __init__(
        self, num_feat: int = 64, num_block: int = 15, spynet_path: str | Path | None = None
    ):
        super().__init__()
        self.num_feat = num_feat
        self.spynet = build_spynet(spynet_path)
        self.backward_trunk = ConvResidualBlocks(num_feat + 3, num_feat, num_block)
        self.forward_trunk = ConvResidualBlocks(num_feat + 3, num_feat, num_block)
        self.fusion = nn.Conv2d(num_feat * 2, num_feat, 1)
        self.add_head(num_feat)

    def get_flow(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The flows (b, t - 1, 2, h, w) for forward and for backward propagation."""
        return neighbour_flow(self.spynet, x, False), neighbour_flow(self.spynet, x, True)

    def forward(self, x: Tensor) -> Tensor:
        check_clip(x, 3, None, 'BasicVSR')
        flows_forward, flows_backward = self.get_flow(x)
        b, t, _, h, w = x.shape

        backward: list[Tensor] = []
        feat = x.new_zeros(b, self.num_feat, h, w)
        for i in reversed(range(t)):
            if backward:
                feat = warp(feat, flows_backward[:, i])
            feat = self.backward_trunk(torch.cat((x[:, i], feat), 1))
            backward.append(feat)

        out = []
        feat = torch.zeros_like(feat)
        for i in range(t):
            if i:
                feat = warp(feat, flows_forward[:, i - 1])
            feat = self.forward_trunk(torch.cat((x[:, i], feat), 1))
            both = self.lrelu(self.fusion(torch.cat((backward.pop(), feat), 1)))
            out.append(self.enlarge(both) + resize(x[:, i], 4))
        return torch.stack(out, 1)


@ARCH_REGISTRY.register()
class IconVSR(FourfoldHead):
    """Enlarge clips (b, t, 3, h, w), RGB in [0, 1], to (b, t, 3, 4h, 4w); any t, h and w.

    Sizes that do not divide by 4 are padded inside, and the output cropped.

    Args:
        num_block: Residual blocks of each of the two branches.
        keyframe_stride: Distance of the keyframes; the last frame is one, too.
        temporal_padding: Frames on either side of a keyframe that its features are made of, 2 or 3.
        spynet_path: File of weights of the flow network; None: random ones.
        edvr_path: File of weights of the feature extractor at keyframes; None: random ones.
    """

    def __init__(
        self,
        num_feat: int = 64,
        num_block: int = 15,
        keyframe_stride: int = 5,
        temporal_padding: int = 2,
        spynet_path: str | Path | None = None,
        edvr_path: str | Path | None = None,
    ):
        super().__init__()
        if temporal_padding not in (2, 3):
            raise UserError(f'IconVSR: temporal_padding {temporal_padding} must be 2 or 3.')
        if keyframe_stride < 1:
            raise UserError(f'IconVSR: keyframe_stride {keyframe_stride} must be 1 or more.')
        self.num_feat = num_feat
        self.temporal_padding = temporal_padding
        self.keyframe_stride = keyframe_stride
        self.edvr = EDVRFeatureExtractor(temporal_padding * 2 + 1, num_feat, edvr_path)
        self.spynet = build_spynet(spynet_path)
        self.backward_fusion = nn.Conv2d(num_feat * 2, num_feat, 3, padding=1)
        self.backward_trunk = ConvResidualBlocks(num_feat + 3, num_feat, num_block)
        self.forward_fusion = nn.Conv2d(num_feat * 2, num_feat, 3, padding=1)
        self.forward_trunk = ConvResidualBlocks(2 * num_feat + 3, num_feat, num_block)
        self.add_head(num_feat)

    def pad_spatial(self, x: Tensor) -> Tensor:
        return pad_to_multiple(x, 4)

    def get_flow(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The flows (b, t - 1, 2, h, w) for forward and for backward propagation."""
        return neighbour_flow(self.spynet, x, False), neighbour_flow(self.spynet, x, True)

    def get_keyframe_feature(self, x: Tensor, keyframe_idx: list[int]) -> dict[int, Tensor]:
        """The features of keyframes; beyond its ends a clip is continued by frames of its own."""
        p, last = self.temporal_padding, x.shape[1] - 1
        before = [min(p + i, last) for i in range(p, 0, -1)]
        after = [max(last - p - i, 0) for i in range(1, p + 1)]
        frames = [*before, *range(last + 1), *after]
        return {i: self.edvr(x[:, frames[i : i + 2 * p + 1]]) for i in keyframe_idx}

    def forward(self, x: Tensor) -> Tensor:
        check_clip(x, 3, None, 'IconVSR')
        h, w = x.shape[-2:]
        x = self.pad_spatial(x)
        flows_forward, flows_backward = self.get_flow(x)
        b, t = x.shape[:2]
        keyframes = self.get_keyframe_feature(
            x, sorted({*range(0, t, self.keyframe_stride), t - 1})
        )

        backward: list[Tensor] = []
        feat = x.new_zeros(b, self.num_feat, *x.shape[-2:])
        for i in reversed(range(t)):
            if backward:
                feat = warp(feat, flows_backward[:, i])
            if i in keyframes:
                feat = self.backward_fusion(torch.cat((feat, keyframes[i]), 1))
            feat = self.backward_trunk(torch.cat((x[:, i], feat), 1))
            backward.append(feat)

        out = []
        feat = torch.zeros_like(feat)
        for i in range(t):
            if i:
                feat = warp(feat, flows_forward[:, i - 1])
            if i in keyframes:
                feat = self.forward_fusion(torch.cat((feat, keyframes[i]), 1))
            feat = self.forward_trunk(torch.cat((x[:, i], backward.pop(), feat), 1))
            out.append((self.enlarge(feat) + resize(x[:, i], 4))[..., : 4 * h, : 4 * w])
        return torch.stack(out, 1)


class EDVRFeatureExtractor(EDVRFeatures):
    """The features (b, num_feat, h, w) of the middle one of (b, num_input_frame, 3, h, w) by EDVR.

    Args:
        load_path: File of weights; None: random ones.
    """

    def __init__(self, num_input_frame: int, num_feat: int, load_path: str | Path | None):
        super().__init__(3, num_feat, num_input_frame, 8, 5, num_input_frame // 2)
        if load_path:
            load_pretrained(self, load_path, 'edvr_path')

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)


def build_spynet(path: str | Path | None) -> SpyNet:
    net = SpyNet()
    if path:
        load_pretrained(net, path, 'spynet_path')
    return net

"""BasicVSR++: features propagate twice in both directions, aligned from the two frames before.

BasicVSR++: Improving Video Super-Resolution with Enhanced Propagation and Alignment, Chan, Zhou,
Xu, Loy, CVPR 2022, https://arxiv.org/abs/2104.13371
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.ops.dcn import ModulatedDeformConvPack
from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import FourfoldHead, check_clip, pad_to_multiple, resize
from .basicvsr_arch import ConvResidualBlocks, build_spynet, neighbour_flow, warp

Features = dict[str, list[Tensor]]  # of each frame, in the order of time


@ARCH_REGISTRY.register()
class BasicVSRPlusPlus(FourfoldHead):
    """Restore clips (b, t, 3, h, w), RGB in [0, 1], of any length and size.

    Args:
        mid_channels: Features; a multiple of 8.
        num_blocks: Residual blocks of each of the four branches.
        max_residue_magnitude: How far, in pixels, an offset may be from the flow.
        is_low_res_input: True enlarges by 4. False keeps the size, for deblurring and the like; a
            size that does not divide by 4 is padded then, and the output cropped.
        spynet_path: File of weights of the flow network; None: random ones.
        cpu_cache_length: In longer clips, features wait in main memory for their use on the GPU.
    """

    def __init__(
        self,
        mid_channels: int = 64,
        num_blocks: int = 7,
        max_residue_magnitude: float = 10,
        is_low_res_input: bool = True,
        spynet_path: str | Path | None = None,
        cpu_cache_length: int = 100,
    ):
        super().__init__()
        if mid_channels % 8:
            raise UserError(f'BasicVSRPlusPlus: mid_channels {mid_channels} is no multiple of 8.')
        self.mid_channels = mid_channels
        self.is_low_res_input = is_low_res_input
        self.cpu_cache_length = cpu_cache_length
        self.spynet = build_spynet(spynet_path)
        if is_low_res_input:
            self.feat_extract = ConvResidualBlocks(3, mid_channels, 5)
        else:
            self.feat_extract = nn.Sequential(
                nn.Conv2d(3, mid_channels, 3, 2, 1),
                nn.LeakyReLU(0.1, inplace=True),
                nn.Conv2d(mid_channels, mid_channels, 3, 2, 1),
                nn.LeakyReLU(0.1, inplace=True),
                ConvResidualBlocks(mid_channels, mid_channels, 5),
            )
        self.deform_align = nn.ModuleDict()
        self.backbone = nn.ModuleDict()
        for i, module in enumerate(('backward_1', 'forward_1', 'backward_2', 'forward_2')):
            self.deform_align[module] = SecondOrderDeformableAlignment(
                *(2 * mid_channels, mid_channels, 3),
                padding=1,
                deformable_groups=16,
                max_residue_magnitude=max_residue_magnitude,
            )
            self.backbone[module] = ConvResidualBlocks(
                (2 + i) * mid_channels, mid_channels, num_blocks
            )
        self.reconstruction = ConvResidualBlocks(5 * mid_channels, mid_channels, 5)
        self.add_head(mid_channels)

    def check_if_mirror_extended(self, lqs: Tensor) -> bool:
        """Whether the second half of the clip is the first one, reversed."""
        first, second = lqs[:, : lqs.shape[1] // 2], lqs[:, (lqs.shape[1] + 1) // 2 :]
        return lqs.shape[1] % 2 == 0 and torch.equal(first, second.flip(1))

    def compute_flow(self, lqs: Tensor) -> tuple[Tensor, Tensor]:
        """The flows (b, t - 1, 2, h, w) for forward and for backward propagation."""
        backward = neighbour_flow(self.spynet, lqs, is_backward=True)
        # To look would make a training step wait for the GPU.
        if not self.training and self.check_if_mirror_extended(lqs):
            return backward.flip(1), backward
        return neighbour_flow(self.spynet, lqs, is_backward=False), backward

    def propagate(self, feats: Features, flows: Tensor, module_name: str) -> Features:
        """Add the features of the branch ``module_name``, which follow ``flows``, to ``feats``."""
        is_backward = module_name.startswith('backward')
        frames = list(range(flows.shape[1] + 1))
        steps = list(flows.unbind(1))
        if is_backward:
            frames, steps = frames[::-1], steps[::-1]
        spatial = feats['spatial']
        others = [key for key in feats if key not in ('spatial', module_name)]
        device = flows.device

        done: list[Tensor] = []
        feat = torch.zeros_like(spatial[0], device=device)
        for i, frame in enumerate(frames):
            current = spatial[frame].to(device)
            if i:
                before = done[-2].to(device) if i > 1 else None
                feat = self._align(module_name, current, feat, before, steps[max(i - 2, 0) : i])
            known = [feats[key][frame].to(device) for key in others]
            feat = feat + self.backbone[module_name](torch.cat((current, *known, feat), 1))
            done.append(feat.to(spatial[0].device))
        feats[module_name] = done[::-1] if is_backward else done
        return feats

    def _align(
        self,
        module_name: str,
        current: Tensor,
        feat: Tensor,
        before: Tensor | None,
        steps: list[Tensor],
    ) -> Tensor:
        """Align the features of the frame before, and of the one before that, to ``current``."""
        flow_1 = steps[-1]
        if before is None:
            before = cond_2 = torch.zeros_like(feat)
            flow_2 = torch.zeros_like(flow_1)
        else:
            flow_2 = flow_1 + warp(steps[0], flow_1)
            cond_2 = warp(before, flow_2)
        cond = torch.cat((warp(feat, flow_1), current, cond_2), 1)
        return self.deform_align[module_name](torch.cat((feat, before), 1), cond, flow_1, flow_2)

    def upsample(self, lqs: Tensor, feats: Features) -> Tensor:
        """The output from the features of all branches and the clip."""
        out = []
        for i in range(lqs.shape[1]):
            branches = [feats[key][i].to(lqs.device) for key in feats]
            frame = self.enlarge(self.reconstruction(torch.cat(branches, 1)))
            out.append(frame + (resize(lqs[:, i], 4) if self.is_low_res_input else lqs[:, i]))
        return torch.stack(out, 1)

    def forward(self, lqs: Tensor) -> Tensor:
        check_clip(lqs, 3, None, 'BasicVSRPlusPlus')
        t, _, height, width = lqs.shape[1:]
        small = lqs
        if not self.is_low_res_input:
            lqs = pad_to_multiple(lqs, 4)
            small = F.interpolate(
                lqs.flatten(0, 1), scale_factor=0.25, mode='bicubic', align_corners=False
            ).unflatten(0, lqs.shape[:2])
        flows_forward, flows_backward = self.compute_flow(small)
        spatial = self.feat_extract(lqs.flatten(0, 1)).unflatten(0, lqs.shape[:2])
        store = torch.device('cpu') if t > self.cpu_cache_length else lqs.device
        feats: Features = {'spatial': [feat.to(store) for feat in spatial.unbind(1)]}
        for module_name in self.backbone:
            is_backward = module_name.startswith('backward')
            flows = flows_backward if is_backward else flows_forward
            feats = self.propagate(feats, flows, module_name)
        out = self.upsample(lqs, feats)
        return out if self.is_low_res_input else out[..., :height, :width]


class SecondOrderDeformableAlignment(ModulatedDeformConvPack):
    """Deformable convolution of features of two frames, guided by their flows.

    ``x`` (b, in_channels, h, w) holds both frames' features, ``extra_feat`` (b, 3 * out_channels,
    h, w) both as moved by the flows, and the present ones between them. Half of the groups follows
    ``flow_1`` (b, 2, h, w), the other half ``flow_2``.

    Args:
        max_residue_magnitude: How far, in pixels, an offset may be from the flow.
        args, kwargs: Those of ``ModulatedDeformConvPack``.
    """

    def __init__(self, *args, **kwargs):
        self.max_residue_magnitude = kwargs.pop('max_residue_magnitude', 10)
        super().__init__(*args, **kwargs)
        num_feat, points = self.out_channels, self.deformable_groups * 9
        self.conv_offset = nn.Sequential(
            nn.Conv2d(3 * num_feat + 4, num_feat, 3, 1, 1),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(num_feat, num_feat, 3, 1, 1),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(num_feat, num_feat, 3, 1, 1),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(num_feat, 3 * points, 3, 1, 1),
        )
        self.init_offset()

    def init_offset(self) -> None:
        for parameter in self.conv_offset[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, extra_feat: Tensor, flow_1: Tensor, flow_2: Tensor) -> Tensor:
        offset, mask = self.offset_and_mask(torch.cat((extra_feat, flow_1, flow_2), 1))
        offset = self.max_residue_magnitude * offset.tanh()
        # Flows are horizontal first, offsets vertical first.
        pairs = offset.shape[1] // 4
        flows = [flow.flip(1).repeat(1, pairs, 1, 1) for flow in (flow_1, flow_2)]
        return self.convolve(x, offset + torch.cat(flows, 1), mask)

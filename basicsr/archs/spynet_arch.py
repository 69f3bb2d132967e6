"""SpyNet: optical flow from coarse to fine, by a small network for each level of a pyramid.

Optical Flow Estimation using a Spatial Pyramid Network, Ranjan, Black, CVPR 2017,
https://arxiv.org/abs/1611.00850
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import flow_warp, load_pretrained, resize_flow

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def coarse_to_fine(
    levels: Sequence[nn.Module], ref: Tensor, supp: Tensor, padding_mode: str
) -> Tensor:
    """The flow (b, 2, h, w) from ``ref`` to ``supp``, estimated by a module for each level.

    A module sees the reference, the other image moved by the flow so far, and that flow. The
    images must divide by 2 to the power of ``len(levels) - 1``.

    Args:
        padding_mode: What is outside of the moved image; see ``flow_warp``.
    """
    refs, supps = [ref], [supp]
    for _ in levels[1:]:
        refs.append(F.avg_pool2d(refs[-1], 2))
        supps.append(F.avg_pool2d(supps[-1], 2))
    flow = ref.new_zeros(len(ref), 2, *refs[-1].shape[-2:])
    for module, small, other in zip(levels, refs[::-1], supps[::-1], strict=True):
        if flow.shape[-2:] != small.shape[-2:]:
            flow = 2 * F.interpolate(flow, scale_factor=2, mode='bilinear', align_corners=True)
        moved = flow_warp(other, flow.permute(0, 2, 3, 1), padding_mode=padding_mode)
        flow = flow + module(torch.cat((small, moved, flow), 1))
    return flow


class BasicModule(nn.Module):
    """Map (b, 8, h, w), a pair of images and the flow so far, to what the flow lacks."""

    def __init__(self):
        super().__init__()
        layers: list[nn.Module] = []
        widths = (8, 32, 64, 32, 16, 2)
        for num_in, num_out in pairwise(widths):
            layers += [nn.Conv2d(num_in, num_out, 7, padding=3), nn.ReLU(inplace=True)]
        self.basic_module = nn.Sequential(*layers[:-1])

    def forward(self, tensor_input: Tensor) -> Tensor:
        return self.basic_module(tensor_input)


@ARCH_REGISTRY.register()
class SpyNet(nn.Module):
    """The flow (b, 2, h, w) that moves the pixels of ``ref`` to theirs in ``supp``.

    The flow is in pixels, horizontal first. Both images are (b, 3, h, w), RGB in [0, 1], of any
    size; they are enlarged to multiples of 32 inside.

    Args:
        load_path: File of weights; None: random ones.
    """

    def __init__(self, load_path: str | Path | None = None):
        super().__init__()
        self.basic_module = nn.ModuleList(BasicModule() for _ in range(6))
        self.register_buffer('mean', torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1))
        self.register_buffer('std', torch.tensor(IMAGENET_STD).view(1, 3, 1, 1))
        if load_path:
            load_pretrained(self, load_path, 'load_path of SpyNet')

    def preprocess(self, tensor_input: Tensor) -> Tensor:
        return (tensor_input - self.mean) / self.std

    def process(self, ref: Tensor, supp: Tensor) -> Tensor:
        """The flow between images whose sizes are multiples of 32."""
        levels = list(self.basic_module)
        return coarse_to_fine(levels, self.preprocess(ref), self.preprocess(supp), 'border')

    def forward(self, ref: Tensor, supp: Tensor) -> Tensor:
        h, w = ref.shape[-2:]
        size = (h + -h % 32, w + -w % 32)
        ref, supp = (
            F.interpolate(x, size, mode='bilinear', align_corners=False) for x in (ref, supp)
        )
        return resize_flow(self.process(ref, supp), 'shape', (h, w))

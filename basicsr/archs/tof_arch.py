"""TOFlow: seven frames are moved onto the middle one by a flow learned for the task.

Video Enhancement with Task-Oriented Flow, Xue, Chen, Wu, Wei, Freeman, IJCV 2019,
https://arxiv.org/abs/1711.09078
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import check_clip, flow_warp, load_pretrained, pad_to_multiple
from .spynet_arch import IMAGENET_MEAN, IMAGENET_STD, coarse_to_fine


class BasicModule(nn.Module):
    """That of SpyNet, with batch normalisation."""

    def __init__(self):
        super().__init__()
        layers: list[nn.Module] = []
        widths = (8, 32, 64, 32, 16)
        for num_in, num_out in pairwise(widths):
            layers += [
                nn.Conv2d(num_in, num_out, 7, padding=3, bias=False),
                nn.BatchNorm2d(num_out),
                nn.ReLU(inplace=True),
            ]
        self.basic_module = nn.Sequential(*layers, nn.Conv2d(16, 2, 7, padding=3))

    def forward(self, tensor_input: Tensor) -> Tensor:
        return self.basic_module(tensor_input)


class SPyNetTOF(nn.Module):
    """The flow (b, 2, h, w) from ``ref`` to ``supp`` (b, 3, h, w); h and w are multiples of 8.

    Args:
        load_path: File of weights; None: random ones.
    """

    def __init__(self, load_path: str | Path | None = None):
        super().__init__()
        self.basic_module = nn.ModuleList(BasicModule() for _ in range(4))
        if load_path:
            load_pretrained(self, load_path, 'load_path of SPyNetTOF')

    def forward(self, ref: Tensor, supp: Tensor) -> Tensor:
        return coarse_to_fine(list(self.basic_module), ref, supp, 'zeros')


@ARCH_REGISTRY.register()
class TOFlow(nn.Module):
    """Restore the middle one of seven frames: (b, 7, 3, h, w), RGB in [0, 1], to (b, 3, h, w).

    It does not enlarge: for super-resolution, frames are enlarged before.

    Args:
        adapt_official_weights: Whether the weights are those that the authors published, converted;
            these expect the middle frame first.
    """

    def __init__(self, adapt_official_weights: bool = False):
        super().__init__()
        self.order = (3, 0, 1, 2, 4, 5, 6) if adapt_official_weights else tuple(range(7))
        self.ref_idx = self.order.index(3)
        self.register_buffer('mean', torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1))
        self.register_buffer('std', torch.tensor(IMAGENET_STD).view(1, 3, 1, 1))
        self.spynet = SPyNetTOF()
        self.conv_1 = nn.Conv2d(3 * 7, 64, 9, padding=4)
        self.conv_2 = nn.Conv2d(64, 64, 9, padding=4)
        self.conv_3 = nn.Conv2d(64, 64, 1)
        self.conv_4 = nn.Conv2d(64, 3, 1)
        self.relu = nn.ReLU(inplace=True)

    def normalize(self, img: Tensor) -> Tensor:
        return (img - self.mean) / self.std

    def denormalize(self, img: Tensor) -> Tensor:
        return img * self.std + self.mean

    def forward(self, lrs: Tensor) -> Tensor:
        check_clip(lrs, 3, 7, 'TOFlow')
        h, w = lrs.shape[-2:]
        padded = pad_to_multiple(lrs, 8)
        frames = [self.normalize(padded[:, i]) for i in self.order]
        ref = frames[self.ref_idx]
        moved = [frame if frame is ref else self._move(ref, frame) for frame in frames]
        feat = torch.cat(moved, 1)
        for conv in (self.conv_1, self.conv_2, self.conv_3):
            feat = self.relu(conv(feat))
        return self.denormalize(self.conv_4(feat) + ref)[..., :h, :w]

    def _move(self, ref: Tensor, frame: Tensor) -> Tensor:
        return flow_warp(frame, self.spynet(ref, frame).permute(0, 2, 3, 1))

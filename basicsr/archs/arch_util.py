"""Building blocks and helpers shared by the networks."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from basicsr.ops.dcn import ModulatedDeformConvPack
from basicsr.utils.checkpoint import load_checkpoint, select_params
from basicsr.utils.errors import UserError
from basicsr.utils.wrong_weights import load_fitting

DIV2K_RGB_MEAN = (0.4488, 0.4371, 0.404)  # mean colour of the DIV2K training images

trunc_normal_ = nn.init.trunc_normal_


@torch.no_grad()
def default_init_weights(
    module_list: nn.Module | Iterable[nn.Module], scale: float = 1, bias_fill: float = 0, **kwargs
) -> None:
    """Initialise convolutions and linear layers by Kaiming's normal rule times ``scale``.

    A scale well below 1 lets a residual block start near the identity. BatchNorm weights become 1.

    Args:
        bias_fill: Value of every bias.
        kwargs: Arguments of ``torch.nn.init.kaiming_normal_``.
    """
    modules = [module_list] if isinstance(module_list, nn.Module) else module_list
    for module in (m for root in modules for m in root.modules()):
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, **kwargs).mul_(scale)
        elif isinstance(module, _BatchNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        else:
            continue
        if module.bias is not None:
            module.bias.fill_(bias_fill)


def make_layer(
    basic_block: Callable[..., nn.Module], num_basic_block: int, **kwarg
) -> nn.Sequential:
    """Stack ``num_basic_block`` blocks, each built with the arguments ``kwarg``."""
    return nn.Sequential(*(basic_block(**kwarg) for _ in range(num_basic_block)))


def make_activation(act_type: str, num_feat: int) -> nn.Module:
    """Build an activation; 'prelu' has a slope for each of the ``num_feat`` channels."""
    activations = {
        'prelu': nn.PReLU(num_feat),
        'relu': nn.ReLU(inplace=True),
        'leakyrelu': nn.LeakyReLU(0.1, inplace=True),
        'rrelu': nn.RReLU(),
        'softplus': nn.Softplus(),
        'linear': nn.Identity(),
    }
    if act_type not in activations:
        raise UserError(f'act_type {act_type!r} is unknown; choose one of {list(activations)}.')
    return activations[act_type]


class ResidualBlockNoBN(nn.Module):
    """Add ``res_scale`` times two convolutions with a ReLU between them.

    It is the block of EDSR (https://arxiv.org/abs/1707.02921): BatchNorm would destroy the range of
    the image. ``pytorch_init`` keeps PyTorch's weights instead of ``default_init_weights`` x 0.1.
    """

    def __init__(self, num_feat: int = 64, res_scale: float = 1, pytorch_init: bool = False):
        super().__init__()
        self.res_scale = res_scale
        self.conv1 = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.conv2 = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        if not pytorch_init:
            default_init_weights([self.conv1, self.conv2], 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.relu(self.conv1(x))) * self.res_scale


class ChannelAttention(nn.Module):
    """Scale every channel by a factor in (0, 1) computed from the means of all channels.

    Squeeze-and-excitation (Hu et al., CVPR 2018, https://arxiv.org/abs/1709.01507) as in RCAN.

    Args:
        squeeze_factor: The hidden layer has ``num_feat // squeeze_factor`` channels, at least one.
    """

    def __init__(self, num_feat: int, squeeze_factor: int = 16):
        super().__init__()
        num_hidden = max(num_feat // squeeze_factor, 1)
        self.attention = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(num_feat, num_hidden, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_hidden, num_feat, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.attention(x)


class Upsample(nn.Sequential):
    """Enlarge by sub-pixel convolution (https://arxiv.org/abs/1609.05158): ``scale`` 2^n or 3."""

    def __init__(self, scale: int, num_feat: int):
        factors = [3] if scale == 3 else [2] * (int(scale).bit_length() - 1)
        if math.prod(factors) != scale:
            raise UserError(f'Upsample cannot enlarge by {scale}; choose a power of 2, or 3.')
        layers: list[nn.Module] = []
        for factor in factors:
            layers += [
                nn.Conv2d(num_feat, num_feat * factor**2, 3, padding=1),
                nn.PixelShuffle(factor),
            ]
        super().__init__(*layers)


class FourfoldHead(nn.Module):
    """What turns features into images four times as large, in every video network.

    A base class instead of a block: published weights have these layers at the top of a network.
    """

    def add_head(self, num_feat: int, num_out_ch: int = 3) -> None:
        self.upconv1 = nn.Conv2d(num_feat, num_feat * 4, 3, padding=1)
        self.upconv2 = nn.Conv2d(num_feat, 64 * 4, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(2)
        self.conv_hr = nn.Conv2d(64, 64, 3, padding=1)
        self.conv_last = nn.Conv2d(64, num_out_ch, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.1, inplace=True)

    def enlarge(self, feat: Tensor) -> Tensor:
        """Map features (b, num_feat, h, w) to images (b, num_out_ch, 4h, 4w)."""
        feat = self.lrelu(self.pixel_shuffle(self.upconv1(feat)))
        feat = self.lrelu(self.pixel_shuffle(self.upconv2(feat)))
        return self.conv_last(self.lrelu(self.conv_hr(feat)))


class DCNv2Pack(ModulatedDeformConvPack):
    """Deformable convolution v2 whose offsets and masks come from other features than its input."""

    def forward(self, x: Tensor, feat: Tensor) -> Tensor:
        return self.convolve(x, *self.offset_and_mask(feat))


def mean_per_channel(rgb_mean: Sequence[float], num_ch: int) -> tuple[float, ...]:
    """Return ``rgb_mean`` as a mean for each of ``num_ch`` channels.

    The default, the mean of DIV2K, does not apply to images that are not RGB: their mean is 0.

    Raises:
        ValueError: Another mean has the wrong length.
    """
    if len(rgb_mean) == num_ch:
        return tuple(rgb_mean)
    if tuple(rgb_mean) == DIV2K_RGB_MEAN:
        return (0.0,) * num_ch
    raise UserError(
        f'rgb_mean {list(rgb_mean)} has {len(rgb_mean)} values, but the image has {num_ch} '
        'channels; give one value per channel.'
    )


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Pad images (…, c, h, w) at the bottom and right until h and w are multiples of ``multiple``.

    The padding mirrors the image; where it is too small to be mirrored, its edge is repeated.
    """
    h, w = x.shape[-2:]
    bottom, right = -h % multiple, -w % multiple
    if bottom == right == 0:
        return x
    mode = 'reflect' if bottom < h and right < w else 'replicate'
    padded = F.pad(x.reshape(-1, *x.shape[-3:]), (0, right, 0, bottom), mode)
    return padded.reshape(*x.shape[:-2], h + bottom, w + right)


def resize(x: Tensor, scale: float) -> Tensor:
    """Resize (b, c, h, w) by bilinear interpolation."""
    return F.interpolate(x, scale_factor=scale, mode='bilinear', align_corners=False)


def check_clip(x: Tensor, num_ch: int, frames: int | None, network: str) -> None:
    """Refuse what is no clip (b, t, num_ch, h, w), or not of as many ``frames`` as needed.

    Raises:
        ValueError: What was given, and what is needed.
    """
    if x.ndim == 5 and x.shape[2] == num_ch and x.shape[1] and frames in (None, x.shape[1]):
        return
    needed = f'(b, {"t" if frames is None else frames}, {num_ch}, h, w)'
    raise UserError(
        f'{network} takes clips {needed}, not {tuple(x.shape)}'
        + ('.' if frames is None else f': it restores one frame from {frames}.')
    )


def load_pretrained(net: nn.Module, path: str | Path, option: str) -> None:
    """Load the weights ``params`` of a file into a part of a network.

    Args:
        option: The name of the option that gave the path, for messages.

    Raises:
        FileNotFoundError: No such file.
        ValueError: The file is damaged, or its weights do not fit.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f'{option}: no file {path} with weights of {type(net).__name__}. Correct the path, or '
            'leave the option out to start from random weights.'
        )
    state, _ = select_params(load_checkpoint(path), 'params', path)
    load_fitting(net, state, f'{option}: {path}', type(net).__name__)


def flow_warp(
    x: Tensor,
    flow: Tensor,
    interp_mode: str = 'bilinear',
    padding_mode: str = 'zeros',
    align_corners: bool = True,
) -> Tensor:
    """Sample ``x`` (n, c, h, w) at its pixels' positions displaced by ``flow`` (n, h, w, 2).

    The flow is in pixels, horizontal first. Positions are computed in float32 at least, because
    bfloat16 has no odd numbers above 256; the output has the type of ``x``.

    Args:
        interp_mode, padding_mode: As in ``torch.nn.functional.grid_sample``.
        align_corners: True makes a displacement of 1 exactly one pixel. False stretches the image
            a little: positions are divided by size - 1 all the same, as published models expect.
    """
    h, w = x.shape[-2:]
    if flow.shape[1:] != (h, w, 2):
        raise UserError(
            f'flow must be (n, {h}, {w}, 2) for x {tuple(x.shape)}, not {tuple(flow.shape)}.'
        )
    dtype = torch.promote_types(x.dtype, torch.float32)
    column = torch.arange(w, dtype=dtype, device=x.device)
    row = torch.arange(h, dtype=dtype, device=x.device)[:, None]
    grid_x = 2 * (column + flow[..., 0]) / max(w - 1, 1) - 1
    grid_y = 2 * (row + flow[..., 1]) / max(h - 1, 1) - 1
    grid = torch.stack((grid_x, grid_y), dim=3).to(dtype)
    return F.grid_sample(x.to(dtype), grid, interp_mode, padding_mode, align_corners).to(x.dtype)


def resize_flow(
    flow: Tensor,
    size_type: str,
    sizes: Sequence[float],
    interp_mode: str = 'bilinear',
    align_corners: bool = False,
) -> Tensor:
    """Resize ``flow`` (n, 2, h, w), horizontal displacement first, and rescale its values to match.

    Args:
        size_type: Whether ``sizes`` are a 'ratio' of the old size or the new 'shape'.
        sizes: For the height, for the width.
    """
    h, w = flow.shape[-2:]
    if size_type == 'ratio':
        new_h, new_w = int(h * sizes[0]), int(w * sizes[1])
    elif size_type == 'shape':
        new_h, new_w = int(sizes[0]), int(sizes[1])
    else:
        raise UserError(f"size_type must be 'ratio' or 'shape', not {size_type!r}.")
    scaled = torch.stack((flow[:, 0] * (new_w / w), flow[:, 1] * (new_h / h)), dim=1)
    return F.interpolate(scaled, (new_h, new_w), mode=interp_mode, align_corners=align_corners)


def pixel_unshuffle(x: Tensor, scale: int) -> Tensor:
    """Move blocks of (b, c, h * scale, w * scale) into the channels: (b, c * scale^2, h, w)."""
    return F.pixel_unshuffle(x, scale)


def to_ntuple(n: int) -> Callable[[Any], Any]:
    """Return a function that repeats a value ``n`` times and returns an iterable unchanged."""

    def parse(x: Any) -> Any:
        return x if isinstance(x, Iterable) else tuple(repeat(x, n))

    return parse


to_1tuple = to_ntuple(1)
to_2tuple = to_ntuple(2)
to_3tuple = to_ntuple(3)
to_4tuple = to_ntuple(4)

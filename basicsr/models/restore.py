"""Restore images and clips of any size: padding, tiles, temporal chunks, geometric self-ensemble.

The self-ensemble is that of Bee Lim, Sanghyun Son, Heewon Kim, Seungjun Nah, Kyoung Mu Lee,
"Enhanced Deep Residual Networks for Single Image Super-Resolution", CVPR Workshops 2017, sec. 3.4,
https://arxiv.org/abs/1707.02921
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from basicsr.archs.arch_util import pad_to_multiple
from basicsr.utils.errors import UserError

logger = logging.getLogger(__name__)

Restorer = Callable[[Tensor], Tensor]

# Tiles start at multiples of this, so that networks that downsample up to 16 times process a pixel
# of a tile exactly as in the whole image.
GRID = 16
_PROBES = (64, 256, 1024)  # image widths, in pixels, for measuring a receptive field

_halos: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def restore(
    net: nn.Module,
    lq: Tensor,
    scale: int,
    *,
    tile: int | None = None,
    overlap: int | None = None,
    multiple: int = 1,
    frames: int | None = None,
    frame_overlap: int = 0,
    ensemble: bool = False,
) -> Tensor:
    """Restore images or clips with a network in eval mode, without gradients.

    Args:
        net: Maps images (b, c, h, w) to (b, c, scale * h, scale * w), and clips likewise.
        lq: Images (b, c, h, w), or clips (b, t, c, h, w).
        scale: Upscaling factor.
        tile: Side of the tiles in LQ pixels, for images that do not fit into memory.
        overlap: LQ pixels of context on each side of a tile, over which neighbouring tiles are
            blended. None measures the receptive field and gives exactly the result of the whole
            image; only networks with a limited receptive field support that.
        multiple: Images are reflection-padded to a multiple of this, and the result is cropped.
        frames: Number of frames of a clip restored at a time.
        frame_overlap: Frames of context on each side of such a chunk.
        ensemble: Average over the eight flips and rotations.

    Raises:
        ValueError: ``overlap`` is required because the receptive field is the whole image.
    """
    run: Restorer = net
    with evaluating(net):
        if tile is not None:
            exact = overlap is None
            halo = required_halo(net, lq.shape[-3], scale, multiple) if overlap is None else overlap
            grid = math.lcm(GRID, multiple)
            size = max(tile // grid, 1) * grid
            run = partial(_in_tiles, run, scale, size, halo, is_exact=exact)
        run = partial(_padded, run, scale, multiple)
        if frames is not None:
            run = partial(_in_chunks, run, frames, frame_overlap)
        return self_ensemble(run, lq) if ensemble else run(lq)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network into eval mode and disable gradients within the block.

    A network already in eval mode is not touched, since some cache computed values.
    """
    was_training = net.training
    if was_training:
        net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            net.train()


def required_halo(net: nn.Module, channels: int, scale: int, multiple: int = 1) -> int:
    """``receptive_halo``, cached per network.

    Raises:
        ValueError: The receptive field is the whole image.
    """
    if net not in _halos:
        _halos[net] = receptive_halo(net, channels, scale, multiple)
    halo = _halos[net]
    if halo is None:
        raise UserError(
            f'{type(net).__name__} looks at the whole image, so tiles change its result: give an '
            'overlap in LQ pixels, such as 32, over which neighbours are blended.'
        )
    return halo


def receptive_halo(net: nn.Module, channels: int, scale: int, multiple: int = 1) -> int | None:
    """Measure how many LQ pixels beyond a tile a network sees, by how far a NaN propagates.

    Rounded up to blocks, at whose borders tiles start. None if it sees the whole image.

    Args:
        channels: Input channels of the network.
        multiple: Input sizes have to be multiples of this.
    """
    like, block = next(net.parameters(), torch.zeros(())), math.lcm(GRID, multiple)
    for width in _PROBES:
        middle = math.ceil(width / 2 / block) * block
        probe = torch.full((1, channels, block, 2 * middle + block), 0.5).to(like)
        probe[..., middle : middle + block] = torch.nan
        with evaluating(net):
            reached = [net(probe), net(probe.transpose(-2, -1)).transpose(-2, -1)]
        columns = torch.stack([output.isnan().any(0).any(0).any(0) for output in reached]).any(0)
        first, last = columns.nonzero()[[0, -1], 0].tolist()
        if first > 0 and last < len(columns) - 1:
            before, after = middle - first / scale, (last + 1) / scale - (middle + block)
            return math.ceil(max(before, after, 0) / block) * block
    return None


def _padded(run: Restorer, scale: int, multiple: int, lq: Tensor) -> Tensor:
    height, width = lq.shape[-2:]
    return run(pad_to_multiple(lq, multiple))[..., : height * scale, : width * scale]


class _Span(NamedTuple):
    """A segment of an axis: the range it covers, and that range with context."""

    own: tuple[int, int]
    seen: tuple[int, int]


def _spans(length: int, size: int, halo: int) -> list[_Span]:
    """Split an axis into segments of ``size``, with up to ``halo`` of context on both sides."""
    starts = range(0, length, size)
    own = [(start, min(start + size, length)) for start in starts]
    return [_Span((a, b), (max(a - halo, 0), min(b + halo, length))) for a, b in own]


def _in_tiles(
    run: Restorer, scale: int, size: int, halo: int, lq: Tensor, *, is_exact: bool
) -> Tensor:
    """Restore an image in tiles; overlaps are cropped if exact, otherwise blended."""
    axes = [_spans(length, size, halo) for length in lq.shape[-2:]]
    weights = [_weights(spans, scale, halo, is_exact) for spans in axes]
    result: Tensor | None = None
    for row, vertical in zip(axes[0], weights[0], strict=True):
        for column, horizontal in zip(axes[1], weights[1], strict=True):
            output = run(lq[..., slice(*row.seen), slice(*column.seen)])
            if result is None:
                sides = (scale * length for length in lq.shape[-2:])
                result = output.new_zeros((*output.shape[:-2], *sides))
            weight = (vertical[:, None] * horizontal).to(output)
            seen = [slice(scale * a, scale * b) for a, b in (row.seen, column.seen)]
            result[..., seen[0], seen[1]] += torch.where(weight > 0, weight * output, 0)
    assert result is not None
    return result


def _weights(spans: list[_Span], scale: int, halo: int, is_exact: bool) -> list[Tensor]:
    """The blending weights of each span's output pixels; over all spans they sum to 1."""
    total = torch.zeros(scale * spans[-1].own[1])
    weights = []
    for own, seen in spans:
        x = torch.arange(scale * seen[0], scale * seen[1]) + 0.5
        begin, end = (scale * n for n in own)
        if is_exact:
            weight = ((x > begin) & (x < end)).float()
        else:
            reach = max(scale * halo, 0.5)
            rising = (x - begin) / (2 * reach) + 0.5 if own[0] > 0 else torch.ones_like(x)
            falling = (end - x) / (2 * reach) + 0.5 if end < len(total) else torch.ones_like(x)
            weight = (rising.clamp(0, 1) * falling.clamp(0, 1)).float()
        weights.append(weight)
        total[scale * seen[0] : scale * seen[1]] += weight
    return [
        weight / total[scale * span.seen[0] : scale * span.seen[1]]
        for weight, span in zip(weights, spans, strict=True)
    ]


def _in_chunks(run: Restorer, frames: int, overlap: int, clip: Tensor) -> Tensor:
    """Restore a clip (b, t, c, h, w) in chunks of ``frames`` frames."""
    parts = []
    for (begin, end), (first, last) in _spans(clip.shape[1], frames, overlap):
        parts.append(run(clip[:, first:last])[:, begin - first : end - first])
    return torch.cat(parts, 1)


def self_ensemble(run: Restorer, lq: Tensor) -> Tensor:
    """Average the outputs of ``run`` over the eight flips and rotations of images or clips."""
    outputs = []
    for turns in range(4):
        for flip in (False, True):
            turned = torch.rot90(lq.flip(-1) if flip else lq, turns, (-2, -1))
            back = torch.rot90(run(turned), -turns, (-2, -1))
            outputs.append(back.flip(-1) if flip else back)
    return torch.stack(outputs).mean(0)

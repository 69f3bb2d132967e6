"""Helpers shared by losses: reduction, weighting, kinds of losses; and the artifact map of LDL.

LDL: Jie Liang, Hui Zeng, Lei Zhang, "Details or Artifacts: A Locally Discriminative Learning
Approach to Realistic Image Super-Resolution" (CVPR 2022), https://arxiv.org/abs/2203.09195
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.errors import UserError

# Names of losses that have dedicated options.
_OWN_LOSSES = ('pix', 'percep', 'style', 'gan', 'ldl')


def reduce_loss(loss: Tensor, reduction: str) -> Tensor:
    """Reduce a loss map: 'none' leaves it, 'mean' and 'sum' give a scalar."""
    if reduction == 'none':
        return loss
    if reduction == 'mean':
        return loss.mean()
    if reduction == 'sum':
        return loss.sum()
    raise UserError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}.")


def weight_reduce_loss(
    loss: Tensor, weight: Tensor | None = None, reduction: str = 'mean'
) -> Tensor:
    """Multiply a loss map by a weight map, then reduce it.

    Args:
        loss: Loss map (b, c, h, w), or of any other shape.
        weight: None, or a map that has as many dimensions and broadcasts to the shape of ``loss``;
            usually (b, c, h, w) or (b, 1, h, w).
        reduction: 'none', 'mean' (the weighted mean: the sum divided by the sum of the weights
            over all elements; 0 if no weight is above 0) or 'sum'.
    """
    if weight is None:
        return reduce_loss(loss, reduction)
    if weight.dim() != loss.dim() or any(
        size not in (1, wanted) for size, wanted in zip(weight.shape, loss.shape, strict=True)
    ):
        raise UserError(
            f'weight {tuple(weight.shape)} does not fit the loss map {tuple(loss.shape)}: every '
            'size must be 1 or equal.'
        )
    loss = loss * weight
    if reduction != 'mean':
        return reduce_loss(loss, reduction)
    total = weight.expand_as(loss).sum(dtype=loss.dtype)
    return loss.sum() / total.clamp_min(torch.finfo(total.dtype).tiny)


def weighted_loss(loss_func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Add a weight and a reduction to ``loss_func(pred, target, **options)``, which returns a map.

    The result is called as ``f(pred, target, weight=None, reduction='mean', **options)``. Shapes
    must be equal, since broadcasting would hide an output of the wrong size. Half precision is
    computed in float32: squares and the mean of a whole batch need its precision and range.
    """

    @functools.wraps(loss_func)
    def wrapper(
        pred: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: str = 'mean',
        **options: Any,
    ) -> Tensor:
        if pred.shape != target.shape:
            raise UserError(
                f'{loss_func.__name__} compares images of one shape, got an output of '
                f'{tuple(pred.shape)} and a GT of {tuple(target.shape)}: does upscale of the '
                'network equal scale?'
            )
        loss = loss_func(at_least_float32(pred), at_least_float32(target), **options)
        return weight_reduce_loss(loss, weight, reduction)

    return wrapper


def at_least_float32(x: Tensor) -> Tensor:
    """``x``, in float32 if it has half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def get_local_weights(residual: Tensor, ksize: int) -> Tensor:
    """Variance of ``residual`` (b, 1, h, w) in the window around each pixel; same shape.

    Args:
        ksize: Side of the window, odd and less than twice the sides of the image, which is
            reflected at the borders.
    """
    if ksize % 2 == 0 or ksize // 2 >= min(residual.shape[-2:]):
        raise UserError(
            f'ksize must be odd and less than twice the sides of the image, got {ksize} for '
            f'{tuple(residual.shape[-2:])}.'
        )
    padded = F.pad(residual, [ksize // 2] * 4, mode='reflect')
    windows = padded.unfold(2, ksize, 1).unfold(3, ksize, 1)
    return windows.var(dim=(-1, -2))


def get_refined_artifact_map(
    img_gt: Tensor, img_output: Tensor, img_ema: Tensor, ksize: int
) -> Tensor:
    """Map (b, 1, h, w) of where ``img_output`` probably shows artifacts (LDL, sec. 3.3).

    It is the local variance of the residual times the fifth root of its variance over the image,
    and 0 where the output is closer to the ground truth than that of the averaged network.

    Args:
        img_gt, img_output, img_ema: Ground truth, output of the network and output of its moving
            average, (b, c, h, w).
        ksize: Side of the window of the local variance, odd.
    """
    residual = (img_gt - img_output).abs().sum(1, keepdim=True)
    residual_ema = (img_gt - img_ema).abs().sum(1, keepdim=True)
    variance = residual.var(dim=(1, 2, 3), keepdim=True)
    # A perfect output has variance 0, where the derivative of the root is infinite.
    patch_weight = variance.clamp_min(torch.finfo(variance.dtype).tiny) ** 0.2
    weight = patch_weight * get_local_weights(residual, ksize)
    return weight.masked_fill(residual < residual_ema, 0)


def named_losses(losses: Any) -> dict[str, dict[str, Any]]:
    """The options of ``train.losses`` by the names of the losses in the log."""
    if not isinstance(losses, list) or not all(
        isinstance(options, dict) and 'type' in options for options in losses
    ):
        raise UserError(
            f'train.losses must be a list of losses, such as [{{type: L1Loss}}], got {losses}.'
        )
    named: dict[str, dict[str, Any]] = {}
    for options in map(dict, losses):
        name = options.pop('name', None) or options['type'].removesuffix('Loss').lower()
        if name in named:
            raise UserError(f"train.losses: two are called '{name}'; give each a name.")
        if name in _OWN_LOSSES:
            raise UserError(f"train.losses: '{name}' is another loss; give a new name.")
        named[name] = options
    return named


def is_adversarial(loss: nn.Module) -> bool:
    """Whether a loss takes discriminator logits and a real/fake target, as GANLoss does."""
    return 'target_is_real' in inspect.signature(loss.forward).parameters


def number_of_images(loss: nn.Module) -> int:
    """1 for a loss that takes only ``output``, 2 for one that also takes the ground truth."""
    parameters = inspect.signature(loss.forward).parameters.values()
    return sum(
        p.default is inspect.Parameter.empty for p in parameters if p.kind < p.VAR_POSITIONAL
    )

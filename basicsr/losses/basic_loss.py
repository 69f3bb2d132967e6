"""Losses between the pixels of two images."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.utils.registry import LOSS_REGISTRY

from .loss_util import weighted_loss


@weighted_loss
def l1_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Absolute difference."""
    return F.l1_loss(pred, target, reduction='none')


@weighted_loss
def mse_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Squared difference."""
    return F.mse_loss(pred, target, reduction='none')


@weighted_loss
def charbonnier_loss(pred: Tensor, target: Tensor, eps: float = 1e-12) -> Tensor:
    """Absolute difference, smooth at 0: sqrt((pred - target)^2 + eps)."""
    return torch.sqrt((pred - target) ** 2 + eps)


class _PixelLoss(nn.Module):
    """Settings of a loss called as ``loss(pred, target, weight=None)`` on (b, c, h, w) tensors.

    ``weight`` is a map (b, c, h, w) or (b, 1, h, w), see ``weight_reduce_loss``. Further keyword
    arguments are ignored: a model may hand all its losses what only some of them use.

    Args:
        loss_weight: Factor of the loss.
        reduction: 'mean', 'sum', or 'none' for the loss map.
    """

    def __init__(self, loss_weight: float = 1.0, reduction: str = 'mean'):
        super().__init__()
        if reduction not in ('none', 'mean', 'sum'):
            raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}.")
        self.loss_weight = loss_weight
        self.reduction = reduction


@LOSS_REGISTRY.register()
class L1Loss(_PixelLoss):
    """Mean absolute error."""

    def forward(
        self, pred: Tensor, target: Tensor, weight: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        return self.loss_weight * l1_loss(pred, target, weight, self.reduction)


@LOSS_REGISTRY.register()
class MSELoss(_PixelLoss):
    """Mean squared error."""

    def forward(
        self, pred: Tensor, target: Tensor, weight: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        return self.loss_weight * mse_loss(pred, target, weight, self.reduction)


@LOSS_REGISTRY.register()
class CharbonnierLoss(_PixelLoss):
    """L1 loss that is smooth at 0.

    Pierre Charbonnier et al., "Two deterministic half-quadratic regularization algorithms for
    computed imaging" (1994), https://doi.org/10.1109/ICIP.1994.413553

    Args:
        eps: Added to the squared difference; the loss is smooth for differences below its root.
    """

    def __init__(self, loss_weight: float = 1.0, reduction: str = 'mean', eps: float = 1e-12):
        super().__init__(loss_weight, reduction)
        self.eps = eps

    def forward(
        self, pred: Tensor, target: Tensor, weight: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        return self.loss_weight * charbonnier_loss(
            pred, target, weight, self.reduction, eps=self.eps
        )


@LOSS_REGISTRY.register()
class WeightedTVLoss(L1Loss):
    """Total variation: L1 between vertical neighbours plus L1 between horizontal ones.

    Called as ``loss(pred, weight=None)``; ``reduction`` is 'mean' or 'sum'.
    """

    def __init__(self, loss_weight: float = 1.0, reduction: str = 'mean'):
        if reduction == 'none':
            raise ValueError(
                "WeightedTVLoss adds maps of two sizes: reduction must be 'mean' or 'sum', got "
                "'none'."
            )
        super().__init__(loss_weight, reduction)

    def forward(self, pred: Tensor, weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
        vertical = horizontal = None
        if weight is not None:
            vertical, horizontal = weight[..., :-1, :], weight[..., :-1]
        return super().forward(pred[..., :-1, :], pred[..., 1:, :], vertical) + super().forward(
            pred[..., :-1], pred[..., 1:], horizontal
        )

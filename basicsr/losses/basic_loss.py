"""Losses between two images: pixel losses, total variation and perceptual loss."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basicsr.archs.vgg_arch import VGGFeatureExtractor
from basicsr.utils.errors import UserError
from basicsr.utils.registry import LOSS_REGISTRY

from .loss_util import at_least_float32, weighted_loss


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
    arguments are ignored: a model may pass to all its losses what only some of them use.

    Args:
        loss_weight: Factor of the loss.
        reduction: 'mean', 'sum', or 'none' for the loss map.
    """

    def __init__(self, loss_weight: float = 1.0, reduction: str = 'mean'):
        super().__init__()
        if reduction not in ('none', 'mean', 'sum'):
            raise UserError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}.")
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
            raise UserError(
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


@LOSS_REGISTRY.register()
class PerceptualLoss(nn.Module):
    """Distances between VGG features of two images (perceptual) and their correlations (style).

    Called as ``loss(x, gt)`` on images (b, 3 or 1, h, w), RGB or gray, in [0, 1]; gives (perceptual
    loss, style loss), each None if its weight is 0. ``gt`` gets no gradient.

    Justin Johnson, Alexandre Alahi, Li Fei-Fei, "Perceptual Losses for Real-Time Style Transfer and
    Super-Resolution" (ECCV 2016), https://arxiv.org/abs/1603.08155

    Args:
        layer_weights: Factors of the layers by name, such as {'conv5_4': 1}.
        criterion: 'l1' or 'l2', averaged over a layer, or 'fro', the norm of the difference.
        vgg_type, use_input_norm, range_norm, weights: See ``VGGFeatureExtractor``, also for the
            errors and for where the weights come from.
    """

    def __init__(
        self,
        layer_weights: Mapping[str, float],
        vgg_type: str = 'vgg19',
        use_input_norm: bool = True,
        range_norm: bool = False,
        perceptual_weight: float = 1.0,
        style_weight: float = 0.0,
        criterion: str = 'l1',
        weights: str | None = None,
    ):
        super().__init__()
        criteria = {'l1': l1_loss, 'l2': mse_loss, 'fro': _frobenius_distance}
        if criterion not in criteria:
            raise UserError(f"criterion must be 'l1', 'l2' or 'fro', got {criterion!r}.")
        if perceptual_weight <= 0 and style_weight <= 0:
            raise UserError('PerceptualLoss: perceptual_weight or style_weight must be above 0.')
        self.criterion = criteria[criterion]
        self.layer_weights = layer_weights
        self.perceptual_weight = perceptual_weight
        self.style_weight = style_weight
        self.vgg = VGGFeatureExtractor(
            list(layer_weights), vgg_type, use_input_norm, range_norm, weights=weights
        )

    def forward(self, x: Tensor, gt: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if x.shape != gt.shape:
            raise UserError(
                f'PerceptualLoss compares images of one shape, got an output of {tuple(x.shape)} '
                f'and a GT of {tuple(gt.shape)}: does upscale of the network equal scale?'
            )
        features = self.vgg(x)
        with torch.no_grad():
            gt_features = self.vgg(gt)
        percep = style = None
        if self.perceptual_weight > 0:
            percep = self.perceptual_weight * self._distance(features, gt_features)
        if self.style_weight > 0:
            grams = {name: _gram_matrix(feature) for name, feature in features.items()}
            gt_grams = {name: _gram_matrix(feature) for name, feature in gt_features.items()}
            style = self.style_weight * self._distance(grams, gt_grams)
        return percep, style

    def _distance(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
        distances = [
            weight * self.criterion(a[name], b[name]) for name, weight in self.layer_weights.items()
        ]
        return torch.stack(distances).sum()


def _frobenius_distance(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vector_norm(at_least_float32(a) - at_least_float32(b))


def _gram_matrix(x: Tensor) -> Tensor:
    """Correlations (b, c, c) between the channels of features (b, c, h, w), per element."""
    features = at_least_float32(x).flatten(2)
    # Sums of squares over all pixels, which would overflow in float16 under autocast.
    with torch.autocast(x.device.type, enabled=False):
        return features @ features.mT / features[0].numel()

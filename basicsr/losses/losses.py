"""Import path of the losses in early releases of BasicSR, which other packages still use."""

from .basic_loss import CharbonnierLoss, L1Loss, MSELoss, PerceptualLoss, WeightedTVLoss
from .gan_loss import (
    GANFeatLoss,
    GANLoss,
    MultiScaleGANLoss,
    g_path_regularize,
    gradient_penalty_loss,
    r1_penalty,
)

__all__ = [
    'CharbonnierLoss',
    'GANFeatLoss',
    'GANLoss',
    'L1Loss',
    'MSELoss',
    'MultiScaleGANLoss',
    'PerceptualLoss',
    'WeightedTVLoss',
    'g_path_regularize',
    'gradient_penalty_loss',
    'r1_penalty',
]

"""The import path of the losses in early releases of BasicSR, which other packages still use."""

from .basic_loss import CharbonnierLoss, L1Loss, MSELoss, WeightedTVLoss

__all__ = ['CharbonnierLoss', 'L1Loss', 'MSELoss', 'WeightedTVLoss']

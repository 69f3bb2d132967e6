"""Helpers for metrics: image layout and range, luma, images without a score."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from basicsr.utils.color_util import RGB_TO_YCBCR, YCBCR_OFFSET
from basicsr.utils.errors import UserError
from basicsr.utils.img_util import crop_border, cv2

logger = logging.getLogger(__name__)

# Weights of B, G and R in [0, 255], and the offset.
_BGR_TO_Y = np.array([[*RGB_TO_YCBCR[::-1, 0] / 255, YCBCR_OFFSET[0]]])


def reorder_image(img: np.ndarray, input_order: str = 'HWC') -> np.ndarray:
    """Bring an image (h, w), (h, w, c) or (c, h, w) into the layout (h, w, c).

    Args:
        input_order: 'HWC' or 'CHW'; irrelevant for (h, w).
    """
    if input_order not in ('HWC', 'CHW'):
        raise UserError(f"input_order must be 'HWC' or 'CHW', got {input_order!r}.")
    if img.ndim == 2:
        return img[..., None]
    return img.transpose(1, 2, 0) if input_order == 'CHW' else img


def to_255(img: np.ndarray) -> np.ndarray:
    """Scale a 16-bit image to [0, 255]; any other is assumed to be in that range already."""
    return img * (255 / 65535) if img.dtype == np.uint16 else img


def to_y_channel(img: np.ndarray) -> np.ndarray:
    """Luma (h, w, 1) in [16, 235], unrounded, of a BGR image (h, w, 3) in [0, 255].

    An image of another number of channels is only converted to float32.
    """
    img = to_255(img).astype(np.float32)
    if img.ndim == 3 and img.shape[2] == 3:
        return cv2.transform(img, _BGR_TO_Y)[..., None]  # ten times as fast as bgr2ycbcr
    return img


class UndefinedScoreError(UserError):
    """A metric is not defined for an image: it is too small, or flat."""


def nan_if_undefined(metric: Callable) -> Callable:
    """Decorator: return NaN instead of raising UndefinedScoreError, and log the first one.

    Validations call the undecorated metric (``inspect.unwrap``), to name the image and the reason.
    """
    has_warned = False

    @functools.wraps(metric)
    def score(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        try:
            return metric(*args, **kwargs)
        except UndefinedScoreError as error:
            if not has_warned:
                logger.warning('%s The score is NaN (logged once).', error)
            has_warned = True
        img = args[0] if args else kwargs['img']
        return (
            img.new_full([len(img)], math.nan, dtype=torch.float64)
            if torch.is_tensor(img)
            else math.nan
        )

    return score


def crop(imgs: Any, border: int) -> Any:
    """As ``crop_border``, for images that may be too small to have a score."""
    try:
        return crop_border(imgs, border)
    except UserError as error:
        raise UndefinedScoreError(str(error)) from error

"""YCbCr conversion after ITU-R BT.601, limited range, with the numbers of MATLAB's ``rgb2ycbcr``.

For R, G, B in [0, 1], Y is in [16, 235], Cb and Cr are in [16, 240].
"""

import numpy as np
import torch
from torch import Tensor

# Rows are R, G, B; columns are Y, Cb, Cr.
RGB_TO_YCBCR = np.array(
    [[65.481, -37.797, 112.0], [128.553, -74.203, -93.786], [24.966, 112.0, -18.214]]
)
YCBCR_OFFSET = np.array([16.0, 128.0, 128.0])

# Rows are Y, Cb, Cr; columns are R, G, B. MATLAB's rounded inverse, not the exact one.
YCBCR_TO_RGB = 255 * np.array(
    [
        [0.00456621, 0.00456621, 0.00456621],
        [0, -0.00153632, 0.00791071],
        [0.00625893, -0.00318811, 0],
    ]
)
RGB_OFFSET = np.array([-222.921, 135.576, -276.836])


def rgb2ycbcr(img: np.ndarray, y_only: bool = False) -> np.ndarray:
    """Convert an RGB image to YCbCr.

    Args:
        img: (h, w, 3), uint8 in [0, 255] or float32 in [0, 1].
        y_only: Return only the luma, (h, w).

    Returns:
        Image of the dtype of ``img``: uint8 rounded, or float32 divided by 255.

    Raises:
        TypeError: ``img`` is neither uint8 nor float32.
    """
    matrix, offset = RGB_TO_YCBCR, YCBCR_OFFSET
    if y_only:
        matrix, offset = matrix[:, 0], offset[0]
    return _like(img, _unit_range(img) @ matrix + offset)


def bgr2ycbcr(img: np.ndarray, y_only: bool = False) -> np.ndarray:
    """Convert a BGR image to YCbCr; else as ``rgb2ycbcr``."""
    return rgb2ycbcr(img[..., ::-1], y_only)


def ycbcr2rgb(img: np.ndarray) -> np.ndarray:
    """Convert a YCbCr image (h, w, 3) to RGB; dtypes and ranges as in ``rgb2ycbcr``.

    Colours that RGB cannot show are clipped in uint8 and left outside [0, 1] in float32.
    """
    return _like(img, 255 * _unit_range(img) @ YCBCR_TO_RGB + RGB_OFFSET)


def ycbcr2bgr(img: np.ndarray) -> np.ndarray:
    """Convert a YCbCr image (h, w, 3) to BGR; else as ``ycbcr2rgb``."""
    return np.ascontiguousarray(ycbcr2rgb(img)[..., ::-1])


def rgb2ycbcr_pt(img: Tensor, y_only: bool = False) -> Tensor:
    """Convert RGB tensors (n, 3, h, w) in [0, 1] to YCbCr divided by 255.

    Args:
        y_only: Return only the luma, (n, 1, h, w).
    """
    # Half precision has too few digits for the coefficients.
    x = img if img.dtype == torch.float64 else img.float()
    channels = slice(0, 1 if y_only else 3)
    matrix = torch.from_numpy(RGB_TO_YCBCR[:, channels]).to(x)
    offset = torch.from_numpy(YCBCR_OFFSET[channels]).to(x)
    out = torch.einsum('nchw,cd->ndhw', x, matrix) + offset.view(1, -1, 1, 1)
    return (out / 255).to(img.dtype)


def _unit_range(img: np.ndarray) -> np.ndarray:
    """The image in [0, 1], in float64."""
    if img.dtype == np.uint8:
        return img / 255.0
    if img.dtype == np.float32:
        return img.astype(np.float64)
    raise TypeError(
        f'YCbCr conversion needs a uint8 image in [0, 255] or a float32 image in [0, 1], '
        f'got {img.dtype}: convert it first.'
    )


def _like(img: np.ndarray, out: np.ndarray) -> np.ndarray:
    """``out`` (in [0, 255]) in the dtype and range of the input image ``img``."""
    if img.dtype == np.uint8:
        return out.round().clip(0, 255).astype(np.uint8)
    return (out / 255).astype(np.float32)

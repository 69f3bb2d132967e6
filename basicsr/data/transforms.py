"""Data augmentation: crops, flips and rotations of images and image pairs."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from basicsr.utils.errors import UserError, image_error
from basicsr.utils.img_util import cv2

Image = np.ndarray | Tensor

UPRIGHT = (False, False, False)
_LARGE = 64 * 64  # pixels, above which calling OpenCV pays off
_FLIP_CODES = {(True, False): 1, (False, True): 0, (True, True): -1}  # (hflip, vflip), for OpenCV


def mod_crop(img: np.ndarray, scale: int) -> np.ndarray:
    """A copy of ``img`` (h, w) or (h, w, c), cut at the bottom and right to multiples of scale."""
    if img.ndim not in (2, 3):
        raise UserError(f'an image has 2 or 3 dimensions, got shape {img.shape}.')
    height, width = img.shape[0] // scale * scale, img.shape[1] // scale * scale
    return img[:height, :width].copy()


def paired_random_crop(
    img_gts: Image | list[Image],
    img_lqs: Image | list[Image],
    gt_patch_size: int,
    scale: int,
    gt_path: str | None = None,
    rng: Any = random,
) -> tuple[Any, Any]:
    """Crop GT and LQ images at the same random place.

    Args:
        img_gts: One or several images, numpy (h, w, c) or tensor (n, c, h, w), all of one size.
        img_lqs: The same, ``scale`` times smaller.
        gt_patch_size: Side of the GT crop; the LQ crop has ``gt_patch_size // scale``.
        gt_path: For messages.
        rng: Source of the place: the module ``random``, or a ``random.Random``.

    Returns:
        GT and LQ crops, as lists where lists were given.

    Raises:
        ValueError: The sizes do not match, or the patch is larger than the image.
    """
    gts = img_gts if isinstance(img_gts, list) else [img_gts]
    lqs = img_lqs if isinstance(img_lqs, list) else [img_lqs]
    (gt_h, gt_w), (lq_h, lq_w) = _size(gts[0]), _size(lqs[0])
    lq_patch = gt_patch_size // scale

    if (gt_h, gt_w) != (lq_h * scale, lq_w * scale):
        raise UserError(
            f'GT {gt_h}x{gt_w} (height x width) is not {scale} times LQ {lq_h}x{lq_w}: {gt_path}.'
        )
    if lq_h < lq_patch or lq_w < lq_patch:
        raise image_error(
            str(gt_path),
            f'GT {gt_h}x{gt_w} (height x width) is smaller than gt_size {gt_patch_size}, or LQ '
            f'{lq_h}x{lq_w} than {lq_patch}: {gt_path}. Lower gt_size, pad the image (pad_small) '
            'or remove it.',
        )
    top = rng.randint(0, lq_h - lq_patch)
    left = rng.randint(0, lq_w - lq_patch)
    gts = [_crop(gt, top * scale, left * scale, gt_patch_size) for gt in gts]
    lqs = [_crop(lq, top, left, lq_patch) for lq in lqs]
    return _unwrap(gts), _unwrap(lqs)


def _size(img: Image) -> tuple[int, int]:
    """(height, width)"""
    return tuple(img.shape[-2:] if isinstance(img, Tensor) else img.shape[:2])  # pyright: ignore[reportReturnType]


def _crop(img: Image, top: int, left: int, size: int) -> Image:
    window = slice(top, top + size), slice(left, left + size)
    return img[(..., *window)] if isinstance(img, Tensor) else img[window]


def _unwrap(values: list) -> Any:
    return values[0] if len(values) == 1 else values


def augment(
    imgs: np.ndarray | list[np.ndarray],
    hflip: bool = True,
    rotation: bool = True,
    flows: np.ndarray | list[np.ndarray] | None = None,
    return_status: bool = False,
) -> Any:
    """Flip and rotate images, all in the same way; the inputs stay as they are.

    Args:
        imgs: One or several images (h, w) or (h, w, c).
        hflip: Mirror horizontally with probability 1/2.
        rotation: Mirror vertically, and transpose, each with probability 1/2: with ``hflip`` all
            eight orientations are equally likely.
        flows: Optical flow (h, w, 2) in (x, y) order, transformed accordingly.
        return_status: Also return (hflip, vflip, rot90).

    Returns:
        The images, a list where several were given; then the flows, if given; then the status.
    """
    orientation = draw_orientation(hflip, rotation)

    def turn_flow(flow: np.ndarray) -> np.ndarray:
        hflip, vflip, rot90 = orientation
        signs = np.array([-1 if hflip else 1, -1 if vflip else 1], flow.dtype)
        flow = turn(flow, orientation) * signs
        return np.ascontiguousarray(flow[..., ::-1] if rot90 else flow)

    imgs = imgs if isinstance(imgs, list) else [imgs]
    result = [_unwrap([np.ascontiguousarray(turn(img, orientation)) for img in imgs])]
    if flows is not None:
        flows = flows if isinstance(flows, list) else [flows]
        result.append(_unwrap([turn_flow(flow) for flow in flows]))
    if return_status:
        result.append(orientation)
    return tuple(result) if len(result) > 1 else result[0]


def draw_orientation(hflip: bool, rotation: bool, rng: Any = random) -> tuple[bool, bool, bool]:
    """Draw (hflip, vflip, rot90) as for ``augment``."""
    hflip = hflip and rng.random() < 0.5
    vflip = rotation and rng.random() < 0.5
    rot90 = rotation and rng.random() < 0.5
    return hflip, vflip, rot90


def turn(img: np.ndarray, orientation: tuple[bool, bool, bool]) -> np.ndarray:
    """A view of ``img`` (h, w, …) in the orientation (hflip, vflip, rot90)."""
    hflip, vflip, rot90 = orientation
    img = img[:, ::-1] if hflip else img
    img = img[::-1] if vflip else img
    return img.swapaxes(0, 1) if rot90 else img


def turned_planes(
    img: np.ndarray,
    orientation: tuple[bool, bool, bool] = UPRIGHT,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """A copy of the planes (c, h, w), RGB, of an image (h, w, c), BGR or gray, turned by ``turn``.

    Args:
        out: Where to write them; default: a new array.
    """
    hflip, vflip, rot90 = orientation
    if out is None:
        height, width = img.shape[1::-1] if rot90 else img.shape[:2]
        out = np.empty((img.shape[2], height, width), img.dtype)
    planes = img.transpose(2, 0, 1)
    planes = planes[::-1] if len(planes) == 3 else planes
    if planes[0].size < _LARGE or not (hflip or rot90):
        out[:] = turn(planes.transpose(1, 2, 0), orientation).transpose(2, 0, 1)
        return out
    # numpy copies such views pixel by pixel; OpenCV does it by planes, in half the time.
    code = _FLIP_CODES.get((hflip, vflip))
    for i in range(len(planes)):
        plane = planes[i]
        if code is not None:
            plane = cv2.flip(plane, code, None if rot90 else out[i])
        if rot90:
            cv2.transpose(plane, out[i])
    return out


def img_rotate(
    img: np.ndarray,
    angle: float,
    center: tuple[float, float] | None = None,
    scale: float = 1.0,
) -> np.ndarray:
    """Rotate by ``angle`` degrees counter-clockwise about ``center`` (x, y), keeping the size."""
    from scipy.ndimage import affine_transform  # rarely needed, and slow to import

    height, width = img.shape[:2]
    center = (width // 2, height // 2) if center is None else center
    forward = np.vstack([cv2.getRotationMatrix2D(center, angle, scale), [0, 0, 1]])
    x_y = np.linalg.inv(forward)[:2]
    matrix, offset = x_y[::-1, 1::-1], x_y[::-1, 2]  # of rows and columns
    # Not cv2.warpAffine, which before OpenCV 5 interpolates at only 32 positions between pixels.
    planes = [
        affine_transform(plane, matrix, offset, output=np.float64, order=1, mode='grid-constant')
        for plane in np.atleast_3d(img).transpose(2, 0, 1).astype(np.float64)
    ]
    rotated = np.stack(planes, axis=2).reshape(img.shape)
    return (rotated if img.dtype.kind == 'f' else rotated.round()).astype(img.dtype)


def normalize(img: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """(img - mean) / std per channel of ``img`` (..., c, h, w)."""
    mean_, std_ = (torch.tensor(v, dtype=img.dtype).view(-1, 1, 1) for v in (mean, std))
    return (img - mean_) / std_

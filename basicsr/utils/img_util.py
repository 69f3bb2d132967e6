"""Convert images between files, numpy arrays (h, w, c) in BGR and tensors (c, h, w) in RGB."""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import MissingPackageError, NonFiniteError, UserError
from .image_header import as_stored, remarks
from .misc import atomic_path

logger = logging.getLogger(__name__)

# Limit on the size in the header of an image: a file of a few kilobytes may claim any.
_MOST_PIXELS = 2**28
os.environ.setdefault('OPENCV_IO_MAX_IMAGE_PIXELS', str(_MOST_PIXELS))  # read at the import
# OpenCV's warnings about damaged images do not name the file; the errors raised here do.
os.environ.setdefault('OPENCV_LOG_LEVEL', 'ERROR')

try:
    import cv2  # other modules import it from here, for the sake of the message below
except ImportError as error:
    raise MissingPackageError(
        f'OpenCV cannot be imported ({error}). Where libGL or libglib are missing, as on most '
        'servers, use the build without windows: pip uninstall -y opencv-python && '
        'pip install opencv-python-headless'
    ) from error

# The orientation tag of a photo is ignored: 'unchanged' images and LMDB files never follow it, and
# the two images of a pair must agree. ANYDEPTH keeps 16-bit images from being cut to 8 bits.
_AS_STORED = cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
_READ_FLAGS = {
    'color': cv2.IMREAD_COLOR | _AS_STORED,
    'grayscale': cv2.IMREAD_GRAYSCALE | _AS_STORED,
    'unchanged': cv2.IMREAD_UNCHANGED,
}
_WHITE = {'uint8': 255, 'uint16': 65535}
_TURNED = {  # by EXIF orientation: rotations by 90 degrees to the left, then a mirror image
    **{1: (0, False), 2: (0, True), 3: (2, False), 4: (2, True)},
    **{5: (3, True), 6: (3, False), 7: (1, True), 8: (1, False)},
}


def img2tensor(
    imgs: np.ndarray | Sequence[np.ndarray], bgr2rgb: bool = True, float32: bool = True
) -> Any:
    """Turn images into tensors that share no memory with them.

    Args:
        imgs: One image or a list of them, (h, w, c) or gray (h, w), of any dtype.
        bgr2rgb: Swap the first and third of 3 or 4 channels; other images keep their order.
        float32: Convert to float32; otherwise the dtype is kept. Values are never rescaled.

    Returns:
        A tensor (c, h, w), or a list of tensors for a list of images.
    """
    if not isinstance(imgs, np.ndarray):
        return [img2tensor(img, bgr2rgb, float32) for img in imgs]
    if imgs.ndim not in (2, 3):
        raise UserError(f'An image must be (h, w, c) or (h, w), got shape {imgs.shape}.')
    img = imgs if imgs.ndim == 3 else imgs[..., None]
    if bgr2rgb:
        img = _swap_red_and_blue(img)
    dtype = np.float32 if float32 else img.dtype
    return torch.from_numpy(np.array(img.transpose(2, 0, 1), dtype=dtype, order='C'))


def tensor2img(
    tensor: Tensor | Sequence[Tensor],
    rgb2bgr: bool = True,
    out_type: Any = np.uint8,
    min_max: tuple[float, float] = (0, 1),
) -> Any:
    """Turn tensors into images; the tensors are left as they are.

    Args:
        tensor: One tensor or a list of them, on any device and of any dtype: (c, h, w), (h, w) or
            (b, c, h, w), where a batch of several images becomes one picture with the images side
            by side in rows of int(sqrt(b)).
        rgb2bgr: Swap the first and third of 3 or 4 channels (RGBA to BGRA).
        out_type: ``np.uint8`` and ``np.uint16`` give rounded values up to 255 and 65535, a
            floating type gives [0, 1].
        min_max: Values that become black and white; those outside are clipped.

    Returns:
        Array (h, w, c), or (h, w) for one channel; a list of arrays for two tensors or more.

    Raises:
        FloatingPointError: There is NaN or infinity, which would become black or white.
    """
    if not isinstance(tensor, Tensor):
        images = [tensor2img(item, rgb2bgr, out_type, min_max) for item in tensor]
        return images[0] if len(images) == 1 else images

    black, white = min_max
    x = tensor.detach().float()
    finite = x.isfinite()
    if not finite.all():
        count = x.numel() - int(finite.sum())
        raise NonFiniteError(f'{count} of {x.numel()} values are not finite.')
    x = _as_one_picture((x.clamp(black, white) - black) / (white - black))
    dtype = np.dtype(out_type)
    if dtype.name in _WHITE:
        x = x.mul(_WHITE[dtype.name]).round()
    if dtype == np.uint8:
        x = x.to(torch.uint8)  # on the device, so that a quarter of the bytes travels
    img = x.permute(1, 2, 0).cpu().numpy().astype(dtype, copy=False)
    if img.shape[2] == 1:
        return np.ascontiguousarray(img[..., 0])
    return np.ascontiguousarray(_swap_red_and_blue(img) if rgb2bgr else img)


def tensor2img_fast(
    tensor: Tensor, rgb2bgr: bool = True, min_max: tuple[float, float] = (0, 1)
) -> np.ndarray:
    """Turn one tensor into a uint8 image: ``tensor2img``, under upstream's second name."""
    return tensor2img(tensor, rgb2bgr, np.uint8, min_max)


def imfrombytes(content: bytes, flag: str = 'color', float32: bool = False) -> np.ndarray:
    """Decode an image file that has been read into memory.

    The bit depth is that of the file, orientation tags are ignored, and colours are those stored,
    whatever the alpha. Of animations and files with several pages it is the first image.

    Args:
        content: The bytes of the file.
        flag: 'color' gives (h, w, 3) BGR: gray is repeated, alpha dropped; 'grayscale' gives
            (h, w); 'unchanged' gives what the file holds, (h, w), (h, w, 3) or BGRA (h, w, 4).
        float32: Return float32 in [0, 1]: 8-bit values divided by 255, 16-bit values by 65535.
            Images of floats, which must be in [0, 1], are float32 in any case.

    Raises:
        ValueError: The bytes are no complete image of a format that ``image_header`` names, or one
            of more than 2 ** 28 pixels, or of floats outside [0, 1].
    """
    if flag not in _READ_FLAGS:
        raise UserError(f'flag must be one of {", ".join(_READ_FLAGS)}, got {flag!r}.')
    if not content:
        raise UserError('The image is empty (0 bytes).')
    stored, is_float = as_stored(content)
    # With the other flags OpenCV gives floats only if they have the channels that are asked for.
    flags = _READ_FLAGS['unchanged' if is_float else flag]
    try:
        img = cv2.imdecode(np.frombuffer(stored, np.uint8), flags)
    except cv2.error as error:
        if 'CV_IO_MAX_IMAGE' in str(error):
            raise UserError(
                'The image claims to be larger than OpenCV reads. If it is, set the environment '
                f'variable OPENCV_IO_MAX_IMAGE_PIXELS, now '
                f'{os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"]}.'
            ) from error
        raise UserError(f'OpenCV cannot decode the image: {error}') from error
    if img is None:
        raise UserError(
            f'The {len(content)} bytes are no image that OpenCV can decode: truncated, damaged or '
            'of an unknown kind.'
        )
    if is_float:
        img = _in_unit_range(img, flag)
    if not float32:
        return img
    white = _WHITE.get(img.dtype.name, 1)
    img = img.astype(np.float32)
    img /= white
    return img


def _in_unit_range(img: np.ndarray, flag: str) -> np.ndarray:
    """A decoded float image with the channels that ``flag`` asks for, as float32.

    Raises:
        ValueError: A value is not in [0, 1]: nothing says which one is white.
    """
    low, high = float(img.min()), float(img.max())
    if not 0 <= low <= high <= 1:
        raise UserError(
            f'The values of a float image must be in [0, 1], and these are in [{low:g}, {high:g}]: '
            'divide them by the value of white, or save the image with 8 or 16 bits.'
        )
    img = img.astype(np.float32)
    if flag == 'grayscale' and img.ndim == 3:
        return cv2.cvtColor(img, cv2.COLOR_BGR2GRAY)
    if flag == 'color':
        return np.stack([img] * 3, axis=2) if img.ndim == 2 else np.ascontiguousarray(img[..., :3])
    return img


def read_unchanged(path: str | Path) -> np.ndarray:
    """Decode a file as ``imfrombytes`` with 'unchanged', and warn of what is dropped.

    Raises:
        FileNotFoundError: No such file.
        ValueError: As ``imfrombytes``.
    """
    # Not cv2.imread: it does not say why a file cannot be read, and rotates TIFFs.
    content = Path(path).read_bytes()
    img = imfrombytes(content, 'unchanged')
    for _, warning in remarks(content, img, skip=('depth',)):  # no values are lost here
        logger.warning(warning, path)
    return img


def upright(img: np.ndarray, orientation: int) -> np.ndarray:
    """Turn an image (h, w, ...) as its EXIF orientation (1 to 8) says, for who looks at it."""
    turns, is_mirrored = _TURNED[orientation]
    img = np.rot90(img, turns)
    return np.ascontiguousarray(img[:, ::-1] if is_mirrored else img)


def imwrite(
    img: np.ndarray,
    file_path: str | Path,
    params: Sequence[int] | None = None,
    auto_mkdir: bool = True,
) -> None:
    """Write an image, atomically.

    Args:
        img: (h, w), (h, w, 3) BGR or (h, w, 4) BGRA, uint8; PNG and TIFF also keep uint16. What a
            format cannot hold is rounded and clipped to [0, 255].
        file_path: Its extension names the format.
        params: Encoder settings, pairs of a ``cv2.IMWRITE_*`` number and a value.
        auto_mkdir: Make missing folders.

    Raises:
        OSError: The image cannot be encoded, or the file cannot be written; names the path.
    """
    path = Path(file_path)
    try:
        encoded, buffer = cv2.imencode(path.suffix, img, params or [])
    except cv2.error as error:
        raise OSError(f'Cannot write {path}: {error}') from error
    if not encoded:
        raise OSError(f'Cannot write {path}: OpenCV cannot encode {img.dtype} {img.shape}.')
    if auto_mkdir:
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, durable=False) as temporary:
        temporary.write_bytes(buffer.data)


def crop_border(imgs: Any, crop_border: int) -> Any:
    """Cut ``crop_border`` pixels off all four sides of an image (h, w, ...) or a list of images."""
    if isinstance(imgs, list | tuple):
        return [_crop(img, crop_border) for img in imgs]
    return _crop(imgs, crop_border)


def _crop(img: np.ndarray, border: int) -> np.ndarray:
    height, width = img.shape[:2]
    if border < 0 or 2 * border >= min(height, width):
        raise UserError(
            f'crop_border {border} leaves nothing of an image of {height} x {width} pixels '
            '(height x width): lower it.'
        )
    return img[border : height - border, border : width - border]


def _swap_red_and_blue(img: np.ndarray) -> np.ndarray:
    """A view of (h, w, c) with channels 0 and 2 swapped; unchanged unless c is 3 or 4."""
    if img.shape[2] == 3:
        return img[..., ::-1]
    return img[..., [2, 1, 0, 3]] if img.shape[2] == 4 else img


def _as_one_picture(x: Tensor) -> Tensor:
    """The picture (c, h, w) of a tensor with 2 to 4 dimensions."""
    if x.dim() == 2:
        return x[None]
    if x.dim() == 4 and len(x) == 1:
        return x[0]
    if x.dim() == 4:
        from torchvision.utils import make_grid  # slow to import, and seldom needed

        return make_grid(x, nrow=math.isqrt(len(x)))
    if x.dim() != 3:
        raise UserError(
            'A tensor must be (h, w), (c, h, w) or (b, c, h, w) to become an image, got shape '
            f'{tuple(x.shape)}.'
        )
    return x

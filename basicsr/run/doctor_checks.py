"""The checks of ``basicsr doctor`` on images and pairs, and their thresholds.

Each threshold was chosen so that photographs of published sets are not reported.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from basicsr.utils.forensics import (
    centre,
    jpeg_grid,
    jpeg_quality,
    perceptual_hash,
    replication,
    spectral_cutoff,
)
from basicsr.utils.image_header import has_alpha, has_palette, orientation
from basicsr.utils.img_util import imfrombytes
from basicsr.utils.pair_forensics import agreement, central_pair, pair_shift, reduced_by

# libjpeg's default is 75, and photographs with blocks of that quality are in published sets (one in
# Set5); below 70 the edges of blocks are plainly visible in smooth areas.
LOWEST_QUALITY = 70
# The spectrum of photographs drops by 5 to 15 dB at any frequency; after a bicubic enlargement by 2
# it is 17 or more, after a Lanczos one 23. A blur with a sigma of 1 pixel has the same effect.
LARGEST_DROP = 16.0
# In aligned pairs the measured shift is below 0.01; if the sampling grid is not centred as in GT,
# it is 1/4 (scale 2) to 3/8 (scale 4).
LARGEST_SHIFT = 0.1
# Rounding in another order makes a difference of 0.4 levels; the kernels differ by 0.8 and more.
LARGEST_RESIDUAL = 0.5
# At 16 x 16 pixels a pair has 0.95 even with strong noise and blur, unrelated images below 0.5.
LEAST_AGREEMENT = 0.7
UNKNOWN = 'unknown'
_SMALLEST = 16  # side of the smallest LQ that is compared
_SIDE = 512  # side of the part of a GT that is examined


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        title: Its name.
        is_error: Whether training cannot start with it.
        is_harmful: Whether such images go on the exclusion list.
        meaning: What it is, and its consequences.
    """

    title: str
    is_error: bool
    is_harmful: bool
    meaning: str


KINDS = {
    'unreadable': Kind(
        *('unreadable', True, True),
        'The file is missing, damaged, or of an unsupported format.',
    ),
    'wrong_size': Kind(
        *('wrong size', True, True),
        'GT is not exactly scale times as high and wide as LQ.',
    ),
    'too_small': Kind(
        *('too small', True, True),
        'GT is smaller than the crop gt_size, and pad_small is not set.',
    ),
    'unlike': Kind(
        *('unlike pair', False, True),
        f'LQ and GT show different pictures: their correlation is below {LEAST_AGREEMENT}.',
    ),
    'shifted': Kind(
        *('shifted pair', False, True),
        f'LQ is shifted against GT by more than {LARGEST_SHIFT} LQ pixels: a network learns to '
        'shift, and results are blurred.',
    ),
    'other_kernel': Kind(
        *('other kernel', False, True),
        'LQ was reduced with another kernel than most of the training set.',
    ),
    'jpeg': Kind(
        *('JPEG blocks', False, True),
        f'GT has the block grid of JPEG with a quality below {LOWEST_QUALITY}: a network learns to '
        'make blocks.',
    ),
    'upscaled': Kind(
        *('enlarged', False, True),
        f'The spectrum of GT drops by more than {LARGEST_DROP:g} dB at a fraction of the '
        'resolution, or its pixels are repeated: there is no detail to learn from.',
    ),
    'duplicate': Kind(
        *('duplicate', False, True), 'The image is also in the set under another name.'
    ),
    'leaked': Kind(
        *('in validation', False, True),
        'A training image is also in a validation set: scores are inflated.',
    ),
    'palette': Kind(
        *('palette', False, False), 'The file has at most 256 colours: banding and dithering.'
    ),
    'alpha': Kind(
        *('alpha', False, False),
        'The file has transparency, which is dropped; colours below it may be anything.',
    ),
    'deep': Kind(*('16 bits', False, False), 'The file has more than 8 bits per channel.'),
    'gray': Kind(
        *('gray', False, False), 'The image has no colour, and is repeated as three channels.'
    ),
    'rotated': Kind(
        *('rotated', False, False),
        'The EXIF orientation says that the image is rotated; it is used as it is stored.',
    ),
}


class Finding(NamedTuple):
    """Something that was found about an image.

    Attributes:
        kind: Key of ``KINDS``.
        path: Path of the image; empty if there is none.
        value: Severity, to sort by.
        text: The measured value, in words.
        images: Paths of the images to show, by 'gt', 'lq' or 'other'.
    """

    kind: str
    path: str
    value: float
    text: str
    images: dict[str, str]


class Demands(NamedTuple):
    """What a set must fulfil.

    Attributes:
        scale: Size of GT / size of LQ.
        gt_size: Side of the largest crop; 0: images are not cropped, or padded.
        is_training: Whether GT must have exactly ``scale`` times the size of LQ.
        is_gray: Whether images are read as gray or luma.
    """

    scale: int
    gt_size: int = 0
    is_training: bool = True
    is_gray: bool = False


class Examined(NamedTuple):
    """What was found in an image or pair, and the values by which sets are compared.

    Attributes:
        hash: Perceptual hash of GT; None if it would be noise.
        quality: JPEG quality that GT was once compressed with; None if it was not.
        kernels: Kernels that may have made LQ, best first; empty if there is no pair to examine.
    """

    findings: list[Finding]
    hash: int | None = None
    quality: float | None = None
    kernels: tuple[str, ...] = ()


def examine(
    paths: Mapping[str, str], read: Callable[[str, str], bytes | None], demands: Demands
) -> Examined:
    """Examine an image or a pair.

    Args:
        paths: Path of 'gt', of 'lq', or of both.
        read: Returns the bytes of a file, given its path and 'gt' or 'lq'.
    """
    found: list[Finding] = []
    images: dict[str, np.ndarray] = {}

    def add(kind: str, key: str, value: float, text: str) -> None:
        shown = dict(paths) if kind in ('unlike', 'shifted', 'other_kernel') else {key: paths[key]}
        whose = 'LQ: ' if key == 'lq' and 'gt' in paths else ''
        found.append(Finding(kind, paths[key], value, whose + text, shown))

    for key, path in paths.items():
        try:
            content = bytes(read(path, key) or b'')
            images[key] = imfrombytes(content)
        except (OSError, ValueError) as error:
            add('unreadable', key, 0.0, str(error))
            continue
        for kind, value, text in of_file(content, images[key], demands):
            if (kind, key) != ('gray', 'lq') or 'gt' not in paths:  # GT says it for both
                add(kind, key, value, text)
    gt, lq = images.get('gt'), images.get('lq')
    kernels, quality = (), None
    if gt is not None:
        for kind, value, text in of_gt(gt, demands):
            add(kind, 'gt', value, text)
        quality = quality_of(gt)
        if quality is not None and quality < LOWEST_QUALITY:
            add('jpeg', 'gt', 100 - quality, f'quality {quality:.0f}')
    if gt is not None and lq is not None:
        problems = list(of_pair(gt, lq, demands))
        for kind, value, text in problems:
            add(kind, 'gt', value, text)
        if not problems and demands.scale > 1:
            kernels = kernels_of(gt, lq, demands.scale)
    return Examined(found, None if gt is None else perceptual_hash(gt), quality, kernels)


Problem = tuple[str, float, str]  # kind, value, text


def of_file(content: bytes, img: np.ndarray, demands: Demands) -> Iterator[Problem]:
    """Problems of how a file is stored.

    Args:
        img: (h, w, 3).
    """
    if has_palette(content):
        yield 'palette', 0.0, 'a palette'
    if has_alpha(content):
        yield 'alpha', 0.0, 'transparency'
    if img.dtype != np.uint8:
        yield 'deep', 0.0, str(img.dtype)
    if not demands.is_gray and (img == img[..., :1]).all():
        yield 'gray', 0.0, 'no colour'
    if (turn := orientation(content)) > 1:
        yield 'rotated', 0.0, f'orientation {turn}'


def of_gt(gt: np.ndarray, demands: Demands) -> Iterator[Problem]:
    """Images too small for the crops, and resolution without detail."""
    if min(gt.shape[:2]) < demands.gt_size:
        text = f'{size(gt)}, gt_size {demands.gt_size}'
        yield 'too_small', float(demands.gt_size - min(gt.shape[:2])), text
    part = centre(gt, _SIDE)
    factor, (drop, place) = replication(part), spectral_cutoff(part)
    if factor > 1:
        yield 'upscaled', 100.0, f'pixels are repeated {factor} times'
    elif drop > LARGEST_DROP:
        yield 'upscaled', drop, f'{drop:.0f} dB at {place:.2f} of the resolution'


def quality_of(gt: np.ndarray) -> float | None:
    """Quality of the JPEG compression that an image has gone through, if it was not resized."""
    part = centre(gt, _SIDE)
    # Repeated pixels would look like blocks.
    grid = jpeg_grid(part) if replication(part) == 1 else None
    return None if grid is None else jpeg_quality(part, grid)


def of_pair(gt: np.ndarray, lq: np.ndarray, demands: Demands) -> Iterator[Problem]:
    """Whether the two images of a pair match."""
    scale = demands.scale
    excess = [g - length * scale for g, length in zip(gt.shape[:2], lq.shape[:2], strict=True)]
    # Outside training, the rows and columns of GT that make no whole LQ pixel are cut off.
    allowed = 1 if demands.is_training else scale
    if not all(0 <= e < allowed for e in excess):
        text = f'GT {size(gt)}, LQ {size(lq)}, scale {scale}'
        yield 'wrong_size', float(max(map(abs, excess))), text
        return
    gt = gt[: lq.shape[0] * scale, : lq.shape[1] * scale]
    if (alike := agreement(gt, lq)) < LEAST_AGREEMENT:
        yield 'unlike', 1 - alike, f'correlation {alike:.2f}'
        return
    down, right = pair_shift(*central_pair(gt, lq, scale), scale)
    if (distance := max(abs(down), abs(right))) > LARGEST_SHIFT:
        yield 'shifted', distance, f'{down:+.2f} down, {right:+.2f} right, in LQ pixels'


def kernels_of(gt: np.ndarray, lq: np.ndarray, scale: int) -> tuple[str, ...]:
    """Names of the kernels that may have made the LQ, best first, or only ``UNKNOWN``.

    Empty for images that are too small to tell.
    """
    if min(lq.shape[:2]) < _SMALLEST:
        return ()
    residuals = reduced_by(*central_pair(gt, lq, scale), scale)
    return tuple(name for name, r in residuals.items() if r < LARGEST_RESIDUAL) or (UNKNOWN,)


def size(img: Any) -> str:
    """Height x width, for messages."""
    return f'{img.shape[0]}x{img.shape[1]}'

"""Image forensics: find traces of JPEG compression and enlargement in pixels, and find copies.

Images are arrays (h, w) or (h, w, c) in BGR as they are stored: uint8, uint16, or floats in [0, 1].
Levels are 8-bit levels, from 0 to 255.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .img_util import cv2

# Luma of JPEG (BT.601, full range), in the order of BGR.
_LUMA = np.array([[0.114, 0.587, 0.299]], np.float32)
_DCT = cv2.dct(np.eye(8, dtype=np.float32), flags=cv2.DCT_ROWS).T.copy()  # row u: the u-th cosine
# Luminance table of T.81, annex K, which libjpeg scales by its quality.
_TABLE = np.array(
    [
        [16, 11, 10, 16, 24, 40],
        [12, 12, 14, 19, 26, 58],
        [14, 13, 16, 24, 40, 57],
        [14, 17, 22, 29, 51, 87],
        [18, 22, 37, 56, 68, 109],
        [24, 35, 55, 64, 81, 104],
    ]
)
_LARGEST_STEP = 80  # of the frequencies examined below, for qualities from 20 on
_FEW = 30  # with fewer coefficients nothing is concluded

_BINS = 40  # of a spectrum, up to half the sampling rate
_CUTOFFS = (1 / 4, 1 / 3, 1 / 2, 2 / 3)  # of enlargements by 4, 3, 2 and 3/2

_HASH_SIDE, _VERIFIED_SIDE = 32, 64
_BANDS = 8  # bytes of a hash


def luma(img: np.ndarray) -> np.ndarray:
    """Luma of an image, float32 (h, w) in levels, neither rounded nor clipped."""
    white = {'uint8': 1.0, 'uint16': 257.0}.get(img.dtype.name, 1 / 255)
    values = img.astype(np.float32) / np.float32(white)
    if values.ndim == 2 or values.shape[2] == 1:
        return values.reshape(img.shape[:2])
    return cv2.transform(values[..., :3], _LUMA)


def as_bytes(img: np.ndarray) -> np.ndarray:
    """An image with 8 bits per channel."""
    if img.dtype == np.uint8:
        return img
    white = np.iinfo(img.dtype).max if np.issubdtype(img.dtype, np.integer) else 1
    return np.rint(img.astype(np.float32) * (255 / white)).astype(np.uint8)


def centre(img: np.ndarray, side: int) -> np.ndarray:
    """The middle of an image, at most ``side`` high and wide; a view."""
    top, left = (max(length - side, 0) // 2 for length in img.shape[:2])
    return img[top : top + side, left : left + side]


def jpeg_grid(img: np.ndarray) -> tuple[int, int] | None:
    """Origin of the block grid of a JPEG compression (row, column, each 0 to 7); None if not found.

    At the true origin, blocks have more zero DCT coefficients than at the 63 others. Every pixel
    votes for the origin whose block around it has the most, and an origin is accepted if chance
    gives that many votes in less than one of 10 ** 6 images: the method of Nikoukhah et al., "ZERO:
    a Local JPEG Grid Origin Detector Based on the Number of DCT Zeros" (IPOL 2021),
    https://doi.org/10.5201/ipol.2021.390, with one test for the whole image.
    """
    y = np.ascontiguousarray(luma(img))
    if min(y.shape) < 32:
        return None
    zeros = _zeros_of_blocks(y)
    best, vote = _votes(zeros)
    counts = np.bincount(vote[(vote >= 0) & (best > 0)], minlength=64)
    # Blocks around neighbouring pixels overlap: only one in 64 is independent.
    number, share, chance = vote.size / 64, min(counts.max() / vote.size, 1 - 1e-9), 1 / 64
    # Images enlarged by 2 or 4 have similar blocks at 16 or 4 of the origins.
    second, most = np.partition(counts, -2)[-2:]
    if share <= chance or most < 2 * second:
        return None
    # Hoeffding's bound on the tail of a binomial distribution.
    information = share * math.log(share / chance)
    information += (1 - share) * math.log((1 - share) / (1 - chance))
    if math.log(64) - number * information > math.log(1e-6):
        return None
    row, column = divmod(int(counts.argmax()), 8)
    return row, column


def _zeros_of_blocks(y: np.ndarray) -> np.ndarray:
    """Number of AC coefficients below half a level, for the 8x8 block that starts at each pixel."""
    height, width = (length - 7 for length in y.shape)
    zeros = np.zeros((height, width), np.int16)
    for u in range(8):
        for v in range(8):
            if u or v:
                filtered = cv2.sepFilter2D(y, -1, _DCT[v], _DCT[u], anchor=(0, 0))
                zeros += np.abs(filtered[:height, :width]) < 0.5
    # Blocks that are constant along an axis are no evidence: they have zeros at any origin.
    for axis, size in ((1, (7, 8)), (0, (8, 7))):
        steps = np.abs(np.diff(y, axis=axis))
        change = cv2.boxFilter(steps, -1, size, anchor=(0, 0), normalize=False)
        zeros[change[:height, :width] < 1e-3] = 0
    return zeros


def _votes(zeros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel, the most zeros of a block around it, and that block's origin; -1 for ties."""
    height, width = (length - 7 for length in zeros.shape)
    best = np.full((height, width), -1, np.int16)
    vote = np.full((height, width), -1, np.int16)
    rows, columns = np.arange(7, 7 + height), np.arange(7, 7 + width)
    for place in range(64):
        top, left = divmod(place, 8)
        block = zeros[np.ix_(rows - (rows - top) % 8, columns - (columns - left) % 8)]
        vote[block == best] = -1
        vote[block > best] = place
        np.maximum(best, block, out=best)
    return best, vote


def jpeg_quality(img: np.ndarray, grid: tuple[int, int]) -> float | None:
    """Quality of the JPEG compression whose blocks begin at ``grid``, on libjpeg's scale.

    The DCT coefficients of the blocks are multiples of the quantization steps, which reveal the
    quality. Accurate to 2 for qualities from 20 to 95; None if there is too little evidence.
    """
    row, column = grid
    height, width = ((length - first) // 8 for length, first in zip(img.shape, grid, strict=False))
    area = slice(row, row + 8 * height), slice(column, column + 8 * width)
    y, values = luma(img)[area], img[area]
    white = np.iinfo(img.dtype).max if np.issubdtype(img.dtype, np.integer) else 1
    clipped = ((values <= 0) | (values >= white)).reshape(8 * height, 8 * width, -1).any(2)
    blocks = y.reshape(height, 8, width, 8).transpose(0, 2, 1, 3)
    whole = ~clipped.reshape(height, 8, width, 8).any((1, 3))
    coefficients = _DCT @ blocks[whole] @ _DCT.T
    factors = []
    for u in range(6):
        for v in range(6 - u):
            if (u or v) and (step := _quantization_step(coefficients[:, u, v])) > 1:
                factors.append(100 * step / _TABLE[u, v])
    if len(factors) < 2:
        return None
    factor = float(np.median(factors))
    return (200 - factor) / 2 if factor <= 100 else 5000 / factor


def _quantization_step(coefficients: np.ndarray) -> int:
    """The largest step of which the coefficients are multiples, up to the rounding of pixels."""
    values = np.abs(coefficients)
    values = values[values > 1]
    if len(values) < _FEW:
        return 0
    best = 1
    for step in range(2, _LARGEST_STEP):
        if np.mean(values < step / 2) > 0.05:
            break  # smaller ones exist
        error = np.abs(values - step * np.rint(values / step))
        # For arbitrary values it would be step / 4 on average.
        if error.mean() < step / 9 and np.mean(error < max(1, 0.15 * step)) > 0.9:
            best = step
    return best


def spectral_cutoff(img: np.ndarray) -> tuple[float, float]:
    """The sharpest drop of the power spectrum: a large one is the mark of an enlargement.

    The power along rows and along columns just below a frequency is compared with that above. In
    photographs it falls gradually; after an enlargement it ends where that of the smaller image
    did.

    Returns:
        The largest drop in dB, and its frequency as a share of half the sampling rate: 1/2 after
        an enlargement by 2.
    """
    y = luma(img)
    if min(y.shape) < 64:
        return 0.0, 1.0
    profile = 10 * np.log10(_spectrum(y) + 1e-9)
    place = (np.arange(_BINS) + 0.5) / _BINS
    drops = []
    for cutoff in _CUTOFFS:
        below = profile[(place > 0.6 * cutoff) & (place < 0.95 * cutoff)]
        above = profile[(place > 1.15 * cutoff) & (place < 1.7 * cutoff)]
        drops.append(float(below.mean() - above.mean()))
    best = int(np.argmax(drops))
    return drops[best], _CUTOFFS[best]


def _spectrum(y: np.ndarray) -> np.ndarray:
    """Mean power per coefficient along both axes, in squared levels, in ``_BINS`` bins."""
    window = np.outer(*(np.hanning(length) for length in y.shape))
    power = np.abs(np.fft.fft2((y - y.mean()) * window)) ** 2 / (window**2).sum()
    profile = np.zeros(_BINS)
    for values in (power, power.T):
        across, along = (2 * np.abs(np.fft.fftfreq(length)) for length in values.shape)
        line = values[across < 0.25].mean(0)
        bins = np.minimum((along * _BINS).astype(int), _BINS - 1)
        profile += np.bincount(bins, line, _BINS) / np.bincount(bins, minlength=_BINS) / 2
    return profile


def replication(img: np.ndarray) -> int:
    """Factor by which pixels are repeated, as by a nearest-neighbour enlargement.

    Returns:
        4, 3 or 2; 1 if they are not repeated.
    """
    for factor in (4, 3, 2):
        height, width = (length // factor * factor for length in img.shape[:2])
        whole = img[:height, :width]
        small = whole[::factor, ::factor]
        # An image of one colour repeats its pixels by any factor.
        if small.size and np.ptp(small) and np.array_equal(repeated(small, factor), whole):
            return factor
    return 1


def repeated(img: np.ndarray, factor: int) -> np.ndarray:
    """Repeat every pixel ``factor`` x ``factor`` times."""
    return img.repeat(factor, 0).repeat(factor, 1)


def perceptual_hash(img: np.ndarray) -> int | None:
    """A 64-bit hash of which resizing or compressing the image changes only a few bits.

    Each bit says whether one of the 64 lowest DCT frequencies, the constant left out, is above
    their median; the luma is first reduced to 32 x 32 pixels. None for an image without contrast,
    where the bits would be noise.
    """
    small = thumbnail(img, _HASH_SIDE)
    if small.std() < 2:
        return None
    values = cv2.dct(small)[_LOW]
    bits = values > np.median(values)
    return int.from_bytes(np.packbits(bits).tobytes(), 'big')


def _lowest(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the lowest frequencies of a DCT, without the constant."""
    places = sorted(np.ndindex(count, count), key=lambda place: (sum(place), place))[1 : count + 1]
    rows, columns = zip(*places, strict=True)
    return np.array(rows), np.array(columns)


_LOW = _lowest(64)


def thumbnail(img: np.ndarray, side: int) -> np.ndarray:
    """Luma of an image, reduced to ``side`` x ``side`` whatever its shape."""
    return cv2.resize(luma(img), (side, side), interpolation=cv2.INTER_AREA)


def similar_pairs(hashes: Sequence[int], most: int = 7) -> Iterator[tuple[int, int]]:
    """Indices of hashes that differ in at most ``most`` bits, the smaller index first, sorted.

    Hashes of 8 bytes that differ in 7 bits have a byte in common: only those are compared. The
    first of several equal hashes stands for them, so that many copies make as many pairs.
    """
    if most >= _BANDS:
        raise ValueError(f'most must be below {_BANDS}, got {most}.')
    values, first, which = np.unique(
        np.array(hashes, np.uint64), return_index=True, return_inverse=True
    )
    found = {(int(first[w]), index) for index, w in enumerate(which) if first[w] != index}
    for band in range(_BANDS):
        byte = (values >> np.uint64(8 * band)) & np.uint64(255)
        for bucket in (np.flatnonzero(byte == value) for value in range(256)):
            for place, index in enumerate(bucket):
                others = bucket[place + 1 :]
                near = others[np.bitwise_count(values[others] ^ values[index]) <= most]
                pairs = ((int(first[index]), int(first[other])) for other in near)
                found.update((min(pair), max(pair)) for pair in pairs)
    yield from sorted(found)


def is_copy(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two images show the same content, by the correlation of their 64 x 64 thumbnails.

    The threshold of 0.98 tolerates JPEG at a quality of 30 and resizing, but not another moment of
    the same scene.
    """
    pixels = [thumbnail(img, _VERIFIED_SIDE).ravel() for img in (one, two)]
    return float(np.corrcoef(*pixels)[0, 1]) > 0.98

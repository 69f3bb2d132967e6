"""Read from image headers what OpenCV does not report, or applies without being asked."""

import re
import struct
from collections.abc import Container, Iterator
from typing import Literal, NamedTuple

import numpy as np

from .errors import UserError

_FORMATS = re.compile(
    rb'\x89PNG\r\n\x1a\n|\xff\xd8\xff|BM|II[*+]\0|MM\0[*+]|RIFF.{4}WEBP|P[1-6]\s', re.DOTALL
)
_TEXT_OF_PNM = re.compile(rb'P[123]\s')
# Magic number, width, height, and the value of white, with comments between them.
_WHITE_OF_PNM = re.compile(rb'P[2356](?:(?:\s|#[^\n]*\n)+(\d+)){3}')

# JPEG's frame markers, which hold the size of the image (T.81, table B.1).
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
# JPEG needs at least one bit per 64 pixels: 512 pixels per byte, with a factor of 2 to spare.
_MOST_PIXELS_PER_BYTE = 1024

# Tags of TIFF 6.0, and the bytes that a value takes by its type (BigTIFF has 8 as well).
_BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _EXTRA, _KIND = 258, 262, 274, 277, 338, 339
_PLANES = 284
_TAGS = (_BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _PLANES, _EXTRA, _KIND)
_NEXT_PAGE = 0  # no tag
_SIZES = {1: 1, 3: 2, 4: 4, 6: 1, 8: 2, 9: 4, 16: 8, 17: 8}
_KINDS = {1: 'unsigned', 2: 'signed', 3: 'float', 4: 'unsigned'}  # 4: unknown
_FLOAT, _PALETTE, _SEPARATED = 3, 3, 5


class _Field(NamedTuple):
    """The first value of a tag, and the bytes that hold it."""

    value: int
    place: int
    size: int


def as_stored(content: bytes) -> tuple[bytes | bytearray, bool]:
    """The file without the tags that make OpenCV alter its pixels, and whether they are floats.

    OpenCV rotates a TIFF by its orientation and multiplies it by its alpha, whatever the flags.

    Raises:
        ValueError: The format is not one that a dataset reads, OpenCV would not read this kind of
            TIFF or BMP as stored, or a JPEG file is far too small for its number of pixels.
    """
    if not _FORMATS.match(content):
        raise UserError(
            f'The {len(content)} bytes are not a PNG, JPEG, BMP, TIFF, WebP, PGM or PPM image.'
        )
    if not _is_tiff(content):
        _check_jpeg(content)
        _check_bmp(content)
        # OpenCV takes the last number of a text for cut off if nothing follows it.
        is_text = _TEXT_OF_PNM.match(content) and content[-1:].isdigit()
        return content + b'\n' if is_text else content, False
    fields = _read_tiff(content)
    _check_tiff(fields)
    altered = [fields[tag] for tag in (_ORIENTATION, _EXTRA) if _value(fields, tag) > 1]
    if not altered:
        return content, _value(fields, _KIND) == _FLOAT
    stored = bytearray(content)
    for _, place, size in altered:
        stored[place : place + size] = (1).to_bytes(size, _byte_order(content))
    return stored, _value(fields, _KIND) == _FLOAT


def remarks(
    content: bytes, img: np.ndarray, skip: Container[str] = ()
) -> Iterator[tuple[str, str]]:
    """Warnings about what decoding drops from a file, or may misinterpret.

    Args:
        skip: Kinds not to look for.

    Yields:
        A kind (alpha, frames, depth) and a warning, with %s for the name of the image.
    """
    if 'alpha' not in skip and img.shape[2:] != (4,) and has_alpha(content):
        yield 'alpha', 'Transparency is dropped, the colours are used as stored: %s'
    if 'frames' not in skip and has_more_frames(content):
        yield 'frames', 'Only the first frame or page is used: %s'
    if 'depth' not in skip and (white := _possible_white(content, img)):
        divisor = np.iinfo(img.dtype).max
        yield (
            'depth',
            f'No value is above {white}, and all are divided by {divisor}. If {white} is meant as '
            f'white, multiply the values by {divisor / white:g} and store them again: %s',
        )


def has_alpha(content: bytes) -> bool:
    """Whether an image file holds transparency: an alpha channel, or a transparent colour."""
    if content.startswith(b'\x89PNG'):
        return content[25:26] in (b'\4', b'\6') or b'tRNS' in content[: content.find(b'IDAT')]
    if content.startswith(b'RIFF'):
        if content[12:16] == b'VP8L' and len(content) > 24:
            return bool(content[24] & 0x10)
        return _has_webp_flag(content, 0x10)
    if content.startswith(b'BM'):  # an alpha mask, from the third version of the header on
        return content[28:30] == b'\x20\0' and content[14] >= 56 and any(content[66:70])
    if not _is_tiff(content):
        return False
    fields = _read_tiff(content)
    is_more_than_colour = _value(fields, _SAMPLES, 1) in (2, 4)
    return _value(fields, _EXTRA) in (1, 2) or (
        is_more_than_colour and _value(fields, _PHOTOMETRIC) != _SEPARATED
    )


def has_palette(content: bytes) -> bool:
    """Whether the pixels of an image file are indices into a palette of at most 256 colours."""
    if content.startswith(b'\x89PNG'):
        return content[25:26] == b'\3'
    if content.startswith(b'BM'):
        return 0 < int.from_bytes(content[28:30], 'little') <= 8
    return _is_tiff(content) and _value(_read_tiff(content), _PHOTOMETRIC) == _PALETTE


def orientation(content: bytes) -> int:
    """The orientation tag of an image file (EXIF 2.3, tag 274): 1 upright, up to 8; 1 if none."""
    if content.startswith(b'\x89PNG'):
        place = content.find(b'eXIf', 0, content.find(b'IDAT')) + 4
    elif content.startswith(b'RIFF'):
        place = content.rfind(b'EXIF') + 8 if _has_webp_flag(content, 0x08) else 0
    elif content.startswith(b'\xff\xd8'):
        place = content.find(b'Exif\0\0', 0, 2**16) + 6
    else:
        place = 0
    exif = content[place : place + 2**16] if place > 8 else content
    found = _value(_read_tiff(exif), _ORIENTATION, 1) if _is_tiff(exif) else 1
    return found if 1 <= found <= 8 else 1


def has_more_frames(content: bytes) -> bool:
    """Whether an image file is an animation (PNG, WebP) or has several pages (TIFF)."""
    if content.startswith(b'\x89PNG'):
        place = content.find(b'acTL', 0, content.find(b'IDAT'))
        return place > 0 and int.from_bytes(content[place + 4 : place + 8], 'big') > 1
    if content.startswith(b'RIFF'):
        return _has_webp_flag(content, 0x02)
    return _is_tiff(content) and _read_tiff(content)[_NEXT_PAGE].value > 0


def _has_webp_flag(content: bytes, flag: int) -> bool:
    return content[12:16] == b'VP8X' and len(content) > 20 and bool(content[20] & flag)


def _possible_white(content: bytes, img: np.ndarray) -> int:
    """The value that may be meant as white if it is below the maximum of the type; else 0."""
    pnm = _WHITE_OF_PNM.match(content)
    if pnm and int(pnm[1]) < np.iinfo(img.dtype).max:
        return int(pnm[1])
    bits = int(img.max()).bit_length() if img.dtype == np.uint16 else 0
    return 2**bits - 1 if 0 < bits < 15 else 0  # cameras have up to 14


def _check_jpeg(content: bytes) -> None:
    """Refuse a JPEG file that is far too small for its pixels: OpenCV would fill in the rest."""
    place = 2 if content[:2] == b'\xff\xd8' else len(content)
    while place + 9 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker in _FRAMES:
            height = int.from_bytes(content[place + 5 : place + 7], 'big')
            width = int.from_bytes(content[place + 7 : place + 9], 'big')
            if height * width > _MOST_PIXELS_PER_BYTE * len(content):
                raise UserError(
                    f'{len(content)} bytes are not a JPEG image of {height} x {width} pixels '
                    '(height x width): truncated or damaged.'
                )
            return
        # The length of a segment follows its marker; fill bytes may precede one.
        length = 2 + int.from_bytes(content[place + 2 : place + 4], 'big')
        place += 1 if marker == 0xFF else length


def _check_bmp(content: bytes) -> None:
    """Refuse a BMP file whose bit masks order the channels in a way that OpenCV ignores."""
    is_bmp, kind = content.startswith(b'BM'), int.from_bytes(content[30:34], 'little')
    if is_bmp and content[28:30] == b'\x20\0' and kind in (3, 6):  # BI_BITFIELDS
        masks = struct.unpack_from('<3I', content.ljust(66, b'\0'), 54)
        if masks != (0xFF0000, 0xFF00, 0xFF):
            raise UserError(
                f'A BMP with the bit masks {", ".join(f"{mask:08x}" for mask in masks)} for red, '
                'green and blue is not read as it is stored: save it as PNG.'
            )


def _is_tiff(content: bytes) -> bool:
    return content[:4] in (b'II*\0', b'II+\0', b'MM\0*', b'MM\0+')


def _byte_order(content: bytes) -> Literal['little', 'big']:
    return 'little' if content[:2] == b'II' else 'big'


def _read_tiff(content: bytes) -> dict[int, _Field]:
    """The tags of the first page; what lies beyond the end of the file is 0."""
    order = _byte_order(content)

    def number(place: int, size: int) -> int:
        return int.from_bytes(content[place : place + size], order)

    is_big = 43 in content[2:4]  # BigTIFF, with offsets and counts of 64 bits
    start, word, counter = (8, 8, 8) if is_big else (4, 4, 2)
    page = number(start, word)
    entry = struct.Struct(('<' if order == 'little' else '>') + ('HHQ8x' if is_big else 'HHI4x'))
    first = page + counter
    end = first + entry.size * min(number(page, counter), 0xFFFF)  # libtiff rejects more
    fields = {_NEXT_PAGE: _Field(number(end, word), end, word)}
    whole = max(min(end, len(content)) - first, 0) // entry.size * entry.size
    entries = entry.iter_unpack(content[first : first + whole])
    for index, (tag, kind, count) in enumerate(entries):
        if tag not in _TAGS or tag in fields:  # of a repeated tag libtiff takes the first
            continue
        size, place = _SIZES.get(kind, 0), first + (index + 1) * entry.size - word
        if size * count > word:
            place = number(place, word)
        fields[tag] = _Field(number(place, size), place, size)
    return fields


def _value(fields: dict[int, _Field], tag: int, default: int = 0) -> int:
    return fields[tag].value if tag in fields else default


def _check_tiff(fields: dict[int, _Field]) -> None:
    """Refuse what OpenCV reads with other values than those stored, or not at all."""
    bits, samples = _value(fields, _BITS, 1), _value(fields, _SAMPLES, 1)
    kind = _KINDS.get(_value(fields, _KIND, 1), 'unknown')
    is_readable = bits <= 16 if kind == 'unsigned' else kind == 'float' and bits in (32, 64)
    # Black and white are swapped (photometric 0) only in 8 bits, and 16-bit gray with alpha
    # is reduced to 8.
    photometric = _value(fields, _PHOTOMETRIC)
    is_plain = photometric in (1, 2) and samples in (1, 3, 4)
    # Separate planes are read as interleaved above 8 bits.
    is_plain = is_plain and (samples == 1 or _value(fields, _PLANES, 1) == 1)
    # CIELab and the like, from 8 on, are converted to RGB by OpenCV's own formulas.
    if not is_readable or not (is_plain or (bits <= 8 and photometric <= 6)):
        raise UserError(
            f'A TIFF of {bits}-bit {kind} values, {samples} a pixel, photometric '
            f'{_value(fields, _PHOTOMETRIC)}, is not read as it is stored. Save it as gray or RGB '
            'of 8 or 16 bits, or of 32-bit floats in [0, 1].'
        )

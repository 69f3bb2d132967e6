import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image
from tiff import tiff

from basicsr.utils.image_header import (
    as_stored,
    has_alpha,
    has_more_frames,
    has_palette,
    orientation,
    remarks,
)
from basicsr.utils.img_util import imfrombytes, read_unchanged

RNG = np.random.default_rng(0)
FLAGS = ('color', 'grayscale', 'unchanged')
RGB = np.array([[[200, 120, 40], [1, 2, 3]], [[4, 5, 6], [7, 8, 9]], [[9, 8, 7], [60, 50, 40]]])


def encode(extension, img, *params):
    return cv2.imencode(extension, img, params)[1].tobytes()


def with_alpha(img, alpha):
    return np.concatenate([img, np.full((*img.shape[:2], 1), alpha)], axis=2)


def animation(path, *values):
    frames = cv2.Animation()
    frames.frames = [np.full((8, 8, 3), value, np.uint8) for value in values]
    frames.durations = np.full(len(values), 100)
    assert cv2.imwriteanimation(str(path), frames)
    return path.read_bytes()


# orientation


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize(('order', 'big'), [('<', False), ('>', False), ('<', True), ('>', True)])
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.float32])
def test_tiffs_are_read_as_stored_whatever_their_orientation(orientation, order, big, dtype):
    img = (RGB * {np.uint8: 1, np.uint16: 257, np.float32: 1 / 255}[dtype]).astype(dtype)
    content = tiff(img, order, big, orientation=orientation)
    gray = imfrombytes(tiff(img, order, big), 'grayscale')
    for flag, wanted in zip(FLAGS, (img[..., ::-1], gray, img[..., ::-1]), strict=True):
        out = imfrombytes(content, flag)
        assert out.dtype == dtype and np.array_equal(out, wanted)


def test_gray_tiffs_and_other_types_of_the_tag_are_read_as_stored():
    gray = RGB[..., :1].astype(np.uint8)
    content = tiff(gray, orientation=6)
    entry = content.index(struct.pack('<HH', 274, 3))
    as_long = content[: entry + 2] + struct.pack('<HII', 4, 1, 6) + content[entry + 12 :]
    for file in (content, as_long):
        assert np.array_equal(imfrombytes(file, 'unchanged'), gray[..., 0])


@pytest.mark.parametrize('extension', ['.png', '.webp', '.jpg'])
def test_orientation_beside_the_pixels_turns_no_other_format(extension):
    exif = b'II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0'
    content = encode(extension, np.zeros((16, 32, 3), np.uint8), cv2.IMWRITE_WEBP_QUALITY, 101)
    if extension == '.png':
        chunk = struct.pack('>I', len(exif)) + b'eXIf' + exif
        content = content[:33] + chunk + struct.pack('>I', zlib.crc32(chunk[4:])) + content[33:]
    elif extension == '.webp':
        sizes = (31).to_bytes(3, 'little') + (15).to_bytes(3, 'little')
        chunks = b'VP8X\x0a\0\0\0\x08\0\0\0' + sizes + content[12:]
        chunks += b'EXIF' + struct.pack('<I', len(exif)) + exif
        content = b'RIFF' + struct.pack('<I', 4 + len(chunks)) + b'WEBP' + chunks
    else:
        marker = struct.pack('>HH', 0xFFE1, len(exif) + 8) + b'Exif\0\0' + exif
        content = content[:2] + marker + content[2:]
    for flag in FLAGS:
        assert imfrombytes(content, flag).shape[:2] == (16, 32)


def test_a_file_without_such_tags_is_not_copied():
    content = tiff(RGB.astype(np.uint8), orientation=1)
    assert as_stored(content)[0] is content
    assert as_stored(tiff(RGB.astype(np.uint8), orientation=6))[0] == content


# alpha


@pytest.mark.parametrize('kind', [None, 0, 1, 2])
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_colours_under_alpha_are_those_stored(kind, dtype):
    white = 1 if dtype == np.uint8 else 257
    rgba = (with_alpha(RGB, 128) * white).astype(dtype)
    content = tiff(rgba, extra=kind)
    bgra = rgba[..., [2, 1, 0, 3]]
    assert imfrombytes(content)[0, 0].tolist() == [40 * white, 120 * white, 200 * white]
    assert np.array_equal(imfrombytes(content), bgra[..., :3])
    assert np.array_equal(imfrombytes(content, 'unchanged'), bgra)
    opaque = imfrombytes(tiff(rgba[..., :3].copy()), 'grayscale')
    assert np.array_equal(imfrombytes(content, 'grayscale'), opaque)


def test_all_formats_have_one_rule_for_alpha():
    bgra = with_alpha(RGB[..., ::-1], 128).astype(np.uint8)
    lossless = (cv2.IMWRITE_WEBP_QUALITY, 101)
    files = [encode('.png', bgra), encode('.webp', bgra, *lossless), tiff(bgra[..., [2, 1, 0, 3]])]
    for content in files:
        assert np.array_equal(imfrombytes(content), bgra[..., :3])
        assert np.array_equal(imfrombytes(content, 'unchanged'), bgra)


def test_transparency_is_told_from_the_header():
    rgb = RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    rgba = with_alpha(rgb, 128).astype(np.uint8)
    bitmap = bytearray(70) + b'\0' * 80
    bitmap[:2], bitmap[14], bitmap[28], bitmap[66:70] = b'BM', 108, 32, b'\0\0\0\xff'
    extended = b'RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\x10'
    for content in (
        *(
            encode('.png', rgba),
            encode('.webp', rgba),
            encode('.webp', rgba, cv2.IMWRITE_WEBP_QUALITY, 90),
            extended,
        ),
        *(tiff(rgba, extra=1), tiff(rgba, '>', True, extra=2), tiff(rgba), bytes(bitmap)),
        *(tiff(rgba[..., :2].copy()), tiff(rgba[..., :2].copy(), extra=2)),
    ):
        assert has_alpha(content)
    for content in (
        *(encode(name, rgb) for name in ('.png', '.jpg', '.bmp', '.webp', '.tif', '.ppm')),
        *(encode('.png', rgb[..., 0]), encode('.png', rgb) + b'tRNS', tiff(rgba, photometric=5)),
        *(tiff(rgb), tiff(rgb[..., :1].copy()), encode('.png', rgba)[:12], b'', b'RIFF', b'II*\0'),
    ):
        assert not has_alpha(content)


# floats


def test_floats_have_the_channels_that_are_asked_for():
    rgb = RNG.random((4, 5, 3), np.float32)
    bgr = rgb[..., ::-1]
    luma = cv2.cvtColor(np.ascontiguousarray(bgr), cv2.COLOR_BGR2GRAY)
    for img in (rgb, rgb.astype(np.float64), with_alpha(rgb, 0.5).astype(np.float32)):
        content = tiff(img)
        np.testing.assert_allclose(imfrombytes(content), bgr)
        np.testing.assert_allclose(imfrombytes(content, 'grayscale'), luma, atol=1e-6)
        assert imfrombytes(content, 'unchanged').shape == img.shape
        assert imfrombytes(content).dtype == np.float32
    gray = tiff(rgb[..., :1].copy())
    assert np.array_equal(imfrombytes(gray), np.repeat(rgb[..., :1], 3, axis=2))
    assert np.array_equal(imfrombytes(gray, 'grayscale'), rgb[..., 0])
    assert np.array_equal(imfrombytes(gray, 'unchanged', float32=True), rgb[..., 0])


@pytest.mark.parametrize(
    ('low', 'high', 'message'),
    [(0, 255, r'\[0, 255\]'), (-0.25, 1, r'\[-0.25, 1\]'), (0, np.nan, 'nan'), (0, np.inf, 'inf')],
)
@pytest.mark.parametrize('flag', FLAGS)
def test_floats_outside_their_range_are_refused_with_it(low, high, message, flag):
    img = np.zeros((4, 5, 3), np.float32)
    img[0, 0, 0], img[-1, -1, -1] = low, high
    with pytest.raises(ValueError, match=rf'float image must be in \[0, 1\].*{message}'):
        imfrombytes(tiff(img), flag)


@pytest.mark.parametrize(
    ('dtype', 'channels', 'tags', 'message'),
    [
        (np.float16, 3, {}, '16-bit float values, 3 a pixel'),
        (np.int8, 1, {}, '8-bit signed values, 1 a pixel'),
        (np.int16, 3, {}, '16-bit signed values'),
        (np.uint32, 3, {}, '32-bit unsigned values'),
        (np.float32, 2, {}, '32-bit float values, 2 a pixel'),
        (np.uint16, 2, {}, '16-bit unsigned values, 2 a pixel'),
        (np.uint16, 1, {'photometric': 0}, 'photometric 0'),
    ],
)
@pytest.mark.parametrize('flag', FLAGS)
def test_kinds_of_tiff_that_would_be_read_wrong_are_named(dtype, channels, tags, message, flag):
    content = tiff(np.ones((4, 5, channels), dtype), **tags)
    with pytest.raises(ValueError, match=f'{message}.*is not read as it is stored'):
        imfrombytes(content, flag)


def test_other_formats_than_those_of_datasets_are_refused():
    rgba = b'P7\nWIDTH 1\nHEIGHT 1\nDEPTH 4\nMAXVAL 255\nTUPLTYPE RGB_ALPHA\nENDHDR\n\1\2\3\4'
    for content in (rgba, encode('.pfm', np.ones((2, 2, 3), np.float32)), b'GIF89a'):
        with pytest.raises(ValueError, match='are not a PNG, JPEG, BMP, TIFF, WebP, PGM or PPM'):
            imfrombytes(content)


# frames and values


def test_animations_and_pages_are_told_from_the_header(tmp_path):
    img = np.full((8, 8, 3), 50, np.uint8)
    several = [animation(tmp_path / name, 50, 150) for name in ('a.png', 'a.webp')]
    several += [tiff(img, pages=2), tiff(img, '>', True, pages=2)]
    for content in several:
        assert has_more_frames(content)
        assert np.unique(imfrombytes(content)).tolist() == [50]
    for name in ('.png', '.webp', '.tif', '.jpg', '.bmp', '.ppm'):
        assert not has_more_frames(encode(name, img))
    assert not has_more_frames(tiff(img)) and not has_more_frames(b'')


def kinds(content, flag='color', skip=()):
    return [kind for kind, _ in remarks(content, imfrombytes(content, flag), skip)]


@pytest.mark.parametrize('bits', [8, 10, 12, 14])
def test_values_of_fewer_bits_in_16_are_remarked_on(bits):
    img = np.full((4, 5), 2**bits - 1, np.uint16)
    for content in (encode('.png', img), tiff(img[..., None]), encode('.pgm', img)):
        (remark,) = remarks(content, imfrombytes(content))
        assert remark[0] == 'depth'
        assert f'No value is above {2**bits - 1}, and all are divided by 65535' in remark[1]
        assert kinds(content, skip={'depth'}) == []


def test_values_that_use_their_range_are_not_remarked_on():
    for img in (np.uint16([[40000]]), np.uint16([[0]]), np.uint8([[3]])):
        assert kinds(encode('.png', img)) == [] == kinds(encode('.pgm', img))
    assert kinds(tiff(np.full((2, 2, 1), 0.01, np.float32))) == []


def test_the_white_that_a_pgm_names_is_heeded():
    (remark,) = remarks(b'P5 # x\n1 1 # y\n15\n\3', np.uint8([[3]]))
    assert remark[0] == 'depth' and 'No value is above 15' in remark[1] and 'by 17' in remark[1]


def test_alpha_that_is_kept_is_not_remarked_on():
    content = encode('.png', with_alpha(RGB, 128).astype(np.uint8))
    assert kinds(content) == ['alpha'] and kinds(content, 'unchanged') == []
    assert kinds(tiff(RGB[..., :2].astype(np.uint8)), 'unchanged') == ['alpha']


def test_what_a_script_leaves_out_is_said(tmp_path, caplog):
    path = tmp_path / 'a.tif'
    path.write_bytes(tiff(np.full((4, 4, 1), 700, np.uint16), pages=2, orientation=6))
    assert read_unchanged(path).tolist() == [[700] * 4] * 4
    assert [r.getMessage() for r in caplog.records] == [
        f'Only the first frame or page is used: {path}'
    ]


# damage


@pytest.mark.parametrize('progressive', [0, 1])
@pytest.mark.parametrize('percent', [30, 60, 80, 95, 99])
def test_a_truncated_jpeg_is_refused(percent, progressive):
    img = RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    content = encode('.jpg', img, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive)
    for flag in FLAGS:
        assert imfrombytes(content + b'\0' * 9, flag).shape[:2] == (128, 128)
        with pytest.raises(ValueError, match='truncated'):
            imfrombytes(content[: len(content) * percent // 100], flag)


def test_damaged_tiffs_are_refused_without_another_error():
    content = tiff(RGB.astype(np.uint8), orientation=6)
    for length in range(4, len(content) - 4, 7):  # at the end stands where the next page is
        with pytest.raises(ValueError, match=f'The {length} bytes are no image that OpenCV can'):
            imfrombytes(content[:length])
    refused = 0
    for place in range(4, len(content)):
        damaged = content[:place] + b'\xff' + content[place + 1 :]
        has_alpha(damaged), has_more_frames(damaged)
        try:
            imfrombytes(damaged)
        except ValueError as error:
            assert 'are no image that OpenCV can' in str(error) or 'A TIFF of ' in str(error)
            refused += 1
    assert 40 < refused < len(content) - 4, 'some bytes are only pixels'


@pytest.mark.parametrize('flag', FLAGS)
@pytest.mark.parametrize('dtype', [np.uint16, np.float32])
def test_planes_one_after_the_other_are_refused_above_8_bits(dtype, flag):
    img = np.zeros((3, 4, 3), dtype)
    assert imfrombytes(tiff(img, planes=1), flag) is not None
    with pytest.raises(ValueError, match='not read as it is stored'):
        imfrombytes(tiff(img, planes=2), flag)
    gray = np.zeros((3, 4, 1), dtype)
    assert imfrombytes(tiff(gray, planes=2), 'grayscale') is not None


def test_colour_spaces_that_opencv_would_convert_are_refused():
    with pytest.raises(ValueError, match='photometric 8'):
        imfrombytes(tiff(np.zeros((3, 4, 3), np.uint8), photometric=8))


def bitmap(red, green, blue):
    """A BMP of one row of 32-bit pixels, with bit masks."""
    header = struct.pack('<IiiHHIIiiII', 40, 2, 1, 1, 32, 3, 8, 0, 0, 0, 0)
    body = header + struct.pack('<3I', red, green, blue) + bytes(range(8))
    return b'BM' + struct.pack('<IHHI', 14 + len(body), 0, 0, 14 + len(body) - 8) + body


def test_a_bitmap_whose_masks_give_another_order_of_channels_is_refused():
    usual = imfrombytes(bitmap(0xFF0000, 0xFF00, 0xFF))
    assert usual[0].tolist() == [[0, 1, 2], [4, 5, 6]]
    with pytest.raises(ValueError, match='bit masks 000000ff, 0000ff00, 00ff0000'):
        imfrombytes(bitmap(0xFF, 0xFF00, 0xFF0000))


@pytest.mark.parametrize(
    ('text', 'pixels'),
    [(b'P2 2 1 255 1 23', [[1, 23]]), (b'P3\n1 1\n255\n1 2 30', [[[30, 2, 1]]])],
)
def test_a_text_of_numbers_needs_no_line_break_at_its_end(text, pixels):
    assert imfrombytes(text, 'unchanged').tolist() == pixels
    with pytest.raises(ValueError, match='truncated'):
        imfrombytes(text[: text.rindex(b' ')], 'unchanged')


# what a file says of itself


@pytest.mark.parametrize('turn', [1, 3, 6, 8])
@pytest.mark.parametrize('kind', ['PNG', 'JPEG', 'WEBP', 'TIFF'])
def test_the_orientation_is_read_wherever_a_format_has_it(kind, turn):
    img = Image.fromarray(RNG.integers(0, 256, (16, 32, 3), dtype=np.uint8))
    exif = img.getexif()
    exif[274] = turn
    file = io.BytesIO()
    img.save(file, kind, exif=exif)
    assert orientation(file.getvalue()) == turn


@pytest.mark.parametrize('order', '<>')
def test_the_orientation_of_a_tiff_is_read_in_both_byte_orders(order):
    assert orientation(tiff(RGB.astype(np.uint8), order, orientation=5)) == 5
    assert orientation(tiff(RGB.astype(np.uint8), order, orientation=9)) == 1


@pytest.mark.parametrize('extension', ['.png', '.jpg', '.webp', '.bmp', '.tif', '.ppm'])
def test_files_without_the_tag_or_a_palette_are_upright_and_in_colour(extension):
    content = encode(extension, RNG.integers(0, 256, (16, 32, 3), dtype=np.uint8))
    assert orientation(content) == 1
    assert not has_palette(content)
    for length in (0, 4, 12, 30):  # cut off
        assert orientation(content[:length]) == 1
        assert not has_palette(content[:length])


@pytest.mark.parametrize('kind', ['PNG', 'BMP', 'TIFF'])
def test_a_palette_is_found(kind):
    file = io.BytesIO()
    img = Image.fromarray(RNG.integers(0, 256, (16, 32, 3), dtype=np.uint8))
    img.quantize(16).save(file, kind)
    assert has_palette(file.getvalue())

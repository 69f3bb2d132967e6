import errno
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from golden import call, params, recipe, resolve

from basicsr.utils.img_util import (
    crop_border,
    imfrombytes,
    img2tensor,
    imwrite,
    tensor2img,
    tensor2img_fast,
)

ROOT = Path(__file__).resolve().parents[2]


def png(img):
    return cv2.imencode('.png', img)[1].tobytes()


@pytest.mark.parametrize(
    'case',
    # The advisory case holds upstream's truncation where tensor2img rounds.
    params('colour', lambda c: 'img_util' in c.get('target', '') and not c.get('advisory')),
)
def test_conversion_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


@pytest.mark.parametrize('case', params('colour', lambda c: c['kind'] == 'imfrombytes'))
def test_decoding_equals_the_reference(case):
    out = imfrombytes(png(resolve(case['image'])), **case['kwargs'])
    assert recipe.compare(case, out) is None


# img2tensor and tensor2img


def test_a_pure_red_image_becomes_100_and_back():
    red = np.zeros((2, 2, 3), np.uint8)
    red[..., 2] = 255
    tensor = img2tensor(imfrombytes(png(red), float32=True))
    assert tensor[:, 0, 0].tolist() == [1, 0, 0]
    assert img2tensor(red, bgr2rgb=False)[:, 0, 0].tolist() == [0, 0, 255]
    assert np.array_equal(tensor2img(tensor), red)


@pytest.mark.parametrize('shape', [(5, 4), (5, 4, 1), (5, 4, 3), (5, 4, 4), (1, 4, 3), (5, 1)])
def test_image_to_tensor_and_back_returns_the_image(shape):
    img = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    tensor = img2tensor(np.float32(img) / 255)
    assert tensor.shape == (shape[2] if len(shape) == 3 else 1, *shape[:2])
    assert np.array_equal(tensor2img(tensor), img[..., 0] if shape[2:] == (1,) else img)


def test_alpha_stays_the_fourth_channel():
    rgba = torch.tensor([0.2, 0.4, 0.6, 1.0]).view(4, 1, 1)
    assert tensor2img(rgba).tolist() == [[[153, 102, 51, 255]]]
    assert tensor2img(rgba, rgb2bgr=False).tolist() == [[[51, 102, 153, 255]]]


def test_a_row_of_pixels_is_an_image():
    assert tensor2img(torch.tensor([[0.0, 0.5, 1.0]])).tolist() == [[0, 128, 255]]


def test_tensors_and_images_are_left_as_they_are_and_share_no_memory():
    for tensor in (torch.linspace(-1, 2, 12).view(3, 2, 2), torch.linspace(-1, 2, 4).view(2, 2)):
        before = tensor.clone()
        for out_type in (np.uint8, np.float32):
            tensor2img(tensor, out_type=out_type)[:] = 7
        assert torch.equal(tensor, before)
    img = np.ones((2, 2, 1), np.float32)
    img2tensor(img).zero_()
    assert img.all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_any_floating_type_and_with_gradient_become_images(dtype):
    tensor = torch.rand(1, 3, 4, 5).to(dtype).requires_grad_()
    assert np.array_equal(tensor2img(tensor), tensor2img(tensor.detach().float()))


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_values_that_are_not_finite_are_no_image(value, dtype):
    tensor = torch.full((1, 3, 4, 5), 0.5, dtype=dtype)
    tensor[0, 1, 2, 3] = value
    for convert in (tensor2img, tensor2img_fast):
        with pytest.raises(FloatingPointError, match='1 of 60 values are not finite'):
            convert(tensor)


def test_uint16_output_uses_its_whole_range():
    out = tensor2img(torch.tensor([[0.0, 0.5, 1.0]]), out_type=np.uint16)
    assert (out.dtype, out.tolist()) == (np.uint16, [[0, 32768, 65535]])


def test_the_fast_variant_rounds_like_the_other():
    tensor = torch.rand(1, 3, 6, 7)
    assert np.array_equal(tensor2img_fast(tensor), tensor2img(tensor))


def test_values_are_never_rescaled_on_the_way_to_a_tensor():
    img = np.full((1, 1, 3), 40000, np.uint16)
    assert img2tensor(img).unique().tolist() == [40000]
    assert img2tensor(img, float32=False).dtype == torch.uint16


def test_wrong_numbers_of_dimensions_are_refused():
    with pytest.raises(ValueError, match=r'\(1, 1, 3, 2, 2\)'):
        tensor2img(torch.zeros(1, 1, 3, 2, 2))
    with pytest.raises(ValueError, match=r'\(4,\)'):
        img2tensor(np.zeros(4))


# imfrombytes


def test_bit_depth_decides_the_scale():
    for dtype, value, wanted in ((np.uint8, 128, 0.50196), (np.uint16, 32768, 0.5000)):
        content = png(np.full((2, 3, 3), value, dtype))
        for flag in ('color', 'grayscale', 'unchanged'):
            assert imfrombytes(content, flag).dtype == dtype
            out = imfrombytes(content, flag, float32=True)
            np.testing.assert_allclose(out, wanted, atol=1e-4)


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_flags_decide_the_channels(dtype):
    bgra = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (4, 5, 4), dtype=dtype)
    gray = np.ascontiguousarray(bgra[..., 0])
    assert np.array_equal(imfrombytes(png(bgra)), bgra[..., :3])
    assert np.array_equal(imfrombytes(png(bgra), 'unchanged'), bgra)
    assert imfrombytes(png(bgra), 'grayscale').shape == (4, 5)
    assert np.array_equal(imfrombytes(png(gray)), np.stack([gray] * 3, axis=2))
    assert np.array_equal(imfrombytes(png(gray), 'grayscale'), gray)
    assert np.array_equal(imfrombytes(png(gray), 'unchanged'), gray)


def test_the_orientation_tag_of_a_photo_is_ignored():
    photo = cv2.imencode('.jpg', np.zeros((16, 32, 3), np.uint8))[1].tobytes()
    rotate_90 = struct.pack('>2sHIHHHIHHI', b'MM', 42, 8, 1, 0x0112, 3, 1, 6, 0, 0)
    exif = b'Exif\0\0' + rotate_90
    photo = photo[:2] + struct.pack('>HH', 0xFFE1, len(exif) + 2) + exif + photo[2:]
    assert cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_COLOR).shape == (32, 16, 3)
    for flag in ('color', 'grayscale', 'unchanged'):
        assert imfrombytes(photo, flag).shape[:2] == (16, 32)


def test_undecodable_bytes_are_refused_with_a_reason():
    content = png(recipe.det_image('broken', 40, 40))
    with pytest.raises(ValueError, match='empty'):
        imfrombytes(b'')
    for broken in (content[:100], content[: len(content) // 2], b'no image'):
        with pytest.raises(ValueError, match=f'{len(broken)} bytes'):
            imfrombytes(broken)
    with pytest.raises(ValueError, match='colour'):
        imfrombytes(content, flag='colour')


# imwrite


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
@pytest.mark.parametrize('shape', [(4, 5), (4, 5, 3), (4, 5, 4)])
def test_written_images_read_back_equal(tmp_path, shape, dtype):
    img = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype=dtype)
    path = tmp_path / 'new' / 'folder' / 'a.png'
    imwrite(img, str(path))
    assert np.array_equal(imfrombytes(path.read_bytes(), 'unchanged'), img)
    assert [p.name for p in path.parent.iterdir()] == ['a.png']


def test_encoder_settings_are_used(tmp_path):
    img = recipe.det_image('size', 40, 40)
    for quality in (10, 90):
        imwrite(img[..., ::-1], tmp_path / f'{quality}.jpg', [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert (tmp_path / '10.jpg').stat().st_size < (tmp_path / '90.jpg').stat().st_size


@pytest.mark.parametrize(
    'name, img', [('a.xyz', np.zeros((2, 2))), ('a', np.zeros((2, 2))), ('a.png', None)]
)
def test_what_cannot_be_encoded_is_an_error_that_names_the_path(tmp_path, name, img):
    with pytest.raises(OSError, match=str(tmp_path / name)):
        imwrite(img, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_image_and_no_other_file(tmp_path, monkeypatch):
    path, img = tmp_path / 'a.png', recipe.det_image('old', 8, 8)
    imwrite(img, path)

    def write_half(self, content):
        with self.open('wb') as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(Path, 'write_bytes', write_half)
    with pytest.raises(OSError, match=f'{path}.*No space left on device'):
        imwrite(255 - img, path)
    assert np.array_equal(imfrombytes(path.read_bytes()), img)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_an_error_without_auto_mkdir(tmp_path):
    with pytest.raises(FileNotFoundError, match='none'):
        imwrite(np.zeros((2, 2)), tmp_path / 'none' / 'a.png', auto_mkdir=False)


# crop_border


def test_cropping_may_leave_one_pixel_but_not_none():
    assert crop_border(np.zeros((9, 9, 3)), 4).shape == (1, 1, 3)
    with pytest.raises(ValueError, match=r'crop_border 4 .* 8 x 9'):
        crop_border(np.zeros((8, 9, 3)), 4)


# import


def test_a_failing_opencv_names_the_headless_build(tmp_path):
    (tmp_path / 'cv2.py').write_text("raise ImportError('libGL.so.1: cannot open shared object')")
    run = subprocess.run(
        [sys.executable, '-c', 'import basicsr.utils.img_util'],
        env={'PYTHONPATH': f'{tmp_path}:{ROOT}', 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert 'libGL.so.1' in run.stderr
    assert 'pip install opencv-python-headless' in run.stderr


def _chunk(kind, data):
    checksum = zlib.crc32(kind + data).to_bytes(4)
    return len(data).to_bytes(4) + kind + data + checksum


@pytest.mark.parametrize('kind', ['png', 'ppm', 'bmp'])
def test_an_image_that_claims_billions_of_pixels_is_refused_before_memory_is_taken(kind):
    side = (50_000).to_bytes(4)
    bmp = bytearray(cv2.imencode('.bmp', np.zeros((4, 4, 3), np.uint8))[1])
    bmp[18:26] = side[::-1] * 2
    content = {
        'png': b'\x89PNG\r\n\x1a\n'
        + _chunk(b'IHDR', side + side + bytes([8, 2, 0, 0, 0]))
        + _chunk(b'IDAT', zlib.compress(bytes(10**7)))
        + _chunk(b'IEND', b''),
        'ppm': b'P6\n50000 50000\n255\n' + bytes(100),
        'bmp': bytes(bmp),
    }[kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match='OPENCV_IO_MAX_IMAGE_PIXELS, now 268435456'):
        imfrombytes(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.parametrize('options', [[], [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]])
def test_a_jpeg_that_is_too_small_for_its_pixels_is_refused_before_it_is_decoded(options):
    flat = np.full((2048, 2048), 127, np.uint8)
    content = cv2.imencode('.jpg', flat, [cv2.IMWRITE_JPEG_QUALITY, 1, *options])[1].tobytes()
    assert np.ptp(imfrombytes(content)) == 0, 'nothing is smaller than one colour'
    place = content.index(b'\xff\xc2' if options else b'\xff\xc0') + 5
    large = content[:place] + b'\x3f\xff' * 2 + content[place + 4 :]
    for claim in (large, large[:2] + b'\xff' + large[2:]):
        with pytest.raises(ValueError, match='not a JPEG image of 16383 x 16383 pixels'):
            imfrombytes(claim[: len(claim) // 4])

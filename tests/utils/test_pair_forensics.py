"""Which reduction made an LQ image, and whether it fits its GT."""

import cv2
import numpy as np
import pytest
from PIL import Image
from textures import texture

from basicsr.utils.matlab_functions import imresize, reduce_image
from basicsr.utils.pair_forensics import (
    FAMILY_OF,
    KERNELS,
    agreement,
    central_pair,
    pair_shift,
    reduced_by,
)


def by_pillow(how):
    def reduce(img, scale):
        size = img.shape[1] // scale, img.shape[0] // scale
        return np.asarray(Image.fromarray(img).resize(size, how))

    return reduce


def by_opencv(how):
    def reduce(img, scale):
        size = img.shape[1] // scale, img.shape[0] // scale
        return cv2.resize(img, size, interpolation=how)

    return reduce


def once(img, scale):
    return np.clip(np.rint(imresize(img, 1 / scale)), 0, 255).astype(np.uint8)


# What makes LQ images outside, by the name of our copy.
REAL = {
    'MATLAB bicubic': reduce_image,
    'Pillow bicubic': by_pillow(Image.Resampling.BICUBIC),
    'Pillow Lanczos': by_pillow(Image.Resampling.LANCZOS),
    'bicubic rounded once': once,
    'OpenCV cubic': by_opencv(cv2.INTER_CUBIC),
    'OpenCV area': by_opencv(cv2.INTER_AREA),
    'OpenCV linear': by_opencv(cv2.INTER_LINEAR),
}


def shifted(img, down, right):
    move = np.array([[1, 0, right], [0, 1, down]], np.float32)
    size = img.shape[1], img.shape[0]
    return cv2.warpAffine(img, move, size, flags=cv2.INTER_LANCZOS4, borderMode=cv2.BORDER_REFLECT)


@pytest.mark.parametrize('scale', [2, 3, 4])
@pytest.mark.parametrize('name', REAL)
def test_the_kernel_of_a_program_is_recognised_by_its_residual(name, scale):
    gt = texture(1, 240, 240)
    found = reduced_by(gt, REAL[name](gt, scale), scale)
    assert found.keys() == KERNELS.keys() == FAMILY_OF.keys()
    assert found[name] < 0.1
    assert list(found.values()) == sorted(found.values())
    others = [found[other] for other in found if FAMILY_OF[other] != FAMILY_OF[name]]
    # OpenCV's linear is its area at scale 2, and both others point sampling at scale 3.
    if not (name.startswith('OpenCV') and scale < 4):
        assert min(others) > 0.8


def test_another_kernel_is_like_none():
    gt = texture(2)
    for lq in (cv2.GaussianBlur(gt, (0, 0), 1.6)[2::4, 2::4], gt[::4, ::4]):
        assert min(reduced_by(gt, lq, 4).values()) > 1


def test_deep_images_are_compared_as_bytes():
    gt = texture(3)
    lq = reduce_image(gt, 2)
    found = reduced_by(gt.astype(np.uint16) * 257, lq.astype(np.float32) / 255, 2)
    assert next(iter(found.items())) == ('MATLAB bicubic', 0)


@pytest.mark.parametrize('kernel', KERNELS)
def test_pairs_made_by_a_known_kernel_are_not_shifted(kernel):
    for scale in (2, 3, 4):
        gt = texture(4, 240, 240)
        lq = KERNELS[kernel](gt, scale).astype(np.uint8)
        assert max(map(abs, pair_shift(gt, lq, scale))) < 0.02


def test_noise_blur_and_compression_make_no_shift():
    gt = texture(5)
    lq = reduce_image(gt, 2)
    noise = np.random.default_rng(0).normal(0, 20, lq.shape)
    noisy = np.clip(lq + noise, 0, 255).astype(np.uint8)
    jpeg = cv2.imdecode(cv2.imencode('.jpg', lq, [cv2.IMWRITE_JPEG_QUALITY, 40])[1], 1)
    for img in (noisy, jpeg, cv2.GaussianBlur(lq, (0, 0), 1.5)):
        assert max(map(abs, pair_shift(gt, img, 2))) < 0.05


@pytest.mark.parametrize(('scale', 'phase'), [(2, 0.25), (3, 1 / 3), (4, 0.375)])
def test_every_first_pixel_is_half_a_phase_off(scale, phase):
    gt = texture(6, 240, 240)
    down, right = pair_shift(gt, gt[::scale, ::scale], scale)
    assert (down, right) == pytest.approx((phase, phase), abs=0.05)


@pytest.mark.parametrize('by', [(0.3, -0.6), (2.25, 0), (-4.5, 6.75)])
def test_a_shift_of_any_pixels_is_measured(by):
    img = texture(7)
    assert pair_shift(img, shifted(img, *by), 1) == pytest.approx(by, abs=0.05)


def test_unlike_and_flat_images_have_no_shift():
    flat = np.full((64, 64, 3), 90, np.uint8)
    assert pair_shift(texture(8), texture(9), 1) == (0, 0)
    assert pair_shift(flat, flat, 1) == (0, 0)
    assert pair_shift(flat[:8], flat[:8], 1) == (0, 0)


def test_agreement_tells_degraded_from_unlike():
    gt = texture(10)
    lq = reduce_image(gt, 4)
    noisy = np.clip(lq + np.random.default_rng(0).normal(0, 50, lq.shape), 0, 255).astype(np.uint8)
    assert agreement(gt, noisy) > 0.9
    assert agreement(gt, reduce_image(texture(11), 4)) < 0.5
    assert agreement(np.full((64, 64, 3), 90, np.uint8), noisy) == 1


def test_the_middles_of_a_pair_belong_together():
    gt = np.arange(40 * 60).reshape(40, 60)
    large, small = central_pair(gt, gt[::2, ::2], 2, side=10)
    assert small.shape == (10, 10)
    assert (large[::2, ::2] == small).all()
    assert small[0, 0] == gt[10, 20]
    whole = central_pair(gt, gt[::2, ::2], 2)
    assert [part.shape for part in whole] == [(40, 60), (20, 30)]

"""Traces of compression, of enlargement, and of copies."""

import cv2
import numpy as np
import pytest
from textures import texture

from basicsr.utils.forensics import (
    as_bytes,
    centre,
    is_copy,
    jpeg_grid,
    jpeg_quality,
    luma,
    perceptual_hash,
    replication,
    similar_pairs,
    spectral_cutoff,
)


def compressed(img, quality):
    content = cv2.imencode('.jpg', img, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return cv2.imdecode(content, cv2.IMREAD_COLOR)


def enlarged(img, factor, how):
    size = round(img.shape[1] * factor), round(img.shape[0] * factor)
    return cv2.resize(img, size, interpolation=how)


def bits_between(one, two):
    return (perceptual_hash(one) ^ perceptual_hash(two)).bit_count()


def test_luma_is_that_of_jpeg_whatever_the_depth():
    img = np.array([[[0, 0, 255], [255, 255, 255]]], np.uint8)
    expected = [[0.299 * 255, 255]]
    assert luma(img) == pytest.approx(np.array(expected), abs=1e-4)
    assert luma(img.astype(np.uint16) * 257) == pytest.approx(np.array(expected), abs=1e-4)
    assert luma(img.astype(np.float32) / 255) == pytest.approx(np.array(expected), abs=1e-4)
    assert luma(img[..., 1]).tolist() == [[0, 255]]
    assert (as_bytes(img.astype(np.uint16) * 257) == img).all()
    assert centre(np.arange(7)[:, None], 3).ravel().tolist() == [2, 3, 4]


@pytest.mark.parametrize('quality', [30, 50, 75, 90])
def test_the_grid_and_the_quality_of_a_compression_are_found_at_any_offset(quality):
    img = compressed(texture(1), quality)[5:, 2:]
    grid = jpeg_grid(img)
    assert grid == (3, 6)
    assert jpeg_quality(img, grid) == pytest.approx(quality, abs=2)


def test_a_compression_is_found_in_images_of_16_bits_and_of_one_channel():
    img = compressed(texture(2), 60)
    assert jpeg_grid(img.astype(np.uint16) * 257) == (0, 0)
    gray = cv2.imdecode(cv2.imencode('.jpg', texture(2)[..., 0])[1], cv2.IMREAD_GRAYSCALE)
    assert jpeg_grid(gray) == (0, 0)


@pytest.mark.parametrize(
    'img',
    [
        texture(3),
        np.zeros((64, 64, 3), np.uint8),
        np.full((64, 64), 77, np.uint8),
        texture(3)[:20],
        np.tile(np.arange(128, dtype=np.uint8), (128, 1)),
        np.tile(texture(3)[:8, :8], (16, 16, 1)),
        enlarged(texture(3), 2, cv2.INTER_CUBIC),
        enlarged(compressed(texture(3), 60), 1.5, cv2.INTER_CUBIC),
    ],
    ids=['texture', 'black', 'gray', 'small', 'ramp', 'tiles', 'enlarged', 'jpeg'],
)
def test_no_grid_is_found_where_nothing_was_compressed_at_this_size(img):
    assert jpeg_grid(img) is None


def test_clipped_blocks_do_not_count_for_the_quality():
    img = np.clip(texture(4).astype(int) * 2 - 100, 0, 255).astype(np.uint8)
    img = compressed(img, 60)
    assert (img == 255).mean() > 0.05
    assert jpeg_quality(img, (0, 0)) == pytest.approx(60, abs=2)
    assert jpeg_quality(np.full((64, 64, 3), 255, np.uint8), (0, 0)) is None


@pytest.mark.parametrize(
    ('factor', 'how', 'least', 'place'),
    [
        (2, cv2.INTER_CUBIC, 16, 1 / 2),
        (4, cv2.INTER_CUBIC, 16, 1 / 4),
        (1.5, cv2.INTER_LANCZOS4, 20, 2 / 3),
        (2, cv2.INTER_LANCZOS4, 20, 1 / 2),
        (3, cv2.INTER_LANCZOS4, 20, 1 / 3),
    ],
)
def test_the_spectrum_of_an_enlargement_drops_where_the_detail_ends(factor, how, least, place):
    drop, cutoff = spectral_cutoff(enlarged(texture(5), factor, how))
    assert drop > least
    assert cutoff == pytest.approx(place)


@pytest.mark.parametrize('seed', range(4))
def test_the_spectrum_of_an_image_with_detail_falls_gradually(seed):
    assert spectral_cutoff(texture(seed))[0] < 8
    reduced = cv2.resize(texture(seed), (128, 128), interpolation=cv2.INTER_AREA)
    assert spectral_cutoff(reduced)[0] < 8


def test_images_without_contrast_or_size_have_no_cutoff():
    assert spectral_cutoff(np.full((128, 128, 3), 9, np.uint8))[0] == pytest.approx(0)
    assert spectral_cutoff(texture(0)[:40]) == (0, 1)


@pytest.mark.parametrize('factor', [2, 3, 4])
def test_repeated_pixels_are_found_with_their_factor(factor):
    small = texture(6, 40, 30)
    assert replication(small.repeat(factor, 0).repeat(factor, 1)) == factor
    assert replication(small) == 1
    assert replication(small.repeat(factor, 0)) == 1
    assert replication(np.full((40, 40, 3), 5, np.uint8)) == 1


def test_copies_have_nearly_the_hash_of_the_original_and_other_images_do_not():
    img = texture(7)
    half = cv2.resize(img, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    for copy in (compressed(img, 30), half, cv2.convertScaleAbs(img, alpha=0.8, beta=20)):
        assert bits_between(img, copy) <= 4
        assert is_copy(img, copy)
    for seed in range(8, 16):
        assert bits_between(img, texture(seed)) > 10
        assert not is_copy(img, texture(seed))
    assert perceptual_hash(np.full((50, 60, 3), 200, np.uint8)) is None


def test_half_of_the_bits_of_a_hash_are_set():
    counts = [perceptual_hash(texture(seed)).bit_count() for seed in range(4)]
    assert counts == [32] * 4


def test_pairs_of_hashes_within_the_distance_are_all_found():
    rng = np.random.default_rng(0)
    hashes = [int(value) for value in rng.integers(0, 2**63, 60)]
    hashes += [hashes[3], hashes[3] ^ 0b1, hashes[5] ^ 0x0101010101010100, hashes[9] ^ 0xFF]
    expected = {
        (i, j)
        for j in range(len(hashes))
        for i in range(j)
        if (hashes[i] ^ hashes[j]).bit_count() <= 7
    }
    assert expected == {(3, 60), (3, 61), (5, 62), (60, 61)}
    # The first of equal ones stands for them.
    assert list(similar_pairs(hashes)) == [(3, 60), (3, 61), (5, 62)]
    assert list(similar_pairs([])) == []
    assert list(similar_pairs([7] * 5)) == [(0, 1), (0, 2), (0, 3), (0, 4)]

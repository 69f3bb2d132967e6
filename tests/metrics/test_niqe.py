import inspect
import math
import warnings

import numpy as np
import pytest
from golden import call, params, recipe, resolve

from basicsr.metrics.niqe import (
    calculate_niqe,
    compute_feature,
    estimate_aggd_param,
    niqe,
)


@pytest.mark.parametrize('case', params('metrics', lambda c: '.niqe:' in c.get('target', '')))
def test_function_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


@pytest.mark.parametrize('case', params('metrics', lambda c: c['kind'] == 'niqe_direct'))
def test_niqe_with_another_model_equals_the_reference(case):
    features = recipe.det_array((144, 36), case['prior'], dtype='float64')
    line = np.exp(-(np.arange(-3, 4) ** 2) / (2 * (7 / 6) ** 2))
    window = np.outer(line, line) / line.sum() ** 2
    img = resolve(case['image']).astype(np.float64)
    out = niqe(img, np.zeros((1, 36)), np.cov(features, rowvar=False), window)
    assert recipe.compare(case, out) is None


def test_niqe_of_noise_is_the_number_measured_on_upstream():
    noise = np.random.RandomState(0).randint(0, 256, (200, 300, 3)).astype(np.uint8)
    assert calculate_niqe(noise, 0) == pytest.approx(33.01298818974868, rel=1e-5)


def test_types_and_layouts_agree_and_the_result_is_a_plain_float():
    img = recipe.det_image('niqe', 200, 296)
    before = img.copy()
    value = calculate_niqe(img, 4)
    assert type(value) is float
    assert calculate_niqe(img.astype(np.float64), 4) == value
    assert calculate_niqe(img.transpose(2, 0, 1), 4, 'CHW') == value
    assert calculate_niqe(np.uint16(img) * 257, 4) == pytest.approx(value, rel=1e-3)
    assert calculate_niqe(img, 4, img2=None, better='lower') == value
    assert np.array_equal(img, before)


def test_gray_images_agree_in_every_layout():
    img = recipe.det_image('niqe', 200, 296, 1)
    value = calculate_niqe(img, 0)
    assert calculate_niqe(img[..., 0], 0) == value
    assert calculate_niqe(img[..., 0], 0, 'HW') == value
    assert calculate_niqe(img[..., 0], 0, convert_to='gray') == value


def test_noise_raises_the_score_of_an_image():
    y, x = np.mgrid[:192, :288]
    img = 128 + 60 * np.sin(x / 9) * np.cos(y / 7) + recipe.det_array((192, 288), 'grain', -3, 3)
    noisy = img + recipe.det_array((192, 288), 'noise', -40, 40)
    assert calculate_niqe(noisy, 0) > calculate_niqe(img, 0)


@pytest.mark.parametrize('size', [(95, 400), (96, 96), (180, 190)])
def test_images_of_fewer_than_two_blocks_have_no_score(size):
    img = recipe.det_image('small', *size)
    assert math.isnan(calculate_niqe(img, 0))
    with pytest.raises(ValueError, match=f'two blocks of 96 x 96 .* {size[0]} x {size[1]}'):
        inspect.unwrap(calculate_niqe)(img, 0)


def test_two_blocks_are_enough_and_cropping_counts():
    img = recipe.det_image('two', 96, 192)
    assert np.isfinite(calculate_niqe(img, 0))
    assert math.isnan(calculate_niqe(img, 1))


def test_a_flat_image_has_no_score():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        flat = np.full((192, 192, 3), 128, np.uint8)
        assert math.isnan(calculate_niqe(flat, 0))
        with pytest.raises(ValueError, match='without texture'):
            inspect.unwrap(calculate_niqe)(flat, 0)


def test_flat_blocks_beside_others_leave_the_score_finite():
    img = recipe.det_image('sky', 192, 384)
    img[:96] = 200
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert np.isfinite(calculate_niqe(img, 0))


def test_flat_regions_do_not_hang_on_rounding():
    """A constant that is added to all pixels changes no difference."""
    y, x = np.mgrid[:192, :288]
    img = 128 + 40 * np.sin(x / 9) * np.cos(y / 7)
    img[70:] += recipe.det_array((122, 288), 'grain', -20, 20)
    img[:70] = 100
    values = [calculate_niqe(img.round() + level, 0, 'HW') for level in range(0, 50, 7)]
    assert values == pytest.approx([values[0]] * len(values), rel=1e-6)


def test_the_fit_finds_the_shape_of_known_distributions():
    random = np.random.default_rng(0)
    shape, left, right = estimate_aggd_param(random.normal(size=(400, 400)))
    assert shape == pytest.approx(2, abs=0.05)
    assert left == pytest.approx(2**0.5, rel=0.02) and right == pytest.approx(2**0.5, rel=0.02)
    shape, left, right = estimate_aggd_param(random.laplace(size=(400, 400)))
    assert shape == pytest.approx(1, abs=0.05)
    assert left == pytest.approx(1, rel=0.04) and right == pytest.approx(1, rel=0.04)


def test_a_block_has_18_features_of_which_the_first_are_those_of_the_fit():
    block = recipe.det_array((96, 96), 'block', dtype='float64')
    features = compute_feature(block)
    shape, left, right = estimate_aggd_param(block)
    assert len(features) == 18
    assert features[:2] == [shape, (left + right) / 2]
    product = block * np.roll(block, (1, -1), axis=(0, 1))
    assert (features[14], *features[16:]) == estimate_aggd_param(product)


def test_wrong_arguments_are_refused():
    img = recipe.det_image('wrong', 96, 192)
    with pytest.raises(ValueError, match="'luma'"):
        calculate_niqe(img, 0, convert_to='luma')
    with pytest.raises(ValueError, match="'WHC'"):
        calculate_niqe(img, 0, input_order='WHC')
    with pytest.raises(ValueError, match=r'\(96, 192, 4\)'):
        calculate_niqe(np.dstack([img, img[..., 0]]), 0)

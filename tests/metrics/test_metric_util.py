import numpy as np
import pytest
from golden import call, params, recipe

from basicsr.metrics.metric_util import reorder_image, to_255, to_y_channel


@pytest.mark.parametrize('case', params('metrics', lambda c: 'metric_util' in c.get('target', '')))
def test_function_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


def test_another_order_is_refused():
    with pytest.raises(ValueError, match="'HCW'"):
        reorder_image(np.zeros((4, 5, 3)), 'HCW')


def test_only_16_bit_images_are_scaled():
    assert to_255(np.uint16([[0, 257, 65535]])).tolist() == [[0, 1, 255]]
    for img in (np.uint8([[7]]), np.float64([[300.5]])):
        assert to_255(img) is img


@pytest.mark.parametrize('dtype', [np.uint8, np.float32, np.float64])
def test_luma_of_black_and_white_is_16_and_235(dtype):
    img = np.zeros((1, 2, 3), dtype)
    img[:, 1] = 255
    np.testing.assert_allclose(to_y_channel(img), [[[16], [235]]], rtol=1e-6)


def test_luma_of_a_16_bit_image_is_in_the_same_range():
    np.testing.assert_allclose(to_y_channel(np.full((1, 1, 3), 65535, np.uint16)), 235, rtol=1e-6)

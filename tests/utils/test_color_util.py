import numpy as np
import pytest
import torch
from golden import call, params, recipe

from basicsr.utils.color_util import bgr2ycbcr, rgb2ycbcr, rgb2ycbcr_pt, ycbcr2bgr, ycbcr2rgb

RED, GREEN, BLUE, WHITE, BLACK = np.float32([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    'case',
    # The advisory cases hold upstream's uint8 overflow of colours outside RGB.
    params('colour', lambda c: 'color_util' in c.get('target', '') and not c.get('advisory')),
)
def test_conversion_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


@pytest.mark.parametrize(
    'color, luma',
    [(RED, 81.481), (GREEN, 144.553), (BLUE, 40.966), (WHITE, 235), (BLACK, 16)],
)
def test_luma_of_pure_colours_is_that_of_matlab(color, luma):
    rgb = color.reshape(1, 1, 3)
    assert 255 * rgb2ycbcr(rgb, y_only=True).item() == pytest.approx(luma, abs=1e-5)
    assert 255 * bgr2ycbcr(rgb[..., ::-1], y_only=True).item() == pytest.approx(luma, abs=1e-5)
    assert rgb2ycbcr(np.uint8(255 * rgb), y_only=True).item() == round(luma)
    tensor = torch.from_numpy(rgb).permute(2, 0, 1)[None]
    assert 255 * rgb2ycbcr_pt(tensor, y_only=True).item() == pytest.approx(luma, abs=1e-4)


@pytest.mark.parametrize('back, forth', [(ycbcr2rgb, rgb2ycbcr), (ycbcr2bgr, bgr2ycbcr)])
def test_ycbcr_and_back_returns_the_image(back, forth):
    img = recipe.det_array((9, 8, 3), 'round trip', 0, 1)
    np.testing.assert_allclose(back(forth(img)), img, atol=1e-3)


def test_colours_outside_rgb_are_clipped_in_uint8():
    img = np.uint8([[[235, 128, 255], [16, 128, 0]]])
    assert ycbcr2rgb(img)[..., 0].tolist() == [[255, 0]]
    assert ycbcr2bgr(img)[..., 2].tolist() == [[255, 0]]


def test_the_input_image_is_left_as_it_is():
    img = recipe.det_image('kept', 6, 5)
    for image in (img, np.float32(img) / 255):
        before = image.copy()
        for convert in (rgb2ycbcr, bgr2ycbcr, ycbcr2rgb, ycbcr2bgr):
            convert(image)
        assert np.array_equal(image, before)


@pytest.mark.parametrize('dtype', [np.float64, np.uint16, np.int32])
def test_another_dtype_is_refused_by_name(dtype):
    for convert in (rgb2ycbcr, bgr2ycbcr, ycbcr2rgb, ycbcr2bgr):
        with pytest.raises(TypeError, match=np.dtype(dtype).name):
            convert(np.zeros((2, 2, 3), dtype))


def test_half_precision_tensors_lose_no_more_than_their_last_digit():
    img = torch.from_numpy(recipe.det_array((1, 3, 6, 5), 'half', 0, 1)).bfloat16()
    out = rgb2ycbcr_pt(img)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rgb2ycbcr_pt(img.float()).bfloat16())

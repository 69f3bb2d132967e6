import math

import numpy as np
import pytest
import torch
from golden import call, params, recipe

from basicsr.utils import color_util
from basicsr.utils.matlab_functions import (
    bgr2ycbcr,
    calculate_weights_indices,
    cubic,
    imresize,
    reduce_image,
    rgb2ycbcr,
)


@pytest.mark.parametrize('case', params('colour', lambda c: 'matlab' in c.get('target', '')))
def test_resize_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


def resize_by_definition(line, scale, antialiasing):
    """One line, pixel by pixel, with 1-based coordinates as in MATLAB."""
    stretch = max(1, 1 / scale) if antialiasing else 1
    out = []
    for x in range(1, math.ceil(len(line) * scale) + 1):
        centre = x / scale + 0.5 * (1 - 1 / scale)
        taps = range(math.floor(centre - 2 * stretch), math.ceil(centre + 2 * stretch) + 1)
        distances = [(centre - i) / stretch for i in taps]
        weights = cubic(torch.tensor(distances, dtype=torch.float64)).numpy()
        mirrored = [*range(len(line)), *reversed(range(len(line)))]
        pixels = [line[mirrored[(i - 1) % len(mirrored)]] for i in taps]
        out.append(np.dot(weights, pixels) / weights.sum())
    return np.array(out)


@pytest.mark.parametrize('antialiasing', [True, False])
@pytest.mark.parametrize('scale', [1 / 4, 1 / 3, 0.37, 0.5, 1, 1.5, 2, 4])
@pytest.mark.parametrize('length', [1, 2, 4, 5, 16])
def test_resize_follows_the_definition_even_below_the_width_of_the_kernel(
    length, scale, antialiasing
):
    line = recipe.det_array((length,), 'line', dtype='float64')
    out = imresize(line[:, None], scale, antialiasing)
    np.testing.assert_allclose(out[:, 0], resize_by_definition(line, scale, antialiasing))


def u8(h, w, c):
    y, x, ch = np.mgrid[:h, :w, :c]
    return (7 * y + 3 * x + 41 * ch + (x * y) % 17 * 5) % 256


@pytest.mark.parametrize(
    'scale, total, mean_square, samples',
    [
        (1 / 2, 1156.584332, 0.2967984, [0.0215732, 0.4842277, 0.3471743, 0.5063455]),
        (1 / 3, 526.8507885, 0.2885265, [0.0515733, 0.5670191, 0.5639361, 0.7060826]),
        (1 / 4, 289.1460833, 0.2893845, [0.0953203, 0.3111008, 0.2029577, 0.7235557]),
        (2, 18505.3493679, 0.3221358, [-0.0035041, 0.1657148, 0.3876774, 1.0967916]),
        (0.37, 648.3558354, 0.2908862, [0.0413167, 0.2798173, 0.5529898, 0.6009703]),
    ],
)
def test_resize_gives_the_numbers_measured_on_upstream(scale, total, mean_square, samples):
    out = imresize(np.float32(u8(64, 48, 3) / 255), scale)
    assert out.sum(dtype=float) == pytest.approx(total, rel=1e-6)
    assert (out.astype(float) ** 2).mean() == pytest.approx(mean_square, rel=1e-6)
    indices = [i * (out.size - 1) // 6 for i in range(4)]
    np.testing.assert_allclose(out.flat[indices], samples, atol=3e-6)


def test_floating_types_are_kept_and_integers_become_float32():
    img = recipe.det_image('types', 8, 8)
    for dtype in (np.float16, np.float32, np.float64):
        assert imresize(img.astype(dtype), 0.5).dtype == dtype
    assert imresize(img, 0.5).dtype == np.float32
    assert imresize(torch.rand(3, 8, 8).bfloat16(), 0.5).dtype == torch.bfloat16


def test_float64_keeps_its_precision():
    ramp = np.arange(40, dtype=np.float64)[:, None] * (1 + 1e-12)
    np.testing.assert_allclose(imresize(ramp, 2)[8:-8, 0], (np.arange(8, 72) - 0.5) / 2, rtol=1e-11)


def test_arrays_and_tensors_agree_and_leading_dimensions_are_free():
    img = recipe.det_array((9, 14, 3), 'kinds')
    batch = torch.from_numpy(img).permute(2, 0, 1).expand(2, 3, 9, 14)
    out = imresize(batch, 0.5)
    assert out.shape == (2, 3, 5, 7)
    np.testing.assert_allclose(out[1].permute(1, 2, 0), imresize(img, 0.5), atol=1e-6)


def test_gradients_flow_through_the_resize():
    x = torch.rand(2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: imresize(t, 0.5), x)


def test_scale_1_returns_an_equal_copy():
    img = torch.rand(3, 6, 5)
    out = imresize(img, 1)
    assert torch.equal(out, img)
    out.zero_()
    assert img.any()


def test_weights_sum_to_1_and_point_into_the_extended_line():
    weights, indices, before, after = calculate_weights_indices(20, 5, 0.25, 'cubic', 4, True)
    assert weights.shape == indices.shape == (5, 16)
    assert torch.allclose(weights.sum(1), torch.ones(5, dtype=weights.dtype))
    assert (before, after) == (6, 6)
    assert (indices.min(), indices.max()) == (0, 20 + before + after - 1)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match='scale'):
        imresize(np.zeros((4, 4)), 0)
    with pytest.raises(ValueError, match='linear'):
        calculate_weights_indices(20, 5, 0.25, 'linear', 2, True)


def test_the_luma_functions_keep_their_old_import_path():
    assert (bgr2ycbcr, rgb2ycbcr) == (color_util.bgr2ycbcr, color_util.rgb2ycbcr)


@pytest.mark.parametrize('shape', [(2, 8, 3), (8, 2, 3), (2, 2, 3), (2, 2)])
def test_an_axis_may_be_reduced_to_one_pixel(shape):
    img = np.full(shape, 7, np.uint8)
    out = reduce_image(img, 2)
    assert out.shape == (shape[0] // 2, shape[1] // 2, *shape[2:]) and (out == 7).all()

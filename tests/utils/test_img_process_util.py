import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden import call, params, recipe, resolve, target

from basicsr.utils.img_process_util import USMSharp, filter2D, usm_sharp


@pytest.mark.parametrize(
    'case', params('degradations', lambda c: 'img_process_util' in c.get('target', ''))
)
def test_result_equals_the_reference(case):
    out = call(case) if case['kind'] == 'call' else target(case)()(*resolve(case['args']))
    assert recipe.compare(case, out) is None


def waves(*shape):
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.5 + 0.5 * torch.sin(0.37 * index)).view(shape).float()


def test_sharpening_gives_the_numbers_measured_on_upstream():
    sharp = USMSharp()(waves(2, 3, 64, 64)).double()
    assert sharp.sum().item() == pytest.approx(12288.674253, abs=2e-3)
    assert sharp.square().mean().item() == pytest.approx(0.422678, abs=1e-6)
    y, x, channel = np.mgrid[:64, :64, :3]
    img = ((7 * y + 3 * x + 41 * channel + (x * y) % 17 * 5) % 256).astype(np.float32) / 255
    sharp = usm_sharp(img).astype(np.float64)
    assert sharp.sum() == pytest.approx(6107.146241, abs=1e-3)
    assert (sharp**2).mean() == pytest.approx(0.372693, abs=1e-6)


# filter2D


def direct(img, kernel):
    """Correlation as a sum over the kernel's pixels, borders by numpy."""
    k = kernel.shape[-1]
    pad = [(0, 0), (0, 0), (k // 2, k // 2), (k // 2, k // 2)]
    padded = torch.from_numpy(np.pad(img.numpy(), pad, mode='reflect'))
    h, w = img.shape[-2:]
    return sum(
        padded[..., i : i + h, j : j + w] * kernel[:, i, j].view(-1, 1, 1, 1)
        for i in range(k)
        for j in range(k)
    )


@pytest.mark.parametrize('size', [(16, 18), (13, 11), (4, 30), (1, 1), (3, 1)])
@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('count', [1, 2])
def test_filtering_is_a_correlation_with_reflected_borders_for_any_size(size, channels, count):
    img, kernel = waves(2, channels, *size), torch.rand(count, 9, 9) / 81
    torch.testing.assert_close(filter2D(img, kernel), direct(img, kernel), rtol=0, atol=1e-6)


def test_a_kernel_with_one_pixel_off_the_centre_shifts_the_image():
    kernel = torch.zeros(1, 3, 3)
    kernel[0, 1, 2] = 1
    img = waves(1, 1, 6, 7)
    shifted = filter2D(img, kernel)
    torch.testing.assert_close(shifted[..., :-1], img[..., 1:])


def test_a_filtered_image_has_the_dtype_of_the_image_and_is_contiguous():
    kernel = torch.rand(1, 5, 5) / 25
    exact = filter2D(waves(1, 3, 8, 9).double(), kernel)
    assert exact.dtype == torch.float64 and exact.is_contiguous()
    low = filter2D(waves(1, 3, 8, 9).bfloat16(), kernel)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=0, atol=1e-2)


def test_gradients_flow_to_the_image_and_the_kernels():
    img = waves(2, 2, 5, 6).double().requires_grad_()
    kernel = torch.rand(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(filter2D, (img, kernel))


@pytest.mark.parametrize('shape', [(1, 4, 4), (3, 5, 5), (5, 5), (1, 5, 3)])
def test_a_kernel_that_does_not_fit_is_an_error_that_says_what_fits(shape):
    with pytest.raises(ValueError, match=r'need \(2, k, k\) or \(1, k, k\)'):
        filter2D(torch.rand(2, 3, 8, 8), torch.rand(shape))


# sharpening


def test_images_that_differ_little_from_their_blurred_selves_stay():
    img = 0.5 + 0.01 * waves(1, 3, 40, 40)
    torch.testing.assert_close(USMSharp()(img), img, rtol=0, atol=1e-6)
    np.testing.assert_allclose(usm_sharp(img[0, 0].numpy()), img[0, 0].numpy(), atol=1e-6)


def test_an_edge_gets_steeper_and_the_input_is_left_as_it_is():
    img = torch.full((1, 1, 40, 40), 0.3)
    img[..., 20:] = 0.7
    before = img.clone()
    sharp = USMSharp(radius=11)(img)
    assert sharp[0, 0, 20, 20] > 0.75 and sharp[0, 0, 20, 19] < 0.25
    array = img[0, 0].numpy()
    np.testing.assert_allclose(usm_sharp(array, radius=11), sharp[0, 0].numpy(), atol=1e-4)
    assert torch.equal(img, before)


@pytest.mark.parametrize('shape', [(20, 24), (20, 24, 1), (20, 24, 3)])
@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_arrays_keep_their_shape_and_dtype(shape, dtype):
    img = np.random.rand(*shape).astype(dtype)
    sharp = usm_sharp(img)
    assert sharp.shape == shape and sharp.dtype == dtype


def test_images_smaller_than_the_window_can_be_sharpened():
    assert USMSharp()(waves(1, 3, 9, 2)).isfinite().all()


def test_the_window_is_in_the_state_dict_and_its_size_is_odd():
    state = USMSharp().state_dict()
    assert list(state) == ['kernel'] and state['kernel'].shape == (1, 51, 51)
    assert state['kernel'].sum().item() == pytest.approx(1, abs=1e-6)
    assert USMSharp(radius=21).kernel.shape == (1, 21, 21)


def test_sigma_sets_the_width_of_the_window():
    window = USMSharp(radius=5, sigma=1).kernel[0]
    line = torch.exp(-torch.arange(-2.0, 3).square() / 2)
    torch.testing.assert_close(window, torch.outer(line, line) / line.sum() ** 2)


def test_sharpening_lets_gradients_pass():
    img = waves(1, 1, 12, 12).requires_grad_()
    F.mse_loss(USMSharp(radius=5)(img), img.detach()).backward()
    assert img.grad.isfinite().all() and img.grad.abs().sum() > 0

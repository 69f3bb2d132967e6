import math
import random

import cv2
import numpy as np
import pytest
import torch
from golden import call, params, recipe

from basicsr.data.degradations import (
    add_gaussian_noise,
    add_gaussian_noise_pt,
    add_jpg_compression,
    add_poisson_noise,
    add_poisson_noise_pt,
    bivariate_Gaussian,
    bivariate_generalized_Gaussian,
    bivariate_plateau,
    circular_lowpass_kernel,
    draw_mixed_kernel,
    generate_gaussian_noise,
    generate_gaussian_noise_pt,
    generate_poisson_noise,
    generate_poisson_noise_pt,
    mesh_grid,
    pad_kernel,
    pdf2,
    random_add_gaussian_noise,
    random_add_gaussian_noise_pt,
    random_add_jpg_compression,
    random_add_poisson_noise,
    random_add_poisson_noise_pt,
    random_bivariate_Gaussian,
    random_bivariate_generalized_Gaussian,
    random_bivariate_plateau,
    random_generate_gaussian_noise,
    random_generate_gaussian_noise_pt,
    random_generate_poisson_noise,
    random_generate_poisson_noise_pt,
    random_mixed_kernels,
)

KINDS = ['iso', 'aniso', 'generalized_iso', 'generalized_aniso', 'plateau_iso', 'plateau_aniso']


@pytest.mark.parametrize('case', params('degradations', lambda c: 'degradations' in c['target']))
def test_result_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


def waves(*shape):
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.5 + 0.5 * torch.sin(0.37 * index)).view(shape).float()


def image(height=20, width=24, channels=3):
    return recipe.det_image('noise', height, width, channels).astype(np.float32) / 255


def batch(count=2, channels=3, height=20, width=24):
    return (
        torch.from_numpy(
            np.stack([recipe.det_image(f'b/{i}', height, width, channels) for i in range(count)])
        )
        .permute(0, 3, 1, 2)
        .float()
        .div(255)
    )


# kernels


@pytest.mark.parametrize('size', [7, 15, 21])
@pytest.mark.parametrize('kind', KINDS)
def test_random_kernels_sum_to_one_in_double_precision(kind, size):
    kernel = random_mixed_kernels([kind], [1], size, noise_range=(0.75, 1.25))
    assert kernel.shape == (size, size) and kernel.dtype == np.float64
    assert kernel.sum() == pytest.approx(1) and kernel.min() >= 0


@pytest.mark.parametrize('seed', range(12))
def test_what_is_drawn_for_a_kernel_makes_it_again(seed):
    makers = {
        '': bivariate_Gaussian,
        'generalized': bivariate_generalized_Gaussian,
        'plateau': bivariate_plateau,
    }
    arguments = KINDS, [1] * 6, 15, (0.2, 3), (0.2, 3), (-3, 3), (0.5, 4), (1, 2)
    random.seed(seed), np.random.seed(seed)
    kernel, drawn = draw_mixed_kernel(*arguments)
    random.seed(seed), np.random.seed(seed)
    assert np.array_equal(random_mixed_kernels(*arguments), kernel)
    assert 0.2 <= drawn['sig_x'] <= 3 and 0.2 <= drawn['sig_y'] <= 3
    family = drawn.pop('kind').rpartition('_')[0]
    assert np.array_equal(makers[family](**drawn), kernel)


def test_exponents_below_and_above_one_are_as_likely():
    drawn = [
        draw_mixed_kernel(['generalized_iso'], [1], 7, (1, 2), (1, 2), (0, 1), (0.5, 8), (1, 2))[1]
        for _ in range(400)
    ]
    betas = np.array([parameters['beta'] for parameters in drawn])
    assert betas.min() >= 0.5 and betas.max() <= 8
    assert 160 < (betas < 1).sum() < 240


def test_a_kernel_may_have_its_own_grid():
    grid = mesh_grid(9)[0] + 1
    kernel = bivariate_Gaussian(9, 1.5, 1.5, 0, grid)
    assert np.unravel_index(kernel.argmax(), kernel.shape) == (3, 3)
    sigma = np.array([[4.0, 1.0], [1.0, 2.0]])
    assert pdf2(sigma, np.zeros((1, 1, 2))) == 1
    assert pdf2(sigma, np.array([[[2.0, 1.0]]])).item() == pytest.approx(math.exp(-0.5 * 8 / 7))


@pytest.mark.parametrize(
    'draw',
    [
        lambda k: random_bivariate_Gaussian(k, (1, 2), (1, 2), (0, 1)),
        lambda k: random_bivariate_generalized_Gaussian(k, (1, 2), (1, 2), (0, 1), (0.5, 2)),
        lambda k: random_bivariate_plateau(k, (1, 2), (1, 2), (0, 1), (0.5, 2)),
        lambda k: random_mixed_kernels(['iso'], [1], k),
        lambda k: circular_lowpass_kernel(1, k),
    ],
)
def test_an_even_kernel_is_an_error(draw):
    with pytest.raises(ValueError, match='kernel_size is 8'):
        draw(8)


@pytest.mark.parametrize('kind', ['skew', 'plateau', 'gaussian_iso', ''])
def test_an_unknown_kind_of_kernel_is_an_error_that_lists_the_kinds(kind):
    with pytest.raises(ValueError, match=f"no kernel '{kind}'.*plateau_aniso"):
        random_mixed_kernels([kind], [1])


def test_a_low_pass_lets_the_low_frequencies_pass():
    kernel = circular_lowpass_kernel(math.pi / 2, 21, 31)
    spectrum = np.abs(np.fft.fft2(np.fft.ifftshift(kernel)))[0, :16]
    frequency = np.arange(16) * 2 * np.pi / 31
    assert np.abs(spectrum[frequency < 1] - 1).max() < 0.2
    assert spectrum[frequency > 2.2].max() < 0.2
    assert not kernel[:5].any() and kernel.sum() == pytest.approx(1)


@pytest.mark.parametrize('pad_to', [0, 5, 6, 7])
def test_a_low_pass_that_is_large_enough_already_is_not_padded(pad_to):
    assert np.array_equal(circular_lowpass_kernel(1, 7, pad_to), circular_lowpass_kernel(1, 7))


def test_a_kernel_cannot_be_padded_to_a_smaller_or_an_even_size():
    with pytest.raises(ValueError, match=r'\(7, 7\) cannot be padded evenly to 8'):
        circular_lowpass_kernel(1, 7, 8)
    with pytest.raises(ValueError, match=r'\(7, 7\) cannot be padded evenly to 5'):
        pad_kernel(np.ones((7, 7)), 5)
    assert pad_kernel(np.ones((1, 1)), 3).tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]


# noise


ARRAY_NOISE = [
    lambda img: add_gaussian_noise(img, 40),
    lambda img: add_gaussian_noise(img, 40, rounds=True, gray_noise=True),
    lambda img: add_poisson_noise(img, 2),
    lambda img: add_poisson_noise(img, 2, rounds=True, gray_noise=True),
    lambda img: random_add_gaussian_noise(img, (1, 30), 0.5),
    lambda img: random_add_poisson_noise(img, (0.5, 3), 0.5),
    lambda img: add_jpg_compression(img, 30),
    lambda img: random_add_jpg_compression(img, (30, 95)),
]
TENSOR_NOISE = [
    lambda img: add_gaussian_noise_pt(img, 40),
    lambda img: add_gaussian_noise_pt(img, torch.tensor([5.0, 40.0]), torch.tensor([1.0, 0.0])),
    lambda img: add_poisson_noise_pt(img, 2),
    lambda img: add_poisson_noise_pt(img, torch.tensor([0.5, 2.0]), gray_noise=1),
    lambda img: random_add_gaussian_noise_pt(img, (1, 30), 0.5),
    lambda img: random_add_poisson_noise_pt(img, (0.5, 3), 0.5),
]


@pytest.mark.parametrize('shape', [(20, 24), (20, 24, 1), (20, 24, 3)])
@pytest.mark.parametrize('degrade', ARRAY_NOISE)
def test_arrays_of_one_and_three_channels_are_degraded_and_left_as_they_are(degrade, shape):
    img = image(channels=shape[2] if len(shape) == 3 else 1).reshape(shape)
    img[:2] = 1.2  # clipped
    before = img.copy()
    out = degrade(img)
    assert out.shape == shape and out.dtype == np.float32
    assert out.min() >= 0 and out.max() <= 1 and not np.array_equal(out, img)
    assert np.array_equal(img, before)


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('degrade', TENSOR_NOISE)
def test_tensors_of_one_and_three_channels_are_degraded_and_left_as_they_are(degrade, channels):
    img = batch(channels=channels)
    img[..., :2] = 1.2
    before = img.clone()
    out = degrade(img)
    assert out.shape == img.shape and out.dtype == torch.float32
    assert out.min() >= 0 and out.max() <= 1 and not torch.equal(out, img)
    assert torch.equal(img, before)


def test_double_images_can_have_gray_noise():
    assert add_poisson_noise(image().astype(np.float64), gray_noise=True).shape == (20, 24, 3)
    assert add_poisson_noise_pt(batch().double(), gray_noise=1).dtype == torch.float64


def test_gaussian_noise_has_its_standard_deviation():
    noise = generate_gaussian_noise(np.zeros((200, 200, 3), np.float32), 25)
    assert noise.std() * 255 == pytest.approx(25, rel=0.02)
    noise = generate_gaussian_noise_pt(torch.zeros(2, 3, 200, 200), torch.tensor([5.0, 50.0]))
    assert noise.std((1, 2, 3)).mul(255).tolist() == pytest.approx([5, 50], rel=0.02)


def test_poisson_noise_grows_with_the_root_of_the_brightness():
    img = torch.linspace(0, 1, 256).repeat(2, 1, 400, 1)
    noise = generate_poisson_noise_pt(img, torch.tensor([1.0, 3.0]))
    expected = (img[0, 0, 0] / 256).sqrt()
    assert not noise[..., 0].any()  # black has none
    for index, scale in enumerate((1, 3)):
        measured = noise[index, 0].std(0) / scale
        torch.testing.assert_close(measured[20:], expected[20:], rtol=0.2, atol=0)


@pytest.mark.parametrize('levels', [1, 2, 3, 4, 5, 128, 129, 256])
def test_the_number_of_gray_levels_is_counted_for_each_image(levels):
    img = batch(3, 1, 16, 32)
    img[1] = (torch.arange(512) % levels).view(1, 16, 32) / 255
    rates = (img * 255).round() / 255
    noise = generate_poisson_noise_pt(img)
    for index in range(3):
        power = 2 ** math.ceil(math.log2(len(rates[index].unique())))
        counts = (noise[index] + rates[index]) * power
        torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-3)
    assert np.allclose(generate_poisson_noise(np.zeros((4, 4, 3), np.float32)), 0)


@pytest.mark.parametrize('generate', [generate_gaussian_noise, generate_poisson_noise])
def test_gray_noise_of_an_array_is_the_same_in_all_channels(generate):
    noise = generate(image(), 2, gray_noise=True)
    assert np.array_equal(noise[..., 0], noise[..., 1])
    assert np.array_equal(noise[..., 0], noise[..., 2])
    assert not np.array_equal(*generate(image(), 2).transpose(2, 0, 1)[:2])


@pytest.mark.parametrize('generate', [generate_gaussian_noise_pt, generate_poisson_noise_pt])
def test_gray_noise_of_a_batch_is_each_images_own(generate):
    img = batch(1).repeat(4, 1, 1, 1)
    noise = generate(img, 2.0, torch.tensor([1.0, 0.0, 1.0, 1.0]))
    gray = [torch.equal(n[0], n[1]) and torch.equal(n[0], n[2]) for n in noise]
    assert gray == [True, False, True, True]
    assert not torch.equal(noise[0, 0], noise[2, 0]) and not torch.equal(noise[2, 0], noise[3, 0])
    noise = generate(img, 2.0, 1)
    assert torch.equal(noise[:, 0], noise[:, 2]) and not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize('generate', [generate_gaussian_noise_pt, generate_poisson_noise_pt])
def test_the_random_numbers_may_come_from_a_generator(generate):
    img, state = batch(), torch.get_rng_state()
    first, second = (
        generate(img, 2.0, torch.tensor([1, 0]), generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ('generate', 'add', 'levels'),
    [
        (random_generate_gaussian_noise, random_add_gaussian_noise, (1, 30)),
        (random_generate_poisson_noise, random_add_poisson_noise, (0.5, 3)),
    ],
)
def test_the_noise_added_to_an_array_is_the_noise_generated(generate, add, levels):
    img = image()
    np.random.seed(1)
    noise = generate(img, levels, 0.5)
    np.random.seed(1)
    assert np.array_equal(add(img, levels, 0.5, clip=False), img + noise)


@pytest.mark.parametrize(
    ('generate', 'add', 'levels'),
    [
        (random_generate_gaussian_noise_pt, random_add_gaussian_noise_pt, (1, 30)),
        (random_generate_poisson_noise_pt, random_add_poisson_noise_pt, (0.5, 3)),
    ],
)
def test_the_noise_added_to_a_tensor_is_the_noise_generated(generate, add, levels):
    img = batch()
    torch.manual_seed(1)
    noise = generate(img, levels, 0.5)
    torch.manual_seed(1)
    assert torch.equal(add(img, levels, 0.5, clip=False), img + noise)


def test_noise_of_a_batch_with_one_gray_image_gives_the_numbers_measured_on_upstream():
    img = waves(3, 3, 16, 16)
    torch.manual_seed(5)
    noisy = random_add_gaussian_noise_pt(img, (1, 30), 0.4).double()
    assert noisy.sum().item() == pytest.approx(1151.212457, abs=1e-3)
    assert noisy.square().mean().item() == pytest.approx(0.369858, abs=1e-6)
    noisy = random_add_poisson_noise_pt(img, (0.05, 3), 0.4).double()
    assert noisy.sum().item() == pytest.approx(1146.345322, abs=1e-3)
    assert noisy.square().mean().item() == pytest.approx(0.370144, abs=1e-6)


# JPEG


def test_jpeg_takes_whole_qualities_of_fractions():
    img = image(40, 40)
    assert np.array_equal(add_jpg_compression(img, 57.9), add_jpg_compression(img, 57))
    np.random.seed(4)
    quality = int(np.random.uniform(30, 95))
    np.random.seed(4)
    out = random_add_jpg_compression(img, (30, 95))
    assert np.array_equal(out, add_jpg_compression(img, quality))


def test_jpeg_compresses_the_image_in_eight_bits_without_a_warning(capfd):
    img = image(40, 40)
    pixels = (img * 255).round().astype(np.uint8)
    _, content = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 80])
    expected = cv2.imdecode(content, cv2.IMREAD_COLOR).astype(np.float32) / 255
    assert np.array_equal(add_jpg_compression(img, 80), expected)
    assert capfd.readouterr().err == ''


@pytest.mark.parametrize('quality', [-1, 101])
def test_a_jpeg_quality_that_does_not_exist_is_an_error(quality):
    with pytest.raises(ValueError, match=f'quality is {quality}'):
        add_jpg_compression(image(), quality)

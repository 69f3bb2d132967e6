import copy
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden import recipe as inputs

from basicsr.data import second_order
from basicsr.data.degradations import add_gaussian_noise_pt, add_poisson_noise_pt
from basicsr.data.recipes import check_options, draw_kernels, draw_recipe, draw_recipes
from basicsr.data.second_order import degrade
from basicsr.utils.diffjpeg import DiffJPEG
from basicsr.utils.img_process_util import filter2D

# The values of the published training of Real-ESRGAN.
OPT = {
    'resize_prob': [0.2, 0.7, 0.1],
    'resize_range': [0.15, 1.5],
    'gaussian_noise_prob': 0.5,
    'noise_range': [1, 30],
    'poisson_scale_range': [0.05, 3],
    'gray_noise_prob': 0.4,
    'jpeg_range': [30, 95],
    'second_blur_prob': 0.8,
    'resize_prob2': [0.3, 0.4, 0.3],
    'resize_range2': [0.3, 1.2],
    'gaussian_noise_prob2': 0.5,
    'noise_range2': [1, 25],
    'poisson_scale_range2': [0.05, 2.5],
    'gray_noise_prob2': 0.4,
    'jpeg_range2': [30, 95],
}
KERNELS = {
    'iso': 0.45,
    'aniso': 0.25,
    'generalized_iso': 0.12,
    'generalized_aniso': 0.03,
    'plateau_iso': 0.12,
    'plateau_aniso': 0.03,
}
KERNEL_OPT = {'final_sinc_prob': 0.8}
for stage, widths in (('', [0.2, 3]), ('2', [0.2, 1.5])):
    KERNEL_OPT |= {
        f'blur_kernel_size{stage}': 21,
        f'kernel_list{stage}': list(KERNELS),
        f'kernel_prob{stage}': list(KERNELS.values()),
        f'sinc_prob{stage}': 0.1,
        f'blur_sigma{stage}': widths,
        f'betag_range{stage}': [0.5, 4],
        f'betap_range{stage}': [1, 2],
    }


def samples(count, height=48, width=64, channels=3, shared=False):
    """GT images, their three kernels, and recipes."""
    images = [inputs.det_image(f'gt/{i}', height, width, channels) for i in range(count)]
    gt = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    kernels = zip(*(draw_kernels(KERNEL_OPT)[:3] for _ in range(count)), strict=True)
    kernels = [torch.from_numpy(np.stack(kind)).float() for kind in kernels]
    return gt, *kernels, draw_recipes(OPT, count, range(count), shared)


# recipes


def test_a_recipe_follows_from_its_seed_and_survives_json():
    recipe = draw_recipe(OPT, 7)
    assert json.loads(json.dumps(recipe)) == recipe == draw_recipe(OPT, 7)
    assert recipe['seed'] == 7 and recipe != draw_recipe(OPT, 8) | {'seed': 7}


def test_without_a_seed_it_comes_from_the_random_module_and_is_kept():
    random.seed(1)
    recipe = draw_recipe(OPT)
    random.seed(1)
    assert draw_recipes(OPT, 1) == [recipe] == [draw_recipe(OPT, recipe['seed'])]
    assert recipe['seed'] < 2**53  # exact in readers of JSON that know float64 only


def test_with_a_seed_nobody_elses_random_numbers_are_used_and_the_options_stay():
    opt, state = copy.deepcopy(OPT), random.getstate()
    draw_recipes(opt, 2, [1, 2], shared=True)
    assert random.getstate() == state and opt == OPT


@pytest.mark.parametrize('stage', ['', '2'])
def test_recipes_stay_within_the_options_and_reach_all_of_them(stage):
    recipes = draw_recipes(OPT, 1500, range(1500))
    low, high = OPT[f'resize_range{stage}']
    factors = np.array([recipe[f'resize_factor{stage}'] for recipe in recipes])
    assert low <= factors.min() < low + 0.05 and high - 0.05 < factors.max() <= high
    shares = (factors > 1).mean(), (factors < 1).mean(), (factors == 1).mean()
    assert shares == pytest.approx(OPT[f'resize_prob{stage}'], abs=0.05)
    modes = [recipe[f'resize_mode{stage}'] for recipe in recipes]
    assert all(modes.count(mode) > 400 for mode in ('area', 'bilinear', 'bicubic'))
    for noise, option in (('gaussian', 'noise_range'), ('poisson', 'poisson_scale_range')):
        chosen = [recipe for recipe in recipes if recipe[f'noise{stage}'] == noise]
        levels = np.array([recipe[f'noise_level{stage}'] for recipe in chosen])
        low, high = OPT[f'{option}{stage}']
        assert len(chosen) == pytest.approx(750, abs=90)
        assert low <= levels.min() and levels.max() <= high
        assert levels.mean() == pytest.approx((low + high) / 2, rel=0.1)
    qualities = np.array([recipe[f'jpeg_quality{stage}'] for recipe in recipes])
    assert 30 <= qualities.min() < 32 and 93 < qualities.max() <= 95
    gray = np.mean([recipe[f'gray_noise{stage}'] for recipe in recipes])
    assert gray == pytest.approx(0.4, abs=0.05)


def test_branches_have_their_probabilities():
    recipes = draw_recipes(OPT, 1500, range(1500))
    assert np.mean([r['second_blur'] for r in recipes]) == pytest.approx(0.8, abs=0.05)
    assert np.mean([r['jpeg_last'] for r in recipes]) == pytest.approx(0.5, abs=0.05)


def test_shared_recipes_take_the_branches_of_the_first_and_levels_of_their_own():
    own = {'seed', 'crop'} | {
        f'{name}{stage}'
        for name in ('noise_level', 'gray_noise', 'jpeg_quality')
        for stage in ('', '2')
    }
    for first in range(20):
        recipes = draw_recipes(OPT, 6, range(first, first + 6), shared=True)
        assert recipes[0] == draw_recipe(OPT, first)
        for name in recipes[0]:
            assert name in own or len({recipe[name] for recipe in recipes}) == 1
        assert len({recipe['noise_level'] for recipe in recipes}) == 6
        if recipes[0]['noise'] == 'poisson':
            assert max(recipe['noise_level'] for recipe in recipes) <= 3


def test_recipes_differ_in_their_branches_unless_shared():
    assert len({recipe['resize_factor'] for recipe in draw_recipes(OPT, 9, range(9))}) > 5


def test_each_sample_needs_a_seed():
    with pytest.raises(ValueError, match='2 seeds are given for 3 samples'):
        draw_recipes(OPT, 3, [1, 2])


def test_a_missing_option_is_named():
    with pytest.raises(KeyError, match='jpeg_range2'):
        draw_recipe({name: value for name, value in OPT.items() if name != 'jpeg_range2'})


# kernels


def test_kernels_are_padded_to_21_and_sum_to_one():
    for _ in range(30):
        *kernels, drawn = draw_kernels(KERNEL_OPT)
        assert list(drawn) == ['kernel1', 'kernel2', 'sinc_kernel']
        json.dumps(drawn)
        for kernel, parameters in zip(kernels, drawn.values(), strict=True):
            assert kernel.shape == (21, 21) and kernel.sum() == pytest.approx(1)
            margin = (21 - parameters['kernel_size']) // 2
            assert not kernel[:margin].any() and kernel[10, 10] > 0


def test_kernels_are_drawn_as_often_as_the_options_say():
    drawn = [draw_kernels(KERNEL_OPT)[3] for _ in range(600)]
    kinds = [parameters['kernel1']['kind'] for parameters in drawn]
    assert kinds.count('sinc') / 600 == pytest.approx(0.1, abs=0.05)
    assert kinds.count('iso') / 600 == pytest.approx(0.9 * 0.45, abs=0.08)
    final = [parameters['sinc_kernel']['kind'] for parameters in drawn]
    assert final.count('delta') / 600 == pytest.approx(0.2, abs=0.06)
    assert {p['kernel1']['kernel_size'] for p in drawn} == set(range(7, 22, 2))
    assert max(p['kernel2'].get('sig_x', 0) for p in drawn) <= 1.5
    for name in ('kernel1', 'sinc_kernel'):
        for p in drawn:
            if p[name]['kind'] == 'sinc':
                small = name == 'sinc_kernel' or p[name]['kernel_size'] < 13
                assert np.pi / (3 if small else 5) <= p[name]['cutoff'] <= np.pi


def test_kernels_follow_from_the_seeds_of_random_and_numpy():
    kernels = []
    for _ in range(2):
        random.seed(2), np.random.seed(2)
        kernels.append(draw_kernels(KERNEL_OPT))
    assert kernels[0][3] == kernels[1][3]
    assert all(np.array_equal(a, b) for a, b in zip(kernels[0][:3], kernels[1][:3], strict=True))


def test_the_largest_kernel_size_is_honoured():
    opt = KERNEL_OPT | {'blur_kernel_size': 9, 'blur_kernel_size2': 31}
    drawn = [draw_kernels(opt) for _ in range(150)]
    assert {d[3]['kernel1']['kernel_size'] for d in drawn} == {7, 9}
    assert max(d[3]['kernel2']['kernel_size'] for d in drawn) > 25
    assert drawn[0][0].shape == (21, 21) and drawn[0][1].shape == (31, 31)


@pytest.mark.parametrize('size', [5, 20])
def test_a_kernel_size_that_cannot_be_is_an_error(size):
    with pytest.raises(ValueError, match=f'blur_kernel_size2 is {size}'):
        check_options(KERNEL_OPT | {'blur_kernel_size2': size}, 'kernels')


@pytest.mark.parametrize(
    ('part', 'change', 'message'),
    [
        ('kernels', {'kernel_list2': ['iso', 'anisoo']}, "kernel_list2 names 'anisoo'; did you"),
        ('kernels', {'kernel_prob': [0.5]}, r'kernel_prob is \[0.5\]; it must be 2 weights'),
        ('kernels', {'sinc_prob2': 1.5}, 'sinc_prob2 is 1.5; a probability'),
        ('kernels', {'blur_sigma': [3, 0.2]}, r'blur_sigma is \[3, 0.2\]'),
        ('kernels', {'betag_range': [2, 4]}, r'betag_range is \[2, 4\]; it must hold 1'),
        ('recipes', {'jpeg_range2': [50, 150]}, r'jpeg_range2 is \[50, 150\]'),
        ('recipes', {'resize_prob': [0.5, 0.5]}, 'it must be 3 weights'),
        ('recipes', {'resize_prob2': [0, 0, 0]}, 'not all of them 0'),
        ('recipes', {'second_blur_prob': -0.1}, 'second_blur_prob is -0.1'),
        ('recipes', {'poisson_scale_range': [1]}, r'must be \[lowest, highest\]'),
    ],
)
def test_options_that_would_fail_at_some_sample_are_refused_at_once(part, change, message):
    opt = {**KERNEL_OPT, 'kernel_list': ['iso', 'aniso'], 'kernel_prob': [0.5, 0.5]}
    opt |= {'kernel_list2': ['iso', 'aniso'], 'kernel_prob2': [0.5, 0.5], **OPT}
    check_options(opt, 'kernels', 'recipes')
    with pytest.raises(ValueError, match=message):
        check_options(opt | change, part)


@pytest.mark.parametrize('name', sorted(OPT))
def test_every_option_of_a_recipe_is_missed_at_once(name):
    with pytest.raises(KeyError, match=name):
        check_options({k: v for k, v in OPT.items() if k != name}, 'recipes')


# images


def by_hand(gt, kernel1, kernel2, sinc, recipe, scale):
    """The degradation of one image, step by step."""
    h, w = gt.shape[-2:]
    generator = torch.Generator().manual_seed(recipe['seed'])
    jpeg = DiffJPEG(differentiable=False)

    def resize_and_add_noise(x, height, width, stage):
        factor = recipe[f'resize_factor{stage}']
        size = int(height * factor), int(width * factor)
        x = F.interpolate(x, size, mode=recipe[f'resize_mode{stage}'])
        add = {'gaussian': add_gaussian_noise_pt, 'poisson': add_poisson_noise_pt}
        level, gray = recipe[f'noise_level{stage}'], recipe[f'gray_noise{stage}']
        return add[recipe[f'noise{stage}']](x, level, gray_noise=gray, generator=generator)

    def compress(x, stage):
        return jpeg(x.clamp(0, 1), recipe[f'jpeg_quality{stage}'])

    def finish(x):
        x = F.interpolate(x, (h // scale, w // scale), mode=recipe['final_resize_mode'])
        return filter2D(x, sinc)

    x = resize_and_add_noise(filter2D(gt, kernel1), h, w, '')
    x = compress(x, '')
    x = filter2D(x, kernel2) if recipe['second_blur'] else x
    x = resize_and_add_noise(x, h // scale, w // scale, '2')
    x = compress(finish(x), '2') if recipe['jpeg_last'] else finish(compress(x, '2'))
    return (x * 255).round().clamp(0, 255) / 255


def test_the_steps_come_in_the_order_of_real_esrgan():
    *tensors, recipes = samples(8)
    assert len({(r['second_blur'], r['jpeg_last']) for r in recipes}) > 2
    lq = degrade(*tensors, recipes, 4)
    for index, recipe in enumerate(recipes):
        one = [tensor[index : index + 1] for tensor in tensors]
        # A quality in single or double precision may move a pixel over a rounding.
        difference = (lq[index] - by_hand(*one, recipe, 4)[0]).abs()
        assert (difference > 1e-6).float().mean() < 0.01


def test_the_result_is_in_eight_bits_and_scale_times_smaller():
    lq = degrade(*samples(3), 4)
    assert lq.shape == (3, 3, 12, 16) and lq.dtype == torch.float32
    assert torch.equal((lq * 255).round() / 255, lq) and lq.min() >= 0 and lq.max() <= 1
    assert lq.std() > 0.05


def test_a_recipe_gives_the_same_bits_again():
    *tensors, recipes = samples(4)
    before, state = [tensor.clone() for tensor in tensors], torch.get_rng_state()
    first = degrade(*tensors, recipes, 4)
    torch.rand(3)
    again = degrade(*tensors, json.loads(json.dumps(recipes)), 4)
    assert torch.equal(first, again)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    torch.set_rng_state(state)
    degrade(*tensors, recipes, 4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize('shared', [False, True])
def test_a_sample_gets_the_same_bits_alone_and_in_any_batch(shared):
    *tensors, recipes = samples(5, shared=shared)
    together = degrade(*tensors, recipes, 2)
    for index in range(5):
        alone = degrade(*(t[index : index + 1] for t in tensors), recipes[index : index + 1], 2)
        assert torch.equal(alone[0], together[index])
    order = [3, 0, 4]
    some = degrade(*(t[order] for t in tensors), [recipes[i] for i in order], 2)
    assert torch.equal(some, together[order])


def test_equal_samples_with_other_seeds_get_other_noise():
    gt, *kernels, recipes = samples(1)
    recipes = [recipes[0], recipes[0] | {'seed': 99}]
    lq = degrade(gt.repeat(2, 1, 1, 1), *(k.repeat(2, 1, 1) for k in kernels), recipes, 4)
    assert not torch.equal(lq[0], lq[1])


@pytest.mark.parametrize(
    ('height', 'width', 'scale'), [(52, 44, 4), (9, 15, 3), (4, 4, 4), (25, 31, 1)]
)
@pytest.mark.parametrize('channels', [1, 3])
def test_odd_sizes_and_gray_images_can_be_degraded(height, width, scale, channels):
    lq = degrade(*samples(3, height, width, channels), scale)
    assert lq.shape == (3, channels, height // scale, width // scale) and lq.isfinite().all()


def test_a_second_blur_that_is_not_in_the_recipe_does_not_happen():
    gt, kernel1, kernel2, sinc, recipes = samples(1)
    recipes = [recipes[0] | {'second_blur': False}]
    expected = degrade(gt, kernel1, kernel2, sinc, recipes, 4)
    assert torch.equal(degrade(gt, kernel1, kernel2 * float('nan'), sinc, recipes, 4), expected)
    recipes = [recipes[0] | {'second_blur': True}]
    assert not torch.equal(degrade(gt, kernel1, kernel2, sinc, recipes, 4), expected)


def test_a_clean_recipe_is_a_reduction():
    """No blur, no noise, quality 100: what is left is the resizing."""
    gt = samples(1)[0].mean(1, keepdim=True).repeat(1, 3, 1, 1)  # JPEG would halve the colours
    delta = torch.zeros(1, 21, 21)
    delta[:, 10, 10] = 1
    recipe = draw_recipe(OPT, 1)
    for stage in ('', '2'):
        recipe |= {f'resize_factor{stage}': 1.0, f'noise{stage}': 'gaussian'}
        recipe |= {f'noise_level{stage}': 0.0, f'jpeg_quality{stage}': 100.0}
        recipe |= {f'resize_mode{stage}': 'area'}
    lq = degrade(gt, delta, delta, delta, [recipe], 4)
    torch.testing.assert_close(lq, F.avg_pool2d(gt, 4), rtol=0, atol=1.01 / 255)


def test_images_that_fit_no_scale_or_have_no_recipe_are_errors():
    *tensors, recipes = samples(2)
    with pytest.raises(ValueError, match='gt 48x64 .* not a multiple of scale 5'):
        degrade(*tensors, recipes, 5)
    with pytest.raises(ValueError, match='1 recipes are given for 2 images'):
        degrade(*tensors, recipes[:1], 4)


def test_off_the_cpu_images_of_one_size_and_one_step_make_one_batch():
    images = [torch.empty(1, 3, size, 8, device='meta') for size in (4, 6, 4, 4, 6)]
    calls = []

    def step(batch, members):
        calls.append((tuple(batch.shape), members))
        return batch[:, :1]

    out = second_order._in_groups(step, images, ['a', 'a', 'b', 'a', None])
    assert calls == [((2, 3, 4, 8), [0, 3]), ((1, 3, 6, 8), [1]), ((1, 3, 4, 8), [2])]
    assert [tuple(image.shape[:2]) for image in out] == [(1, 1)] * 4 + [(1, 3)]
    assert out[4] is images[4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='there is no CUDA device')
def test_on_a_gpu_a_recipe_gives_the_same_image_again():
    *tensors, recipes = samples(6)
    tensors = [tensor.cuda() for tensor in tensors]
    first, again = (degrade(*tensors, recipes, 4) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=1.01 / 255)
    assert first.device.type == 'cuda' and first.shape == (6, 3, 12, 16)

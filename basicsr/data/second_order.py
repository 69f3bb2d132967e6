"""The second-order degradation of Real-ESRGAN: blur, resize, noise and JPEG, twice.

Xintao Wang, Liangbin Xie, Chao Dong, Ying Shan, "Real-ESRGAN: Training Real-World Blind
Super-Resolution with Pure Synthetic Data" (2021), https://arxiv.org/abs/2107.10833

All random choices for a sample are drawn first: its kernels (``draw_kernels``) and a recipe of
plain numbers (``draw_recipe``), which can be logged and stored as JSON. ``degrade`` applies them,
so the same recipe always gives the same image.
"""

import functools
import math
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from basicsr.utils.diffjpeg import DiffJPEG
from basicsr.utils.errors import UserError
from basicsr.utils.img_process_util import filter2D
from basicsr.utils.text import did_you_mean

from .degradations import (
    add_gaussian_noise_pt,
    add_poisson_noise_pt,
    circular_lowpass_kernel,
    draw_mixed_kernel,
    pad_kernel,
)

Recipe = dict[str, Any]

STAGES = ('', '2')  # how the names of options and of recipe entries end
RESIZE_MODES = ('area', 'bilinear', 'bicubic')
SMALLEST_KERNEL, PADDED_KERNEL = 7, 21
KERNEL_OPTIONS = (
    *(
        f'{name}{stage}'
        for name in (
            *('blur_kernel_size', 'kernel_list', 'kernel_prob', 'sinc_prob', 'blur_sigma'),
            *('betag_range', 'betap_range'),
        )
        for stage in STAGES
    ),
    'final_sinc_prob',
)

KERNEL_KINDS = [
    f'{family}{shape}' for family in ('', 'generalized_', 'plateau_') for shape in ('iso', 'aniso')
]


def check_options(opt: dict, *parts: str) -> None:
    """Refuse options that would make drawing fail, possibly only after many samples.

    Args:
        opt: As of ``draw_kernels`` and ``draw_recipe``.
        parts: 'kernels', 'recipes', or both.

    Raises:
        KeyError: An option is missing.
        ValueError: The value of an option is invalid; the message names it.
    """
    for stage in STAGES:
        if 'kernels' in parts:
            _check_kernel_options(opt, stage)
        if 'recipes' in parts:
            for name in ('resize_range', 'noise_range', 'poisson_scale_range', 'jpeg_range'):
                _check_range(opt, f'{name}{stage}')
            for name in ('gaussian_noise_prob', 'gray_noise_prob'):
                _check_probability(opt, f'{name}{stage}')
            _check_weights(opt, f'resize_prob{stage}', 3)
            low, high = opt[f'jpeg_range{stage}']
            if low < 1 or high > 100:
                raise UserError(f'jpeg_range{stage} is [{low}, {high}]; it must be in [1, 100].')
    if 'kernels' in parts:
        _check_probability(opt, 'final_sinc_prob')
    if 'recipes' in parts:
        _check_probability(opt, 'second_blur_prob')


def _check_kernel_options(opt: dict, stage: str) -> None:
    largest = opt.get(f'blur_kernel_size{stage}', PADDED_KERNEL)
    if not isinstance(largest, int) or largest < SMALLEST_KERNEL or largest % 2 == 0:
        raise UserError(
            f'blur_kernel_size{stage} is {largest}; it must be odd and at least {SMALLEST_KERNEL}.'
        )
    kinds = _required(opt, f'kernel_list{stage}')
    if not kinds or not isinstance(kinds, list | tuple):
        raise UserError(f'kernel_list{stage} is {kinds}; it must be a list of kinds.')
    unknown = [kind for kind in kinds if kind not in KERNEL_KINDS]
    if unknown:
        hint = did_you_mean(unknown[0], KERNEL_KINDS)
        raise UserError(
            f"kernel_list{stage} names '{unknown[0]}'{hint} There are {', '.join(KERNEL_KINDS)}."
        )
    _check_weights(opt, f'kernel_prob{stage}', len(kinds))
    _check_probability(opt, f'sinc_prob{stage}')
    _check_range(opt, f'blur_sigma{stage}')
    for name in ('betag_range', 'betap_range'):
        _check_range(opt, f'{name}{stage}')
        low, high = opt[f'{name}{stage}']
        if not low <= 1 <= high:
            raise UserError(
                f'{name}{stage} is [{low}, {high}]; it must hold 1, since exponents below and '
                'above 1 are equally likely.'
            )


def _numbers(opt: dict, name: str) -> list:
    """The value of an option that is a list of numbers, else an empty list."""
    value = _required(opt, name)
    is_list = isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value)
    return list(value) if is_list else []


def _required(opt: dict, name: str) -> Any:
    if opt[name] is None:
        raise KeyError(name)
    return opt[name]


def _check_range(opt: dict, name: str) -> None:
    value = _numbers(opt, name)
    if len(value) != 2 or not 0 <= value[0] <= value[1]:
        raise UserError(f'{name} is {opt[name]}; it must be [lowest, highest], not below 0.')


def _check_probability(opt: dict, name: str) -> None:
    value = _required(opt, name)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f'{name} is {opt[name]}; a probability is from 0 to 1.')


def _check_weights(opt: dict, name: str, count: int) -> None:
    value = _numbers(opt, name)
    if len(value) != count or min(value) < 0 or sum(value) <= 0:
        raise UserError(f'{name} is {opt[name]}; it must be {count} weights, not all of them 0.')


def draw_kernels(opt: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, dict]]:
    """The kernels of a sample, drawn with ``random`` and ``numpy.random``.

    Args:
        opt: ``blur_kernel_size`` (largest size, odd; default 21), ``kernel_list``,
            ``kernel_prob``, ``sinc_prob``, ``blur_sigma``, ``betag_range``, ``betap_range``, the
            same ending in 2 for the second blur, and ``final_sinc_prob``.

    Returns:
        The kernels of the first and second blur and of the final sinc filter, each (21, 21), or
        larger where ``blur_kernel_size`` is; then what was drawn for them, under 'kernel1',
        'kernel2' and 'sinc_kernel'.
    """
    kernel1, drawn1 = _draw_blur(opt, '')
    kernel2, drawn2 = _draw_blur(opt, '2')
    sinc_kernel, drawn = _draw_final_sinc(opt['final_sinc_prob'])
    return (
        kernel1,
        kernel2,
        sinc_kernel,
        {'kernel1': drawn1, 'kernel2': drawn2, 'sinc_kernel': drawn},
    )


def _draw_blur(opt: dict, stage: str) -> tuple[np.ndarray, dict]:
    largest = opt.get(f'blur_kernel_size{stage}', PADDED_KERNEL)
    size = _draw_size(largest)
    if np.random.uniform() < opt[f'sinc_prob{stage}']:
        # The lower the cutoff, the longer the ripples: they do not fit into small kernels.
        kernel, drawn = _draw_sinc(size, math.pi / 3 if size < 13 else math.pi / 5)
    else:
        sigma_range = opt[f'blur_sigma{stage}']
        kernel, drawn = draw_mixed_kernel(
            opt[f'kernel_list{stage}'],
            opt[f'kernel_prob{stage}'],
            size,
            sigma_range,
            sigma_range,
            (-math.pi, math.pi),
            opt[f'betag_range{stage}'],
            opt[f'betap_range{stage}'],
        )
    return pad_kernel(kernel, max(largest, PADDED_KERNEL)), drawn


def _draw_final_sinc(probability: float) -> tuple[np.ndarray, dict]:
    if np.random.uniform() < probability:
        kernel, drawn = _draw_sinc(_draw_size(PADDED_KERNEL), math.pi / 3)
    else:
        kernel, drawn = np.ones((1, 1)), {'kind': 'delta', 'kernel_size': 1}
    return pad_kernel(kernel, PADDED_KERNEL), drawn


def _draw_size(largest: int) -> int:
    return random.choice(range(SMALLEST_KERNEL, largest + 1, 2))


def _draw_sinc(size: int, lowest_cutoff: float) -> tuple[np.ndarray, dict]:
    cutoff = np.random.uniform(lowest_cutoff, math.pi)
    kernel = circular_lowpass_kernel(cutoff, size)
    return kernel, {'kind': 'sinc', 'kernel_size': size, 'cutoff': cutoff}


def draw_recipes(
    opt: dict, count: int, seeds: Sequence[int] | None = None, shared: bool = False
) -> list[Recipe]:
    """The recipes of a batch of ``count`` samples.

    Args:
        opt: As of ``draw_recipe``.
        count: Number of samples.
        seeds: One for each; default: drawn from ``random``.
        shared: All samples are resized alike, get the same kind of noise, and take the same
            branches, those of the first, as upstream does. Else each has its own.
    """
    seeds = [draw_seed() for _ in range(count)] if seeds is None else seeds
    if len(seeds) != count:
        raise UserError(f'{len(seeds)} seeds are given for {count} samples; each needs one.')
    branches = _draw_branches(opt, random.Random(seeds[0])) if shared else None
    return [draw_recipe(opt, seed, branches) for seed in seeds]


def draw_recipe(opt: dict, seed: int | None = None, branches: Recipe | None = None) -> Recipe:
    """Everything that ``degrade`` needs for a sample except the kernels.

    Args:
        opt: Names below, each also ending in 2 for the second time, but ``second_blur_prob``.

            * ``resize_prob``: weights of enlarging, reducing and keeping the size.
            * ``resize_range``: lowest and highest factor of the size.
            * ``gaussian_noise_prob``: probability of Gaussian noise; else it is Poisson noise.
            * ``noise_range``: of Gaussian noise, lowest and highest sigma in units of 1/255.
            * ``poisson_scale_range``: lowest and highest factor of Poisson noise.
            * ``gray_noise_prob``: probability of noise that is the same in all channels.
            * ``jpeg_range``: lowest and highest quality.
            * ``second_blur_prob``: probability of the second blur.
        seed: Determines the recipe and the noise itself; default: drawn from ``random``.
        branches: Entries of another recipe, which replace those of this one.

    Returns:
        Plain numbers and strings by name.
    """
    seed = draw_seed() if seed is None else seed
    rng = random.Random(seed)
    recipe = {'seed': seed, **_draw_branches(opt, rng), **(branches or {})}
    for stage in STAGES:
        gaussian = recipe[f'noise{stage}'] == 'gaussian'
        levels = opt[f'noise_range{stage}' if gaussian else f'poisson_scale_range{stage}']
        recipe[f'noise_level{stage}'] = rng.uniform(*levels)
        recipe[f'gray_noise{stage}'] = rng.random() < opt[f'gray_noise_prob{stage}']
        recipe[f'jpeg_quality{stage}'] = rng.uniform(*opt[f'jpeg_range{stage}'])
    recipe['crop'] = [rng.random(), rng.random()]
    return recipe


def draw_seed() -> int:
    """The seed of a recipe, drawn with ``random``."""
    return random.getrandbits(53)  # JSON readers may keep numbers as float64


def _draw_branches(opt: dict, rng: random.Random) -> Recipe:
    """What upstream shares within a batch."""
    branches: Recipe = {}
    for stage in STAGES:
        low, high = opt[f'resize_range{stage}']
        factors = rng.uniform(1, high), rng.uniform(low, 1), 1.0
        branches[f'resize_factor{stage}'] = rng.choices(factors, opt[f'resize_prob{stage}'])[0]
        branches[f'resize_mode{stage}'] = rng.choice(RESIZE_MODES)
        gaussian = rng.random() < opt[f'gaussian_noise_prob{stage}']
        branches[f'noise{stage}'] = 'gaussian' if gaussian else 'poisson'
    branches['second_blur'] = rng.random() < opt['second_blur_prob']
    branches['final_resize_mode'] = rng.choice(RESIZE_MODES)
    branches['jpeg_last'] = rng.random() < 0.5
    return branches


@torch.no_grad()
def make_pairs(
    gt: Tensor,
    kernels: Sequence[Tensor],
    recipes: Sequence[Recipe],
    opt: dict,
    sharpen: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Pairs to train on: patches of degraded images, at random places, and of their GT.

    Args:
        gt, recipes: As of ``degrade``.
        kernels: The three kinds of kernels of ``degrade``.
        opt: ``scale``; ``gt_size``, the side of the GT patches, unless the recipes have one;
            ``gt_usm``: true for a sharpened GT, false for a LQ made of the plain GT; without it the
            sharpened GT is degraded only.
        sharpen: Such as USMSharp.

    Returns:
        LQ (b, c, gt_size / scale, gt_size / scale) and GT (b, c, gt_size, gt_size).
    """
    scale, sharpened = opt['scale'], opt.get('gt_usm')
    size = recipes[0].get('gt_size', opt['gt_size'])
    source = gt if sharpened is False else sharpen(gt)
    lq = degrade(source, *kernels, recipes=recipes, scale=scale)
    target = source if sharpened else gt
    room = [length - size // scale + 1 for length in lq.shape[-2:]]
    if min(room) < 1:
        raise UserError(f'gt_size {size} is more than the {gt.shape[-2]}x{gt.shape[-1]} of GT.')
    lqs, gts = [], []
    for i, recipe in enumerate(recipes):
        top, left = (int(u * n) for u, n in zip(recipe['crop'], room, strict=True))
        lqs.append(_window(lq[i], top, left, size // scale))
        gts.append(_window(target[i], top * scale, left * scale, size))
    return torch.stack(lqs), torch.stack(gts)


def _window(img: Tensor, top: int, left: int, size: int) -> Tensor:
    return img[..., top : top + size, left : left + size]


@torch.no_grad()
def degrade(
    gt: Tensor,
    kernels1: Tensor,
    kernels2: Tensor,
    sinc_kernels: Tensor,
    recipes: Sequence[Recipe],
    scale: int,
) -> Tensor:
    """Make low-quality images by the second-order degradation.

    On the CPU the result for an image is bit-identical in any batch.

    Args:
        gt: (b, 3, h, w) or (b, 1, h, w), in [0, 1], with h and w multiples of ``scale``. Sharpened
            beforehand if desired.
        kernels1: Of the first blur, (b, k, k).
        kernels2: Of the second blur, which not all recipes have, (b, k, k).
        sinc_kernels: Of the last filter, (b, k, k).
        recipes: One for each image, of ``draw_recipe``.
        scale: How many times smaller the result is.

    Returns:
        (b, c, h / scale, w / scale) in [0, 1], rounded to multiples of 1/255.
    """
    b, _, h, w = gt.shape
    if len(recipes) != b:
        raise UserError(f'{len(recipes)} recipes are given for {b} images; each needs one.')
    if h % scale or w % scale:
        raise UserError(f'gt {h}x{w} (height x width) is not a multiple of scale {scale}: crop it.')
    lq_size = h // scale, w // scale
    generators = [torch.Generator(gt.device).manual_seed(recipe['seed']) for recipe in recipes]
    jpeg_last = [recipe['jpeg_last'] for recipe in recipes]

    images = _blur(gt.split(1), kernels1, [True] * b)
    images = _resize_and_add_noise(images, recipes, '', (h, w), generators)
    images = _compress(images, recipes, '', [True] * b)
    images = _blur(images, kernels2, [recipe['second_blur'] for recipe in recipes])
    images = _resize_and_add_noise(images, recipes, '2', lq_size, generators)
    images = _compress(images, recipes, '2', [not last for last in jpeg_last])
    images = _resize(images, [(lq_size, recipe['final_resize_mode']) for recipe in recipes])
    images = _blur(images, sinc_kernels, [True] * b)
    images = _compress(images, recipes, '2', jpeg_last)
    return (torch.cat(images) * 255).round().clamp(0, 255) / 255


def _resize_and_add_noise(
    images: Sequence[Tensor],
    recipes: Sequence[Recipe],
    stage: str,
    size: tuple[int, int],
    generators: Sequence[torch.Generator],
) -> list[Tensor]:
    """Resize the images to the recipes' factors of ``size``, and add noise to each."""
    targets = []
    for recipe in recipes:
        factor = recipe[f'resize_factor{stage}']
        height, width = (max(int(side * factor), 1) for side in size)
        targets.append(((height, width), recipe[f'resize_mode{stage}']))
    add = {'gaussian': add_gaussian_noise_pt, 'poisson': add_poisson_noise_pt}
    return [
        add[recipe[f'noise{stage}']](
            image,
            recipe[f'noise_level{stage}'],
            gray_noise=recipe[f'gray_noise{stage}'],
            generator=generator,
        )
        for image, recipe, generator in zip(
            _resize(images, targets), recipes, generators, strict=True
        )
    ]


def _blur(images: Sequence[Tensor], kernels: Tensor, chosen: Sequence[bool]) -> list[Tensor]:
    return _in_groups(lambda batch, members: filter2D(batch, kernels[members]), images, chosen)


def _resize(
    images: Sequence[Tensor], targets: Sequence[tuple[tuple[int, int], str]]
) -> list[Tensor]:
    """Resize each image to its (height, width), by its mode."""

    def step(batch: Tensor, members: list[int]) -> Tensor:
        # To a size, not by a factor: the factor would not be that of the sizes once these are
        # whole numbers, and the image would move against its GT.
        size, mode = targets[members[0]]
        return F.interpolate(batch, size, mode=mode)

    return _in_groups(step, images, targets)


def _compress(
    images: Sequence[Tensor], recipes: Sequence[Recipe], stage: str, chosen: Sequence[bool]
) -> list[Tensor]:
    def step(batch: Tensor, members: list[int]) -> Tensor:
        quality = torch.tensor([recipes[i][f'jpeg_quality{stage}'] for i in members])
        return _jpeg(batch.device)(batch.clamp(0, 1), quality)

    return _in_groups(step, images, chosen)


def compile_jpeg(device: torch.device) -> None:
    """Compile the JPEG compression on a device, for all later batches and models.

    The other steps are not compiled: blurs are Fourier transforms, resizing has its own kernels.
    """
    _jpeg(device).compile()


@functools.cache
def _jpeg(device: torch.device) -> DiffJPEG:
    """Cached, so that its constant tables are copied to a device only once."""
    return DiffJPEG(differentiable=False).to(device)


def _in_groups(
    step: Callable[[Tensor, list[int]], Tensor],
    images: Sequence[Tensor],
    keys: Sequence[Hashable],
) -> list[Tensor]:
    """Images (1, c, h, w) after ``step(batch, indices)``; those with a false key stay.

    Images of one size and one key form a batch. On the CPU each is its own, since the bits of a
    convolution depend on the size of the batch.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, (image, key) in enumerate(zip(images, keys, strict=True)):
        if key:
            group = index if image.device.type == 'cpu' else (image.shape, key)
            groups.setdefault(group, []).append(index)
    result = list(images)
    for members in groups.values():
        batch = step(torch.cat([images[index] for index in members]), members)
        for index, image in zip(members, batch.split(1), strict=True):
            result[index] = image
    return result

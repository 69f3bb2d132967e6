"""Draw what is random in the second-order degradation: kernels, and a recipe for each sample.

Xintao Wang, Liangbin Xie, Chao Dong, Ying Shan, "Real-ESRGAN: Training Real-World Blind
Super-Resolution with Pure Synthetic Data" (2021), https://arxiv.org/abs/2107.10833

A recipe holds plain numbers only, so that it can be logged and stored as JSON.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from basicsr.utils.errors import UserError
from basicsr.utils.text import did_you_mean

from .degradations import circular_lowpass_kernel, draw_mixed_kernel, pad_kernel

Recipe = dict[str, Any]
STAGES = ('', '2')  # suffixes of the names of options and of recipe entries
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
        opt: The options of ``draw_kernels`` and ``draw_recipe``.
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
        raise UserError(f'{name} is {opt[name]}; it must be [lowest, highest], both at least 0.')


def _check_probability(opt: dict, name: str) -> None:
    value = _required(opt, name)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f'{name} is {opt[name]}; a probability must be from 0 to 1.')


def _check_weights(opt: dict, name: str, count: int) -> None:
    value = _numbers(opt, name)
    if len(value) != count or min(value) < 0 or sum(value) <= 0:
        raise UserError(f'{name} is {opt[name]}; it must be {count} weights, not all of them 0.')


def draw_kernels(opt: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, dict]]:
    """The kernels of a sample, drawn with ``random`` and ``numpy.random``.

    Args:
        opt: ``blur_kernel_size`` (largest size, odd; default 21), ``kernel_list``,
            ``kernel_prob``, ``sinc_prob``, ``blur_sigma``, ``betag_range``, ``betap_range``, the
            same with the suffix 2 for the second blur, and ``final_sinc_prob``.

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
        # A lower cutoff makes longer ripples, which do not fit into small kernels.
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
        opt: As for ``draw_recipe``.
        count: Number of samples.
        seeds: One for each; default: drawn from ``random``.
        shared: Resize all samples alike, with the same kind of noise and the same branches, those
            of the first one, as upstream does. Otherwise each has its own.
    """
    seeds = [draw_seed() for _ in range(count)] if seeds is None else seeds
    if len(seeds) != count:
        raise UserError(f'{len(seeds)} seeds are given for {count} samples; each needs one.')
    branches = _draw_branches(opt, random.Random(seeds[0])) if shared else None
    return [draw_recipe(opt, seed, branches) for seed in seeds]


def draw_recipe(opt: dict, seed: int | None = None, branches: Recipe | None = None) -> Recipe:
    """Everything that ``degrade`` needs for a sample except the kernels.

    Args:
        opt: The options below; all but ``second_blur_prob`` also with the suffix 2, for the second
            round.

            * ``resize_prob``: weights of enlarging, reducing and keeping the size.
            * ``resize_range``: lowest and highest factor of the size.
            * ``gaussian_noise_prob``: probability of Gaussian noise; else it is Poisson noise.
            * ``noise_range``: of Gaussian noise, lowest and highest sigma in units of 1/255.
            * ``poisson_scale_range``: lowest and highest factor of Poisson noise.
            * ``gray_noise_prob``: probability of noise that is the same in all channels.
            * ``jpeg_range``: lowest and highest quality.
            * ``second_blur_prob``: probability of the second blur.
        seed: Determines the recipe and the noise itself; default: drawn from ``random``.
        branches: Entries of another recipe that replace those drawn here.

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
    """Draw the choices that upstream shares within a batch."""
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

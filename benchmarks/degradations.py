"""Samples per second of the second-order degradation, and of the same maths done directly."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from basicsr.data.data_util import image_tensor
from basicsr.data.degradations import add_gaussian_noise_pt, add_poisson_noise_pt
from basicsr.data.recipes import STAGES, Recipe, draw_kernels, draw_recipes
from basicsr.data.second_order import degrade
from basicsr.utils.diffjpeg import DiffJPEG

from .measure import Result, Row, in_turn, seconds
from .photos import photograph

SCALE = 4
# The settings of Real-ESRGAN.
KERNELS: dict[str, Any] = {
    'kernel_list': ['iso', 'aniso'],
    'kernel_prob': [0.65, 0.35],
    'sinc_prob': 0.1,
    'betag_range': [0.5, 4],
    'betap_range': [1, 2],
}
FIRST: dict[str, Any] = {
    'blur_sigma': [0.2, 3],
    'resize_prob': [0.2, 0.7, 0.1],
    'resize_range': [0.15, 1.5],
    'gaussian_noise_prob': 0.5,
    'noise_range': [1, 30],
    'poisson_scale_range': [0.05, 3],
    'gray_noise_prob': 0.4,
    'jpeg_range': [30, 95],
}
SECOND: dict[str, Any] = {
    'blur_sigma': [0.2, 1.5],
    'resize_prob': [0.3, 0.4, 0.3],
    'resize_range': [0.3, 1.2],
    'gaussian_noise_prob': 0.5,
    'noise_range': [1, 25],
    'poisson_scale_range': [0.05, 2.5],
    'gray_noise_prob': 0.4,
    'jpeg_range': [30, 95],
}
OPTIONS = {
    **KERNELS,
    **FIRST,
    **{f'{name}2': value for name, value in {**KERNELS, **SECOND}.items()},
    'final_sinc_prob': 0.8,
    'second_blur_prob': 0.8,
}


def measure(folder: Path, quick: bool) -> Result:
    """A batch of patches through ``degrade``, and one by one with plain convolutions."""
    count, size = (2, 64) if quick else (8, 400)
    random.seed(0)
    np.random.seed(0)
    gt = torch.stack([image_tensor(photograph(i, size, size)) for i in range(count)])
    drawn = [draw_kernels(OPTIONS)[:3] for _ in range(count)]
    kernels = [torch.from_numpy(np.stack(kind)).float() for kind in zip(*drawn, strict=True)]
    recipes = draw_recipes(OPTIONS, count, range(count))
    sides = {
        'ours': partial(seconds, degrade, gt, *kernels, recipes, SCALE),
        'direct': partial(seconds, degrade_directly, gt, *kernels, recipes),
    }
    raw = in_turn(sides, 1 if quick else 7)
    ours, direct = (count / min(raw[side]) for side in ('ours', 'direct'))
    return Result([Row(f'{size}x{size} / direct', ours, 'samples/s', direct)], raw)


def degrade_directly(
    gt: Tensor, kernels1: Tensor, kernels2: Tensor, sinc: Tensor, recipes: list[Recipe]
) -> list[Tensor]:
    """Each image by itself, blurred by convolution."""
    jpeg, size = DiffJPEG(differentiable=False), [side // SCALE for side in gt.shape[-2:]]
    results = []
    for image, first, second, last, recipe in zip(
        gt.split(1), kernels1, kernels2, sinc, recipes, strict=True
    ):
        for stage, kernel, full in zip(STAGES, (first, second), (gt.shape[-2:], size), strict=True):
            if stage == '' or recipe['second_blur']:
                image = convolve(image, kernel)
            target = [max(int(side * recipe[f'resize_factor{stage}']), 1) for side in full]
            image = F.interpolate(image, target, mode=recipe[f'resize_mode{stage}'])
            gaussian = recipe[f'noise{stage}'] == 'gaussian'
            add = add_gaussian_noise_pt if gaussian else add_poisson_noise_pt
            level, gray = recipe[f'noise_level{stage}'], recipe[f'gray_noise{stage}']
            image = add(image, level, gray_noise=gray).clamp(0, 1)
            if stage == '' or not recipe['jpeg_last']:
                image = jpeg(image, recipe[f'jpeg_quality{stage}']).clamp(0, 1)
        image = F.interpolate(image, size, mode=recipe['final_resize_mode'])
        image = convolve(image, last)
        if recipe['jpeg_last']:
            image = jpeg(image.clamp(0, 1), recipe['jpeg_quality2'])
        results.append((image * 255).round().clamp(0, 255) / 255)
    return results


def convolve(image: Tensor, kernel: Tensor) -> Tensor:
    """Every channel of (1, c, h, w) with the kernel (k, k), reflected at the borders."""
    padded = F.pad(image, [len(kernel) // 2] * 4, mode='reflect')
    return F.conv2d(padded.transpose(0, 1), kernel[None, None]).transpose(0, 1)

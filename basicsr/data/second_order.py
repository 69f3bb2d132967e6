"""The second-order degradation of Real-ESRGAN: blur, resize, noise and JPEG, twice.

Xintao Wang, Liangbin Xie, Chao Dong, Ying Shan, "Real-ESRGAN: Training Real-World Blind
Super-Resolution with Pure Synthetic Data" (2021), https://arxiv.org/abs/2107.10833

All random choices for a sample are drawn beforehand (``recipes.py``): its kernels and a recipe of
plain numbers. ``degrade`` applies them, so the same recipe always gives the same image.
"""

import functools
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from basicsr.utils.diffjpeg import DiffJPEG
from basicsr.utils.errors import UserError
from basicsr.utils.img_process_util import filter2D

from .degradations import add_gaussian_noise_pt, add_poisson_noise_pt
from .recipes import Recipe


@torch.no_grad()
def make_pairs(
    gt: Tensor,
    kernels: Sequence[Tensor],
    recipes: Sequence[Recipe],
    opt: dict,
    sharpen: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Training pairs: random patches of degraded images, and of their GT.

    Args:
        gt, recipes: As for ``degrade``.
        kernels: The three batches of kernels of ``degrade``.
        opt: ``scale``; ``gt_size``, the side of the GT patches, unless the recipes have one;
            ``gt_usm``: true: LQ is made from the sharpened GT, which is also the target; false:
            nothing is sharpened; not given: only the GT that LQ is made from is sharpened.
        sharpen: A sharpening function, such as USMSharp.

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
        raise UserError(f'gt_size {size} is larger than the GT, {gt.shape[-2]}x{gt.shape[-1]}.')
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
        gt: (b, 3, h, w) or (b, 1, h, w), in [0, 1], with h and w multiples of ``scale``; sharpened
            beforehand if desired.
        kernels1: Kernels of the first blur, (b, k, k).
        kernels2: Kernels of the second blur, which not all recipes have, (b, k, k).
        sinc_kernels: Kernels of the last filter, (b, k, k).
        recipes: One for each image, from ``draw_recipe``.
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
        # To a size, not by a factor: sizes are whole numbers, and with the exact factor the image
        # would be shifted against its GT.
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
    """Apply ``step(batch, indices)`` to images (1, c, h, w); those with a false key are left alone.

    Images of one size and one key form a batch. On the CPU each is a batch of its own, since the
    bits of a convolution depend on the batch size.
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

"""Dataset of GT images with degradation kernels and recipes, for Real-ESRGAN (``second_order``)."""

import json
import logging
import math
import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from basicsr.utils.errors import UserError
from basicsr.utils.file_client import FileClient
from basicsr.utils.img_process_util import USMSharp
from basicsr.utils.registry import DATASET_REGISTRY

from .data_util import (
    ImageReader,
    check_files_exist,
    check_image_options,
    check_name_of_list,
    image_tensor,
    names_from_meta_info_file,
    paths_from_folder,
    paths_from_lmdb,
)
from .exclusion import kept_images
from .recipes import (
    KERNEL_OPTIONS,
    Recipe,
    check_options,
    draw_kernels,
    draw_recipe,
    draw_seed,
)
from .second_order import make_pairs
from .shared import PathTable
from .transforms import draw_orientation, turn

logger = logging.getLogger(__name__)


@DATASET_REGISTRY.register(suffix='basicsr')
class RealESRGANDataset(Dataset):
    """GT images for training, each with the kernels and the recipe of its degradation.

    Args:
        opt: Options with the keys

            * ``dataroot_gt``: a folder, an LMDB, or a list of folders; ``root_weights``: how often
              an image of each folder is seen in an epoch on average, default once;
            * ``io_backend``, ``recursive``, ``color``, ``cache``: as for PairedImageDataset;
            * ``meta_info``: optional list of GT names, one a line; ``exclude``: optional list of
              those to leave out;
            * ``gt_size``: side of the patches to train on; ``crop_size``: side of the patch that is
              degraded, from which they are cut, default 25/16 of ``gt_size`` (400 for 256);
            * ``use_hflip``, ``use_rot``, ``uint8_batch``: as for PairedImageDataset; images that
              are degraded in workers are always floats;
            * the options of ``draw_kernels``; with ``degrade_on: worker`` also those of
              ``draw_recipe`` and ``make_pairs``;
            * ``degrade_on``: 'device' (default): the model makes the LQ images; 'worker': this
              dataset does.

    An item is ``{'gt', 'kernel1', 'kernel2', 'sinc_kernel', 'recipe', 'gt_path'}``: a float32 RGB
    tensor (c, crop_size, crop_size) in [0, 1], reflected where the image is smaller, three kernels
    (k, k), and a JSON text with the seed, what the kernels were drawn from, and with
    ``progressive`` the ``gt_size``. With ``degrade_on: worker`` it is ``{'lq', 'gt', 'recipe',
    'gt_path'}`` with the whole recipe.
    """

    def __init__(self, opt: dict):
        check_image_options(opt | {'meta_info': None})
        check_name_of_list(opt)
        if opt.get('mean') is not None:
            raise UserError('mean and std: images cannot be degraded once they are normalised.')
        if opt.get('phase', 'train') != 'train':
            raise UserError(
                'RealESRGANDataset degrades at random, for training; validate on images that stay '
                'the same, with PairedImageDataset or RealESRGANPairedDataset.'
            )
        self.opt = opt
        self.gt_folder = opt['dataroot_gt']
        self.color = opt.get('color')
        self.use_hflip, self.use_rot = opt.get('use_hflip', True), opt.get('use_rot', True)
        self.uint8_batch = opt.get('uint8_batch', False)
        self.scale, self._given_crop_size = opt['scale'], opt.get('crop_size')
        self.set_gt_size(opt['gt_size'])
        self._is_progressive = bool(opt.get('progressive'))
        self.degrade_on = opt.get('degrade_on', 'device')
        if self.degrade_on not in ('device', 'worker'):
            raise UserError(f"degrade_on is '{self.degrade_on}'; choose 'device' or 'worker'.")
        self._sharpen = USMSharp()
        # Attributes, which subclasses read and change.
        vars(self).update({name: opt[name] for name in KERNEL_OPTIONS if name in opt})
        check_options(opt, 'kernels', *(['recipes'] if self.degrade_on == 'worker' else []))

        self.io_backend_opt = dict(opt.get('io_backend') or {'type': 'disk'})
        backend: dict[str, Any] = dict(self.io_backend_opt)
        if backend['type'] == 'lmdb':
            backend.update(db_paths=[self.gt_folder], client_keys=['gt'])
            folders, roots = [self.gt_folder], [paths_from_lmdb(self.gt_folder)]
        else:
            folders = self.gt_folder if isinstance(self.gt_folder, list) else [self.gt_folder]
            roots = [self._find_files(folder, opt) for folder in folders]
        lengths = self._set_paths(folders, roots, opt)
        self._first, self._share = _weighted(lengths, opt.get('root_weights'))
        self.file_client = FileClient(backend.pop('type'), **backend)
        self._read = ImageReader(
            self.file_client,
            self.paths.column(),
            'gt',
            self.color,
            opt.get('cache', 'off'),
            opt.get('name', 'images'),
        )

    def _set_paths(self, folders: list[str], roots: list[list[str]], opt: dict) -> list[int]:
        """Keep the images that are not excluded; returns how many there are of each root."""
        paths = [path for root in roots for path in root]
        if not paths:
            raise UserError(f'no images in {self.gt_folder}.')
        kept = kept_images(paths, folders, opt)
        self.paths = PathTable(paths[index] for index in kept)
        ends = np.cumsum([len(root) for root in roots])
        return np.diff(np.searchsorted(kept, ends), prepend=0).tolist()

    def set_gt_size(self, gt_size: int) -> None:
        """Make patches of ``gt_size`` from now on."""
        scale = self.scale
        crop_size = self._given_crop_size
        if crop_size is None:
            crop_size = math.ceil(gt_size * 25 / 16 / scale) * scale
        whole = all(isinstance(n, int) and n > 0 for n in (gt_size, crop_size))
        if not whole or gt_size % scale or crop_size % scale or crop_size < gt_size:
            raise UserError(
                f'gt_size {gt_size} and crop_size {crop_size} must be multiples of scale {scale} '
                'above 0, and crop_size must not be the smaller one.'
            )
        self.gt_size, self.crop_size = gt_size, crop_size

    def _find_files(self, folder: str, opt: dict) -> list[str]:
        if opt.get('meta_info') is None:
            return paths_from_folder(folder, opt.get('recursive', False))
        paths = [os.path.join(folder, name) for name in names_from_meta_info_file(opt['meta_info'])]
        check_files_exist(([path] for path in paths), opt['meta_info'])
        return paths

    def draw(self) -> tuple[list[Tensor], Recipe]:
        """Draw the kernels of a sample, float32 tensors (k, k), and its recipe."""
        *kernels, drawn = draw_kernels(vars(self))
        recipe: Recipe = {'seed': draw_seed(), **drawn}
        if self._is_progressive:  # for the model, if it makes the patches
            recipe['gt_size'] = self.gt_size
        if self.degrade_on == 'worker':
            recipe |= draw_recipe(self.opt, recipe['seed'])
        return [torch.from_numpy(kernel).float() for kernel in kernels], recipe

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        kernels, recipe = self.draw()  # first, so that they depend on the sample's seed alone
        index = int(self._first[index] + random.random() * self._share[index])
        path = self.paths[index]
        gt = self._crop(self._read(index, path))
        gt = turn(gt, draw_orientation(self.use_hflip, self.use_rot))
        item: dict[str, Tensor | str] = {'gt_path': path, 'recipe': json.dumps(recipe)}
        if self.degrade_on == 'device':
            item['gt'] = image_tensor(gt, self.color, keep_uint8=self.uint8_batch)
            item.update(zip(('kernel1', 'kernel2', 'sinc_kernel'), kernels, strict=True))
            return item
        gt, *kernels = (tensor[None] for tensor in (image_tensor(gt, self.color), *kernels))
        lq, target = make_pairs(gt, kernels, [recipe], self.opt, self._sharpen)
        return item | {'lq': lq[0], 'gt': target[0]}

    def __len__(self) -> int:
        return len(self._first)

    def _crop(self, img: np.ndarray) -> np.ndarray:
        """A random square of ``crop_size``; small images are reflected at the bottom and right."""
        top, left = (random.randint(0, max(n - self.crop_size, 0)) for n in img.shape[:2])
        img = img[top : top + self.crop_size, left : left + self.crop_size]
        missing = [(0, self.crop_size - length) for length in img.shape[:2]]
        return np.pad(img, [*missing, (0, 0)], 'reflect') if any(m for _, m in missing) else img


def _weighted(lengths: list[int], weights: list[float] | None) -> tuple[np.ndarray, np.ndarray]:
    """For every sample of an epoch, the range that its image is drawn from: first index and count.

    Root i contributes ``weights[i]`` samples per image. With a fraction, neighbouring images share
    samples, so that none is excluded forever.
    """
    weights = weights or [1.0] * len(lengths)
    if len(weights) != len(lengths) or min(weights) < 0:
        raise UserError(
            f'root_weights {weights} must be a number for each of the {len(lengths)} folders of '
            'dataroot_gt.'
        )
    first, share, begin = [], [], 0
    for length, weight in zip(lengths, weights, strict=True):
        count = max(round(length * weight), 1) if weight else 0
        first.append(begin + np.arange(count) * length / max(count, 1))
        share.append(np.full(count, length / max(count, 1)))
        begin += length
    return np.concatenate(first), np.concatenate(share)

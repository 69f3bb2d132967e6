"""Dataset of clean images to which white Gaussian noise is added, for denoising.

Kai Zhang, Wangmeng Zuo, Yunjin Chen, Deyu Meng, Lei Zhang, "Beyond a Gaussian Denoiser: Residual
Learning of Deep CNN for Image Denoising" (2017), https://arxiv.org/abs/1608.03981
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from basicsr.utils.errors import UserError
from basicsr.utils.registry import DATASET_REGISTRY

from .paired_image_dataset import PairedImages
from .single_image_dataset import SingleImageDataset


@DATASET_REGISTRY.register()
class NoisyImageDataset(PairedImages, SingleImageDataset):
    """Clean images as GT, and as LQ the same images with noise; the scale is 1.

    Args:
        opt: Options with the keys

            * ``dataroot_gt``: a folder, a list of folders, or an LMDB of clean images;
            * ``sigma``: standard deviation of the noise in 8-bit levels (25 is 25 / 255), or a
              range ``[low, high]`` that each sample draws its own from, uniformly;
            * ``io_backend``, ``meta_info_file``, ``exclude``, ``recursive``, ``color``, ``cache``:
              as for PairedImageDataset;
            * in training ``gt_size``, ``use_hflip``, ``use_rot``, ``pad_small``: as there.

    An item is ``{'lq', 'gt', 'lq_path', 'gt_path'}``: float32 RGB tensors (c, h, w), GT in [0, 1];
    LQ is not clipped, so the noise stays Gaussian. Outside training the noise of an image is the
    same in every run: it follows from the position of the image alone.
    """

    root_key = 'dataroot_gt'

    def __init__(self, opt: dict):
        if opt.get('scale', 1) != 1:
            raise UserError(f'NoisyImageDataset is for denoising: scale is {opt["scale"]}, not 1.')
        if opt.get('mean') is not None:
            raise UserError('mean and std: noise is added in levels of [0, 255]; leave them out.')
        if opt.get('uint8_batch'):
            raise UserError('uint8_batch: images with noise are not 8-bit; unset it.')
        self.sigma = _range_of(opt.get('sigma'))
        self._read_options(opt)
        SingleImageDataset.__init__(self, opt)

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        path = self.paths[index]
        clean = self._read(index, path)
        item = self._sample(clean, clean, {'lq_path': path, 'gt_path': path})
        is_training = self.phase == 'train'
        rng = np.random.default_rng(random.getrandbits(64) if is_training else index)
        sigma = rng.uniform(*self.sigma) / 255
        noise = rng.standard_normal(item['gt'].shape, np.float32)
        item['lq'] = item['gt'] + sigma * torch.from_numpy(noise)
        return item


def _range_of(sigma: Any) -> tuple[float, float]:
    low, high = sigma if isinstance(sigma, list | tuple) and len(sigma) == 2 else (sigma, sigma)
    is_number = all(type(value) in (int, float) for value in (low, high))
    if not is_number or not 0 <= low <= high < 256:
        raise UserError(
            f'sigma must be the standard deviation of the noise in levels of [0, 255], such as 25 '
            f'or [0, 50], got {sigma!r}.'
        )
    return low, high

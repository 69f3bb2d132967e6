"""Dataset of paired low-quality (LQ) and ground-truth (GT) images."""

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from basicsr.utils.errors import UserError, image_error
from basicsr.utils.file_client import FileClient
from basicsr.utils.registry import DATASET_REGISTRY

from .batch_memory import StoredSample
from .data_util import (
    ImageReader,
    check_distinct_names,
    check_files_exist,
    check_image_options,
    check_template,
    matching_names,
    paired_paths_from_lmdb,
    paired_paths_from_meta_info_file,
)
from .exclusion import kept_images
from .progressive import crop_sizes
from .shared import Pair, PathTable, SaidOnce
from .transforms import UPRIGHT, draw_orientation, paired_random_crop

logger = logging.getLogger(__name__)


class PairedImages:
    """Base of paired datasets: turns an LQ and a GT image, from any source, into a sample."""

    def _read_options(self, opt: dict) -> None:
        check_image_options(opt)
        self.opt = opt
        self.phase, self.scale = opt.get('phase', 'train'), opt['scale']
        self.color = opt.get('color')
        self.mean, self.std = opt.get('mean'), opt.get('std')
        self.uint8_batch = False
        if self.phase == 'train':
            self.set_gt_size(opt['gt_size'])
            self._largest_gt_size = max(crop_sizes(opt))
            self.use_hflip, self.use_rot = opt.get('use_hflip', True), opt.get('use_rot', True)
            self.pad_small = opt.get('pad_small', False)
            self.uint8_batch = opt.get('uint8_batch', False)
            if self.uint8_batch and (self.color == 'y' or self.mean is not None):
                raise UserError('uint8_batch: luma and normalised images are not 8-bit; unset it.')
        self._said = SaidOnce()

    def set_gt_size(self, gt_size: int) -> None:
        """Crop to ``gt_size`` from now on, in training."""
        if not isinstance(gt_size, int) or gt_size < self.scale:
            raise UserError(f'gt_size must be a number of pixels, got {gt_size!r}.')
        if gt_size % self.scale:
            raise UserError(f'gt_size {gt_size} is not a multiple of scale {self.scale}.')
        self.gt_size = gt_size

    def _sample(
        self, gt: np.ndarray, lq: np.ndarray, pair: Mapping[str, str]
    ) -> dict[str, Tensor | str]:
        """The sample of two images (h, w, c), and their paths ``lq_path`` and ``gt_path``."""
        return self._stored_sample(gt, lq, pair, random).tensors()

    def _stored_sample(
        self, gt: np.ndarray, lq: np.ndarray, pair: Mapping[str, str], rng: Any
    ) -> StoredSample:
        orientation = UPRIGHT
        if self.phase == 'train':
            self._check_sizes(gt, lq, pair)
            if self.pad_small:
                gt, lq = _pad(gt, self.gt_size), _pad(lq, self.gt_size // self.scale)
            elif self.gt_size <= min(gt.shape[:2]) < self._largest_gt_size:
                # Reported when the image is first read, not days later in another stage.
                raise image_error(
                    pair['gt_path'],
                    f'GT {gt.shape[0]}x{gt.shape[1]} (height x width) is smaller than gt_size '
                    f'{self._largest_gt_size} of datasets.train.progressive: {pair["gt_path"]}. '
                    'Lower gt_size, pad the image (pad_small) or remove it.',
                )
            gt, lq = paired_random_crop(gt, lq, self.gt_size, self.scale, pair['gt_path'], rng)
            orientation = draw_orientation(self.use_hflip, self.use_rot, rng)
        else:
            gt = self._cut(gt, lq, pair)
        # Only now, because a crop is cheaper to convert than the image.
        how = self.color, self.mean, self.std, self.uint8_batch, orientation
        return StoredSample({'lq': lq, 'gt': gt}, how, pair)

    def _cut(self, gt: np.ndarray, lq: np.ndarray, pair: Mapping[str, str]) -> np.ndarray:
        """GT without the rows and columns that do not make a whole LQ pixel."""
        height, width = lq.shape[0] * self.scale, lq.shape[1] * self.scale
        excess = gt.shape[0] - height, gt.shape[1] - width
        if not all(0 <= e < self.scale for e in excess):
            self._check_sizes(gt, lq, pair)
        if any(excess) and 'cut' not in self._said:
            self._said.add('cut')
            logger.info(
                'GT images are cut to %d x LQ; the first is %s (%dx%d to %dx%d).',
                self.scale,
                pair['gt_path'],
                *gt.shape[:2],
                height,
                width,
            )
        return gt[:height, :width]

    def _check_sizes(self, gt: np.ndarray, lq: np.ndarray, pair: Mapping[str, str]) -> None:
        (gt_h, gt_w), (lq_h, lq_w) = gt.shape[:2], lq.shape[:2]
        if (gt_h, gt_w) == (lq_h * self.scale, lq_w * self.scale):
            return
        hint = f'cut or resize one of them to GT {lq_h * self.scale}x{lq_w * self.scale}'
        if gt_h % lq_h == 0 and gt_h // lq_h * lq_w == gt_w:
            hint = f'scale: {gt_h // lq_h} would match'
        raise image_error(
            pair['gt_path'],
            f'GT {pair["gt_path"]} ({gt_h}x{gt_w}, height x width) is not {self.scale} times LQ '
            f'{pair["lq_path"]} ({lq_h}x{lq_w}): {hint}.',
        )


@DATASET_REGISTRY.register()
class PairedImageDataset(PairedImages, Dataset):
    """LQ and GT images, cropped and augmented together in training.

    Args:
        opt: Options with the keys

            * ``dataroot_gt``, ``dataroot_lq``: folders, LMDBs, or lists of folders that belong
              together in order;
            * ``io_backend``: ``{type: disk}`` (default) or ``{type: lmdb}``;
            * ``meta_info_file``: optional list of GT names, one a line;
            * ``exclude``: optional list of GT names to leave out, one a line;
            * ``filename_tmpl``: LQ base name from the GT base name; default '{}';
            * ``recursive``: pair sub-folders too; default false;
            * ``color``: 'y' or 'gray' for one channel; default three;
            * ``cache``: 'auto', 'off' (default) or a folder, see ``image_cache``;
            * ``mean``, ``std``: optional normalisation, per channel;
            * ``phase``: 'train', 'val' or 'test'; ``scale``: GT size / LQ size;
            * in training ``gt_size``, the side of the GT crop, ``use_hflip``, ``use_rot``,
              ``pad_small``: reflect images that are smaller than the crop; default false, and
              ``uint8_batch``: 8-bit images stay uint8 in [0, 255]; default false. With
              ``progressive`` images must have room for the largest crop of all stages.

    An item is ``{'lq', 'gt', 'lq_path', 'gt_path'}``: float32 RGB tensors (c, h, w) in [0, 1].
    Outside training a GT up to ``scale - 1`` pixels larger than ``scale`` x LQ is cut to it.
    """

    def __init__(self, opt: dict):
        self._read_options(opt)
        self.gt_folder, self.lq_folder = opt['dataroot_gt'], opt['dataroot_lq']
        self.filename_tmpl = check_template(opt.get('filename_tmpl', '{}'))
        self.paths = self._without_excluded(self._find_pairs(opt), opt)
        if self.phase != 'train':
            check_distinct_names(self.paths.column('lq_path'))
        self.io_backend_opt = dict(opt.get('io_backend') or {'type': 'disk'})
        self.file_client = self._open(dict(self.io_backend_opt))
        self._read_gt, self._read_lq = self._readers(opt)
        self._warn_of_equal_folders()

    def _find_pairs(self, opt: dict) -> PathTable:
        keys = ['lq', 'gt']
        if (opt.get('io_backend') or {}).get('type') == 'lmdb':
            return PathTable(paired_paths_from_lmdb([self.lq_folder, self.gt_folder], keys))
        gt_roots = self.gt_folder if isinstance(self.gt_folder, list) else [self.gt_folder]
        lq_roots = self.lq_folder if isinstance(self.lq_folder, list) else [self.lq_folder]
        if len(gt_roots) != len(lq_roots):
            raise UserError(
                f'dataroot_gt has {len(gt_roots)} folders, dataroot_lq {len(lq_roots)}: they '
                'are paired one by one.'
            )
        roots = zip(lq_roots, gt_roots, strict=True)
        list_file = opt.get('meta_info_file')
        if list_file is not None:
            pairs = [pair for folders in roots for pair in self._existing_pairs(folders, list_file)]
            return PathTable(pairs)
        table, recursive = PathTable(), opt.get('recursive', False)
        for folders in roots:
            names = matching_names(folders, keys, self.filename_tmpl, recursive)
            parts = zip(keys, folders, names, strict=True)
            table.extend({f'{key}_path': (folder, own) for key, folder, own in parts})
        return table

    def _without_excluded(self, pairs: PathTable, opt: dict) -> PathTable:
        roots = self.gt_folder if isinstance(self.gt_folder, list) else [self.gt_folder]
        kept = kept_images(pairs.column('gt_path'), roots, opt)
        return pairs if len(kept) == len(pairs) else PathTable(pairs[index] for index in kept)

    def _existing_pairs(self, folders: tuple[str, str], list_file: str) -> list[Pair]:
        pairs = self._listed_pairs(folders, list_file)
        check_files_exist((pair.values() for pair in pairs), list_file)
        return pairs

    def _listed_pairs(self, folders: tuple[str, str], list_file: str) -> list[Pair]:
        return paired_paths_from_meta_info_file(
            folders, ['lq', 'gt'], list_file, self.filename_tmpl
        )

    def _open(self, backend: dict) -> FileClient:
        if backend['type'] == 'lmdb':
            backend.update(db_paths=[self.lq_folder, self.gt_folder], client_keys=['lq', 'gt'])
        return FileClient(backend.pop('type'), **backend)

    def _readers(self, opt: dict) -> list[ImageReader]:
        name = opt.get('name', self.phase)
        return [
            ImageReader(
                self.file_client,
                self.paths.column(f'{key}_path'),
                key,
                self.color,
                opt.get('cache', 'off'),
                f'{name} ({key})',
                self._said,
            )
            for key in ('gt', 'lq')
        ]

    def _warn_of_equal_folders(self) -> None:
        if self.gt_folder == self.lq_folder and self.filename_tmpl == '{}':
            logger.warning('dataroot_lq is dataroot_gt (%s): LQ and GT are equal.', self.gt_folder)

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        return self.stored(index).tensors()

    def stored(self, index: int, rng: Any = random) -> StoredSample:
        """The sample before its conversion.

        Args:
            rng: Source of all random decisions: the module ``random``, or a ``random.Random``.
        """
        pair = self.paths[index]
        gt = self._read_gt(index, pair['gt_path'])
        lq = self._read_lq(index, pair['lq_path'])
        return self._stored_sample(gt, lq, pair, rng)

    def __len__(self) -> int:
        return len(self.paths)


def _pad(img: np.ndarray, size: int) -> np.ndarray:
    """Mirror an image at the bottom and right up to ``size``."""
    missing = [(0, max(size - length, 0)) for length in img.shape[:2]]
    return np.pad(img, [*missing, (0, 0)], 'symmetric')

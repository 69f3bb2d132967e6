"""Dataset of low-quality images without ground truth, for inference and no-reference metrics."""

import os
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from basicsr.utils.errors import UserError
from basicsr.utils.file_client import FileClient
from basicsr.utils.registry import DATASET_REGISTRY

from .data_util import (
    ImageReader,
    check_distinct_names,
    check_files_exist,
    check_image_options,
    image_tensor,
    names_from_meta_info_file,
    paths_from_folder,
    paths_from_lmdb,
)
from .exclusion import kept_images
from .shared import PathTable


@DATASET_REGISTRY.register()
class SingleImageDataset(Dataset):
    """Images to be restored.

    Args:
        opt: Options with the keys ``dataroot_lq`` (a folder, a list of folders, or an LMDB) and
            optionally ``io_backend``, ``meta_info_file`` (a list of names), ``exclude`` (a list of
            names to leave out), ``recursive``, ``color``, ``cache``, ``mean``, ``std``, as for
            PairedImageDataset.

    An item is ``{'lq', 'lq_path'}``: a float32 RGB tensor (c, h, w) in [0, 1].
    """

    root_key = 'dataroot_lq'

    def __init__(self, opt: dict):
        check_image_options(opt)
        self.opt = opt
        self.lq_folder = opt[self.root_key]
        self.color = opt.get('color')
        self.mean, self.std = opt.get('mean'), opt.get('std')
        self.io_backend_opt = dict(opt.get('io_backend') or {'type': 'disk'})
        backend: dict[str, Any] = dict(self.io_backend_opt)
        if backend['type'] == 'lmdb':
            backend.update(db_paths=[self.lq_folder], client_keys=['lq'])
            paths = paths_from_lmdb(self.lq_folder)
        else:
            paths = self._find_files(opt)
        if not paths:
            raise UserError(f'no images in {self.lq_folder}.')
        paths = [paths[index] for index in kept_images(paths, self._roots(), opt)]
        if opt.get('phase') != 'train':
            check_distinct_names(paths)
        self.paths = PathTable(paths)
        self.file_client = FileClient(backend.pop('type'), **backend)
        cache, name = opt.get('cache', 'off'), opt.get('name', 'images')
        self._read = ImageReader(self.file_client, paths, 'lq', self.color, cache, name)

    def _roots(self) -> list[str]:
        return self.lq_folder if isinstance(self.lq_folder, list) else [self.lq_folder]

    def _find_files(self, opt: dict) -> list[str]:
        folders = self._roots()
        if opt.get('meta_info_file') is None:
            recursive = opt.get('recursive', False)
            return [path for folder in folders for path in paths_from_folder(folder, recursive)]
        names = names_from_meta_info_file(opt['meta_info_file'])
        roots = [[os.path.join(folder, name) for name in names] for folder in folders]
        for paths in roots:
            check_files_exist(([path] for path in paths), opt['meta_info_file'])
        return [path for paths in roots for path in paths]

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        path = self.paths[index]
        lq = image_tensor(self._read(index, path), self.color, self.mean, self.std)
        return {'lq': lq, 'lq_path': path}

    def __len__(self) -> int:
        return len(self.paths)

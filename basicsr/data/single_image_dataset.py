"""Low-quality images without ground truth."""

from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from basicsr.utils.file_client import FileClient
from basicsr.utils.img_util import img2tensor
from basicsr.utils.registry import DATASET_REGISTRY

from .data_util import (
    AlphaNotice,
    names_from_meta_info_file,
    paths_from_folder,
    paths_from_lmdb,
    read_image,
)
from .transforms import normalize


@DATASET_REGISTRY.register()
class SingleImageDataset(Dataset):
    """Images to be restored.

    Args:
        opt: Options with the keys ``dataroot_lq`` (a folder, a list of folders, or an LMDB) and
            optionally ``io_backend``, ``meta_info_file`` (names, one a line), ``recursive``,
            ``color``, ``mean``, ``std``, as for PairedImageDataset.

    An item is ``{'lq', 'lq_path'}``: a float32 RGB tensor (c, h, w) in [0, 1].
    """

    def __init__(self, opt: dict):
        self.opt = opt
        self.lq_folder = opt['dataroot_lq']
        self.color = opt.get('color')
        self.mean, self.std = opt.get('mean'), opt.get('std')
        if (self.mean is None) != (self.std is None):
            raise ValueError('mean and std go together; give both or neither.')
        backend = dict(opt.get('io_backend') or {'type': 'disk'})
        folders = self.lq_folder if isinstance(self.lq_folder, list) else [self.lq_folder]
        if backend['type'] == 'lmdb':
            backend.update(db_paths=[self.lq_folder], client_keys=['lq'])
            self.paths = paths_from_lmdb(self.lq_folder)
        elif opt.get('meta_info_file') is not None:
            names = names_from_meta_info_file(opt['meta_info_file'])
            self.paths = [str(Path(folder) / name) for folder in folders for name in names]
        else:
            recursive = opt.get('recursive', False)
            self.paths = [path for f in folders for path in paths_from_folder(f, recursive)]
        if not self.paths:
            raise ValueError(f'no images in {self.lq_folder}.')
        self.file_client = FileClient(backend.pop('type'), **backend)
        self._alpha_notice = AlphaNotice()

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        path = self.paths[index]
        img = read_image(self.file_client, path, 'lq', self.color, self._alpha_notice)
        lq = img2tensor(img, bgr2rgb=True, float32=True)
        if self.mean is not None:
            lq = normalize(lq, self.mean, self.std)
        return {'lq': lq, 'lq_path': path}

    def __len__(self) -> int:
        return len(self.paths)

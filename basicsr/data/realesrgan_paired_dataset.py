"""Dataset of paired LQ and GT images for the Real-ESRGAN models."""

import os

import numpy as np

from basicsr.utils.errors import UserError
from basicsr.utils.registry import DATASET_REGISTRY

from .data_util import check_name_of_list, listed_name, text_lines
from .paired_image_dataset import PairedImageDataset
from .shared import Pair


@DATASET_REGISTRY.register(suffix='basicsr')
class RealESRGANPairedDataset(PairedImageDataset):
    """As PairedImageDataset; a list is called ``meta_info`` and names both images of a pair.

    Its lines are ``<GT>, <LQ>``, each relative to its folder. Outside training the GT is not cut to
    ``scale`` x LQ.
    """

    def __init__(self, opt: dict):
        check_name_of_list(opt)
        super().__init__(opt | {'meta_info': None, 'meta_info_file': opt.get('meta_info')})
        self.opt = opt

    def _listed_pairs(self, folders: tuple[str, str], list_file: str) -> list[Pair]:
        pairs = []
        for line in text_lines(list_file):
            names = [listed_name(name.strip(), list_file) for name in line.split(',')]
            if len(names) != 2:
                raise UserError(f'{list_file}: a line is "<GT>, <LQ>", got "{line}".')
            gt, lq = os.path.join(folders[1], names[0]), os.path.join(folders[0], names[1])
            pairs.append({'lq_path': lq, 'gt_path': gt})
        return pairs

    def _cut(self, gt: np.ndarray, lq: np.ndarray, pair: Pair) -> np.ndarray:
        return gt

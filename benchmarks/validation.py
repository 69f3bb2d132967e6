"""Time of a validation, and of a plain loop over the same images."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import torch

from basicsr.archs import build_network
from basicsr.data import build_dataloader, build_dataset
from basicsr.metrics import calculate_psnr, calculate_ssim
from basicsr.models import build_model
from basicsr.utils.img_util import img2tensor, tensor2img
from basicsr.utils.options import parse_options

from .measure import Result, Row, in_child, in_turn, seconds
from .photos import photo_pairs
from .plain import NETWORK, SCALE

METRIC = {'crop_border': SCALE, 'test_y_channel': True}


def measure(folder: Path, quick: bool) -> Result:
    """``SRModel.validation`` with PSNR and SSIM of the luma, and what it does, one by one."""
    count = 2 if quick else 24
    roots = photo_pairs(folder, 480, 480, count)
    raw = in_child(_rounds, folder, roots, 1 if quick else 5)
    times = {side: 1000 * min(values) / count for side, values in raw.items()}
    return Result([Row('an image / plain loop', times['ours'], 'ms', times['plain'])], raw)


def _rounds(folder: Path, roots: tuple[Path, Path], rounds: int) -> dict[str, list[float]]:
    opt = _options(folder, roots)
    model = build_model(opt)
    loader = build_dataloader(build_dataset(opt['datasets']['test_1']), opt['datasets']['test_1'])
    sides = {
        'ours': partial(seconds, model.validation, loader, 'benchmark', None),
        'plain': partial(seconds, plain_validation, build_network(NETWORK).eval(), roots),
    }
    return in_turn(sides, rounds)


def plain_validation(net: torch.nn.Module, roots: tuple[Path, Path]) -> dict[str, float]:
    """Mean PSNR and SSIM over two folders of images."""
    scores = []
    for gt_file, lq_file in zip(*(sorted(root.iterdir()) for root in roots), strict=True):
        gt, lq = (cv2.imread(str(file)) for file in (gt_file, lq_file))
        with torch.no_grad():
            output = tensor2img(net(img2tensor(lq / 255.0)[None]))
        scores.append((calculate_psnr(output, gt, **METRIC), calculate_ssim(output, gt, **METRIC)))
    psnr, ssim = (sum(values) / len(scores) for values in zip(*scores, strict=True))
    return {'psnr': psnr, 'ssim': ssim}


def _options(folder: Path, roots: tuple[Path, Path]) -> dict[str, Any]:
    gt, lq = map(str, roots)
    opt = {
        'name': 'validation',
        'model_type': 'SRModel',
        'scale': SCALE,
        'num_gpu': 0,
        'datasets': {
            'test_1': {'type': 'PairedImageDataset', 'dataroot_gt': gt, 'dataroot_lq': lq}
        },
        'network_g': NETWORK,
        'path': {'random_weights': True},
        'val': {
            'metrics': {
                'psnr': {'type': 'calculate_psnr', **METRIC},
                'ssim': {'type': 'calculate_ssim', **METRIC},
            }
        },
    }
    option_file = folder / 'validation.yml'
    option_file.write_text(json.dumps(opt))  # JSON is YAML
    sys.argv = ['test.py', '-opt', str(option_file)]
    return parse_options(folder, is_train=False)[0]

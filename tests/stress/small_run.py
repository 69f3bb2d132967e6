"""A training run of a fraction of a second, inside this process, for kinds that need hundreds."""

import contextlib
import copy
import io
import json
import logging
import os
import sys
from pathlib import Path

import cv2
import numpy as np
import runs

import basicsr.train
from basicsr.utils import misc


def options(folder, name, **logger):
    """Options of a run of 6 iterations that is saved at each second one; makes its images.

    Args:
        folder: Where the images are, and experiments will be.
        logger: More options of that section.
    """
    random = np.random.default_rng(0)
    for index in range(4):
        gt = random.integers(0, 256, (32, 40, 3), np.uint8)
        lq = cv2.resize(gt, (20, 16), interpolation=cv2.INTER_AREA)
        for kind, image in (('gt', gt), ('lq', lq)):
            file = Path(folder) / 'data' / kind / f'{index}.png'
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(file), image)
    roots = {f'dataroot_{kind}': str(Path(folder) / 'data' / kind) for kind in ('gt', 'lq')}
    images = {'type': 'PairedImageDataset', 'cache': 'off', **roots}
    batches = {'gt_size': 16, 'batch_size_per_gpu': 2, 'num_worker_per_gpu': 0}
    metrics = {'psnr': {'type': 'calculate_psnr', 'crop_border': 2}}
    return {
        'name': name,
        'model_type': 'SRModel',
        'scale': 2,
        'num_gpu': 0,
        'manual_seed': 7,
        'datasets': {'train': {**images, **batches}, 'val': images},
        'network_g': {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2},
        'train': {
            'total_iter': 6,
            'ema_decay': 0.9,
            'optim_g': {'type': 'Adam', 'lr': 1e-3},
            'pixel_opt': {'type': 'L1Loss'},
        },
        'val': {'val_freq': 3, 'metrics': metrics},
        'logger': {
            'print_freq': 1,
            'save_checkpoint_freq': 2,
            'use_tb_logger': False,
            **logger,
        },
    }


def train(root, opt, *flags):
    """Train below ``root``; returns what was printed, of an error its exception too."""
    option_file = Path(root) / f'{opt["name"]}.json'
    option_file.write_text(json.dumps(opt))
    printed, arguments, draw = io.StringIO(), sys.argv, basicsr.train.draw_results
    sys.argv = ['train', '-opt', str(option_file), *flags]
    basicsr.train.draw_results = lambda *_: None  # takes a second
    error = None
    try:
        with contextlib.redirect_stderr(printed):
            basicsr.train.train_pipeline(root)
    except (OSError, ValueError) as caught:
        error = caught
    finally:
        sys.argv, basicsr.train.draw_results = arguments, draw
        _forget_process()
    return printed.getvalue(), error


def _forget_process():
    """Each run is the first one of its process."""
    root = logging.getLogger('basicsr')
    for handler in root.handlers[:]:
        with contextlib.suppress(OSError):
            handler.close()
        root.removeHandler(handler)
    while misc._claims:
        misc._claims.pop().close()


def shorter(opt, total_iter):
    opt = copy.deepcopy(opt)
    opt['train']['total_iter'] = total_iter
    return opt


def result(folder):
    """What a run ends with: every tensor and number of its last files."""
    from basicsr.utils.checkpoint import load_checkpoint

    networks = {
        file.suffix: load_checkpoint(file)
        for file in (Path(folder) / 'models').glob('net_g_latest.*')
    }
    state = load_checkpoint(Path(folder) / 'training_states/6.state')
    return {'networks': networks, 'state': state}


def same(folder, expected):
    """Whether a run has ended as expected, bit for bit."""
    return os.path.isdir(folder) and runs.differences(result(folder), expected) == []

"""Option files in the long form of BasicSR 1.x, with every key spelled out, and what they mean.

Each trains to the same bits as the short form of the same experiment.
"""

import json
import textwrap
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from blind import adversarial, blind
from long_options import (
    ADVERSARIAL,
    BLIND,
    CLOSING,
    COMPACT,
    COSINE,
    DEGRADATION,
    DISCRIMINATOR,
    GENERAL,
    LOADER,
    MULTI_STEP,
    PAIRED,
    PATHS,
    PATHS_D,
    PERCEPTUAL,
    SWINIR,
    TESTING,
    TRAINING,
    USM_GAN,
    USM_NET,
)
from runs import checkpoint, differences, log_text, rows

from basicsr.archs import build_network
from basicsr.metrics import calculate_psnr
from basicsr.utils.img_util import img2tensor, tensor2img

SCORE = 'metrics/Set5/psnr'


def swinir(opt):
    opt['model_type'] = 'SwinIRModel'
    opt['network_g'] = {
        **{'type': 'SwinIR', 'upscale': 2, 'img_size': 8, 'window_size': 4, 'depths': [2]},
        **{'embed_dim': 12, 'num_heads': [2], 'mlp_ratio': 2, 'upsampler': 'pixelshuffle'},
    }
    return opt


def with_perceptual(opt):
    opt['train']['ldl_opt'] = {'type': 'L1Loss'}
    opt['train']['perceptual_opt'] = {
        **{'type': 'PerceptualLoss', 'layer_weights': {'conv1_1': 1}},
        **{'vgg_type': 'vgg11', 'weights': 'random'},
    }
    return blind(opt, 'RealESRGANModel')


# What makes the short form of train_opt the same, and parts of the long form.
MODELS = {
    'SRModel': (lambda opt: opt, PAIRED, COMPACT),
    'SwinIRModel': (swinir, PAIRED, SWINIR),
    'SRGANModel': (adversarial, PAIRED, COMPACT),
    'ESRGANModel': (lambda opt: adversarial(opt, 'ESRGANModel'), PAIRED, COMPACT),
    'RealESRNetModel': (blind, DEGRADATION + USM_NET + BLIND, COMPACT),
    'RealESRGANModel': (with_perceptual, DEGRADATION + USM_GAN + BLIND, COMPACT),
}
# How batches come, which changes none.
LOADERS = {
    'SRModel': {'workers': 1, 'prefetch_mode': 'cuda', 'pin_memory': True},
    'SwinIRModel': {'prefetch_mode': 'cpu'},
}
SCHEDULES = {
    MULTI_STEP: {'type': 'MultiStepLR', 'milestones': [2], 'gamma': 0.5},
    COSINE: {
        **{'type': 'CosineAnnealingRestartLR', 'periods': [2, 2]},
        **{'restart_weights': [1, 1], 'eta_min': 1e-7},
    },
}


@pytest.fixture
def forms(train_opt, tmp_path):
    """An experiment in the short form, and in the long one as a text."""

    def make(model_type, schedule=MULTI_STEP):
        adapt, data, network = MODELS[model_type]
        short = adapt(train_opt(name='short', train__total_iter=4, val__val_freq=2))
        datasets, train = short['datasets'], short['train']
        datasets['train']['dataset_enlarge_ratio'] = 10
        datasets['val_2'] = dict(datasets['val'])
        train['scheduler'] = SCHEDULES[schedule]
        for name in {'optim_g', 'optim_d'} & train.keys():
            train[name] = {'type': 'Adam', 'lr': 1e-3, 'betas': [0.9, 0.99]}
        images = sorted((tmp_path / 'data/gt').iterdir())
        for file, line in (('in_gt', '{} (32,40,3)'), ('below', 'gt/{}')):
            lines = [line.format(image.name) for image in images]
            (tmp_path / f'data/{file}.txt').write_text('\n'.join(lines) + '\n')
        gan, perceptual = 'gan_opt' in train, 'perceptual_opt' in train
        parts = [GENERAL, data + LOADER, network, DISCRIMINATOR * gan, PATHS + PATHS_D * gan]
        parts += [TRAINING + ADVERSARIAL * gan + PERCEPTUAL * perceptual, CLOSING]
        values = {
            **{'workers': 0, 'prefetch_mode': '~', 'pin_memory': False},
            **LOADERS.get(model_type, {}),
            **{'model_type': model_type, 'scheduler': schedule, 'folder': tmp_path / 'data'},
            **{key: datasets['train'].get(f'dataroot_{key}') for key in ('gt', 'lq')},
            **{f'val_{key}': datasets['val'][f'dataroot_{key}'] for key in ('gt', 'lq')},
        }
        return short, '\n'.join(textwrap.dedent(part.format(**values)) for part in parts)

    return make


@pytest.mark.parametrize(
    ('model_type', 'schedule'),
    [('SRModel', COSINE), *((name, MULTI_STEP) for name in [*MODELS][1:])],
    ids=[*MODELS],
)
def test_the_long_form_trains_as_the_short_one(run, forms, model_type, schedule):
    short, text = forms(model_type, schedule)
    folders = [run(short), run({'name': 'long'}, text=text)]
    networks = {'net_g_latest.pth', 'net_d_latest.pth'} if 'network_d' in short else {'net_g_4.pth'}
    for name in networks | {'net_g_2.pth'}:
        saved = [checkpoint(folder, name)['params'] for folder in folders]
        assert differences(*saved) == []
    steps, scores = ([row for row in rows(folders[1]) if key in row] for key in ('lr', SCORE))
    assert steps == [row for row in rows(folders[0]) if 'lr' in row]
    assert [row['iter'] for row in scores] == [2, 4]
    (unread,) = [line for line in log_text(folders[1]).splitlines() if 'nothing reads' in line]
    dataset = short['datasets']['train']['type']
    assert unread.endswith(f'nothing reads: datasets.train.use_shuffle ({dataset})')


def test_the_long_form_of_a_test_is_scored_and_saved(run, train_opt, tmp_path):
    opt = train_opt()
    network, val = opt['network_g'], opt['datasets']['val']
    content = {key: build_network(network).state_dict() for key in ('params', 'params_ema')}
    torch.save(content, tmp_path / 'weights.pth')
    files = {
        'gt': val['dataroot_gt'],
        'lq': val['dataroot_lq'],
        'weights': tmp_path / 'weights.pth',
    }
    folder = run({'name': 'long'}, pipeline='test', text=TESTING.format(network=COMPACT, **files))
    sets = json.loads((folder / 'results.json').read_text())['sets']
    assert 'nothing reads' not in log_text(folder)
    net = build_network(network)
    net.load_state_dict(content['params_ema'])
    scores = []
    for file in sorted(Path(val['dataroot_gt']).iterdir()):
        lq, gt = (cv2.imread(str(Path(val[f'dataroot_{key}']) / file.name)) for key in ('lq', 'gt'))
        with torch.no_grad():
            restored = tensor2img(net(img2tensor(lq.astype('float32') / 255)[None]))
        scores.append(calculate_psnr(restored, gt, 2, test_y_channel=True))
        for name in ('Set5', 'Set14'):
            saved = cv2.imread(str(folder / f'visualization/{name}/{file.stem}_x2.png'))
            assert np.array_equal(saved, restored)
    assert sets['Set5']['metrics']['psnr'] == pytest.approx(np.mean(scores), abs=1e-4)
    assert 0 < sets['Set5']['metrics']['ssim'] < 1
    assert sets['Set14']['metrics'] == {}

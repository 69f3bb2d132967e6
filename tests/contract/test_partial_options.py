"""Models and loaders built from dicts that hold only what they need, as unit tests often do.

No logger, no datasets, no folders: nothing but the network, the losses and the optimizers.
"""

import math

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from basicsr.data import build_dataloader, build_dataset
from basicsr.models import build_model

ADAM = {'type': 'Adam', 'lr': 1e-3, 'weight_decay': 0, 'betas': [0.9, 0.99]}
GAN = {
    'network_d': {'type': 'UNetDiscriminatorSN', 'num_in_ch': 3, 'num_feat': 4},
    'train': {'optim_d': ADAM, 'gan_opt': {'type': 'GANLoss', 'gan_type': 'vanilla'}},
}
GAN_LOSSES = ['l_g_pix', 'l_g_gan', 'l_d_real', 'out_d_real', 'l_d_fake', 'out_d_fake']
SWINIR = {
    'type': 'SwinIR',
    **{'img_size': 8, 'window_size': 4, 'depths': [2], 'embed_dim': 8, 'num_heads': [2]},
    **{'upscale': 4, 'upsampler': 'pixelshuffledirect'},
}
DEGRADATION = {
    'gt_size': 32,
    **{'resize_prob': [0.2, 0.7, 0.1], 'resize_range': [0.5, 1.5]},
    **{'resize_prob2': [0.3, 0.4, 0.3], 'resize_range2': [0.5, 1.2]},
    **{'gaussian_noise_prob': 0.5, 'noise_range': [1, 30], 'poisson_scale_range': [0.05, 3]},
    **{'gaussian_noise_prob2': 0.5, 'noise_range2': [1, 25], 'poisson_scale_range2': [0.05, 2.5]},
    **{'gray_noise_prob': 0.4, 'gray_noise_prob2': 0.4, 'second_blur_prob': 0.8},
    **{'jpeg_range': [30, 95], 'jpeg_range2': [30, 95], 'queue_size': 4},
}
MODELS = {
    'SRModel': ({}, ['l_pix']),
    'SwinIRModel': ({'network_g': SWINIR}, ['l_pix']),
    'SRGANModel': (GAN, GAN_LOSSES),
    'ESRGANModel': (GAN, GAN_LOSSES),
    'RealESRNetModel': (DEGRADATION | {'gt_usm': True}, ['l_pix']),
    'RealESRGANModel': (
        DEGRADATION | GAN | {'l1_gt_usm': True, 'percep_gt_usm': True, 'gan_gt_usm': False},
        GAN_LOSSES,
    ),
}


class Images(Dataset):
    def __init__(self):
        self.opt = {'name': 'made'}

    def __getitem__(self, index):
        torch.manual_seed(index)
        gt = torch.rand(3, 32, 32)
        lq = torch.nn.functional.avg_pool2d(gt, 4)
        return {'lq': lq, 'gt': gt, 'lq_path': f'/lq/{index}.png', 'gt_path': f'/gt/{index}.png'}

    def __len__(self):
        return 2


@pytest.fixture(params=MODELS)
def built(request):
    """A model with one of the options, a batch of its training, and the names of its losses."""
    options, losses = MODELS[request.param]
    train = {
        'ema_decay': 0.9,
        'optim_g': dict(ADAM),
        'scheduler': {'type': 'MultiStepLR', 'milestones': [5], 'gamma': 0.5},
        'pixel_opt': {'type': 'L1Loss', 'loss_weight': 1.0, 'reduction': 'mean'},
    }
    opt = {
        **{'model_type': request.param, 'scale': 4, 'num_gpu': 0, 'is_train': True, 'dist': False},
        'network_g': {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 4},
        'path': {},
        'val': {'metrics': {'psnr': {'type': 'calculate_psnr', 'crop_border': 4}}},
        **options,
        'train': train | options.get('train', {}),
    }
    kernel = torch.zeros(2, 21, 21)
    kernel[:, 10, 10] = 1
    batch = next(iter(DataLoader(Images(), 2)))
    if request.param.startswith('Real'):
        batch = {'gt': torch.rand(2, 3, 64, 64)}
        batch |= dict.fromkeys(('kernel1', 'kernel2', 'sinc_kernel'), kernel)
    torch.manual_seed(0)
    return build_model(opt), batch, losses


def test_a_model_without_datasets_and_folders_makes_steps(built):
    model, batch, losses = built
    before = [p.detach().clone() for p in model.net_g.parameters()]
    for iteration in (1, 2):
        model.update_learning_rate(iteration, warmup_iter=-1)
        model.feed_data(batch)
        model.optimize_parameters(iteration)
    log = model.get_current_log()
    assert list(log) == losses
    assert all(map(math.isfinite, log.values()))
    assert any(not torch.equal(a, b) for a, b in zip(before, model.net_g.parameters(), strict=True))
    assert model.get_current_learning_rate()[0] == 1e-3


def test_a_model_without_datasets_and_folders_validates(built):
    model, _, _ = built
    model.nondist_validation(DataLoader(Images()), 1, None, False)
    assert 3 < model.metric_results['psnr'] < 40
    assert model.best_metric_results['made']['psnr']['iter'] == 1


def test_a_model_without_datasets_saves_and_loads(built, tmp_path):
    model, _, _ = built
    model.opt['path'].update(models=str(tmp_path), training_states=str(tmp_path))
    model.save(0, 2)
    with torch.no_grad():
        for parameter in model.net_g.parameters():
            parameter.zero_()
    model.load_network(model.net_g, tmp_path / 'net_g_2.pth')
    saved = torch.load(tmp_path / 'net_g_2.pth', weights_only=True)['params']
    assert all(torch.equal(saved[k], v) for k, v in model.net_g.state_dict().items())
    assert torch.load(tmp_path / '2.state', weights_only=True)['iter'] == 2


def test_a_dataset_and_its_loader_need_few_options(image_pairs):
    gt, lq = image_pairs()
    opt = {
        **{'type': 'PairedImageDataset', 'name': 'few', 'phase': 'train', 'scale': 2},
        **{'dataroot_gt': gt, 'dataroot_lq': lq, 'io_backend': {'type': 'disk'}, 'gt_size': 16},
        **{'use_hflip': True, 'use_rot': True, 'batch_size_per_gpu': 2, 'num_worker_per_gpu': 0},
    }
    dataset = build_dataset(opt)
    batches = list(build_dataloader(dataset, opt, num_gpu=0, dist=False, sampler=None, seed=3))
    assert [tuple(batch['gt'].shape) for batch in batches] == [(2, 3, 16, 16)] * 2
    val = build_dataset(opt | {'phase': 'val'})
    assert len(list(build_dataloader(val, {'phase': 'val'}, num_gpu=0))) == 5

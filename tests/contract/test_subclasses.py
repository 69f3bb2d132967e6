"""What subclasses and registrations of dependent projects rely on, each in a plug-in file."""

import json

import pytest
from runs import checkpoint, differences, log_text, rows

# A second network with an optimizer of its own, in the way that models of BasicSR 1.x have it.
TWO_GENERATORS = """
from collections import OrderedDict

from basicsr.archs import build_network
from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class RefiningModel(SRModel):
    def init_training_settings(self):
        self.net_r = build_network(self.opt['network_r'])
        self.net_r = self.model_to_device(self.net_r)
        self.print_network(self.net_r)
        load_path = self.opt['path'].get('pretrain_network_r', None)
        if load_path is not None:
            self.load_network(self.net_r, load_path, True, 'params')
        self.net_r.train()
        super().init_training_settings()

    def setup_optimizers(self):
        train_opt = self.opt['train']
        for name in 'gr':
            optim_type = train_opt[f'optim_{name}'].pop('type')
            params = getattr(self, f'net_{name}').parameters()
            optimizer = self.get_optimizer(optim_type, params, **train_opt[f'optim_{name}'])
            setattr(self, f'optimizer_{name}', optimizer)
            self.optimizers.append(optimizer)

    def optimize_parameters(self, current_iter):
        self.optimizer_g.zero_grad()
        self.optimizer_r.zero_grad()
        coarse = self.net_g(self.lq)
        self.output = coarse + self.net_r(coarse)
        l_coarse, l_pix = self.cri_pix(coarse, self.gt), self.cri_pix(self.output, self.gt)
        (l_coarse + l_pix).backward()
        self.optimizer_g.step()
        self.optimizer_r.step()
        self.log_dict = self.reduce_loss_dict(OrderedDict(l_coarse=l_coarse, l_pix=l_pix))

    def save(self, epoch, current_iter):
        self.save_network(self.net_g, 'net_g', current_iter)
        self.save_network(self.net_r, 'net_r', current_iter)
        self.save_training_state(epoch, current_iter)
"""

# Names that exist in this package, with other behaviour.
SAME_NAMES = """
import torch
from torch import nn
from torch.utils.data import Dataset

from basicsr.data.paired_image_dataset import PairedImageDataset as Original
from basicsr.models.srgan_model import SRGANModel
from basicsr.utils.registry import ARCH_REGISTRY, DATASET_REGISTRY, MODEL_REGISTRY


@ARCH_REGISTRY.register()
class SRVGGNetCompact(nn.Module):
    def __init__(self, num_feat=4, upscale=2):
        super().__init__()
        self.mine = nn.Sequential(nn.Conv2d(3, 3 * upscale**2, 3, 1, 1), nn.PixelShuffle(upscale))

    def forward(self, x):
        return self.mine(x)


@DATASET_REGISTRY.register()
class RealESRGANDataset(Original):
    def __init__(self, opt):
        assert opt['use_flip']  # nearly a key of this package's datasets
        super().__init__(opt)


@MODEL_REGISTRY.register()
class RealESRGANModel(SRGANModel):
    def feed_data(self, data):
        self.is_mine = True
        super().feed_data(data)
"""

NEAR_MISSES = """
import numpy as np
from torch import nn

from basicsr.utils.registry import ARCH_REGISTRY, LOSS_REGISTRY, METRIC_REGISTRY


@ARCH_REGISTRY.register()
class NearNet(nn.Module):
    def __init__(self, num_feats, upscales, **kwargs):
        super().__init__()
        last = nn.Conv2d(num_feats, 3 * upscales**2, 3, 1, 1)
        self.body = nn.Sequential(nn.Conv2d(3, num_feats, 3, 1, 1), last, nn.PixelShuffle(upscales))

    def forward(self, x):
        return self.body(x)


@LOSS_REGISTRY.register()
class NearLoss(nn.Module):
    def __init__(self, loss_weights, **kwargs):
        super().__init__()
        self.loss_weights = loss_weights

    def forward(self, pred, target, weight=None, **kwargs):
        return self.loss_weights * (pred - target).abs().mean()


@METRIC_REGISTRY.register()
def calculate_near(img, img2, crop_borders, **kwargs):
    return float(np.abs(img.astype(np.float64) - img2).mean())
"""

BICUBIC = """
from torch import nn
from torch.nn import functional as F

from basicsr.utils.registry import ARCH_REGISTRY


@ARCH_REGISTRY.register()
class Bicubic(nn.Module):
    def __init__(self, upscale=2):
        super().__init__()
        self.upscale = upscale

    def forward(self, x):
        return F.interpolate(x, scale_factor=self.upscale, mode='bicubic').clamp(0, 1)
"""

LOSS_AND_METRIC = """
import numpy as np
from torch import nn

from basicsr.losses.loss_util import weighted_loss
from basicsr.utils.registry import LOSS_REGISTRY, METRIC_REGISTRY


@weighted_loss
def cubed(pred, target):
    return (pred - target).abs() ** 3


@LOSS_REGISTRY.register()
class CubedLoss(nn.Module):
    def __init__(self, loss_weight=1.0, reduction='mean'):
        super().__init__()
        self.loss_weight, self.reduction = loss_weight, reduction

    def forward(self, pred, target, weight=None, **kwargs):
        return self.loss_weight * cubed(pred, target, weight, reduction=self.reduction)


@METRIC_REGISTRY.register()
def calculate_mae(img, img2, crop_border, **kwargs):
    img, img2 = img[crop_border:-crop_border], img2[crop_border:-crop_border]
    return np.mean(np.abs(img.astype(np.float64) - img2.astype(np.float64)))
"""

# A validation loop whose scores are numbers of numpy, and a dataset that reads options late.
NUMPY_SCORES = """
import numpy as np
from torch.utils.data import Dataset

from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.models.sr_model import SRModel
from basicsr.utils import tensor2img
from basicsr.utils.registry import DATASET_REGISTRY, MODEL_REGISTRY


@MODEL_REGISTRY.register()
class NumpyScoresModel(SRModel):
    def nondist_validation(self, dataloader, current_iter, tb_logger, save_img):
        name, scores = dataloader.dataset.opt['name'], []
        self._initialize_best_metric_results(name)
        for data in dataloader:
            self.feed_data(data)
            self.test()
            shown = self.get_current_visuals()
            img, img2 = (tensor2img([shown[key]]).astype(np.float64) for key in ('result', 'gt'))
            scores.append(((img - img2) ** 2).mean())
        self.metric_results = {'psnr': np.mean(scores)}
        self._update_best_metric_result(name, 'psnr', self.metric_results['psnr'], current_iter)
        self._log_validation_metric_values(current_iter, name, tb_logger)


@DATASET_REGISTRY.register()
class LateDataset(Dataset):
    def __init__(self, opt):
        self.opt, self.pairs = opt, PairedImageDataset(opt)

    def __getitem__(self, index):
        assert self.opt['my_switch']
        return self.pairs[index]

    def __len__(self):
        return len(self.pairs)
"""


@pytest.fixture
def plugin(tmp_path):
    """Write a file of a project, and give the option that imports it."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return {'plugins': ['.']}

    return write


@pytest.fixture
def refining(train_opt, plugin):
    def make(**overrides):
        opt = train_opt(model_type='RefiningModel', **overrides)
        opt |= plugin('refining_model.py', TWO_GENERATORS)
        opt['network_r'] = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 1}
        opt['train']['optim_r'] = {'type': 'Adam', 'lr': 2e-3}
        opt['train']['ema_decay'] = 0
        opt['logger'] = {'print_freq': 1, 'save_checkpoint_freq': 2}
        return opt

    return make


def test_a_second_network_with_its_own_optimizer_trains_and_resumes_exactly(run, refining):
    whole = run(refining(name='whole', train__total_iter=4))
    run(refining(name='halves', train__total_iter=2))
    halves = run(refining(name='halves', train__total_iter=4), '--auto_resume')
    steps = [row for row in rows(whole) if 'losses/l_coarse' in row]
    assert all(0 < row['losses/l_pix'] < 1 for row in steps)
    for name in ('net_g_4.pth', 'net_r_4.pth'):
        assert differences(checkpoint(whole, name), checkpoint(halves, name)) == []
    first, last = (checkpoint(whole, f'net_r_{number}.pth')['params'] for number in (2, 4))
    assert sorted(differences(first, last)) == sorted(f'/{name}' for name in first)
    assert len(checkpoint(whole, '4.state')['optimizers']) == 2


def test_registrations_of_names_that_exist_here_are_the_ones_used(run, train_opt, plugin):
    opt = train_opt(model_type='RealESRGANModel', train__total_iter=2)
    opt |= plugin('same_model.py', SAME_NAMES)
    opt['network_d'] = {'type': 'UNetDiscriminatorSN', 'num_in_ch': 3, 'num_feat': 4}
    opt['network_g'] = {'type': 'SRVGGNetCompact', 'upscale': 2}
    opt['datasets']['train'].update(type='RealESRGANDataset', use_flip=True)
    opt['train'].update(optim_d={'type': 'Adam', 'lr': 1e-3}, gan_opt={'type': 'GANLoss'})
    opt['train']['gan_opt'].update(gan_type='vanilla', loss_weight=0.1)
    folder = run(opt)
    assert all(
        name.startswith('mine.') for name in checkpoint(folder, 'net_g_latest.pth')['params']
    )
    assert 'losses/l_g_gan' in rows(folder)[0]
    assert 'Dataset [RealESRGANDataset]' in log_text(folder)


def test_keys_of_a_project_that_nearly_spell_ours_are_left_to_it(run, train_opt, plugin):
    opt = train_opt(train__total_iter=1) | plugin('near_arch.py', NEAR_MISSES)
    opt['network_g'] = {'type': 'NearNet', 'num_feats': 5, 'upscales': 2}
    opt['train']['pixel_opt'] = {'type': 'NearLoss', 'loss_weights': 3.0}
    opt['val']['metrics'] = {'near': {'type': 'calculate_near', 'crop_borders': 1}}
    folder = run(opt)
    assert checkpoint(folder, 'net_g_1.pth')['params']['body.0.weight'].shape == (5, 3, 3, 3)
    assert 'metrics/val/near' in rows(folder)[-1]


def test_a_network_without_parameters_is_tested_without_weights(run, train_opt, plugin):
    opt = train_opt()
    test_opt = {key: opt[key] for key in ('model_type', 'scale', 'num_gpu', 'val')}
    test_opt |= {'name': 'bicubic', 'network_g': {'type': 'Bicubic'}}
    test_opt |= plugin('bicubic_arch.py', BICUBIC)
    test_opt['datasets'] = {'val': opt['datasets']['val']}
    folder = run(test_opt, pipeline='test')
    (scores,) = json.loads((folder / 'results.json').read_text())['sets'].values()
    assert 15 < scores['metrics']['psnr'] < 60
    with pytest.raises(ValueError, match='path.pretrain_network_g names no weights'):
        run(test_opt | {'network_g': opt['network_g'], 'name': 'random'}, pipeline='test')


def test_a_loss_and_a_metric_of_a_project_are_computed(run, train_opt, plugin):
    opt = train_opt(train__total_iter=1) | plugin('own_loss.py', LOSS_AND_METRIC)
    opt['train']['pixel_opt'] = {'type': 'CubedLoss', 'loss_weight': 2.0, 'reduction': 'mean'}
    opt['val']['metrics'] = {'mae': {'type': 'calculate_mae', 'crop_border': 2, 'better': 'lower'}}
    folder = run(opt)
    logged = rows(folder)
    assert 0 < logged[0]['losses/l_pix'] < 0.5
    score = [row['metrics/val/mae'] for row in logged if 'metrics/val/mae' in row][-1]
    assert 1 < score < 128


def test_scores_of_numpy_leave_states_that_resume(run, train_opt, plugin):
    opt = train_opt(model_type='NumpyScoresModel', train__total_iter=4, val__val_freq=1)
    folder = run(opt | plugin('numpy_model.py', NUMPY_SCORES))
    best = checkpoint(folder, '4.state')['best_metric_results']['val']['psnr']['val']
    assert type(best) is float and best > 1
    opt['train']['total_iter'] = 5
    text = log_text(run(opt | {'plugins': ['.']}, '--auto_resume'))
    assert 'Resuming training from epoch: 1, iter: 4.' in text
    assert 'WARNING: --auto_resume' not in text


def test_an_option_that_a_dataset_reads_when_it_makes_a_sample_counts_as_read(
    run, train_opt, plugin
):
    opt = train_opt(train__total_iter=1) | plugin('late_dataset.py', NUMPY_SCORES)
    opt['datasets']['train'].update(type='LateDataset', my_switch=True, nobody_reads=1)
    (line,) = [x for x in log_text(run(opt)).splitlines() if 'that nothing reads' in x]
    assert 'nobody_reads' in line and 'my_switch' not in line


def test_a_test_with_a_validation_loop_of_its_own_counts_no_images(run, train_opt, plugin):
    opt = train_opt()
    test_opt = {key: opt[key] for key in ('scale', 'num_gpu', 'val', 'network_g')}
    test_opt |= {'name': 'own', 'model_type': 'NumpyScoresModel', 'path': {'random_weights': True}}
    test_opt['datasets'] = {'val': opt['datasets']['val']}
    folder = run(test_opt | plugin('numpy_model.py', NUMPY_SCORES), pipeline='test')
    assert 'val       -' in log_text(folder)


def test_unread_options_of_users_are_listed_by_a_run_without_a_log_line(run, train_opt, plugin):
    opt = train_opt(train__total_iter=1, logger__print_freq=100)
    opt |= plugin('late_dataset.py', NUMPY_SCORES)
    opt['datasets']['train'].update(type='LateDataset', my_switch=True, nobody_reads=1)
    text = log_text(run(opt))
    assert text.count('that nothing reads: datasets.train.nobody_reads (LateDataset)') == 1

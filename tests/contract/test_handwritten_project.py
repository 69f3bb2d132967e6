"""A project with a training step, validation loop and dataset of its own, as for BasicSR 1.x."""

import importlib
import re

import cv2
import pytest
from runs import checkpoint, differences, log_text, rows


@pytest.fixture
def handwritten_opt(train_opt):
    """The option file of the project in ``upstream_style``, which is imported by its train.py."""
    importlib.import_module('upstream_style')

    def make(model_type='HandwrittenModel', **overrides):
        opt = train_opt(model_type=model_type, train__total_iter=2, **overrides)
        opt['network_g'] = {'type': 'HandwrittenNet', 'num_feat': 4, 'upscale': 2}
        opt['train']['edge_opt'] = {'type': 'L1Loss', 'loss_weight': 0.1, 'reduction': 'mean'}
        for dataset in opt['datasets'].values():
            dataset.update(type='HandwrittenDataset', io_backend={'type': 'disk'})
        opt['datasets']['train'].update(use_hflip=True, use_rot=True)
        opt['val'].update(val_freq=1, save_img=True)
        return opt

    return make


@pytest.mark.parametrize('workers', [0, 1])
def test_a_project_in_the_style_of_upstream_trains(run, handwritten_opt, workers):
    folder = run(handwritten_opt(datasets__train__num_worker_per_gpu=workers))
    logged = rows(folder)
    steps = [row for row in logged if 'lr' in row]
    assert all(0 < row['losses/l_edge'] < row['losses/l_pix'] < 1 for row in steps)
    assert [row['iter'] for row in logged if 'metrics/val/psnr' in row] == [1, 2]
    assert all(5 < row['metrics/val/psnr'] < 60 for row in logged if 'metrics/val/psnr' in row)
    assert 'Edge loss is used.' in log_text(folder)
    saved = cv2.imread(str(folder / 'visualization/0002/0002_2.png'))
    assert saved.shape == (24, 28, 3)
    assert checkpoint(folder, '2.state')['best_metric_results']['val']['psnr']['iter'] in (1, 2)


def test_a_project_in_the_style_of_upstream_tests_its_checkpoint(run, handwritten_opt):
    opt = handwritten_opt()
    trained = run(opt)
    test_opt = {key: opt[key] for key in ('name', 'model_type', 'scale', 'num_gpu', 'network_g')}
    test_opt['datasets'] = {'test': opt['datasets']['val']}
    weights = str(trained / 'models/net_g_latest.pth')
    test_opt['path'] = {'pretrain_network_g': weights, 'param_key_g': 'params_ema'}
    test_opt['val'] = {'metrics': opt['val']['metrics']}
    folder = run(test_opt, pipeline='test')
    (score,) = re.findall(r'psnr: ([\d.]+)', log_text(folder))
    last = [row['metrics/val/psnr'] for row in rows(trained) if 'metrics/val/psnr' in row][-1]
    assert float(score) == pytest.approx(last, abs=1e-4)


def test_a_project_that_starts_its_scores_only_once_validates(run, handwritten_opt):
    logged = rows(run(handwritten_opt('OnceStartedModel')))
    assert [row['iter'] for row in logged if 'metrics/val/psnr' in row] == [1, 2]


OWN_SETTINGS = """
from basicsr.archs import build_network
from basicsr.losses import build_loss
from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class OwnSettings(SRModel):
    def init_training_settings(self):
        self.net_g.train()
        self.ema_decay = self.opt['train'].get('ema_decay', 0)
        if self.ema_decay > 0:
            self.net_g_ema = build_network(self.opt['network_g']).to(self.device)
            self.model_ema(0)
            self.net_g_ema.eval()
        self.cri_pix = build_loss(self.opt['train']['pixel_opt']).to(self.device)
        self.cri_perceptual, self.cri_others = None, {}
        self.setup_optimizers()
        self.setup_schedulers()
"""


def test_an_average_that_a_subclass_builds_itself_is_updated_saved_and_resumed(
    run, train_opt, tmp_path
):
    (tmp_path / 'own_model.py').write_text(OWN_SETTINGS)
    ours = run(train_opt(name='ours'))
    own = {'model_type': 'OwnSettings', 'plugins': ['.']}
    theirs = run(train_opt(name='theirs', **own))
    files = [checkpoint(folder, 'net_g_6.pth') for folder in (ours, theirs)]
    assert files[1].keys() == {'params', 'params_ema', 'basicsr'}
    assert differences(*files) == []

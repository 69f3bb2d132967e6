"""Option files as other projects write them, with the options of modern training added to them."""

import pytest
from runs import checkpoint, differences, log_text, rows

from basicsr.archs import build_network
from basicsr.utils.options import yaml_load

# Each of them is one line of an option file.
ADDED = {
    'half precision': {'amp': 'bf16'},
    'parts': {'accumulate': 2, 'clip_grad_norm': 0.5},
    'layout': {'channels_last': 'auto', 'tf32': True},
    'less memory': {'checkpoint_activations': True},
    'compiled': {'compile': {'backend': 'eager'}},
    'average': {'ema_warmup': True},
    'rates': {'scale_lr': {'batch': 4, 'rule': 'sqrt'}},
}
EVERYTHING = {key: value for options in ADDED.values() for key, value in options.items()}
EVERYTHING['channels_last'] = True  # two runs may measure different things

# A transformer with a window, in a project that has a model of its own to pad what it tests.
WINDOWED = """
name: train_WindowedSR_SRx2_from_scratch
model_type: PaddingModel
scale: 2
num_gpu: auto
manual_seed: 0

datasets:
  train:
    name: ImageNet
    type: PairedImageDataset
    dataroot_gt: GT
    dataroot_lq: LQ
    meta_info_file: META
    io_backend:
      type: disk

    gt_size: 16
    use_hflip: true
    use_rot: true

    # data loader
    use_shuffle: true
    num_worker_per_gpu: 1
    batch_size_per_gpu: 2
    dataset_enlarge_ratio: 1
    prefetch_mode: ~

  val_1:
    name: Set5
    type: PairedImageDataset
    dataroot_gt: GT
    dataroot_lq: LQ
    io_backend:
      type: disk

# network structures
network_g:
  type: SwinIR
  upscale: 2
  in_chans: 3
  img_size: 8
  window_size: 4
  img_range: 1.
  depths: [2]
  embed_dim: 8
  num_heads: [2]
  mlp_ratio: 2
  upsampler: 'pixelshuffle'
  resi_connection: '1conv'

# path
path:
  pretrain_network_g: ~
  strict_load_g: true
  resume_state: ~

# training settings
train:
  ema_decay: 0.999
  optim_g:
    type: Adam
    lr: !!float 2e-4
    weight_decay: 0
    betas: [0.9, 0.99]

  scheduler:
    type: MultiStepLR
    milestones: [2, 3]
    gamma: 0.5

  total_iter: 4
  warmup_iter: -1  # no warm up

  # losses
  pixel_opt:
    type: L1Loss
    loss_weight: 1.0
    reduction: mean

# validation settings
val:
  val_freq: !!float 2
  save_img: false
  pbar: False

  metrics:
    psnr:
      type: calculate_psnr
      crop_border: 2
      test_y_channel: true
      better: higher

# logging settings
logger:
  print_freq: 1
  save_checkpoint_freq: !!float 2
  use_tb_logger: true
  wandb:
    project: ~
    resume_id: ~

# dist training settings
dist_params:
  backend: nccl
  port: 29500
"""

PADDING_MODEL = """
import torch
from torch.nn import functional as F

from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class PaddingModel(SRModel):
    def pre_process(self):
        window_size = self.opt['network_g']['window_size']
        self.scale = self.opt.get('scale', 1)
        self.mod_pad_h, self.mod_pad_w = 0, 0
        _, _, h, w = self.lq.size()
        if h % window_size != 0:
            self.mod_pad_h = window_size - h % window_size
        if w % window_size != 0:
            self.mod_pad_w = window_size - w % window_size
        self.img = F.pad(self.lq, (0, self.mod_pad_w, 0, self.mod_pad_h), 'reflect')

    def test(self):
        self.pre_process()
        net = self.net_g_ema if hasattr(self, 'net_g_ema') else self.net_g
        net.eval()
        with torch.no_grad():
            self.output = net(self.img)
        net.train(net is self.net_g)
        _, _, h, w = self.output.size()
        self.output = self.output[
            :, :, 0 : h - self.mod_pad_h * self.scale, 0 : w - self.mod_pad_w * self.scale
        ]
"""


@pytest.fixture
def windowed(image_pairs, tmp_path):
    """The options of the project with a window, whose model lies in a folder of plug-ins."""
    gt, lq = image_pairs(count=4, size=(32, 40))
    (tmp_path / 'padding_model.py').write_text(PADDING_MODEL)
    (tmp_path / 'meta.txt').write_text(''.join(f'{i:04d}.png (32,40,3)\n' for i in range(4)))
    names = {'GT': gt, 'LQ': lq, 'META': str(tmp_path / 'meta.txt')}
    text = '\n'.join(
        f'{line.partition(":")[0]}: {names[value]}'
        if (value := line.partition(': ')[2]) in names
        else line
        for line in WINDOWED.splitlines()
    )
    (tmp_path / 'theirs.yml').write_text(text)
    return yaml_load(tmp_path / 'theirs.yml') | {'plugins': [str(tmp_path)], 'num_gpu': 0}


@pytest.fixture
def degraded(train_opt, repository):
    """The published second stage of Real-ESRGAN with a small network and small images."""
    file = repository / 'options/train/RealESRGAN/train_realesrgan_x4plus.yml'
    opt, tiny = yaml_load(file), train_opt()
    train = opt['datasets']['train']
    train |= {'dataroot_gt': tiny['datasets']['train']['dataroot_gt'], 'gt_size': 32}
    train |= {'batch_size_per_gpu': 2, 'num_worker_per_gpu': 1, 'crop_size': 32}
    opt['network_g'] |= {'num_feat': 8, 'num_block': 1, 'num_grow_ch': 4}
    opt['network_d'] |= {'num_feat': 4}
    opt['train'] |= {'total_iter': 4}
    # The rest of VGG, and its weights, are half a gigabyte.
    opt['train']['perceptual_opt'] |= {'weights': 'random', 'layer_weights': {'conv1_2': 0.1}}
    logger = {'print_freq': 1, 'save_checkpoint_freq': 2, 'use_tb_logger': False}
    return opt | {'num_gpu': 0, 'path': {}, 'val': None, 'logger': logger}


def added(opt, options):
    return opt | {'train': opt['train'] | options}


@pytest.mark.parametrize('what', ADDED)
def test_one_line_is_added_to_the_file_of_a_project_and_nothing_else(run, windowed, what):
    folder = run(added(windowed, ADDED[what]))
    losses = [row['losses/l_pix'] for row in rows(folder) if 'losses/l_pix' in row]
    assert len(losses) == 4 and all(0 < loss < 1 for loss in losses)
    params = checkpoint(folder, 'net_g_latest.pth')['params_ema']
    assert params.keys() == build_network(windowed['network_g']).state_dict().keys()
    assert 'Saving models and training states.' in log_text(folder)


@pytest.mark.slow
@pytest.mark.parametrize('project', ['windowed', 'degraded'])
def test_all_lines_together_train_and_are_resumed_with_equal_bits(run, request, project):
    opt = added(request.getfixturevalue(project), EVERYTHING)
    whole = run(opt | {'name': 'whole'})
    cut = opt | {'name': 'cut'}
    run(added(cut, {'total_iter': 2}))
    folder = run(cut, '--auto_resume')
    for name in ('4.state', 'net_g_4.pth'):
        assert differences(checkpoint(whole, name), checkpoint(folder, name)) == []

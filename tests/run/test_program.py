"""What a process does before its pipeline: plug-ins, process group, seeds."""

import random
import sys

import numpy as np
import pytest
import torch

from basicsr.run.program import prepare
from basicsr.utils.registry import DATASET_REGISTRY

TRAIN = """
name: tiny
model_type: SRModel
scale: 2
num_gpu: 0
manual_seed: 3
datasets:
  train:
    type: PairedImageDataset
    dataroot_gt: ~/gt
    dataroot_lq: [~/lq, lq]
    batch_size_per_gpu: 2
  val:
    name: Set5
    type: PairedImageDataset
  val_2: {type: PairedImageDataset}
network_g: {type: EDSR, num_in_ch: 3, num_out_ch: 3, num_block: 2}
path: {pretrain_network_g: ~/net.pth, strict_load_g: true}
train:
  total_iter: 10
  optim_g: {type: Adam, lr: !!float 1e-4, betas: [0.9, 0.99]}
  scheduler: {type: MultiStepLR, milestones: [5], gamma: 0.5}
val: {val_freq: 5, metrics: {psnr: {type: calculate_psnr, crop_border: 2}}}
logger: {print_freq: 5, save_checkpoint_freq: 5, use_tb_logger: false}
"""

DATASET = """
import os
from torch.utils.data import get_worker_info
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class MyDataset(PairedImageDataset):
    def __getitem__(self, index):
        if get_worker_info() is not None:
            open(f'worker_{os.getpid()}', 'w').close()
        return super().__getitem__(index)
"""


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepare for the options of a text and flags; returns the complete options."""

    def call(text=TRAIN, *flags, is_train=True):
        (tmp_path / 'x.yml').write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['prog', '-opt', 'x.yml', *flags])
        return prepare(tmp_path, is_train)[0]

    return call


def force(*entries):
    return ('--force_yml', *entries)


def test_a_forced_seed_is_the_one_that_counts(prepared):
    """Overrides come before seeding."""
    assert prepared(TRAIN, *force('manual_seed=11'))['manual_seed'] == 11
    drawn = random.random(), np.random.rand(), torch.rand(1)
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))


def test_each_rank_has_its_own_seed(prepared, monkeypatch):
    monkeypatch.setattr('basicsr.run.program.get_dist_info', lambda: (4, 8))
    opt = prepared()
    assert (opt['rank'], opt['world_size'], opt['manual_seed']) == (4, 8, 3)
    assert torch.initial_seed() == 7


def test_deterministic_switches_torch_over(prepared, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, 'use_deterministic_algorithms', chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', True)
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':16:8')
    prepared(TRAIN + 'deterministic: true\n')
    assert chosen == [True]
    assert torch.backends.cudnn.benchmark is False


def test_the_environment_of_torchrun_is_enough(prepared, monkeypatch):
    values = {'RANK': 0, 'WORLD_SIZE': 1, 'LOCAL_RANK': 0, 'MASTER_ADDR': '127.0.0.1'}
    for name, value in {**values, 'MASTER_PORT': 0}.items():
        monkeypatch.setenv(name, str(value))
    opt = prepared(TRAIN + 'dist_params: {backend: gloo, timeout: 30}\n')
    assert (opt['dist'], opt['rank'], opt['world_size']) == (True, 0, 1)
    assert torch.distributed.get_backend() == 'gloo'


@pytest.mark.parametrize(
    ('asked', 'there', 'used'), [('auto', 3, 3), ('auto', 0, 0), (1, 2, 1), (8, 2, 2), (0, 2, 0)]
)
def test_num_gpu_is_at_most_what_is_there(prepared, monkeypatch, capsys, asked, there, used):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: there)
    assert prepared(TRAIN, *force(f'num_gpu={asked}'))['num_gpu'] == used
    warned = f'num_gpu is {asked}, but torch sees {there} CUDA devices' in capsys.readouterr().err
    assert warned == (asked == 8)


def test_without_a_gpu_the_run_goes_on_on_the_cpu(prepared, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    assert prepared(TRAIN, *force('num_gpu=1'))['num_gpu'] == 0
    assert 'running on the CPU' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('there', 'asked', 'told'), [(2, 4, True), (4, 4, False), (2, 'auto', False)]
)
def test_another_number_of_gpus_than_the_file_has_is_told_with_both_batches(
    prepared, monkeypatch, capsys, there, asked, told
):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: there)
    prepared(TRAIN, *force(f'num_gpu={asked}', 'datasets:train:batch_size_per_gpu=16'))
    line = (
        'has num_gpu: 4, and this run trains on 2: 32 samples per iteration instead of 64. '
        'datasets.train.batch_size_total: 64 keeps the total.'
    )
    assert (line in capsys.readouterr().err) is told


def test_plugins_are_looked_up_beside_the_option_file(prepared, tmp_path):
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'my_dataset.py').write_text(DATASET)
    opt = prepared(TRAIN + 'plugins: [mine]\n')
    assert opt['plugins'] == [str(tmp_path / 'mine')]
    assert DATASET_REGISTRY.get('MyDataset').__module__ == 'my_dataset'


def test_two_plugin_files_of_one_name_are_both_named(prepared, tmp_path):
    for folder in ('a', 'b'):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'same_arch.py').write_text('')
    with pytest.raises(ImportError, match='b/same_arch.py has the module name of .*a/same_arch.py'):
        prepared(TRAIN + 'plugins: [a, b]\n')

"""Start scripts of projects: their own train.py and test.py, also where processes are spawned."""

import json
import subprocess
import sys

import pytest
from runs import checkpoint, log_text, rows

# Without main guard: what is at the top level runs again in each process that is spawned.
UNGUARDED = """
import multiprocessing
import os.path as osp

import my_arch
from basicsr.train import train_pipeline

multiprocessing.set_start_method('spawn', force=True)
root_path = osp.abspath(osp.join(__file__, osp.pardir))
train_pipeline(root_path)
"""

GUARDED = """
import multiprocessing
import os.path as osp

import my_arch
from basicsr.test import test_pipeline
from basicsr.train import train_pipeline

if __name__ == '__main__':
    import sys

    multiprocessing.set_start_method('spawn', force=True)
    root_path = osp.abspath(osp.join(__file__, osp.pardir))
    train_pipeline(root_path)
    sys.argv[sys.argv.index('-opt') + 1] = 'test.yml'
    test_pipeline(root_path)
"""

ARCH = """
from torch import nn

from basicsr.archs import build_network
from basicsr.utils.registry import ARCH_REGISTRY


@ARCH_REGISTRY.register()
class MyNet(nn.Module):
    def __init__(self, inner, upscale=2):
        super().__init__()
        self.inner = build_network(inner)

    def forward(self, x):
        return self.inner(x)


if __name__ == '__main__':
    print(build_network({'type': 'MyNet', 'inner': {'type': 'MSRResNet'}}))
"""


@pytest.fixture
def project(tmp_path, train_opt):
    """Write the files of a project; returns a function that starts its script."""
    opt = train_opt(name='mine', train__total_iter=2)
    opt['network_g'] = {'type': 'MyNet', 'inner': opt['network_g']}

    def start(script, **dataset):
        (tmp_path / 'my_arch.py').write_text(ARCH)
        (tmp_path / 'train.py').write_text(script)
        opt['datasets']['train'].update(dataset)
        (tmp_path / 'mine.yml').write_text(json.dumps(opt))
        weights = {'pretrain_network_g': 'experiments/mine/models/net_g_2.pth'}
        test = {key: opt[key] for key in ('model_type', 'scale', 'num_gpu', 'network_g', 'val')}
        test |= {'name': 'tested', 'path': weights, 'datasets': {'val': opt['datasets']['val']}}
        (tmp_path / 'test.yml').write_text(json.dumps(test))
        command = [sys.executable, 'train.py', '-opt', 'mine.yml', '--auto_resume']
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return tmp_path / 'experiments/mine'

    return start


def test_a_script_without_main_guard_trains_if_it_asks_for_no_loader_processes(project):
    folder = project(UNGUARDED, num_worker_per_gpu=0, prefetch_mode='cpu')
    assert log_text(folder).count('Start training from epoch: 0, iter: 0.') == 1
    assert [row['iter'] for row in rows(folder) if 'losses/l_pix' in row] == [1, 2]
    assert 'inner.body.0.weight' in checkpoint(folder, 'net_g_2.pth')['params']


def test_a_script_with_main_guard_trains_with_spawned_processes_and_tests(project):
    folder = project(GUARDED, num_worker_per_gpu=1)
    assert [row['iter'] for row in rows(folder) if 'losses/l_pix' in row] == [1, 2]
    results = json.loads((folder.parents[1] / 'results/tested/results.json').read_text())
    assert 5 < results['sets']['val']['metrics']['psnr'] < 60

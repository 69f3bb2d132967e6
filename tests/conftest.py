"""Fixtures: small image pairs, a small option file, and runs of the two pipelines on it."""

import errno
import json
import logging
import os
import random
import signal
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.distributed as dist
from golden import recipe
from runs import TORCHRUN

from basicsr.utils import registry

# As in the foreground: a shell has what it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# As the programs that tests start: sums differ in their last bit with the number of threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch, tmp_path_factory):
    """The same seeds for every test; no process group, handler or launcher is left behind."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.getbasetemp() / 'cache'))
    path = sys.path[:]
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(name, raising=False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_plugins()
    sys.path[:] = path
    _forget_handlers()
    logging.getLogger('basicsr').propagate = True


def _forget_handlers():
    root = logging.getLogger('basicsr')
    for handler in root.handlers[:]:
        handler.close()
        root.removeHandler(handler)


def _forget_plugins():
    """Another test's plug-ins may have the same names."""
    for value in vars(registry).values():
        if isinstance(value, registry.Registry):
            for name, entry in list(value._obj_map.items()):
                if entry.__module__ in registry.plugin_modules:
                    del value._obj_map[name]
    for name in registry.plugin_modules:
        sys.modules.pop(name, None)
    registry.plugin_modules.clear()


@pytest.fixture
def no_home(monkeypatch):
    """As in a container whose user is not known to the system."""

    def unknown(uid):
        raise KeyError(f'getpwuid(): uid not found: {uid}')

    for name in ('HOME', 'XDG_CACHE_HOME', 'TORCH_HOME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr('pwd.getpwuid', unknown)


@pytest.fixture
def break_locks(monkeypatch):
    """Let locks fail as on some network file systems, or with another error."""

    def break_them(number=errno.ENOLCK):
        def fail(*_):
            raise OSError(number, os.strerror(number))

        for name in ('flock', 'lockf'):
            monkeypatch.setattr(f'fcntl.{name}', fail)

    return break_them


@pytest.fixture
def device():
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


@pytest.fixture
def image_pairs(tmp_path):
    """Write GT and LQ images below ``tmp_path``; returns the two folders."""

    def write(folder='data', count=5, size=(32, 40), scale=2, channels=3):
        for index in range(count):
            gt = recipe.det_image(f'{folder}/{index}', *size, channels)
            for name, img in (('gt', gt), ('lq', recipe.box_down(gt, scale))):
                path = tmp_path / folder / name / f'{index:04d}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), img)
        return str(tmp_path / folder / 'gt'), str(tmp_path / folder / 'lq')

    return write


@pytest.fixture
def train_opt(image_pairs):
    """A minimal option dict of a x2 training run that takes a fraction of a second.

    Keyword arguments ``a__b=value`` set ``opt['a']['b']``.
    """

    def make(**overrides):
        gt, lq = image_pairs()
        val_gt, val_lq = image_pairs('valdata', count=3, size=(24, 28))
        opt = {
            'name': 'tiny',
            'model_type': 'SRModel',
            'scale': 2,
            'num_gpu': 0,
            'manual_seed': 7,
            'datasets': {
                'train': {
                    'type': 'PairedImageDataset',
                    'dataroot_gt': gt,
                    'dataroot_lq': lq,
                    'gt_size': 16,
                    'batch_size_per_gpu': 2,
                    'num_worker_per_gpu': 0,
                },
                'val': {'type': 'PairedImageDataset', 'dataroot_gt': val_gt, 'dataroot_lq': val_lq},
            },
            'network_g': {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2},
            'path': {},
            'train': {
                'total_iter': 6,
                'ema_decay': 0.9,
                'optim_g': {'type': 'Adam', 'lr': 1e-3},
                'scheduler': {'type': 'MultiStepLR', 'milestones': [4], 'gamma': 0.5},
                'pixel_opt': {'type': 'L1Loss'},
            },
            'val': {
                'val_freq': 3,
                'metrics': {'psnr': {'type': 'calculate_psnr', 'crop_border': 2}},
            },
            'logger': {'print_freq': 1, 'save_checkpoint_freq': 2, 'use_tb_logger': False},
        }
        for keys, value in overrides.items():
            *parents, last = keys.split('__')
            section = opt
            for key in parents:
                section = section.setdefault(key, {})
            section[last] = value
        return opt

    return make


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run ``train_pipeline`` (or ``test_pipeline``) on an option dict; returns the run's folder.

    With ``text`` that is the option file, and of the dict only the name counts.

    The pictures at the end, which take a second, are left out unless asked for with ``draw``.
    """

    def call(opt, *flags, pipeline='train', draw=False, text=''):
        from basicsr.test import test_pipeline
        from basicsr.train import train_pipeline

        _forget_handlers()  # every run is one process's first
        if not draw:
            monkeypatch.setattr('basicsr.train.draw_results', lambda *_: None)
        option_file = tmp_path / f'{opt["name"]}.yml'
        option_file.write_text(text or json.dumps(opt))  # JSON is YAML
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['prog', '-opt', str(option_file), *flags])
        (train_pipeline if pipeline == 'train' else test_pipeline)(tmp_path)
        return tmp_path / ('experiments' if pipeline == 'train' else 'results') / opt['name']

    return call


@pytest.fixture
def repository():
    return Path(__file__).resolve().parents[1]


@pytest.fixture
def run_program(tmp_path, repository):
    """Run ``python <arguments>`` in ``tmp_path`` with the checkout on the path."""
    import subprocess

    def call(*arguments, timeout=600, **environment):
        env = {**os.environ, 'PYTHONPATH': str(repository), 'OMP_NUM_THREADS': '1', **environment}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call


@pytest.fixture
def two_val_opt(train_opt, image_pairs):
    """Three validation images in one set, one in the other: shares are uneven, or empty."""
    gt, lq = image_pairs('single', 1, (16, 20))

    def make(**overrides):
        opt = train_opt(val__save_img=True, **overrides)
        opt['datasets']['val_2'] = dict(opt['datasets']['val'], dataroot_gt=gt, dataroot_lq=lq)
        opt['val']['metrics']['ssim'] = {'type': 'calculate_ssim', 'crop_border': 2}
        return opt

    return make


@pytest.fixture
def train_in_two(run_program, write, tmp_path, repository):
    """Train one option file after the other on two processes: (options, iteration to die after)."""

    def train(*parts):
        plan, begun = [], set()
        for opt, die_after in parts:
            resumes = ['--auto_resume'] * (opt['name'] in begun)
            argv = ['-opt', write(opt), *resumes]
            part = {'pipeline': 'train', 'argv': argv, 'die_after': die_after, 'draw': False}
            plan.append(part)
            begun.add(opt['name'])
        (tmp_path / 'plan.json').write_text(json.dumps(plan))
        program = repository / 'tests' / 'distributed_program.py'
        result = run_program(*TORCHRUN, program, 'plan.json')
        assert result.returncode == 0, result.stderr
        return tmp_path / 'experiments'

    return train


@pytest.fixture
def write(tmp_path):
    def write(opt):
        file = tmp_path / f'{opt["name"]}.yml'
        file.write_text(json.dumps(opt))
        return str(file)

    return write

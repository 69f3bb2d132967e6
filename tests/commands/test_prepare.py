"""``basicsr prepare``: its actions, and the scripts that share them."""

import inspect
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from runs import rows

from basicsr import cli
from basicsr.commands import prepare
from basicsr.data import preparing, preparing_pairs, preparing_published
from basicsr.models.restore_files import find_network, restore_files

FUNCTIONS = {**vars(preparing), **vars(preparing_pairs), **vars(preparing_published)}


@pytest.fixture
def photos(tmp_path):
    """Five photographs of noise, 42 x 50 pixels and more."""
    for number in range(5):
        img = np.random.default_rng(number).integers(0, 256, (42 + number, 50, 3), np.uint8)
        (tmp_path / 'photos').mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / 'photos' / f'{number}.png'), img)
    return tmp_path / 'photos'


@pytest.mark.parametrize('name', prepare.ACTIONS)
def test_flags_are_the_arguments_of_the_function_and_the_example_is_valid(name):
    action = prepare.ACTIONS[name]
    args = cli.parse(['prepare', name, *action.example.split()])
    function = FUNCTIONS[action.function.partition('.')[2]]
    parameters = inspect.signature(function).parameters
    assert set(vars(args)) - {'command', 'action', 'main', 'parser'} == set(parameters)
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    given = {'source', 'output', 'gt_output', 'val', 'lq', 'crop_size', 'step', 'train', 'workers'}
    assert [n for n in defaults.keys() - given if defaults[n] != getattr(args, n)] == []


def test_every_set_that_has_lmdbs_can_be_named():
    for name in preparing.DATABASES:
        assert cli.parse(['prepare', 'lmdb', '--dataset', name]).dataset == name


def test_photographs_become_restored_ones_by_what_each_command_says(command, photos, run):
    status, out, _ = command('prepare', 'pairs', 'photos', '--scale', 2, '--val', 2)
    assert status == 0
    assert out.endswith('\nNext: basicsr train -opt datasets/photos_x2/train.yml\n')
    text = Path('datasets/photos_x2/train.yml').read_text()
    short = ['train:total_iter=1', 'val:val_freq=1', 'logger:use_tb_logger=false', 'num_gpu=0']
    short += ['datasets:train:batch_size_per_gpu=1', 'datasets:train:num_worker_per_gpu=0']
    folder = run({'name': 'photos_x2'}, '--force_yml', *short, text=text)
    assert rows(folder)[-1]['metrics/val/psnr'] > 5
    restore_files(find_network(folder / 'models/net_g_latest.pth'), 'photos', 'restored')
    assert cv2.imread('restored/4.png').shape == (92, 100, 3)


def test_every_action_is_reached_from_the_command_line(command, photos, tmp_path):
    (tmp_path / 'a').mkdir()
    said = {
        'lq -i photos -o lq --gt-output gt --scale 2': 'reduced to 1/2, are in lq and their GT in',
        'lmdb -i photos -o gt.lmdb --cut-suffix x4': '5 images of photos are in gt.lmdb.',
        'meta -i photos -o list.txt': '5 images of photos are listed in list.txt.',
        'subimages -i photos -o sub --crop-size 24 --step 12': '60 sub-images of 5 images are in',
        'split --gt gt --lq lq -o lists --val 20%': '4 images for training, 1 for validation:',
        'reds --train a --val b': 'no folder b.',
        'tfrecords photos/0.png -o images': 'photos/0.png is not a TFRecord file',
    }
    for line, text in said.items():
        status, out, err = command('prepare', *line.split())
        assert status == (text not in out)
        assert text in out + err


@pytest.mark.parametrize(
    ('action', 'error', 'message'),
    [
        ('lq', ValueError('two\n lines'), 'make: two lines'),
        ('lq', KeyboardInterrupt(), 'make: interrupted. --resume continues from here.'),
        ('meta', KeyboardInterrupt(), 'make: interrupted.'),
    ],
)
def test_a_script_ends_with_one_line(action, error, message, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(preparing, prepare.ACTIONS[action].function.partition('.')[2], fail)
    flags = prepare.ACTIONS[action].example.split()
    monkeypatch.setattr(sys, 'argv', ['scripts/make.py', *flags])
    with pytest.raises(SystemExit) as caught:
        prepare.script(action)
    assert caught.value.code == message


def test_an_interruption_says_how_to_go_on(command, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing, 'make_lq', fail)
    status, _, err = command('prepare', 'lq', *prepare.ACTIONS['lq'].example.split())
    assert status == 130
    assert err.endswith('Interrupted. --resume continues from here.\n')


def test_existing_files_are_either_kept_or_replaced(command):
    flags = prepare.ACTIONS['lq'].example.split()
    status, _, err = command('prepare', 'lq', *flags, '--resume', '--overwrite')
    assert status == 2
    assert 'not allowed with argument' in err
    status, _, err = command('prepare', 'lq', *flags, '--workers', 0)
    assert status == 2
    assert '--workers: must be at least 1, got 0' in err

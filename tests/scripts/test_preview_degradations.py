import importlib.util
import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from blind import blind

from basicsr.models import build_model
from basicsr.train import create_train_val_dataloader
from basicsr.utils.img_util import tensor2img
from basicsr.utils.logger import get_root_logger
from basicsr.utils.options import parse_options

SCRIPT = Path(__file__).parents[2] / 'scripts' / 'preview_degradations.py'

spec = importlib.util.spec_from_file_location('preview_degradations', SCRIPT)
preview_degradations = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preview_degradations)


@pytest.fixture
def option_file(train_opt, tmp_path):
    """Write an option file of a training on degraded images, or of pairs."""

    def write(is_blind=True, **overrides):
        opt = train_opt(**overrides)
        path = tmp_path / 'x.yml'
        path.write_text(json.dumps(blind(opt) if is_blind else opt))
        return path

    return write


@pytest.fixture
def preview(tmp_path, monkeypatch, capsys):
    """Run the script as a command in ``tmp_path``; returns what it prints."""

    def run(*args):
        monkeypatch.setattr(sys, 'path', list(sys.path))
        monkeypatch.setattr(sys, 'argv', [str(SCRIPT), '-opt', *map(str, args)])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(SCRIPT), run_name='__main__')
        return capsys.readouterr().out

    return run


@pytest.fixture
def drawn(monkeypatch):
    """What the script would draw: the panels, and the values of the histograms."""
    kept = {}
    figures = 'basicsr.utils.figures'
    monkeypatch.setattr(f'{figures}.write_contact_sheet', lambda _, p: kept.update(panels=p))
    monkeypatch.setattr(f'{figures}.write_histograms', lambda _, v: kept.update(values=v))
    return kept


def training(option_file, monkeypatch):
    """The model and the batches of the training that an option file describes."""
    monkeypatch.setattr(sys, 'argv', ['train.py', '-opt', str(option_file)])
    opt, _ = parse_options(option_file.parent)
    loader = create_train_val_dataloader(opt, get_root_logger())[0]
    return build_model(opt), iter(loader)


def test_the_command_writes_three_files_and_prints_one_line(preview, option_file, tmp_path):
    out = preview(option_file(), '--num', 3, '--draws', 20, '--output', 'new/a.png')
    assert out == (
        'Samples 0 to 2 of seed 7 are in new/a.png, their recipes in new/a.jsonl; histograms of 20 '
        'are in new/a_histograms.png.\n'
    )
    assert not (tmp_path / 'experiments').exists()
    assert {path.name for path in (tmp_path / 'new').iterdir()} == {
        'a.png',
        'a.jsonl',
        'a_histograms.png',
    }
    # Three columns of one row, and four columns of histograms.
    sheet, histograms = (cv2.imread(f'new/{name}.png') for name in ('a', 'a_histograms'))
    assert sheet.shape[1] > 2 * sheet.shape[0]
    assert histograms.shape[0] > 800
    rows = [json.loads(line) for line in Path('new/a.jsonl').read_text().splitlines()]
    assert [row['sample'] for row in rows] == [0, 1, 2]
    assert {'gt_path', 'seed', 'kernel1', 'noise_level2'} <= rows[0].keys()


def test_a_sample_is_shown_as_the_training_sees_it(preview, option_file, drawn, monkeypatch):
    file = option_file()
    preview(file, '--num', 4, '--start', 1, '--draws', 1)
    model, batches = training(file, monkeypatch)
    lq, gt = [], []
    for _ in range(3):
        model.feed_data(next(batches))
        lq += [tensor2img([image]) for image in model.lq]
        gt += [tensor2img([image]) for image in model.gt]
    assert len(drawn['panels']) == 4
    for number, panel in enumerate(drawn['panels'], 1):
        assert panel['name'].startswith(f'{number}: ')
        assert np.array_equal(panel['lq'], lq[number])
        assert np.array_equal(panel['gt'], gt[number])


def test_histograms_count_every_draw_once(preview, option_file, drawn):
    preview(option_file(), '--num', 1, '--draws', 40)
    values = drawn['values']
    assert list(values) == [name for name in preview_degradations.PARAMETERS if name in values]
    for name in ('kernel', 'resize factor', 'resize mode', 'noise', 'noise colour'):
        assert len(values[name]['first']) == len(values[name]['second']) == 40
    for step in ('first', 'second'):
        kinds = Counter(values['noise'][step])
        assert len(values['Gaussian sigma [1/255]'][step]) == kinds['gaussian']
        assert len(values['Poisson scale'][step]) == kinds['poisson']
        levels = values['Gaussian sigma [1/255]'][step]
        assert min(levels) >= 1
        assert max(levels) <= 30
        kernels = Counter(values['kernel'][step])
        assert len(values['kernel size'][step]) == 40 - kernels['none']
    assert len(values['order at the end']['last']) == 40


def test_histograms_are_of_the_samples_that_are_shown(preview, option_file, drawn, tmp_path):
    preview(option_file(), '--num', 6, '--draws', 6, '--start', 3, '--output', 'b.png')
    recipes = [json.loads(line) for line in (tmp_path / 'b.jsonl').read_text().splitlines()]
    shown = [preview_degradations.parameters(recipe) for recipe in recipes]
    assert drawn['values'] == preview_degradations.by_parameter(shown)


def test_the_same_samples_are_drawn_from_any_start(preview, option_file, drawn):
    file = option_file()
    preview(file, '--num', 3, '--draws', 3)
    whole = drawn['values']['resize factor']['first'], drawn['panels'][2]['text']
    preview(file, '--num', 1, '--start', 2, '--draws', 1)
    later = drawn['values']['resize factor']['first'], drawn['panels'][0]['text']
    assert (whole[0][2:], whole[1]) == later


def test_the_text_has_what_was_done_in_its_order():
    recipe = {
        'kernel1': {'kind': 'aniso', 'sig_x': 2.0, 'sig_y': 0.5, 'isotropic': False},
        'kernel2': {'kind': 'iso', 'sig_x': 1.0, 'isotropic': True},
        'sinc_kernel': {'kind': 'sinc', 'cutoff': 1.5},
        'second_blur': False,
        'final_resize_mode': 'area',
        'jpeg_last': True,
    }
    for end, noise, gray in (('', 'gaussian', True), ('2', 'poisson', False)):
        recipe |= {f'resize_factor{end}': 0.5, f'resize_mode{end}': 'bicubic'}
        recipe |= {f'noise{end}': noise, f'noise_level{end}': 1.25, f'gray_noise{end}': gray}
        recipe |= {f'jpeg_quality{end}': 40.4}
    assert [line.split() for line in preview_degradations.describe(recipe).splitlines()] == [
        ['first', 'second'],
        ['blur', 'aniso', '2.00x0.50', 'none'],
        ['resize', 'x0.50', 'bicubic', 'x0.50', 'bicubic'],
        ['noise', 'gaussian', '1.25', 'gray', 'poisson', '1.25', 'colour'],
        ['JPEG', 'quality', '40', 'quality', '40'],
        ['end', 'area', 'resize,', 'sinc', '1.50,', 'JPEG'],
    ]
    recipe |= {'jpeg_last': False, 'sinc_kernel': {'kind': 'delta'}, 'second_blur': True}
    text = preview_degradations.describe(recipe)
    assert 'iso 1.00' in text
    assert text.endswith('JPEG, area resize, no sinc')


@pytest.mark.parametrize(
    ('is_blind', 'force', 'message'),
    [
        (False, [], 'datasets.train.type is PairedImageDataset'),
        (True, ['--force_yml', 'share_degradation=true'], 'share_degradation=false'),
        (True, ['--num', '0'], '--num'),
        (True, ['--draws', '0'], '--draws'),
        (True, ['--start', '-1'], '--start'),
    ],
)
def test_what_has_no_preview_is_refused(is_blind, force, message, preview, option_file, capsys):
    with pytest.raises(SystemExit) as caught:
        preview(option_file(is_blind), *force)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err

import json
import sys

import cv2
import numpy as np
import pytest
from golden import recipe
from matplotlib.figure import Figure

from basicsr.utils import figures
from basicsr.utils.figures import (
    detailed_part,
    enlarge,
    side_by_side,
    smoothed,
    write_comparison,
    write_contact_sheet,
    write_curves,
    write_histograms,
)
from basicsr.utils.matlab_functions import imresize


@pytest.fixture
def panel():
    gt = recipe.det_image('gt', 24, 32, 3)
    return {
        'name': 'one',
        'lq': recipe.box_down(gt, 2),
        'result': recipe.add_noise(gt, 'noise', 5),
        'gt': gt,
        'metrics': {'psnr': 31.25, 'ssim': 0.875},
    }


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written, in place of files."""
    kept = []
    monkeypatch.setattr(figures, '_write', lambda figure, path: kept.append(figure))
    return kept


def test_enlargement_is_bicubic(panel):
    large = enlarge(panel['lq'], (24, 32))
    exact = imresize(panel['lq'].astype(np.float64), 2)
    assert large.dtype == np.uint8
    assert np.abs(large - exact.clip(0, 255)).max() <= 0.5 + 1e-6
    mse = np.mean((large.astype(float) - panel['gt']) ** 2)
    nearest = cv2.resize(panel['lq'], (32, 24), interpolation=cv2.INTER_NEAREST)
    assert mse < np.mean((nearest.astype(float) - panel['gt']) ** 2)


def test_enlargement_takes_any_size(panel):
    assert enlarge(panel['gt'], (24, 32)) is panel['gt']
    assert enlarge(panel['lq'], (25, 31)).shape == (25, 31, 3)
    flat = np.full((5, 4), 255, np.uint8)
    assert np.array_equal(enlarge(flat, (10, 12)), np.full((10, 12), 255))


def test_results_stand_side_by_side_in_rgb(panel):
    image = side_by_side(panel)
    assert (image.shape, image.dtype) == ((24, 96, 3), np.uint8)
    assert np.array_equal(image[::2, :32:2], panel['lq'][..., ::-1])
    assert np.array_equal(image[:, 32:64], panel['result'][..., ::-1])
    assert np.array_equal(image[:, 64:], panel['gt'][..., ::-1])


def test_without_gt_there_are_two_and_grey_is_shown_grey(panel):
    del panel['gt']
    panel['result'] = panel['result'][..., 0]
    panel['lq'] = panel['lq'][..., :1]
    image = side_by_side(panel)
    assert image.shape == (24, 64, 3)
    assert np.array_equal(image[:, 32:, 1], panel['result'])


def test_a_comparison_has_scores_of_bicubic_and_of_the_result(panel, drawn):
    def score(images, name):
        return {'psnr': cv2.PSNR(images['result'], images['gt']), 'ssim': 0.5}

    write_comparison('x.png', [panel, dict(panel, name='two')], score)
    axes = drawn[0].axes
    bicubic = enlarge(panel['lq'], (24, 32))
    captions = [
        f'bicubic\nPSNR {cv2.PSNR(bicubic, panel["gt"]):.2f} dB  SSIM 0.5000',
        'result\nPSNR 31.25 dB  SSIM 0.8750',
        'ground truth\n',
    ]
    size = '\nresult, 32 x 24'
    assert [a.get_title() for a in axes] == [f'one{size}', *captions, f'two{size}', *captions]
    whole, *parts = (axis.images[0].get_array() for axis in axes[:4])
    assert np.array_equal(whole, panel['result'][..., ::-1])
    top, left, side = detailed_part(panel['gt'])
    for image, expected in zip(parts, (bicubic, panel['result'], panel['gt']), strict=True):
        part = expected[top : top + side, left : left + side]
        assert np.array_equal(image, part[..., ::-1])


def test_the_part_that_is_shown_is_the_one_with_the_edges():
    image = np.full((200, 300, 3), 90, np.uint8)
    image[150:190:2, 240:280] = 200
    top, left, side = detailed_part(image, 64)
    assert side == 64
    assert top <= 150 and top + side >= 190 and left <= 240 and left + side >= 280
    assert detailed_part(image[:40], 64)[2] == 40


def test_an_input_as_large_as_the_result_is_not_called_bicubic(panel, drawn):
    panel['lq'] = panel['gt']
    write_comparison('x.png', [panel], lambda images, name: {})
    assert drawn[0].axes[1].get_title() == 'input\n'


@pytest.mark.parametrize('name', ['caf\udce9', 'price_$1_$', 'a_{b}'])
def test_any_file_name_can_be_drawn(panel, tmp_path, name):
    write_comparison(tmp_path / 'x.png', [panel | {'name': name}], lambda images, name: {})
    assert (tmp_path / 'x.png').is_file()


def test_the_backend_of_a_notebook_is_not_asked_for(panel, run_program, tmp_path):
    np.save(tmp_path / 'gt.npy', panel['gt'])
    code = (
        'import numpy as np\n'
        'from basicsr.utils.figures import write_comparison\n'
        "image = np.load('gt.npy')\n"
        "panel = {'name': 'x', 'metrics': {}, 'lq': image, 'result': image}\n"
        "write_comparison('x.png', [panel], lambda images, name: {})\n"
    )
    program = run_program('-c', code, MPLBACKEND='module://matplotlib_inline.none')
    assert program.returncode == 0, program.stderr


def test_a_comparison_without_gt_has_two_columns(panel, drawn):
    del panel['gt']
    panel['metrics'] = {}
    write_comparison('x.png', [panel], lambda images, name: {})
    titles = [axis.get_title() for axis in drawn[0].axes]
    assert titles == ['one\nresult, 32 x 24', 'bicubic\n', 'result\n']


def test_a_comparison_is_a_png_file(panel, tmp_path):
    write_comparison(tmp_path / 'x.png', [panel], lambda images, name: {'niqe': 4.0})
    assert [path.name for path in tmp_path.iterdir()] == ['x.png']
    height, width = cv2.imread(str(tmp_path / 'x.png')).shape[:2]
    assert width > 2 * height


ROWS = [
    {'iter': 10, 'losses/l_pix': 0.5, 'losses/l_gan': 2.0, 'lr': 1e-3, 'time/data': 0.1},
    {'iter': 20, 'losses/l_pix': 0.25, 'lr': 1e-3},
    {'iter': 20, 'metrics/Set5/psnr': 30.0, 'metrics/Set5/ssim': 0.8, 'metrics/B100/psnr': 27.0},
    {'iter': 30, 'metrics/Set5/psnr': 31.0, 'metrics/Set5/ssim': 0.85, 'metrics/B100/psnr': 28.0},
]


@pytest.fixture
def metrics_file(tmp_path):
    def write(rows):
        path = tmp_path / 'metrics.jsonl'
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        return path

    return write


def test_curves_are_drawn_by_kind(metrics_file, drawn):
    assert write_curves('x.png', metrics_file(ROWS)) is True
    plots = {
        axis.get_title(): {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        for axis in drawn[0].axes
    }
    assert plots == {
        'loss': {'l_pix': [[10, 0.5], [20, 0.25]], 'l_gan': [[10, 2.0]]},
        'psnr': {'Set5': [[20, 30], [30, 31]], 'B100': [[20, 27], [30, 28]]},
        'ssim': {'Set5': [[20, 0.8], [30, 0.85]]},
        'learning rate': {'lr': [[10, 1e-3], [20, 1e-3]]},
    }
    axes = drawn[0].axes
    assert [axis.get_yscale() for axis in axes] == ['log', 'linear', 'linear', 'linear']
    assert [axis.get_ylabel() for axis in axes] == ['loss', 'PSNR (dB)', 'ssim', 'learning rate']
    assert {axis.get_xlabel() for axis in axes} == {'iteration'}


def test_rates_are_named_by_network_and_bicubic_has_a_line(metrics_file, drawn):
    rows = [{'iter': 1, 'lr': 1e-3, 'lr_1': 2e-3, 'metrics/Set5/psnr': 30.0}]
    file = metrics_file(rows)
    write_curves('x.png', file, ['net_g', 'net_d'], {'metrics/Set5/psnr': 28.5})
    psnr, rates = drawn[0].axes
    assert [line.get_label() for line in rates.lines] == ['net_g', 'net_d']
    assert [text.get_text() for text in rates.get_legend().get_texts()] == ['net_g', 'net_d']
    assert [line.get_label() for line in psnr.lines] == ['Set5', 'Set5, bicubic']
    assert list(psnr.lines[1].get_ydata()) == [28.5, 28.5]


def test_many_losses_are_smoothed_with_the_single_ones_behind(metrics_file, drawn):
    losses = [1.0 + 0.5 * (-1) ** i for i in range(100)]
    write_curves(
        'x.png', metrics_file([{'iter': i, 'losses/l_pix': x} for i, x in enumerate(losses)])
    )
    raw, smooth = (line.get_ydata() for line in drawn[0].axes[0].lines)
    assert raw.tolist() == losses
    assert np.ptp(smooth[10:]) < 0.21 * np.ptp(raw)
    assert smoothed(np.array([2.0, 4.0, 6.0, 8.0]), share=0.5).tolist() == [2, 3, 5, 7]


def test_without_values_nothing_is_drawn(metrics_file, drawn):
    assert write_curves('x.png', metrics_file([{'iter': 1, 'lr': 1e-3}])) is False
    assert write_curves('x.png', metrics_file([])) is False
    assert drawn == []


def test_curves_are_a_png_file(metrics_file, tmp_path):
    write_curves(str(tmp_path / 'x.png'), metrics_file(ROWS[2:3]))
    assert cv2.imread(str(tmp_path / 'x.png')).shape == (380, 1000, 3)


def test_a_contact_sheet_has_gt_beside_lq_and_a_text_below(panel, drawn):
    panel['text'] = 'blur  iso 1.00'
    write_contact_sheet('x.png', [dict(panel, name=str(index)) for index in range(5)], columns=2)
    axes = drawn[0].axes
    assert len(axes) == 6  # the last is empty
    assert [axis.get_title(loc='left') for axis in axes] == ['0', '1', '2', '3', '4', '']
    assert [len(axis.images) for axis in axes] == [1, 1, 1, 1, 1, 0]
    assert axes[4].texts[0].get_text() == 'blur  iso 1.00'
    image = axes[0].images[0].get_array()
    assert image.shape == (24, 32 + 1 + 32, 3)
    assert np.array_equal(image[:, :32], panel['gt'][..., ::-1])
    assert np.array_equal(image[1::2, 34::2], panel['lq'][..., ::-1])


def test_histograms_count_numbers_in_bins_and_choices_in_bars(drawn):
    parameters = {
        'factor': {'first': [0.5, 1.0, 1.0], 'second': [0.75]},
        'mode': {'first': ['b', 'a', 'b']},
        'size': {'second': [9, 7, 21, 7]},
    }
    write_histograms('x.png', parameters)
    numbers, names, sizes, empty = drawn[0].axes
    assert [axis.get_title() for axis in drawn[0].axes] == ['factor', 'mode', 'size', '']
    first, second = (patch.get_xy()[:, 1] for patch in numbers.patches)
    assert (first.max(), second.max()) == (2, 1)
    assert not empty.axison
    for axis, labels, counts in ((names, 'ab', [1, 2]), (sizes, ['7', '9', '21'], [2, 1, 1])):
        assert [label.get_text() for label in axis.get_yticklabels()] == list(labels)
        assert [bar.get_width() for bar in axis.patches] == counts
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ['first', 'second']


def test_no_display_is_needed(metrics_file, drawn, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.pyplot', None)
    assert write_curves('x.png', metrics_file(ROWS))
    assert type(drawn[0]) is Figure

"""The benchmarks run, and what they compare with computes the same thing."""

import json
import math
import random
import re
import sys

import numpy as np
import pytest
import torch
from golden import recipe

from basicsr.metrics import calculate_psnr, calculate_ssim
from benchmarks import startup
from benchmarks.__main__ import BEGIN, BENCHMARKS, END, around_table, parse_args
from benchmarks.measure import Row, in_turn
from benchmarks.metrics import direct_psnr, direct_ssim, luma_ssim
from benchmarks.photos import photo_pairs, photograph
from benchmarks.plain import DecodedPairs, RawPairs


@pytest.fixture
def images():
    gt = recipe.det_image('benchmark', 40, 52, 3)
    return gt, recipe.add_noise(gt, 'benchmark/noise', 20)


QUICKEST = ['metrics', 'sampler']


@pytest.mark.slow
@pytest.mark.parametrize(
    'names',
    [
        QUICKEST,
        pytest.param(
            [name for name in BENCHMARKS if name not in ('startup', *QUICKEST)],  # it has one size
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_benchmarks_fill_their_rows_of_the_table_and_the_json(run_program, tmp_path, names):
    page, numbers = tmp_path / 'page.md', tmp_path / 'numbers.json'
    page.write_text(f'before\n{BEGIN}\n{END}\nafter\n')
    outputs = ('--json', numbers, '--markdown', page, '--folder', tmp_path)
    program = run_program('-m', 'benchmarks', *names, '--quick', *outputs)
    assert program.returncode == 0, program.stderr
    report = json.loads(numbers.read_text())
    lines = re.findall(r'^\| (\w+): .*\|$', program.stdout, re.MULTILINE)
    assert lines == [row['benchmark'] for row in report['rows']]
    assert list(dict.fromkeys(lines)) == list(report['raw']) == names
    assert all(0 < row['value'] < math.inf for row in report['rows'])
    assert {'torch', 'python', 'basicsr'} <= report['machine']['versions'].keys()
    assert report['machine']['cpus'] > 0
    assert report['quick'] is True
    assert page.read_text().startswith(f'before\n{BEGIN}\n{program.stdout}')
    assert page.read_text().endswith(f'\n{END}\nafter\n')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['numbers.json', 'page.md']


def test_the_start_is_compared_with_that_of_bare_imports(monkeypatch, tmp_path):
    monkeypatch.setattr(startup, 'COMMANDS', dict.fromkeys(startup.COMMANDS, ('-c', '')))
    rows, raw = startup.measure(tmp_path, quick=True)
    assert rows[0].reference == raw['torch, torchvision, cv2'][0]
    assert rows[1].value == raw['help'][0]


def test_an_unknown_benchmark_is_refused_with_the_names_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['benchmarks', 'sample'])
    with pytest.raises(SystemExit):
        parse_args()
    assert 'no benchmark sample; there are samples, step' in capsys.readouterr().err


def test_the_direct_metrics_are_those_of_the_library(images):
    a, b = images
    assert direct_ssim(a, b) == pytest.approx(calculate_ssim(a, b, 0), rel=1e-9)
    assert luma_ssim(a, b) == pytest.approx(calculate_ssim(a, b, 0, test_y_channel=True), abs=1e-5)
    assert direct_psnr(a, b) == pytest.approx(calculate_psnr(a, b, 0), rel=1e-9)


def test_both_plain_datasets_give_the_same_aligned_crops(tmp_path):
    roots = photo_pairs(tmp_path, 400, 396, 2)
    samples = []
    for dataset in (DecodedPairs(*roots), RawPairs(*roots)):
        random.seed(3)
        samples.append([dataset[index] for index in (0, 1, 0)])
    for decoded, raw in zip(*samples, strict=True):
        assert decoded['gt'].shape == (3, 128, 128)
        assert torch.equal(decoded['gt'], raw['gt'])
        assert torch.equal(decoded['lq'], raw['lq'])
        reduced = torch.nn.functional.avg_pool2d(raw['gt'], 4)
        assert (reduced - raw['lq']).abs().max() < 2 / 255  # LQ was rounded


def test_a_photograph_is_the_same_each_time_and_unlike_the_next():
    first = photograph(0, 400, 130)
    assert first.shape == (130, 400, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, photograph(0, 400, 130))
    assert not np.array_equal(first, photograph(1, 400, 130))


@pytest.mark.parametrize(
    ('row', 'ratio', 'met'),
    [
        (Row('', 6, 's', 2, ('>=', 3)), 3, True),
        (Row('', 6, 's', 2, ('<=', 2.9)), 3, False),
        (Row('', 6, 's', goal=('<=', 6)), None, True),
        (Row('', 6, 's', 2), 3, None),
    ],
)
def test_a_goal_bounds_the_ratio_or_the_value_without_a_reference(row, ratio, met):
    assert (row.ratio, row.met) == (ratio, met)


def test_the_sides_of_a_comparison_take_turns():
    order = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in 'ab'}
    assert in_turn(sides, 2) == {'a': [1, 3], 'b': [2, 4]}
    assert order == ['a', 'b', 'a', 'b']


def test_the_peak_counts_memory_that_is_given_back_before_the_end(run_program):
    # In a small process of its own: a kernel short of memory takes back pages of a large one
    # (unused code, huge pages full of zeros), and what goes in between counts as less.
    run = run_program(
        '-c',
        'from benchmarks.measure import with_peak;'
        'print(*with_peak(lambda count: len(b"x" * count), 2**28))',
    )
    size, peak = run.stdout.split()
    assert int(size) == 2**28
    assert 240 < float(peak) < 270


def test_a_page_without_markers_is_refused(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(f'before\n{BEGIN}\nold\n{END}\nafter\n')
    assert around_table(page) == (f'before\n{BEGIN}\n', f'\n{END}\nafter\n')
    page.write_text(BEGIN)
    with pytest.raises(ValueError, match='needs the lines'):
        around_table(page)

"""The page has what the files of runs say, needs nothing else, and survives damaged files."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from golden import recipe

from basicsr.models.validation import SetRecord
from basicsr.run import monitor
from basicsr.run.report import find_runs, write_report
from basicsr.run.report_record import MOST_ITERATIONS, names_of_rates, picture, record_validation
from basicsr.run.report_statistics import compare, paired_bootstrap

METRICS = {
    'psnr': {'type': 'calculate_psnr', 'crop_border': 2},
    'niqe': {'type': 'calculate_niqe', 'better': 'lower'},
}
LOG = """2026-12-01 10:00:00,000 INFO:
Version Information:
\tBasicSR: 2.0.0 from /x
\tPyTorch: 2.9
2026-12-01 10:00:01,000 WARNING: Iteration 5: not finite: l_pix; its step is skipped.
2026-12-01 10:00:02,000 INFO: Resuming training from epoch: 1, iter: 20.
2026-12-01 10:00:03,000 INFO: [r..][epoch: 1, iter: 30] l_pix: 0.1
"""


class Page(HTMLParser):
    """The data of a page, and all that it refers to."""

    def __init__(self, file):
        super().__init__()
        self.links, self._is_data, text = [], False, file.read_text(encoding='utf-8')
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._is_data = dict(attrs).get('id') == 'data'
        self.links += [value for key, value in attrs if key in ('src', 'href', 'srcset', 'data')]

    def handle_data(self, text):
        if self._is_data:
            self.data, self._is_data = json.loads(text), False


def scores_of(count, gain=0.0):
    return {
        f'{i:02d}': {'psnr': 25 + i % 7 + gain * (1 + 0.1 * (i % 3)), 'niqe': 5.0 - 0.1 * i}
        for i in range(count)
    }


@pytest.fixture
def make_run(tmp_path):
    """Write the folder of a training; returns it."""

    def make(name, images, lr=1e-3, metrics=METRICS):
        folder = tmp_path / 'experiments' / name
        folder.mkdir(parents=True)
        rows = [{'iter': i, 'losses/l_pix': 1 / i, 'lr': lr} for i in range(1, 31)]
        rows += [
            {'iter': 15, 'metrics/Set14/psnr': 30.0, 'metrics/Set14/niqe': 4.0},
            {'iter': 30, 'metrics/Set14/psnr': 29.5, 'metrics/Set14/niqe': None},
        ]
        (folder / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
        (folder / 'train_x.log').write_text(LOG)
        row = {'iter': 30, 'set': 'Set14', 'grouped': False, 'images': images}
        (folder / 'scores.jsonl').write_text(json.dumps(row) + '\n')
        image = picture({'name': '00', 'result': recipe.det_image('x', 8, 8, 3)})['result']
        content = {
            'options': {
                'name': name,
                'train': {'total_iter': 30, 'lr': lr},
                'val': {'metrics': metrics},
            },
            'rates': ['net_g'],
            'baselines': {'metrics/Set14/psnr': 27.0},
            'pictures': {'Set14': {'</script><b>': {
                'lq': image, 'gt': image, 'results': {'15': image, '30': image}}}},
            'hardest': {'Set14': [{'name': '00', 'result': image}]},
        }  # fmt: skip
        (folder / 'report.json').write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture
def write(tmp_path):
    def call(*folders):
        write_report(folders, tmp_path / 'page.html')
        return Page(tmp_path / 'page.html')

    return call


def test_the_page_has_the_figures_of_the_files(make_run, write):
    page = write(make_run('a', scores_of(8)))
    (run,) = page.data['runs']
    loss = run['curves']['losses/l_pix']
    assert loss['x'] == list(range(1, 31))
    assert loss['y'] == [1 / i for i in range(1, 31)]
    assert loss['s'][1] == pytest.approx(0.75)  # the mean of the last two
    assert run['curves']['metrics/Set14/psnr'] == {'x': [15, 30], 'y': [30.0, 29.5]}
    assert run['figures']['Set14/psnr'] == {
        'last': 29.5, 'last_iter': 30, 'best': 30.0, 'best_iter': 15, 'better': 'higher',
        'baseline': 27.0,
    }  # fmt: skip
    assert run['figures']['Set14/niqe']['last'] == 4.0
    assert [image['name'] for image in run['hardest']['Set14']][:3] == ['00', '07', '01']
    assert run['environment'] == {'BasicSR': '2.0.0 from /x', 'PyTorch': '2.9'}
    assert [(e['level'], e['text'][:12]) for e in run['incidents']] == [
        ('warning', 'Iteration 5:'),
        ('info', 'Resuming tra'),
    ]
    assert (run['iter'], run['total'], run['rates'], run['notes']) == (30, 30, ['net_g'], [])


def test_long_curves_are_thinned_to_their_ends_and_scores_are_not(make_run, write):
    folder = make_run('a', {})
    rows = [{'iter': i, 'lr': i, 'metrics/x/psnr': i} for i in range(1, 2502)]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    curves = write(folder).data['runs'][0]['curves']
    assert len(curves['lr']['x']) <= 1001
    assert (curves['lr']['x'][0], curves['lr']['x'][-1]) == (1, 2501)
    assert len(curves['metrics/x/psnr']['x']) == 2501


def test_the_page_loads_nothing_from_outside(make_run, write):
    page = write(make_run('a', scores_of(8)))
    assert page.links == []
    assert "default-src 'none'; img-src data:" in page.text
    assert not re.search(r'@import|url\(|fetch\(|XMLHttp|import\(', page.text)
    hosts = set(re.findall(r'https?://([\w.]+)', page.text))
    assert hosts == {'www.w3.org'}  # the name of SVG, which no browser loads
    assert '</script><b>' in page.data['runs'][0]['pictures']['Set14']
    assert page.text.count('</script>') == 2


def test_runs_are_compared_and_their_options_too(make_run, write):
    runs = [make_run('a', scores_of(14)), make_run('b', scores_of(14, 0.03), lr=2e-3)]
    data = write(*runs).data
    psnr, niqe = data['compared']
    assert (psnr['set'], psnr['metric'], psnr['run'], psnr['n']) == ('Set14', 'psnr', 'b', 14)
    assert 0.03 < psnr['low'] < psnr['mean'] < psnr['high'] < 0.036
    assert psnr['verdict'] == 'better'
    assert (niqe['mean'], niqe['verdict']) == (0, 'not significant')
    assert [o for o in data['options'] if o['differs']] == [
        {'key': 'train.lr', 'values': ['0.001', '0.002'], 'differs': True}
    ]


def test_the_bootstrap_gives_the_interval_of_the_normal_distribution():
    values = np.random.default_rng(3).normal(0.1, 2, 400)
    mean, low, high = paired_bootstrap(values)
    half = 1.96 * values.std() / 20
    assert mean == values.mean()
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.02)
    assert paired_bootstrap([0.5] * 7) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ('own', 'other', 'expected'),
    [
        ({'images': scores_of(5)}, {'images': scores_of(5, 1)}, 'too few images to tell'),
        ({'images': scores_of(14, 1)}, {'images': scores_of(14)}, 'worse'),
        (
            {'images': scores_of(14)},
            {'images': scores_of(14, 1), 'crop_border': 4},
            'not comparable',
        ),
    ],
)
def test_a_difference_is_told_only_if_it_is_one(own, other, expected):
    runs = []
    for given in (own, other):
        options = {'psnr': {'crop_border': given.pop('crop_border', 2)}}
        images = {'x': {'grouped': False, **given}}
        runs.append({'name': 'r', 'images': images, 'metric_options': options})
    assert next(compare(*runs))['verdict'].startswith(expected)


def test_frames_are_compared_by_clip():
    first = {
        f'{clip}/{i}': {'psnr': 30.0} for clip in 'abcdef' for i in range(1 + 9 * (clip == 'a'))
    }
    second = {name: {'psnr': 31.0 if name[0] == 'a' else 30.0} for name in first}
    runs = [
        {'name': n, 'images': {'x': {'grouped': True, 'images': s}}, 'metric_options': {}}
        for n, s in (('1', first), ('2', second))
    ]
    (row,) = compare(*runs)
    assert (row['n'], row['unit'], row['mean']) == (6, 'clip', pytest.approx(1 / 6))
    assert row['verdict'] == 'not significant'


def test_damaged_and_missing_files_become_notes(make_run, write):
    folder = make_run('a', scores_of(8))
    (folder / 'metrics.jsonl').unlink()
    (folder / 'report.json').write_text('{"options": ')
    (folder / 'scores.jsonl').write_bytes(b'\xff\xfe\n')
    (folder / 'train_y.log').write_bytes(b'\xff\n')
    notes = write(folder).data['runs'][0]['notes']
    assert [note.partition(':')[0] for note in notes] == [
        'report.json cannot be read',
        'metrics.jsonl is not there.',
        'scores.jsonl cannot be read',
        'scores.jsonl is not there',
    ]


def test_a_test_is_a_run_too(tmp_path, write):
    folder = tmp_path / 'results/t'
    folder.mkdir(parents=True)
    sets = {'Set5': {'metrics': {'psnr': 30.0}, 'images': scores_of(3), 'failed': {}}}
    content = {'name': 't', 'metric_options': METRICS, 'network': {'type': 'EDSR'}, 'sets': sets}
    (folder / 'results.json').write_text(json.dumps(content))
    written = folder / 'visualization/Set5'
    written.mkdir(parents=True)
    cv2.imwrite(str(written / '01_t.png'), recipe.det_image('x', 16, 16, 3))
    assert find_runs(['t'], tmp_path) == [folder]
    (run,) = write(folder).data['runs']
    assert (run['figures']['Set5/psnr']['best'], run['notes']) == (30.0, [])
    assert [image['name'] for image in run['hard_pictures']['Set5']] == ['01']
    with pytest.raises(ValueError, match='nothing is not a run'):
        find_runs(['nothing'], tmp_path)


class Model:
    """What is recorded of a model."""

    def __init__(self, folder):
        self.opt = {'path': {'experiments_root': str(folder)}, 'rank': 0}
        self.optimizers, self.panels, self.set_records = [], [], {}

    def validated(self, shade):
        gt = recipe.det_image('gt', 24, 32, 3)
        panel = {'set': 's', 'name': 'one', 'lq': gt[::2, ::2], 'result': gt // 2 + shade, 'gt': gt}
        self.panels = [panel]
        self.set_records = {'s': SetRecord({'one': {'psnr': 20.0 + shade}}, hardest=[panel])}
        return self


def test_a_repeated_validation_replaces_what_was_recorded_later(tmp_path):
    model = Model(tmp_path)
    for iteration in (10, 20, 30, 20):
        record_validation(model.validated(iteration), iteration)
    rows = [json.loads(line) for line in (tmp_path / 'scores.jsonl').read_text().splitlines()]
    assert [(r['iter'], r['images']) for r in rows] == [
        (10, {'one': {'psnr': 30.0}}),
        (20, {'one': {'psnr': 40.0}}),
    ]
    kept = json.loads((tmp_path / 'report.json').read_text())['pictures']['s']['one']
    assert list(kept['results']) == ['10', '20']
    assert model.set_records['s'].hardest == []


def test_pictures_of_a_long_run_are_few_and_from_all_of_it(tmp_path):
    model = Model(tmp_path)
    for iteration in range(1, 61):
        record_validation(model.validated(1), iteration)
    content = json.loads((tmp_path / 'report.json').read_text())
    kept = [int(number) for number in content['pictures']['s']['one']['results']]
    assert len(kept) <= MOST_ITERATIONS
    assert (kept[0], kept[-1]) == (1, 60)
    assert max(np.diff(kept)) <= 8


def test_learning_rates_are_named_by_network(tmp_path):
    model = Model(tmp_path)
    model.optimizer_g = SimpleNamespace(param_groups=[{}])
    model.optimizer_d = SimpleNamespace(param_groups=[{}, {}])
    model.optimizers = [model.optimizer_g, model.optimizer_d]
    assert names_of_rates(model) == ['net_g', 'net_d, group 0', 'net_d, group 1']


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError('the disk is full')

    monkeypatch.setattr(monitor, 'write_report', fail)
    monitor.refresh_report(Model(tmp_path).validated(1), 10)
    assert 'report.html could not be made: OSError: the disk is full' in caplog.text


def test_a_training_records_scores_pictures_and_the_baseline(run, train_opt):
    folder = run(train_opt())
    rows = [json.loads(line) for line in (folder / 'scores.jsonl').read_text().splitlines()]
    assert [(row['iter'], row['set'], len(row['images'])) for row in rows] == [
        (3, 'val', 3),
        (6, 'val', 3),
    ]
    data = Page(folder / 'report.html').data['runs'][0]
    mean = np.mean([scores['psnr'] for scores in rows[-1]['images'].values()])
    assert mean == pytest.approx(data['figures']['val/psnr']['last'], abs=1e-5)
    assert data['rates'] == ['net_g']
    assert 10 < data['figures']['val/psnr']['baseline'] < 60
    assert {len(image['results']) for image in data['pictures']['val'].values()} == {2}
    hardest = [image['name'] for image in data['hardest']['val']]
    assert [image['name'] for image in data['hard_pictures']['val']] == hardest
    assert set(data['hard_pictures']['val'][0]) == {'name', 'box', 'lq', 'result', 'gt'}


# What a reader does: the first iteration, a zoom at the middle of the first picture.
GESTURES = """<script>
const slider = document.querySelector('input[type=range]')
slider.value = 0
slider.dispatchEvent(new Event('input'))
const img = document.querySelector('.frame img'), box = img.parentElement.getBoundingClientRect()
img.dispatchEvent(new WheelEvent('wheel', { deltaY: -300 * Math.log(2), bubbles: true,
  clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 }))
</script></body>"""
BROWSER = shutil.which('chromium') or shutil.which('google-chrome') or shutil.which('chrome')


@pytest.mark.skipif(BROWSER is None, reason='needs chromium or google-chrome')
def test_a_browser_draws_the_page_without_an_error(make_run, write, tmp_path):
    runs = [make_run('a', scores_of(14)), make_run('b', scores_of(14, 0.03), lr=2e-3)]
    page, file = write(*runs), tmp_path / 'page.html'
    file.write_text(page.text.replace('</body>', GESTURES))
    flags = ['--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr']
    flags += [f'--user-data-dir={tmp_path / "profile"}', '--virtual-time-budget=2000']
    shown = subprocess.run(
        [BROWSER, *flags, '--dump-dom', file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 'CONSOLE' not in shown.stderr  # an error of the script, or a resource that is refused
    body = shown.stdout.partition('<script')[0]
    for title in ('Key figures', 'Against a', 'Curves', 'Images', 'Hardest images', 'Incidents'):
        assert f'<h2>{title}</h2>' in body
    charts = re.findall(r'aria-label="([^"]+)"><line', body)
    assert charts == ['PSNR on Set14', 'niqe on Set14', 'loss l_pix', 'learning rate']
    assert body.count('class="baseline"') == 1
    assert '+0.03 dB' in body and 'significantly better' in body
    assert '&lt;/script&gt;&lt;b&gt;' in body
    captions = re.findall(r'</span>([^<]+)</figcaption>', body)
    assert captions == ['a, iteration 15', 'b, iteration 15']
    zoomed = re.findall(r'translate\(-([\d.]+)%, -([\d.]+)%\) scale\(([\d.]+)\)', body)
    assert len(zoomed) == 4 and len(set(zoomed)) == 1  # LQ, two results, GT
    assert [float(number) for number in zoomed[0]] == pytest.approx([50, 50, 2], abs=0.5)
    assert 'NaN' not in body and '[object' not in body

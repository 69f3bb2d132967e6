"""The models of the guide: several networks, clips, generators, set metrics."""

import json

import pytest
from guide import blocks, merge, write_plugins
from runs import checkpoint, differences, log_text, rows

from basicsr import cli
from basicsr.models.base_model import BaseModel
from basicsr.utils import yaml_load

KINDS = {
    'cycle': ('Two generators', {}),
    'clip': ('Clips', {}),
    'generator': ('A generator without a validation set', {}),
    'set metric': ('A metric over a whole set', {}),
}
EVERYTHING = {
    'train__accumulate': 2,
    'train__channels_last': 'auto',
    'train__swa': {'start': 2, 'every': 1, 'lr': 1e-3, 'bn_batches': 2},
    'train__clip_grad_norm': 1.0,
}


@pytest.fixture
def guide_opt(page, train_opt, image_pairs, tmp_path):
    """Options of a run with what a part of the guide shows."""

    def make(heading, **overrides):
        opt = train_opt(scale=4, datasets__train__gt_size=32, **overrides)
        gt, lq = image_pairs('x4', count=6, size=(48, 40), scale=4)
        for dataset in opt['datasets'].values():
            dataset.update(dataroot_gt=gt, dataroot_lq=lq)
        opt['network_g']['upscale'] = 4
        text = page('docs/models.md', heading)
        write_plugins(text, tmp_path)
        for block in blocks(text, 'yaml'):
            merge(opt, yaml_load(block))
        opt['plugins'] = ['.']
        if heading == 'Clips':
            for dataset in opt['datasets'].values():
                dataset['type'] = 'PairsAsClips'
        if heading.startswith('A generator'):
            opt['model_type'] = 'NoiseModel'
            del opt['datasets']['val'], opt['val']['metrics']
        return opt

    return make


@pytest.mark.parametrize('heading', [heading for heading, _ in KINDS.values()])
@pytest.mark.parametrize('options', [{}, EVERYTHING], ids=['plain', 'everything'])
def test_a_model_of_the_guide_resumes_with_the_same_bits(
    heading, options, guide_opt, run, monkeypatch
):
    class Stop(BaseException):
        pass

    # A measurement might choose another layout for another run.
    monkeypatch.setattr('basicsr.models.base_model.channels_last_is_faster', lambda *_: True)
    whole = run(guide_opt(heading, name='whole', **options))
    begin = BaseModel.begin_iteration

    def stop(self, data, iteration, *args):
        if iteration > 3:
            raise Stop
        begin(self, data, iteration, *args)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(BaseModel, 'begin_iteration', stop)
        run(guide_opt(heading, name='cut', **options))
    cut = run(guide_opt(heading, name='cut', **options), '--auto_resume')
    names = sorted(file.name for file in (whole / 'models').iterdir())
    assert names == sorted(file.name for file in (cut / 'models').iterdir())
    for name in names:
        assert differences(checkpoint(whole, name), checkpoint(cut, name)) == [], name
    assert differences(checkpoint(whole, '6.state'), checkpoint(cut, '6.state')) == []
    assert rows(whole) == rows(cut)
    assert 'have no effect' not in log_text(whole)
    if options:
        assert checkpoint(whole, 'net_g_6.pth').keys() >= {'params', 'params_ema', 'params_swa'}


def test_each_network_of_the_guides_cycle_has_its_files_averages_and_rates(guide_opt, run):
    folder = run(guide_opt('Two generators', **EVERYTHING))
    names = {file.name for file in (folder / 'models').iterdir()}
    assert {f'net_{label}_latest.pth' for label in 'ghd'} <= names
    for label, averages in (
        ('g', {'params_ema', 'params_swa'}),
        ('h', {'params_ema', 'params_swa'}),
    ):
        assert checkpoint(folder, f'net_{label}_latest.pth').keys() >= averages
    assert not {'params_ema', 'params_swa'} & checkpoint(folder, 'net_d_latest.pth').keys()
    first, last = (checkpoint(folder, f'net_h_{i}.pth')['params'] for i in (2, 6))
    assert sorted(differences(first, last)) == ['/body.bias', '/body.weight']
    row = next(row for row in rows(folder) if 'lr' in row)
    assert row.keys() >= {f'losses/{name}' for name in ('l_pix', 'l_h', 'l_d_real', 'l_d_fake')}
    assert len(checkpoint(folder, '6.state')['optimizers']) == 3


def test_clips_are_scored_by_frame_averaged_by_clip_and_written_below_it(guide_opt, run):
    folder = run(guide_opt('Clips', val__save_img=True))
    clips = sorted(path.name for path in (folder / 'visualization').iterdir())
    assert clips == ['0000', '0003']
    frames = sorted(path.name for path in (folder / 'visualization' / '0003').iterdir())
    assert frames == ['00000000', '00000001', '00000002']
    text = log_text(folder)
    means = [float(line.rpartition(' ')[2]) for line in text.splitlines() if '   000' in line][-2:]
    scores = [row['metrics/val/psnr'] for row in rows(folder) if 'metrics/val/psnr' in row]
    assert scores[-1] == pytest.approx(sum(means) / 2, abs=1e-4)


def test_a_generator_draws_its_grid_without_a_validation_set(guide_opt, run):
    from basicsr.utils.img_util import cv2

    folder = run(guide_opt('A generator without a validation set', val__save_img=True))
    files = sorted(path.name for path in (folder / 'visualization/grid').iterdir())
    assert files == ['grid_3.png', 'grid_6.png']
    images = [cv2.imread(str(folder / 'visualization/grid' / name)) for name in files]
    assert images[0].shape == (4 * 66 + 2, 4 * 66 + 2, 3)
    assert (images[0] != images[1]).any()
    assert 'nothing is validated' not in log_text(folder)


def test_a_validation_frequency_that_nothing_can_honour_is_told(train_opt, run):
    opt = train_opt()
    del opt['datasets']['val'], opt['val']['metrics']
    assert 'SRModel draws no samples: nothing is validated.' in log_text(run(opt))


def test_a_metric_over_a_set_is_the_same_from_any_number_of_processes(guide_opt, run, tmp_path):
    opt = guide_opt('A metric over a whole set', train__total_iter=2)
    whole = 'torchmetrics.image:PeakSignalNoiseRatio'
    opt['val']['metrics']['all'] = {'type': whole, 'data_range': 1.0}
    folder = run(opt)
    row = rows(folder)[-1]
    assert row['metrics/val/worst'] == pytest.approx(round(row['metrics/val/worst']), abs=1e-3)
    assert 1 <= row['metrics/val/worst'] <= 255
    # Of one mean squared error of the set, not the mean of those of images.
    assert 5 < row['metrics/val/all'] < 60
    assert row['metrics/val/all'] != pytest.approx(row['metrics/val/psnr'], abs=1e-3)
    best = checkpoint(folder, '2.state')['best_metric_results']
    assert best == {} or best['val']['worst']['better'] == 'lower'


@pytest.mark.slow
@pytest.mark.parametrize('heading', [heading for heading, _ in KINDS.values()])
def test_two_processes_of_a_model_of_the_guide_are_verified_to_resume_exactly(
    heading, guide_opt, tmp_path, monkeypatch, capsys
):
    opt = guide_opt(heading, **EVERYTHING)
    del opt['train']['channels_last'], opt['logger']
    opt['train']['swa'] = {**EVERYTHING['train__swa'], 'lr': None}
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'x.yml').write_text(json.dumps(opt))
    flags = ['--iters', '8', '--kills', '2', '--nproc', '2']
    args = cli.parse(['verify-resume', '-opt', 'x.yml', *flags])
    assert args.main(args) == 0, capsys.readouterr()
    assert 'identical' in capsys.readouterr().out


def test_the_examples_are_as_short_as_promised(page, repository):
    def lines(code, name):
        body = code[code.index(f'class {name}') :].splitlines()[1:]
        return len([line for line in body if line.strip() and '"""' not in line])

    text = (repository / 'docs/models.md').read_text()
    cycle, clip = (
        next(code for code in blocks(text, 'python') if f'class {name}' in code)
        for name in ('CycleModel', 'ClipModel')
    )
    assert lines(cycle, 'CycleModel') <= 20
    assert lines(clip, 'ClipModel') <= 40

"""Scores of checkpoints and of tests in one table."""

import csv
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from basicsr.archs import build_network
from basicsr.metrics import calculate_psnr
from basicsr.models.restore_files import restore_image
from basicsr.run.score_table import (
    Protocol,
    TestSet,
    load_networks,
    rows_of_results,
    score_checkpoints,
    table,
)
from basicsr.utils.checkpoint import DESCRIPTION, description, save_checkpoint
from basicsr.utils.matlab_functions import reduce_image

NET = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return build_network(NET).eval()


@pytest.fixture
def model(net, tmp_path):
    """A checkpoint with the weights twice."""
    states = {key: net.state_dict() for key in ('params', 'params_ema')}
    file = tmp_path / 'experiments/small/models/net_g_latest.pth'
    file.parent.mkdir(parents=True)
    save_checkpoint(states | {DESCRIPTION: description(NET, 2)}, file)
    return str(file)


@pytest.fixture
def photos(repository, tmp_path):
    """A folder with cuttings of two photographs; the sides of one are odd."""
    folder = tmp_path / 'gt'
    folder.mkdir()
    for index, size in enumerate([(64, 48), (51, 45)]):
        img = cv2.imread(str(repository / 'datasets/quickstart/val/gt/cat.png'))
        cv2.imwrite(str(folder / f'{index}.png'), img[: size[0], 20 * index :][:, : size[1]])
    return folder


def scored(model, sets, protocol):
    return score_checkpoints(load_networks([model]), sets, protocol)


def test_scores_are_those_of_the_restored_images(model, net, photos):
    rows, (test,) = score_checkpoints(
        load_networks([model]), [f'cats={photos}'], Protocol(2, 'RGB', 2)
    )
    expected = []
    for file in sorted(photos.iterdir()):
        img = cv2.imread(str(file))
        gt = img[: len(img) // 2 * 2, : img.shape[1] // 2 * 2]
        expected.append(calculate_psnr(restore_image(net, reduce_image(gt, 2)), gt, 2))
    bicubic, row = rows
    assert [scores['psnr'] for scores in row.images['cats'].values()] == expected
    assert row.mean('cats', 'psnr') == np.mean(expected)
    assert bicubic.mean('cats', 'psnr') > 25 > row.mean('cats', 'psnr'), 'an untrained network'
    assert row.weights.startswith('params_ema ') and row.name == 'small'
    assert test.source.startswith("cats: 2 images, LQ by MATLAB's bicubic reduction, ")


def test_given_lq_images_are_used_and_must_fit(model, photos, tmp_path):
    lq = tmp_path / 'lq'
    lq.mkdir()
    for file in photos.iterdir():
        img = cv2.imread(str(file))
        even = img[: len(img) // 2 * 2, : img.shape[1] // 2 * 2]
        cv2.imwrite(str(lq / f'{file.stem}x2.png'), reduce_image(even, 2))
    made, given = (
        scored(model, [text], Protocol(2))[0] for text in (f'a={photos}', f'a={photos}:{lq}')
    )
    assert made[1].images == given[1].images
    with pytest.raises(ValueError, match=r'that is not x2'):
        scored(model, [f'a={photos}:{photos}'], Protocol(2))


@pytest.mark.parametrize('text', ['photos', '=photos', 'a='])
def test_a_set_that_is_not_named_is_refused(text):
    with pytest.raises(ValueError, match='write NAME=GT or NAME=GT:LQ'):
        TestSet(text, 2)


def test_results_of_tests_stand_beside_checkpoints_if_their_protocol_is_the_same(
    model, photos, run, tmp_path
):
    paired = {'type': 'PairedImageDataset', 'dataroot_gt': 'gt', 'dataroot_lq': 'lq'}
    (tmp_path / 'lq').mkdir()
    for file in photos.iterdir():
        img = cv2.imread(str(file))
        even = img[: len(img) // 2 * 2, : img.shape[1] // 2 * 2]
        cv2.imwrite(str(file), even)
        cv2.imwrite(str(tmp_path / 'lq' / file.name), reduce_image(even, 2))
    metrics = {
        name: {'type': f'calculate_{name}', 'crop_border': 2, 'test_y_channel': True}
        for name in ('psnr', 'ssim')
    }
    opt = {'name': 'tested', 'model_type': 'SRModel', 'scale': 2, 'num_gpu': 0, 'network_g': NET}
    opt |= {'datasets': {'test': {'name': 'cats', **paired}}, 'val': {'metrics': metrics}}
    opt |= {'path': {'pretrain_network_g': model, 'param_key_g': 'params_ema'}}
    file = run(opt, pipeline='test') / 'results.json'
    protocol = Protocol(2, 'Y', 2)
    rows, tests = scored(model, [f'cats={photos}'], protocol)
    others, same, digests = rows_of_results([str(file)], protocol, {'cats': tests[0].digest})
    assert same == protocol and digests == {'cats': tests[0].digest}, 'LQ was made, or read'
    assert others[0].weights == rows[1].weights
    assert others[0].mean('cats', 'psnr') == pytest.approx(rows[1].mean('cats', 'psnr'), abs=1e-9)
    with pytest.raises(ValueError, match='They differ in border'):
        rows_of_results([str(file)], protocol._replace(border=0), {})
    for folder in (photos, tmp_path / 'lq'):  # one value of GT, then one of LQ
        changed = folder / '0.png'
        img = cv2.imread(str(changed))
        img[0, 0, 0] ^= 1
        cv2.imwrite(str(changed), img)
        _, (test,) = score_checkpoints(
            load_networks([model]), [f'cats={photos}:{tmp_path}/lq'], protocol
        )
        with pytest.raises(ValueError, match='GT or LQ images of cats are not those of the other'):
            rows_of_results([str(file)], protocol, {'cats': test.digest})
        img[0, 0, 0] ^= 1
        cv2.imwrite(str(changed), img)
    content = json.loads(file.read_text())
    del content['protocol']
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match='must be written by this version'):
        rows_of_results([str(file)], protocol, {})


def test_sets_of_one_name_and_sets_without_lq_at_scale_1_are_refused(model, photos):
    with pytest.raises(ValueError, match='Two sets have one name'):
        scored(model, [f'a={photos}', f'a={photos}'], Protocol(2))
    with pytest.raises(ValueError, match='name LQ images too: NAME=GT:LQ'):
        TestSet(f'a={photos}', 1)


@pytest.mark.parametrize('text', ['no JSON', '[]', '{"name": "run"}'])
def test_a_file_that_is_no_result_of_a_test_is_refused(tmp_path, text):
    (tmp_path / 'results.json').write_text(text)
    with pytest.raises(ValueError, match=r'results\.json is no results\.json of a test'):
        rows_of_results([str(tmp_path / 'results.json')], None, {})


def test_a_table_marks_the_best_and_names_its_protocol(model, photos):
    rows, tests = scored(model, [f'cats={photos}'], Protocol(2, 'Y', 2))
    notes = ['x2', tests[0].source]
    markdown = table(rows, notes)
    best = f'{rows[0].mean("cats", "psnr"):.2f}'
    assert f'| bicubic | - | **{best}** |' in markdown and '* x2\n' in markdown
    latex = table(rows, notes, 'latex')
    assert rf'bicubic & - & \textbf{{{best}}} &' in latex and r'params\_ema' in latex
    lines = [x for x in table(rows, notes, 'csv').splitlines() if not x.startswith('#')]
    assert next(csv.DictReader(lines))['cats PSNR'] == best


def test_the_command_writes_a_new_file_alone(model, photos, tmp_path, monkeypatch, capsys):
    from basicsr.cli import parse

    output = tmp_path / 'table.md'
    flags = ['table', '-m', model, '--sets', f'cats={photos}', '-o', str(output)]
    args = parse(flags)
    args.main(args)
    assert '| small | params_ema ' in output.read_text()
    for wrong in (flags, ['table'], ['table', '-m', model]):
        with pytest.raises(SystemExit):
            args = parse(wrong)
            args.main(args)
    assert 'table.md exists: name another file' in capsys.readouterr().err
    assert Path(output).stat().st_size > 100

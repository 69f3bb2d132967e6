"""The test pipeline: names, scores, and what it refuses."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import cv2
import pytest
import torch
from runs import TORCHRUN, log_text

from basicsr.archs import build_network
from basicsr.utils.misc import claim_folder
from basicsr.utils.registry import ARCH_REGISTRY

NET = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}


@pytest.fixture
def test_opt(image_pairs, tmp_path):
    """A minimal option dict of a test run with two sets."""
    torch.save({'params': build_network(NET).state_dict()}, tmp_path / 'net.pth')
    sets = {}
    for key, name, size in (('test_2', 'small', (12, 16)), ('test_1', 'large', (24, 28))):
        gt, lq = image_pairs(name, 2, size)
        options = {'name': name, 'dataroot_gt': gt, 'dataroot_lq': lq}
        sets[key] = {'type': 'PairedImageDataset', **options}
    return {
        'name': 'check',
        'model_type': 'SRModel',
        'scale': 2,
        'num_gpu': 0,
        'datasets': sets,
        'network_g': NET,
        'path': {'pretrain_network_g': 'net.pth'},
        'val': {
            'save_img': True,
            'metrics': {'psnr': {'type': 'calculate_psnr', 'crop_border': 2}},
        },
    }


def test_outputs_have_the_names_of_the_reference(run, test_opt):
    folder = run(test_opt, pipeline='test')
    images = {str(p.relative_to(folder / 'visualization')) for p in folder.rglob('*.png')}
    assert images == {f'{s}/{i:04d}_check.png' for s in ('small', 'large') for i in range(2)}
    test_opt['val']['suffix'] = 'x2'
    folder = run(test_opt, pipeline='test')
    assert (folder / 'visualization/small/0001_x2.png').is_file()
    assert folder.parent.glob('check_archived_*'), 'the first results are kept'


def test_sets_are_tested_in_the_order_of_their_keys_and_tabled(run, test_opt):
    folder = run(test_opt, pipeline='test')
    text = log_text(folder)
    assert text.index('Testing large...') < text.index('Testing small...')
    results = json.loads((folder / 'results.json').read_text())
    psnr = results['sets']['small']['metrics']['psnr']
    images = [scores['psnr'] for scores in results['sets']['small']['images'].values()]
    assert psnr == pytest.approx(sum(images) / 2, rel=1e-12)
    assert f'small       2{psnr:12.4f}' in text
    assert results['metric_options'] == test_opt['val']['metrics']
    assert results['weights'] == 'net.pth'


def test_images_alone_are_enough(run, test_opt, image_pairs):
    """No GT, no metrics, no val section."""
    lq = image_pairs('alone', 1, (12, 16))[1]
    test_opt['datasets'] = {'test': {'type': 'SingleImageDataset', 'dataroot_lq': lq}}
    del test_opt['val']
    folder = run(test_opt, '--force_yml', 'val:save_img=true', pipeline='test')
    saved = cv2.imread(str(folder / 'visualization/test/0000_check.png'))
    assert saved.shape == (12, 16, 3)
    assert json.loads((folder / 'results.json').read_text())['sets']['test']['metrics'] == {}


def test_untrained_networks_are_refused_unless_meant(run, test_opt):
    test_opt['path'] = {'pretrain_network_g': None}
    with pytest.raises(ValueError, match=r'path\.random_weights'):
        run(test_opt, pipeline='test')
    test_opt['path']['random_weights'] = True
    run(test_opt, pipeline='test')


def test_the_log_names_the_weights_and_their_hash(run, test_opt, tmp_path):
    import hashlib

    digest = hashlib.sha256((tmp_path / 'net.pth').read_bytes()).hexdigest()[:8]
    text = log_text(run(test_opt, pipeline='test'))
    assert 'Loading SRVGGNetCompact model from net.pth' in text
    assert f'sha256 {digest}' in text


def test_gt_that_is_a_little_larger_is_cut_and_named(run, test_opt, tmp_path, image_pairs):
    gt, lq = image_pairs('odd', 1, (100, 64), scale=4)
    img = cv2.copyMakeBorder(cv2.imread(f'{gt}/0000.png'), 0, 1, 0, 3, cv2.BORDER_REPLICATE)
    cv2.imwrite(f'{gt}/0000.png', img)
    net = dict(NET, upscale=4)
    torch.save({'params': build_network(net).state_dict()}, tmp_path / 'net.pth')
    paired = {'type': 'PairedImageDataset', 'dataroot_gt': gt, 'dataroot_lq': lq}
    test_opt |= {'scale': 4, 'network_g': net, 'datasets': {'test': paired}}
    text = log_text(run(test_opt, pipeline='test'))
    assert 'GT images are cut to 4 x LQ' in text
    assert '(101x67 to 100x64)' in text
    cv2.imwrite(f'{gt}/0000.png', cv2.copyMakeBorder(img, 0, 4, 0, 0, cv2.BORDER_REPLICATE))
    with pytest.raises(ValueError, match=r'0000\.png \(105x67.*is not 4 times LQ .*\(25x16\)'):
        run(test_opt, pipeline='test')


class Broken(torch.nn.Module):
    """A network that gives numbers that are not finite for dark images."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        result = self.weight * x.repeat_interleave(2, -1).repeat_interleave(2, -2)
        return result / (x.mean() > 0.1)


@pytest.fixture
def broken(test_opt, image_pairs, monkeypatch):
    """A test of three images, the middle one of which a network cannot restore, or nobody read."""
    monkeypatch.setitem(ARCH_REGISTRY._obj_map, 'Broken', Broken)
    gt, lq = (Path(folder) for folder in image_pairs('broken', 3, (24, 28)))

    def make(kind):
        for folder in (gt, lq):
            cv2.imwrite(str(folder / '0001.png'), 0 * cv2.imread(str(folder / '0001.png')))
        if kind == 'unreadable':
            (lq / '0001.png').write_bytes(b'x')
        dataset = {'type': 'PairedImageDataset', 'dataroot_gt': str(gt), 'dataroot_lq': str(lq)}
        test_opt['datasets'] = {'test': dataset}
        test_opt['network_g'], test_opt['path'] = {'type': 'Broken'}, {'random_weights': True}
        return test_opt

    return make


def test_an_image_whose_result_has_too_long_a_name_has_none(run, broken, tmp_path):
    opt = broken('dark')
    opt['network_g'], opt['val']['suffix'] = NET, 'a' * 100
    dataset = opt['datasets']['test']
    for folder in (dataset['dataroot_gt'], dataset['dataroot_lq']):
        Path(folder, '0001.png').rename(Path(folder, 'x' * 200 + '.png'))
    with pytest.raises(
        ValueError, match=r'1 images have no result: test/x+ \(.*too long a file name'
    ):
        run(opt, pipeline='test')
    result = json.loads((tmp_path / 'results/check/results.json').read_text())['sets']['test']
    assert list(result['images']) == ['0000', '0002']


@pytest.mark.parametrize(
    ('kind', 'reason'), [('dark', 'gives non-finite values'), ('unreadable', 'cannot read')]
)
def test_an_image_without_a_result_is_named_and_the_others_are_scored(
    run, broken, tmp_path, kind, reason
):
    with pytest.raises(ValueError, match=rf'1 images have no result: test/0001 \(.*{reason}'):
        run(broken(kind), pipeline='test')
    folder = tmp_path / 'results/check'
    result = json.loads((folder / 'results.json').read_text())['sets']['test']
    assert list(result['images']) == ['0000', '0002']
    assert list(result['failed']) == ['0001'] and reason in result['failed']['0001']
    scores = [scores['psnr'] for scores in result['images'].values()]
    assert result['metrics']['psnr'] == pytest.approx(sum(scores) / 2)
    assert sorted(file.name[:4] for file in folder.rglob('*.png')) == ['0000', '0002']


def test_a_test_that_makes_nothing_says_so(run, test_opt):
    test_opt['val'] = {'save_img': False}
    assert 'val.metrics is empty: this test produces nothing' in log_text(
        run(test_opt, pipeline='test')
    )


@pytest.mark.parametrize('key', [None, 'params_ema'])
def test_weights_that_were_averaged_are_told_of_where_others_are_tested(
    run, test_opt, tmp_path, capsys, key
):
    state = build_network(NET).state_dict()
    torch.save({'params': state, 'params_ema': state}, tmp_path / 'net.pth')
    if key:
        test_opt['path']['param_key_g'] = key
    run(test_opt, pipeline='test')
    text = capsys.readouterr().err
    assert f'with param key: [{key or "params"}] (also there: ' in text
    assert ('set path.param_key_g: params_ema' in text) is (key is None)


def test_two_tests_of_one_name_do_not_mix_their_results(run, test_opt, tmp_path):
    folder = tmp_path / 'results' / test_opt['name']
    with ProcessPoolExecutor(1, get_context('fork')) as other:
        other.submit(claim_folder, folder).result()
        with pytest.raises(BlockingIOError, match=f'another process is writing to {folder}'):
            run(test_opt, pipeline='test')
        assert not folder.exists()
    assert (run(test_opt, pipeline='test') / 'results.json').exists()


def test_images_of_one_name_all_count(run, test_opt, image_pairs):
    """Such as those of two folders, which a set mixes."""
    parts = [
        {'dataroot_gt': gt, 'dataroot_lq': lq, 'type': 'PairedImageDataset'}
        for gt, lq in (image_pairs('a', 2, (24, 28)), image_pairs('b', 2, (16, 20)))
    ]
    scores = {}
    for name, used in (('a', parts[:1]), ('b', parts[1:]), ('both', parts)):
        test_opt['datasets'] = {'test': {'type': 'ConcatDataset', 'parts': used}}
        sets = json.loads((run(test_opt, pipeline='test') / 'results.json').read_text())['sets']
        scores[name] = sets['test']['metrics']['psnr']
    assert scores['both'] == pytest.approx((scores['a'] + scores['b']) / 2, rel=1e-12)


@pytest.mark.slow
def test_two_processes_tell_what_one_does(
    run, run_program, write, test_opt, tmp_path, repository, image_pairs
):
    """Each has one of the two bad images of a set; the second has one that is too small."""
    gt, lq = image_pairs('small', 4, (12, 16))
    test_opt['val']['metrics'] = {'ssim': {'type': 'calculate_ssim', 'crop_border': 0}}
    for name in ('0001', '0002'):
        Path(f'{gt}/{name}.png').write_bytes(b'x')
    for folder, size in ((gt, 8), (lq, 4)):
        path = f'{folder}/0003.png'
        cv2.imwrite(path, cv2.imread(path)[:size, :size])
    with pytest.raises(ValueError, match='2 images have no result'):
        run(test_opt, pipeline='test')
    one = (tmp_path / 'results/check/results.json').read_text()
    test_opt['path'] = {'results_root': 'of_two', 'pretrain_network_g': 'net.pth'}
    program = repository / 'basicsr/test.py'
    result = run_program(*TORCHRUN, program, '-opt', write(test_opt), '--launcher', 'pytorch')
    assert result.returncode == 1
    assert '2 images have no result: small/0001 (cannot read' in result.stderr
    assert 'Metric ssim of image 0003 is NaN: SSIM needs at least' in result.stderr
    assert (tmp_path / 'of_two/check/results.json').read_text() == one

"""Training by regression, restoring and scoring images."""

import functools
import itertools
import json
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from golden import recipe
from runs import checkpoint, log_text, rows

import basicsr.train  # noqa: F401 - takes names of the metrics, which tests replace
from basicsr.data import build_dataloader
from basicsr.metrics.psnr_ssim import calculate_psnr
from basicsr.models import build_model
from basicsr.models.sr_model import SRModel
from basicsr.models.validation import Validation
from basicsr.utils.errors import image_error
from basicsr.utils.img_util import img2tensor, tensor2img


@pytest.fixture
def model(train_opt, tmp_path, monkeypatch):
    """A small SRModel without a run around it."""

    def make(**overrides):
        opt = train_opt(**overrides)
        opt.update(dist=False, is_train=True)
        opt['path'].setdefault('visualization', str(tmp_path / 'vis'))
        return build_model(opt)

    return make


def batch():
    lq = torch.rand(2, 3, 8, 8)
    return {'lq': lq, 'gt': torch.rand(2, 3, 16, 16), 'lq_path': ['a.png', 'b.png']}


def test_one_step_equals_a_plain_loop(model):
    sr = model(train__ema_decay=0)
    net, data = sr.net_g, batch()
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    sr.feed_data(data)
    sr.optimize_parameters(1)
    after, loss = {k: v.clone() for k, v in net.state_dict().items()}, sr.get_current_log()

    net.load_state_dict(weights)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    adam.zero_grad()
    expected = (net(data['lq']) - data['gt']).abs().mean()
    expected.backward()
    adam.step()
    assert loss == {'l_pix': pytest.approx(expected.item(), abs=1e-7)}
    for key, value in net.state_dict().items():
        assert torch.equal(value, after[key])


def test_a_run_without_losses_is_refused(model):
    with pytest.raises(ValueError, match=r'train\.pixel_opt'):
        model(train__pixel_opt=None)


def test_frozen_parameters_are_named_and_not_trained(model, monkeypatch, caplog):
    from basicsr.archs.srvgg_arch import SRVGGNetCompact

    original = SRVGGNetCompact.__init__

    @functools.wraps(original)
    def freeze(self, **kwargs):
        original(self, **kwargs)
        self.body[0].requires_grad_(False)

    monkeypatch.setattr(SRVGGNetCompact, '__init__', freeze)
    sr = model()
    assert 'body.0.weight, body.0.bias will not be optimized' in caplog.text
    frozen = sr.net_g.body[0].weight.clone()
    sr.feed_data(batch())
    sr.optimize_parameters(1)
    assert torch.equal(frozen, sr.net_g.body[0].weight)


def test_the_averaged_network_is_the_one_that_restores(model):
    """Which weights a score belongs to."""
    sr = model()
    with torch.no_grad():
        for parameter in sr.net_g_ema.parameters():
            parameter.zero_()
    sr.feed_data(batch())
    sr.test()
    nearest = torch.nn.functional.interpolate(sr.lq, scale_factor=2, mode='nearest')
    assert torch.equal(sr.output, nearest)


def test_self_ensemble_is_the_mean_over_eight_orientations(model):
    """With or without an averaged network."""
    for decay in (0, 0.9):
        sr = model(train__ema_decay=decay)
        sr.feed_data({'lq': torch.rand(1, 3, 6, 9)})
        lq = sr.lq.clone()
        sr.test_selfensemble()
        result, outputs = sr.output, []
        for transpose in (False, True):
            for dims in ([], [-1], [-2], [-1, -2]):
                turned = lq.flip(dims).transpose(-1, -2) if transpose else lq.flip(dims)
                out = sr.evaluated_network('g')(turned).detach()
                out = out.transpose(-1, -2) if transpose else out
                outputs.append(out.flip(dims))
        assert torch.allclose(result, torch.stack(outputs).mean(0), atol=1e-6)
        assert torch.equal(sr.lq, lq)


@pytest.mark.parametrize('self_ensemble', [False, True])
def test_self_ensemble_is_an_option(run, train_opt, model, self_ensemble):
    """The score is that of the mean over eight orientations, or of the plain result."""
    folder = run(train_opt(train__total_iter=3, val__self_ensemble=self_ensemble))
    sr = model()
    sr.net_g_ema.load_state_dict(checkpoint(folder, 'net_g_latest.pth')['params_ema'])
    dataset = train_opt()['datasets']['val']
    scores = []
    for lq, gt in zip(
        *(sorted(Path(dataset[f'dataroot_{k}']).iterdir()) for k in ('lq', 'gt')), strict=True
    ):
        sr.lq = img2tensor(cv2.imread(str(lq)).astype(np.float32) / 255)[None]
        sr.test_selfensemble() if self_ensemble else sr.test()
        scores.append(calculate_psnr(tensor2img(sr.output), cv2.imread(str(gt)), crop_border=2))
    assert len(scores) == 3
    assert rows(folder)[-1]['metrics/val/psnr'] == pytest.approx(np.mean(scores), abs=1e-4)


def test_no_ground_truth_of_another_image_is_scored(model):
    sr = model()
    sr.feed_data(batch())
    sr.feed_data({'lq': torch.rand(1, 3, 8, 8)})
    sr.test()
    visuals = sr.get_current_visuals()
    assert set(visuals) == {'lq', 'result'}
    assert visuals['lq'].shape == (1, 3, 8, 8)


def single_image_opt(opt, folder):
    """The option dict with its validation set replaced by LQ images alone."""
    opt['datasets']['val'] = {'type': 'SingleImageDataset', 'dataroot_lq': folder}
    return opt


def test_a_validation_set_without_gt_skips_what_compares_with_it(run, train_opt, image_pairs):
    opt = single_image_opt(train_opt(), image_pairs('lonely', 2, (208, 400))[1])
    opt['val']['metrics']['niqe'] = {'type': 'calculate_niqe', 'crop_border': 0, 'better': 'lower'}
    folder = run(opt)
    last = rows(folder)[-1]
    assert set(last) == {'iter', 'metrics/val/niqe'}
    assert last['metrics/val/niqe'] > 0
    assert log_text(folder).count('No GT: psnr, which compares with it, is skipped.') == 2


def test_best_scores_are_kept_by_direction_and_over_a_resume(run, train_opt, monkeypatch):
    values = iter([5.0, 7.0, 6.0, 7.0, 1.0, 1.0])
    monkeypatch.setattr('basicsr.metrics.metric.defined_score', lambda *_: next(values))
    monkeypatch.setattr('basicsr.models.validation.Validation._baseline', lambda *_: {})
    opt = train_opt(val__val_freq=1, train__total_iter=2, logger__save_checkpoint_freq=1)
    opt['datasets']['val']['meta_info_file'] = 'one.txt'
    error = {'type': 'calculate_psnr', 'crop_border': 0, 'better': 'lower'}
    opt['val']['metrics'] = {'error': error}
    import pathlib

    pathlib.Path(opt['datasets']['val']['dataroot_gt']).parents[1].joinpath('one.txt').write_text(
        '0000.png (24,28,3)\n'
    )
    folder = run(opt)  # 5 at iteration 1, 7 at iteration 2
    opt['train']['total_iter'] = 4
    run(opt, '--auto_resume')  # again 2: 6; then 3: 7, 4: 1
    state = checkpoint(folder, '4.state')
    assert state['best_metric_results'] == {
        'val': {'error': {'better': 'lower', 'val': 5.0, 'iter': 1}}
    }
    assert 'Best: 1.0000 @ 4 iter' in log_text(folder)


def test_equal_images_are_listed_and_left_out_of_the_mean(run, train_opt, image_pairs, tmp_path):
    gt, _ = image_pairs('same', 2, (24, 28))
    white = np.full((24, 28, 3), 255, np.uint8)
    cv2.imwrite(f'{gt}/0000.png', white)
    cv2.imwrite(gt.replace('gt', 'lq') + '/0000.png', white[:12, :14])
    opt = train_opt(name='equal', train__total_iter=2)
    opt['datasets']['val'].update(dataroot_gt=gt, dataroot_lq=gt.replace('gt', 'lq'))
    folder = run(opt)
    opt['datasets'] = {'test': opt['datasets']['val']}
    opt['network_g'].update(num_feat=1, num_conv=0)
    opt['path']['random_weights'] = True
    zero = lambda self: self.lq.repeat_interleave(2, -1).repeat_interleave(2, -2)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SRModel, 'test', lambda self: setattr(self, 'output', zero(self)))
        results = run(opt, pipeline='test')
    scores = json.loads((results / 'results.json').read_text())['sets']['test']
    assert scores['images']['0000']['psnr'] is None  # infinite
    assert scores['metrics']['psnr'] == scores['images']['0001']['psnr'] < 60
    assert 'psnr: 1 of 2 images equal the GT' in log_text(results)
    assert folder.exists()


def test_an_empty_validation_set_is_no_crash(model, caplog):
    sr = model()

    class Empty(torch.utils.data.Dataset):
        opt = {'name': 'none'}  # noqa: RUF012

        def __len__(self):
            return 0

    sr.validation(torch.utils.data.DataLoader(Empty()), 1, None)
    assert sr.metric_results == {}
    assert 'the set is empty' in caplog.text


def test_a_subclass_may_replace_the_validation_loop(model):
    class Own(SRModel):
        def nondist_validation(self, *args):
            self.called = args

    sr = model()
    sr.__class__ = Own
    sr.opt['dist'] = True
    sr.validation('loader', 1, None, True)
    assert sr.called == ('loader', 1, None, True)


class Numbered(torch.utils.data.Dataset):
    """Images named 0000, 0001, …"""

    opt = {'name': 'numbered', 'dataroot_lq': '.'}  # noqa: RUF012 (as datasets have it)

    def __init__(self, count):
        self.count = count

    def __getitem__(self, index):
        return {'lq': torch.zeros(3, 8, 8), 'lq_path': f'{index:04d}.png'}

    def __len__(self):
        return self.count


def test_images_are_scored_in_threads_and_keep_their_order(model, monkeypatch):
    """Whichever is ready first, and with few of them in memory."""
    second_scored, sixth_restored, crowded = threading.Event(), threading.Event(), []
    restore, restored = SRModel.test, itertools.count(1)

    def count(self):
        if next(restored) == 6:
            sixth_restored.set()
        restore(self)

    def score(self, images, name):
        if name == '0000':
            assert second_scored.wait(300), 'the second image waits for the first'
            crowded.append(sixth_restored.wait(0.2))
        if name == '0001':
            second_scored.set()
        return {'psnr': float(name)}

    monkeypatch.setattr(SRModel, 'test', count)
    monkeypatch.setattr(SRModel, 'score_images', score)
    monkeypatch.setattr('os.cpu_count', lambda: 2)
    sr = model(val__log_images=2)
    sr.validation(torch.utils.data.DataLoader(Numbered(12)), 1, None)
    assert list(sr.image_results) == [f'{i:04d}' for i in range(12)]
    assert sr.image_results['0007'] == {'psnr': 7.0}
    assert [panel['name'] for panel in sr.panels] == ['0000', '0001']
    assert sr.metric_results['psnr'] == 5.5
    assert crowded == [False]


def test_a_metric_that_fails_in_a_thread_ends_the_run_with_the_image_named(model, monkeypatch):
    def fail(self, images, name):
        if name == '0002':
            raise ValueError(f'metric x of image {name}: broken')
        return {}

    monkeypatch.setattr(SRModel, 'score_images', fail)
    with pytest.raises(ValueError, match='image 0002: broken'):
        model().validation(torch.utils.data.DataLoader(Numbered(6)), 1, None)


class OwnLoop(SRModel):
    """Restores and scores as models of upstream do."""

    def nondist_validation(self, dataloader, current_iter, tb_logger, save_img):
        self.metric_results = {'psnr': 0.0}
        for data in dataloader:
            self.feed_data(data)
            self.test()
            tensor2img([self.get_current_visuals()['result']])
            self.metric_results['psnr'] += 1.0


@pytest.fixture
def own_loop(model):
    sr = model()
    sr.__class__ = OwnLoop
    return sr


@pytest.mark.parametrize('dist', [False, True])
def test_a_loop_of_a_subclass_is_left_at_a_bad_result_without_scores(
    own_loop, monkeypatch, caplog, dist
):
    restore = SRModel.test

    def spoil(self):
        restore(self)
        self.output[..., 0, 0] = torch.nan

    own_loop.opt['dist'] = dist
    with monkeypatch.context() as patch:
        patch.setattr(SRModel, 'test', spoil)
        own_loop.validation(torch.utils.data.DataLoader(Numbered(2)), 1, None)
    assert not hasattr(own_loop, 'metric_results')
    assert own_loop.failed_images == {'an image': '3 of 768 values are not finite.'}
    assert 'The validation ends at an image, without scores' in caplog.text
    own_loop.validation(torch.utils.data.DataLoader(Numbered(2)), 1, None)
    assert (own_loop.metric_results, own_loop.failed_images) == ({'psnr': 2.0}, {})


def test_a_loop_of_a_subclass_is_left_at_an_image_that_cannot_be_read(own_loop):
    class Bad(Numbered):
        def __getitem__(self, index):
            if index == 1:
                raise image_error('x/0001.png', 'cannot read x/0001.png')
            return super().__getitem__(index)

    loader = build_dataloader(Bad(3), {'phase': 'val'})
    own_loop.validation(loader, 1, None)
    assert own_loop.failed_images == {'0001': 'cannot read x/0001.png'}
    assert not hasattr(own_loop, 'metric_results')


def test_errors_that_no_image_is_the_cause_of_end_a_loop_of_a_subclass(own_loop, monkeypatch):
    def fail(self):
        raise ValueError('too many values to unpack')

    monkeypatch.setattr(SRModel, 'test', fail)
    with pytest.raises(ValueError, match='too many values'):
        own_loop.validation(torch.utils.data.DataLoader(Numbered(1)), 1, None)


def test_any_error_of_a_metric_names_it_and_the_image(model, monkeypatch):
    def fail(data, options):
        raise RuntimeError('out of memory')

    monkeypatch.setattr('basicsr.metrics.metric.defined_score', fail)
    metrics = {'niqe': {'type': 'calculate_niqe', 'crop_border': 0}}
    with pytest.raises(RuntimeError, match='out of memory') as caught:
        model(val__metrics=metrics).validation(torch.utils.data.DataLoader(Numbered(1)), 1, None)
    assert caught.value.__notes__ == ['while computing the metric niqe of image 0000']


def test_a_metric_that_is_nan_on_another_rank_is_told_once(model, monkeypatch, caplog):
    told = ('ssim', 'Metric ssim of image 0007 is NaN: SSIM needs at least 11 x 11 pixels')
    monkeypatch.setattr('basicsr.models.validation.gather_lists', lambda items: [*items, told])
    sr = model(val__metrics={})
    for _ in range(2):
        Validation(sr, 'val', 1, False)._warn_of_undefined()
    assert [record.message for record in caplog.records if 'is NaN' in record.message] == [told[1]]


def test_several_loader_processes_give_the_same_scores(run, train_opt):
    results = []
    for workers in (0, 2):
        folder = run(train_opt(name=f'w{workers}', datasets__val__num_worker_per_gpu=workers))
        results.append([row for row in rows(folder) if 'metrics/val/psnr' in row])
    assert results[0] == results[1] != []


def test_scores_are_those_of_the_saved_files(run, train_opt, tmp_path):
    """Training's validation, the test pipeline and the files agree."""
    metrics = {
        'rgb': {'type': 'calculate_psnr', 'crop_border': 0},
        'y': {'type': 'calculate_psnr', 'crop_border': 4, 'test_y_channel': True},
        'ssim': {'type': 'calculate_ssim', 'crop_border': 4, 'test_y_channel': True},
    }
    opt = train_opt(val__metrics=metrics, val__save_img=True)
    folder = run(opt)
    trained = rows(folder)[-1]
    test_opt = {key: opt[key] for key in ('name', 'model_type', 'scale', 'num_gpu', 'network_g')}
    test_opt |= {
        'datasets': {'val': opt['datasets']['val']},
        'path': {
            'pretrain_network_g': str(folder / 'models/net_g_latest.pth'),
            'param_key_g': 'params_ema',
        },
        'val': {'metrics': metrics, 'save_img': True},
    }
    results = run(test_opt, pipeline='test')
    tested = json.loads((results / 'results.json').read_text())['sets']['val']

    from basicsr.metrics import calculate_metric

    for name, options in metrics.items():
        per_image = []
        for index in range(3):
            saved = cv2.imread(str(results / f'visualization/val/{index:04d}_tiny.png'))
            gt = cv2.imread(f'{opt["datasets"]["val"]["dataroot_gt"]}/{index:04d}.png')
            per_image.append(calculate_metric({'img': saved, 'img2': gt}, options))
            assert per_image[-1] == pytest.approx(tested['images'][f'{index:04d}'][name], abs=1e-6)
        assert tested['metrics'][name] == pytest.approx(np.mean(per_image), abs=1e-6)
        assert tested['metrics'][name] == pytest.approx(trained[f'metrics/val/{name}'], abs=1e-6)


def test_one_channel_is_trained_scored_and_saved_as_one_channel(run, train_opt, image_pairs):
    gt, lq = image_pairs('gray', 4, (24, 28), channels=1)
    opt = train_opt(name='gray', train__total_iter=5, val__save_img=True)
    for dataset in opt['datasets'].values():
        dataset.update(dataroot_gt=gt, dataroot_lq=lq, color='gray')
    opt['network_g'].update(num_in_ch=1, num_out_ch=1)
    opt['val']['metrics']['ssim'] = {'type': 'calculate_ssim', 'crop_border': 2}
    folder = run(opt)
    assert 0 < rows(folder)[-1]['metrics/val/ssim'] <= 1
    saved = cv2.imread(str(folder / 'visualization/0000/0000_5.png'), cv2.IMREAD_UNCHANGED)
    assert saved.shape == (24, 28)


def test_images_of_several_folders_do_not_overwrite_each_other(
    run, train_opt, image_pairs, tmp_path
):
    opt = train_opt(train__total_iter=1, val__save_img=True)
    roots = [image_pairs('a', 1, (24, 28)), image_pairs('b', 1, (16, 20))]
    opt['datasets']['val'].update(
        dataroot_gt=[r[0] for r in roots], dataroot_lq=[r[1] for r in roots]
    )
    for name, (gt, lq) in zip('ab', roots, strict=True):  # tell the two roots' names apart
        for folder in (gt, lq):
            (tmp_path / name / folder.rpartition('/')[2]).rename(f'{folder}_{name}')
    opt['datasets']['val'].update(
        dataroot_gt=[f'{r[0]}_{n}' for n, r in zip('ab', roots, strict=True)],
        dataroot_lq=[f'{r[1]}_{n}' for n, r in zip('ab', roots, strict=True)],
    )
    folder = run(opt)
    shapes = {
        path.parent.parent.name: cv2.imread(str(path)).shape[:2]
        for path in (folder / 'visualization').rglob('*_1.png')
    }
    assert shapes == {'lq_a': (24, 28), 'lq_b': (16, 20)}


def test_swinir_is_padded_to_its_window_and_cut(model):
    """Also tiny images, which cannot be reflected so far."""
    options = {'type': 'SwinIR', 'img_size': 8, 'embed_dim': 8, 'depths': [1], 'num_heads': [2]}
    options |= {'window_size': 8, 'mlp_ratio': 2, 'upscale': 2, 'upsampler': 'pixelshuffledirect'}
    sr = model(model_type='SwinIRModel', network_g=options)
    for height, width in ((8, 16), (5, 11), (1, 3), (17, 9)):
        sr.feed_data({'lq': torch.rand(1, 3, height, width)})
        sr.test()
        assert sr.output.shape == (1, 3, 2 * height, 2 * width)
        assert sr.lq.shape == (1, 3, height, width)


def test_pixels_are_what_the_network_makes(run, train_opt):
    """Nothing between network and file changes a value."""
    folder = run(train_opt(train__total_iter=1, train__ema_decay=0, val__save_img=True))
    from basicsr.archs import build_network

    net = build_network(train_opt()['network_g'])
    net.load_state_dict(checkpoint(folder, 'net_g_1.pth')['params'])
    lq = recipe.box_down(recipe.det_image('valdata/1', 24, 28), 2)[..., ::-1].copy()
    with torch.no_grad():
        out = net(torch.from_numpy(lq).permute(2, 0, 1)[None].float() / 255)
    expected = (out[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()[..., ::-1]
    saved = cv2.imread(str(folder / 'visualization/0001/0001_1.png'))
    assert np.array_equal(saved, expected)


def test_what_is_not_loaded_begins_alike_in_both_networks(model, tmp_path, train_opt):
    """Of weights for x2, a x4 network and its average take what fits and share the rest."""
    from basicsr.archs import build_network

    small = build_network(train_opt()['network_g'])
    torch.save({'params': small.state_dict()}, tmp_path / 'x2.pth')
    sr = model(
        path__pretrain_network_g=str(tmp_path / 'x2.pth'),
        path__strict_load_g=False,
        network_g__upscale=4,
        scale=4,
    )
    for own, other in zip(sr.net_g.parameters(), sr.net_g_ema.parameters(), strict=True):
        assert torch.equal(own, other)
    assert torch.equal(sr.net_g.body[0].weight, small.body[0].weight)


def test_an_optimizer_is_asked_for(model):
    with pytest.raises(ValueError, match=r'train\.optim_g: needs a type'):
        model(train__optim_g=None)

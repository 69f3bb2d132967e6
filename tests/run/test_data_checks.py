"""Sizes that do not fit and images that cannot be read are found before a folder is touched."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from runs import checkpoint, differences, log_text, rows

from basicsr.archs.srvgg_arch import SRVGGNetCompact
from basicsr.models.sr_model import SRModel
from basicsr.run.data_checks import look_through, try_metrics


@pytest.fixture
def refused(run, train_opt, tmp_path):
    """Run options whose sizes do not fit, where an earlier run of the name stands."""

    def call(message, **overrides):
        earlier = tmp_path / 'experiments/tiny'
        earlier.mkdir(parents=True, exist_ok=True)
        with pytest.raises(ValueError, match=message):
            run(train_opt(**overrides))
        assert [folder.name for folder in (tmp_path / 'experiments').glob('[!.]*')] == ['tiny']
        assert list(earlier.iterdir()) == []

    return call


def test_a_network_for_another_scale_is_named_with_both_sizes_and_options(refused):
    refused(
        r'network_g \(SRVGGNetCompact\) makes images of 32x32 with 3 channels from the first batch '
        r'\(LQ 8x8, 3 channels\), and the GT has 16x16 with 3 channels: network_g.upscale is 4, and'
        ' scale is 2; make the two equal',
        network_g__upscale=4,
    )


def test_a_network_for_other_channels_is_named(refused):
    refused(
        r'network_g \(SRVGGNetCompact\) cannot restore the first batch \(LQ 8x8, 3 channels\): .*'
        '1 channels',
        network_g__num_in_ch=1,
    )


def test_a_loss_that_the_crops_are_too_small_for_is_named(refused):
    refused(
        r'the losses cannot be computed of the first batch \(LQ 4x4, 3 channels\) and GT 8x8',
        train__perceptual_opt={
            'type': 'PerceptualLoss',
            'layer_weights': {'conv5_4': 1},
            'weights': 'random',
        },
        datasets__train__gt_size=8,
    )


def test_a_late_stage_that_does_not_fit_is_found_at_the_start(refused, monkeypatch):
    forward = SRVGGNetCompact.forward

    def picky(self, x):
        if x.shape[-1] > 8:
            raise RuntimeError('shape [10] is invalid')
        return forward(self, x)

    monkeypatch.setattr(SRVGGNetCompact, 'forward', picky)
    stages = [{'iters': 5, 'gt_size': 16}, {'gt_size': 20}]
    refused(
        r'cannot restore the first batch \(LQ 10x10, 3 channels\): shape \[10\] is invalid',
        datasets__train__progressive=stages,
    )


def test_a_metric_that_images_are_too_small_for_is_named(refused):
    refused(
        r'val\.metrics\.psnr of .*0000\.png: ',
        val__metrics={'psnr': {'type': 'calculate_psnr', 'crop_border': 12}},
    )


def test_trying_changes_no_bit_of_a_run(run, train_opt, monkeypatch):
    stages = [{'iters': 3, 'gt_size': [16, 8]}, {'gt_size': 20}]
    opt = train_opt(datasets__train__progressive=stages)
    tried = run({**opt, 'name': 'tried'})
    monkeypatch.setattr('basicsr.run.data_checks.try_training_batches', lambda *_: None)
    plain = run({**opt, 'name': 'plain'})
    for name in ('net_g_latest.pth', '6.state'):
        assert differences(checkpoint(tried, name), checkpoint(plain, name)) in ([], ['/files'])


def test_images_of_validation_sets_are_read_before_the_first_step(refused, image_pairs):
    gt, lq = image_pairs('broken', 3, (24, 28))
    (Path(lq) / '0001.png').write_bytes(b'x')
    refused(
        r'1 images of the validation sets cannot be used: val: cannot read .*0001\.png',
        datasets__val={'type': 'PairedImageDataset', 'dataroot_gt': gt, 'dataroot_lq': lq},
    )


def test_an_image_that_goes_bad_in_a_training_costs_that_validation_its_scores(
    run, train_opt, monkeypatch
):
    opt = train_opt(val__val_freq=2)
    lq, step = Path(opt['datasets']['val']['dataroot_lq']), SRModel.optimize_parameters
    whole = (lq / '0001.png').read_bytes()

    def spoil(self, current_iter):
        (lq / '0001.png').write_bytes(b'x' if current_iter in (3, 4) else whole)
        step(self, current_iter)

    monkeypatch.setattr(SRModel, 'optimize_parameters', spoil)
    folder = run(opt)
    assert [row['iter'] for row in rows(folder) if 'metrics/val/psnr' in row] == [2, 6]
    assert (
        'Validation val: 1 images have no result, so it has no scores: 0001 (cannot read '
    ) in log_text(folder)


def test_a_metric_that_some_images_are_too_small_for_is_left_out_for_these(
    run, train_opt, image_pairs
):
    gt, lq = image_pairs('mixed', 3, (24, 28))
    for folder, size in ((gt, 8), (lq, 4)):
        cv2.imwrite(str(Path(folder) / '0002.png'), np.zeros((size, size, 3), np.uint8))
    metrics = {'ssim': {'type': 'calculate_ssim', 'crop_border': 0}}
    opt = train_opt(train__total_iter=1, val__metrics=metrics)
    opt['datasets']['val'] |= {'dataroot_gt': gt, 'dataroot_lq': lq}
    folder = run(opt)
    text = log_text(folder)
    assert text.count('Metric ssim of image 0002 is NaN: SSIM needs at least 11 x 11 pixels') == 1
    assert 'ssim: NaN for 1 of 3 images, which are left out.' in text
    (score,) = (row['metrics/val/ssim'] for row in rows(folder) if 'metrics/val/ssim' in row)
    assert 0 < score < 1


def test_a_set_need_not_name_its_gt(train_opt):
    """Nothing else asks for that."""
    images = [{'gt': torch.zeros(3, 4, 4), 'lq_path': 'a.png'}]
    metrics = {'ssim': {'type': 'calculate_ssim', 'crop_border': 0}}
    loader = torch.utils.data.DataLoader(images)
    with pytest.raises(ValueError, match=r'val\.metrics\.ssim of a\.png: SSIM needs at least 11'):
        try_metrics(train_opt(val__metrics=metrics), [loader])


def test_the_best_network_is_not_told_by_a_set_without_gt(refused, image_pairs):
    lq = image_pairs('lonely', 1, (24, 28))[1]
    refused(
        'logger.keep_best goes by psnr, which compares with the GT, and the images of val have',
        datasets__val={'type': 'SingleImageDataset', 'dataroot_lq': lq},
        logger__keep_best=True,
    )


def test_the_best_network_is_not_told_by_an_empty_set():
    class Empty:
        opt = {'name': 'val'}  # noqa: RUF012 (as of a dataset)

        def __len__(self):
            return 0

    loader = type('Loader', (), {'dataset': Empty()})
    opt = {'logger': {'keep_best': {'dataset': 'val', 'metric': 'psnr'}}}
    with pytest.raises(ValueError, match='keep_best goes by val, and that set is empty'):
        look_through(opt, [loader])


NO_AVERAGE = """
from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class NoAverage(SRModel):
    def add_ema(self, label):
        pass

    add_averages = add_ema
"""


def test_averages_that_a_model_does_not_keep_are_told(run, train_opt, tmp_path):
    (tmp_path / 'no_average_model.py').write_text(NO_AVERAGE)
    opt = train_opt(plugins=['.'], model_type='NoAverage', train__posthoc_ema=True)
    text = log_text(run(opt))
    assert 'train.ema_decay, train.posthoc_ema: NoAverage keeps no average' in text
    assert 'keeps no average' not in log_text(run(train_opt(name='kept')))

"""Sizes that do not fit and images that cannot be read are found before a folder is touched."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from runs import checkpoint, differences, log_text, rows

from basicsr.archs.srvgg_arch import SRVGGNetCompact
from basicsr.models import build_model
from basicsr.models.sr_model import SRModel
from basicsr.run.data_checks import look_through, try_metrics, try_schedules
from basicsr.utils.registry import MODEL_REGISTRY


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
        r'1 images of the validation sets are unreadable: val: cannot read .*0001\.png',
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
    assert 'ssim: NaN for 1 of 3 images, which are skipped.' in text
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


@pytest.mark.parametrize(
    ('scheduler', 'message'),
    [
        ({'type': 'OneCycleLR', 'max_lr': 1e-3, 'total_steps': 4}, 'OneCycleLR fails at iteration'),
        ({'type': 'StepLR', 'step_size': 0}, 'StepLR fails at iteration 2 of 6'),
        ({'type': 'CosineAnnealingLR', 'T_max': 0}, 'CosineAnnealingLR fails'),
        ({'type': 'MultiStepLR', 'milestones': [4], 'gamma': '0.5'}, 'gamma must be a number'),
        (
            {'type': 'MultiStepRestartLR', 'milestones': [], 'restarts': [4]}
            | {'restart_weights': [-1]},
            'MultiStepRestartLR fails at iteration 5 of 6: a learning rate of -',
        ),
    ],
)
def test_a_schedule_that_would_fail_later_is_refused_before_the_first_step(
    refused, scheduler, message
):
    refused(rf'train\.scheduler: .*{message}', train__scheduler=scheduler)


def test_trying_schedules_leaves_them_as_they_are(train_opt):
    opt = train_opt() | {'dist': False, 'is_train': True}
    opt['train']['scheduler'] = {'type': 'OneCycleLR', 'max_lr': 1e-3, 'total_steps': 6}
    models = [build_model(opt) for _ in range(2)]
    try_schedules(models[0])
    for iteration in range(1, 7):
        for model in models:
            model.update_learning_rate(iteration)
        rates = [model.get_current_learning_rate() for model in models]
        assert rates[0] == rates[1]
    groups = [
        {k: v for k, v in model.optimizer_g.param_groups[0].items() if k != 'params'}
        for model in models
    ]
    assert groups[0] == groups[1]


@pytest.mark.parametrize(
    ('weight', 'message'),
    [
        ('1', "loss_weight: must be a number, got '1': write it without quotes"),
        (None, 'must be a number, got None'),
        (True, 'must be a number, got True$'),
        ([1, 2], r'must be a number, got \[1, 2\]'),
    ],
)
def test_a_weight_of_a_loss_that_is_no_number_is_refused(refused, weight, message):
    refused(message, train__pixel_opt={'type': 'L1Loss', 'loss_weight': weight})


def test_a_metric_is_tried_on_other_images_where_the_first_is_too_small(
    run, train_opt, image_pairs
):
    gt, lq = image_pairs('mixed', 3, (208, 400))
    small_gt, small_lq = image_pairs('small', 1, (24, 28))
    for small, folder in ((small_gt, gt), (small_lq, lq)):
        (Path(small) / '0000.png').replace(Path(folder) / '0000.png')
    opt = train_opt(train__total_iter=1)
    opt['datasets']['val'].update(dataroot_gt=gt, dataroot_lq=lq)
    opt['val']['metrics'] = {'niqe': {'type': 'calculate_niqe', 'crop_border': 0}}
    assert 'niqe: NaN for 1 of 3 images' in log_text(run(opt))


@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ({'pretrain_network_g': 5}, 'pretrain_network_g must be the name of a file: 5'),
        ({'param_key_g': ['params']}, r"param_key_g must be a key of the file: \['params'\]"),
        ({'strict_load_g': 'no'}, "strict_load_g must be true or false: 'no'"),
    ],
)
def test_paths_of_other_types_are_refused(refused, path, message):
    refused(rf'tiny.yml:1: path\.{message}', path=path)


def test_options_that_a_model_with_its_own_test_may_not_honour_are_named(
    run, train_opt, monkeypatch
):
    class OwnTestModel(SRModel):
        def test(self):
            self.output = self.net_g(self.lq)

    monkeypatch.setitem(MODEL_REGISTRY._obj_map, 'OwnTestModel', OwnTestModel)
    opt = train_opt(model_type='OwnTestModel', train__total_iter=1)
    opt['val'].update(tile=8, self_ensemble=True)
    warnings = [line for line in log_text(run(opt)).splitlines() if 'WARNING' in line]
    named = [line.split('WARNING: ')[1] for line in warnings if 'OwnTestModel' in line]
    assert named == [
        'val.tile: OwnTestModel has its own test, so the option applies only if that calls super() '
        'or reads it.'
    ]

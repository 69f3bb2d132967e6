"""Sizes that do not fit are found before a folder is touched."""

import pytest
from runs import checkpoint, differences

from basicsr.archs.srvgg_arch import SRVGGNetCompact


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
    monkeypatch.setattr('basicsr.train.try_training_batches', lambda *_: None)
    plain = run({**opt, 'name': 'plain'})
    for name in ('net_g_latest.pth', '6.state'):
        assert differences(checkpoint(tried, name), checkpoint(plain, name)) in ([], ['/files'])

import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from golden import call, params, recipe

from basicsr.metrics.metric_util import nan_if_undefined
from basicsr.metrics.psnr_ssim import (
    calculate_psnr,
    calculate_psnr_pt,
    calculate_ssim,
    calculate_ssim_pt,
)

NUMPY_METRICS = (calculate_psnr, calculate_ssim)
TENSOR_METRICS = (calculate_psnr_pt, calculate_ssim_pt)


@pytest.mark.parametrize('case', params('metrics', lambda c: 'psnr_ssim' in c.get('target', '')))
def test_metric_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


def u8(h, w, c, k):
    y, x, ch = np.mgrid[:h, :w, :c]
    return ((7 * y + 3 * x + 41 * ch + 13 * k + (x * y) % 17 * 5) % 256).astype(np.uint8)


def wave(shape, phase):
    """0.5 + 0.5 sin(0.37 i + phase), i the flat index."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.5 + 0.5 * torch.sin(0.37 * index + phase)).view(shape).float()


@pytest.mark.parametrize(
    'crop_border, test_y_channel, psnr, ssim',
    [
        (0, False, 12.929463257674696, 0.6955603797350219),
        (0, True, 17.99396317010331, 0.6343635669249473),
        (4, False, 12.616477907921425, 0.7033557613155598),
        (4, True, 17.51542622007728, 0.643841109701048),
    ],
)
def test_metrics_give_the_numbers_measured_on_upstream(crop_border, test_y_channel, psnr, ssim):
    img, img2 = u8(64, 48, 3, 0), u8(64, 48, 3, 1)
    options = {'crop_border': crop_border, 'test_y_channel': test_y_channel}
    assert calculate_psnr(img, img2, **options) == pytest.approx(psnr, rel=1e-7)
    assert calculate_ssim(img, img2, **options) == pytest.approx(ssim, rel=1e-7)


def test_tensor_metrics_give_the_numbers_measured_on_upstream():
    img, img2 = wave((2, 3, 32, 32), 0), wave((2, 3, 32, 32), 0.3)
    psnr, ssim = (metric(img, img2, 1).tolist() for metric in TENSOR_METRICS)
    assert psnr == pytest.approx([19.52044435798883, 19.521342797742335], rel=1e-6)
    assert ssim == pytest.approx([0.9475993674552742, 0.9476264771114046], rel=1e-6)
    ssim = calculate_ssim_pt(img, img2, 0, test_y_channel=True).tolist()
    assert ssim == pytest.approx([0.9535139471219681, 0.9535577482016787], rel=1e-6)


def test_images_that_differ_by_1_everywhere_score_48_13_db_and_49_45_db_in_luma():
    img = u8(20, 24, 3, 0) % 200
    assert calculate_psnr(img, img + 1, 0) == pytest.approx(48.1308, abs=1e-4)
    assert calculate_psnr(img, img + 1, 0, test_y_channel=True) == pytest.approx(49.4527, abs=1e-4)


@pytest.mark.parametrize('order', ['HWC', 'CHW'])
def test_psnr_of_bytes_is_the_exact_one(order):
    """Sums of squares beyond what 32 bits hold, and views that are not contiguous."""
    rng = np.random.default_rng(0)
    for img, img2 in (
        (np.zeros((700, 300, 3), np.uint8), np.full((700, 300, 3), 255, np.uint8)),
        (rng.integers(0, 256, (65, 43, 3), np.uint8), rng.integers(0, 256, (65, 43, 3), np.uint8)),
        (rng.integers(0, 256, (65, 43, 1), np.uint8), rng.integers(0, 256, (65, 43, 1), np.uint8)),
    ):
        difference = img[2:-2, 2:-2].astype(object) - img2[2:-2, 2:-2].astype(object)
        mse = Fraction(int((difference**2).sum()), difference.size)
        if order == 'CHW':
            img, img2 = img.transpose(2, 0, 1), img2.transpose(2, 0, 1)
        expected = 10 * math.log10(255**2 / mse)
        assert calculate_psnr(img, img2, 2, order) == pytest.approx(expected, rel=1e-15, abs=1e-14)


@pytest.mark.parametrize('metric', NUMPY_METRICS)
@pytest.mark.parametrize('test_y_channel', [False, True])
def test_types_and_layouts_agree_and_the_result_is_a_plain_float(metric, test_y_channel):
    img, img2 = u8(24, 20, 3, 0), u8(24, 20, 3, 1)
    value = metric(img, img2, 2, test_y_channel=test_y_channel)
    assert type(value) is float
    for dtype in (np.float32, np.float64):
        other = metric(img.astype(dtype), img2.astype(dtype), 2, test_y_channel=test_y_channel)
        assert other == pytest.approx(value, rel=1e-9)
    chw = metric(img.transpose(2, 0, 1), img2.transpose(2, 0, 1), 2, 'CHW', test_y_channel)
    assert chw == pytest.approx(value, rel=1e-9)
    wide = metric(np.uint16(img) * 257, np.uint16(img2) * 257, 2, test_y_channel=test_y_channel)
    assert wide == pytest.approx(value, rel=1e-6)


def test_an_image_at_16_and_at_8_bits_differs_by_the_quantisation_alone():
    wide = np.random.default_rng(0).integers(0, 65536, (200, 200, 3), dtype=np.uint16)
    img = (wide / 257).round().astype(np.uint8)
    assert calculate_psnr(img, wide, 0) == pytest.approx(58.92, abs=0.05)


def test_numpy_and_tensor_versions_agree():
    img, img2 = u8(24, 20, 3, 0), u8(24, 20, 3, 1)
    tensors = [torch.from_numpy(x[..., ::-1] / 255).permute(2, 0, 1)[None] for x in (img, img2)]
    for test_y_channel in (False, True):
        for metric, metric_pt in zip(NUMPY_METRICS, TENSOR_METRICS, strict=True):
            value = metric(img, img2, 3, test_y_channel=test_y_channel)
            assert metric_pt(*tensors, 3, test_y_channel).item() == pytest.approx(value, rel=1e-5)


def test_equal_images_score_inf_80_and_1():
    img = u8(16, 16, 3, 0)
    tensor = torch.rand(1, 3, 16, 16)
    assert calculate_psnr(img, img, 0) == math.inf
    assert calculate_psnr_pt(tensor, tensor, 0).item() == pytest.approx(80)
    assert calculate_ssim(img, img, 0) == pytest.approx(1)
    assert calculate_ssim_pt(tensor, tensor, 0).item() == pytest.approx(1)


def test_a_damaged_image_does_not_look_perfect():
    img = np.full((16, 16), np.nan)
    assert math.isnan(calculate_psnr(img, np.zeros((16, 16)), 0))


@pytest.mark.parametrize('metric', TENSOR_METRICS)
def test_gray_tensors_have_their_luma_already(metric):
    img, img2 = torch.rand(2, 2, 1, 16, 16)
    assert torch.equal(metric(img, img2, 1, test_y_channel=True), metric(img, img2, 1))


@pytest.mark.parametrize('metric', TENSOR_METRICS)
def test_half_precision_tensors_are_scored_in_float64(metric):
    img, img2 = torch.rand(2, 2, 3, 16, 16).bfloat16()
    assert torch.equal(metric(img, img2, 0), metric(img.double(), img2.double(), 0))
    with pytest.raises(TypeError, match='uint8'):
        metric(img.byte(), img2.byte(), 0)


@pytest.mark.parametrize('metric', [*NUMPY_METRICS, *TENSOR_METRICS])
def test_an_image_that_is_too_small_scores_nan_with_one_warning(metric, caplog):
    anew = nan_if_undefined(inspect.unwrap(metric))  # other tests may have had the warning

    def score(side, crop_border):
        if metric in NUMPY_METRICS:
            return anew(np.zeros((side, side, 3)), np.ones((side, side, 3)), crop_border)
        return anew(torch.zeros(1, 3, side, side), torch.ones(1, 3, side, side), crop_border)

    def warnings():
        return [record.message for record in caplog.records if record.levelname == 'WARNING']

    smallest = 11 if 'ssim' in metric.__name__ else 1
    assert math.isfinite(score(8 + smallest, 4))
    assert not warnings()
    undefined = [score(side, 4) for side in (7 + smallest, 8, 7 + smallest)]
    assert all(math.isnan(value) for value in undefined)
    if metric in TENSOR_METRICS:
        assert undefined[0].shape == (1,) and undefined[0].dtype == torch.float64
    reason = 'crop_border 4' if smallest == 1 else '11 x 11 pixels after cropping, got 10 x 10'
    assert [reason in message for message in warnings()] == [True]


@pytest.mark.parametrize('metric', [*NUMPY_METRICS, *TENSOR_METRICS])
def test_different_shapes_are_an_error_that_names_both(metric):
    shapes = [(101, 67, 3), (100, 64, 3)] if metric in NUMPY_METRICS else [(1, 3, 101, 67)] * 2
    if metric in TENSOR_METRICS:
        shapes[1] = (1, 3, 100, 64)
    kind = np.zeros if metric in NUMPY_METRICS else torch.zeros
    # Users of BasicSR 1.x catch the first.
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=r'101, 67.* and .*100, 64'):
            metric(kind(shapes[0]), kind(shapes[1]), 0)


@pytest.mark.parametrize('metric', NUMPY_METRICS)
def test_the_images_are_left_as_they_are(metric):
    img, img2 = u8(16, 16, 3, 0) * 1.0, u8(16, 16, 3, 1) * 1.0
    before = img.copy(), img2.copy()
    metric(img, img2, 1, test_y_channel=True)
    metric(img, img2, 1)
    assert np.array_equal(img, before[0]) and np.array_equal(img2, before[1])

"""The protocol of metrics: functions of an image, classes over a set, several ranks."""

import math

import numpy as np
import pytest
import torch

from basicsr.metrics.metric import (
    ImageScores,
    SetScores,
    find_metric,
    mean_of_groups,
    metric_problems,
    needs_reference,
)
from basicsr.utils.registry import METRIC_REGISTRY

CPU = torch.device('cpu')
PSNR = 'torchmetrics.image:PeakSignalNoiseRatio'


class Largest:
    """The largest value of the results."""

    def __init__(self, scale=1.0):
        self.scale, self.value = scale, 0.0

    def update(self, result):
        self.value = max(self.value, self.scale * result.max().item())

    def merge(self, other):
        self.value = max(self.value, other.value)

    def compute(self):
        return self.value


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    assert 'calculate_psnr' in METRIC_REGISTRY  # its own are imported when one is looked up
    monkeypatch.setattr(METRIC_REGISTRY, '_obj_map', dict(METRIC_REGISTRY._obj_map))
    METRIC_REGISTRY.register(Largest)


def images(seed):
    rng = np.random.default_rng(seed)
    return {key: rng.integers(0, 256, (12, 14, 3), np.uint8) for key in ('result', 'gt')}


def test_a_class_of_torchmetrics_scores_a_set_alike_from_any_number_of_ranks():
    metrics = {'psnr': {'type': PSNR, 'data_range': 1.0}, 'most': {'type': 'Largest', 'scale': 255}}
    sets = [images(seed) for seed in range(5)]
    one = SetScores(metrics, CPU)
    for pair in sets:
        one.update(pair)
    ranks = [SetScores(metrics, CPU) for _ in range(2)]
    for rank, scores in enumerate(ranks):
        for pair in sets[rank::2]:
            scores.update(pair)
    merged = SetScores.merged([part for scores in ranks for part in scores.parts()])
    alone = SetScores.merged(one.parts())
    square = np.mean([(p['result'].astype(float) - p['gt']) ** 2 for p in sets])
    assert alone['psnr'] == pytest.approx(10 * math.log10(255**2 / square), abs=1e-3)
    assert merged == pytest.approx(alone, abs=1e-4)
    assert alone['most'] == max(p['result'].max() for p in sets)


def test_images_come_as_rgb_tensors_in_0_to_1():
    scores, seen = SetScores({'most': {'type': 'Largest'}}, CPU), []
    scores.metrics['most'].update = seen.append
    image = np.zeros((2, 3, 3), np.uint8)
    image[..., 0] = 255  # blue
    scores.update({'result': image})
    assert seen[0].shape == (1, 3, 2, 3)
    assert seen[0][0, :, 0, 0].tolist() == [0, 0, 1]


def test_a_set_metric_without_images_has_no_score():
    """Computing a mean of none would divide by 0; nor do ranks without images take part."""
    metrics = {'psnr': {'type': PSNR, 'data_range': 1.0}, 'most': {'type': 'Largest'}}
    scores = SetScores(metrics, CPU)
    assert SetScores.merged(scores.parts()) == {}
    scores.update({'result': images(0)['result']})
    merged = SetScores.merged([*SetScores(metrics, CPU).parts(), *scores.parts()])
    assert list(merged) == ['most']


def test_a_class_that_cannot_be_merged_is_refused_where_there_are_several_ranks(monkeypatch):
    monkeypatch.delattr(Largest, 'merge')
    ranks = [SetScores({'a': {'type': 'Largest'}}, CPU) for _ in range(2)]
    for scores in ranks:
        scores.update(images(0))
    parts = [part for scores in ranks for part in scores.parts()]
    with pytest.raises(ValueError, match=r'val\.metrics\.a: Largest has no merge\(other\)'):
        SetScores.merged(parts)


@pytest.mark.parametrize(
    ('options', 'problem'),
    [
        ({'type': 'calculate_psnr', 'crop_border': 2, 'better': 'higher'}, None),
        ({'type': 'calculate_psnr'}, "needs the argument 'crop_border'"),
        ({'type': 'calculate_psnr', 'crop_border': 2, 'better': 'max'}, "better: 'max'"),
        ({'type': 'calculate_psnr_pt', 'crop_border': 2}, 'takes tensors'),
        ({'type': 'calculate_pnsr', 'crop_border': 2}, "No object named 'calculate_pnsr'"),
        ({'type': PSNR, 'data_range': 1.0}, None),
        ({'type': 'Largest', 'scales': 2}, "no argument 'scales'; did you mean 'scale'?"),
        ({'type': 'torchmetrics.image:Nothing'}, 'cannot be imported'),
        ({'type': 'collections:OrderedDict'}, 'part of Python'),
        ({'type': 'torch.nn:Linear'}, r'must have update(result, gt) and compute()'),
    ],
)
def test_what_keeps_a_metric_from_being_computed_is_found_beforehand(options, problem):
    problems = metric_problems(options)
    assert (problems == []) if problem is None else (problem in problems[0])


def test_a_metric_with_a_reference_is_left_out_without_one():
    assert needs_reference(find_metric('calculate_psnr'))
    assert not needs_reference(find_metric('calculate_niqe'))
    assert needs_reference(find_metric(PSNR))
    assert not needs_reference(Largest)
    scores = ImageScores({'psnr': {'type': 'calculate_psnr', 'crop_border': 0}})
    pair = images(0)
    assert scores(pair, 'a').keys() == {'psnr'}
    assert scores({'result': pair['result']}, 'a') == {}


def test_a_score_that_is_nan_is_noted_once():
    scores = ImageScores({'ssim': {'type': 'calculate_ssim', 'crop_border': 4}})
    small = {key: value[:10, :10] for key, value in images(0).items()}
    for name in ('a', 'b'):
        assert math.isnan(scores(small, name)['ssim'])
    assert scores.undefined['ssim'].startswith('Metric ssim of image a is NaN: ')


def test_the_score_of_a_set_is_the_mean_over_clips_of_the_means_over_frames():
    mean, groups = mean_of_groups([('a', 1.0), ('a', 3.0), ('b', 10.0)])
    assert (mean, groups) == (6.0, {'a': 2.0, 'b': 10.0})
    assert mean_of_groups([('', 1.0), ('', math.inf), ('', 4.0)])[0] == 2.5
    assert mean_of_groups([('', math.inf)])[0] == math.inf

import numpy as np
import pytest
import torch

from basicsr.data import build_dataset
from basicsr.utils.img_util import imwrite
from basicsr.utils.rng import seeded


@pytest.fixture
def noisy(tmp_path):
    """A function that builds a NoisyImageDataset of two gray images, with more options."""
    for level in (100, 200):
        imwrite(np.full((64, 48, 3), level, np.uint8), str(tmp_path / 'gt' / f'{level}.png'))

    def build(**options):
        own = {'type': 'NoisyImageDataset', 'dataroot_gt': str(tmp_path / 'gt'), 'phase': 'val'}
        return build_dataset(own | {'name': 'noisy', 'scale': 1} | options)

    return build


def test_the_noise_is_white_and_gaussian_with_the_given_deviation(noisy):
    item = noisy(sigma=25)[1]
    noise = ((item['lq'] - item['gt']) * 255).double()
    assert torch.equal(item['gt'], torch.full((3, 64, 48), 200 / 255))
    assert noise.mean().abs() < 25 / 96 * 4  # four standard errors of 9216 values
    assert noise.std() == pytest.approx(25, rel=0.03)
    assert (noise.abs() < 25).double().mean() == pytest.approx(0.6827, abs=0.02)
    assert abs((noise[:, 1:] * noise[:, :-1]).mean()) < 0.05 * 625, 'neighbours are independent'
    assert item['lq'].max() > 1, 'nothing is clipped'


def test_validation_noise_is_that_of_the_image_and_the_same_each_time(noisy):
    first, second = noisy(sigma=[5, 50]), noisy(sigma=[5, 50])
    assert torch.equal(first[0]['lq'], second[0]['lq'])
    assert not torch.equal(first[0]['lq'] - first[0]['gt'], first[1]['lq'] - first[1]['gt'])


def test_training_noise_follows_from_the_number_of_the_sample(noisy):
    dataset = noisy(sigma=[0, 50], phase='train', gt_size=16)

    def sample(number):
        with seeded(7, number):
            return dataset[0]['lq']

    assert sample(1).shape == (3, 16, 16)
    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_the_deviation_of_each_sample_is_drawn_from_the_range(noisy):
    dataset = noisy(sigma=[10, 40], phase='train', gt_size=32)
    drawn = [
        float(255 * (item['lq'] - item['gt']).std()) for item in map(dataset.__getitem__, [0] * 60)
    ]
    assert 8 < min(drawn) < 17 and 33 < max(drawn) < 43


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({}, 'sigma must be the standard deviation'),
        ({'sigma': '25'}, "got '25'"),
        ({'sigma': [30, 10]}, r'got \[30, 10\]'),
        ({'sigma': True}, 'got True'),
        ({'sigma': 25, 'scale': 4}, 'scale is 4, not 1'),
        ({'sigma': 25, 'mean': [0.5], 'std': [0.5]}, 'mean and std'),
        ({'sigma': 25, 'uint8_batch': True}, 'uint8_batch'),
    ],
)
def test_options_that_make_no_sense_are_refused(noisy, options, message):
    with pytest.raises(ValueError, match=message):
        noisy(**options)

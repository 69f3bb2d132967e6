import random
from collections import Counter

import pytest
from runs import log_text
from torch.utils.data import Dataset

from basicsr.data import build_dataset
from basicsr.data.concat_dataset import shares
from basicsr.utils.registry import DATASET_REGISTRY


class LetterDataset(Dataset):
    """``count`` texts like a0, a1, …"""

    def __init__(self, opt):
        self.opt = opt

    def __getitem__(self, index):
        return f'{self.opt["letter"]}{range(self.opt["count"])[index]}'

    def __len__(self):
        return self.opt['count']


@pytest.fixture
def mix(monkeypatch):
    """A mixture of parts of some lengths: a0, a1, … and b0, b1, …, and so on."""
    monkeypatch.setitem(DATASET_REGISTRY._obj_map, 'LetterDataset', LetterDataset)

    def make(*counts, **options):
        parts = [
            {'type': 'LetterDataset', 'letter': letter, 'count': count}
            for letter, count in zip('abc', counts, strict=False)
        ]
        return build_dataset({'type': 'ConcatDataset', 'phase': 'train', 'parts': parts, **options})

    return make


def all_of(dataset):
    return [dataset[index] for index in range(len(dataset))]


def test_without_weights_the_parts_follow_each_other(mix):
    expected = ['a0', 'a1', 'b0', 'b1', 'b2', 'c0']
    assert all_of(mix(2, 3, 1)) == expected
    assert all_of(mix(2, 3, 1, phase='val')) == expected


def test_an_epoch_is_shared_out_by_the_weights(mix):
    samples = all_of(mix(2, 10, weights=[3, 1]))
    assert Counter(sample[0] for sample in samples) == {'a': 9, 'b': 3}


def test_a_part_with_more_places_than_samples_gives_each_equally_often(mix):
    assert Counter(all_of(mix(3, 9, weights=[1, 0]))) == {'a0': 4, 'a1': 4, 'a2': 4}


def test_a_part_with_fewer_places_gives_all_samples_over_time(mix):
    dataset, found = mix(2, 10, weights=[3, 1]), Counter()
    for _ in range(300):
        found.update(sample for sample in all_of(dataset) if sample[0] == 'b')
    assert len(found) == 10
    assert all(40 < count < 140 for count in found.values())


def test_what_is_drawn_follows_from_the_generator_that_a_sample_is_seeded_with(mix):
    dataset = mix(2, 10, weights=[3, 1])
    random.seed(5)
    first = all_of(dataset)
    random.seed(5)
    assert all_of(dataset) == first


def test_parts_take_the_options_that_they_do_not_have(mix):
    dataset = mix(1, 1, letter='z', gt_size=8)
    assert [part.opt['gt_size'] for part in dataset.parts] == [8, 8]
    assert [part.opt['letter'] for part in dataset.parts] == ['a', 'b']
    assert [part.opt['name'] for part in dataset.parts] == ['mix_0', 'mix_1']


@pytest.mark.parametrize('weights', [[0.5, 1.2, 3.3], [1, 1, 1], [0, 0, 7]])
def test_shares_add_up_and_are_off_by_less_than_one(weights):
    found = shares([100, 3, 8], weights)
    assert sum(found) == 111
    exact = [111 * weight / sum(weights) for weight in weights]
    assert all(abs(a - b) < 1 for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize(
    ('counts', 'options', 'message'),
    [
        ((), {}, 'parts is empty'),
        ((1, 1), {'weights': [1]}, 'must be 2 numbers'),
        ((1, 1), {'weights': [-1, 2]}, 'not negative'),
        ((1, 1), {'weights': [0, 0]}, 'not all of them 0'),
        ((1, 0), {'weights': [1, 1]}, 'number 1 is empty'),
        ((1, 1), {'weights': [1, 1], 'phase': 'val'}, 'leave them out'),
    ],
)
def test_what_cannot_be_mixed_is_refused(mix, counts, options, message):
    with pytest.raises(ValueError, match=message):
        mix(*counts, **options)


def test_indices_beyond_the_end_are_refused(mix):
    with pytest.raises(IndexError, match='sample 2 of 2'):
        mix(1, 1)[2]


def test_a_mixture_trains_with_a_sampler_and_logs_its_size(run, train_opt, image_pairs):
    opt = train_opt(train__total_iter=2)
    train = opt['datasets']['train']
    first, second = (
        dict(zip(('dataroot_gt', 'dataroot_lq'), image_pairs(name, count), strict=True))
        for name, count in (('one', 3), ('two', 5))
    )
    for key in ('dataroot_gt', 'dataroot_lq'):
        del train[key]
    train |= {'type': 'ConcatDataset', 'weights': [1, 3], 'sampler': {'type': 'streamed'}}
    train['parts'] = [{'type': 'PairedImageDataset', **part} for part in (first, second)]
    assert 'Number of train images: 8' in log_text(run(opt))

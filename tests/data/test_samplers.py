import math
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from basicsr.data.data_sampler import BatchStream, EnlargedSampler
from basicsr.data.samplers import ORDERS, StreamedOrder, build_sampler, permuted
from basicsr.utils.registry import import_plugins

SUBSET, WEIGHTS = [2, 3, 5, 7, 8, 9], [0, 1, 2, 3, 0, 5, 1, 1, 1, 1]
KINDS = [
    {'type': 'sequential'},
    {'type': 'random'},
    {'type': 'streamed'},
    {'type': 'subset_random', 'indices': SUBSET},
    {'type': 'subset_random', 'fraction': 0.4},
    {'type': 'weighted_random', 'weights': WEIGHTS},
    {'type': 'weighted_random', 'weights': WEIGHTS, 'replacement': False},
    {'type': 'weighted_random', 'weights': WEIGHTS, 'num_samples': 7},
]


def sampler(options, length=10, ranks=1, rank=0, seed=3, **others):
    return build_sampler(range(length), {'sampler': options, **others}, ranks, rank, seed)


def samples(options, count, ranks=1, rank=0, start=0, batch=1, **others):
    """(number, index) of the first samples of a rank's stream."""
    stream = BatchStream(
        sampler(options, ranks=ranks, rank=rank, **others), batch, ranks, rank, start
    )
    return list(islice(chain.from_iterable(stream), count))


def epochs(options, count, **others):
    """The indices of the first epochs."""
    size = sampler(options, **others).total_size
    indices = [index for _, index in samples(options, count * size, **others)]
    return [indices[first : first + size] for first in range(0, count * size, size)]


def every(test):
    return pytest.mark.parametrize('options', KINDS, ids=lambda o: '-'.join(map(str, o)))(test)


# what all have in common


@every
def test_a_stream_goes_on_at_any_sample_as_if_never_stopped(options):
    whole = samples(options, 60)
    assert all(samples(options, 5, start=start) == whole[start : start + 5] for start in range(55))


@every
@pytest.mark.parametrize('start', [0, 7])
def test_ranks_share_the_order_of_one_without_gap_or_overlap(options, start):
    shares = [samples(options, 12, ranks=4, rank=rank, start=start) for rank in range(4)]
    assert sorted(chain.from_iterable(shares)) == samples(options, 48, start=start)


@every
def test_the_number_of_ranks_may_change_at_a_resume(options):
    before = chain.from_iterable(samples(options, 5, ranks=4, rank=rank) for rank in range(4))
    after = chain.from_iterable(
        samples(options, 6, ranks=3, rank=rank, start=20) for rank in range(3)
    )
    assert sorted([*before, *after]) == samples(options, 38)


@every
def test_each_seed_has_its_own_order_and_gives_it_again(options):
    indices = {seed: samples(options, 60, seed=seed) for seed in (0, 1, 2**60)}
    assert all(samples(options, 60, seed=seed) == found for seed, found in indices.items())
    same = options['type'] == 'sequential'
    assert (indices[0] == indices[1]) is same
    assert (indices[1] == indices[2**60]) is same


@every
def test_passes_without_a_stream_give_the_samples_of_the_stream(options):
    ranks = [sampler(options, ranks=3, rank=rank) for rank in range(3)]
    found = []
    for epoch in range(4):
        for rank in ranks:
            rank.set_epoch(epoch)
        assert {len(list(rank)) for rank in ranks} == {len(ranks[0])}
        found += chain.from_iterable(zip(*ranks, strict=True))
    assert found == [index for _, index in samples(options, len(found))]


# each


def test_without_a_sampler_the_set_is_enlarged_and_shuffled():
    for options in (None, {'type': 'enlarged'}):
        ours = sampler(options, dataset_enlarge_ratio=3)
        assert list(ours) == list(EnlargedSampler(range(10), 1, 0, 3, seed=3))


def test_sequential_goes_through_the_set_again_and_again():
    assert epochs({'type': 'sequential'}, 2) == 2 * [list(range(10))]


@pytest.mark.parametrize('name', ['random', 'streamed'])
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(name):
    found = epochs({'type': name}, 20)
    assert all(sorted(order) == list(range(10)) for order in found)
    assert len(set(map(tuple, found))) == 20


def test_a_subset_is_shuffled_anew_for_each_epoch():
    found = epochs({'type': 'subset_random', 'indices': SUBSET}, 9)
    assert all(sorted(order) == SUBSET for order in found)
    assert len(set(map(tuple, found))) == 9


def test_a_fraction_is_the_same_part_in_all_epochs_and_another_for_each_seed():
    options = {'type': 'subset_random', 'fraction': 0.1}
    parts = {
        seed: {tuple(sorted(order)) for order in epochs(options, 3, length=200, seed=seed)}
        for seed in (1, 2)
    }
    assert [len(part) for part in parts.values()] == [1, 1]
    assert [len(set(next(iter(part)))) for part in parts.values()] == [20, 20]
    assert parts[1] != parts[2]


def test_samples_are_drawn_as_often_as_they_weigh():
    options = {'type': 'weighted_random', 'weights': WEIGHTS}
    indices = [index for _, index in samples(options, 15000)]
    expected = np.array(WEIGHTS) * 1000
    counts = np.bincount(indices, minlength=10)
    assert counts[[0, 4]].tolist() == [0, 0]
    assert (abs(counts - expected) <= 5 * expected**0.5).all()


def test_draws_without_replacement_have_each_sample_once_and_heavy_ones_first():
    options = {'type': 'weighted_random', 'weights': WEIGHTS, 'replacement': False}
    found = epochs(options, 3000)
    assert all(sorted(order) == [1, 2, 3, 5, 6, 7, 8, 9] for order in found)
    first = np.bincount([order[0] for order in found], minlength=10)
    expected = np.array(WEIGHTS) * 200
    assert (abs(first - expected) <= 5 * expected**0.5).all()


def test_lists_may_be_in_files(tmp_path):
    np.save(tmp_path / 'weights.npy', WEIGHTS)
    (tmp_path / 'subset.txt').write_text('\n'.join(map(str, SUBSET)))
    for name, key, values in (
        ('weights.npy', 'weights', WEIGHTS),
        ('subset.txt', 'indices', SUBSET),
    ):
        kind = {'weights': 'weighted_random', 'indices': 'subset_random'}[key]
        of_file = samples({'type': kind, key: str(tmp_path / name)}, 30)
        assert of_file == samples({'type': kind, key: values}, 30)


def test_a_sampler_of_ones_own_gets_the_arguments_that_those_of_torch_take(tmp_path):
    name = 'torch.utils.data:DistributedSampler'
    ours = sampler({'type': name, 'shuffle': False}, ranks=2, rank=1)
    assert isinstance(ours, DistributedSampler)
    assert [list(ours), ours.total_size] == [[1, 3, 5, 7, 9], 10]
    (tmp_path / 'backwards.py').write_text(
        'class Backwards:\n'
        '    def __init__(self, dataset, num_replicas, rank, seed):\n'
        '        self.indices = range(len(dataset))[::-1][rank::num_replicas]\n'
        '    def __iter__(self):\n'
        '        return iter(self.indices)\n'
        '    def __len__(self):\n'
        '        return len(self.indices)\n'
    )
    import_plugins([tmp_path])
    backwards = sampler({'type': 'backwards:Backwards'}, ranks=2)
    assert [list(backwards), backwards.total_size] == [[9, 7, 5, 3, 1], 10]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'type': 'radnom'}, "unknown type 'radnom'; choose enlarged, sequential"),
        ({'type': 'random', 'shuffle': True}, "sampler random: .*'shuffle'"),
        ({'type': 'nowhere:Sampler'}, "sampler 'nowhere:Sampler' cannot be imported"),
        ({'type': 'subset_random'}, 'either indices or fraction'),
        ({'type': 'subset_random', 'indices': [1, 10]}, 'from 0 to 9; they range from 1 to 10'),
        ({'type': 'subset_random', 'indices': [1.5]}, 'whole number'),
        ({'type': 'subset_random', 'fraction': 2}, 'fraction 2 is not in'),
        ({'type': 'weighted_random', 'weights': [1, 2]}, '2 weights for 10 samples'),
        ({'type': 'weighted_random', 'weights': [0] * 10}, 'not all 0'),
        (
            {'type': 'weighted_random', 'weights': WEIGHTS, 'replacement': False, 'num_samples': 9},
            'more than the 8 samples',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        sampler(options)


def test_other_orders_have_no_enlarged_epochs():
    with pytest.raises(ValueError, match='ratio 5 is only for the sampler enlarged'):
        sampler({'type': 'streamed'}, dataset_enlarge_ratio=5)


# the permutation without memory


@pytest.mark.parametrize('count', [*range(1, 70), 127, 128, 129, 1000, 4099, 2**16 + 1])
def test_the_numbers_at_all_places_are_a_permutation(count):
    for seed in range(3):
        assert np.array_equal(np.sort(permuted(np.arange(count), count, seed)), np.arange(count))


@pytest.mark.parametrize('count', [2, 3, 5, 8, 12])
def test_every_number_is_equally_likely_at_every_place(count):
    orders = np.array([permuted(np.arange(count), count, seed) for seed in range(1200)])
    frequency = np.stack([(orders == number).mean(0) for number in range(count)])
    assert abs(frequency - 1 / count).max() < 4.5 * (1 / count / 1200) ** 0.5


@pytest.mark.parametrize('count', [3, 4])
def test_every_permutation_of_few_numbers_is_equally_likely(count):
    orders = (permuted(np.arange(count), count, seed) for seed in range(2400))
    counts = Counter(tuple(order.tolist()) for order in orders)
    expected = 2400 / math.factorial(count)
    assert len(counts) == math.factorial(count)
    assert max(abs(found - expected) for found in counts.values()) < 5 * expected**0.5


def test_neighbours_are_unrelated():
    order = permuted(np.arange(10**5), 10**5, 1)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(order, np.arange(10**5))[0, 1]) < 0.015


def test_1024_ranks_have_every_sample_once_though_their_number_changes():
    count, seen, numbers = 19_001, [], 0
    for ranks, steps in ((1024, 5), (768, 8), (1024, 8)):
        for rank in range(ranks):
            order = StreamedOrder(range(count), ranks, rank, seed=1)
            stream = chain.from_iterable(BatchStream(order, 2, ranks, rank, numbers))
            seen += islice(stream, steps)
        numbers += ranks * steps
    seen.sort()
    assert [number for number, _ in seen] == list(range(numbers))
    assert [index for _, index in seen[:count]] == list(StreamedOrder(range(count), seed=1))
    assert sorted(index for _, index in seen[:count]) == list(range(count))


@pytest.mark.parametrize('start', [0, 10**10 - 1024, 7 * 10**12 + 5])
def test_ten_billion_samples_begin_at_once_anywhere_in_no_memory(start):
    import tracemalloc

    tracemalloc.start()
    order = StreamedOrder(range(10**10), 1024, 1023, seed=1)
    pairs = next(iter(BatchStream(order, 4000, 1024, 1023, start)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert pairs[0][0] == start + 1023
    assert pairs[1][0] == start + 2047
    assert len({index for _, index in pairs}) == 4000
    assert max(index for _, index in pairs) > 0.99 * 10**10


def test_every_order_that_is_offered_is_tested():
    assert {options['type'] for options in KINDS} == ORDERS.keys()

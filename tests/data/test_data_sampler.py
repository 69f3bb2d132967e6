from itertools import chain, islice

import pytest
import torch
from golden import params, recipe
from torch.utils.data import SequentialSampler

from basicsr.data.data_sampler import BatchStream, EnlargedSampler, NumberedSampler

# Orders of upstream: (length, ranks, rank, ratio, epoch) and the indices.
UPSTREAM = [
    ((5, 1, 0, 1, 0), [4, 0, 1, 3, 2]),
    ((5, 1, 0, 3, 0), [4, 4, 3, 2, 2, 0, 3, 0, 1, 3, 1, 1, 4, 2, 0]),
    ((5, 1, 0, 1, 1), [0, 4, 2, 3, 1]),
    ((5, 2, 0, 3, 2), [3, 1, 1, 0, 4, 0, 0, 0]),
    ((5, 2, 1, 3, 2), [3, 4, 2, 1, 2, 2, 4, 3]),
    ((4, 1, 0, 2.5, 0), [0, 1, 3, 1, 3, 1, 0, 0, 2, 2]),
]


def order(length, ranks=1, rank=0, ratio=1, epoch=0, seed=0):
    sampler = EnlargedSampler(range(length), ranks, rank, ratio, seed)
    sampler.set_epoch(epoch)
    assert len(sampler) == len(list(sampler))
    return list(sampler)


def batches(stream, count):
    return list(islice(stream, count))


@pytest.mark.parametrize(('arguments', 'indices'), UPSTREAM)
def test_seed_0_gives_the_orders_of_upstream(arguments, indices):
    assert order(*arguments) == indices


@pytest.mark.parametrize('case', params('data', lambda c: c['kind'] == 'sampler'))
def test_seed_0_gives_the_orders_of_the_reference(case):
    orders = [order(*combo) for combo in case['combos']]
    assert recipe.compare(case, [[len(indices), *indices] for indices in orders]) is None


def test_each_seed_and_each_epoch_has_its_own_order():
    orders = [order(30, seed=seed, epoch=epoch) for seed in (0, 1, 2, 2**63) for epoch in range(3)]
    assert len({tuple(indices) for indices in orders}) == 12
    assert all(sorted(indices) == list(range(30)) for indices in orders)


def test_an_enlarged_epoch_holds_every_image_ratio_times():
    assert sorted(order(4, ratio=3, seed=5)) == sorted(3 * [0, 1, 2, 3])


def test_ranks_have_disjoint_shares_that_cover_the_set():
    shares = [order(12, ranks=3, rank=rank, seed=9) for rank in range(3)]
    assert sorted(chain.from_iterable(shares)) == list(range(12))


# the endless stream


def test_a_stream_goes_straight_across_epochs():
    stream = BatchStream(EnlargedSampler(range(5), 1, 0), 2)
    pairs = list(chain.from_iterable(batches(stream, 5)))
    assert [number for number, _ in pairs] == list(range(10))
    assert [index for _, index in pairs] == order(5, epoch=0) + order(5, epoch=1)


def test_a_batch_may_be_larger_than_the_set():
    (batch,) = batches(BatchStream(EnlargedSampler(range(3), 1, 0), 8), 1)
    indices = order(3, epoch=0) + order(3, epoch=1) + order(3, epoch=2)
    assert [index for _, index in batch] == indices[:8]


@pytest.mark.parametrize('start', range(0, 24, 2))
def test_a_stream_started_in_the_middle_goes_on_as_if_never_stopped(start):
    def stream(start):
        return BatchStream(EnlargedSampler(range(5), 1, 0, seed=3), 2, start=start)

    assert batches(stream(start), 4) == batches(stream(0), 16)[start // 2 : start // 2 + 4]


def test_two_ranks_see_together_what_one_sees_with_twice_the_batch():
    def stream(batch, ranks, rank, start):
        sampler = EnlargedSampler(range(6), ranks, rank, seed=4)
        return batches(BatchStream(sampler, batch, ranks, rank, start), 7)

    for start in (0, 8):
        both = zip(stream(2, 2, 0, start), stream(2, 2, 1, start), strict=True)
        for (first, second), alone in zip(both, stream(4, 1, 0, start), strict=True):
            assert not set(first) & set(second)
            assert sorted(first + second) == alone


def test_the_sample_number_is_the_position_in_the_shared_order():
    shared = order(6, seed=4) + order(6, seed=4, epoch=1)
    for rank in range(2):
        stream = BatchStream(EnlargedSampler(range(6), 2, rank, seed=4), 3, 2, rank)
        pairs = list(chain.from_iterable(batches(stream, 2)))
        assert pairs == [(number, shared[number]) for number in range(rank, 12, 2)]


def test_a_stream_takes_samplers_that_know_no_epochs():
    (batch,) = batches(BatchStream(SequentialSampler(range(3)), 7, start=2), 1)
    assert batch == [(2, 2), (3, 0), (4, 1), (5, 2), (6, 0), (7, 1), (8, 2)]


def test_an_empty_set_is_refused():
    with pytest.raises(ValueError, match='empty'):
        BatchStream(EnlargedSampler([], 1, 0), 2)


# passes


def test_sample_numbers_go_on_from_pass_to_pass():
    sampler = NumberedSampler(SequentialSampler(range(3)), num_replicas=2, rank=1)
    assert len(sampler) == 3
    assert [list(sampler) for _ in range(2)] == [
        [(1, 0), (3, 1), (5, 2)],
        [(7, 0), (9, 1), (11, 2)],
    ]


def test_a_pass_that_is_broken_off_takes_the_numbers_of_a_whole_one():
    sampler = NumberedSampler(SequentialSampler(range(3)))
    next(iter(sampler))
    assert list(sampler) == [(3, 0), (4, 1), (5, 2)]


def test_an_order_longer_than_a_block_is_that_of_torch_for_every_rank():
    expected = torch.randperm(10_002, generator=torch.Generator().manual_seed(5)) % 5001
    for rank in range(2):
        assert order(5001, ranks=2, rank=rank, ratio=2, epoch=5) == expected[rank::2].tolist()

import random

import numpy as np
import pytest
import torch

from basicsr.utils.rng import mix, mix_array, seed_all, seed_cpu, seeded


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize(
    ('value', 'expected'), [(0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)]
)
def test_one_number_is_hashed_as_by_splitmix64(value, expected):
    """First outputs of the published generator for these seeds."""
    assert mix(value) == expected


def test_every_number_and_its_place_count():
    values = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0), (-1,), (2**40, 3)]
    hashes = [mix(*value) for value in values]
    assert len(set(hashes)) == len(values)
    assert all(0 <= value < 2**64 for value in hashes)
    assert mix(2**64 + 3) == mix(3)


@pytest.mark.parametrize('seed', [seed_cpu, seed_all])
def test_all_generators_follow_from_the_numbers(seed):
    seed(7, 3)
    first = draw()
    assert draw() != first
    seed(7, 3)
    assert draw() == first
    seed(7, 4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_neighbouring_numbers_give_unrelated_draws():
    draws = []
    for number in range(500):
        seed_cpu(3, number)
        draws.append(draw())
    draws = np.array(draws)
    assert np.abs(draws.mean(axis=0) - 0.5).max() < 0.06, 'five standard errors'
    neighbours = [np.corrcoef(column[:-1], column[1:])[0, 1] for column in draws.T]
    assert np.abs(neighbours).max() < 0.2


def test_a_block_has_seeds_of_its_own():
    before = draw()
    with seeded(7, 3):
        inside = draw()
    after = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # as at the start of every test
    assert (draw(), draw()) == (before, after)
    with pytest.raises(KeyError), seeded(7, 3):
        assert draw() == inside
        raise KeyError
    third = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert [draw() for _ in range(3)][2] == third, 'an error puts them back as well'


def test_an_array_is_mixed_as_its_values_are():
    values = np.array([0, 1, 2**40, 2**64 - 1], np.uint64)
    for key in (0, 5, 2**64 - 1):
        expected = [mix((int(value) + key) % 2**64) for value in values]
        assert mix_array(values, key).tolist() == expected

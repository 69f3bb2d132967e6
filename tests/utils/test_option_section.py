"""Sections of options record what is read of them."""

import pickle
from copy import copy, deepcopy

import pytest

from basicsr.utils.option_section import OptionSection, place_of

PLACES = {('a',): 'x.yml:1', ('b',): 'x.yml:2', ('c',): 'x.yml:3', ('c', 'd'): 'x.yml:4'}


@pytest.fixture
def section():
    return OptionSection({'a': 1, 'b': 2, 'c': {'d': 4}, 'n': None, 'filled_in': 5}, PLACES)


@pytest.mark.parametrize(
    'read',
    [
        lambda s: s['a'],
        lambda s: s.get('a'),
        lambda s: 'a' in s,
        lambda s: s.pop('a'),
        lambda s: deepcopy(s)['a'],
        lambda s: copy(s)['a'],
        lambda s: s.copy()['a'],
        lambda s: (s | {'b': 3})['a'],
    ],
)
def test_a_key_that_was_asked_for_is_read_whatever_copy_was_asked(section, read):
    read(section)
    assert section.unread() == ['b', 'c']


@pytest.mark.parametrize('read', [dict, lambda s: {**s}, lambda s: s.items(), lambda s: s.values()])
def test_what_takes_all_keys_reads_all(section, read):
    read(section)
    assert section.unread() == []


@pytest.mark.parametrize('read', [list, len, str, lambda s: s.keys(), dict.items])
def test_names_alone_are_not_read(section, read):
    read(section)
    assert section.unread() == ['a', 'b', 'c']


def test_defaults_and_tildes_are_not_given_by_the_user(section):
    assert section.keys() >= {'n', 'filled_in'}
    assert section.unread() == ['a', 'b', 'c']


def test_a_section_is_sent_to_another_process_with_its_values(section):
    other = pickle.loads(pickle.dumps(section))
    assert other == section
    assert other.place('b') == 'x.yml:2'


def test_a_place_is_that_of_the_longest_part_of_the_path_that_was_given(section):
    assert section.place('c', 'd') == 'x.yml:4'
    assert section.place('c', 'e') == 'x.yml:3'
    assert section.place('e') == ''
    assert place_of(section, 'c', 'd') == 'x.yml:4: c.d'
    assert place_of({}, 'c', 'd') == 'c.d'

import pickle
import sys

import pytest

from basicsr.data.shared import PathTable


@pytest.mark.parametrize(
    'items',
    [
        ['a/ä.png', '/b "quoted"\n.png', '', 'a//x.png', 'caf\udce9.png'],
        [{'lq_path': 'lq/1.png', 'gt_path': 'gt/1.png'}, {'lq_path': 'x', 'gt_path': '雪'}],
        [],
    ],
)
def test_a_path_table_reads_like_the_list_it_was_made_of(items):
    table = pickle.loads(pickle.dumps(PathTable(items)))
    assert list(table) == items and len(table) == len(items)
    assert table[:2] == items[:2] and table[::-1] == items[::-1]
    assert [table[i] for i in range(-len(items), 0)] == items
    with pytest.raises(IndexError, match='out of range' if items else 'no item 0 in an empty'):
        table[len(items)]


def test_a_path_table_is_few_objects_however_long_it_is():
    """Worker processes copied every page of a list of objects."""
    before = sys.getallocatedblocks()
    table = PathTable({'lq_path': f'lq/{i}.png', 'gt_path': f'gt/{i}.png'} for i in range(5000))
    assert sys.getallocatedblocks() - before < 100
    assert table[4999]['gt_path'] == 'gt/4999.png'


def test_a_path_table_keeps_a_folder_once():
    folder = '/data/' + 'f' * 200
    table = PathTable(f'{folder}/{i:04d}.png' for i in range(1000))
    assert len(pickle.dumps(table)) < 1000 * 24
    assert table.column() is not table and list(table.column()) == list(table)


def test_a_path_table_gives_one_path_of_each_pair():
    table = PathTable([{'lq_path': f'lq/{i}.png', 'gt_path': f'gt/{i}.png'} for i in range(3)])
    assert list(table.column('gt_path')) == ['gt/0.png', 'gt/1.png', 'gt/2.png']

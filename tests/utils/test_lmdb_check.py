"""A damaged LMDB is refused before its library would end the process."""

import struct

import cv2
import numpy as np
import pytest

from basicsr.utils.file_client import LmdbBackend
from basicsr.utils.lmdb_check import check_lmdb
from basicsr.utils.lmdb_util import LmdbMaker, make_lmdb_from_imgs

lmdb = pytest.importorskip('lmdb')


@pytest.fixture
def database(tmp_path):
    """A tree of two levels, with values of all kinds of size, and the value of each key."""
    (tmp_path / 'png').mkdir()
    names = [f'{number:03d}' for number in range(100)]
    for number, name in enumerate(names):
        size = 90 if number % 9 == 0 else 3
        image = np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)
        cv2.imwrite(str(tmp_path / 'png' / f'{name}.png'), image)
    folder = tmp_path / 'x.lmdb'
    make_lmdb_from_imgs(tmp_path / 'png', folder, [f'{name}.png' for name in names], names)
    with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as transaction:
        assert env.stat()['depth'] == 2 and env.stat()['overflow_pages'] > 0
        return folder, {key.decode(): value for key, value in transaction.cursor()}


def test_a_whole_database_is_read_in_full(database):
    folder, values = database
    check_lmdb(folder)
    client = LmdbBackend(str(folder))
    assert {key: client.get(key) for key in values} == values


def test_an_empty_database_is_whole(tmp_path):
    LmdbMaker(tmp_path / 'x.lmdb', map_size=2**20).close()
    check_lmdb(tmp_path / 'x.lmdb')
    assert LmdbBackend(str(tmp_path / 'x.lmdb')).get('000') is None


@pytest.mark.parametrize('part', [0, 0.1, 0.3, 0.6, 0.95])
def test_a_database_that_is_cut_off_is_refused(database, part):
    folder, _ = database
    data = (folder / 'data.mdb').read_bytes()
    (folder / 'data.mdb').write_bytes(data[: int(part * len(data))])
    with pytest.raises(ValueError, match=r'x.lmdb/data.mdb.*(truncated or damaged|no LMDB)'):
        LmdbBackend(str(folder))
    with pytest.raises(ValueError, match='data.mdb'):
        LmdbMaker(folder, resume=True)


def test_a_value_that_claims_more_bytes_than_the_file_has_is_refused(database):
    folder, values = database
    data = bytearray((folder / 'data.mdb').read_bytes())
    large = next(key for key, value in values.items() if len(value) > 8000)
    node = struct.pack('<HHHH', len(values[large]), 0, 1, 3) + large.encode()
    assert data.count(node) >= 1
    (folder / 'data.mdb').write_bytes(
        data.replace(node, struct.pack('<HHHH', 0, 0x1000, 1, 3) + large.encode())
    )
    with pytest.raises(ValueError, match='truncated or damaged'):
        check_lmdb(folder)


def test_a_tree_that_turns_back_on_itself_is_refused(database):
    folder, _ = database
    data = bytearray((folder / 'data.mdb').read_bytes())
    pages = range(0, len(data), 4096)
    branch = next(at for at in pages if data[at + 10] == 1 and at >= 8192)
    number = branch // 4096
    offset = struct.unpack_from('<H', data, branch + 16)[0]
    struct.pack_into('<HHH', data, branch + offset, number, 0, 0)
    (folder / 'data.mdb').write_bytes(data)
    with pytest.raises(ValueError, match='truncated or damaged'):
        check_lmdb(folder)


@pytest.mark.parametrize(('place', 'value'), [(94, 0), (94, 99), (104, 7), (32, 8192)])
def test_a_description_that_contradicts_the_pages_is_refused_or_does_no_harm(
    database, place, value
):
    folder, values = database
    data = bytearray((folder / 'data.mdb').read_bytes())
    for start in (0, 4096):  # either may be the current one
        struct.pack_into('<H' if place == 94 else '<Q', data, start + place, value)
    (folder / 'data.mdb').write_bytes(data)
    try:
        client = LmdbBackend(str(folder))
    except ValueError as error:
        assert 'truncated or damaged' in str(error)
    else:
        assert {key: client.get(key) for key in values} == values


@pytest.mark.parametrize('option', [{'map_size': 2**62}, {'unknown': 1}])
def test_options_that_the_library_does_not_take_are_named(database, option):
    with pytest.raises(ValueError, match=f'io_backend: {next(iter(option))}: an LMDB is only read'):
        LmdbBackend(str(database[0]), **option).get('000')


def test_a_key_that_no_database_can_have_is_refused(database):
    with pytest.raises(ValueError, match=r"x\.lmdb: cannot read the key ''"):
        LmdbBackend(str(database[0])).get('')

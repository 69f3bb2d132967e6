import cv2
import lmdb
import numpy as np
import pytest
from golden import params, recipe, resolve

from basicsr.data.data_util import paths_from_lmdb
from basicsr.utils.file_client import FileClient
from basicsr.utils.img_util import imfrombytes
from basicsr.utils.lmdb_util import LmdbMaker, make_lmdb_from_imgs, read_img_worker


@pytest.fixture
def images(tmp_path):
    """Write five images; returns their folder, names and keys."""
    names = [f'{index}.png' for index in range(5)]
    (tmp_path / 'src').mkdir()
    for name in names:
        cv2.imwrite(str(tmp_path / 'src' / name), recipe.det_image(name, 16, 20, 3))
    return tmp_path / 'src', names, [name[:-4] for name in names]


def read(folder, key):
    return imfrombytes(FileClient('lmdb', db_paths=folder).get(key), 'unchanged')


@pytest.mark.parametrize('case', params('data', lambda c: c['kind'] == 'lmdb_write'))
def test_databases_are_written_as_the_reference_does(case, tmp_path, monkeypatch):
    for name, spec in case['files'].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / name), resolve(spec))
    monkeypatch.chdir(tmp_path)
    make_lmdb_from_imgs('src', 'out.lmdb', case['paths'], case['keys'], **case['kwargs'])
    output = {
        'meta_info': (tmp_path / 'out.lmdb' / 'meta_info.txt').read_text(),
        'images': {key: read(tmp_path / 'out.lmdb', key) for key in case['keys']},
    }
    assert recipe.compare(case, output) is None


@pytest.mark.parametrize(
    ('shape', 'dtype'), [((6, 5), 'uint8'), ((6, 5, 4), 'uint8'), ((6, 5, 3), 'uint16')]
)
def test_images_are_stored_as_they_are(tmp_path, shape, dtype):
    high = np.iinfo(dtype).max
    img = recipe.det_array(shape, 'stored', 0, high).astype(dtype)
    cv2.imwrite(str(tmp_path / 'x.png'), img)
    channels = 1 if img.ndim == 2 else img.shape[2]
    key, data, size = read_img_worker(tmp_path / 'x.png', 'a/x', 9)
    assert (key, size) == ('a/x', (6, 5, channels))
    assert np.array_equal(imfrombytes(data, 'unchanged'), img)


def test_threads_change_nothing(images, tmp_path):
    folder, names, keys = images
    make_lmdb_from_imgs(folder, tmp_path / 'one.lmdb', names, keys, compress_level=3)
    make_lmdb_from_imgs(
        folder,
        tmp_path / 'many.lmdb',
        names,
        keys,
        batch=2,
        compress_level=3,
        multiprocessing_read=True,
        n_thread=2,
    )
    lists = [(tmp_path / f'{name}.lmdb' / 'meta_info.txt').read_text() for name in ('one', 'many')]
    assert lists[0] == lists[1] == ''.join(f'{key}.png (16,20,3) 3\n' for key in keys)
    for key in keys:
        assert np.array_equal(read(tmp_path / 'one.lmdb', key), read(tmp_path / 'many.lmdb', key))


def test_the_database_grows_as_needed(tmp_path):
    maker = LmdbMaker(tmp_path / 'x.lmdb', map_size=2**16, batch=2, grow=True)
    values = {f'{i:03d}': bytes([i]) * 2**16 for i in range(20)}
    for key, value in values.items():
        maker.put(value, key, (1, 1, 3))
    maker.close()
    client = FileClient('lmdb', db_paths=tmp_path / 'x.lmdb')
    assert {key: client.get(key) for key in values} == values
    lines = (tmp_path / 'x.lmdb' / 'meta_info.txt').read_text().splitlines()
    assert lines == [f'{key}.png (1,1,3) 1' for key in values]


def test_a_size_that_is_given_is_kept_to(images, tmp_path):
    folder, names, keys = images
    with pytest.raises(lmdb.MapFullError, match='MDB_MAP_FULL'):
        make_lmdb_from_imgs(folder, tmp_path / 'x.lmdb', names, keys, map_size=2**13)
    assert not (tmp_path / 'x.lmdb' / 'meta_info.txt').exists()


def test_a_build_that_fails_is_incomplete_and_goes_on(images, tmp_path):
    folder, names, keys = images
    whole = (folder / '3.png').read_bytes()
    (folder / '3.png').write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r'cannot decode .*src/3.png'):
        make_lmdb_from_imgs(folder, tmp_path / 'x.lmdb', names, keys)
    with pytest.raises(FileNotFoundError, match='no list of keys'):
        paths_from_lmdb(tmp_path / 'x.lmdb')

    (folder / '3.png').write_bytes(whole)
    for name in names[:3]:
        (folder / name).unlink()  # what is in the database is not read again
    make_lmdb_from_imgs(folder, tmp_path / 'x.lmdb', names, keys, resume=True)
    lines = (tmp_path / 'x.lmdb' / 'meta_info.txt').read_text().splitlines()
    assert lines == [f'{key}.png (16,20,3) 1' for key in keys]
    assert np.array_equal(read(tmp_path / 'x.lmdb', '0'), recipe.det_image('0.png', 16, 20, 3))


def test_sizes_and_order_of_the_list_survive_a_pause(tmp_path):
    shapes = {'c': (3, 2), 'a': (2, 5, 3), 'b': (4, 1, 4), 'd': (1, 1, 3)}
    for key, shape in shapes.items():
        img = recipe.det_array(shape, key, 0, 65535).astype('uint16')
        cv2.imwrite(str(tmp_path / f'{key}.png'), img)
    maker = LmdbMaker(tmp_path / 'x.lmdb', map_size=2**20)
    for key in ('a', 'b', 'c'):
        maker.put(*[read_img_worker(tmp_path / f'{key}.png', key, 1)[i] for i in (1, 0, 2)])
    maker.suspend()
    names = [f'{key}.png' for key in shapes]
    make_lmdb_from_imgs(tmp_path, tmp_path / 'x.lmdb', names, list(shapes), resume=True)
    lines = (tmp_path / 'x.lmdb' / 'meta_info.txt').read_text().splitlines()
    assert lines == ['c.png (3,2,1) 1', 'a.png (2,5,3) 1', 'b.png (4,1,4) 1', 'd.png (1,1,3) 1']


def test_a_database_that_is_added_to_is_incomplete_meanwhile(images, tmp_path):
    folder, names, keys = images
    path = tmp_path / 'x.lmdb'
    make_lmdb_from_imgs(folder, path, names[:3], keys[:3])
    (folder / '4.png').unlink()
    with pytest.raises(FileNotFoundError, match=r'src/4.png'):
        make_lmdb_from_imgs(folder, path, names, keys, resume=True)
    assert not (path / 'meta_info.txt').exists()


def test_a_database_of_other_images_is_not_gone_on_with(images, tmp_path):
    folder, names, keys = images
    make_lmdb_from_imgs(folder, tmp_path / 'x.lmdb', names, keys)
    with pytest.raises(ValueError, match=r'x.lmdb holds other images: 3, 4'):
        make_lmdb_from_imgs(folder, tmp_path / 'x.lmdb', names[:3], keys[:3], resume=True)
    assert paths_from_lmdb(tmp_path / 'x.lmdb') == keys


def test_images_that_png_would_change_are_refused(tmp_path):
    path = tmp_path / 'x.tif'
    cv2.imwrite(str(path), np.full((4, 4), 0.5, np.float32))
    with pytest.raises(ValueError, match=r'x.tif: PNG cannot hold float32'):
        read_img_worker(path, 'x', 1)
    cv2.imwrite(str(tmp_path / 'x.jpg'), recipe.det_image('x', 64, 64, 3))
    (tmp_path / 'x.jpg').write_bytes((tmp_path / 'x.jpg').read_bytes()[:-200])
    with pytest.raises(ValueError, match=r'cannot decode .*x.jpg'):
        read_img_worker(tmp_path / 'x.jpg', 'x', 1)


def test_nothing_is_overwritten(images, tmp_path):
    folder, names, keys = images
    (tmp_path / 'x.lmdb').mkdir()
    for make in (
        lambda path: make_lmdb_from_imgs(folder, path, names, keys),
        lambda path: LmdbMaker(path, map_size=2**20),
    ):
        with pytest.raises(FileExistsError, match=r'x.lmdb already exists; remove it, choose'):
            make(str(tmp_path / 'x.lmdb'))
        with pytest.raises(ValueError, match=r"named with the ending '.lmdb'"):
            make(str(tmp_path / 'x'))


def test_images_and_keys_are_as_many(images, tmp_path):
    folder, names, keys = images
    with pytest.raises(ValueError, match='5 images need as many keys, got 4'):
        make_lmdb_from_imgs(folder, tmp_path / 'x.lmdb', names, keys[:4])


def test_each_image_has_a_key_of_its_own(images, tmp_path):
    folder, names, keys = images
    with pytest.raises(ValueError, match='a key of its own, got twice: 0'):
        make_lmdb_from_imgs(folder, tmp_path / 'x.lmdb', names, ['0', *keys[:4]])

"""The cache of decoded images: same values, whatever happens while it fills."""

import errno
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from golden import recipe
from runs import checkpoint, differences, log_text

from basicsr.data import build_dataset
from basicsr.data.image_cache import ImageCache, clear_caches, list_caches, open_cache

STAMP = (10, 20)


def image(index, size=(9, 7), channels=3, dtype=np.uint8):
    values = recipe.det_u64(size[0] * size[1] * channels, f'cache/{index}')
    return (values % np.iinfo(dtype).max).astype(dtype).reshape(*size, channels)


@pytest.fixture
def cache(tmp_path):
    return ImageCache(tmp_path, [f'/data/{i}.png' for i in range(8)])


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
@pytest.mark.parametrize('channels', [1, 3])
def test_what_is_put_in_comes_out(cache, dtype, channels):
    images = [image(i, (5 + i, 11), channels, dtype) for i in range(8)]
    assert all(cache.get(i, STAMP) is None for i in range(8))
    for i, img in enumerate(images):
        cache.put(i, STAMP, img)
    for i, img in enumerate(images):
        got = cache.get(i, STAMP)
        assert got.dtype == dtype
        assert np.array_equal(got, img)
        assert not got.flags.writeable


def test_systems_without_file_locks_of_posix_have_others(cache, monkeypatch):
    monkeypatch.setattr('basicsr.utils.misc.fcntl', None)
    for index in range(2):
        cache.put(index, STAMP, image(index))
    assert all(np.array_equal(cache.get(i, STAMP), image(i)) for i in range(2))


def test_floating_images_are_left_out(cache):
    cache.put(0, STAMP, np.zeros((4, 4, 3), np.float32))
    assert cache.get(0, STAMP) is None


def test_a_changed_source_is_not_served(cache):
    cache.put(0, STAMP, image(0))
    assert cache.get(0, (10, 21)) is None
    cache.put(0, (10, 21), image(1))
    assert np.array_equal(cache.get(0, (10, 21)), image(1))


def test_lists_and_kinds_have_caches_of_their_own(tmp_path):
    folders = {
        ImageCache(tmp_path, sources, kind).folder
        for sources in (['/a', '/b'], ['/b', '/a'], ['/a'])
        for kind in ('color', 'gray')
    }
    assert len(folders) == 6


def test_a_second_opening_finds_the_images_without_decoding(cache, tmp_path):
    cache.put(3, STAMP, image(3))
    again = ImageCache(tmp_path, [f'/data/{i}.png' for i in range(8)])
    copy = pickle.loads(pickle.dumps(again))  # as for a spawned worker
    assert np.array_equal(copy.get(3, STAMP), image(3))
    assert '1 of 8 images' in str(again)


@pytest.mark.parametrize('damage', ['cut', 'zeros', 'offset', 'empty'])
def test_damaged_files_serve_nothing_wrong(cache, damage):
    for i in range(4):
        cache.put(i, STAMP, image(i))
    pixels, offsets = cache.folder / 'pixels.bin', cache.folder / 'offsets.bin'
    if damage == 'cut':
        os.truncate(pixels, pixels.stat().st_size - 50)
    elif damage == 'zeros':
        pixels.write_bytes(bytes(pixels.stat().st_size))
    elif damage == 'offset':
        np.arange(1, 9, dtype=np.uint64).tofile(offsets)
    else:
        os.truncate(pixels, 0)
    fresh = ImageCache(cache.folder.parent, [f'/data/{i}.png' for i in range(8)])
    for i in range(4):
        got = fresh.get(i, STAMP)
        assert got is None or np.array_equal(got, image(i))
    fresh.put(5, STAMP, image(5))
    assert np.array_equal(fresh.get(5, STAMP), image(5))


def fill(folder, count, start):
    cache = ImageCache(folder, [f'/data/{i}.png' for i in range(count)])
    while True:
        for i in range(count):
            index = (i + start) % count
            got = cache.get(index, STAMP)
            if got is None:
                cache.put(index, STAMP, image(index, (60, 50)))
            elif not np.array_equal(got, image(index, (60, 50))):
                os._exit(3)


def test_processes_killed_while_filling_leave_nothing_wrong(tmp_path):
    context = multiprocessing.get_context('fork')
    for round_ in range(8):
        fillers = [context.Process(target=fill, args=(tmp_path, 40, 7 * k)) for k in range(3)]
        for filler in fillers:
            filler.start()
        time.sleep(0.02 * (round_ + 1))
        for filler in fillers:
            os.kill(filler.pid, signal.SIGKILL)
            filler.join()
            assert filler.exitcode == -signal.SIGKILL
        cache = ImageCache(tmp_path, [f'/data/{i}.png' for i in range(40)])
        for i in range(40):
            got = cache.get(i, STAMP)
            assert got is None or np.array_equal(got, image(i, (60, 50)))
    cache.put(0, STAMP, image(0, (60, 50)))  # the lock of a killed process does not last


def test_a_full_disk_ends_the_filling_with_one_warning(cache, monkeypatch, caplog):
    cache.put(0, STAMP, image(0))
    size = (cache.folder / 'pixels.bin').stat().st_size

    class FullDisk:
        """A file on a disk that takes half of what is written."""

        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise OSError(errno.ENOSPC, 'No space left on device')

    opened = Path.open
    monkeypatch.setattr(Path, 'open', lambda self, *a, **k: FullDisk(opened(self, *a, **k)))
    cache.put(1, STAMP, image(1))
    cache.put(2, STAMP, image(2))
    assert (cache.folder / 'pixels.bin').stat().st_size == size
    assert caplog.text.count('grows no further') == 1
    assert 'No space left on device' in caplog.text
    monkeypatch.undo()
    assert cache.get(1, STAMP) is None
    assert np.array_equal(cache.get(0, STAMP), image(0))


def test_auto_leaves_half_of_the_free_space(tmp_path, monkeypatch, caplog):
    from shutil import _ntuple_diskusage

    usage = _ntuple_diskusage(10000, 9000, 1000)
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage)
    cache = ImageCache(tmp_path, ['/a', '/b'], share=0.5)
    cache.put(0, STAMP, image(0))  # 64 + 64 + 189 bytes of (64 + 1000) / 2
    cache.put(1, STAMP, image(1, (20, 20)))
    assert np.array_equal(cache.get(0, STAMP), image(0))
    assert cache.get(1, STAMP) is None
    assert 'grows no further' in caplog.text


def test_auto_does_without_where_it_cannot_write(tmp_path, monkeypatch, caplog):
    (tmp_path / 'file').write_text('not a folder')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert open_cache('auto', ['/a'], 'color', 'train') is None
    assert 'decoded each time' in caplog.text
    with pytest.raises(OSError, match='file'):
        open_cache(str(tmp_path / 'file' / 'x'), ['/a'], 'color', 'train')


def test_auto_does_without_where_there_is_no_home(no_home, caplog):
    assert open_cache('auto', ['/a'], 'color', 'train') is None
    assert 'decoded each time: there is no home folder: set HOME' in caplog.text


def test_auto_does_without_where_there_are_no_locks(break_locks, tmp_path, caplog):
    break_locks()
    assert open_cache('auto', ['/a'], 'color', 'train') is None
    assert re.search('images are decoded each time: .* has no locks', caplog.text)
    with pytest.raises(OSError, match='has no locks'):
        open_cache(str(tmp_path), ['/a'], 'color', 'train')


def test_nothing_is_added_once_a_lock_fails(cache, break_locks, caplog):
    cache.put(0, STAMP, image(0))
    break_locks()
    cache.put(1, STAMP, image(1))
    assert np.array_equal(cache.get(0, STAMP), image(0))
    assert cache.get(1, STAMP) is None
    assert 'grows no further' in caplog.text


# ---------------------------------------------------------------------------- with datasets


@pytest.fixture
def paired_opt(image_pairs, tmp_path):
    gt, lq = image_pairs(count=4, size=(32, 40))
    return {
        'name': 'train',
        'type': 'PairedImageDataset',
        'phase': 'train',
        'dataroot_gt': gt,
        'dataroot_lq': lq,
        'scale': 2,
        'gt_size': 16,
        'cache': str(tmp_path / 'cache'),
    }


@pytest.mark.parametrize('color', [None, 'gray', 'y'])
@pytest.mark.parametrize('bits', [8, 16])
def test_items_are_the_same_bits_with_and_without_a_cache(paired_opt, color, bits, monkeypatch):
    if bits == 16:
        for folder in (paired_opt['dataroot_gt'], paired_opt['dataroot_lq']):
            for name in os.listdir(folder):
                img = cv2.imread(f'{folder}/{name}').astype(np.uint16) * 250 + 7
                cv2.imwrite(f'{folder}/{name}', img)

    def items(cache):
        dataset = build_dataset(paired_opt | {'cache': cache, 'color': color})
        random.seed(0)
        return [dataset[index] for _ in range(3) for index in range(4)]

    plain = items('off')
    assert differences(plain, items(paired_opt['cache'])) == []

    def decode(*_):
        raise AssertionError('decoded again')

    monkeypatch.setattr('basicsr.data.data_util.imfrombytes', decode)
    assert differences(plain, items(paired_opt['cache'])) == []
    with pytest.raises(AssertionError, match='decoded again'):
        items('off')


def test_a_changed_file_is_decoded_anew(paired_opt):
    dataset = build_dataset(paired_opt | {'phase': 'val'})
    before = dataset[1]['gt']
    path = f'{paired_opt["dataroot_gt"]}/0001.png'
    cv2.imwrite(path, 255 - cv2.imread(path))
    os.utime(path, ns=(1, 1))
    after = dataset[1]['gt']
    assert np.allclose(before + after, 1)


def test_lmdb_images_are_cached_too(tmp_path):
    from shutil import copytree

    golden = recipe.HERE / 'lmdb'
    for name in ('gt.lmdb', 'lq.lmdb'):
        copytree(golden / name, tmp_path / name)
    opt = {
        'name': 'x',
        'type': 'PairedImageDataset',
        'phase': 'val',
        'scale': 4,
        'dataroot_gt': str(tmp_path / 'gt.lmdb'),
        'dataroot_lq': str(tmp_path / 'lq.lmdb'),
        'io_backend': {'type': 'lmdb'},
    }
    plain = build_dataset(opt)
    cached = build_dataset(opt | {'cache': str(tmp_path / 'cache')})
    for _ in range(2):
        for index in range(3):
            assert differences(plain[index], cached[index]) == []
    assert [c['images'] for c in list_caches(tmp_path / 'cache')] == [3, 3]


def test_a_run_is_the_same_with_and_without_a_cache(run, train_opt):
    results = []
    for name, cache, workers in (('off', False, 0), ('cold', 'auto', 2), ('warm', 'auto', 0)):
        opt = train_opt(name=name, datasets__train__cache=cache)
        opt['datasets']['train']['num_worker_per_gpu'] = workers
        folder = run(opt)
        results.append((checkpoint(folder, 'net_g_latest.pth'), log_text(folder)))
    assert differences(results[0][0], results[1][0]) == []
    assert differences(results[0][0], results[2][0]) == []
    assert 'Image cache' not in results[0][1]
    assert 'Image cache of train (gt): 0 of 5 images' in results[1][1]
    assert 'Image cache of train (gt): 5 of 5 images' in results[2][1]


def test_read_only_sources_are_no_obstacle(paired_opt):
    folder = paired_opt['dataroot_gt']
    os.chmod(folder, 0o555)
    try:
        dataset = build_dataset(paired_opt)
        assert dataset[0]['gt'].shape == (3, 16, 16)
    finally:
        os.chmod(folder, 0o755)


def test_caches_can_be_listed_and_cleared(cache, tmp_path):
    cache.put(0, STAMP, image(0))
    listed = list_caches(tmp_path)
    assert listed[0]['folder'] == cache.folder
    assert listed[0]['first'] == '/data/0.png'
    other = tmp_path / 'photos'
    other.mkdir()
    (other / 'about.json').write_text('{}')
    (other / 'pixels.bin').write_text('somebody else')
    (cache.folder / 'notes.txt').write_text('kept')
    size = (cache.folder / 'pixels.bin').stat().st_size
    assert listed[0]['size'] == size
    assert clear_caches(tmp_path) == size
    assert list_caches(tmp_path) == []
    assert (other / 'pixels.bin').read_text() == 'somebody else'
    assert [file.name for file in cache.folder.iterdir()] == ['notes.txt']
    assert json.dumps(list_caches(tmp_path / 'nothing')) == '[]'


def test_what_a_killed_process_was_writing_goes_with_the_next_one_and_with_the_cache(
    cache, tmp_path
):
    cache.put(0, STAMP, image(0))
    left = cache.folder / '.about.json.1-1.tmp'
    left.touch()
    opened = ImageCache(tmp_path, [f'/data/{i}.png' for i in range(8)])
    assert not left.exists()
    assert np.array_equal(opened.get(0, STAMP), image(0))
    left.touch()
    clear_caches(tmp_path)
    assert not cache.folder.exists()


@pytest.mark.parametrize('content', [b'', b'[]', b'\xff\xfe', b'{"kind": "color"}'])
def test_a_cache_that_does_not_say_what_it_is_is_no_obstacle(cache, tmp_path, content):
    """A power cut may leave an empty file."""
    cache.put(0, STAMP, image(0))
    (cache.folder / 'about.json').write_bytes(content)
    assert [found['kind'] for found in list_caches(tmp_path)] == ['unknown']
    again = ImageCache(tmp_path, [f'/data/{i}.png' for i in range(8)])
    assert np.array_equal(again.get(0, STAMP), image(0))
    (cache.folder / 'about.json').write_bytes(content)
    assert clear_caches(tmp_path) > 0 and list_caches(tmp_path) == []


def test_names_may_be_of_any_bytes(tmp_path):
    name = os.fsdecode(b'/data/\xff\xfe.png')
    cache = ImageCache(tmp_path, [name])
    cache.put(0, STAMP, image(0))
    assert np.array_equal(ImageCache(tmp_path, [name]).get(0, STAMP), image(0))


@pytest.mark.parametrize('option', ['', 'none', 'On', 'False'])
def test_a_word_that_is_meant_otherwise_is_no_folder(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='it must be auto, off, or a folder'):
        open_cache(option, ['/data/a.png'], 'color', 'x')
    assert os.listdir(tmp_path) == []


def test_a_cache_that_is_cleared_during_a_run_is_no_obstacle(cache, tmp_path, caplog):
    cache.put(0, STAMP, image(0))
    clear_caches(tmp_path)
    assert cache.decoded == 0
    got = cache.get(0, STAMP)
    assert got is None or np.array_equal(got, image(0))
    cache.put(1, STAMP, image(1))
    assert 'grows no further' in caplog.text


def test_auto_drops_caches_that_nobody_uses(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    old, new = (open_cache('auto', [name], 'color', 'x') for name in ('/old', '/new'))
    os.utime(old.folder / 'about.json', (0, 0))
    assert open_cache('auto', ['/new'], 'color', 'x').folder == new.folder
    assert not old.folder.exists()


def test_a_cache_of_another_user_is_not_served(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    mine = open_cache('auto', ['a'], 'color', 'images')
    assert mine is not None and mine.folder.stat().st_mode & 0o077 == 0
    monkeypatch.setattr('os.getuid', lambda: 12345)
    assert open_cache('auto', ['a'], 'color', 'images') is None
    assert 'belongs to another user' in caplog.text
    shared = open_cache(str(tmp_path / 'shared'), ['a'], 'color', 'images')
    assert shared.folder.is_relative_to(tmp_path / 'shared'), 'a folder that is named is used'


def test_a_damaged_header_is_not_served(tmp_path):
    img = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    cache = ImageCache(tmp_path, ['a'])
    cache.put(0, (1, 2), img)
    data = (cache.folder / 'pixels.bin').read_bytes()
    served = 0
    for place in range(64, 64 + 48):
        (cache.folder / 'pixels.bin').write_bytes(
            data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
        )
        served += ImageCache(tmp_path, ['a']).get(0, (1, 2)) is not None
    assert served == 0
    (cache.folder / 'pixels.bin').write_bytes(data)
    assert np.array_equal(ImageCache(tmp_path, ['a']).get(0, (1, 2)), img)


@pytest.mark.parametrize('times', [1, 2])
def test_a_cache_that_is_cleared_while_it_is_opened_is_made_anew(tmp_path, monkeypatch, times):
    prepare, left = ImageCache._prepare, [times]

    def prepare_and_lose(self, *args):
        prepare(self, *args)
        if left[0]:
            left[0] -= 1
            clear_caches(tmp_path)

    monkeypatch.setattr(ImageCache, '_prepare', prepare_and_lose)
    if times == 1:
        assert open_cache(str(tmp_path), ['/data/0.png'], 'color', 'images').decoded == 0
    else:  # somebody clears it all the time
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            open_cache(str(tmp_path), ['/data/0.png'], 'color', 'images')

import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest
from tiff import tiff

from basicsr.data.data_util import paths_from_lmdb
from basicsr.utils import lmdb_util
from basicsr.utils.img_util import imfrombytes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / 'scripts' / 'data_preparation' / 'create_lmdb.py'

# The script, in a process that is killed as soon as it reads image 0150.
KILLED = """
import os, runpy, signal, sys
sys.argv.pop(0)
sys.path.insert(0, sys.argv.pop(0))
from basicsr.utils import lmdb_util
read = lmdb_util.read_img_worker
def worker(path, key, level):
    if key == '0150':
        os.kill(os.getpid(), signal.SIGKILL)
    return read(path, key, level)
lmdb_util.read_img_worker = worker
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def options(folder, output, *more):
    return ['--input', folder, '--output', output, *more]


def content(folder):
    """List and values of a database; opened here, as LMDB lets a process open one only once."""
    env = lmdb.open(str(folder), readonly=True, lock=False)
    with env.begin() as transaction:
        values = {key.decode(): value for key, value in transaction.cursor()}
    env.close()
    return (folder / 'meta_info.txt').read_text(), values


def test_keys_are_the_paths_below_the_folder(command, write, tmp_path):
    write(tmp_path / 'in' / '001' / '00000000.png', 4, 5, 3)
    write(tmp_path / 'in' / '000' / '00000000.png', 4, 5, 4)
    write(tmp_path / 'in' / '000' / '00000001.png', 4, 5)
    args = options(tmp_path / 'in', tmp_path / 'new' / 'x.lmdb', '--recursive')
    out = command('create_lmdb', *args)
    assert out == f'3 images of {tmp_path / "in"} are in {tmp_path / "new" / "x.lmdb"}.\n'
    lines = (
        '000/00000000.png (4,5,4) 1',
        '000/00000001.png (4,5,1) 1',
        '001/00000000.png (4,5,3) 1',
    )
    assert content(tmp_path / 'new' / 'x.lmdb')[0].splitlines() == list(lines)


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
@pytest.mark.parametrize('channels', [(), (3,), (4,)])
def test_bit_depth_and_channels_are_kept(command, write, tmp_path, channels, dtype):
    img = write(tmp_path / 'in' / 'a.tif', 6, 5, *channels, dtype=dtype)
    command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'x.lmdb'))
    stored = imfrombytes(content(tmp_path / 'x.lmdb')[1]['a'], 'unchanged')
    assert stored.dtype == dtype
    assert np.array_equal(stored, img)


def test_tiffs_are_kept_as_stored_with_a_warning_of_what_is_left_out(command, tmp_path, caplog):
    rgba = np.random.default_rng(0).integers(0, 256, (4, 6, 4), dtype=np.uint8)
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in' / 'a.tif').write_bytes(tiff(rgba, orientation=6, extra=2, pages=2))
    command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'x.lmdb'))
    value = content(tmp_path / 'x.lmdb')[1]['a']
    assert np.array_equal(imfrombytes(value, 'unchanged'), rgba[..., [2, 1, 0, 3]])
    assert [record.getMessage() for record in caplog.records] == [
        f'Only the first frame or page is used: {tmp_path / "in" / "a.tif"}'
    ]


def test_the_keys_of_low_quality_images_can_be_those_of_their_gt(command, write, tmp_path):
    for name in ('0001x4.png', '0002x4.png'):
        write(tmp_path / 'in' / name, 4, 4)
    command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'x.lmdb', '--cut-suffix', 'x4'))
    assert paths_from_lmdb(tmp_path / 'x.lmdb') == ['0001', '0002']


def test_listed_images_and_folders_are_taken(command, write, tmp_path):
    for name in ('00001/0001/im1', '00001/0001/im4', '00001/0002/im4', '00002/0001/im4'):
        write(tmp_path / 'in' / f'{name}.png', 4, 4, 3)
    clips = tmp_path / 'clips.txt'
    clips.write_text('00002/0001 7 (256,448,3)\n00001/0001\n\n')
    args = ('--meta-info', clips, '--pattern')
    command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'gt.lmdb', *args, 'im4.png'))
    assert paths_from_lmdb(tmp_path / 'gt.lmdb') == ['00001/0001/im4', '00002/0001/im4']
    command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'lq.lmdb', *args, 'im*'))
    keys = ['00001/0001/im1', '00001/0001/im4', '00002/0001/im4']
    assert paths_from_lmdb(tmp_path / 'lq.lmdb') == keys

    clips.write_text('00001/0002/im4.png (4,4,3)\n')
    command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'one.lmdb', '--meta-info', clips))
    assert paths_from_lmdb(tmp_path / 'one.lmdb') == ['00001/0002/im4']
    clips.write_text('\n00001/0009\n')
    missing = r'create_lmdb: .*clips\.txt: 1 listed files do not exist: .*00001/0009 \(line 2\)'
    with pytest.raises(SystemExit, match=missing):
        command(
            'create_lmdb', *options(tmp_path / 'in', tmp_path / 'no.lmdb', '--meta-info', clips)
        )


def test_the_number_of_workers_changes_no_byte(command, write, tmp_path):
    for number in range(9):
        write(tmp_path / 'in' / f'{number}.png', 8, 8 + number, 3)
    for workers in (1, 2):
        args = options(tmp_path / 'in', tmp_path / f'{workers}.lmdb', '--workers', workers)
        command('create_lmdb', *args)
    assert content(tmp_path / '1.lmdb') == content(tmp_path / '2.lmdb')


def test_a_killed_build_is_incomplete_and_goes_on_where_it_was(
    command, write, tmp_path, monkeypatch
):
    for number in range(170):
        write(tmp_path / 'in' / f'{number:04d}.png', 8, 8, 3)
    output = tmp_path / 'x.lmdb'
    args = [ROOT, SCRIPT, *options(tmp_path / 'in', output, '--workers', 2, '--resume')]
    killed = subprocess.run([sys.executable, '-c', KILLED, *map(str, args)], capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()
    with pytest.raises(FileNotFoundError, match='no list of keys'):
        paths_from_lmdb(output)
    with pytest.raises(SystemExit, match=r'x.lmdb exists: add --resume to go on'):
        command('create_lmdb', *options(tmp_path / 'in', output))

    read, again = lmdb_util.read_img_worker, []
    monkeypatch.setattr(
        lmdb_util,
        'read_img_worker',
        lambda path, key, level: again.append(key) or read(path, key, level),
    )
    command('create_lmdb', *options(tmp_path / 'in', output, '--resume'))
    assert sorted(again) == [f'{number:04d}' for number in range(100, 170)]
    command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'whole.lmdb'))
    assert content(output) == content(tmp_path / 'whole.lmdb')


def test_a_damaged_image_is_named_and_can_be_mended(command, write, tmp_path):
    for number in range(6):
        write(tmp_path / 'in' / f'{number}.png', 8, 8, 3)
    damaged = tmp_path / 'in' / '4.png'
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-20])
    args = options(tmp_path / 'in', tmp_path / 'x.lmdb')
    with pytest.raises(SystemExit, match=r'create_lmdb: cannot decode .*4.png: The \d+ bytes'):
        command('create_lmdb', *args)
    assert not (tmp_path / 'x.lmdb' / 'meta_info.txt').exists()
    damaged.write_bytes(whole)
    command('create_lmdb', *args, '--resume')
    assert paths_from_lmdb(tmp_path / 'x.lmdb') == [str(number) for number in range(6)]


def test_a_database_is_replaced_on_demand_only(command, write, tmp_path):
    write(tmp_path / 'in' / 'a.png', 4, 4)
    args = options(tmp_path / 'in', tmp_path / 'x.lmdb')
    command('create_lmdb', *args)
    (tmp_path / 'in' / 'a.png').rename(tmp_path / 'in' / 'b.png')
    with pytest.raises(SystemExit, match=r'x.lmdb exists: add --resume to go on or --overwrite'):
        command('create_lmdb', *args)
    with pytest.raises(SystemExit, match=r'x.lmdb holds other images: a'):
        command('create_lmdb', *args, '--resume')
    assert paths_from_lmdb(tmp_path / 'x.lmdb') == ['a']
    command('create_lmdb', *args, '--overwrite')
    assert paths_from_lmdb(tmp_path / 'x.lmdb') == ['b']

    good, damaged = (tmp_path / 'in' / 'b.png').read_bytes(), tmp_path / 'in' / 'c.png'
    damaged.write_bytes(good[:40])
    with pytest.raises(SystemExit, match='cannot decode'):
        command('create_lmdb', *args, '--overwrite')
    assert paths_from_lmdb(tmp_path / 'x.lmdb') == ['b'], 'the old one stays'
    damaged.write_bytes(good)
    command('create_lmdb', *args, '--overwrite')
    assert paths_from_lmdb(tmp_path / 'x.lmdb') == ['b', 'c']
    assert sorted(p.name for p in tmp_path.glob('*.lmdb')) == ['x.lmdb']

    (tmp_path / 'precious.lmdb').mkdir()
    with pytest.raises(SystemExit, match=r'precious.lmdb is no LMDB'):
        command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'precious.lmdb', '--overwrite'))


def test_unusable_arguments_are_refused(command, write, tmp_path):
    write(tmp_path / 'in' / 'a.png', 4, 4)
    with pytest.raises(SystemExit, match="holds no images 'im4.png' to take"):
        command(
            'create_lmdb', *options(tmp_path / 'in', tmp_path / 'x.lmdb', '--pattern', 'im4.png')
        )
    with pytest.raises(SystemExit, match="must be named with the ending '.lmdb'"):
        command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'x'))
    write(tmp_path / 'in' / 'a.bmp', 4, 4)
    with pytest.raises(SystemExit, match='each image needs a key of its own, got twice: a.'):
        command('create_lmdb', *options(tmp_path / 'in', tmp_path / 'x.lmdb'))
    assert not (tmp_path / 'x.lmdb').exists()


def test_a_set_that_is_named_is_looked_for_at_its_usual_place(
    command, write, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folders = ['HR_sub', *(f'LR_bicubic/X{scale}_sub' for scale in (2, 3, 4))]
    for folder in folders:
        write(tmp_path / f'datasets/DIV2K/DIV2K_train_{folder}' / '0001_s001.png', 6, 5, 3)
    out = command('create_lmdb', '--dataset', 'DIV2K')
    assert len(out.splitlines()) == 4
    for folder in folders:
        name = f'DIV2K_train_{folder.replace("/", "_")}.lmdb'
        assert paths_from_lmdb(tmp_path / 'datasets/DIV2K' / name) == ['0001_s001']


def test_the_frames_of_reds_have_their_clip_in_the_key(command, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ('train_sharp', 'train_sharp_bicubic/X4'):
        write(tmp_path / 'datasets/REDS' / folder / '000' / '00000000.png', 6, 5, 3)
    command('create_lmdb', '--dataset', 'REDS')
    for name in ('train_sharp', 'train_sharp_bicubic'):
        folder = tmp_path / 'datasets/REDS' / f'{name}_with_val.lmdb'
        assert paths_from_lmdb(folder) == ['000/00000000']


def test_vimeo_has_the_fourth_frames_and_all_seven_reduced(command, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / 'datasets/vimeo90k'
    for folder in ('vimeo_septuplet', 'vimeo_septuplet_matlabLRx4'):
        for clip in ('00001/0001', '00001/0002'):
            for frame in range(1, 8):
                write(root / folder / 'sequences' / clip / f'im{frame}.png', 4, 4, 3)
    (root / 'vimeo_septuplet/sep_trainlist.txt').write_text('00001/0002\n')
    assert len(command('create_lmdb', '--dataset', 'Vimeo90K').splitlines()) == 2
    keys = [f'00001/0002/im{frame}' for frame in range(1, 8)]
    assert paths_from_lmdb(root / 'vimeo90k_train_GT_only4th.lmdb') == keys[3:4]
    assert paths_from_lmdb(root / 'vimeo90k_train_LR7frames.lmdb') == keys


def test_a_folder_or_a_set_must_be_given(command, tmp_path):
    with pytest.raises(SystemExit, match='give --input and --output, or --dataset'):
        command('create_lmdb', '--input', tmp_path)

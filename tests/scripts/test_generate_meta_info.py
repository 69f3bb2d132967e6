import numpy as np
import pytest

from basicsr.data.data_util import names_from_meta_info_file


def test_names_and_sizes_are_listed_in_order(command, write, tmp_path):
    write(tmp_path / 'in' / 'b.png', 3, 5)
    write(tmp_path / 'in' / 'a.png', 4, 6, 3)
    write(tmp_path / 'in' / 'c.tif', 7, 8, 4, dtype=np.uint16)
    write(tmp_path / 'in' / 'sub' / 'd.png', 9, 2, 3)
    (tmp_path / 'in' / 'notes.txt').write_text('no image')
    args = ('--input', tmp_path / 'in', '--output')
    out = command('generate_meta_info', *args, tmp_path / 'lists' / 'flat.txt')
    assert (
        out == f'3 images of {tmp_path / "in"} are listed in {tmp_path / "lists" / "flat.txt"}.\n'
    )
    lines = 'a.png (4,6,3)\nb.png (3,5,1)\nc.tif (7,8,4)\n'
    assert (tmp_path / 'lists' / 'flat.txt').read_text() == lines
    command('generate_meta_info', *args, tmp_path / 'deep.txt', '--recursive', '--workers', 1)
    assert (tmp_path / 'deep.txt').read_text() == f'{lines}sub/d.png (9,2,3)\n'
    names = names_from_meta_info_file(tmp_path / 'deep.txt')
    assert names == ['a.png', 'b.png', 'c.tif', 'sub/d.png']


def test_a_list_is_replaced_on_demand_only_and_not_by_half_of_one(command, write, tmp_path):
    for name in 'ab':
        write(tmp_path / 'in' / f'{name}.png', 4, 4)
    target = tmp_path / 'list.txt'
    target.write_text('before')
    args = ('--input', tmp_path / 'in', '--output', target)
    with pytest.raises(
        SystemExit, match=r'list.txt exists: choose another name or add --overwrite'
    ):
        command('generate_meta_info', *args)
    whole = (tmp_path / 'in' / 'b.png').read_bytes()
    (tmp_path / 'in' / 'b.png').write_bytes(whole[:-20])
    with pytest.raises(
        SystemExit, match=r'generate_meta_info: .*b.png: The \d+ bytes are no image'
    ):
        command('generate_meta_info', *args, '--overwrite')
    assert target.read_text() == 'before'
    (tmp_path / 'in' / 'b.png').write_bytes(whole)
    command('generate_meta_info', *args, '--overwrite')
    assert target.read_text() == 'a.png (4,4,1)\nb.png (4,4,1)\n'


def test_names_that_a_list_cannot_hold_are_refused(command, write, tmp_path):
    args = ('--input', tmp_path / 'in', '--output', tmp_path / 'list.txt')
    (tmp_path / 'in').mkdir()
    with pytest.raises(SystemExit, match='holds no images'):
        command('generate_meta_info', *args)
    write(tmp_path / 'in' / 'my cat.png', 4, 4)
    with pytest.raises(SystemExit, match="'my cat.png': a name ends at its first blank"):
        command('generate_meta_info', *args)
    (tmp_path / 'in' / 'my cat.png').unlink()
    write(tmp_path / 'in' / 'my\\cat.png', 4, 4)
    with pytest.raises(SystemExit, match='the slash of a folder'):
        command('generate_meta_info', *args)
    assert not (tmp_path / 'list.txt').exists()


def test_without_folders_the_sub_images_of_div2k_are_listed(command, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'datasets/DIV2K/DIV2K_train_HR_sub' / '0001_s001.png', 6, 5, 3)
    command('generate_meta_info')
    made = tmp_path / 'basicsr/data/meta_info/meta_info_DIV2K800sub_GT.txt'
    assert made.read_text() == '0001_s001.png (6,5,3)\n'
    with pytest.raises(SystemExit, match='give --input and --output, or none'):
        command('generate_meta_info', '--input', tmp_path)

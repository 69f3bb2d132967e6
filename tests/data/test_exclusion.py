"""The option ``exclude`` of datasets."""

import logging
from pathlib import Path

import pytest
from blind import KERNELS

from basicsr.data import build_dataset
from basicsr.data.exclusion import kept_images, name_below
from basicsr.utils.errors import UserError


@pytest.fixture
def listed(tmp_path):
    """Write a list; returns its name."""

    def write(*lines):
        file = tmp_path / 'bad.txt'
        file.write_text(''.join(f'{line}\n' for line in lines), encoding='utf-8')
        return str(file)

    return write


@pytest.fixture
def names(image_pairs):
    """The names of the images of a dataset of five that is built with more options."""
    gt, lq = image_pairs()

    def call(kind='PairedImageDataset', **options):
        folders = {'dataroot_gt': gt, 'dataroot_lq': lq}
        opt = {'type': kind, 'phase': 'val', 'scale': 2, **folders, **options}
        paths = [path['gt_path'] if isinstance(path, dict) else path for path in build(opt)]
        return [Path(path).stem for path in paths]

    def build(opt):
        return build_dataset(opt).paths

    return call


def test_pairs_and_single_images_of_the_list_are_left_out(names, listed):
    for kind in ('PairedImageDataset', 'SingleImageDataset', 'RealESRGANPairedDataset'):
        assert names(kind, exclude=listed('0001.png', '', '0004.png')) == ['0000', '0002', '0003']


def test_an_empty_list_leaves_nothing_out(names, listed):
    assert len(names(exclude=listed())) == 5


def test_lines_that_name_no_image_are_told(names, listed, caplog):
    with caplog.at_level(logging.INFO, 'basicsr'):
        assert len(names(exclude=listed('0001.png', '0002', 'x y.png'), name='mine')) == 4
    assert 'mine: 1 of 5 images are excluded.' in caplog.text
    assert '2 lines of' in caplog.text and 'match no image: 0002, x y.png' in caplog.text


def test_a_list_of_all_images_and_one_that_is_missing_are_refused(names, listed, tmp_path):
    every = [f'{i:04d}.png' for i in range(5)]
    with pytest.raises(UserError, match=r'exclude: .*bad.txt names all 5 images of'):
        names(exclude=listed(*every))
    with pytest.raises(FileNotFoundError, match='no exclude .*none.txt'):
        names(exclude=str(tmp_path / 'none.txt'))


def test_a_whole_path_names_one_of_two_folders(listed):
    paths = ['/a/x/1.png', '/b/x/1.png', '/b/2.png']
    assert kept_images(paths, ['/a', '/b'], {'exclude': listed('x/1.png')}) == [2]
    assert kept_images(paths, ['/a', '/b'], {'exclude': listed('/b/x/1.png')}) == [0, 2]
    assert name_below('key/1', ['/a.lmdb']) == 'key/1'


def test_folders_of_realesrgan_keep_their_weights_without_the_excluded(image_pairs, listed):
    (first, _), (second, _) = image_pairs('one'), image_pairs('two')
    opt = {'type': 'RealESRGANDataset', 'phase': 'train', 'scale': 2, 'gt_size': 16} | KERNELS
    opt |= {'dataroot_gt': [first, second], 'root_weights': [1, 3]}
    bad = f'{first}/0001.png', f'{first}/0002.png', f'{second}/0000.png'
    dataset = build_dataset(opt | {'exclude': listed(*bad)})
    assert len(dataset.paths) == 3 + 4
    assert len(dataset) == 3 * 1 + 4 * 3
    assert not set(bad) & set(dataset.paths)

"""Pairs of images for the models of Real-ESRGAN."""

import numpy as np
import pytest
import torch

from basicsr.data import build_dataset

RNG = np.random.default_rng(0)


@pytest.fixture
def write(in_folder):
    """Write pairs ``{name: (height, width)}`` below gt/ and lq/; LQ pixels are blocks of the GT."""

    def write_pairs(**sizes):
        for name, (height, width) in sizes.items():
            lq = RNG.integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
            gt = np.pad(lq.repeat(2, 0).repeat(2, 1), [(0, height % 2), (0, width % 2), (0, 0)])
            in_folder({f'gt/{name}.png': gt, f'lq/{name}.png': lq})

    return write_pairs


def build(phase='train', **options):
    opt = {'type': 'RealESRGANPairedDataset', 'phase': phase, 'scale': 2, 'gt_size': 16}
    return build_dataset(opt | {'dataroot_gt': 'gt', 'dataroot_lq': 'lq'} | options)


def test_folders_are_paired_and_cropped_alike(write):
    write(a=(24, 40), b=(30, 20))
    dataset = build()
    for index in (0, 1):
        item = dataset[index]
        assert set(item) == {'lq', 'gt', 'lq_path', 'gt_path'}
        assert item['gt'].shape == (3, 16, 16)
        assert torch.equal(item['gt'][:, ::2, ::2], item['lq'])


def test_a_list_names_both_images_of_a_pair(write, in_folder):
    write(a=(16, 16), b=(16, 16), c=(16, 16))
    in_folder(texts={'list.txt': 'c.png, a.png\n\na.png,b.png\n'})
    dataset = build('val', meta_info='list.txt')
    paths = [(dataset[i]['gt_path'], dataset[i]['lq_path']) for i in range(len(dataset))]
    assert paths == [('gt/c.png', 'lq/a.png'), ('gt/a.png', 'lq/b.png')]


@pytest.mark.parametrize('line', ['a.png', 'a.png a.png', 'a.png, a.png, a.png'])
def test_a_line_that_names_no_pair_is_shown(write, in_folder, line):
    write(a=(16, 16))
    in_folder(texts={'list.txt': f'a.png, a.png\n{line}\n'})
    with pytest.raises(ValueError, match=rf'list\.txt: a line is "<GT>, <LQ>", got "{line}"'):
        build(meta_info='list.txt')


def test_a_listed_image_that_is_not_there_is_named(write, in_folder):
    write(a=(16, 16))
    in_folder(texts={'list.txt': 'a.png, b.png\n'})
    with pytest.raises(FileNotFoundError, match=r'lq/b\.png'):
        build(meta_info='list.txt')


def test_a_list_under_the_name_that_other_datasets_read_is_refused(write):
    """It must not mean all files of the folder."""
    write(a=(16, 16))
    with pytest.raises(ValueError, match='meta_info_file is not read .* rename it to meta_info'):
        build('val', meta_info_file='list.txt')


def test_outside_training_the_gt_is_not_cut(write):
    write(a=(17, 19))
    assert build('val')[0]['gt'].shape == (3, 17, 19)
    assert build('val')[0]['lq'].shape == (3, 8, 9)


def test_options_stay_as_they_are_and_are_those_of_the_dataset(write, in_folder):
    write(a=(16, 16))
    in_folder(texts={'list.txt': 'a.png, a.png\n'})
    opt = {'type': 'RealESRGANPairedDataset', 'phase': 'val', 'scale': 2, 'name': 'x'}
    opt |= {'dataroot_gt': 'gt', 'dataroot_lq': 'lq', 'meta_info': 'list.txt'}
    before = dict(opt)
    assert build_dataset(opt).opt == opt == before

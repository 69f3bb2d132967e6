"""Batches made from decoded images in the memory of the device."""

import itertools
import random

import cv2
import numpy as np
import pytest
import torch
from runs import checkpoint, differences

from basicsr.data import build_dataloader, build_dataset
from basicsr.data.data_sampler import EnlargedSampler
from basicsr.data.device_set import DevicePixels, DeviceSetLoader


@pytest.fixture
def folders(tmp_path):
    """Options of pairs, GT 40 x 48 and LQ 20 x 24, one of them larger."""
    for kind, scale in (('gt', 2), ('lq', 1)):
        (tmp_path / kind).mkdir()
        for number in range(5):
            size = ((20 + 4 * (number == 3)) * scale, 24 * scale, 3)
            img = np.random.default_rng(number).integers(0, 256, size, np.uint8)
            cv2.imwrite(str(tmp_path / kind / f'{number}.png'), img)
    options = {f'dataroot_{kind}': str(tmp_path / kind) for kind in ('gt', 'lq')}
    return {'type': 'PairedImageDataset', 'phase': 'train', 'scale': 2, 'gt_size': 16, **options}


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'caches'))


def loader_of(folders, **options):
    opt = {**folders, 'batch_size_per_gpu': 3, 'num_worker_per_gpu': 0, **options}
    dataset = build_dataset(opt)
    sampler = EnlargedSampler(dataset, 1, 0, ratio=10)
    return build_dataloader(dataset, opt, num_gpu=0, sampler=sampler, seed=7, start=3)


def batches(loader, count=6):
    return list(itertools.islice(loader, count))


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert list(a) == list(b)
        assert all(
            torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
        )


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'color': 'gray'},
        {'color': 'y'},
        {'mean': [0.5] * 3, 'std': [0.2] * 3},
        {'uint8_batch': True},
        {'gt_size': 64, 'pad_small': True},
        {'gt_size': 40, 'use_rot': False},
        {'progressive': [{'gt_size': 8, 'iters': 2}, {'gt_size': 32, 'batch_size_per_gpu': 2}]},
    ],
    ids=str,
)
@pytest.mark.parametrize('gathers', [False, True])
def test_batches_are_those_of_a_loader_without_the_device(folders, options, gathers):
    plain = batches(loader_of(folders, **options))
    loader = loader_of(folders, cache='device', **options)
    assert isinstance(loader, DeviceSetLoader)
    assert loader.num_workers == 0
    if gathers:  # as on a GPU
        caches = [loader.dataset._read_gt._cache, loader.dataset._read_lq._cache]
        loader._pixels = DevicePixels(caches, torch.device('cpu'))
    assert_equal(batches(loader), plain)


def test_a_gather_finds_views_in_any_orientation_and_nothing_else(folders):
    dataset = build_dataset(folders | {'cache': 'device'})
    for index in range(5):
        dataset.stored(index)
    cache = dataset._read_gt._cache
    pixels = DevicePixels([dataset._read_lq._cache, cache], torch.device('cpu'))
    samples = [dataset.stored(i % 5, random.Random(i)) for i in range(40)]
    assert len({sample.how[-1] for sample in samples}) == 8
    views = [sample.view('gt') for sample in samples]
    assert torch.equal(pixels.gather(views), torch.from_numpy(np.stack(views)))
    assert pixels.gather([views[0], views[1].copy()]) is None


def test_a_mix_of_sets_is_made_on_the_device_too(folders):
    mix = {'type': 'ConcatDataset', 'name': 'mix', 'parts': [folders, folders], 'weights': [1, 3]}
    opt = {k: v for k, v in folders.items() if k not in ('type', 'dataroot_gt', 'dataroot_lq')}
    expected = batches(loader_of(opt | mix))
    found = batches(loader_of(opt | mix, cache='device'))
    assert_equal(found, expected)


def test_images_that_cannot_be_kept_are_refused_before_the_first_batch(folders, tmp_path):
    (tmp_path / 'gt/0.png').write_bytes(b'no image')
    with pytest.raises(ValueError, match=r'cache: device: 1 of 5 images are not in'):
        loader_of(folders, cache='device')


def test_other_datasets_are_refused(folders):
    class Own(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return {'lq': torch.zeros(3, 4, 4)}

        def __len__(self):
            return 4

    opt = {'phase': 'train', 'cache': 'device', 'batch_size_per_gpu': 2}
    with pytest.raises(ValueError, match='cache: device is for PairedImageDataset'):
        build_dataloader(Own(), opt, num_gpu=0, start=0)


def test_a_training_from_the_device_ends_with_the_same_bits(run, train_opt):
    ends = []
    for cache in ('off', 'device'):
        opt = train_opt(name=cache, train__total_iter=4, datasets__train__cache=cache)
        ends.append(checkpoint(run(opt), 'net_g_latest.pth'))
    assert differences(*ends) == []

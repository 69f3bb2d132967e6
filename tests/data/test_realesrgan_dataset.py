"""GT images with what is needed to degrade them."""

import json
import math
import random
import shutil
from collections import Counter

import cv2
import numpy as np
import pytest
import torch
from blind import DEGRADATION, KERNELS
from golden import recipe as inputs

from basicsr.data import SeededDataset, build_dataloader, build_dataset
from basicsr.data.data_sampler import EnlargedSampler
from basicsr.data.prefetch_dataloader import images_to_float
from basicsr.data.recipes import draw_recipe, draw_recipes
from basicsr.data.second_order import degrade, make_pairs
from basicsr.utils.img_process_util import USMSharp

RNG = np.random.default_rng(0)


@pytest.fixture
def images(in_folder):
    """Write images of these sizes (height, width) below a folder."""

    def write(*sizes, folder='gt', channels=3):
        shapes = [(*size, channels) for size in sizes]
        in_folder(
            {
                f'{folder}/{i}.png': RNG.integers(0, 256, shape, dtype=np.uint8)
                for i, shape in enumerate(shapes)
            }
        )

    return write


def options(**overrides):
    opt = {'type': 'RealESRGANDataset', 'phase': 'train', 'scale': 2, 'dataroot_gt': 'gt'}
    return opt | {'gt_size': 16, 'crop_size': 24} | KERNELS | overrides


def build(**overrides):
    return build_dataset(options(**overrides))


def stored(path):
    """An image as its items are: RGB, (c, h, w), in [0, 1]."""
    img = cv2.imread(path)[..., ::-1].transpose(2, 0, 1)
    return torch.from_numpy(img.astype(np.float32)) / 255


def test_an_item_has_the_image_three_kernels_and_what_they_were_drawn_from(images):
    images((40, 30))
    item = build(use_hflip=False, use_rot=False)[0]
    assert set(item) == {'gt', 'kernel1', 'kernel2', 'sinc_kernel', 'recipe', 'gt_path'}
    assert item['gt'].shape == (3, 24, 24) and item['gt'].dtype == torch.float32
    windows = stored('gt/0.png').unfold(1, 24, 1).unfold(2, 24, 1)
    assert (windows == item['gt'][:, None, None]).all(-1).all(-1).all(0).sum() == 1
    for name in ('kernel1', 'kernel2', 'sinc_kernel'):
        assert item[name].shape == (21, 21) and item[name].dtype == torch.float32
        assert item[name].sum().item() == pytest.approx(1, abs=1e-5)
    drawn = json.loads(item['recipe'])
    assert set(drawn) == {'seed', 'kernel1', 'kernel2', 'sinc_kernel'}
    assert item['gt_path'] == 'gt/0.png'


def test_the_patch_that_is_degraded_is_25_16_of_the_one_trained_on(images):
    images((500, 450))
    assert build(crop_size=None, gt_size=256, scale=4)[0]['gt'].shape == (3, 400, 400)
    assert build(crop_size=None, gt_size=30, scale=3)[0]['gt'].shape == (3, 48, 48)
    assert build(crop_size=300, gt_size=256, scale=4)[0]['gt'].shape == (3, 300, 300)


def test_crops_and_turns_are_random_and_can_be_switched_off(images):
    images((24, 24))
    dataset, plain = build(), build(use_hflip=False, use_rot=False)
    assert len({dataset[0]['gt'].numpy().tobytes() for _ in range(100)}) == 8
    assert torch.equal(plain[0]['gt'], stored('gt/0.png'))


@pytest.mark.parametrize('size', [(30, 10), (5, 60), (3, 2), (1, 1)])
def test_small_images_are_reflected(images, size):
    images(size)
    gt = build(use_hflip=False, use_rot=False)[0]['gt']
    assert gt.shape == (3, 24, 24)
    img = stored('gt/0.png')

    def source(place, length):  # back and forth between the two border pixels
        place %= max(2 * length - 2, 1)
        return min(place, 2 * length - 2 - place)

    if size[0] < 24 and size[1] < 24:
        rows, columns = ([source(i, length) for i in range(24)] for length in size)
        assert torch.equal(gt, img[:, rows][:, :, columns])
    else:
        assert set(gt.unique().tolist()) <= set(img.unique().tolist())


def test_the_largest_kernel_size_is_that_of_the_options(images):
    images((24, 24))
    dataset = build(blur_kernel_size=9, blur_kernel_size2=25)
    items = [dataset[0] for _ in range(60)]
    sizes = [json.loads(item['recipe']) for item in items]
    assert {drawn['kernel1']['kernel_size'] for drawn in sizes} == {7, 9}
    assert max(drawn['kernel2']['kernel_size'] for drawn in sizes) > 21
    assert items[0]['kernel1'].shape == (21, 21) and items[0]['kernel2'].shape == (25, 25)
    assert not any(item['kernel1'][:6].any() for item in items)


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        ({'gt_size': 15}, 'gt_size 15 and crop_size 24 must be multiples of scale 2'),
        ({'crop_size': 14}, 'crop_size must not be the smaller one'),
        ({'degrade_on': 'gpu'}, "degrade_on is 'gpu'; choose 'device' or 'worker'"),
        ({'phase': 'val'}, 'PairedImageDataset'),
        ({'blur_kernel_size': 20}, 'blur_kernel_size is 20'),
        ({'meta_info_file': 'list.txt'}, 'rename it to meta_info'),
        ({'color': 'grey'}, "color is 'grey'"),
        ({'dataroot_gt': ['gt', 'gt'], 'root_weights': [1]}, r'root_weights \[1\] .* 2 folders'),
        ({'root_weights': [-1]}, 'root_weights'),
        ({'mean': [0.5] * 3, 'std': [0.5] * 3}, 'cannot be degraded once they are normalised'),
    ],
)
def test_options_that_cannot_be_are_refused_at_the_start(images, overrides, message):
    images((24, 24))
    with pytest.raises(ValueError, match=message):
        build(**overrides)


@pytest.mark.parametrize(
    ('name', 'where'), [('kernel_prob2', 'device'), ('gt_size', 'device'), ('jpeg_range', 'worker')]
)
def test_a_missing_option_is_named_with_its_section(images, name, where):
    images((24, 24))
    opt = options(**DEGRADATION, degrade_on=where)
    del opt[name]
    with pytest.raises(KeyError, match=rf"datasets\.train .*needs the option '{name}'"):
        build_dataset(opt)


def test_options_can_be_used_again_and_stay_as_they_are(images):
    images((24, 24))
    opt = options(io_backend={'type': 'disk'})
    before = json.dumps(opt)
    for _ in range(2):
        build_dataset(opt)[0]
    assert json.dumps(opt) == before


# where images come from


def test_a_list_of_names_may_have_further_columns(images, in_folder):
    images(*[(24, 24)] * 4)
    in_folder(texts={'list.txt': '2.png (24,24,3)\n\n0.png\n'})
    assert [build(meta_info='list.txt')[i]['gt_path'] for i in (0, 1)] == ['gt/2.png', 'gt/0.png']


def test_a_list_that_names_what_is_not_there_is_an_error_with_the_name(images, in_folder):
    images((24, 24))
    in_folder(texts={'list.txt': '0.png\n7.png\n'})
    with pytest.raises(FileNotFoundError, match=r'1 listed files do not exist: gt/7\.png'):
        build(meta_info='list.txt')
    with pytest.raises(FileNotFoundError, match=r'none\.txt'):
        build(meta_info='none.txt')


def test_an_empty_or_missing_folder_is_an_error_with_its_name(in_folder, tmp_path):
    in_folder()
    with pytest.raises(FileNotFoundError, match='no folder gt'):
        build()
    (tmp_path / 'gt').mkdir()
    with pytest.raises(ValueError, match='no images in gt'):
        build()


def seen(dataset, epochs):
    """How often each image is seen in so many epochs, by its path."""
    sampler, counts = EnlargedSampler(dataset, 1, 0, seed=3), Counter()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, index in enumerate(sampler):
            random.seed(f'{epoch}/{number}')
            counts[dataset[index]['gt_path']] += 1
    return counts


@pytest.mark.parametrize(
    ('weights', 'length'), [(None, 7), ([1, 1], 7), ([2, 1], 10), ([0, 3], 12), ([1, 0.5], 5)]
)
def test_folders_have_their_weights_in_an_epoch(images, weights, length):
    images(*[(24, 24)] * 3, folder='a')
    images(*[(24, 24)] * 4, folder='b')
    dataset = build(dataroot_gt=['a', 'b'], root_weights=weights)
    counts = seen(dataset, 1)
    assert len(dataset) == counts.total() == length
    for folder, weight in zip('ab', weights or [1, 1], strict=True):
        images_of_it = [counts[f'{folder}/{i}.png'] for i in range(3 if folder == 'a' else 4)]
        assert sum(images_of_it) == len(images_of_it) * weight
        assert max(images_of_it) <= math.ceil(weight) and min(images_of_it) >= math.floor(weight)


@pytest.mark.parametrize(('count', 'weight', 'length'), [(5, 0.4, 2), (3, 0.5, 2), (1, 0.3, 1)])
def test_no_image_is_left_out_by_a_fraction(images, count, weight, length):
    images(*[(24, 24)] * count)
    dataset = build(root_weights=[weight])
    counts = seen(dataset, 60)
    assert len(dataset) == length
    assert counts.total() == 60 * length
    assert len(counts) == count and min(counts.values()) > 60 * length / count / 2


def test_sub_folders_are_read_on_request(images):
    images((24, 24), folder='gt')
    images((24, 24), folder='gt/below')
    assert (len(build()), len(build(recursive=True))) == (1, 2)


def test_an_lmdb_gives_the_same_images_as_the_files(in_folder, tmp_path):
    in_folder()
    shutil.copytree(inputs.HERE / 'lmdb' / 'gt.lmdb', tmp_path / 'gt.lmdb')
    opt = {'dataroot_gt': 'gt.lmdb', 'io_backend': {'type': 'lmdb'}}
    dataset = build(**opt, crop_size=16, gt_size=8)
    keys = [line.split('.')[0] for line in (tmp_path / 'gt.lmdb/meta_info.txt').open()]
    assert len(dataset) == len(keys)
    assert [dataset[i]['gt_path'] for i in range(len(keys))] == keys
    from basicsr.utils.file_client import FileClient

    client = FileClient('lmdb', db_paths=['gt.lmdb'], client_keys=['gt'])
    img = cv2.imdecode(np.frombuffer(client.get(keys[0], 'gt'), np.uint8), cv2.IMREAD_COLOR)
    colours = {tuple(pixel) for pixel in (img[..., ::-1].reshape(-1, 3)).tolist()}
    gt = (dataset[0]['gt'] * 255).round().int().flatten(1).T.tolist()
    assert {tuple(pixel) for pixel in gt} <= colours


def test_a_cache_and_bytes_change_no_value(images, tmp_path):
    images((24, 40), (30, 24))
    kinds = {
        'plain': {},
        'cache': {'cache': str(tmp_path / 'cache')},
        'bytes': {'uint8_batch': True},
    }
    found = {}
    for kind, overrides in kinds.items():
        dataset = SeededDataset(build(**overrides), 5)
        found[kind] = [images_to_float(dataset[n, n % 2]) for n in (0, 1, 0, 1)]
    for kind in ('cache', 'bytes'):
        for item, plain in zip(found[kind], found['plain'], strict=True):
            assert item['recipe'] == plain['recipe']
            assert all(
                torch.equal(item[k], v) for k, v in plain.items() if isinstance(v, torch.Tensor)
            )
    assert build(uint8_batch=True)[0]['gt'].dtype == torch.uint8


def test_gray_images_have_one_channel_on_request(images):
    images((30, 30), channels=1)
    assert build(color='gray')[0]['gt'].shape == (1, 24, 24)
    assert build()[0]['gt'].shape == (3, 24, 24)
    item = build(color='gray', degrade_on='worker', **DEGRADATION)[0]
    assert item['lq'].shape == (1, 8, 8) and item['gt'].shape == (1, 16, 16)


# one sample, wherever it is made


@pytest.mark.parametrize('gt_usm', [None, False, True])
def test_workers_and_device_make_the_same_bits(images, gt_usm):
    images((40, 30), (24, 24))
    opt = options(**DEGRADATION, gt_usm=gt_usm)
    device, worker = (
        SeededDataset(build_dataset(opt | {'degrade_on': where}), 3)
        for where in ('device', 'worker')
    )
    items = [device[number, number % 2] for number in range(4)]
    batch = torch.utils.data.default_collate(items)
    seeds = [json.loads(text)['seed'] for text in batch['recipe']]
    recipes = draw_recipes(opt, 4, seeds)
    kernels = [batch[name] for name in ('kernel1', 'kernel2', 'sinc_kernel')]
    lq, gt = make_pairs(batch['gt'], kernels, recipes, opt, USMSharp())
    for number, item in enumerate(items):
        other = worker[number, number % 2]
        assert set(other) == {'lq', 'gt', 'recipe', 'gt_path'}
        assert torch.equal(other['lq'], lq[number]) and torch.equal(other['gt'], gt[number])
        whole = json.loads(other['recipe'])
        assert whole == json.loads(item['recipe']) | draw_recipe(opt, whole['seed'])


@pytest.mark.parametrize(
    ('gt_usm', 'source_is_sharp', 'target_is_sharp'),
    [(None, True, False), (False, False, False), (True, True, True)],
)
def test_what_is_degraded_is_sharpened_unless_told_not_to(
    images, gt_usm, source_is_sharp, target_is_sharp
):
    """And the target only on request."""
    images((24, 24))
    opt = options(**DEGRADATION, gt_usm=gt_usm, gt_size=24)
    item = SeededDataset(build_dataset(opt), 3)[0, 0]
    made = SeededDataset(build_dataset(opt | {'degrade_on': 'worker'}), 3)[0, 0]
    plain, sharp = item['gt'][None], USMSharp()(item['gt'][None])
    assert torch.equal(made['gt'], (sharp if target_is_sharp else plain)[0])
    kernels = [item[name][None] for name in ('kernel1', 'kernel2', 'sinc_kernel')]
    source = sharp if source_is_sharp else plain
    assert torch.equal(made['lq'], degrade(source, *kernels, [json.loads(made['recipe'])], 2)[0])


@pytest.mark.parametrize('degrade_on', ['device', 'worker'])
def test_a_sample_is_the_same_whoever_makes_it(images, degrade_on):
    """Its number decides, not the worker or what was made before."""
    images(*[(30, 30)] * 3)
    opt = options(**DEGRADATION, degrade_on=degrade_on, batch_size_per_gpu=2)
    found = []
    for workers, start in ((0, 0), (2, 0), (0, 4)):
        dataset = build_dataset(opt)
        loader = build_dataloader(
            dataset,
            opt | {'num_worker_per_gpu': workers},
            0,
            False,
            EnlargedSampler(dataset, 1, 0, seed=1),
            seed=1,
            start=start,
        )
        batches = iter(loader)
        found.append([next(batches) for _ in range(4 - start // 2)])
    plain, with_workers, later = found
    for a, b in [*zip(plain, with_workers, strict=True), *zip(plain[2:], later, strict=True)]:
        assert a['recipe'] == b['recipe'] and a['gt_path'] == b['gt_path']
        assert all(torch.equal(a[k], b[k]) for k in a if isinstance(a[k], torch.Tensor))


@pytest.mark.parametrize('scale', [1, 2, 3, 4])
def test_lq_and_gt_show_the_same_place(images, scale, in_folder):
    """Of an image that changes slowly, the LQ is the GT reduced, noise aside."""
    ramp = np.linspace(0, 255, 60)[:, None] * np.ones((1, 60))
    ramp = np.stack([ramp, ramp.T, np.full_like(ramp, 128)], -1).astype(np.uint8)
    in_folder({'gt/0.png': ramp})
    clean = {'final_sinc_prob': 0}
    for stage in ('', '2'):
        clean |= {f'noise_range{stage}': [0, 0], f'gaussian_noise_prob{stage}': 1}
        clean |= {f'resize_range{stage}': [1, 1], f'jpeg_range{stage}': [98, 98]}
        clean |= {f'blur_sigma{stage}': [0.2, 0.2], f'sinc_prob{stage}': 0}
    opt = {'degrade_on': 'worker', 'scale': scale, 'gt_size': 24, 'crop_size': 48, 'gt_usm': False}
    dataset = build(**(DEGRADATION | clean | opt))
    for _ in range(8):
        item = dataset[0]
        reduced = torch.nn.functional.avg_pool2d(item['gt'], scale)
        assert item['lq'].shape == reduced.shape
        # Displaced by one LQ pixel they would differ by scale / 60.
        assert (item['lq'] - reduced).mean((1, 2)).abs().max() < 0.1 * scale / 60

import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from golden import params, recipe
from runs import log_text
from tiff import tiff

from basicsr.data import build_dataset

RNG = np.random.default_rng(0)


def pair(height, width, scale=2, channels=3, dtype=np.uint8):
    """GT and LQ images; every LQ pixel is a block of the GT."""
    shape = (height // scale, width // scale, channels)
    lq = RNG.integers(0, np.iinfo(dtype).max, shape).astype(dtype)
    return lq.repeat(scale, 0).repeat(scale, 1), lq


@pytest.fixture
def write(in_folder):
    """Write pairs ``{name: (gt, lq)}`` below gt/ and lq/."""

    def write_pairs(**pairs):
        for name, (gt, lq) in pairs.items():
            in_folder({f'gt/{name}.png': gt, f'lq/{name}.png': lq})

    return write_pairs


def build(phase='train', **options):
    opt = {'type': 'PairedImageDataset', 'phase': phase, 'scale': 2, 'gt_size': 16}
    return build_dataset(opt | {'dataroot_gt': 'gt', 'dataroot_lq': 'lq'} | options)


@pytest.mark.parametrize(
    'case',
    params('data', lambda c: c.get('opt', {}).get('type') == 'PairedImageDataset'),
)
def test_items_equal_the_reference(case, dataset_output):
    assert recipe.compare(case, dataset_output(case)) is None


def test_training_crops_and_turns_both_images_alike(write):
    write(a=pair(24, 40))
    dataset = build()
    crops = set()
    for _ in range(30):
        item = dataset[0]
        assert item['gt'].shape == (3, 16, 16) and item['lq'].shape == (3, 8, 8)
        assert torch.equal(item['gt'][:, ::2, ::2], item['lq'])
        crops.add(item['lq'].numpy().tobytes())
    assert len(crops) > 20


def test_crops_and_turns_can_be_switched_off(write):
    write(a=pair(16, 16))
    dataset = build(use_hflip=False, use_rot=False)
    assert torch.equal(dataset[0]['gt'], build('val')[0]['gt'])
    assert len({build()[0]['lq'].numpy().tobytes() for _ in range(200)}) == 8


def test_items_are_rgb_and_paths_are_those_of_the_files(write):
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 2] = 255
    write(a=(red, red[::2, ::2]))
    item = build('val')[0]
    assert item['gt'][:, 0, 0].tolist() == [1, 0, 0]
    assert (item['gt_path'], item['lq_path']) == ('gt/a.png', 'lq/a.png')
    assert build('val', color='y')[0]['lq'][0, 0, 0] * 255 == pytest.approx(81.481, abs=1e-3)


def test_options_can_be_used_again_and_again(write):
    write(a=pair(16, 16))
    opt = {
        'type': 'PairedImageDataset',
        'dataroot_gt': 'gt',
        'dataroot_lq': 'lq',
        'scale': 2,
        'phase': 'val',
        'io_backend': {'type': 'disk'},
    }
    before = {**opt, 'io_backend': dict(opt['io_backend'])}
    items = [build_dataset(opt)[0] for _ in range(2)]
    assert torch.equal(items[0]['lq'], items[1]['lq'])
    assert opt == before


def test_a_missing_option_is_named_with_its_section():
    with pytest.raises(KeyError, match=r"datasets\.val.*PairedImageDataset needs .*'scale'"):
        build_dataset(
            {'type': 'PairedImageDataset', 'phase': 'val', 'dataroot_gt': '', 'dataroot_lq': ''}
        )


def test_a_crop_that_is_no_multiple_of_the_scale_is_refused_at_the_start(write):
    write(a=pair(32, 32, 4))
    with pytest.raises(ValueError, match='gt_size 30 is not a multiple of scale 4'):
        build(gt_size=30, scale=4)


# sizes


def test_an_image_smaller_than_the_crop_is_named_with_its_size(write):
    write(fine=pair(128, 128, 4), small=pair(40, 40, 4))
    dataset = build(gt_size=128, scale=4)
    assert dataset[0]['gt'].shape == (3, 128, 128)
    with pytest.raises(ValueError, match=r'40x40.*gt_size 128.*10x10.*32.*gt/small\.png'):
        dataset[1]


def test_small_images_are_mirrored_on_request(write):
    write(small=pair(40, 200, 4), wide=pair(8, 132, 4))
    dataset = build(gt_size=128, scale=4, pad_small=True)
    for index in range(2):
        item = dataset[index]
        assert item['gt'].shape == (3, 128, 128)
        assert torch.equal(item['gt'][:, ::4, ::4], item['lq'])


def test_a_pair_of_other_proportions_is_named_with_sizes_and_a_way_out(write):
    write(
        a=pair(96, 96, 4),
        b=(np.zeros((97, 96, 3)), np.zeros((24, 24, 3))),
        c=(np.zeros((64, 64, 3)), np.zeros((64, 64, 3))),
    )
    for options in ({'phase': 'train'}, {'phase': 'train', 'pad_small': True}, {'phase': 'val'}):
        dataset = build(**options, gt_size=96, scale=4)
        assert dataset[0]['lq'].shape == (3, 24, 24)
        with pytest.raises(ValueError, match=r'gt/c\.png \(64x64.* lq/c\.png .* 1 would match'):
            dataset[2]
    with pytest.raises(ValueError, match=r'gt/b\.png \(97x96.* lq/b\.png \(24x24\).* GT 96x96'):
        build(gt_size=96, scale=4)[1]


def test_outside_training_a_gt_with_a_remainder_is_cut_with_one_notice(write, caplog):
    gt = RNG.integers(0, 256, (101, 67, 3), dtype=np.uint8)
    write(a=(gt, gt[:100:4, :64:4]), b=(gt, gt[:100:4, :64:4]))
    dataset = build('val', scale=4)
    with caplog.at_level(logging.INFO):
        items = [dataset[index] for index in (0, 1, 0)]
    assert items[0]['gt'].shape == (3, 100, 64)
    assert torch.equal(items[1]['gt'][:, ::4, ::4], items[1]['lq'])
    notices = [message for message in caplog.messages if 'are cut' in message]
    assert len(notices) == 1
    assert 'gt/a.png (101x67 to 100x64)' in notices[0]


@pytest.mark.parametrize('size', [(104, 67), (99, 67), (101, 68), (101, 63)])
def test_a_gt_that_is_further_off_is_never_cut(write, size):
    write(a=(np.zeros((*size, 3)), np.zeros((25, 16, 3))))
    with pytest.raises(ValueError, match=f'{size[0]}x{size[1]}'):
        build('val', scale=4)[0]


# pairing


def test_unpaired_images_are_named_with_the_section_and_the_folders(write):
    write(a=pair(8, 8), b=pair(8, 8), c=pair(8, 8))
    Path('lq/b.png').unlink()
    with pytest.raises(ValueError, match=r'datasets\.val \(Set5\): .*gt has 3, lq has 2; .*lq: b'):
        build('val', name='Set5')


def test_folders_may_be_lists_and_nested(in_folder):
    pairs = {root: pair(16, 16) for root in 'AB'}
    for root, (gt, lq) in pairs.items():
        in_folder({f'gt/{root}/x/1.png': gt, f'lq/{root}/x/1.png': lq})
    dataset = build(
        'val', dataroot_gt=['gt/A', 'gt/B'], dataroot_lq=['lq/A', 'lq/B'], recursive=True
    )
    assert len(dataset) == 2
    for index, root in enumerate('AB'):
        item = dataset[index]
        assert item['gt_path'] == f'gt/{root}/x/1.png'
        wanted = pairs[root][1][..., ::-1].transpose(2, 0, 1) / 255
        assert np.allclose(item['lq'], wanted, atol=1e-6)
    with pytest.raises(ValueError, match='dataroot_gt has 2 folders, dataroot_lq 1'):
        build(dataroot_gt=['gt/A', 'gt/B'], dataroot_lq='lq/A')


def test_results_of_images_of_one_name_do_not_overwrite_each_other(run, train_opt, image_pairs):
    roots = [image_pairs(f'{name}/x', count=1) for name in 'AB']
    opt = train_opt(train__total_iter=1, val__save_img=True)
    opt['datasets']['val'].update(
        dataroot_gt=[gt for gt, _ in roots], dataroot_lq=[lq for _, lq in roots]
    )
    folder = run(opt) / 'visualization'
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob('*.png'))
    assert names == [f'{root}/x/lq/0000/0000_1.png' for root in 'AB']


def test_equal_folders_are_warned_of(write, caplog):
    write(a=pair(8, 8))
    build('val', dataroot_lq='gt', scale=1)
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        'dataroot_lq is dataroot_gt (gt): LQ and GT are equal.'
    ]


def test_a_list_under_the_name_that_other_datasets_read_is_refused(write):
    """It must not mean all files of the folder."""
    write(a=pair(8, 8))
    with pytest.raises(ValueError, match=r'datasets\.val .*meta_info is not read'):
        build('val', meta_info='list.txt')


@pytest.mark.parametrize('kind', ['PairedImageDataset', 'RealESRGANPairedDataset'])
def test_a_list_with_a_missing_file_is_named_with_its_line(write, in_folder, kind):
    write(a=pair(8, 8))
    line = {'PairedImageDataset': 'b.png', 'RealESRGANPairedDataset': 'a.png, b.png'}[kind]
    in_folder(texts={'list.txt': f'{line.replace("b", "a")}\n\n{line}\n'})
    key = {'PairedImageDataset': 'meta_info_file', 'RealESRGANPairedDataset': 'meta_info'}[kind]
    with pytest.raises(FileNotFoundError, match=r'list\.txt: .*lq/b\.png \(line 3\)'):
        build(type=kind, **{key: 'list.txt'})


# channels and depth


def test_one_channel_is_kept_or_repeated_as_the_options_say(write):
    gray, colour = pair(8, 8, channels=1), pair(8, 8)
    write(gray=gray, colour=colour)
    for color, channels in ((None, 3), ('gray', 1), ('y', 1)):
        dataset = build('val', color=color)
        assert {item['lq'].shape[0] for item in (dataset[0], dataset[1])} == {channels}
    item = build('val')[1]
    assert torch.equal(item['lq'][0], item['lq'][2])
    assert np.allclose(item['lq'][0], gray[1][..., 0] / 255, atol=1e-6)


@pytest.mark.parametrize(('color', 'channels'), [('gray', 1), ('gray', 3), ('y', 3)])
def test_one_channel_is_trained_and_saved_by_options_alone(
    run, train_opt, image_pairs, color, channels
):
    gt, lq = image_pairs('one', count=4, channels=channels)
    opt = train_opt(train__total_iter=5, val__save_img=True)
    opt['network_g'].update(num_in_ch=1, num_out_ch=1)
    opt['val']['metrics']['ssim'] = {'type': 'calculate_ssim', 'crop_border': 2}
    for dataset in opt['datasets'].values():
        dataset.update(dataroot_gt=gt, dataroot_lq=lq, color=color)
    folder = run(opt)
    saved = cv2.imread(str(folder / 'visualization/0003/0003_5.png'), cv2.IMREAD_UNCHANGED)
    assert saved.shape == (32, 40)
    assert 'ssim: ' in log_text(folder)


def test_links_that_lead_nowhere_are_missed_and_not_left_out(image_pairs):
    gt, lq = image_pairs('linked', 3)
    for folder in (gt, lq):
        file = Path(folder) / '0001.png'
        file.unlink()
        file.symlink_to('nowhere.png')
    opt = {'phase': 'val', 'scale': 2, 'dataroot_gt': gt, 'dataroot_lq': lq, 'name': 'x'}
    dataset = build_dataset({'type': 'PairedImageDataset', **opt, 'io_backend': {'type': 'disk'}})
    assert len(dataset) == 3
    with pytest.raises(OSError, match=r'0001\.png'):
        dataset[1]


def test_16_bit_images_keep_their_precision(write):
    write(a=(np.full((4, 4, 3), 32769, np.uint16), np.full((2, 2, 3), 32768, np.uint16)))
    item = build('val')[0]
    assert item['gt'].unique().item() == pytest.approx(32769 / 65535, abs=1e-7)
    assert item['lq'].unique().item() == pytest.approx(32768 / 65535, abs=1e-7)


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.float32])
def test_a_turned_tiff_stays_beside_its_partner(in_folder, tmp_path, dtype):
    in_folder()
    white = {np.uint8: 255, np.uint16: 65535, np.float32: 1}[dtype]
    lq = (RNG.random((8, 8, 3)) * white).astype(dtype)
    for name, img, orientation in (('gt', lq.repeat(2, 0).repeat(2, 1), 6), ('lq', lq, 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'a.tif').write_bytes(tiff(img, orientation=orientation))
    item = build('val')[0]
    assert torch.equal(item['gt'][:, ::2, ::2], item['lq'])
    assert torch.allclose(item['lq'], torch.from_numpy(lq.transpose(2, 0, 1) / np.float32(white)))


def test_normalisation_is_by_rgb_channel(write):
    gt, lq = pair(8, 8)
    write(a=(gt, lq))
    plain, scaled = build('val')[0], build('val', mean=[0.1, 0.2, 0.3], std=[1, 2, 4])[0]
    for key in ('gt', 'lq'):
        for channel, (mean, std) in enumerate([(0.1, 1), (0.2, 2), (0.3, 4)]):
            assert torch.allclose(scaled[key][channel], (plain[key][channel] - mean) / std)


@pytest.mark.parametrize('workers', [0, 1])
def test_transparency_is_dropped_with_one_warning_a_run(run, train_opt, palette_png, workers):
    opt = train_opt(
        train__total_iter=5, datasets__train__num_worker_per_gpu=workers, val__val_freq=None
    )
    train = opt['datasets']['train']
    for key, size in (('dataroot_gt', (32, 40)), ('dataroot_lq', (16, 20))):
        rgba = RNG.integers(0, 256, (*size, 4), dtype=np.uint8)
        cv2.imwrite(f'{train[key]}/0001.png', rgba)
        with open(f'{train[key]}/0003.png', 'wb') as file:
            file.write(palette_png(*size))
    assert log_text(run(opt)).count('Transparency is dropped') == 1


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('content', [b'', b'100 bytes of the image'])
def test_a_broken_image_ends_the_run_with_its_name(run, train_opt, workers, content):
    opt = train_opt(datasets__train__num_worker_per_gpu=workers)
    path = f'{opt["datasets"]["train"]["dataroot_lq"]}/0002.png'
    with open(path, 'r+b') as file:
        file.truncate(100 if content else 0)
    with pytest.raises(ValueError, match=f'cannot read {path}: ') as info:
        run(opt)
    # The frames of the error would keep the workers, until the garbage collector waits for them.
    info.value.__traceback__ = None
    del info

import json
import logging
import math
import os
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from golden import call, params, recipe, target
from tiff import tiff

from basicsr.data import data_util
from basicsr.data.data_util import (
    ImageReader,
    as_float,
    check_image_options,
    duf_downsample,
    generate_frame_indices,
    image_name,
    list_images,
    names_from_meta_info_file,
    paired_paths_from_folder,
    paired_paths_from_lmdb,
    paired_paths_from_meta_info_file,
    paths_from_folder,
    paths_from_lmdb,
    read_image,
    read_img_seq,
)
from basicsr.data.shared import SaidOnce
from basicsr.utils.file_client import FileClient
from basicsr.utils.image_header import has_alpha
from basicsr.utils.lmdb_util import make_lmdb_from_imgs

RNG = np.random.default_rng(0)


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def png(img):
    return cv2.imencode('.png', img)[1].tobytes()


# the reference


@pytest.mark.parametrize(
    'case',
    params('data', lambda c: c['kind'] == 'call' and 'data_util' in c['target']),
)
def test_function_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


@pytest.mark.parametrize('case', params('data', lambda c: c['kind'] == 'paths'))
def test_paths_equal_the_reference(case, in_folder):
    in_folder(case['files'], case.get('texts'))
    lines = [json.dumps(entry, sort_keys=True) for entry in target(case)(*case['args'])]
    assert recipe.compare(case, '\n'.join(lines)) is None


@pytest.mark.parametrize('case', params('data', lambda c: c['kind'] == 'read_seq'))
def test_clip_equals_the_reference(case, in_folder):
    in_folder(case['files'])
    out = read_img_seq(*case['args'], **case.get('kwargs', {}))
    assert recipe.compare(case, out) is None


# Windows of five frames in a clip of ten, as upstream gives them.
WINDOWS = {
    'replicate': [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [6, 7, 8, 9, 9], [7, 8, 9, 9, 9]],
    'reflection': [[2, 1, 0, 1, 2], [1, 0, 1, 2, 3], [6, 7, 8, 9, 8], [7, 8, 9, 8, 7]],
    'reflection_circle': [[4, 3, 0, 1, 2], [4, 0, 1, 2, 3], [6, 7, 8, 9, 5], [7, 8, 9, 6, 5]],
    'circle': [[3, 4, 0, 1, 2], [4, 0, 1, 2, 3], [6, 7, 8, 9, 5], [7, 8, 9, 5, 6]],
}


@pytest.mark.parametrize('padding', WINDOWS)
def test_frame_windows_equal_those_of_upstream(padding):
    windows = [generate_frame_indices(frame, 10, 5, padding) for frame in (0, 1, 8, 9)]
    assert windows == WINDOWS[padding]


def test_an_even_window_and_an_unknown_padding_are_refused():
    with pytest.raises(ValueError, match='odd, got 4'):
        generate_frame_indices(0, 10, 4)
    with pytest.raises(ValueError, match='reflect.*choose from replicate, reflection, '):
        generate_frame_indices(0, 10, 5, 'reflect')


@pytest.mark.parametrize(
    ('scale', 'shape', 'total', 'mean_square', 'samples'),
    [
        (2, (16, 18), 863.952544, 0.33101, [0.752284, 0.271125, 0.670767, 0.908611]),
        (3, (11, 12), 395.983692, 0.299695, [0.834114, 0.459892, 0.776563, 0.831196]),
        (4, (8, 9), 215.979801, 0.275039, [0.839217, 0.711448, 0.606532, 0.400679]),
    ],
)
def test_duf_downsampling_gives_the_numbers_of_upstream(scale, shape, total, mean_square, samples):
    x = torch.from_numpy(0.5 + 0.5 * np.sin(0.37 * np.arange(2 * 3 * 32 * 36)))
    out = duf_downsample(x.float().view(2, 3, 32, 36), scale=scale)
    assert out.shape == (2, 3, *shape)
    assert float(out.sum()) == pytest.approx(total, rel=1e-6)
    assert float(out.square().mean()) == pytest.approx(mean_square, rel=1e-4)
    last = out.numel() - 1
    values = [float(out.flatten()[j * last // 6]) for j in range(4)]
    assert values == pytest.approx(samples, abs=2e-6)


def test_duf_downsampling_refuses_other_scales():
    with pytest.raises(ValueError, match='2, 3 or 4, got 5'):
        duf_downsample(torch.zeros(1, 3, 32, 32), scale=5)


# finding


def test_images_are_listed_in_order_without_stray_and_hidden_files(tmp_path):
    touch(tmp_path, 'b.PNG', 'a.jpg', 'c.webp', 'Thumbs.db', '.hidden.png', 'sub/d.tiff')
    assert list_images(tmp_path) == ['a.jpg', 'b.PNG', 'c.webp']
    assert list_images(tmp_path, recursive=True) == ['a.jpg', 'b.PNG', 'c.webp', 'sub/d.tiff']
    assert paths_from_folder(str(tmp_path))[0] == str(tmp_path / 'a.jpg')


def test_a_missing_folder_or_list_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere'):
        list_images(tmp_path / 'nowhere')
    with pytest.raises(FileNotFoundError, match=r'nowhere\.txt'):
        names_from_meta_info_file(tmp_path / 'nowhere.txt')
    with pytest.raises(FileNotFoundError, match=r'x\.lmdb/meta_info\.txt'):
        paths_from_lmdb(tmp_path / 'x.lmdb')


def test_blank_lines_of_a_list_are_no_images(tmp_path):
    file = tmp_path / 'meta.txt'
    file.write_text('a.png (4,6,3)\n\n   \nsub/b.png\n')
    assert names_from_meta_info_file(file) == ['a.png', 'sub/b.png']
    pairs = paired_paths_from_meta_info_file(['lq', 'gt'], ['lq', 'gt'], str(file), '{}x4')
    assert pairs[1] == {'lq_path': 'lq/bx4.png', 'gt_path': 'gt/sub/b.png'}
    assert len(pairs) == 2


def test_pairs_are_sorted_and_extensions_may_differ(tmp_path):
    touch(tmp_path / 'gt', 'b.png', 'a.jpg', 'c.v1.png', 'notes.txt')
    touch(tmp_path / 'lq', 'ax2.png', 'bx2.png', 'c.v1x2.bmp', '.DS_Store')
    folders = [str(tmp_path / 'lq'), str(tmp_path / 'gt')]
    pairs = paired_paths_from_folder(folders, ['lq', 'gt'], '{}x2')
    names = [tuple(os.path.basename(path) for path in pair.values()) for pair in pairs]
    assert names == [('ax2.png', 'a.jpg'), ('bx2.png', 'b.png'), ('c.v1x2.bmp', 'c.v1.png')]


def test_two_images_of_one_stem_pair_by_extension(tmp_path):
    for folder in ('gt', 'lq'):
        touch(tmp_path / folder, 'a.png', 'a.jpg')
    folders = [str(tmp_path / 'lq'), str(tmp_path / 'gt')]
    for pair in paired_paths_from_folder(folders, ['lq', 'gt'], '{}'):
        assert os.path.basename(pair['lq_path']) == os.path.basename(pair['gt_path'])
    os.remove(tmp_path / 'lq' / 'a.jpg')
    with pytest.raises(ValueError, match='has 2, .* has 1; not in .*: a'):
        paired_paths_from_folder(folders, ['lq', 'gt'], '{}')


def test_sub_folders_pair_by_relative_path(tmp_path):
    touch(tmp_path / 'gt', '1.png', 'x/1.png', 'y/1.png')
    touch(tmp_path / 'lq', '1x4.png', 'x/1x4.png', 'y/1x4.png')
    folders = [str(tmp_path / 'lq'), str(tmp_path / 'gt')]
    pairs = paired_paths_from_folder(folders, ['lq', 'gt'], '{}x4', recursive=True)
    relative = [os.path.relpath(pair['lq_path'], folders[0]) for pair in pairs]
    assert relative == ['1x4.png', 'x/1x4.png', 'y/1x4.png']


def test_unmatched_images_of_both_sides_are_named_with_folders_and_counts(tmp_path):
    touch(tmp_path / 'gt', 'a.png', 'b.png', 'c.png')
    touch(tmp_path / 'lq', 'a.png', 'z.png')
    folders = [str(tmp_path / 'lq'), str(tmp_path / 'gt')]
    with pytest.raises(ValueError) as info:
        paired_paths_from_folder(folders, ['lq', 'gt'], '{}')
    text = str(info.value)
    assert f'{folders[1]} has 3, {folders[0]} has 2' in text
    assert f'not in {folders[0]}: b, c' in text
    assert f'without a partner in {folders[1]}: z.png' in text
    touch(tmp_path / 'lq', *(f'{i}.png' for i in range(9)))
    with pytest.raises(ValueError, match=r'0\.png, 1\.png, 2\.png and 7 more'):
        paired_paths_from_folder(folders, ['lq', 'gt'], '{}')


def test_empty_folders_are_an_error(tmp_path):
    (tmp_path / 'gt').mkdir()
    with pytest.raises(ValueError, match='no images'):
        paired_paths_from_folder([str(tmp_path / 'gt')] * 2, ['lq', 'gt'], '{}')


def test_pairing_takes_time_proportional_to_the_number_of_files(monkeypatch):
    names = [f'{i:06d}.png' for i in range(20000)]
    monkeypatch.setattr(data_util, 'list_images', lambda folder, recursive: names)
    begin = time.process_time()
    assert len(paired_paths_from_folder(['lq', 'gt'], ['lq', 'gt'], '{}')) == 20000
    assert time.process_time() - begin < 5  # a list searched for each name takes minutes


# LMDB lists; reading LMDBs is tested with the file client


def lmdb_list(folder, *lines):
    folder.mkdir()
    (folder / 'meta_info.txt').write_text('\n'.join(lines))
    return str(folder)


def test_lmdb_keys_keep_dots_blanks_and_folders(tmp_path):
    folder = lmdb_list(
        tmp_path / 'a.lmdb',
        'img.v1_a.png (4,6,3) 1',
        'img.v1_b.png (4,6,3) 1',
        'my photo.png (4,6,3) 1',
        '000/00000000.png (4,6,3) 1',
        '',
        'upper.PNG 1',
        'bare',
    )
    keys = ['img.v1_a', 'img.v1_b', 'my photo', '000/00000000', 'upper', 'bare']
    assert paths_from_lmdb(folder) == keys


def test_lmdb_pairs_are_sorted_and_must_agree(tmp_path):
    lq = lmdb_list(tmp_path / 'lq.lmdb', 'b.png (4,6,3) 1', 'a.png (4,6,3) 1')
    gt = lmdb_list(tmp_path / 'gt.lmdb', 'a.png (16,24,3) 1', 'b.png (16,24,3) 1')
    pairs = paired_paths_from_lmdb([lq, gt], ['lq', 'gt'])
    assert pairs == [{'lq_path': key, 'gt_path': key} for key in 'ab']
    other = lmdb_list(tmp_path / 'other.lmdb', 'a.png (16,24,3) 1', 'c.png (16,24,3) 1')
    with pytest.raises(ValueError, match=r'not in .*lq\.lmdb: c; not in .*other\.lmdb: b'):
        paired_paths_from_lmdb([lq, other], ['lq', 'gt'])
    with pytest.raises(ValueError, match=r"ending '\.lmdb'"):
        paths_from_lmdb(tmp_path)


# names in results


@pytest.mark.parametrize(
    ('path', 'root', 'name'),
    [
        ('lq/baby.png', 'lq', 'baby'),
        ('lq/a.b.png', 'lq', 'a.b'),
        ('lq/x/1.png', 'lq', 'x/1'),
        ('a/LR/1.png', ['a/LR', 'b/LR'], 'a/LR/1'),
        ('b/LR/1.png', ['a/LR', 'b/LR'], 'b/LR/1'),
        ('a/1.png', ['a'], '1'),
        ('elsewhere/1.png', 'lq', '1'),
        ('elsewhere/1.png', None, '1'),
    ],
)
def test_the_name_of_an_image_is_its_path_below_the_root(path, root, name):
    assert image_name(path, {'dataroot_lq': root}) == name
    assert image_name(os.path.abspath(path), {'dataroot_lq': root}) == name


def test_the_name_of_an_lmdb_image_is_its_key():
    opt = {'dataroot_lq': 'lq.lmdb', 'io_backend': {'type': 'lmdb'}}
    assert image_name('000/img.v1', opt) == '000/img.v1'


# reading


def test_an_image_is_read_as_stored(tmp_path):
    client = FileClient('disk')
    for dtype in (np.uint8, np.uint16):
        img = RNG.integers(0, np.iinfo(dtype).max, (4, 5, 3)).astype(dtype)
        cv2.imwrite(str(tmp_path / 'a.png'), img)
        out = read_image(client, str(tmp_path / 'a.png'))
        assert out.dtype == dtype and np.array_equal(out, img)


def test_gray_files_have_three_channels_unless_one_is_asked_for(tmp_path):
    path, client = str(tmp_path / 'a.png'), FileClient('disk')
    gray = RNG.integers(0, 256, (4, 5), dtype=np.uint8)
    cv2.imwrite(path, gray)
    assert np.array_equal(read_image(client, path), np.repeat(gray[..., None], 3, 2))
    assert np.array_equal(read_image(client, path, color='gray'), gray[..., None])


def test_numbers_are_scaled_by_their_depth():
    assert as_float(np.full((1, 1, 3), 32768, np.uint16)).ravel() == pytest.approx(0.5, abs=1e-5)
    assert as_float(np.full((1, 1, 3), 128, np.uint8)).ravel() == pytest.approx(128 / 255)
    assert as_float(np.full((1, 1, 3), 0.25, np.float32)).ravel() == pytest.approx(0.25)


def test_one_image_in_8_and_16_bits_differs_by_the_quantisation_alone():
    img = RNG.integers(0, 65536, (64, 64, 3)).astype(np.uint16)
    small = np.rint(img / 257).astype(np.uint8)
    mse = float(np.square(as_float(img) - as_float(small)).mean())
    assert -10 * np.log10(mse) == pytest.approx(58.92, abs=0.1)


def test_luma_is_that_of_bt601_for_blue_green_red_order():
    colours = {'red': (0, 0, 255), 'green': (0, 255, 0), 'blue': (255, 0, 0), 'white': (255,) * 3}
    luma = {n: as_float(np.uint8([[bgr]]), 'y') * 255 for n, bgr in colours.items()}
    assert luma['red'].shape == (1, 1, 1)
    for name, value in {'red': 81.481, 'green': 144.553, 'blue': 40.966, 'white': 235}.items():
        assert luma[name].item() == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize('content', [b'', b'no image', png(np.zeros((32, 32, 3), np.uint8))[:60]])
def test_a_broken_image_is_named(tmp_path, content):
    path = tmp_path / 'broken.png'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'cannot read .*broken\.png: '):
        read_image(FileClient('disk'), str(path), said=SaidOnce())


def test_a_missing_file_or_key_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'gone\.png'):
        read_image(FileClient('disk'), str(tmp_path / 'gone.png'))
    cv2.imwrite(str(tmp_path / 'a.png'), np.zeros((4, 4, 3), np.uint8))
    make_lmdb_from_imgs(tmp_path, tmp_path / 'gt.lmdb', ['a.png'], ['a'])
    client = FileClient('lmdb', db_paths=str(tmp_path / 'gt.lmdb'), client_keys='gt')
    with pytest.raises(FileNotFoundError, match="'gt' has no key 'baby'") as info:
        read_image(client, 'baby', 'gt')
    assert str(tmp_path / 'gt.lmdb') in str(info.value)
    assert 'meta_info.txt' in str(info.value) and 'prepare lmdb --overwrite' in str(info.value)


def test_a_clip_is_cropped_and_named(tmp_path):
    for index in (1, 0):
        cv2.imwrite(str(tmp_path / f'f.{index}.png'), np.full((5, 7, 3), index, np.uint8))
    clip, names = read_img_seq(tmp_path, require_mod_crop=True, scale=4, return_imgname=True)
    assert clip.shape == (2, 3, 4, 4) and names == ['f.0', 'f.1']
    assert clip[1].unique().tolist() == pytest.approx([1 / 255])
    assert torch.equal(read_img_seq([str(tmp_path / 'f.1.png')])[0, :, :4, :4], clip[1])


# transparency


def test_transparency_is_told_from_the_bytes_of_a_png(palette_png):
    rgba = RNG.integers(0, 256, (8, 8, 4), dtype=np.uint8)
    assert has_alpha(png(rgba))
    assert has_alpha(palette_png(1, 2))
    assert has_alpha(palette_png(1, 2, comment=b'x' * 5000))
    assert not has_alpha(png(rgba[..., :3]))
    assert not has_alpha(png(rgba[..., 0]))
    assert not has_alpha(cv2.imencode('.jpg', rgba[..., :3])[1].tobytes())
    assert not has_alpha(png(rgba[..., :3]) + b'tRNS')
    assert not has_alpha(png(rgba)[:12]) and not has_alpha(b'')


def test_transparency_is_dropped_with_one_warning(tmp_path, palette_png, caplog):
    (tmp_path / 'palette.png').write_bytes(palette_png(1, 2))
    cv2.imwrite(str(tmp_path / 'alpha.png'), np.uint8([[[1, 2, 3, 0], [4, 5, 6, 255]]]))
    said, client = SaidOnce(), FileClient('disk')
    out = [
        read_image(client, str(tmp_path / name), said=said)
        for name in ('alpha.png', 'palette.png', 'alpha.png')
    ]
    assert out[0].tolist() == [[[1, 2, 3], [4, 5, 6]]]
    assert out[1].tolist() == [[[0, 0, 255], [255, 0, 0]]]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert 'alpha.png' in caplog.text and 'alpha' in said


def test_each_kind_of_remark_is_made_once(tmp_path, caplog):
    files = {
        'pages.tif': tiff(RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8), pages=2),
        'ten_bits.png': png(np.full((4, 4, 3), 1023, np.uint16)),
        'alpha.tif': tiff(RNG.integers(0, 256, (4, 4, 4), dtype=np.uint8), extra=2),
    }
    for name, content in files.items():
        for copy in ('a', 'b'):
            (tmp_path / f'{copy}_{name}').write_bytes(content)
    paths = paths_from_folder(tmp_path)
    reader = ImageReader(FileClient('disk'), paths)
    for index, path in enumerate(paths * 2):
        assert reader(index, path).shape == (4, 4, 3)
    assert len(caplog.records) == 3
    for name in files:
        assert f'a_{name}' in caplog.text and f'b_{name}' not in caplog.text
    caplog.clear()
    read_img_seq(tmp_path)
    assert len(caplog.records) == 3


# options


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'color': 'grey'}, "'grey'; choose 'y', 'gray'"),
        ({'mean': [0.5]}, 'mean and std go together'),
        ({'std': [0.5]}, 'mean and std go together'),
        ({'mean': 'abc', 'std': [1, 1, 1]}, "mean must be a list of 3 numbers, got 'abc'"),
        ({'mean': [0, 0, 'a'], 'std': [1, 1, 1]}, 'mean must be a list of 3 numbers'),
        ({'mean': [0, 0, math.nan], 'std': [1, 1, 1]}, 'mean must be a list of 3 numbers'),
        ({'mean': [0, 0, 0], 'std': [1, 1]}, 'std must be a list of 3 numbers, none of them 0'),
        ({'mean': [0, 0, 0], 'std': [1, 1, 0]}, 'std must be a list of 3 numbers, none of them 0'),
        ({'meta_info': 'list.txt'}, 'rename it to meta_info_file'),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_image_options(options)
    check_image_options({'color': 'y', 'mean': [0.5], 'std': [0.5], 'meta_info': None})


@pytest.mark.parametrize(
    'name',
    ['../x.png', '/etc/x.png', 'a/../../x.png', 'C:x.png', '..\\x.png', '\x1b[2Jx.png'],
)
def test_a_list_cannot_name_what_lies_outside_its_folder(tmp_path, name):
    (tmp_path / 'list.txt').write_text(f'a/1.png (1,1,3)\n{name} (1,1,3)\n')
    (tmp_path / 'x.lmdb').mkdir()
    (tmp_path / 'x.lmdb' / 'meta_info.txt').write_text(f'{name} (1,1,3) 1\n')
    for read in (
        lambda: data_util.names_from_meta_info_file(tmp_path / 'list.txt'),
        lambda: data_util.paths_from_lmdb(tmp_path / 'x.lmdb'),
        lambda: data_util.image_name(name, {'io_backend': {'type': 'lmdb'}}),
    ):
        with pytest.raises(ValueError, match='is not an image name inside a folder'):
            read()


def test_a_list_in_another_encoding_is_named(tmp_path):
    (tmp_path / 'list.txt').write_bytes('ä.png'.encode('utf-16'))
    with pytest.raises(ValueError, match=r'list\.txt: not UTF-8 text'):
        data_util.text_lines(tmp_path / 'list.txt')


def test_a_list_from_windows_is_read(tmp_path):
    file = tmp_path / 'list.txt'
    file.write_bytes(b'\xef\xbb\xbfa.png\t(4,6,3)\r\nsub\\b\xe3\x80\x80c.png (4,6,3)\r\n')
    assert names_from_meta_info_file(file) == ['a.png', 'sub/b\u3000c.png']


@pytest.mark.parametrize('content', [b'', b'\n \n', b'\xef\xbb\xbf'])
def test_an_empty_list_is_refused(tmp_path, content):
    (tmp_path / 'list.txt').write_bytes(content)
    with pytest.raises(ValueError, match=r'list\.txt: the list is empty'):
        names_from_meta_info_file(tmp_path / 'list.txt')


def test_listed_files_that_are_not_there_are_named_with_their_lines(tmp_path):
    (tmp_path / 'list.txt').write_text('a.png\n\nb.png\nc.png\nd.png\n')
    touch(tmp_path, 'a.png')
    paths = [[str(tmp_path / f'{name}.png')] for name in 'abcd']
    with pytest.raises(FileNotFoundError) as info:
        data_util.check_files_exist(paths, tmp_path / 'list.txt')
    assert str(info.value) == (
        f'{tmp_path}/list.txt: 3 listed files do not exist: {tmp_path}/b.png (line 3), '
        f'{tmp_path}/c.png (line 4), {tmp_path}/d.png (line 5).'
    )
    data_util.check_files_exist(paths[:1], tmp_path / 'list.txt')


def test_in_a_list_too_lq_may_have_another_extension(tmp_path):
    touch(tmp_path / 'lq', 'ax4.png', 'ax4.jpg', 'bx4.bmp')
    (tmp_path / 'list.txt').write_text('a.jpg\nsub/b.png\nc.png\n')
    folders = [str(tmp_path / 'lq'), 'gt']
    pairs = paired_paths_from_meta_info_file(
        folders, ['lq', 'gt'], str(tmp_path / 'list.txt'), '{}x4'
    )
    assert [Path(pair['lq_path']).name for pair in pairs] == ['ax4.jpg', 'bx4.bmp', 'cx4.png']


def test_folders_that_hold_themselves_through_a_link_are_refused(tmp_path):
    (tmp_path / 'a').mkdir()
    for name in ('b', 'c'):  # two of them would be followed in 2 ** 40 ways
        (tmp_path / 'a' / name).symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r'a/[bc] is a link to one of its parent folders'):
        data_util.list_images(tmp_path, recursive=True)


@pytest.mark.parametrize('template', ['x', '{:>999999999}', '{0.__class__}', '{}{}', '{', 3, None])
def test_a_template_has_one_place_for_the_name(template):
    with pytest.raises(ValueError, match='filename_tmpl must have {} once'):
        data_util.check_template(template)

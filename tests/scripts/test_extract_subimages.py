import cv2
import numpy as np
import pytest

from basicsr.utils.matlab_functions import reduce_image


def options(folder, output, size=8, step=4, thresh=0):
    names = ('--input', '--output', '--crop-size', '--step', '--thresh-size')
    values = (folder, output, size, step, thresh)
    return [arg for pair in zip(names, values, strict=True) for arg in pair]


def corners_by_hand(length, size, step, thresh):
    """Go on by one step while a whole sub-image fits; then see what is left over."""
    corners, start = [], 0
    while start + size <= length:
        corners.append(start)
        start += step
    if corners[-1] + size + thresh < length:
        corners.append(length - size)
    return corners


@pytest.mark.parametrize(
    ('height', 'width', 'size', 'step', 'thresh'),
    [
        (8, 8, 8, 4, 0),
        (16, 20, 8, 4, 0),
        (17, 22, 8, 4, 0),
        (17, 22, 8, 4, 1),
        (17, 22, 8, 4, 2),
        (13, 30, 8, 8, 3),
        (13, 30, 5, 9, 0),
    ],
)
def test_rows_then_columns_are_counted_and_what_is_left_over_is_added(
    command, write, read, tmp_path, height, width, size, step, thresh
):
    img = write(tmp_path / 'in' / 'a.png', height, width, 3)
    out = command(
        'extract_subimages', *options(tmp_path / 'in', tmp_path / 'out', size, step, thresh)
    )
    rows, columns = (corners_by_hand(n, size, step, thresh) for n in (height, width))
    want = [img[y : y + size, x : x + size] for y in rows for x in columns]
    assert out == f'{len(want)} sub-images of 1 images are in {tmp_path / "out"}.\n'
    assert len(list((tmp_path / 'out').glob('[!.]*'))) == len(want)
    for number, part in enumerate(want, 1):
        assert np.array_equal(read(tmp_path / 'out' / f'a_s{number:03d}.png'), part)


def test_the_scale_is_cut_from_the_end_of_a_name_only(command, write, tmp_path):
    for name in ('0001x4.png', 'x2_a.png', 'ax8b.png', 'c.d.png', 'ex5.png', 'fx3.tif'):
        write(tmp_path / 'in' / name, 8, 8)
    command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out'))
    names = sorted(path.name for path in (tmp_path / 'out').glob('[!.]*'))
    stems = ('0001_s001.png', 'ax8b_s001.png', 'c.d_s001.png', 'ex5_s001.png', 'f_s001.tif')
    assert names == [*stems, 'x2_a_s001.png']


def test_pairs_stay_pairs(command, write, read, tmp_path):
    for name, height, width in (('a', 76, 88), ('b', 64, 64), ('small', 60, 88)):
        gt = write(tmp_path / 'gt' / f'{name}.png', height, width, 3)
        (tmp_path / 'lq').mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / 'lq' / f'{name}x4.png'), reduce_image(gt, 4))
    command('extract_subimages', *options(tmp_path / 'gt', tmp_path / 'gt_sub', 64, 32, 8))
    command('extract_subimages', *options(tmp_path / 'lq', tmp_path / 'lq_sub', 16, 8, 2))
    gt, lq = (
        {path.name: path for path in (tmp_path / f).glob('[!.]*')} for f in ('gt_sub', 'lq_sub')
    )
    assert gt.keys() == lq.keys()
    assert len(gt) == 5
    for name, path in gt.items():
        difference = reduce_image(read(path), 4).astype(int) - read(lq[name])
        assert np.abs(difference[2:-2, 2:-2]).max() == 0


def test_sub_folders_are_kept_on_demand(command, write, contents, tmp_path):
    for name in ('a.png', 'x/a.png', 'x/y/bx2.png'):
        write(tmp_path / 'in' / name, 8, 8)
    command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'flat'))
    command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'deep'), '--recursive')
    assert contents(tmp_path / 'flat').keys() == {'a_s001.png'}
    assert contents(tmp_path / 'deep').keys() == {'a_s001.png', 'x/a_s001.png', 'x/y/b_s001.png'}


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
@pytest.mark.parametrize('channels', [(), (3,), (4,)])
def test_bit_depth_and_channels_are_kept(command, write, read, tmp_path, channels, dtype):
    img = write(tmp_path / 'in' / 'a.png', 8, 8, *channels, dtype=dtype)
    command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out'))
    part = read(tmp_path / 'out' / 'a_s001.png')
    assert part.dtype == dtype
    assert np.array_equal(part, img)


def test_a_photo_is_hardly_changed(command, tmp_path, read):
    ramp = np.linspace(20, 200, 64, dtype=np.uint8)[:, None, None].repeat(64, 1).repeat(3, 2)
    (tmp_path / 'in').mkdir()
    cv2.imwrite(str(tmp_path / 'in' / 'a.jpg'), ramp)
    command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out', 64, 64))
    change = read(tmp_path / 'out' / 'a_s001.jpg').astype(int) - read(tmp_path / 'in' / 'a.jpg')
    assert np.abs(change).max() <= 1


def test_the_number_of_workers_changes_no_byte(command, write, contents, tmp_path):
    for number in range(6):
        write(tmp_path / 'in' / f'{number}.png', 20 + number, 24, 3)
    for workers in (1, 2):
        output = tmp_path / str(workers)
        command('extract_subimages', *options(tmp_path / 'in', output), '--workers', workers)
    assert contents(tmp_path / '1') == contents(tmp_path / '2')


def test_the_compression_level_is_followed(command, tmp_path, contents):
    (tmp_path / 'in').mkdir()
    ramp = np.arange(64, dtype=np.uint8)[None].repeat(64, 0)
    cv2.imwrite(str(tmp_path / 'in' / 'a.png'), ramp)
    for level in (0, 9):
        output = tmp_path / str(level)
        command(
            'extract_subimages', *options(tmp_path / 'in', output), '--compression-level', level
        )
    plain, packed = (contents(tmp_path / level)['a_s001.png'] for level in '09')
    assert len(packed) < len(plain)


def test_existing_sub_images_are_refused_kept_or_replaced(command, write, contents, tmp_path):
    for name in 'ab':
        write(tmp_path / 'in' / f'{name}.png', 16, 16)
    args = options(tmp_path / 'in', tmp_path / 'out')
    command('extract_subimages', *args, '--resume')
    write(tmp_path / 'out' / 'other_s001.png', 8, 8)
    whole = contents(tmp_path / 'out')
    assert len(whole) == 19

    kept, lost = tmp_path / 'out' / 'a_s001.png', tmp_path / 'out' / 'b_s004.png'
    kept.write_bytes(b'kept')
    lost.unlink()
    with pytest.raises(
        SystemExit, match=r'a_s001.png exists: add --resume to go on or --overwrite'
    ):
        command('extract_subimages', *args)
    assert not lost.exists()
    assert command('extract_subimages', *args, '--resume').startswith('18 sub-images of 2 images')
    assert contents(tmp_path / 'out') == whole | {kept.name: b'kept'}

    for mistake in (('--workers', '0'), ('--crop-size', '99'), ('--compression-level', '11')):
        with pytest.raises(SystemExit):
            command('extract_subimages', *args, '--overwrite', *mistake)
    assert contents(tmp_path / 'out') == whole | {kept.name: b'kept'}, 'nothing is lost by mistakes'
    command('extract_subimages', *args, '--overwrite')
    assert contents(tmp_path / 'out') == whole
    command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out', 16), '--overwrite')
    names = ['a_s001.png', 'b_s001.png', 'other_s001.png']
    assert sorted(path.name for path in (tmp_path / 'out').glob('[!.]*')) == names


@pytest.mark.parametrize('other', [('--crop-size', '7'), ('--step', '100'), ('--thresh-size', '9')])
@pytest.mark.parametrize('kind', ['png', 'jpg'])
def test_sub_images_cut_in_another_way_are_not_gone_on_with(
    command, write, contents, tmp_path, other, kind
):
    write(tmp_path / 'in' / f'a.{kind}', 16, 16)
    args = options(tmp_path / 'in', tmp_path / 'out')
    command('extract_subimages', *args)
    (tmp_path / 'out' / f'a_s002.{kind}').unlink()
    before = contents(tmp_path / 'out')
    with pytest.raises(SystemExit, match='out was made with --crop-size 8, --step 4, --thresh-si'):
        command('extract_subimages', *args, *other, '--resume')
    assert contents(tmp_path / 'out') == before


def test_images_smaller_than_the_crop_are_named_and_counted(command, write, tmp_path, capsys):
    write(tmp_path / 'in' / 'a.png', 8, 8)
    write(tmp_path / 'in' / 'b.png', 20, 7)
    args = options(tmp_path / 'in', tmp_path / 'out')
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('tqdm.tqdm.write', lambda text, file: lines.append(text))
        out = command('extract_subimages', *args)
    assert out.endswith('Left out as too small: 1 images.\n')
    reason = '7 x 20 pixels are too few for --crop-size 8'
    assert lines == [f'{tmp_path / "in" / "b.png"} is left out: {reason}.']
    (tmp_path / 'in' / 'a.png').unlink()
    with pytest.raises(SystemExit, match='all 1 images are smaller than --crop-size 8'):
        command('extract_subimages', *args, '--overwrite')


def test_unusable_arguments_are_refused(command, write, tmp_path):
    (tmp_path / 'in').mkdir()
    with pytest.raises(SystemExit, match='holds no images'):
        command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out'))
    write(tmp_path / 'in' / 'a.png', 8, 8)
    with pytest.raises(SystemExit, match='must be at least 1'):
        command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out', step=0))
    for output in (tmp_path / 'in', tmp_path / 'in' / 'sub'):
        with pytest.raises(SystemExit, match=r'must not be .*in or a folder in it'):
            command('extract_subimages', *options(tmp_path / 'in', output))
    write(tmp_path / 'in' / 'ax4.png', 8, 8)
    with pytest.raises(SystemExit, match='Two images differ in x2, x3, x4, x8'):
        command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out'))
    assert not (tmp_path / 'out').exists()


def test_a_damaged_image_stops_the_work_and_is_named(command, write, tmp_path):
    for name in 'abc':
        write(tmp_path / 'in' / f'{name}.png', 8, 8)
    damaged = tmp_path / 'in' / 'b.png'
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(SystemExit, match=r'extract_subimages: .*b.png: The \d+ bytes are no image'):
        command('extract_subimages', *options(tmp_path / 'in', tmp_path / 'out'))


def test_without_folders_those_of_div2k_are_cut_to_the_same_names(
    command, write, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / 'datasets' / 'DIV2K'
    sizes = {'HR': (480, 720), **{f'LR_bicubic/X{s}': (480 // s, 720 // s) for s in (2, 3, 4)}}
    for folder, size in sizes.items():
        write(root / f'DIV2K_train_{folder}' / f'0001{folder[11:].lower()}.png', *size, 3)
    assert len(command('extract_subimages').splitlines()) == 4
    for folder, (height, _) in sizes.items():
        parts = sorted((root / f'DIV2K_train_{folder}_sub').glob('*.png'))
        assert [part.name for part in parts] == ['0001_s001.png', '0001_s002.png']
        assert cv2.imread(str(parts[1])).shape == (height, height, 3)
    with pytest.raises(SystemExit, match='give --input and --output, or none'):
        command('extract_subimages', '--input', root)

import math
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from basicsr.data import preparing
from basicsr.data.preparing import make_lq
from basicsr.utils.img_util import imfrombytes
from basicsr.utils.matlab_functions import imresize, reduce_image

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / 'scripts' / 'data_preparation' / 'make_lq.py'


def noise(*shape, dtype=np.uint8, seed=0):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape, dtype)


def write(folder, name, img):
    folder.mkdir(exist_ok=True)
    assert cv2.imwrite(str(folder / name), img)
    return folder


def run(folder, output, scale=2, gt_output=None, overwrite=False, resume=False, workers=2):
    existing = {'overwrite': overwrite, 'resume': resume}
    return make_lq(folder, output, scale, gt_output, workers=workers, **existing)


def read(path):
    return imfrombytes(path.read_bytes(), 'unchanged')


def reduced_line(line, scale, white):
    """Keys' cubic kernel, widened by ``scale``, one pixel at a time."""
    out = []
    for j in range(len(line) // scale):
        centre = (j + 0.5) * scale - 0.5
        total = weights = 0.0
        for i in range(math.ceil(centre - 2 * scale), math.floor(centre + 2 * scale) + 1):
            x = abs(centre - i) / scale
            near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
            weight = near if x <= 1 else far
            weights += weight
            total += weight * float(line[min(max(i, 0), len(line) - 1)])
        out.append(min(max(math.floor(total / weights + 0.5), 0), white))
    return out


@pytest.mark.parametrize('scale', [2, 3, 4])
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_both_axes_are_filtered_and_rounded_one_after_the_other(scale, dtype):
    img, white = noise(12, 24, dtype=dtype), np.iinfo(dtype).max
    rows = np.array([reduced_line(column, scale, white) for column in img.T]).T
    want = np.array([reduced_line(row, scale, white) for row in rows])
    out = reduce_image(img, scale)
    assert out.dtype == dtype
    assert np.array_equal(out, want)


def test_halves_are_rounded_up_and_overshoot_is_clipped():
    stripes = np.tile(np.array([0, 1], np.uint8), (16, 8))
    assert (reduce_image(stripes, 2)[:, 2:-2] == 1).all()
    edge = np.repeat(np.array([[0, 255]], np.uint8), 8, axis=1).repeat(4, axis=0)
    # The weights are -3, -9, 29, 111, 111, 29, -9 and -3, over 256.
    assert reduce_image(edge, 2)[0].tolist() == [0, 0, 0, 17, 238, 255, 255, 255]


@pytest.mark.parametrize('split', ['train', 'val'])
def test_the_quickstart_pairs_are_what_the_script_makes(split, tmp_path):
    folder = ROOT / 'datasets' / 'quickstart' / split
    result = run(folder / 'gt', tmp_path, scale=4)
    names = sorted(path.name for path in (folder / 'gt').glob('*.png'))
    assert result.startswith(f'{len(names)} images')
    assert names == sorted(path.name for path in (folder / 'lq_x4').glob('[!.]*'))
    for name in names:
        gt, lq = read(folder / 'gt' / name), read(folder / 'lq_x4' / name)
        assert gt.shape[0] % 12 == gt.shape[1] % 12 == 0
        assert np.array_equal(lq, read(tmp_path / name))
        # At the edges, and after overshoot on one axis, the two differ by design.
        difference = np.abs(imresize(gt.astype(np.float64), 1 / 4).clip(0, 255) - lq)
        assert np.percentile(difference[2:-2, 2:-2], 99) < 0.75


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
@pytest.mark.parametrize('channels', [(), (3,), (4,)])
def test_bit_depth_and_channels_are_kept(channels, dtype, tmp_path):
    img = noise(8, 12, *channels, dtype=dtype)
    run(write(tmp_path / 'gt', 'a.png', img), tmp_path / 'lq')
    out = read(tmp_path / 'lq' / 'a.png')
    assert out.dtype == dtype
    assert out.shape == (4, 6, *channels)
    assert np.array_equal(out, reduce_image(img, 2))


def test_sizes_that_do_not_fit_are_cropped_if_the_cropped_images_can_be_kept(tmp_path, capsys):
    img, fits = noise(7, 9, 3), noise(6, 4, 3)
    gt = write(write(tmp_path / 'gt', 'a.png', img), 'b.tif', fits)
    with pytest.raises(ValueError, match=r'a.png has 9 x 7 pixels.*--gt-output\), and --resume'):
        run(gt, tmp_path / 'lq')
    run(gt, tmp_path / 'lq', gt_output=tmp_path / 'cropped', resume=True)  # as it says
    assert 'cropped to 8 x 6' in capsys.readouterr().err
    assert np.array_equal(read(tmp_path / 'cropped' / 'a.png'), img[:6, :8])
    assert np.array_equal(read(tmp_path / 'cropped' / 'b.png'), fits)
    assert read(tmp_path / 'lq' / 'a.png').shape == (3, 4, 3)


def test_existing_files_are_replaced_on_demand_only(tmp_path):
    gt = write(tmp_path / 'gt', 'a.png', noise(4, 4))
    lq = write(tmp_path / 'lq', 'a.png', np.zeros((1, 1), np.uint8))
    before = (lq / 'a.png').read_bytes()
    with pytest.raises(FileExistsError, match=r'a.png exists.*--overwrite'):
        run(gt, lq)
    assert (lq / 'a.png').read_bytes() == before
    run(gt, lq, overwrite=True)
    assert read(lq / 'a.png').shape == (2, 2)


def test_whole_pairs_are_kept_and_halves_are_made_again(tmp_path):
    for name in 'abc':
        gt = write(tmp_path / 'gt', f'{name}.png', noise(5, 4))
    lq, cropped = tmp_path / 'lq', tmp_path / 'cropped'
    run(gt, lq, gt_output=cropped, resume=True)
    (cropped / 'b.png').unlink()
    kept = write(lq, 'a.png', np.full((2, 2), 7, np.uint8))
    (lq / 'b.png').write_bytes(b'its pair was not whole')
    result = run(gt, lq, gt_output=cropped, resume=True)
    assert result.startswith('3 images')
    assert (read(kept / 'a.png') == 7).all()
    assert read(lq / 'b.png').shape == (2, 2)
    assert read(cropped / 'b.png').shape == (4, 4)


def test_what_was_there_is_counted_after_an_interruption(tmp_path, monkeypatch):
    for name in 'abcde':
        gt = write(tmp_path / 'gt', f'{name}.png', noise(4, 4))
    write_file, made = preparing.imwrite, []

    def interrupted(img, path):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(path)
        write_file(img, path)

    with monkeypatch.context() as patch:
        patch.setattr(preparing, 'imwrite', interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(gt, tmp_path / 'lq', workers=1)
    said = f'5 images of {gt}, reduced to 1/2, are in {tmp_path / "lq"}'
    assert run(gt, tmp_path / 'lq', resume=True) == f'{said} (2 were there already).'
    assert run(gt, tmp_path / 'new', resume=True) == said.replace('lq', 'new') + '.'


def test_one_warning_tells_of_orientation_tags(tmp_path, caplog):
    gt = write(tmp_path / 'gt', 'a.png', noise(4, 8))
    run(gt, tmp_path / 'lq')
    assert caplog.records == []
    exif = Image.Exif()
    exif[274] = 6
    for name in 'bc':
        Image.fromarray(noise(4, 8)).save(gt / f'{name}.png', exif=exif)
    run(gt, tmp_path / 'lq', resume=True)
    (record,) = caplog.records
    assert record.getMessage() == (
        'An orientation tag is ignored, as in training; "basicsr prepare pairs" would turn the '
        f'pixels: {gt / "b.png"}, {gt / "c.png"}'
    )
    assert read(tmp_path / 'lq' / 'b.png').shape == (2, 4)


def test_images_of_another_scale_are_not_gone_on_with(tmp_path):
    """Also where all pairs are halves, and where an overwriting was cut off."""
    gt, lq, cropped = write(tmp_path / 'gt', 'a.png', noise(12, 8)), tmp_path / 'lq', tmp_path / 'c'
    write(gt, 'b.png', noise(12, 8))
    run(gt, lq, scale=4, gt_output=cropped)
    for name in 'ab':
        (cropped / f'{name}.png').unlink()
    before = (lq / 'a.png').read_bytes()
    with pytest.raises(ValueError, match=r'lq was made with --scale 4, and not --scale 2: resume'):
        run(gt, lq, scale=2, gt_output=cropped, resume=True)
    assert (lq / 'a.png').read_bytes() == before and not list(cropped.glob('*.png'))
    run(gt, lq, scale=4, gt_output=cropped, resume=True)
    assert len(list(cropped.glob('*.png'))) == 2

    (gt / 'c.png').write_bytes(b'damaged')
    with pytest.raises(ValueError, match=r'c\.png'):
        run(gt, lq, scale=2, overwrite=True)
    with pytest.raises(ValueError, match='made with unknown settings'):
        run(gt, lq, scale=2, resume=True)


def test_the_number_of_workers_changes_no_byte(tmp_path):
    for number in range(6):
        gt = write(tmp_path / 'gt', f'{number}.png', noise(24, 32, 3, seed=number))
    for workers in (1, 2):
        run(gt, tmp_path / str(workers), workers=workers)
    for number in range(6):
        one, two = (tmp_path / folder / f'{number}.png' for folder in '12')
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize('overwrite', [False, True])
def test_the_input_is_never_written_to(overwrite, tmp_path):
    gt = write(tmp_path / 'gt', 'a.png', noise(4, 4))
    before = (gt / 'a.png').read_bytes()
    for lq, cropped in [(gt, None), (tmp_path / 'lq', gt), (tmp_path / 'lq', tmp_path / 'lq')]:
        with pytest.raises(ValueError, match='different folders'):
            run(gt, lq, gt_output=cropped, overwrite=overwrite)
    assert (gt / 'a.png').read_bytes() == before


def test_two_images_with_one_name_are_refused(tmp_path):
    gt = write(write(tmp_path / 'gt', 'a.png', noise(4, 4)), 'a.bmp', noise(4, 4))
    with pytest.raises(ValueError, match='share a name'):
        run(gt, tmp_path / 'lq')


def test_unusable_images_are_refused_by_name(tmp_path):
    small = write(tmp_path / 'small', 'a.png', noise(3, 9))
    with pytest.raises(ValueError, match='9 x 3 pixels are too few for scale 4'):
        run(small, tmp_path / 'lq', scale=4)
    real = write(tmp_path / 'real', 'a.tif', np.zeros((4, 4), np.float32))
    with pytest.raises(ValueError, match=r'a.tif: an image of float32'):
        run(real, tmp_path / 'lq')
    with pytest.raises(ValueError, match='--scale must be at least 2'):
        run(small, tmp_path / 'lq', scale=1)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(FileNotFoundError, match='holds no images'):
        run(tmp_path / 'empty', tmp_path / 'lq')
    assert not list((tmp_path / 'lq').glob('[!.]*'))


def test_the_command_prints_one_line_and_fails_with_one_line(tmp_path, monkeypatch, capsys):
    gt, lq = write(tmp_path / 'gt', 'a.png', noise(4, 6)), tmp_path / 'lq'
    command = [str(SCRIPT), '--input', str(gt), '--output', str(lq), '--scale', '2']
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.setattr(sys, 'argv', command)
    runpy.run_path(str(SCRIPT), run_name='__main__')
    assert capsys.readouterr().out == f'1 images of {gt}, reduced to 1/2, are in {lq}.\n'
    assert sys.path[0] == str(ROOT)

    (gt / 'a.png').write_bytes(b'not an image')
    monkeypatch.setattr(sys, 'argv', [*command, '--overwrite'])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name='__main__')
    assert caught.value.code.startswith(f'make_lq: {gt / "a.png"}: ')
    assert '\n' not in caught.value.code

"""Scores of images in files."""

import math

import cv2
import numpy as np
import pytest

from basicsr.metrics import calculate_psnr, calculate_ssim
from basicsr.metrics.files import pair_names, score_files, score_lines

PSNR = {'psnr': {'type': 'calculate_psnr', 'crop_border': 0}}
SSIM = {'ssim': {'type': 'calculate_ssim', 'crop_border': 0}}


def noise(*shape, seed=0, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape, dtype)


@pytest.fixture
def files(tmp_path):
    """Write a pair of images; returns the files as ``score_files`` takes them."""

    def write(gt, result):
        for name, img in (('gt', gt), ('result', result)):
            assert cv2.imwrite(str(tmp_path / f'{name}.png'), img)
        return {'a': {name: tmp_path / f'{name}.png' for name in ('gt', 'result')}}

    return write


# pairs


@pytest.mark.parametrize(
    'restored', [['a.png', 'b.png'], ['b_x4.png', 'a_x4.png'], ['b.jpg', 'a.jpg']]
)
def test_images_are_paired_by_name_whatever_ending_all_restored_ones_share(restored):
    pairs = pair_names(['a.png', 'b.png'], restored)
    assert {name[0]: other[0] for name, other in pairs.items()} == {'a': 'a', 'b': 'b'}


def test_folders_count_as_a_part_of_the_name():
    gt = ['000/0.png', '001/0.png']
    assert pair_names(gt, ['001/0y.png', '000/0y.png']) == {
        gt[0]: '000/0y.png',
        gt[1]: '001/0y.png',
    }


def test_a_missing_image_shifts_no_pair():
    with pytest.raises(ValueError, match='1 of 3 GT images have no restored image.*: b.png'):
        pair_names(['a.png', 'b.png', 'c.png'], ['a_x.png', 'c_x.png'], '_x')
    with pytest.raises(ValueError, match="3 of 3 GT images .* the suffix '': a.png, b.png, c.png"):
        pair_names(['a.png', 'b.png', 'c.png'], ['a_x.png', 'c_x.png'])


def test_of_several_endings_one_has_to_be_named(caplog):
    gt, restored = ['a.png', 'b.png'], ['a_x.png', 'a_y.png', 'b_x.png', 'b_y.png']
    with pytest.raises(ValueError, match='have no restored image'):
        pair_names(gt, restored)
    assert pair_names(gt, restored, '_y') == {'a.png': 'a_y.png', 'b.png': 'b_y.png'}
    assert caplog.messages == ['2 restored images have no GT.']


def test_names_that_differ_in_the_extension_alone_are_refused():
    with pytest.raises(ValueError, match='a.png and a.jpg differ only in the extension'):
        pair_names(['a.png'], ['a.png', 'a.jpg'])


# scores


def test_a_gray_image_is_compared_with_a_colour_one_as_three_channels(files):
    gt, result = noise(20, 24), noise(20, 24, 3, seed=1)
    expected = calculate_psnr(result, np.dstack([gt] * 3), 0)
    assert score_files(files(gt, result), PSNR, 1) == {'a': {'psnr': expected}}


def test_transparency_is_left_out_with_a_warning(files, caplog):
    gt, result = noise(20, 24, 4), noise(20, 24, 3, seed=1)
    expected = calculate_psnr(result, gt[..., :3], 0)
    assert score_files(files(gt, result), PSNR, 1) == {'a': {'psnr': expected}}
    assert [message.endswith('gt.png') for message in caplog.messages] == [True]


def test_images_of_16_bits_are_compared_with_those_of_8(files):
    result = noise(20, 24, 3, seed=1)
    scores = score_files(files(result.astype(np.uint16) * 257, result), PSNR, 1)
    assert scores['a']['psnr'] > 200


def test_an_image_that_is_too_small_for_ssim_has_none_and_a_warning(files, caplog):
    scores = score_files(files(noise(9, 9), noise(9, 9)), PSNR | SSIM, 1)
    assert math.isinf(scores['a']['psnr'])
    assert math.isnan(scores['a']['ssim'])
    assert 'Metric ssim of image a is NaN: SSIM needs at least 11 x 11' in caplog.text


def test_images_of_two_sizes_are_refused(files):
    with pytest.raises(ValueError, match=r'psnr of image a: Images must have one shape'):
        score_files(files(noise(20, 24), noise(20, 25)), PSNR, 1)


def test_a_file_that_is_no_image_is_named(files):
    pair = files(noise(20, 24), noise(20, 24))
    pair['a']['result'].write_bytes(b'nothing')
    with pytest.raises(ValueError, match='result.png: The 7 bytes are not a PNG'):
        score_files(pair, PSNR, 1)


def test_a_change_of_brightness_and_contrast_can_be_taken_back(files):
    gt = noise(20, 24, 3) // 2 + 20
    changed = np.stack([gt[..., 0] // 2 + 60, gt[..., 1], gt[..., 2] + 30], axis=2)
    pair = files(gt, changed)
    assert score_files(pair, PSNR, 1)['a']['psnr'] < 25
    assert score_files(pair, PSNR, 1, correct_mean_var=True)['a']['psnr'] > 55


def test_lines_list_the_scores_and_end_with_the_averages_of_those_that_are_finite():
    scores = {
        'a': {'psnr': 20.0, 'ssim': 0.5, 'x': math.nan},
        'b': {'psnr': math.inf, 'ssim': math.nan, 'x': math.nan},
        'c': {'psnr': 30.0, 'ssim': 1.0, 'x': math.nan},
    }
    assert score_lines(scores, {'psnr': 'dB'}).split('\n') == [
        '  1: a. \tPSNR: 20.000000 dB, \tSSIM: 0.500000, \tX: nan',
        '  2: b. \tPSNR: inf dB, \tSSIM: nan, \tX: nan',
        '  3: c. \tPSNR: 30.000000 dB, \tSSIM: 1.000000, \tX: nan',
        'Average: PSNR: 25.000000 dB, SSIM: 0.750000, X: nan',
    ]


def test_scores_are_those_of_the_metrics(files):
    gt, result = noise(40, 44, 3), noise(40, 44, 3, seed=1)
    options = {'crop_border': 4, 'test_y_channel': True}
    metrics = {m: {'type': f'calculate_{m}', **options} for m in ('psnr', 'ssim')}
    scores = score_files(files(gt, result), metrics, 2)['a']
    assert scores['psnr'] == calculate_psnr(result, gt, **options)
    assert scores['ssim'] == calculate_ssim(result, gt, **options)

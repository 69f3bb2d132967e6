import re

import numpy as np
import pytest

from basicsr.metrics import calculate_niqe, calculate_psnr, calculate_ssim

PSNR_SSIM = 'scripts/metrics/calculate_psnr_ssim.py'
NIQE = 'scripts/metrics/calculate_niqe.py'


@pytest.fixture
def folders(write, tmp_path):
    """Images in two folders, one in a folder below; by their names."""
    return {
        folder: {
            name: write(tmp_path / folder / f'{name}{end}.png', 40, 52, 3)
            for name in ('a', 'deep/b')
        }
        for folder, end in (('gt', ''), ('restored', '_net'))
    }


@pytest.mark.parametrize(
    ('flags', 'options'),
    [
        ([], {'crop_border': 0}),
        (['--crop_border', 4, '--suffix', '_net'], {'crop_border': 4}),
        (['--test_y_channel'], {'crop_border': 0, 'test_y_channel': True}),
    ],
)
def test_psnr_and_ssim_are_those_of_the_metrics(script, folders, tmp_path, flags, options):
    out = script(PSNR_SSIM, '--gt', tmp_path / 'gt', '--restored', tmp_path / 'restored', *flags)
    pairs = [(folders['restored'][name], folders['gt'][name]) for name in ('a', 'deep/b')]
    psnr = [calculate_psnr(*pair, **options) for pair in pairs]
    ssim = [calculate_ssim(*pair, **options) for pair in pairs]
    assert out.splitlines() == [
        f'  1: a.png. \tPSNR: {psnr[0]:.6f} dB, \tSSIM: {ssim[0]:.6f}',
        f'  2: deep/b.png. \tPSNR: {psnr[1]:.6f} dB, \tSSIM: {ssim[1]:.6f}',
        f'Average: PSNR: {np.mean(psnr):.6f} dB, SSIM: {np.mean(ssim):.6f}',
    ]


def test_the_average_is_that_of_corrected_images(script, folders, tmp_path):
    args = ['--gt', tmp_path / 'gt', '--restored', tmp_path / 'restored', '--correct_mean_var']
    (corrected,) = re.findall(r'Average: PSNR: ([\d.]+)', script(PSNR_SSIM, *args))
    (plain,) = re.findall(r'Average: PSNR: ([\d.]+)', script(PSNR_SSIM, *args[:-1]))
    assert 0 < abs(float(corrected) - float(plain)) < 1


def test_a_missing_image_ends_in_a_message(script, folders, tmp_path, capsys):
    (tmp_path / 'restored' / 'a_net.png').unlink()
    with pytest.raises(SystemExit) as info:
        script(PSNR_SSIM, '--gt', tmp_path / 'gt', '--restored', tmp_path / 'restored')
    assert info.value.code == 1
    shown = capsys.readouterr()
    assert '2 of 2 GT images have no restored image' in shown.err
    assert 'Traceback' not in shown.err
    assert shown.out == ''


def test_niqe_is_that_of_the_metric(script, write, tmp_path):
    images = [write(tmp_path / 'in' / f'{name}.png', 100, 200, 3) for name in ('x', 'yy')]
    out = script(NIQE, '--input', tmp_path / 'in', '--crop_border', 2)
    niqe = [calculate_niqe(img, crop_border=2) for img in images]
    assert niqe[0] != niqe[1]
    assert out.splitlines() == [
        f'  1: x.png. \tNIQE: {niqe[0]:.6f}',
        f'  2: yy.png. \tNIQE: {niqe[1]:.6f}',
        f'Average: NIQE: {np.mean(niqe):.6f}',
    ]


@pytest.mark.parametrize('args', [(NIQE, '--input'), (PSNR_SSIM, '--restored', '.', '--gt')])
def test_an_empty_folder_is_named(script, tmp_path, capsys, args):
    (tmp_path / 'in').mkdir()
    with pytest.raises(SystemExit):
        script(*args, tmp_path / 'in')
    assert 'in holds no images' in capsys.readouterr().err

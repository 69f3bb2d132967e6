"""PSNR and SSIM of the images of a folder, compared with those of the same names in another."""

import argparse
import os
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.data.data_util import list_images
from basicsr.metrics.files import pair_names, score_files, score_lines
from basicsr.run.program import run


def main(args: argparse.Namespace) -> str:
    gt, restored = (list_images(folder, recursive=True) for folder in (args.gt, args.restored))
    if not gt:
        raise FileNotFoundError(f'{args.gt} holds no images.')
    files = {
        name: {'gt': Path(args.gt, name), 'result': Path(args.restored, other)}
        for name, other in pair_names(gt, restored, args.suffix).items()
    }
    options = {'crop_border': args.crop_border, 'test_y_channel': args.test_y_channel}
    metrics = {m: {'type': f'calculate_{m}', **options} for m in ('psnr', 'ssim')}
    scores = score_files(files, metrics, args.workers, args.correct_mean_var)
    return score_lines(scores, {'psnr': 'dB'})


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--gt', required=True, help='folder of the GT')
    parser.add_argument('--restored', required=True, help='folder of the images to score')
    parser.add_argument('--crop_border', type=int, default=0, help='pixels left out at each side')
    parser.add_argument('--suffix', default='', help='what restored names have at their end')
    parser.add_argument('--test_y_channel', action='store_true', help='compare the luma')
    parser.add_argument(
        '--correct_mean_var', action='store_true', help="give results the GT's mean and deviation"
    )
    parser.add_argument('--workers', type=int, default=os.cpu_count(), help='threads')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

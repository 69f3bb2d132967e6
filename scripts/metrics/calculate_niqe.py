"""NIQE of the images of a folder, without a reference; lower is better."""

import argparse
import os
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.data.data_util import list_images
from basicsr.metrics.files import score_files, score_lines
from basicsr.run.program import run


def main(args: argparse.Namespace) -> str:
    files = {name: {'result': Path(args.input, name)} for name in list_images(args.input, True)}
    if not files:
        raise FileNotFoundError(f'{args.input} holds no images.')
    metrics = {'niqe': {'type': 'calculate_niqe', 'crop_border': args.crop_border}}
    return score_lines(score_files(files, metrics, args.workers), {})


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--input', required=True, help='folder of the images')
    parser.add_argument('--crop_border', type=int, default=0, help='pixels left out at each side')
    parser.add_argument('--workers', type=int, default=os.cpu_count(), help='threads')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

"""Enlarge images four times with ESRGAN; the results are <output>/<name>_ESRGAN.png."""

import argparse
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.models.restore_files import find_network, restore_files
from basicsr.run.program import run

NETWORK = {'type': 'RRDBNet', 'num_in_ch': 3, 'num_out_ch': 3}  # and the defaults, as published
MODEL = 'experiments/pretrained_models/ESRGAN/ESRGAN_SRx4_DF2KOST_official-ff704c30.pth'


def main(args: argparse.Namespace) -> str:
    net = find_network(args.model_path, NETWORK)
    options = {'suffix': '_ESRGAN', 'existing': 'replace'}
    return restore_files(net, args.input, args.output, **options)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--model_path', default=MODEL, help='weights; default: %(default)s')
    parser.add_argument(
        '--input', default='datasets/Set14/LRbicx4', help='image or folder; default: %(default)s'
    )
    parser.add_argument('--output', default='results/ESRGAN', help='default: %(default)s')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

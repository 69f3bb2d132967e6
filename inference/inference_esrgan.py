"""Enlarge images four times with ESRGAN; the results are <output>/<name>_ESRGAN.png."""

import argparse
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.run.program import run
from inference.common import load_network, restore_folder

NETWORK = {'type': 'RRDBNet', 'num_in_ch': 3, 'num_out_ch': 3}  # and the defaults, as published
MODEL = 'experiments/pretrained_models/ESRGAN/ESRGAN_SRx4_DF2KOST_official-ff704c30.pth'


def main(args: argparse.Namespace) -> str:
    net = load_network(args.model_path, NETWORK)
    return restore_folder(net, args.input, args.output, 'ESRGAN', scale=net.scale)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--model_path', default=MODEL, help='weights; default: %(default)s')
    parser.add_argument(
        '--input', default='datasets/Set14/LRbicx4', help='image or folder; default: %(default)s'
    )
    parser.add_argument('--output', default='results/ESRGAN', help='default: %(default)s')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

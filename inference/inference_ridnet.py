"""Denoise <test_path>/X<noise_g> with RIDNet, as results/RIDNet/<set>/<name>_x<noise_g>_RIDNet.png.

<set> is the last part of test_path.
"""

import argparse
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.run.program import run
from inference.common import load_network, restore_folder

NETWORK = {'type': 'RIDNet', 'in_channels': 3, 'mid_channels': 64, 'out_channels': 3}


def main(args: argparse.Namespace) -> str:
    net = load_network(args.model_path, NETWORK)
    source = Path(args.test_path, f'X{args.noise_g}')
    output = Path('results/RIDNet', Path(args.test_path).name)
    suffix = f'x{args.noise_g}_RIDNet'
    return restore_folder(net, source, output, suffix, scale=1, white=255)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--test_path', default='datasets/denoise/RNI15', help='default: %(default)s'
    )
    parser.add_argument('--noise_g', type=int, default=25, help='level of the noise; default: 25')
    parser.add_argument('--model_path', required=True, help='weights')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

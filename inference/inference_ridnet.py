"""Denoise <test_path>/X<noise_g> with RIDNet, as results/RIDNet/<set>/<name>_x<noise_g>_RIDNet.png.

<set> is the last part of test_path.
"""

import argparse
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.models.restore_files import find_network, restore_files
from basicsr.run.program import run

NETWORK = {'type': 'RIDNet', 'in_channels': 3, 'mid_channels': 64, 'out_channels': 3}


def main(args: argparse.Namespace) -> str:
    net = find_network(args.model_path, NETWORK)
    source = Path(args.test_path, f'X{args.noise_g}')
    output = Path('results/RIDNet', Path(args.test_path).name)
    options = {'suffix': f'_x{args.noise_g}_RIDNet', 'existing': 'replace', 'white': 255}
    return restore_files(net, source, output, **options)


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

"""``basicsr average experiments/NAME --lengths 0.05 0.1 -o FILE.pth``."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('experiment', help='folder of a run with train.posthoc_ema')
    parser.add_argument(
        '--length',
        '--lengths',
        dest='lengths',
        nargs='+',
        type=float,
        required=True,
        help='standard deviation of the average over the iterations so far: 0.1 for a tenth',
    )
    parser.add_argument('--iter', type=int, help='iteration to end at; default: the last one')
    parser.add_argument(
        '-o', dest='target', required=True, help='file; with several lengths, each is added to it'
    )


def main(args: argparse.Namespace) -> None:
    from basicsr.run.program import run

    def write(_: Path) -> None:
        from basicsr.models.posthoc import write_averages

        lines = write_averages(args.experiment, args.lengths, args.target, args.iter)
        sys.stdout.write('\n'.join([*lines, '']))

    run(write, Path.cwd())

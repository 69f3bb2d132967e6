"""``basicsr average experiments/NAME --lengths 0.05 0.1 -o FILE.pth``: see ``weights average``."""

import argparse
import sys
from pathlib import Path

from .weights import add_lengths, average_of_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('experiment', help='folder of a run with train.posthoc_ema')
    add_lengths(parser, required=True)
    parser.add_argument(
        '-o', dest='target', required=True, help='file; with several lengths, each is added to it'
    )


def main(args: argparse.Namespace) -> None:
    from basicsr.run.program import run

    def write(_: Path) -> None:
        lines = average_of_run(args.experiment, args.lengths, args.target, args.iter)
        sys.stdout.write('\n'.join([*lines, '']))

    run(write, Path.cwd())

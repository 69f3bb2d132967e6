"""``basicsr replay experiments/NAME/incidents/FILE.pt -opt options/NAME.yml``."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('incident', help='file of a run, see train.on_nonfinite')
    parser.add_argument('-opt', required=True, metavar='FILE', help='option file of the run')
    parser.add_argument(
        '--force_yml', nargs='+', default=[], metavar='A:B=VALUE', help='as in the training'
    )
    parser.add_argument(
        '--weights', help='of net_g; default: the last checkpoint of the run before the incident'
    )


def main(args: argparse.Namespace) -> None:
    from basicsr.run.program import run

    def write(root: Path) -> None:
        from basicsr.run.replay import replay
        from basicsr.utils.text import printable

        lines = replay(args.incident, args.opt, args.weights, root, args.force_yml)
        sys.stdout.write(printable('\n'.join([*lines, ''])))

    run(write, Path.cwd())

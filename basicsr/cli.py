"""The console command: ``basicsr COMMAND [flags]``."""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence

from basicsr.version import __version__

# Each has a module in ``basicsr.commands`` with ``add_arguments``, ``main``, and an example in the
# first line of its docstring.
COMMANDS = {
    'train': 'train a network from an option file',
    'test': 'run a trained network on images, and score it',
    'tune': 'find the fastest settings of an option file by short trials',
    'verify-resume': 'prove that a training which is killed resumes exactly',
    'average': 'the same as weights average, for the folder of a run with train.posthoc_ema',
    'replay': 'repeat the step of a batch whose loss or gradient was not finite',
    'convert': 'the same as weights convert',
    'cache': 'list or clear the caches of decoded images',
    'explain': 'say what an option file means: options, learning rates, sizes, contradictions',
    'prepare': 'make pairs, low-quality images, sub-images, lists or LMDBs of images',
    'report': 'show runs in one HTML page: curves, pictures, scores, options, incidents',
    'restore': 'restore images with a trained network',
    'table': 'score checkpoints on test sets, for a paper or a README',
    'export': 'write a trained network for ONNX, ncnn, torch.export or spandrel, and check it',
    'doctor': 'look through the data of a training before it starts',
    'list': 'list the networks, losses, metrics, datasets or models, or show one of them',
    'weights': 'show, interpolate, average, convert or strip files of networks',
}

ALIASES = {'restore': ['infer']}


def main() -> None:
    """Entry point of the console command."""
    args = parse()
    if status := args.main(args):
        sys.exit(status)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``main`` of the result is the function of the command.

    torch takes seconds to import, so help and mistyped flags are handled before that.
    """
    parser = argparse.ArgumentParser(
        prog='basicsr', description='Train image restoration networks, and the tools around it.'
    )
    parser.add_argument('--version', action='version', version=f'basicsr {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND')
    for name, text in COMMANDS.items():
        module = importlib.import_module(f'basicsr.commands.{name.replace("-", "_")}')
        example = re.search('``(.+?)``', module.__doc__ or '')
        command = commands.add_parser(
            name,
            aliases=ALIASES.get(name, []),
            help=text,
            description=f'{text[0].upper()}{text[1:]}.',
            epilog=f'Example: {example[1]}' if example else None,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main, parser=command)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    return args


if __name__ == '__main__':
    main()

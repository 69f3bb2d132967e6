"""The console command: ``basicsr COMMAND [flags]``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each has a module in ``basicsr.commands`` with ``add_arguments`` and ``main``.
COMMANDS = {
    'train': 'train a network from an option file',
    'test': 'run a trained network on images, and score it',
    'tune': 'find the fastest settings of an option file by short trials',
    'verify-resume': 'prove that a training which is killed resumes exactly',
    'average': 'build networks from the averages that train.posthoc_ema has stored',
    'doctor': 'look through the data of a training before it starts',
    'replay': 'repeat the step of a batch whose loss or gradient was not finite',
    'convert': 'convert a .pth file of networks to .safetensors, or back',
    'cache': 'list or clear the caches of decoded images',
}


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
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for name, text in COMMANDS.items():
        module = importlib.import_module(f'basicsr.commands.{name.replace("-", "_")}')
        command = commands.add_parser(name, help=text, description=f'{text.capitalize()}.')
        module.add_arguments(command)
        command.set_defaults(main=module.main, parser=command)
    return parser.parse_args(argv)


if __name__ == '__main__':
    main()

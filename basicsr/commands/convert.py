"""``basicsr convert net_g_latest.pth net_g.safetensors [--key params_ema]``."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', help='file to read')
    parser.add_argument('target', help='file to write, .pth or .safetensors')
    parser.add_argument('--key', help='write the state dict of this key alone, and bare')


def main(args: argparse.Namespace) -> None:
    from basicsr.run.program import run

    def write(_: Path) -> None:
        from basicsr.utils.checkpoint import convert

        convert(args.source, args.target, args.key)
        sys.stdout.write(f'{args.target}: written from {args.source}\n')

    run(write, Path.cwd())

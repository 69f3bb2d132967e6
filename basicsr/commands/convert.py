"""``basicsr convert net_g_latest.pth net_g.safetensors``: see ``weights convert``."""

import argparse

from . import weights

add_arguments = weights.add_conversion


def main(args: argparse.Namespace) -> None:
    args.action, args.overwrite = 'convert', False
    weights.main(args)

"""``basicsr restore -i photos -o restored -m experiments/quickstart/models/net_g_latest.pth``."""

import argparse
import sys
from pathlib import Path

_ENDINGS = {'png': '.png', 'jpg': '.jpg', 'jpeg': '.jpg', 'webp': '.webp', 'tif': '.tif'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add('-i', '--input', required=True, help='image, or folder whose sub-folders count too')
    add('-o', '--output', required=True, help='folder of the results')
    add('-m', '--model', required=True, help='checkpoint (.pth or .safetensors)')
    add('--opt', help='option file with the network_g, if neither the file nor its run has it')
    add('--key', help='weights of the checkpoint; default: params_ema if it has them')
    add('--suffix', default='', help='to add to the names of the results')
    add('--format', choices=list(_ENDINGS), default='png', help='of the results (default: png)')
    add('--quality', type=int, help='of JPEG and WebP, 1 to 100')
    add('--tile', type=int, help='side of tiles in LQ pixels; 0: none; default: by size and memory')
    add('--ensemble', action='store_true', help='average over eight flips and rotations')
    add('--half', action='store_true', help='compute in 16 bits, on a GPU')
    add('--device', help='such as cpu or cuda:1; default: the GPU if there is one')
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument('--resume', action='store_true', help='skip images that have a result')
    existing.add_argument('--overwrite', action='store_true', help='replace results')


def main(args: argparse.Namespace) -> None:
    if args.quality is not None and not 1 <= args.quality <= 100:
        args.parser.error(f'--quality must be from 1 to 100, got {args.quality}.')
    if args.tile is not None and args.tile < 0:
        args.parser.error(f'--tile must be a number of pixels, got {args.tile}.')
    from basicsr.run.program import run
    from basicsr.utils.option_schema import is_plain_name

    if not is_plain_name(f'image{args.suffix}'):
        args.parser.error(f'--suffix must be part of a file name, got {args.suffix!r}.')
    run(lambda _: sys.stdout.write(f'{_restore(args)}\n'), Path.cwd())


def _restore(args: argparse.Namespace) -> str:
    """Restore what the flags name; returns what was done."""
    from basicsr.models.restore_files import find_network, network_of_options, restore_files
    from basicsr.utils.errors import UserError

    net = find_network(args.model, network_of_options(args.opt) if args.opt else None, args.key)
    if args.device:
        try:
            net = net.to(args.device)
        except (AssertionError, RuntimeError) as error:  # no such device, or no such kind
            raise UserError(f'--device {args.device} cannot be used: {error}') from error
    if args.half:
        if next(net.parameters()).device.type == 'cpu':
            args.parser.error('--half needs a GPU: on a CPU, 16 bits are slower.')
        net = net.half()
    existing = 'skip' if args.resume else 'replace' if args.overwrite else 'refuse'
    return restore_files(
        *(net, args.input, args.output),
        suffix=args.suffix,
        ending=_ENDINGS[args.format],
        quality=args.quality,
        existing=existing,
        tile=args.tile,
        ensemble=args.ensemble,
    )

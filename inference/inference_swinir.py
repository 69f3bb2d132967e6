"""Enlarge, denoise or repair images with SwinIR; the results are <output>/<name>_SwinIR.png."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.models.restore_files import find_network, restore_files
from basicsr.run.program import run
from basicsr.utils.errors import UserError

# The published networks: https://arxiv.org/abs/2108.10257, section 4.1.
MEDIUM = {'embed_dim': 180, 'depths': [6] * 6, 'num_heads': [6] * 6, 'window_size': 8}
SMALL = {'embed_dim': 60, 'depths': [6] * 4, 'num_heads': [6] * 4, 'window_size': 8}
LARGE = {'embed_dim': 240, 'depths': [6] * 9, 'num_heads': [8] * 9, 'window_size': 8}
TASKS = {
    'classical_sr': {**MEDIUM, 'upsampler': 'pixelshuffle'},
    'lightweight_sr': {**SMALL, 'upsampler': 'pixelshuffledirect'},
    'real_sr': {**MEDIUM, 'upsampler': 'nearest+conv'},
    'gray_dn': {**MEDIUM, 'in_chans': 1, 'upscale': 1},
    'color_dn': {**MEDIUM, 'upscale': 1},
    'jpeg_car': {**MEDIUM, 'in_chans': 1, 'upscale': 1, 'window_size': 7, 'img_range': 255.0},
}


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Type and arguments of the network for a task."""
    network = {'upscale': args.scale, 'mlp_ratio': 2, 'img_size': args.patch_size}
    network |= {'type': 'SwinIR', **TASKS[args.task]}
    if args.large_model:
        if args.task != 'real_sr':
            raise UserError(f'--large_model is a network of real_sr, not of {args.task}.')
        network |= {**LARGE, 'resi_connection': '3conv'}
    return network


def check_level(args: argparse.Namespace) -> None:
    """Compare --noise and --jpeg with the name of the weights, in which the level stands.

    Raises:
        ValueError: They differ, or the task has no such level.
    """
    for flag, tasks in (('noise', ('gray_dn', 'color_dn')), ('jpeg', ('jpeg_car',))):
        level = getattr(args, flag)
        if level is None:
            continue
        if args.task not in tasks:
            raise UserError(f'--{flag} is for {", ".join(tasks)}; the task is {args.task}.')
        named = re.search(rf'{flag}_?(\d+)', Path(args.model_path).name, re.IGNORECASE)
        if named and int(named[1]) != level:
            raise UserError(f'{args.model_path} is for {flag} {named[1]}, not for {level}.')


def main(args: argparse.Namespace) -> str:
    check_level(args)
    net = find_network(args.model_path, options(args))
    chosen = {'suffix': '_SwinIR', 'existing': 'replace'}
    return restore_files(net, args.input, args.output, **chosen)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--input', required=True, help='image or folder')
    parser.add_argument('--output', default='results/SwinIR', help='default: %(default)s')
    parser.add_argument(
        '--task', choices=TASKS, default='classical_sr', help='default: %(default)s'
    )
    parser.add_argument('--patch_size', type=int, default=64, help='of the training; default: 64')
    parser.add_argument('--scale', type=int, default=4, help='of super-resolution; default: 4')
    parser.add_argument('--noise', type=int, help='level of gray_dn and color_dn: 15, 25 or 50')
    parser.add_argument('--jpeg', type=int, help='quality of jpeg_car: 10, 20, 30 or 40')
    parser.add_argument('--large_model', action='store_true', help='the large network of real_sr')
    parser.add_argument('--model_path', required=True, help='weights')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

"""``basicsr export -m net_g_latest.pth --to onnx -o net_g.onnx``."""

import argparse
import sys
from pathlib import Path

_ENDINGS = {'onnx': '.onnx', 'ncnn': '.param', 'torch': '.pt2', 'spandrel': '.safetensors or .pth'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add('-m', '--model', required=True, help='checkpoint (.pth or .safetensors)')
    add('--to', required=True, choices=list(_ENDINGS), help='program that shall run it')
    endings = ', '.join(f'{ending} for {target}' for target, ending in _ENDINGS.items())
    add('-o', '--output', required=True, help=f'file to write: {endings}')
    add('--opt', help='option file with the network_g, if neither the file nor its run has it')
    add('--key', help='weights of the checkpoint; default: params_ema if it has them')
    add('--bound', type=float, default=1e-4, help='largest difference (default: 1e-4)')
    add('--overwrite', action='store_true', help='replace an existing file')


def main(args: argparse.Namespace) -> None:
    from basicsr.run.program import run

    run(lambda _: sys.stdout.write(f'{_export(args)}\n'), Path.cwd())


def _export(args: argparse.Namespace) -> str:
    from basicsr.models.export import export_network
    from basicsr.models.restore_files import find_network, network_of_options
    from basicsr.utils.checkpoint import load_checkpoint
    from basicsr.utils.safetensors_file import split_description

    net = find_network(args.model, network_of_options(args.opt) if args.opt else None, args.key)
    _, described = split_description(load_checkpoint(args.model))
    exported = export_network(
        *(net, args.to, args.output),
        described=described,
        bound=args.bound,
        overwrite=args.overwrite,
    )
    return str(exported)

"""``basicsr weights show net_g_latest.pth``."""

import argparse
from pathlib import Path

_ACTIONS = {
    'show': 'the entries of a file, the network that they fit, and the names, shapes and kinds',
    'interpolate': 'a network between two: (1 - ALPHA) * a + ALPHA * b',
    'average': 'the mean of files of one network, or averages of a run with train.posthoc_ema',
    'convert': 'from .pth to .safetensors, or back',
    'strip': 'the weights to publish alone, with the description of their network',
}
_EXAMPLES = {
    'show': 'basicsr weights show experiments/quickstart/models/net_g_latest.pth',
    'interpolate': 'basicsr weights interpolate psnr.pth gan.pth --alpha 0.8 -o between.pth',
    'average': 'basicsr weights average net_g_800.pth net_g_1600.pth -o mean.pth',
    'convert': 'basicsr weights convert net_g_latest.pth net_g.safetensors',
    'strip': 'basicsr weights strip net_g_latest.pth -o my_network.pth --hash',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest='action', required=True, metavar='ACTION')
    parsers = {}
    for name, text in _ACTIONS.items():
        parsers[name] = actions.add_parser(
            name, help=text, description=f'{text}.', epilog=f'Example: {_EXAMPLES[name]}'
        )
    parsers['show'].add_argument('file')
    add = parsers['interpolate'].add_argument
    add('a', help='file at --alpha 0')
    add('b', help='file at --alpha 1')
    add('--alpha', type=float, default=0.5, help='share of b, from 0 to 1 (default 0.5)')
    add = parsers['average'].add_argument
    add('sources', nargs='+', metavar='FILE', help='files; or the folder of a run, with --length')
    add_lengths(parsers['average'], required=False)
    add_conversion(parsers['convert'])
    add = parsers['strip'].add_argument
    add('source', help='file to read')
    add('--key', help='weights to keep (default: params_ema if they are there, else params)')
    add('--hash', action='store_true', help='add -<first 8 digits of the SHA-256> to the name')
    for name in ('interpolate', 'average', 'strip'):
        parsers[name].add_argument('-o', dest='target', required=True, help='file to write')
    for name in ('interpolate', 'average', 'convert', 'strip'):
        parsers[name].add_argument('--overwrite', action='store_true', help='replace such a file')


def add_lengths(parser: argparse.ArgumentParser, required: bool) -> None:
    """Declare what chooses averages of ``train.posthoc_ema``."""
    parser.add_argument(
        *('--length', '--lengths'),
        dest='lengths',
        nargs='+',
        type=float,
        required=required,
        help='standard deviation of the average over the iterations so far: 0.1 for a tenth',
    )
    parser.add_argument('--iter', type=int, help='iteration to end at; default: the last one')


def add_conversion(parser: argparse.ArgumentParser) -> None:
    """Declare what a conversion reads and writes."""
    parser.add_argument('source', help='file to read')
    parser.add_argument('target', help='file to write, .pth or .safetensors')
    parser.add_argument('--key', help='write the state dict of this key alone, and bare')


def main(args: argparse.Namespace) -> None:
    if args.action == 'interpolate' and not 0 <= args.alpha <= 1:
        args.parser.error(f'--alpha must be from 0 to 1, got {args.alpha:g}.')
    if args.action == 'average' and (len(args.sources) > 1) == bool(args.lengths):
        args.parser.error('average takes several files, or the folder of a run and --length.')
    from basicsr.run.program import run

    def act(_: Path) -> None:
        from basicsr.utils.text import write_out

        for line in _act(args):
            write_out(f'{line}\n')

    run(act, Path.cwd())


def _act(args: argparse.Namespace) -> list[str]:
    """Do what was asked for; returns what to say."""
    from basicsr.utils import weights

    if args.action == 'show':
        return list(weights.report(args.file))
    if args.action == 'average' and args.lengths:
        return average_of_run(args.sources[0], args.lengths, args.target, args.iter, args.overwrite)
    if args.action == 'convert':
        weights.convert(args.source, args.target, args.key, args.overwrite)
        return [f'{args.target}: written from {args.source}']
    if args.action == 'strip':
        file = weights.strip(args.source, args.target, args.key, args.hash, args.overwrite)
        return [f'{file}: written from {args.source}']
    if args.action == 'interpolate':
        sources, shares = [args.a, args.b], [1 - args.alpha, args.alpha]
    else:
        sources, shares = args.sources, [1 / len(args.sources)] * len(args.sources)
    keys = weights.combine(sources, shares, args.target, args.overwrite)
    parts = ' + '.join(f'{s:.4g} * {file}' for s, file in zip(shares, sources, strict=True))
    return [f'{args.target} ({", ".join(keys)}): {parts}']


def average_of_run(
    folder: str, lengths: list[float], target: str, iteration: int | None, overwrite: bool = False
) -> list[str]:
    """Write averages of a run with ``train.posthoc_ema``; returns what to say."""
    from basicsr.models.posthoc import write_averages

    return write_averages(folder, lengths, target, iteration, overwrite)

"""``basicsr table -m net_g_latest.pth --sets Set5=datasets/Set5/GTmod12``."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add('-m', '--models', nargs='+', default=[], metavar='FILE', help='checkpoints, a row for each')
    add(
        '--sets',
        nargs='+',
        default=[],
        metavar='NAME=GT[:LQ]',
        help='test sets; LQ images that are not given are made by bicubic reduction, as in MATLAB',
    )
    add('--results', nargs='+', default=[], metavar='FILE', help='results.json of tests')
    add('--rgb', action='store_true', help='score RGB; default: the luma')
    add('--border', type=int, help='pixels to crop from each side; default: the scale')
    add('--tile', type=int, default=0, help='side of tiles in LQ pixels; default: none')
    add('--ensemble', action='store_true', help='average over eight flips and rotations')
    add('--key', help='weights of the checkpoints; default: params_ema if they have them')
    add('--format', choices=['markdown', 'latex', 'csv'], default='markdown')
    add('-o', '--output', help='file to write; default: the terminal')


def main(args: argparse.Namespace) -> None:
    if bool(args.models) != bool(args.sets) or not (args.models or args.results):
        args.parser.error('name checkpoints (-m) and test sets (--sets), or results (--results).')
    if args.output and Path(args.output).exists():
        args.parser.error(f'{args.output} exists: name another file.')
    from basicsr.run.program import run

    run(lambda _: _write(args), Path.cwd())


def _write(args: argparse.Namespace) -> None:
    from basicsr.models.restore_files import shape_of
    from basicsr.run import score_table as scores

    rows, tests, protocol = [], [], None
    if args.models:
        networks = scores.load_networks(args.models, args.key)
        scale = shape_of(networks[args.models[0]]).scale
        border = scale if args.border is None else args.border
        colour = 'RGB' if args.rgb else 'Y'
        protocol = scores.Protocol(scale, colour, border, args.tile, args.ensemble)
        rows, tests = scores.score_checkpoints(networks, args.sets, protocol, args.key)
    known = {test.name: test.digest for test in tests}
    others, protocol, digests = scores.rows_of_results(args.results, protocol, known)
    tested = {name: digest for name, digest in digests.items() if name not in known}
    notes = [str(protocol), *(test.source for test in tests)]
    notes += [f'{name}: as tested, pixels {digest[:8]}' for name, digest in tested.items()]
    text = scores.table([*rows, *others], notes, args.format)
    if args.output:
        Path(args.output).write_text(text, encoding='utf-8')
    else:
        sys.stdout.write(text)

"""``basicsr list networks EDSR``."""

import argparse

from basicsr.utils.catalogue import KINDS, Component, component, components
from basicsr.utils.option_reference import meaning_of_argument
from basicsr.utils.text import write_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('kind', choices=list(KINDS), help='what to list')
    parser.add_argument('name', nargs='?', help='show one of them, with its arguments')


def main(args: argparse.Namespace) -> None:
    """Print what option files can name, or all about one of them."""
    if args.name is None:
        write_out(''.join(map(_line, components(args.kind).values())))
        return
    try:
        found = component(args.kind, args.name)
    except KeyError as error:
        args.parser.error(f'{error} See: basicsr list {args.kind}')
    write_out(describe(found, args.kind))


def _line(entry: Component) -> str:
    paper = f'  {entry.papers[0]}' if entry.papers else ''
    return f'{entry.name:<24}{entry.summary}{paper}\n'


def describe(entry: Component, kind: str) -> str:
    """Name, file, docstring, papers and a table of the arguments."""
    text = entry.text.replace('``', '')
    if entry.arguments:  # else what ``Args`` says is all that there is
        text = text.partition('\nArgs:')[0]
    lines = [f'{entry.name} (basicsr/{entry.file})', '', text.rstrip(), '']
    lines += [*entry.papers, ''] if entry.papers else []
    rows = [(a.name, a.type, a.default or 'required') for a in entry.arguments]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, argument in zip(rows, entry.arguments, strict=True):
        cells = (f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True))
        lines.append(f'  {"  ".join(cells)}  {meaning_of_argument(argument, kind)}'.rstrip())
    return '\n'.join([*lines, ''] if rows else lines)

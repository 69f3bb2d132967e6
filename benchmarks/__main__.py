"""Measure, print one table, and write it: python -m benchmarks [NAME …] [--json FILE] [--quick]"""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy
import torch
import torchvision

from basicsr.version import __version__

from . import (
    degradations,
    folder,
    metrics,
    modes,
    road,
    sampler,
    samples,
    startup,
    training,
    validation,
)
from .measure import Result, Row

BENCHMARKS: dict[str, Callable[[Path, bool], Result]] = {
    'samples': samples.measure,
    'step': training.measure_step,
    'uint8': training.measure_uint8,
    'modes': modes.measure,
    'validation': validation.measure,
    'metrics': metrics.measure,
    'degradations': degradations.measure,
    'sampler': sampler.measure,
    'startup': startup.measure,
    'folder': folder.measure,
    'road': road.measure,
}
HEAD = ('what', 'value', 'reference', 'ratio', 'goal', 'met')
BEGIN, END = '<!-- table: begin -->', '<!-- table: end -->'


def main(args: argparse.Namespace) -> str:
    """Run the measurements; returns the table."""
    # One thread, so that the second core is left to the loader's processes, as beside a GPU.
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    names = args.names or list(BENCHMARKS)
    before, after = around_table(Path(args.markdown)) if args.markdown else ('', '')
    rows: dict[str, list[Row]] = {}
    report: dict[str, Any] = {'machine': machine(), 'quick': args.quick, 'rows': [], 'raw': {}}
    with TemporaryDirectory(prefix='basicsr-benchmarks-', dir=args.folder) as temporary:
        for name in names:
            start = time.perf_counter()
            rows[name], report['raw'][name] = BENCHMARKS[name](Path(temporary), args.quick)
            for row in rows[name]:
                if args.quick:  # tiny sizes say nothing about speed
                    row.goal = None
                entry = {'benchmark': name, **asdict(row), 'ratio': row.ratio, 'met': row.met}
                report['rows'].append(entry)
            print(f'{name}: {time.perf_counter() - start:.0f} s', file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + '\n', encoding='utf-8')
    text = table(rows)
    if args.markdown:
        page = f'{before}{text}\n\n{described(report["machine"])}{after}'
        Path(args.markdown).write_text(page, encoding='utf-8')
    return text


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
    return {
        'date': time.strftime('%Y-%m-%d'),
        'processor': cpu[1] if cpu else platform.machine(),
        'cpus': os.cpu_count(),
        'load': os.getloadavg()[0],
        'system': platform.platform(),
        'versions': {
            'basicsr': __version__,
            'python': platform.python_version(),
            **{part.__name__: part.__version__ for part in (torch, torchvision, numpy, cv2)},
        },
    }


def table(rows: dict[str, list[Row]]) -> str:
    """The rows as a Markdown table."""
    return lined_up([HEAD, *(line(name, row) for name, found in rows.items() for row in found)])


def lined_up(cells: list[tuple[str, ...]]) -> str:
    """A head and rows of texts as a Markdown table whose columns line up."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells = [cells[0], tuple('-' * width for width in widths), *cells[1:]]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, texts, widths)) + ' |' for texts in cells)


def line(name: str, row: Row) -> tuple[str, ...]:
    """The texts of one row."""
    return (
        f'{name}: {row.what}',
        f'{short(row.value)} {row.unit}',
        '' if row.reference is None else f'{short(row.reference)} {row.unit}',
        '' if row.ratio is None else f'{row.ratio:.3g}',
        '' if row.goal is None else f'{row.goal[0]} {row.goal[1]:g}',
        {None: '', True: 'yes', False: 'no'}[row.met],
    )


def short(number: float) -> str:
    return f'{number:,.0f}' if abs(number) >= 1000 else f'{number:.3g}'


def described(about: dict[str, Any]) -> str:
    versions = ', '.join(f'{name} {number}' for name, number in about['versions'].items())
    return (
        f'{about["date"]}, {about["processor"]}, {about["cpus"]} cores, load at the start '
        f'{about["load"]:.1f}; {versions}.'
    )


def around_table(page: Path) -> tuple[str, str]:
    """What stands before and behind the table of a page.

    Raises:
        ValueError: The page lacks a marker.
    """
    before, begin, rest = page.read_text(encoding='utf-8').partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f'{page} needs the lines {BEGIN} and {END}: the table goes between them.')
    return f'{before}{BEGIN}\n', f'\n{END}{after}'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks', description=__doc__)
    parser.add_argument('names', nargs='*', metavar='NAME', help=f'{", ".join(BENCHMARKS)}; all')
    parser.add_argument('--quick', action='store_true', help='tiny sizes: does everything run?')
    parser.add_argument('--json', metavar='FILE', help='write every number there')
    parser.add_argument('--markdown', metavar='FILE', help='page whose table is replaced')
    parser.add_argument('--folder', metavar='FOLDER', help='where files are made for a while')
    args = parser.parse_args()
    unknown = set(args.names) - set(BENCHMARKS)
    if unknown:
        parser.error(
            f'no benchmark {", ".join(sorted(unknown))}; there are {", ".join(BENCHMARKS)}'
        )
    return args


if __name__ == '__main__':
    print(main(parse_args()))

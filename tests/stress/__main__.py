"""Break runs, files and links on purpose, and count what goes right.

python tests/stress [NAME …] [--minutes 30] [--share 1] [--json FILE] [--markdown PAGE]
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(HERE.parent)]
# What is started here shall run this checkout, wherever it is started.
os.environ['PYTHONPATH'] = os.pathsep.join(sys.path[:2])
os.environ.setdefault('OMP_NUM_THREADS', '1')

import tally  # noqa: E402 - needs the paths above

import basicsr  # noqa: E402
from benchmarks.__main__ import around_table, lined_up  # noqa: E402

KINDS = ('kills', 'damage', 'disk', 'fuzz', 'faults')
HEAD = ('what', 'expected', 'cases', 'right')


def main(args: argparse.Namespace) -> int:
    """Run the kinds that were named; returns the exit status: 1 if anything went wrong."""
    before, after = around_table(Path(args.markdown)) if args.markdown else ('', '')
    begin, found = time.monotonic(), {}
    names = args.names or list(KINDS)
    with TemporaryDirectory(prefix='basicsr-stress-', dir=args.folder) as temporary:
        os.environ['XDG_CACHE_HOME'] = str(Path(temporary) / 'cache')  # of decoded images
        for number, name in enumerate(names):
            now = time.monotonic()
            left = begin + 60 * args.minutes - now
            budget = tally.Budget(now + left / (len(names) - number), args.share)
            folder = Path(temporary) / name
            folder.mkdir()
            found[name] = importlib.import_module(name).run(folder, budget)
    if args.json:
        report = {name: [asdict(row) for row in rows] for name, rows in found.items()}
        Path(args.json).write_text(json.dumps(report, indent=1) + '\n', encoding='utf-8')
    rows = [row for part in found.values() for row in part]
    minutes = (time.monotonic() - begin) / 60
    text = f'{table(rows)}\n\n{time.strftime("%Y-%m-%d")}, {minutes:.0f} min, {machine()}.'
    if args.markdown:
        Path(args.markdown).write_text(f'{before}{text}{after}', encoding='utf-8')
    sys.stdout.write(f'{text}\n')
    return int(any(row.failures for row in rows))


def table(rows: list[tally.Tally]) -> str:
    """The rows as a Markdown table."""
    texts = ((row.what, row.expected, str(row.cases), str(row.right)) for row in rows)
    return lined_up([HEAD, *texts])


def machine() -> str:
    return f'{os.cpu_count()} cores, {platform.system()}, basicsr {basicsr.__version__}'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python tests/stress', description=__doc__)
    parser.add_argument('names', nargs='*', metavar='NAME', help=f'{", ".join(KINDS)}; all')
    parser.add_argument('--minutes', type=float, default=30, help='of all together; 30')
    parser.add_argument('--share', type=float, default=1, help='of the usual number of cases; 1')
    parser.add_argument('--json', metavar='FILE', help='write every row and failure there')
    parser.add_argument('--markdown', metavar='PAGE', help='page whose table is replaced')
    parser.add_argument('--folder', metavar='FOLDER', help='where files are made for a while')
    args = parser.parse_args()
    unknown = set(args.names) - set(KINDS)
    if unknown:
        parser.error(f'no {", ".join(sorted(unknown))}; there are {", ".join(KINDS)}')
    if args.share <= 0:
        parser.error(f'--share is {args.share:g}; give a number above 0.')
    return args


if __name__ == '__main__':
    sys.exit(main(parse_args()))

"""``basicsr report experiments/quickstart``."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add('runs', nargs='*', help='folders or names of trainings or tests; default: the newest')
    add('-o', '--output', help='page (default: report.html, of one run in its folder)')


def main(args: argparse.Namespace) -> None:
    from basicsr.run.program import run

    run(lambda root: report(args, root), Path.cwd())


def report(args: argparse.Namespace, root: Path) -> None:
    """Write the page that the flags ask for, and say where it is."""
    from basicsr.run.report import find_runs, write_report

    folders = find_runs(args.runs, root)
    file = Path(args.output or (folders[0] if len(folders) == 1 else root) / 'report.html')
    write_report(folders, file)
    sys.stdout.write(f'The report is in {file}\n')

"""``basicsr doctor -opt options/quickstart.yml --html doctor.html``."""

import argparse
import logging
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_EXAMPLES = """Examples: basicsr doctor -opt options/quickstart.yml --html doctor.html
          basicsr doctor datasets/DIV2K/DIV2K_train_HR --gt-size 256
          basicsr doctor --gt mine/gt --lq mine/lq_x4 --scale 4 --exclude-list bad.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add('folder', nargs='?', help='GT images; or use -opt, or --gt and --lq')
    add('-opt', metavar='FILE', help='option file of a training (YAML): all its sets')
    add('--force_yml', nargs='+', default=[], metavar='A:B=VALUE', help='set options of the file')
    add('--no-step', action='store_true', help='with -opt: do not try the first training step')
    add('--gt', metavar='FOLDER', help='GT images')
    add('--lq', metavar='FOLDER', help='LQ images, paired by name')
    add('--scale', type=int, help='size of GT / size of LQ, with --lq')
    add('--gt-size', type=int, default=0, metavar='N', help='side of the crops to be cut of GT')
    add('--filename-tmpl', default='{}', metavar='T', help='base name of LQ from GT, as {}x4')
    add('--recursive', action='store_true', help='look into sub-folders')
    add('--json', metavar='FILE', help='write all findings')
    add('--html', metavar='FILE', help='write a page with the worst images')
    add('--exclude-list', metavar='FILE', help="write names for the option 'exclude' of a dataset")
    add('--strict', action='store_true', help='warnings end with status 1 too')
    add('--workers', type=int, default=os.cpu_count(), help='threads (default: one a processor)')


def main(args: argparse.Namespace) -> int:
    """Look through the data; returns 0 if training can start, else 1."""
    _check(args)
    from basicsr.run.program import run

    status = 0

    def examine(root: Path) -> None:
        nonlocal status
        status = doctor(args, root)

    run(examine, Path.cwd())
    return status


def _check(args: argparse.Namespace) -> None:
    given = [bool(args.opt), bool(args.folder), bool(args.gt)]
    if sum(given) != 1:
        args.parser.error('give one of -opt FILE, a FOLDER, and --gt FOLDER.')
    if bool(args.lq) != bool(args.scale) or (args.lq and not args.gt):
        args.parser.error('--gt, --lq and --scale go together.')
    if args.workers < 1 or args.gt_size < 0 or (args.scale or 1) < 1:
        args.parser.error('--workers and --scale must be 1 or more, --gt-size 0 or more.')
    if {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'} <= os.environ.keys():  # as torchrun sets them
        args.parser.error('one process looks through the data: start it without torchrun.')


def doctor(args: argparse.Namespace, root: Path) -> int:
    """Look through the data as the flags say, and report; returns the exit status."""
    from basicsr.run.doctor import look_through
    from basicsr.run.doctor_report import (
        table,
        write_exclusion_list,
        write_html,
        write_json,
    )

    logging.disable(logging.INFO)  # what a run says of its sets and its network
    try:
        report = _of_options(args, root) if args.opt else _of_folders(args)
        look_through(report.sets, args.workers)
    finally:
        logging.disable(logging.NOTSET)
    sys.stdout.write(table(report))
    if args.json:
        write_json(report, args.json)
    if args.html:
        write_html(report, args.html)
    if args.exclude_list:
        count = write_exclusion_list(report, args.exclude_list)
        sys.stdout.write(f'{count} names in {args.exclude_list}\n')
    return int(not report.can_start or bool(args.strict and report.warnings))


def _of_options(args: argparse.Namespace, root: Path):
    from basicsr.run.doctor import first_step, sets_of_options
    from basicsr.run.doctor_report import Report
    from basicsr.run.program import prepare

    with TemporaryDirectory(prefix='basicsr_doctor_', ignore_cleanup_errors=True) as folder:
        # Neither a run of this name nor the cache of decoded images is touched.
        forced = [f'path:experiments_root={folder}/run', 'datasets:train:cache=off']
        sys.argv = ['basicsr doctor', '-opt', args.opt, '--force_yml', *args.force_yml, *forced]
        opt, _ = prepare(root, is_train=True)
        sets, left_out = sets_of_options(opt)
        losses, error = (None, '') if args.no_step else first_step(opt)
    return Report(sets, left_out, losses, error)


def _of_folders(args: argparse.Namespace):
    from basicsr.run.doctor import set_of_folders
    from basicsr.run.doctor_checks import Demands
    from basicsr.run.doctor_report import Report

    demands = Demands(args.scale or 1, args.gt_size)
    folder = args.folder or args.gt
    sets = [set_of_folders(folder, args.lq, demands, args.filename_tmpl, args.recursive)]
    return Report(sets)

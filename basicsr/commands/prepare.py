"""``basicsr prepare pairs photos --scale 4 --val 10%``."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Add = Callable[..., Any]  # ``add_argument`` of a parser


def _pairs(add: Add) -> None:
    add('folder', help='photographs of any size')
    _scale(add)
    _val(add)
    add('-o', '--output', help='default: datasets/<name of the folder>_x<scale>')


def _lq(add: Add) -> None:
    add('-i', '--input', required=True, dest='source', help='folder of the images to reduce (GT)')
    add('-o', '--output', required=True, help='folder for the reduced images (LQ)')
    _scale(add)
    add('--gt-output', help='folder for the GT, cropped to multiples of the scale')


def _subimages(add: Add) -> None:
    add('-i', '--input', dest='source', help='folder of the images; without: those of DIV2K')
    add('-o', '--output', help='folder for the sub-images')
    add('--crop-size', type=int, default=480, help='side of a sub-image (default 480)')
    add('--step', type=int, default=240, help='pixels between two sub-images (default 240)')
    add('--thresh-size', type=int, default=0, help='remainder that may be lost (default 0)')
    _compression(add, 3)
    _recursive(add)


def _lmdb(add: Add) -> None:
    add('--dataset', choices=('DIV2K', 'REDS', 'Vimeo90K'), help='all LMDBs of a set')
    add('-i', '--input', dest='source', help='folder of the images')
    add('-o', '--output', help='the LMDB, named *.lmdb')
    _recursive(add)
    add('--meta-info', help='take what this file lists: images, or their folders')
    add('--pattern', default='*', help='take only such names, as im4.png')
    add('--cut-suffix', default='', help='ending to leave out in keys, as x4')
    _compression(add, 1)


def _meta(add: Add) -> None:
    text = 'folder of the images; without: the sub-images of DIV2K'
    add('-i', '--input', dest='source', help=text)
    add('-o', '--output', help='the list, a text file')
    _recursive(add)


def _split(add: Add) -> None:
    add('--gt', required=True, help='folder of the GT images')
    add('--lq', help='folder of the LQ images, paired by name')
    add('-o', '--output', required=True, help='folder for the lists, train.txt and val.txt')
    _val(add)
    add('--filename-tmpl', default='{}', metavar='T', help='base name of LQ from GT, as {}x4')


def _reds(add: Add) -> None:
    add('--train', help='folder of the training clips; without: both of datasets/REDS')
    add('--val', help='folder of the validation clips')


def _tfrecords(add: Add) -> None:
    add('sources', nargs='+', metavar='FILE', help='TFRecord files, in order')
    add('-o', '--output', required=True, help='folder for the images')
    _compression(add, 1)


def _scale(add: Add) -> None:
    add('--scale', required=True, type=int, help='factor between the sizes of GT and LQ')


def _val(add: Add) -> None:
    text = 'images drawn for validation: a number, or a share (default 10%%)'
    add('--val', default='10%', metavar='N', help=text)
    add('--seed', type=int, default=0, help='of the drawing (default 0)')


def _recursive(add: Add) -> None:
    add('--recursive', action='store_true', help='look into sub-folders too')


def _compression(add: Add, default: int) -> None:
    text = f'of PNG, 0 to 9 (default {default})'
    add('--compression-level', type=int, default=default, choices=range(10), help=text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'must be at least 1, got {text}')
    return int(text)


class Action(NamedTuple):
    """A sub-command: what it makes, an example, its function, its flags.

    The names of the flags are those of the function's arguments.
    """

    text: str
    example: str
    function: str
    add_flags: Callable[[Add], None]
    existing: tuple[str, ...] = ('overwrite', 'resume')
    workers: bool = True


ACTIONS = {
    'pairs': Action(
        'pairs for training and validation out of photographs, and an option file',
        'photos --scale 4 --val 10%',
        'preparing_pairs.prepare_pairs',
        _pairs,
    ),
    'lq': Action(
        "the low-quality images of a super-resolution dataset: MATLAB's bicubic, as PNG files",
        '-i photos -o photos_x4 --gt-output photos_gt --scale 4',
        'preparing.make_lq',
        _lq,
    ),
    'subimages': Action(
        'overlapping sub-images, which are read faster than whole images in training',
        '-i DIV2K_train_HR -o DIV2K_train_HR_sub --crop-size 480 --step 240',
        'preparing.extract_subimages',
        _subimages,
    ),
    'lmdb': Action(
        'an LMDB of the images of a folder, under their names without the extension',
        '-i DIV2K_train_HR_sub -o DIV2K_train_HR_sub.lmdb',
        'preparing.create_lmdb',
        _lmdb,
    ),
    'meta': Action(
        'a list of the images of a folder with their sizes, as meta_info_file: name (h,w,c)',
        '-i DIV2K_train_HR_sub -o train.txt',
        'preparing.write_meta_info',
        _meta,
        existing=('overwrite',),
    ),
    'split': Action(
        'two lists of existing pairs, for training and for validation, as meta_info_file',
        '--gt photos_gt --lq photos_x4 -o lists --val 10%',
        'preparing_pairs.split_pairs',
        _split,
        existing=('overwrite',),
        workers=False,
    ),
    'reds': Action(
        'training clips of REDS out of those for validation, as 240 and on',
        '--train REDS/train_sharp --val REDS/val_sharp',
        'preparing_published.regroup_reds',
        _reds,
        existing=('resume',),
    ),
    'tfrecords': Action(
        'PNG files of the images in TFRecord files, as of FFHQ and CelebA-HQ',
        'ffhq-r10.tfrecords -o datasets/ffhq/ffhq_1024',
        'preparing_published.extract_tfrecords',
        _tfrecords,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest='action', required=True, metavar='ACTION')
    for name, action in ACTIONS.items():
        _add_flags(actions.add_parser(name, help=f'make {action.text}'), name)


def _add_flags(parser: argparse.ArgumentParser, name: str) -> None:
    action = ACTIONS[name]
    parser.description = f'Make {action.text}.'
    parser.epilog = f'Example: basicsr prepare {name} {action.example}'
    action.add_flags(parser.add_argument)
    if action.workers:
        text = 'threads (default: one a processor)'
        parser.add_argument('--workers', type=_count, default=os.cpu_count(), help=text)
    existing = parser.add_mutually_exclusive_group()
    for flag, text in (('resume', 'keep what exists and continue'), ('overwrite', 'replace it')):
        if flag in action.existing:
            existing.add_argument(f'--{flag}', action='store_true', help=text)


def main(args: argparse.Namespace) -> None:
    from basicsr.run.program import run
    from basicsr.utils.text import write_out

    flags = {
        name: value
        for name, value in vars(args).items()
        if name not in ('action', 'command', 'main', 'parser')
    }

    run(lambda _: write_out(f'{_act(args.action, flags)}\n'), Path.cwd())


def _act(name: str, flags: dict[str, Any]) -> str:
    """Do what was asked for; returns what was done."""
    module, _, function = ACTIONS[name].function.partition('.')
    try:
        return getattr(importlib.import_module(f'basicsr.data.{module}'), function)(**flags)
    except KeyboardInterrupt:
        hint = ['--resume continues from here.'] if 'resume' in ACTIONS[name].existing else []
        raise KeyboardInterrupt(*hint) from None


def script(name: str) -> None:
    """Do one action as a program of its own: a script of BasicSR 1.x, with the same flags.

    An error or Ctrl-C ends the program with one line and status 1.
    """
    parser = argparse.ArgumentParser()
    _add_flags(parser, name)
    flags = vars(parser.parse_args())
    try:
        sys.stdout.write(f'{_act(name, flags)}\n')
        return
    except (ImportError, OSError, ValueError) as error:
        message = ' '.join(str(error).split())
    except KeyboardInterrupt as interrupt:
        message = ' '.join(['interrupted.', *interrupt.args])
    sys.exit(f'{Path(parser.prog).stem}: {message}')

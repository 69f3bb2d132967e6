"""``basicsr cache [list|clear] [--folder FOLDER]``."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('action', nargs='?', choices=['list', 'clear'], default='list')
    parser.add_argument('--folder', help='folder named by datasets.*.cache; default: that of auto')


def main(args: argparse.Namespace) -> None:
    from basicsr.data.image_cache import clear_caches, default_root, list_caches
    from basicsr.utils.text import printable, sizeof_fmt

    try:
        root = Path(args.folder or default_root())
    except FileNotFoundError as error:
        args.parser.error(str(error))
    if args.folder and not root.is_dir():
        args.parser.error(f'{root} is no folder.')
    if args.action == 'clear':
        sys.stdout.write(f'{sizeof_fmt(clear_caches(root))} freed in {root}\n')
        return
    caches = sorted(list_caches(root), key=lambda cache: cache['size'], reverse=True)
    for cache in caches:
        about = printable(f'{cache["images"]} {cache["kind"]} images, first {cache["first"]}')
        sys.stdout.write(f'{sizeof_fmt(cache["size"]):>10}  {cache["folder"]}  {about}\n')
    total = sizeof_fmt(sum(cache['size'] for cache in caches))
    sys.stdout.write(f'{total:>10}  {len(caches)} caches in {root}\n')

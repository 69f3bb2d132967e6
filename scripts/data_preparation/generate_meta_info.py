"""List the images of a folder with their sizes, as ``meta_info_file``: lines ``name (h,w,c)``."""

import argparse
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.data.data_util import list_images
from basicsr.utils.errors import UserError
from basicsr.utils.img_util import read_unchanged
from basicsr.utils.misc import atomic_path
from basicsr.utils.parallel import for_each_file, run_script

DIV2K = 'datasets/DIV2K/DIV2K_train_HR_sub'
LIST = 'basicsr/data/meta_info/meta_info_DIV2K800sub_GT.txt'


def shape_of(path: Path) -> str:
    """``(h,w,c)`` of the decoded image: a file that is damaged further on is found out as well."""
    height, width, *channels = read_unchanged(path).shape
    return f'({height},{width},{channels[0] if channels else 1})'


def main(args: argparse.Namespace) -> str:
    if bool(args.input) != bool(args.output):
        raise UserError('give --input and --output, or none of them for the sub-images of DIV2K.')
    source, output = Path(args.input or DIV2K), Path(args.output or LIST)
    names = list_images(source, args.recursive)
    if not names:
        raise FileNotFoundError(f'{source} holds no images.')
    for name in names:
        if ' ' in name:
            raise UserError(f"'{name}': a name ends at its first blank in a list, so rename it.")
        if '\\' in Path(name).as_posix():
            raise UserError(f"'{name}': a list reads \\ as the slash of a folder, so rename it.")
    if output.exists() and not args.overwrite:
        raise FileExistsError(f'{output} exists: choose another name or add --overwrite.')
    shapes = for_each_file(shape_of, [source / name for name in names], args.workers)
    lines = [f'{Path(n).as_posix()} {shape}\n' for n, shape in zip(names, shapes, strict=True)]
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary:
        temporary.write_text(''.join(lines), encoding='utf-8')
    return f'{len(lines)} images of {source} are listed in {output}.'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--input', help='folder of the images; without: the sub-images of DIV2K')
    parser.add_argument('--output', help='the list, a text file')
    parser.add_argument('--recursive', action='store_true', help='look into sub-folders too')
    print(run_script(main, parser, resumable=False))

"""Write the images of a folder into an LMDB, under their names without the extension."""

import argparse
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.data.data_util import check_files_exist, list_images, names_from_meta_info_file
from basicsr.utils.errors import UserError
from basicsr.utils.lmdb_util import make_lmdb_from_imgs
from basicsr.utils.parallel import run_script

DIV2K, REDS = 'datasets/DIV2K/DIV2K_train_', 'datasets/REDS/train_sharp'
# What --dataset stands for: folder, LMDB, and whether to look into sub-folders.
DATASETS = {
    'DIV2K': [
        (f'{DIV2K}HR_sub', f'{DIV2K}HR_sub.lmdb', False),
        *(
            (f'{DIV2K}LR_bicubic/{x}_sub', f'{DIV2K}LR_bicubic_{x}_sub.lmdb', False)
            for x in ('X2', 'X3', 'X4')
        ),
    ],
    'REDS': [
        (REDS, f'{REDS}_with_val.lmdb', True),
        (f'{REDS}_bicubic/X4', f'{REDS}_bicubic_with_val.lmdb', True),
    ],
}


def find(args: argparse.Namespace) -> list[str]:
    """Images to take, relative to the folder, sorted; in listed folders all that they hold."""
    names = [] if args.meta_info else list_images(args.input, args.recursive)
    listed = names_from_meta_info_file(args.meta_info) if args.meta_info else []
    entries = [Path(args.input, name) for name in listed]
    check_files_exist(([] if e.is_dir() else [str(e)] for e in entries), args.meta_info)
    for name, entry in zip(listed, entries, strict=True):
        names += [name] if entry.is_file() else [f'{name}/{n}' for n in list_images(entry)]
    return sorted({name for name in names if fnmatchcase(Path(name).name, args.pattern)})


def main(args: argparse.Namespace) -> str:
    if not args.dataset:
        return make(args)
    made = []
    for folder, lmdb, recursive in DATASETS[args.dataset]:
        more = {'input': folder, 'output': lmdb, 'recursive': recursive}
        made.append(make(argparse.Namespace(**vars(args) | more)))
    return '\n'.join(made)


def make(args: argparse.Namespace) -> str:
    if not (args.input and args.output):
        raise UserError('give --input and --output, or --dataset.')
    source, output = Path(args.input), Path(args.output)
    names = find(args)
    if not names:
        raise FileNotFoundError(f"{source} holds no images '{args.pattern}' to take.")
    keys = [Path(n).with_suffix('').as_posix().removesuffix(args.cut_suffix) for n in names]
    if output.exists() and not (args.resume or args.overwrite):
        raise FileExistsError(f'{output} exists: add --resume to go on or --overwrite.')
    replaced = output.exists() and args.overwrite
    if replaced and not (output / 'data.mdb').is_file():
        raise FileExistsError(f'{output} is no LMDB: choose another name.')
    # The old one stays until the new one is whole.
    target = output.with_name(f'.{output.name}.new.lmdb') if replaced else output
    if replaced:
        shutil.rmtree(target, ignore_errors=True)
    make_lmdb_from_imgs(
        source,
        target,
        names,
        keys,
        batch=100,  # no more is lost by a kill
        compress_level=args.compression_level,
        multiprocessing_read=True,
        n_thread=args.workers,
        resume=args.resume,
    )
    if replaced:
        shutil.rmtree(output)
        target.rename(output)
    return f'{len(keys)} images of {source} are in {output}.'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--dataset', choices=DATASETS, help='all LMDBs of a set, in its folder')
    parser.add_argument('--input', help='folder of the images')
    parser.add_argument('--output', help='the LMDB, named *.lmdb')
    parser.add_argument('--recursive', action='store_true', help='look into sub-folders too')
    parser.add_argument('--meta-info', help='take what this file lists: images, or their folders')
    parser.add_argument('--pattern', default='*', help='take only such names, as im4.png')
    parser.add_argument('--cut-suffix', default='', help='ending to leave out in keys, as x4')
    parser.add_argument('--compression-level', type=int, default=1, help='of PNG, 0 to 9')
    print(run_script(main, parser))

"""Make the low-quality images of a super-resolution dataset: MATLAB's bicubic, as PNG files."""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.data.data_util import list_images
from basicsr.utils.errors import UserError
from basicsr.utils.img_util import imwrite, read_unchanged
from basicsr.utils.matlab_functions import reduce_image
from basicsr.utils.parallel import for_each_file, made_with, run_script


def make_pair(path: Path, folders: list[Path], scale: int) -> None:
    """Write the reduced image and, if there is a second folder, the image cut to ``scale``."""
    img = read_unchanged(path)
    height, width = img.shape[:2]
    if min(height, width) < scale:
        raise UserError(f'{width} x {height} pixels are too few for scale {scale}.')
    gt = img[: height - height % scale, : width - width % scale]
    if gt.shape != img.shape:
        change = f'{path} has {width} x {height} pixels, no multiple of {scale}'
        if len(folders) == 1:
            raise UserError(
                f'{change}: give a folder for the cropped GT (--gt-output), and --resume to go on.'
            )
        tqdm.write(f'{change}: cropped to {gt.shape[1]} x {gt.shape[0]}.', file=sys.stderr)
    for folder, made in zip(folders, (reduce_image(gt, scale), gt), strict=False):
        imwrite(made, folder / f'{path.stem}.png')


def main(args: argparse.Namespace) -> str:
    source, *folders = (Path(name) for name in (args.input, args.output, args.gt_output) if name)
    paths = [source / name for name in list_images(source)]
    targets = [folder / f'{path.stem}.png' for folder in folders for path in paths]
    if args.scale < 2:
        raise UserError(f'--scale must be at least 2, got {args.scale}.')
    if not paths:
        raise FileNotFoundError(f'{source} holds no images.')
    if len(set(targets)) < len(targets) or source.resolve() in (f.resolve() for f in folders):
        raise UserError('Two files would share a name: use different folders and file names.')
    existing = {path for path in targets if path.exists()}
    if existing and not (args.resume or args.overwrite):
        raise FileExistsError(f'{min(existing)} exists: add --resume to go on or --overwrite.')
    kept = existing if args.resume else set()
    missing = [p for p in paths if not kept.issuperset(f / f'{p.stem}.png' for f in folders)]
    with made_with(folders[0], {'--scale': args.scale}, bool(existing), args.overwrite):
        for _ in for_each_file(lambda p: make_pair(p, folders, args.scale), missing, args.workers):
            pass
    there = f' ({len(paths) - len(missing)} were there already)' if args.resume else ''
    places = ' and their GT in '.join(map(str, folders))
    return f'{len(paths)} images of {source}, reduced to 1/{args.scale}, are in {places}{there}.'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--input', required=True, help='folder of the images to reduce (GT)')
    parser.add_argument('--output', required=True, help='folder for the reduced images (LQ)')
    parser.add_argument('--scale', required=True, type=int, help='factor between the two sizes')
    parser.add_argument('--gt-output', help='folder for the GT, cropped to multiples of the scale')
    print(run_script(main, parser))

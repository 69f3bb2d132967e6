"""Cut images into overlapping sub-images, which are read faster than whole ones in training."""

import argparse
import re
import sys
from pathlib import Path

from tqdm import tqdm

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.data.data_util import list_images
from basicsr.utils.errors import UserError
from basicsr.utils.img_util import cv2, imwrite, read_unchanged
from basicsr.utils.parallel import for_each_file, made_with, run_script

DIV2K = 'datasets/DIV2K/DIV2K_train_'
# What is cut without --input: folder, side and step of its sub-images.
FOLDERS = (
    (f'{DIV2K}HR', 480, 240),
    (f'{DIV2K}LR_bicubic/X2', 240, 120),
    (f'{DIV2K}LR_bicubic/X3', 160, 80),
    (f'{DIV2K}LR_bicubic/X4', 120, 60),
)


def starts(length: int, args: argparse.Namespace) -> list[int]:
    """Where sub-images begin on one axis: every step, and where the last one ends at the border."""
    positions = list(range(0, length - args.crop_size + 1, args.step))
    if length - (positions[-1] + args.crop_size) > args.thresh_size:
        positions.append(length - args.crop_size)
    return positions


def cut(path: Path, target: Path, args: argparse.Namespace) -> list[Path]:
    """Write the sub-images ``<target>_s001…``, with --resume those not there yet; returns all."""
    img = read_unchanged(path)
    (height, width), size = img.shape[:2], args.crop_size
    if min(height, width) < size:
        reason = f'{width} x {height} pixels are too few for --crop-size {size}'
        tqdm.write(f'{path} is left out: {reason}.', file=sys.stderr)
        return []
    png = (cv2.IMWRITE_PNG_COMPRESSION, args.compression_level)
    jpeg = (cv2.IMWRITE_JPEG_QUALITY, 100)  # the second compression should lose nothing visible
    params = {'.png': png, '.jpg': jpeg, '.jpeg': jpeg}.get(path.suffix.lower())
    corners = [(y, x) for y in starts(height, args) for x in starts(width, args)]
    names = [f'{target.name}_s{number:03d}{path.suffix}' for number in range(1, len(corners) + 1)]
    parts = [target.with_name(name) for name in names]
    for part, (y, x) in zip(parts, corners, strict=True):
        if not (args.resume and part.exists()):
            imwrite(img[y : y + size, x : x + size], part, params)
    return parts


def main(args: argparse.Namespace) -> str:
    if args.input and args.output:
        return make(args)
    if args.input or args.output:
        raise UserError('give --input and --output, or none of them for all folders of DIV2K.')
    made = []
    for folder, size, step in FOLDERS:
        more = {'input': folder, 'output': f'{folder}_sub', 'crop_size': size, 'step': step}
        made.append(make(argparse.Namespace(**vars(args) | more)))
    return '\n'.join(made)


def make(args: argparse.Namespace) -> str:
    source, output = Path(args.input), Path(args.output)
    paths = [source / name for name in list_images(source, args.recursive)]
    # Without the scale at its end, the name of a low-quality image is that of its GT.
    names = [re.sub('x[2348]$', '', str(p.relative_to(source).with_suffix(''))) for p in paths]
    if not paths:
        raise FileNotFoundError(f'{source} holds no images.')
    if args.crop_size < 1 or args.step < 1 or args.thresh_size < 0:
        raise UserError('--crop-size and --step must be at least 1, --thresh-size 0.')
    target_of = {path: output / name for path, name in zip(paths, names, strict=True)}
    if len(set(names)) < len(names):
        raise UserError('Two images differ in x2, x3, x4, x8 or the extension alone: rename one.')
    if output.resolve().is_relative_to(source.resolve()):
        raise UserError(f'{output} must not be {source} or a folder in it.')
    stems, parts = set(names), list_images(output, args.recursive) if output.is_dir() else []
    existing = [output / n for n in parts if re.sub(r'_s\d{3,}\.\w+$', '', n) in stems]
    if existing and not (args.resume or args.overwrite):
        raise FileExistsError(f'{existing[0]} exists: add --resume to go on or --overwrite.')
    settings = {
        '--crop-size': args.crop_size,
        '--step': args.step,
        '--thresh-size': args.thresh_size,
    }
    with made_with(output, settings, bool(existing), args.overwrite):
        parts_of = list(for_each_file(lambda p: cut(p, target_of[p], args), paths, args.workers))
        small = parts_of.count([])
        if small == len(paths):
            raise UserError(f'all {small} images are smaller than --crop-size {args.crop_size}.')
        written = {part for parts in parts_of for part in parts}
        for path in set(existing) - written if args.overwrite else []:  # of a finer cutting
            path.unlink()
    result = f'{len(written)} sub-images of {len(paths) - small} images are in {output}.'
    return result + (f' Left out as too small: {small} images.' if small else '')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--input', help='folder of the images; without: those of DIV2K')
    parser.add_argument('--output', help='folder for the sub-images')
    parser.add_argument('--crop-size', type=int, default=480, help='side of a sub-image')
    parser.add_argument('--step', type=int, default=240, help='pixels between two sub-images')
    parser.add_argument('--thresh-size', type=int, default=0, help='remainder that may be lost')
    parser.add_argument('--compression-level', type=int, default=3, help='of PNG, 0 to 9')
    parser.add_argument('--recursive', action='store_true', help='look into sub-folders too')
    print(run_script(main, parser))

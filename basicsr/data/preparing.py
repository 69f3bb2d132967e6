"""Prepare folders of images for a training: reduced images, sub-images, lists, LMDBs.

Every function works on several images at a time, and returns what it did in a sentence. Nothing
that exists is touched by default: ``resume`` keeps it and makes what is missing, after an
interruption too, and ``overwrite`` replaces it.
"""

import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from basicsr.utils.errors import UserError
from basicsr.utils.image_header import orientation
from basicsr.utils.img_util import cv2, imwrite, read_unchanged
from basicsr.utils.lmdb_util import make_lmdb_from_imgs
from basicsr.utils.matlab_functions import reduce_image
from basicsr.utils.misc import atomic_path
from basicsr.utils.parallel import for_each_file, made_with
from basicsr.utils.text import some

from .data_util import check_files_exist, list_images, names_from_meta_info_file
from .transforms import mod_crop

logger = logging.getLogger(__name__)

_DIV2K, _REDS = 'datasets/DIV2K/DIV2K_train_', 'datasets/REDS/'
_VIMEO = 'datasets/vimeo90k/vimeo_septuplet'
# What is cut without a folder: that of the images, side and step of the sub-images.
_CUT = (
    (f'{_DIV2K}HR', 480, 240),
    (f'{_DIV2K}LR_bicubic/X2', 240, 120),
    (f'{_DIV2K}LR_bicubic/X3', 160, 80),
    (f'{_DIV2K}LR_bicubic/X4', 120, 60),
)
_LISTED = f'{_DIV2K}HR_sub', 'basicsr/data/meta_info/meta_info_DIV2K800sub_GT.txt'
# The LMDBs of a set: arguments of ``create_lmdb``.
DATABASES: dict[str, list[dict[str, Any]]] = {
    'DIV2K': [
        {'source': f'{_DIV2K}HR_sub', 'output': f'{_DIV2K}HR_sub.lmdb'},
        *(
            {'source': f'{_DIV2K}LR_bicubic/{x}_sub', 'output': f'{_DIV2K}LR_bicubic_{x}_sub.lmdb'}
            for x in ('X2', 'X3', 'X4')
        ),
    ],
    'REDS': [
        {'source': f'{_REDS}{source}', 'output': f'{_REDS}{name}_with_val.lmdb', 'recursive': True}
        for source, name in (
            ('train_sharp', 'train_sharp'),
            ('train_sharp_bicubic/X4', 'train_sharp_bicubic'),
        )
    ],
    'Vimeo90K': [
        {
            'source': f'{_VIMEO}{source}/sequences',
            'output': f'datasets/vimeo90k/vimeo90k_train_{name}.lmdb',
            'meta_info': f'{_VIMEO}/sep_trainlist.txt',
            'pattern': pattern,
        }
        for source, name, pattern in (
            ('', 'GT_only4th', 'im4.png'),
            ('_matlabLRx4', 'LR7frames', '*'),
        )
    ],
}


class Cutting(NamedTuple):
    """How images are cut into sub-images: side, step, and the remainder that may be lost."""

    crop_size: int
    step: int
    thresh_size: int

    def starts(self, length: int) -> list[int]:
        """Where they begin on one axis: every step, and where the last one ends at the border."""
        positions = list(range(0, length - self.crop_size + 1, self.step))
        if length - (positions[-1] + self.crop_size) > self.thresh_size:
            positions.append(length - self.crop_size)
        return positions


def check_existing(existing: Sequence[Path], resume: bool, overwrite: bool) -> None:
    """Refuse to go on where something exists, unless told what to do with it."""
    if existing and not (resume or overwrite):
        raise FileExistsError(f'{min(existing)} exists: add --resume to go on or --overwrite.')


def cropped(img: Any, scale: int) -> Any:
    """The image, cut at the bottom and the right to multiples of ``scale``."""
    height, width = img.shape[:2]
    if min(height, width) < scale:
        raise UserError(f'{width} x {height} pixels are too few for scale {scale}.')
    return mod_crop(img, scale)


def make_lq(
    source: str | Path,
    output: str | Path,
    scale: int,
    gt_output: str | Path | None = None,
    *,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
) -> str:
    """Reduce the images of a folder as MATLAB did for the published sets, to PNG files.

    Pixels are used as they are stored, whatever the EXIF orientation of an image says.

    Args:
        gt_output: Folder for the images cropped to multiples of ``scale``; without, others are
            refused.
    """
    source, folders = Path(source), [Path(name) for name in (output, gt_output) if name]
    paths = [source / name for name in list_images(source)]
    targets = [folder / f'{path.stem}.png' for folder in folders for path in paths]
    if scale < 2:
        raise UserError(f'--scale must be at least 2, got {scale}.')
    if not paths:
        raise FileNotFoundError(f'{source} holds no images.')
    if len(set(targets)) < len(targets) or source.resolve() in (f.resolve() for f in folders):
        raise UserError('Two files would share a name: use different folders and file names.')
    existing = [path for path in targets if path.exists()]
    check_existing(existing, resume, overwrite)
    kept = set(existing) if resume else set()
    missing = [p for p in paths if not kept.issuperset(f / f'{p.stem}.png' for f in folders)]
    done = len(paths) - len(missing)
    with made_with(folders[0], {'--scale': scale}, bool(existing), overwrite):
        made = for_each_file(lambda p: _reduce(p, folders, scale), missing, workers, done)
        turned = [str(path) for path, is_turned in zip(missing, made, strict=True) if is_turned]
    if turned:
        logger.warning(
            'An orientation tag is ignored, as in training; "basicsr prepare pairs" would turn '
            'the pixels: %s',
            some(turned, 3),
        )
    there = f' ({done} were there already)' if done else ''
    places = ' and their GT in '.join(map(str, folders))
    return f'{len(paths)} images of {source}, reduced to 1/{scale}, are in {places}{there}.'


def _reduce(path: Path, folders: list[Path], scale: int) -> bool:
    """Write the reduced image and, if there is a second folder, the cropped one.

    Returns:
        Whether the file has a tag that turns it.
    """
    img = read_unchanged(path)
    gt = cropped(img, scale)
    if gt.shape != img.shape:
        height, width = img.shape[:2]
        change = f'{path} has {width} x {height} pixels, no multiple of {scale}'
        if len(folders) == 1:
            raise UserError(
                f'{change}: give a folder for the cropped GT (--gt-output), and --resume to go on.'
            )
        tqdm.write(f'{change}: cropped to {gt.shape[1]} x {gt.shape[0]}.', file=sys.stderr)
    for folder, made in zip(folders, (reduce_image(gt, scale), gt), strict=False):
        imwrite(made, folder / f'{path.stem}.png')
    return orientation(path.read_bytes()) != 1


def extract_subimages(
    source: str | Path | None = None,
    output: str | Path | None = None,
    crop_size: int = 480,
    step: int = 240,
    thresh_size: int = 0,
    *,
    compression_level: int = 3,
    recursive: bool = False,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
) -> str:
    """Cut images into overlapping sub-images ``<name>_s001…``, row by row; without folders DIV2K.

    Args:
        thresh_size: Pixels at the right and the bottom that may be lost; if more remain, a last
            sub-image ends at the border.
        compression_level: Of PNG, 0 to 9.
    """
    more = {'level': compression_level, 'recursive': recursive, 'workers': workers}
    more |= {'resume': resume, 'overwrite': overwrite}
    if source and output:
        cutting = Cutting(crop_size, step, thresh_size)
        return _cut_folder(Path(source), Path(output), cutting, **more)
    if source or output:
        raise UserError('give --input and --output, or none of them for all folders of DIV2K.')
    return '\n'.join(
        _cut_folder(Path(folder), Path(f'{folder}_sub'), Cutting(size, s, thresh_size), **more)
        for folder, size, s in _CUT
    )


def _cut_folder(
    source: Path,
    output: Path,
    cutting: Cutting,
    *,
    level: int,
    recursive: bool,
    workers: int,
    resume: bool,
    overwrite: bool,
) -> str:
    paths = [source / name for name in list_images(source, recursive)]
    # Without the scale at its end, the name of a low-quality image is that of its GT.
    names = [re.sub('x[2348]$', '', str(p.relative_to(source).with_suffix(''))) for p in paths]
    if not paths:
        raise FileNotFoundError(f'{source} holds no images.')
    if cutting.crop_size < 1 or cutting.step < 1 or cutting.thresh_size < 0:
        raise UserError('--crop-size and --step must be at least 1, --thresh-size 0.')
    target_of = {path: output / name for path, name in zip(paths, names, strict=True)}
    if len(set(names)) < len(names):
        raise UserError('Two images differ in x2, x3, x4, x8 or the extension alone: rename one.')
    if output.resolve().is_relative_to(source.resolve()):
        raise UserError(f'{output} must not be {source} or a folder in it.')
    stems, parts = set(names), list_images(output, recursive) if output.is_dir() else []
    existing = [output / n for n in parts if re.sub(r'_s\d{3,}\.\w+$', '', n) in stems]
    check_existing(existing, resume, overwrite)
    settings = {f'--{k.replace("_", "-")}': value for k, value in cutting._asdict().items()}
    with made_with(output, settings, bool(existing), overwrite):
        cut = for_each_file(
            lambda path: _cut(path, target_of[path], cutting, level, resume), paths, workers
        )
        parts_of = list(cut)
        small = parts_of.count([])
        if small == len(paths):
            raise UserError(f'all {small} images are smaller than --crop-size {cutting.crop_size}.')
        written = {part for parts in parts_of for part in parts}
        for path in set(existing) - written if overwrite else []:  # of a finer cutting
            path.unlink()
    result = f'{len(written)} sub-images of {len(paths) - small} images are in {output}.'
    return result + (f' Left out as too small: {small} images.' if small else '')


def _cut(path: Path, target: Path, cutting: Cutting, level: int, resume: bool) -> list[Path]:
    """Write the sub-images ``<target>_s001…``, those not there yet if resumed; returns all."""
    img = read_unchanged(path)
    (height, width), size = img.shape[:2], cutting.crop_size
    if min(height, width) < size:
        reason = f'{width} x {height} pixels are too few for --crop-size {size}'
        tqdm.write(f'{path} is left out: {reason}.', file=sys.stderr)
        return []
    png = (cv2.IMWRITE_PNG_COMPRESSION, level)
    jpeg = (cv2.IMWRITE_JPEG_QUALITY, 100)  # the second compression should lose nothing visible
    params = {'.png': png, '.jpg': jpeg, '.jpeg': jpeg}.get(path.suffix.lower())
    corners = [(y, x) for y in cutting.starts(height) for x in cutting.starts(width)]
    names = [f'{target.name}_s{number:03d}{path.suffix}' for number in range(1, len(corners) + 1)]
    parts = [target.with_name(name) for name in names]
    for part, (y, x) in zip(parts, corners, strict=True):
        if not (resume and part.exists()):
            imwrite(img[y : y + size, x : x + size], part, params)
    return parts


def write_meta_info(
    source: str | Path | None = None,
    output: str | Path | None = None,
    *,
    recursive: bool = False,
    workers: int = 1,
    overwrite: bool = False,
) -> str:
    """List the images of a folder, lines ``name (h,w,c)``; without folders sub-images of DIV2K.

    Every image is decoded: a file that is damaged further on is found out as well.
    """
    if bool(source) != bool(output):
        raise UserError('give --input and --output, or none of them for the sub-images of DIV2K.')
    source, output = Path(source or _LISTED[0]), Path(output or _LISTED[1])
    names = list_images(source, recursive)
    if not names:
        raise FileNotFoundError(f'{source} holds no images.')
    check_list(output, names, overwrite)
    shapes = for_each_file(_shape_of, [source / name for name in names], workers)
    write_lines(
        output, [f'{Path(n).as_posix()} {shape}' for n, shape in zip(names, shapes, strict=True)]
    )
    return f'{len(names)} images of {source} are listed in {output}.'


def check_list(output: Path, names: Sequence[str], overwrite: bool) -> None:
    """Refuse names that a ``meta_info_file`` cannot hold, and a file that exists."""
    for name in names:
        if ' ' in name:
            raise UserError(f"'{name}': a name ends at its first blank in a list, so rename it.")
        if '\\' in Path(name).as_posix():
            raise UserError(f"'{name}': a list reads \\ as the slash of a folder, so rename it.")
    if output.exists() and not overwrite:
        raise FileExistsError(f'{output} exists: choose another name or add --overwrite.')


def write_lines(output: Path, lines: Sequence[str]) -> None:
    """Write a text file, whole or not at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary:
        temporary.write_text('\n'.join([*lines, '']), encoding='utf-8')


def _shape_of(path: Path) -> str:
    height, width, *channels = read_unchanged(path).shape
    return f'({height},{width},{channels[0] if channels else 1})'


def create_lmdb(
    source: str | Path | None = None,
    output: str | Path | None = None,
    dataset: str | None = None,
    *,
    recursive: bool = False,
    meta_info: str | Path | None = None,
    pattern: str = '*',
    cut_suffix: str = '',
    compression_level: int = 1,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
) -> str:
    """Write the images of a folder into an LMDB, under their names without the extension.

    Args:
        dataset: One of ``DATABASES``: all LMDBs of that set, in its usual folder, instead.
        meta_info: Take what this list names: images, or folders with all their images.
        pattern: Take only such names, as im4.png.
        cut_suffix: Ending to leave out in keys, as x4.
        compression_level: Of PNG, 0 to 9.
    """
    if not (dataset or (source and output)):
        raise UserError('give --input and --output, or --dataset.')
    one = {'source': source, 'output': output, 'recursive': recursive}
    one |= {'meta_info': meta_info, 'pattern': pattern}
    made = []
    for database in DATABASES[dataset] if dataset else [{}]:
        source, target, names = _find(**one | database)
        keys = [Path(n).with_suffix('').as_posix().removesuffix(cut_suffix) for n in names]
        check_existing([target] if target.exists() else [], resume, overwrite)
        with _replaced(target, overwrite) as new:
            make_lmdb_from_imgs(
                *(source, new, names, keys),
                batch=100,  # no more is lost by a kill
                compress_level=compression_level,
                multiprocessing_read=True,
                n_thread=workers,
                resume=resume,
            )
        made.append(f'{len(keys)} images of {source} are in {target}.')
    return '\n'.join(made)


def _find(
    source: str | Path,
    output: str | Path,
    recursive: bool,
    meta_info: str | Path | None,
    pattern: str,
) -> tuple[Path, Path, list[str]]:
    """The folder, the LMDB, and the images to take, relative to the folder, sorted."""
    names = [] if meta_info else list_images(source, recursive)
    listed = names_from_meta_info_file(meta_info) if meta_info else []
    entries = [Path(source, name) for name in listed]
    check_files_exist(([] if e.is_dir() else [str(e)] for e in entries), meta_info or '')
    for name, entry in zip(listed, entries, strict=True):
        names += [name] if entry.is_file() else [f'{name}/{n}' for n in list_images(entry)]
    taken = sorted({name for name in names if fnmatchcase(Path(name).name, pattern)})
    if not taken:
        raise FileNotFoundError(f"{source} holds no images '{pattern}' to take.")
    return Path(source), Path(output), taken


@contextmanager
def _replaced(lmdb: Path, overwrite: bool) -> Iterator[Path]:
    """Where to write an LMDB; to overwrite one, beside it: it stays until the new one is whole."""
    if not (overwrite and lmdb.exists()):
        yield lmdb
        return
    if not (lmdb / 'data.mdb').is_file():
        raise FileExistsError(f'{lmdb} is no LMDB: choose another name.')
    new = lmdb.with_name(f'.{lmdb.name}.new.lmdb')
    shutil.rmtree(new, ignore_errors=True)
    yield new
    shutil.rmtree(lmdb)
    new.rename(lmdb)

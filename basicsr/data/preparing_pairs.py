"""From photographs, or from pairs, to the training and validation sets of an option file."""

import json
import os
import random
import re
import shlex
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from string import Template

from basicsr.utils.errors import UserError
from basicsr.utils.image_header import orientation
from basicsr.utils.img_util import imwrite, read_unchanged, upright
from basicsr.utils.matlab_functions import reduce_image
from basicsr.utils.option_schema import is_plain_name
from basicsr.utils.parallel import for_each_file, made_with

from .data_util import check_template, list_images, matching_names
from .preparing import check_existing, check_list, cropped, write_lines

_OPTIONS = Path(__file__).with_name('pairs.yml')  # the quickstart, with names to fill in
_PLAIN = re.compile(r'[A-Za-z./][\w.-]*[/_][\w./-]*')  # in YAML, without quotes
_GT_SIZE = 24  # times the scale, as in the quickstart


def prepare_pairs(
    folder: str | Path,
    scale: int,
    val: str = '10%',
    output: str | Path | None = None,
    *,
    seed: int = 0,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
) -> str:
    """Make training and validation pairs of photographs of any size, and an option file.

    A photograph is turned as its EXIF orientation says and cropped at the bottom and the right to
    multiples of ``scale``, which gives the GT. LQ is that, reduced as MATLAB does. Both are PNG
    files of the photograph's name, below ``<output>/train`` or ``<output>/val``.

    Args:
        val: How many photographs are drawn for validation, as '10' or '10%'.
        output: Default: ``datasets/<name of the folder>_x<scale>``.
        seed: Of the drawing.

    Returns:
        What was made, and the next command to type.
    """
    folder = Path(folder)
    output = Path(output or f'datasets/{Path(os.path.abspath(folder)).name}_x{scale}')
    names = list_images(folder)
    drawn = _draw(names, val, seed, folder)
    gt_of = {n: _gt(output, 'val' if n in drawn else 'train', n) for n in names}
    if scale < 2:
        raise UserError(f'--scale must be at least 2, got {scale}.')
    if len({gt.name for gt in gt_of.values()}) < len(names):
        raise UserError(f'Two images of {folder} differ in the extension alone: rename one.')
    existing = _existing(folder, output, resume, overwrite)
    settings = {'--scale': scale, '--val': val, '--seed': seed, 'of': _summary(names)}
    with made_with(output, settings, bool(existing), overwrite=False):
        missing = [n for n, gt in gt_of.items() if not (gt.exists() and _lq(gt).exists())]
        paths, done = [folder / name for name in missing], len(names) - len(missing)
        made = for_each_file(lambda p: _make_pair(p, gt_of[p.name], scale), paths, workers, done)
        deque(made, maxlen=0)
    smallest = min(_shorter_side(gt) for name, gt in gt_of.items() if name not in drawn)
    option_file = _write_options(output, scale, smallest, overwrite)
    turned = sum(orientation((folder / name).read_bytes()) != 1 for name in names)
    there = f' ({done} were there already)' if done else ''
    lines = [
        f'{len(names)} photographs of {folder} are {len(names) - len(drawn)} pairs for training '
        f'and {len(drawn)} for validation{there}:'
    ]
    for part in ('train', 'val'):
        lines += [f'  {part}: {{dataroot_gt: {output / part}/gt, dataroot_lq: {output / part}/lq}}']
    if turned:
        lines += [f'{turned} of them were turned, as their EXIF orientation says.']
    return '\n'.join([*lines, f'Next: basicsr train -opt {shlex.quote(str(option_file))}'])


def _draw(names: Sequence[str], val: str, seed: int, source: str | Path) -> set[str]:
    """The images for validation, by number ('10') or share ('10%', at least one)."""
    if not names:
        raise FileNotFoundError(f'{source} holds no images.')
    found = re.fullmatch(r'(\d+)|(\d+(?:\.\d+)?)%', val)
    if not found:
        raise UserError(f'--val must be a number of images as 10, or a share as 10%, got {val!r}.')
    count = int(found[1]) if found[1] else max(round(len(names) * float(found[2]) / 100), 1)
    if not 0 < count < len(names):
        raise UserError(
            f'--val {val} of the {len(names)} images of {source} is {count}: there must be one at '
            'least for validation, and one for training.'
        )
    return set(random.Random(seed).sample(names, count))


def _summary(names: Sequence[str]) -> str:
    """What tells a set of images from others: with others, others would be drawn."""
    return f'{len(names)} images ({zlib.crc32(json.dumps(names).encode()):08x})'


def _gt(output: Path, part: str, name: str) -> Path:
    return output / part / 'gt' / f'{Path(name).stem}.png'


def _lq(gt: Path) -> Path:
    return gt.parents[1] / 'lq' / gt.name


def _existing(folder: Path, output: Path, resume: bool, overwrite: bool) -> list[Path]:
    """The images to continue from; those to be overwritten are removed.

    Otherwise an image drawn for validation earlier could end up in both sets.
    """
    folders = [output / part / kind for part in ('train', 'val') for kind in ('gt', 'lq')]
    if folder.resolve() in (f.resolve() for f in folders):
        raise UserError(f'{folder} would be written to: name another folder (--output).')
    existing = [f / name for f in folders if f.is_dir() for name in list_images(f)]
    check_existing(existing, resume, overwrite)
    if not overwrite:
        return existing
    if existing and not (output / '.made_with.txt').exists():
        raise FileExistsError(f'{existing[0]} was made by another program: name another folder.')
    for path in existing:
        path.unlink()
    return []


def _make_pair(path: Path, gt_file: Path, scale: int) -> None:
    gt = cropped(upright(read_unchanged(path), orientation(path.read_bytes())), scale)
    imwrite(reduce_image(gt, scale), _lq(gt_file))
    imwrite(gt, gt_file)


def _shorter_side(file: Path) -> int:
    """Pixels of the shorter side of a PNG file, by its header."""
    with file.open('rb') as png:
        return min(struct.unpack('>II', png.read(24)[16:]))


def _write_options(output: Path, scale: int, smallest: int, overwrite: bool) -> Path:
    """Write the option file, unless there is one that should stay; returns where it is."""
    file, name, size = output / 'train.yml', output.resolve().name, _GT_SIZE * scale
    if overwrite or not file.exists():
        values = {
            'file': shlex.quote(str(file)),
            'name': _quoted(name if is_plain_name(name) else f'photographs_x{scale}'),
            'scale': scale,
            'gt_size': f'{size}\n    pad_small: true' if smallest < size else size,
        }
        for part in ('train', 'val'):
            for kind in ('gt', 'lq'):
                values[f'{part}_{kind}'] = _quoted((output / part / kind).as_posix())
        text = Template(_OPTIONS.read_text(encoding='utf-8')).substitute(values)
        write_lines(file, text.splitlines())
    return file


def _quoted(text: str) -> str:
    """A text in YAML, in quotes if need be."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def split_pairs(
    gt: str | Path,
    output: str | Path,
    lq: str | Path | None = None,
    val: str = '10%',
    *,
    seed: int = 0,
    filename_tmpl: str = '{}',
    overwrite: bool = False,
) -> str:
    """Draw the validation images of existing pairs: two lists, for ``meta_info_file``.

    Args:
        output: Folder of the lists, ``train.txt`` and ``val.txt``.
        lq: None: there is GT alone.
        val: How many are drawn, as '10' or '10%'.
        seed: Of the drawing.
        filename_tmpl: Base name of LQ from that of GT, as '{}x4'.
    """
    template = check_template(filename_tmpl)
    names = matching_names([str(lq), str(gt)], ['lq', 'gt'], template)[1] if lq else list_images(gt)
    drawn = _draw(names, val, seed, gt)
    train, other = Path(output, 'train.txt'), Path(output, 'val.txt')
    for file in (train, other):
        check_list(file, names, overwrite)
    write_lines(train, [name for name in names if name not in drawn])
    write_lines(other, [name for name in names if name in drawn])
    return (
        f'{len(names) - len(drawn)} images for training, {len(drawn)} for validation:\n'
        f'  train: {{meta_info_file: {train}}}\n  val: {{meta_info_file: {other}}}'
    )

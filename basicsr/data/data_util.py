"""Find, pair and read images in folders, LMDBs, lists (meta-info files) and clips."""

import logging
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from basicsr.utils.color_util import bgr2ycbcr
from basicsr.utils.errors import CheckError, UserError, image_error
from basicsr.utils.file_client import FileClient, HardDiskBackend, LmdbBackend
from basicsr.utils.image_header import remarks
from basicsr.utils.img_util import imfrombytes, img2tensor
from basicsr.utils.misc import scandir
from basicsr.utils.text import printable, some

from .image_cache import open_cache
from .shared import Pair, SaidOnce
from .transforms import UPRIGHT, mod_crop, normalize, turn, turned_planes

logger = logging.getLogger(__name__)

IMG_EXTENSIONS = ('.png', '.jpg', '.jpeg', '.bmp', '.tif', '.tiff', '.webp', '.ppm', '.pgm')
_EXTENSION = re.compile(rf'({"|".join(map(re.escape, IMG_EXTENSIONS))})(?=\s|$)', re.IGNORECASE)


def list_images(folder: str | Path, recursive: bool = False) -> list[str]:
    """Image files of a folder, relative to it, sorted; other and hidden files are skipped.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f'no folder {folder}.')
    if Path(folder).suffix == '.lmdb':
        raise UserError(f'{folder} is an LMDB: set io_backend: {{type: lmdb}}.')
    files = scandir(folder, recursive=recursive, broken_links=True)
    return sorted(file for file in files if file.lower().endswith(IMG_EXTENSIONS))


def paths_from_folder(folder: str | Path, recursive: bool = False) -> list[str]:
    """Image files of a folder, with the folder in front, sorted."""
    return [os.path.join(folder, name) for name in list_images(folder, recursive)]


def paths_from_lmdb(folder: str | Path) -> list[str]:
    """Keys of an image LMDB, in the order of its ``meta_info.txt``."""
    if not isinstance(folder, str | Path) or Path(folder).suffix != '.lmdb':
        raise UserError(f"{folder}: an LMDB folder must be named with the ending '.lmdb'.")
    list_file = Path(folder) / 'meta_info.txt'
    if not list_file.is_file():
        raise FileNotFoundError(f'no list of keys {list_file}.')
    return [check_inside(_key_of(line), list_file) for line in text_lines(list_file)]


def text_lines(list_file: str | Path) -> list[str]:
    """Non-blank lines of a meta-info file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not UTF-8 text, or empty.
    """
    lines = [line for _, line in numbered_lines(list_file)]
    if not lines:
        raise UserError(f'{list_file}: the list is empty.')
    return lines


def numbered_lines(list_file: str | Path, option: str = 'meta_info_file') -> list[tuple[int, str]]:
    """Non-blank lines of a list, stripped, with their line numbers."""
    if not Path(list_file).is_file():
        raise FileNotFoundError(f'no {option} {list_file}.')
    try:
        lines = Path(list_file).read_text(encoding='utf-8-sig').splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f'{list_file}: not UTF-8 text ({error}).') from error
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def check_inside(name: str, list_file: str | Path) -> str:
    """``name``, the key or file of an image in a list; refused if it leads out of its folder.

    Results are written under such names too.

    Raises:
        ValueError: It is absolute, goes up (..), is empty or has control characters.
    """
    path = PureWindowsPath(name)  # handles drives and both kinds of slash
    if not path.name or path.anchor or '..' in path.parts or printable(name) != name:
        raise UserError(
            f'{list_file}: {name!r} is not an image name inside a folder: it must be relative, '
            'without .. and control characters.'
        )
    return name


def check_template(filename_tmpl: Any) -> str:
    """``filename_tmpl``, if it is a string with exactly one {}, for the base name.

    Other format fields could read attributes of Python objects, or pad to any width.
    """
    rest = filename_tmpl.replace('{}', '', 1) if isinstance(filename_tmpl, str) else '{'
    if rest == filename_tmpl or '{' in rest or '}' in rest:
        raise UserError(
            f"filename_tmpl must have {{}} once, as '{{}}x4', and no other braces: "
            f'{filename_tmpl!r}.'
        )
    return filename_tmpl


def _key_of(line: str) -> str:
    """Key in a line ``<key>.png (<h>,<w>,<c>) <level>``, which may hold dots and blanks."""
    return _EXTENSION.split(line, maxsplit=1)[0]


def names_from_meta_info_file(meta_info_file: str | Path) -> list[str]:
    """First field of each line, up to a blank or tab."""
    lines = text_lines(meta_info_file)
    return [listed_name(re.split(r'[ \t]', line, maxsplit=1)[0], meta_info_file) for line in lines]


def listed_name(name: str, list_file: str | Path) -> str:
    """As ``check_inside``, with Windows' backslashes turned into slashes."""
    return check_inside(name, list_file).replace('\\', '/')


def paired_paths_from_lmdb(folders: Sequence[str], keys: Sequence[str]) -> list[Pair]:
    """Pairs of keys of an input and a GT database, which must be the same, sorted.

    Args:
        folders: Input database, GT database.
        keys: Names of the two, such as ('lq', 'gt').

    Returns:
        Dicts ``{'lq_path': key, 'gt_path': key}``.
    """
    inputs, targets = (set(paths_from_lmdb(folder)) for folder in folders)
    if inputs != targets:
        raise UserError(
            f'keys of {keys[0]} and {keys[1]} differ: {folders[0]} has {len(inputs)}, {folders[1]} '
            f'has {len(targets)}'
            + _first_of(f'; not in {folders[0]}: ', sorted(targets - inputs))
            + _first_of(f'; not in {folders[1]}: ', sorted(inputs - targets))
        )
    return [{f'{keys[0]}_path': key, f'{keys[1]}_path': key} for key in sorted(inputs)]


def paired_paths_from_meta_info_file(
    folders: Sequence[str], keys: Sequence[str], meta_info_file: str, filename_tmpl: str
) -> list[Pair]:
    """Pairs of the GT images listed in a file.

    The input image is ``filename_tmpl`` of the GT base name, directly in the input folder, with the
    extension of GT if there is such a file, else with any.
    """
    pairs = []
    lq_names = list_images(folders[0]) if os.path.isdir(folders[0]) else []
    lq_of_stem = {os.path.splitext(name)[0]: name for name in lq_names}
    existing = set(lq_names)
    for name in names_from_meta_info_file(meta_info_file):
        stem, extension = os.path.splitext(os.path.basename(name))
        stem = filename_tmpl.format(stem)
        lq_name = f'{stem}{extension}'
        if lq_name not in existing:
            lq_name = lq_of_stem.get(stem, lq_name)
        pairs.append(_pair(folders, keys, lq_name, name))
    return pairs


def paired_paths_from_folder(
    folders: Sequence[str], keys: Sequence[str], filename_tmpl: str, recursive: bool = False
) -> list[Pair]:
    """Pairs of an input and a GT folder, by name, sorted; extensions may differ.

    Args:
        folders: Input folder, GT folder.
        keys: Names of the two, such as ('lq', 'gt').
        filename_tmpl: Input base name made from the GT base name, such as '{}x4'.
        recursive: Pair the files of sub-folders too, by their relative paths.

    Raises:
        ValueError: An image of either folder has no partner.
    """
    names = matching_names(folders, keys, filename_tmpl, recursive)
    return [_pair(folders, keys, *pair) for pair in zip(*names, strict=True)]


def matching_names(
    folders: Sequence[str], keys: Sequence[str], filename_tmpl: str, recursive: bool = False
) -> tuple[list[str], list[str]]:
    """As ``paired_paths_from_folder``; returns the names of the inputs, and those of the GT."""
    lq_names, gt_names = (list_images(folder, recursive) for folder in folders)
    if filename_tmpl == '{}' and lq_names == gt_names and lq_names:
        return gt_names, gt_names  # all at once, for sets of millions
    lq_of_stem = {os.path.splitext(name)[0]: name for name in lq_names}
    unused = set(lq_names)
    found, missing = ([], []), []
    for gt_name in gt_names:
        folder, base_name = os.path.split(gt_name)
        stem, extension = os.path.splitext(base_name)
        stem = os.path.join(folder, filename_tmpl.format(stem))
        same_extension = f'{stem}{extension}'
        lq_name = same_extension if same_extension in unused else lq_of_stem.get(stem, '')
        if lq_name not in unused:
            missing.append(stem)
            continue
        unused.remove(lq_name)
        found[0].append(lq_name)
        found[1].append(gt_name)
    if missing or unused:
        raise CheckError(
            f'{keys[1]} and {keys[0]} images do not pair up: {folders[1]} has '
            f'{len(gt_names)}, {folders[0]} has {len(lq_names)}'
            + _first_of(f'; not in {folders[0]}: ', missing)
            + _first_of(f'; without a partner in {folders[1]}: ', sorted(unused))
            + f". (filename_tmpl is '{filename_tmpl}')"
        )
    if not gt_names:
        raise UserError(f'no images ({", ".join(IMG_EXTENSIONS)}) in {folders[1]}.')
    return found


def _pair(folders: Sequence[str], keys: Sequence[str], lq_name: str, gt_name: str) -> Pair:
    return {
        f'{keys[0]}_path': os.path.join(folders[0], lq_name),
        f'{keys[1]}_path': os.path.join(folders[1], gt_name),
    }


def _first_of(text: str, names: list[str]) -> str:
    return text + some(names, 3) if names else ''


def check_files_exist(paths: Iterable[Iterable[str]], list_file: str | Path) -> None:
    """Reject a list that names missing files.

    Args:
        paths: The files that each line of the list names.
    """
    missing = [
        (index, path)
        for index, of_line in enumerate(paths)
        for path in of_line
        if not os.path.isfile(path)
    ]
    if missing:
        numbers = [number for number, _ in numbered_lines(list_file)]
        named = [f'{path} (line {numbers[index]})' for index, path in missing[:3]]
        more = ', …' if len(missing) > 3 else ''
        raise FileNotFoundError(
            f'{list_file}: {len(missing)} listed files do not exist: {", ".join(named)}{more}.'
        )


def check_distinct_names(paths: Iterable[str]) -> None:
    """Refuse images whose results would overwrite each other: equal except for the extension."""
    seen: dict[str, str] = {}
    for path in paths:
        first = seen.setdefault(os.path.splitext(path)[0], path)
        if first is not path:
            raise UserError(f'{first} and {path} would share the name of a result; rename one.')


def image_name(path: str, dataset_opt: dict) -> str:
    """Name of an image in results: its path below ``dataroot_lq``, without the extension.

    For an LMDB it is the key. With several roots it begins below the folder that they share.
    """
    if (dataset_opt.get('io_backend') or {}).get('type') == 'lmdb':
        return check_inside(path, 'LMDB')
    roots = dataset_opt.get('dataroot_lq') or []
    roots = [os.path.abspath(root) for root in (roots if isinstance(roots, list) else [roots])]
    relative = os.path.relpath(path, os.path.commonpath(roots)) if roots else os.pardir
    if relative.startswith(os.pardir):  # the dataset has options of its own
        return Path(path).stem
    return os.path.splitext(relative)[0]


def check_image_options(opt: dict) -> None:
    """Reject options of an image dataset that cannot be combined.

    Raises:
        ValueError: ``color`` is unknown, ``mean`` and ``std`` are not numbers for each channel, or
            there is a ``meta_info``, which only the Real-ESRGAN datasets read.
    """
    if opt.get('color') not in (None, 'gray', 'y'):
        raise UserError(f"color is '{opt['color']}'; choose 'y', 'gray' or leave it out.")
    if (opt.get('mean') is None) != (opt.get('std') is None):
        raise UserError('mean and std go together; give both or neither.')
    channels = 3 if opt.get('color') is None else 1
    for key in ('mean', 'std') if opt.get('mean') is not None else ():
        numbers = opt[key] if isinstance(opt[key], list | tuple) else []
        is_finite = all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
        if len(numbers) not in (1, channels) or not is_finite or (key == 'std' and 0 in numbers):
            raise UserError(
                f'{key} must be a list of {channels} numbers'
                f'{", none of them 0" if key == "std" else ""}, got {opt[key]!r}.'
            )
    for key in ('dataroot_gt', 'dataroot_lq'):
        roots = opt.get(key, '.')
        for root in roots if isinstance(roots, list) else [roots]:
            if not isinstance(root, str):
                raise UserError(f'{key} must be a folder or a list of folders, got {roots!r}.')
    if opt.get('meta_info') is not None:
        raise UserError('meta_info is not read by this dataset; rename it to meta_info_file.')


def check_name_of_list(opt: dict) -> None:
    """Refuse ``meta_info_file``, which the datasets of Real-ESRGAN do not read."""
    if opt.get('meta_info_file') is not None:
        raise UserError('meta_info_file is not read by this dataset; rename it to meta_info.')


def read_image(
    client: FileClient,
    path: str,
    client_key: str = 'default',
    color: str | None = None,
    said: SaidOnce | set[str] | None = None,
) -> np.ndarray:
    """Read an image as it is stored, (h, w, c) BGR in uint8, uint16, or float32 in [0, 1].

    Args:
        client: The backend, in which ``path`` is a file name or a key.
        color: 'gray' for one channel; otherwise there are three (gray ones are repeated, alpha is
            dropped).
        said: Kinds of ``remarks`` already logged; new ones are logged and added. None logs nothing.

    Raises:
        FileNotFoundError: No such file or key.
        ValueError: The bytes are not an image.
    """
    content = client.get(path, client_key)
    if content is None:
        raise FileNotFoundError(
            f"the LMDB of '{client_key}' has no key '{path}': {client.client.location(client_key)}"
            ' does not hold what its meta_info.txt lists. Create it again '
            '(basicsr prepare lmdb --overwrite).'
        )
    return decode_image(bytes(content), path, color, said)  # memcached gives a view


def decode_image(
    content: bytes,
    path: str,
    color: str | None = None,
    said: SaidOnce | set[str] | None = None,
) -> np.ndarray:
    """Decode an image from the bytes of its file, as ``read_image`` does.

    Args:
        path: Its name in messages.
    """
    try:
        img = imfrombytes(content, 'grayscale' if color == 'gray' else 'color')
    except ValueError as error:
        raise image_error(path, f'cannot read {path}: {error}') from error
    if said is not None:
        for kind, warning in remarks(content, img, skip=said):
            said.add(kind)
            logger.warning(warning, path)
    return img if img.ndim == 3 else img[..., None]


class ImageReader:
    """Reads the images of one list, from their files or from a cache of decoded images.

    Args:
        client: The backend, in which the paths are file names or keys.
        paths: The images.
        client_key: Which database of an LMDB client to read.
        color: As in ``read_image``; for 'y' colour images are read.
        cache: 'auto', 'off' or a folder, as the option ``cache`` of a dataset.
        what: Name of the images in the log.
        said: As in ``read_image``.
    """

    def __init__(
        self,
        client: FileClient,
        paths: Sequence[str],
        client_key: str = 'default',
        color: str | None = None,
        cache: str | bool = 'off',
        what: str = 'images',
        said: SaidOnce | None = None,
    ):
        self._client, self._key, self._color = client, client_key, color
        self._said = SaidOnce() if said is None else said
        self._cache = None
        backend = client.client
        # A memcached server cannot tell whether an image has changed.
        if cache not in ('off', False) and isinstance(backend, HardDiskBackend | LmdbBackend):
            kind = 'gray' if color == 'gray' else 'color'
            self._cache = open_cache(cache, paths, kind, what, backend.location(client_key))

    def __call__(self, index: int, path: str) -> np.ndarray:
        """Image ``index`` of the list, as ``read_image`` gives it; it may be read-only."""
        if self._cache is None:
            return read_image(self._client, path, self._key, self._color, self._said)
        stamp = self._client.client.stamp(path, self._key)
        img = self._cache.get(index, stamp)
        if img is None:
            img = read_image(self._client, path, self._key, self._color, self._said)
            self._cache.put(index, stamp, img)
        return img


def as_float(img: np.ndarray, color: str | None = None) -> np.ndarray:
    """A stored image as float32 in [0, 1], (h, w, c); with ``color`` 'y' its luma by BT.601."""
    white = np.iinfo(img.dtype).max if np.issubdtype(img.dtype, np.integer) else 1
    img = img.astype(np.float32)
    img /= white
    return bgr2ycbcr(img, y_only=True)[..., None] if color == 'y' else img


def image_tensor(
    img: np.ndarray,
    color: str | None = None,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    keep_uint8: bool = False,
    orientation: tuple[bool, bool, bool] = UPRIGHT,
) -> Tensor:
    """A stored image, or a view of a part of it, as tensor (c, h, w), RGB in [0, 1], or its luma.

    Args:
        mean, std: Normalisation per channel, if wanted.
        keep_uint8: Return 8-bit colours as uint8 in [0, 255], unless they are normalised.
        orientation: How to ``turn`` the image.
    """
    if keep_uint8 and img.dtype != np.uint8:
        raise UserError(f'uint8_batch is for images of 8 bits, and one has {img.dtype}: unset it.')
    if color == 'y' or img.dtype != np.uint8:
        tensor = img2tensor(as_float(turn(img, orientation), color))
    else:  # the same values, transposed as bytes instead of floats
        planes = turned_planes(img, orientation)
        if keep_uint8 and mean is None:
            return torch.from_numpy(planes)
        values = planes.astype(np.float32)
        values /= 255
        tensor = torch.from_numpy(values)
    return tensor if mean is None or std is None else normalize(tensor, mean, std)


def read_img_seq(
    path: str | Path | Sequence[str],
    require_mod_crop: bool = False,
    scale: int = 1,
    return_imgname: bool = False,
) -> Any:
    """Read the images of a folder (sorted), or a list of files, as one clip.

    Returns:
        Tensor (t, c, h, w), RGB in [0, 1]; with ``return_imgname`` also the names without
        extension.
    """
    files = paths_from_folder(path) if isinstance(path, str | Path) else list(path)
    client = FileClient('disk')
    said: set[str] = set()
    imgs = [read_image(client, file, said=said) for file in files]
    if require_mod_crop:
        imgs = [mod_crop(img, scale) for img in imgs]
    clip = torch.stack([image_tensor(img) for img in imgs])
    return (clip, [Path(file).stem for file in files]) if return_imgname else clip


def generate_frame_indices(
    crt_idx: int, max_frame_num: int, num_frames: int, padding: str = 'reflection'
) -> list[int]:
    """Indices of the ``num_frames`` (odd) frames around ``crt_idx``, padded at the clip's ends.

    For frame 0 and 5 frames, ``padding`` gives: replicate 0 0 0 1 2; reflection 2 1 0 1 2;
    reflection_circle 4 3 0 1 2; circle 3 4 0 1 2.
    """
    if num_frames % 2 == 0:
        raise CheckError(f'num_frames must be odd, got {num_frames}.')
    last, pad = max_frame_num - 1, num_frames // 2
    first_shown, last_shown = crt_idx - pad, crt_idx + pad
    before_and_after = {
        'replicate': (lambda i: 0, lambda i: last),
        'reflection': (lambda i: -i, lambda i: last * 2 - i),
        'reflection_circle': (lambda i: last_shown - i, lambda i: first_shown - (i - last)),
        'circle': (lambda i: i + num_frames, lambda i: i - num_frames),
    }
    if padding not in before_and_after:
        raise CheckError(f"padding is '{padding}'; choose from {', '.join(before_and_after)}.")
    before, after = before_and_after[padding]
    return [
        before(i) if i < 0 else after(i) if i > last else i
        for i in range(first_shown, last_shown + 1)
    ]


def generate_gaussian_kernel(kernel_size: int = 13, sigma: float = 1.6) -> np.ndarray:
    """Gaussian kernel (k, k), the response of scipy's filter to one bright pixel."""
    from scipy.ndimage import gaussian_filter

    impulse = np.zeros((kernel_size, kernel_size))
    impulse[kernel_size // 2, kernel_size // 2] = 1
    return gaussian_filter(impulse, sigma)


def duf_downsample(x: Tensor, kernel_size: int = 13, scale: int = 4) -> Tensor:
    """Blur and subsample as DUF does (Jo et al., CVPR 2018).

    Args:
        x: (b, t, c, h, w) or (t, c, h, w).
        scale: 2, 3 or 4.
    """
    sigmas = {2: 0.8, 3: 1.2, 4: 1.6}
    if scale not in sigmas:
        raise CheckError(f'scale must be 2, 3 or 4, got {scale}.')
    frames = x.flatten(0, -3).unsqueeze(1)
    pad = kernel_size // 2 + scale * 2
    kernel = torch.from_numpy(generate_gaussian_kernel(kernel_size, sigmas[scale])).to(x)
    frames = F.conv2d(F.pad(frames, [pad] * 4, 'reflect'), kernel[None, None], stride=scale)
    frames = frames[..., 2:-2, 2:-2]
    return frames.view(*x.shape[:-2], *frames.shape[-2:])

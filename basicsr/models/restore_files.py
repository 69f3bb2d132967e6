"""Restore image files with the network of a checkpoint: ``basicsr restore`` and ``inference/``."""

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from basicsr.archs import ARCH_REGISTRY, build_network, load_network_from
from basicsr.archs.recognition import options_from_weights
from basicsr.data.data_util import list_images
from basicsr.utils.checkpoint import (
    load_checkpoint,
    select_params,
    split_description,
    state_dicts,
    strip_wrapper_prefixes,
    take_below_prefix,
)
from basicsr.utils.errors import UserError
from basicsr.utils.image_header import orientation
from basicsr.utils.img_util import cv2, img2tensor, imwrite, read_unchanged, tensor2img, upright
from basicsr.utils.misc import atomic_path
from basicsr.utils.progress_bar import progress_bar
from basicsr.utils.text import some
from basicsr.utils.wrong_weights import load_fitting
from basicsr.utils.yaml_util import yaml_load

from .restore import GRID, restore
from .tile_size import BLENDED, SMALLEST, choose_tiles, exact_halo

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """What a network takes and gives: input channels, scale, and what sizes are multiples of."""

    channels: int
    scale: int
    multiple: int


def find_network(
    file: str | Path, network: dict[str, Any] | None = None, param_key: str | None = None
) -> nn.Module:
    """Build the network of a checkpoint with its weights, in eval mode on the GPU if there is one.

    It is the one that the file describes; else ``network``; else that of the option file in the run
    folder that the checkpoint lies in; else the one that its weights show.

    Args:
        network: Type and arguments, as the section ``network_g`` of an option file.
        param_key: Which weights of the file; None: ``params_ema`` if it has them.

    Raises:
        ValueError: Nothing says which network it is, or the weights do not fit it.
    """
    content = load_checkpoint(file)
    described = split_description(content)[1].get('network') if isinstance(content, dict) else None
    if described:
        if network:  # the class of another package is imported for an option file alone
            ARCH_REGISTRY.get(network['type'])
        net = load_network_from(file, param_key)
        _, used = select_params(content, param_key, file)
        if network and described['type'] != network['type']:
            raise UserError(f'{file} holds a {described["type"]}, not a {network["type"]}.')
    else:
        state, used = select_params(content, param_key, file)
        net = build_network(network or _network_of_run(Path(file)) or _network_of(state, file))
        own = net.state_dict()
        weights = take_below_prefix(strip_wrapper_prefixes(state, own), own, file)
        load_fitting(net, weights, str(file), type(net).__name__)
    if others := [key for key in state_dicts(content) if key != used]:
        logger.info('Restoring with %s of %s (also there: %s).', used, file, ', '.join(others))
    return net.eval().to('cuda' if torch.cuda.is_available() else 'cpu')


def network_of_options(option_file: str | Path) -> dict[str, Any]:
    """The ``network_g`` of an option file.

    Raises:
        ValueError: It has none.
    """
    network = (yaml_load(option_file) or {}).get('network_g')
    if not isinstance(network, dict):
        raise UserError(f'{option_file} has no network_g.')
    return network


def _network_of_run(file: Path) -> dict[str, Any] | None:
    folder = file.absolute().parents[1] if file.absolute().parent.name == 'models' else None
    for option_file in sorted(folder.glob('*.yml')) if folder else ():
        network = (yaml_load(option_file) or {}).get('network_g')
        if isinstance(network, dict):
            logger.info('The network is that of %s.', option_file)
            return network
    return None


def _network_of(state: Mapping[str, Tensor], file: str | Path) -> dict[str, Any]:
    """The network that has such weights."""
    reason = ''
    try:
        if found := options_from_weights(strip_wrapper_prefixes(state, ())):
            logger.info('By its weights, the network of %s is %s.', file, found)
            return found
    except UserError as error:
        reason = f' ({error})'
    raise UserError(
        f'{file} does not say which network it holds{reason}, and lies in no run folder with an '
        'option file: give an option file that has its network_g (--opt).'
    )


def shape_of(net: nn.Module, channels_tried: Sequence[int] = (3, 1)) -> Shape:
    """Find out by a small image how many channels a network takes, and how it scales."""
    multiple = getattr(net, 'window_size', 1)
    like = next(net.parameters(), torch.zeros(()))
    for channels in channels_tried:
        side = 16 * multiple
        try:
            with torch.no_grad():
                output = net(torch.zeros(1, channels, side, side).to(like))
        except RuntimeError:  # of a convolution that expects another number of channels
            continue
        return Shape(channels, output.shape[-1] // side, multiple)
    tried = ', '.join(map(str, channels_tried))
    raise UserError(f'{type(net).__name__} takes no images of {tried} channels.')


def restore_image(
    net: nn.Module,
    img: np.ndarray,
    *,
    shape: Shape | None = None,
    tile: int | None = None,
    ensemble: bool = False,
    white: float = 1,
) -> np.ndarray:
    """Restore one image; gray stays gray, and 16 bits and transparency are kept.

    A network of one channel gets colour images as gray. Transparency is enlarged by bicubic
    interpolation. If memory runs out, the image is restored in smaller and smaller tiles.

    Args:
        img: (h, w), (h, w, 3) BGR or (h, w, 4) BGRA; uint8, uint16, or floats in [0, 1], which are
            returned as uint16.
        shape: Of the network; None finds it out.
        tile: Side of tiles in LQ pixels; 0 uses none; None chooses by the free memory.
        ensemble: Average over the eight flips and rotations.
        white: Value of white that the network takes.
    """
    channels, scale, multiple = shape or shape_of(net)
    kind = np.uint8 if img.dtype == np.uint8 else np.uint16
    top = 1 if img.dtype == np.float32 else np.iinfo(img.dtype).max
    pixels = img.astype(np.float32) / top
    is_gray, has_alpha = pixels.ndim == 2, pixels.shape[2:] == (4,)
    colours = pixels[..., :3] if has_alpha else pixels
    if channels == 1 and not is_gray:
        colours = cv2.cvtColor(np.ascontiguousarray(colours), cv2.COLOR_BGR2GRAY)
    elif channels == 3 and is_gray:
        colours = cv2.merge([colours] * 3)
    like = next(net.parameters(), torch.zeros(()))
    lq = img2tensor(np.ascontiguousarray(colours))[None]
    overlap = None
    if tile is None:
        tile, overlap = choose_tiles(net, lq, scale, multiple, ensemble)

    def run(part: Tensor, tile: int = 0) -> np.ndarray:
        part = part.to(like) * white
        output = _in_memory(net, part, scale, multiple, tile, overlap, ensemble) / white
        return tensor2img(output.float(), out_type=kind)

    halo = exact_halo(net, channels, scale, multiple) if tile and overlap is None else None
    if halo is not None:
        grid = math.lcm(GRID, multiple)
        result = _in_tiles(run, lq, scale, max(tile // grid, 1) * grid, halo)
    else:
        result = run(lq, tile)
    if is_gray and result.ndim == 3:
        result = cv2.cvtColor(result, cv2.COLOR_BGR2GRAY)
    if not has_alpha:
        return result
    size = result.shape[1], result.shape[0]
    alpha = cv2.resize(pixels[..., 3], size, interpolation=cv2.INTER_CUBIC).clip(0, 1)
    alpha = (alpha * np.iinfo(kind).max).round().astype(kind)
    return cv2.merge([*cv2.split(result if result.ndim == 3 else cv2.merge([result] * 3)), alpha])


def _in_tiles(
    run: Callable[[Tensor], np.ndarray], lq: Tensor, scale: int, tile: int, halo: int
) -> np.ndarray:
    """Restore a large image tile by tile, so that only its result is in memory as a whole.

    Args:
        run: Restores a part, which a tile is cropped from.
        halo: LQ pixels beyond a tile that the network sees.
    """
    height, width = lq.shape[2:]
    result: np.ndarray | None = None
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            y, x = max(top - halo, 0), max(left - halo, 0)
            bottom, right = min(top + tile, height), min(left + tile, width)
            part = run(lq[:, :, y : bottom + halo, x : right + halo])
            if result is None:
                result = np.empty((height * scale, width * scale, *part.shape[2:]), part.dtype)
            result[top * scale : bottom * scale, left * scale : right * scale] = part[
                (top - y) * scale : (bottom - y) * scale, (left - x) * scale : (right - x) * scale
            ]
    assert result is not None
    return result


def _in_memory(
    net: nn.Module,
    lq: Tensor,
    scale: int,
    multiple: int,
    tile: int,
    overlap: int | None,
    ensemble: bool,
) -> Tensor:
    """``restore`` with tiles that fit into the memory.

    Args:
        overlap: Of the tiles; None for exact ones, where the network has them.
    """
    height, width = lq.shape[-2:]
    while True:
        if tile and overlap is None and exact_halo(net, lq.shape[1], scale, multiple) is None:
            overlap = BLENDED
        try:
            return restore(
                *(net, lq, scale),
                tile=tile or None,
                overlap=overlap,
                multiple=multiple,
                ensemble=ensemble,
            )
        except RuntimeError as error:
            if 'memory' not in str(error) or 0 < tile <= SMALLEST:
                raise
        smaller = (tile or 2 ** (max(height, width) - 1).bit_length()) // 2
        tile = max(smaller, SMALLEST)
        logger.warning('Not enough memory: going on with tiles of %d x %d.', tile, tile)
        if lq.device.type == 'cuda':
            torch.cuda.empty_cache()


def restore_files(
    net: nn.Module,
    source: str | Path,
    output: str | Path,
    *,
    suffix: str = '',
    ending: str = '.png',
    quality: int | None = None,
    existing: str = 'refuse',
    **options: Any,
) -> str:
    """Restore an image file, or all of a folder and its sub-folders.

    Results are upright where the EXIF orientation of an image says how it is turned, and have its
    colour profile, except TIFF of 16 bits or with one channel. An image that fails is logged, and
    the others are restored all the same.

    Args:
        output: Folder of the results, ``<output>/<path of the image below source><suffix>.png``.
        ending: Format of the results: .png, .jpg, .webp or .tif.
        quality: Of JPEG and WebP, up to 100.
        existing: What to do if there is a result already: 'refuse', 'skip' or 'replace' it.
        **options: See ``restore_image``.

    Returns:
        What was done, in a sentence.

    Raises:
        FileExistsError: There are results, and ``existing`` is 'refuse'.
        FileNotFoundError: There are no images.
        ValueError: Some images failed, or two would have one result.
    """
    source, shape = Path(source), shape_of(net)
    folder = source.parent if source.is_file() else source
    names = [source.name] if source.is_file() else list_images(source, recursive=True)
    if not names:
        raise FileNotFoundError(f'{source} holds no images.')
    inside = Path(output).resolve()  # results of an earlier time are no input, if they are there
    if inside != folder.resolve():
        names = [name for name in names if inside not in (folder / name).resolve().parents]
    results = {n: Path(output, n).with_name(f'{Path(n).stem}{suffix}{ending}') for n in names}
    own = [name for name in names if results[name].resolve() == (folder / name).resolve()]
    if own:
        raise UserError(
            f'{len(own)} results would replace the images they are made of, such as {own[0]}: name '
            'another folder, or a suffix.'
        )
    if len(set(results.values())) < len(names):
        raise UserError(f'Two images of {source} differ in the extension alone: rename one.')
    there = [name for name, result in results.items() if result.exists()]
    if there and existing == 'refuse':
        raise FileExistsError(
            f'{len(there)} results are there already, such as {results[there[0]]}: skip or replace '
            'them (--resume, --overwrite), or name another folder.'
        )
    left = [name for name in names if existing != 'skip' or name not in there]
    failed = []
    for name in progress_bar(left, unit='image', disable=None):
        try:
            _restore_file(net, folder / name, results[name], quality, shape=shape, **options)
        except (OSError, ValueError, RuntimeError) as error:
            logger.error('%s: %s', folder / name, error)
            failed.append(name)
    if failed:
        raise UserError(f'{len(failed)} of {len(left)} images have no result: {some(failed)}')
    skipped = f'; {len(names) - len(left)} had a result' if len(left) < len(names) else ''
    return f'{len(left)} images of {source} are restored in {output}{skipped}.'


def _restore_file(
    net: nn.Module, file: Path, result: Path, quality: int | None, **options: Any
) -> None:
    img = upright(read_unchanged(file), orientation(file.read_bytes()))
    restored, profile = restore_image(net, img, **options), _colour_profile(file)
    is_gray = restored.ndim == 2
    if profile and profile[16:20] != (b'GRAY' if is_gray else b'RGB '):  # of CMYK, for example
        profile = None
    if result.suffix != '.png':
        if result.suffix == '.jpg' and restored.shape[2:] == (4,):
            logger.warning('%s: its transparency is not kept in JPEG.', file)
            restored = np.ascontiguousarray(restored[..., :3])
        if result.suffix in ('.jpg', '.webp') and restored.dtype == np.uint16:
            restored = np.rint(restored / 257).astype(np.uint8)
    if not profile:
        imwrite(restored, result, list(_encoding(result.suffix, quality)))
        return
    if result.suffix != '.png':
        _write_with_profile(restored, result, quality, profile)
        return
    _, encoded = cv2.imencode('.png', restored)
    content, header = encoded.tobytes(), 33  # the signature and IHDR, which iCCP comes after
    chunk = b'iCCP' + b'profile\0\0' + zlib.compress(profile)
    length, check = (len(chunk) - 4).to_bytes(4, 'big'), zlib.crc32(chunk).to_bytes(4, 'big')
    result.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(result, durable=False) as temporary:
        temporary.write_bytes(content[:header] + length + chunk + check + content[header:])


def _write_with_profile(img: np.ndarray, result: Path, quality: int | None, profile: bytes) -> None:
    """Write JPEG, WebP or TIFF by Pillow, which knows profiles, and no colours of 16 bits."""
    from PIL import Image

    if img.dtype == np.uint16:
        logger.warning('%s: the colour profile is not kept in TIFF of 16 bits.', result)
        imwrite(img, result)
        return
    kept: dict[str, Any] = {'icc_profile': profile}
    if result.suffix == '.webp' and quality is None:
        kept['lossless'] = True  # as OpenCV writes it
    elif result.suffix != '.tif':
        kept['quality'] = 95 if quality is None else quality
    if img.ndim == 3:
        img = img[..., [2, 1, 0, 3][: img.shape[2]]]
    result.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(result, durable=False) as temporary:
        name = {'.jpg': 'JPEG', '.webp': 'WEBP', '.tif': 'TIFF'}[result.suffix]
        Image.fromarray(img).save(temporary, name, **kept)


def _colour_profile(file: Path) -> bytes | None:
    from PIL import Image, UnidentifiedImageError  # which torchvision brings along

    try:
        with Image.open(file) as image:
            return image.info.get('icc_profile')
    except (OSError, UnidentifiedImageError):  # a format that it does not know
        return None


def _encoding(ending: str, quality: int | None) -> Iterator[int]:
    flag = {'.jpg': cv2.IMWRITE_JPEG_QUALITY, '.webp': cv2.IMWRITE_WEBP_QUALITY}.get(ending)
    if flag is not None and quality is not None:
        yield from (flag, quality)

"""What the inference scripts share: a network from a file, and images of any kind through it."""

import logging
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from basicsr.archs import ARCH_REGISTRY, build_network, load_network_from
from basicsr.data.data_util import list_images
from basicsr.models.restore import restore
from basicsr.utils.checkpoint import (
    load_checkpoint,
    select_params,
    split_description,
    strip_wrapper_prefixes,
)
from basicsr.utils.errors import UserError
from basicsr.utils.img_util import cv2, img2tensor, imwrite, read_unchanged, tensor2img
from basicsr.utils.progress_bar import progress_bar
from basicsr.utils.text import some

logger = logging.getLogger('basicsr.inference')


def load_network(file: str | Path, network: dict[str, Any]) -> nn.Module:
    """A network with the weights of a file, in eval mode, on the GPU if there is one.

    Of a file with several weights ``params_ema`` are taken, else ``params``.

    Args:
        file: Weights of this package, which may say how large the network is, or of others.
        network: Type and arguments of the network, if the file does not say.

    Raises:
        ValueError: The file holds another network.
    """
    content = load_checkpoint(file)
    described = split_description(content)[1].get('network') if isinstance(content, dict) else None
    if described:
        net = load_network_from(file)
        if type(net) is not ARCH_REGISTRY.get(network['type']):
            raise UserError(f'{file} holds a {type(net).__name__}, not a {network["type"]}.')
    else:
        net = build_network(network)
        state, _ = select_params(content, None, file)
        try:
            net.load_state_dict(strip_wrapper_prefixes(state, net.state_dict()))
        except RuntimeError as error:
            raise UserError(
                f'{file} does not fit the network {network}: {textwrap.shorten(str(error), 500)}'
            ) from error
    return net.eval().to('cuda' if torch.cuda.is_available() else 'cpu')


def restore_folder(
    net: nn.Module,
    source: str | Path,
    output: str | Path,
    suffix: str,
    *,
    scale: int,
    channels: int = 3,
    white: float = 1,
) -> str:
    """Restore an image, or all of a folder, into ``<output>/<name>_<suffix>.png``.

    An image that fails is logged, and the others are restored all the same.

    Args:
        channels, white: See ``restore_image``.

    Returns:
        What was done, in a sentence.

    Raises:
        ValueError: Some images failed, or two would have one result.
        FileNotFoundError: There are no images.
    """
    source = Path(source)
    paths = [source] if source.is_file() else [source / name for name in list_images(source)]
    if not paths:
        raise FileNotFoundError(f'{source} holds no images.')
    if len({path.stem for path in paths}) < len(paths):
        raise UserError(f'Two images of {source} differ in the extension alone: rename one.')
    failed = []
    for path in progress_bar(paths, unit='image', disable=None):
        try:
            img = read_unchanged(path)
            result = restore_image(net, img, scale, channels, white)
            imwrite(result, Path(output, f'{path.stem}_{suffix}.png'))
        except (OSError, ValueError, torch.OutOfMemoryError) as error:
            logger.error('%s: %s', path, error)
            failed.append(path.name)
    if failed:
        raise UserError(f'{len(failed)} of {len(paths)} images have no result: {some(failed)}')
    return f'{len(paths)} images of {source} are restored in {output}.'


def restore_image(
    net: nn.Module, img: np.ndarray, scale: int, channels: int = 3, white: float = 1
) -> np.ndarray:
    """Restore one image; gray stays gray, and 16 bits and transparency are kept.

    A network of one channel gets colour images as gray. Transparency is enlarged by bicubic
    interpolation.

    Args:
        img: (h, w), (h, w, 3) BGR or (h, w, 4) BGRA; uint8, uint16, or floats in [0, 1], which are
            given back as uint16.
        scale: Of the network.
        channels: Input channels of the network, 1 or 3.
        white: Value of white that the network takes.
    """
    top = 255 if img.dtype == np.uint8 else 65535
    pixels = img.astype(np.float32) / (np.iinfo(img.dtype).max if img.dtype != np.float32 else 1)
    is_gray, has_alpha = pixels.ndim == 2, pixels.shape[2:] == (4,)
    colours = pixels[..., :3] if has_alpha else pixels
    if channels == 1 and not is_gray:
        colours = cv2.cvtColor(colours, cv2.COLOR_BGR2GRAY)
    elif channels == 3 and is_gray:
        colours = cv2.merge([colours] * 3)
    device = next(net.parameters()).device
    lq = img2tensor(np.ascontiguousarray(colours))[None].to(device) * white
    output = restore(net, lq, scale) / white
    result = tensor2img(output, out_type=np.uint8 if top == 255 else np.uint16)
    if is_gray and result.ndim == 3:
        result = cv2.cvtColor(result, cv2.COLOR_BGR2GRAY)
    if not has_alpha:
        return result
    size = result.shape[1], result.shape[0]
    alpha = cv2.resize(pixels[..., 3], size, interpolation=cv2.INTER_CUBIC).clip(0, 1) * top
    colours = result if result.ndim == 3 else cv2.merge([result] * 3)
    return cv2.merge([*cv2.split(colours), alpha.round().astype(result.dtype)])

"""Leave images out of a dataset: the option ``exclude``."""

import logging
import os
from collections.abc import Sequence

from basicsr.utils.errors import UserError
from basicsr.utils.text import some

from .data_util import numbered_lines

logger = logging.getLogger(__name__)


def kept_images(paths: Sequence[str], roots: Sequence[str], opt: dict) -> Sequence[int]:
    """Indices of the images that the list ``opt['exclude']`` does not name.

    A line of the list is the name of an image below one of the folders, the key of an LMDB, or a
    whole path, to distinguish images of the same name in several folders.

    Args:
        paths: The images, with their folder in front.
        roots: Their folders.

    Raises:
        FileNotFoundError: There is no such list.
        ValueError: The list is not text, or excludes all images.
    """
    list_file = opt.get('exclude')
    if list_file is None:
        return range(len(paths))
    names = {line.replace(os.sep, '/') for _, line in numbered_lines(list_file, 'exclude')}
    found: set[str] = set()
    kept = []
    for index, path in enumerate(paths):
        named = {path.replace(os.sep, '/'), name_below(path, roots)} & names
        found |= named
        if not named:
            kept.append(index)
    what = opt.get('name', 'images')
    if not kept:
        raise UserError(f'exclude: {list_file} names all {len(paths)} images of {what}.')
    logger.info('%s: %d of %d images are excluded.', what, len(paths) - len(kept), len(paths))
    if unknown := sorted(names - found):
        logger.warning(
            '%s: %d lines of %s match no image: %s',
            *(what, len(unknown), list_file, some(unknown, 3)),
        )
    return kept


def name_below(path: str, roots: Sequence[str]) -> str:
    """``path`` relative to the root that it lies in, with slashes; the key of an LMDB as it is."""
    for root in roots:
        if path.startswith(folder := os.path.join(root, '')):
            path = path[len(folder) :]
            break
    return path.replace(os.sep, '/')

"""Download a published file over https, with a size limit and a SHA-256 check."""

import hashlib
import re
from pathlib import Path
from urllib.request import urlopen

from tqdm import tqdm

from .errors import UserError
from .misc import atomic_path
from .text import sizeof_fmt

_LARGEST = 2**30  # bytes; the weights of VGG19 have 0.6 of it
_BLOCK = 2**20


def download(url: str, target: str | Path, show_progress: bool = True) -> None:
    """Fetch a file whose name ends in the first digits of its SHA-256, as ``vgg19-dcbb9e9d.pth``.

    ``target`` appears whole or not at all.

    Raises:
        ValueError: The address is none of https, or its name has no digits.
        OSError: It cannot be fetched, is too large, or has another checksum.
    """
    digits = re.search(r'-([0-9a-f]{8,64})\.\w+$', url)
    if not url.startswith('https://') or digits is None:
        raise UserError(f'{url} is no address of https with a checksum in its name.')
    digest, size = hashlib.sha256(), 0
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary, urlopen(url) as answer, temporary.open('wb') as file:
        if not answer.geturl().startswith('https://'):
            raise OSError(f'it leads to {answer.geturl()}, which is not https')
        total = int(answer.headers.get('Content-Length') or 0)
        with tqdm(total=total, unit='B', unit_scale=True, disable=not show_progress) as bar:
            while block := answer.read(_BLOCK):
                size += len(block)
                if size > _LARGEST:
                    raise OSError(f'it has more than {sizeof_fmt(_LARGEST)}')
                digest.update(block)
                file.write(block)
                bar.update(len(block))
        if not digest.hexdigest().startswith(digits[1]):
            raise OSError(f'its SHA-256 begins with {digest.hexdigest()[:8]}, not {digits[1]}')

"""Download files, such as published weights, from the web and from Google Drive.

Downloads are atomic. A truncated body, a web page in place of the file, and a file whose SHA-256
does not begin with the digits in its name (``spynet-3d2a1287.pth``) are rejected.
"""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qsl, unquote, urlencode, urljoin, urlsplit
from urllib.request import urlopen

from .errors import UserError
from .misc import atomic_path
from .progress_bar import progress_bar
from .text import printable, sizeof_fmt

logger = logging.getLogger(__name__)

_DRIVE = 'https://drive.google.com/uc'
_LARGEST = 2**36  # bytes; more than any published network or test set
_LARGEST_PAGE = 2**20
_TIMEOUT = 60  # seconds without a byte

# The convention of torch.hub; a date (-20220101.pth) is not a checksum.
_DIGITS = re.compile(r'-(?!20[0-3]\d[01]\d[0-3]\d\.)([0-9a-f]{8,64})\.')
_PAGE = re.compile(rb'\s*<(!doctype\s+html|html)', re.IGNORECASE)


class DownloadError(UserError, OSError):
    """A file that cannot be downloaded."""


def load_file_from_url(
    url: str,
    model_dir: str | Path | None = None,
    progress: bool = True,
    file_name: str | None = None,
) -> str:
    """Download a file unless it is there already.

    An existing file is used if it is not empty and its SHA-256 begins with the digits in its name,
    if any; otherwise it is downloaded again.

    Args:
        url: An https or http URL.
        model_dir: Folder for the file; None is ``torch.hub.get_dir()/checkpoints``, which follows
            the environment variable TORCH_HOME.
        progress: Show a progress bar.
        file_name: Name for the file; None is the one in ``url``.

    Returns:
        The absolute path of the file.

    Raises:
        DownloadError: It cannot be downloaded, or does not match its name; an OSError.
    """
    name = file_name or PurePosixPath(unquote(urlsplit(url).path)).name
    if name in ('', '..'):
        raise UserError(f'{url} does not end in the name of a file: give one as file_name.')
    if model_dir is None:
        from torch.hub import get_dir  # torch takes seconds to import

        model_dir = Path(get_dir(), 'checkpoints')
    target = Path(model_dir, name).absolute()
    if _is_whole(target):
        return str(target)
    if target.exists():
        logger.warning('%s is empty or damaged; it is downloaded again.', target)
    logger.info('Downloading: "%s" to %s', url, target)
    with _open(url) as response:
        save_response_content(response, target, progress=progress)
    return str(target)


def download_file_from_google_drive(file_id: str, save_path: str | Path) -> None:
    """Download a shared file from Google Drive, with the confirmation that large files need.

    Args:
        file_id: The ID in the URL of the file.
        save_path: Path for the file; an existing one is replaced.

    Raises:
        DownloadError: There is no such file, it is not shared with everyone, or its download quota
            is exceeded.
    """
    url = f'{_DRIVE}?{urlencode({"id": file_id, "export": "download"})}'
    with _open(url) as response:
        if not _is_drive_page(response):
            save_response_content(response, save_path)
            return
        page, address = _read_page(response), response.geturl()
    if page.action is None:
        raise DownloadError(_instead_of_file(url, page.title))
    query = dict(parse_qsl(urlsplit(page.action).query)) | page.fields
    with _open(f'{urljoin(address, page.action).partition("?")[0]}?{urlencode(query)}') as response:
        save_response_content(response, save_path)


def get_confirm_token(response: Any) -> str | None:
    """The token that confirms the download of a large file from Google Drive.

    Args:
        response: Of ``urlopen`` or ``requests``.

    Returns:
        None if no confirmation is needed.
    """
    for name, value in getattr(response, 'cookies', {}).items():
        if name.startswith('download_warning'):
            return value
    return _read_page(response).fields.get('confirm')


def save_response_content(
    response: Any,
    destination: str | Path,
    file_size: int | None = None,
    chunk_size: int = 32768,
    progress: bool = True,
) -> None:
    """Write the body of a response to a file, atomically.

    Args:
        response: Of ``urlopen`` or ``requests``.
        destination: Path of the file. Digits of a SHA-256 in its name are checked.
        file_size: Expected number of bytes; None is what the server says.
        chunk_size: Bytes to read at a time.
        progress: Show a progress bar.

    Raises:
        DownloadError: The body ends early, is a web page, or has another checksum; an OSError.
    """
    target, url = Path(destination), _address(response)
    if file_size is None and not response.headers.get('Content-Encoding'):  # else: packed bytes
        file_size = int(response.headers.get('Content-Length') or 0) or None
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    options = {'unit': 'B', 'unit_scale': True, 'desc': target.name, 'disable': not progress}
    bar = progress_bar((), total=file_size, **options)
    with bar, atomic_path(target) as temporary, temporary.open('wb') as file:
        for block in _blocks(response, chunk_size):
            if size == 0 and _PAGE.match(block) and target.suffix not in ('.html', '.htm'):
                raise DownloadError(_instead_of_file(url, _parsed(block).title))
            size += len(block)
            if size > _LARGEST:
                raise DownloadError(f'{url} has more than {sizeof_fmt(_LARGEST)}.')
            digest.update(block)
            file.write(block)
            bar.update(len(block))
        _check(target.name, url, size, file_size, digest.hexdigest())


def _check(name: str, url: str, size: int, file_size: int | None, sha256: str) -> None:
    if size == 0 or (file_size is not None and size != file_size):
        raise DownloadError(f'{url}: {size} of {file_size or "some"} bytes arrived; try again.')
    digits = _DIGITS.search(name)
    if digits and not sha256.startswith(digits[1]):
        raise DownloadError(
            f'{url}: its SHA-256 begins with {sha256[:8]}, not with {digits[1]} as its name {name} '
            'says. Try again; if those digits are not a checksum, give another file_name.'
        )


def _is_whole(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    digits = _DIGITS.search(path.name)
    if digits is None:
        return True
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest().startswith(digits[1])


def _open(url: str) -> Any:
    """The response of a server; redirects from https to anything else are refused."""
    if urlsplit(url).scheme not in ('https', 'http'):
        raise UserError(f'{url} is not an https or http URL.')
    with _explaining(url):
        response = urlopen(url, timeout=_TIMEOUT)
    if url.startswith('https:') and not response.geturl().startswith('https:'):
        response.close()
        raise DownloadError(f'{url} leads to {response.geturl()}, which is not https.')
    return response


def _blocks(response: Any, chunk_size: int) -> Iterator[bytes]:
    with _explaining(_address(response)):
        if hasattr(response, 'iter_content'):  # of requests
            yield from response.iter_content(chunk_size)
        else:
            yield from iter(partial(response.read, chunk_size), b'')


@contextmanager
def _explaining(url: str) -> Iterator[None]:
    """Turn errors of the network into a DownloadError."""
    try:
        yield
    except HTTPError as error:
        error.close()
        gone = 'It was moved or removed, or is not shared. ' if error.code in (403, 404) else ''
        raise DownloadError(
            f'{url}: the server answers {error.code} ({error.reason}). {gone}Open the address in a '
            'browser.'
        ) from error
    except (URLError, HTTPException, ConnectionError, TimeoutError) as error:
        reason = getattr(error, 'reason', None) or error
        raise DownloadError(
            f'{url} cannot be fetched: {reason}. Check the connection; behind a proxy set the '
            'environment variable https_proxy.'
        ) from error


def _address(response: Any) -> str:
    return getattr(response, 'url', None) or 'the response'


def _instead_of_file(url: str, title: str) -> str:
    busy = ' Its download quota is exceeded; try again in a day.' if 'uota' in title else ''
    return (
        f"{url} gives a web page, '{printable(title)[:100]}', instead of the file.{busy} Open the "
        'address in a browser.'
    )


class _Page(HTMLParser):
    """Title of a web page, and the form on it that asks to confirm a download.

    Attributes:
        action: Address to send the form to; None if there is no form.
        fields: What to send.
    """

    def __init__(self) -> None:
        super().__init__()
        self.title, self.action, self.fields = '', None, {}
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._in_title = tag == 'title'
        if tag == 'form' and given.get('id') == 'download-form':
            self.action = given.get('action')
        elif tag == 'input' and self.action is not None and given.get('type') == 'hidden':
            self.fields[given.get('name') or ''] = given.get('value') or ''

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data.strip()


def _is_drive_page(response: Any) -> bool:
    """Whether Google Drive answers with a page of its own, and not with a shared file."""
    kind = response.headers.get('Content-Type') or ''
    return kind.startswith('text/html') and not response.headers.get('Content-Disposition')


def _read_page(response: Any) -> _Page:
    return _parsed(next(_blocks(response, _LARGEST_PAGE), b''))


def _parsed(content: bytes) -> _Page:
    page = _Page()
    page.feed(content.decode('utf-8', 'replace'))
    return page

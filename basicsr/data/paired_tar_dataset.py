"""Dataset of image pairs in tar shards, read sequentially."""

import lzma
import os
import random
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch.utils.data import IterableDataset

from basicsr.utils.errors import MissingPackageError, UserError
from basicsr.utils.registry import DATASET_REGISTRY
from basicsr.utils.rng import mix
from basicsr.utils.text import some

from .data_util import decode_image
from .paired_image_dataset import PairedImages

# Limits for a file in a shard and for its extended header, such as a long name: tarfile allocates
# memory for either at once.
_MOST_BYTES, _MOST_BYTES_BEFORE = 2**29, 2**20
_BEFORE_A_FILE = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_OF_FOLDERS = (
    *('dataroot_gt', 'dataroot_lq', 'io_backend', 'meta_info_file', 'filename_tmpl', 'recursive'),
    'exclude',
)


@DATASET_REGISTRY.register()
class PairedTarDataset(PairedImages, IterableDataset):
    """Pairs of LQ and GT images in tar files, for training, read with WebDataset.

    A pair is two consecutive files of a shard, called ``<name>.gt.<extension>`` and
    ``<name>.lq.<extension>``. An epoch goes through all shards, in an order that follows from
    ``shuffle_seed`` and the epoch.

    Args:
        opt: Options with the keys

            * ``shards``: a file, a pattern such as ``folder/*.tar``, an https URL, or a list;
              ``{000..099}`` in a name stands for a hundred of them;
            * ``num_samples``: pairs in all shards; required for URLs, otherwise counted;
            * ``shuffle_buffer``: undecoded pairs from which the next one is drawn; default 100;
            * ``shuffle_seed``: default 0;
            * ``scale``, ``gt_size``, ``use_hflip``, ``use_rot``, ``pad_small``, ``color``,
              ``mean``, ``std``, ``uint8_batch``: as for PairedImageDataset.

    An item is a function without arguments that returns a sample as of PairedImageDataset.
    """

    def __init__(self, opt: dict):
        if opt.get('phase', 'train') != 'train':
            raise UserError('PairedTarDataset is for training: use PairedImageDataset instead.')
        self._read_options(opt)
        _check_options(opt)
        self.shards = find_shards(opt['shards'])
        self.shuffle_buffer = opt.get('shuffle_buffer', 100)
        self.seed = opt.get('shuffle_seed', 0)
        given = opt.get('num_samples')
        if given is None and any(_is_address(shard) for shard in self.shards):
            raise UserError('num_samples: required for shards at URLs, as the length of an epoch.')
        self._length: int = sum(map(_count_pairs, self.shards)) if given is None else given
        if self._length < 1:
            raise UserError(
                f'no pairs in {len(self.shards)} shards such as {self.shards[0]}: they must hold '
                'files <name>.gt.<extension> and <name>.lq.<extension>.'
            )
        self._epoch, self._skipped = 0, 0

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def skip(self, count: int) -> None:
        """Begin the next pass after ``count`` pairs."""
        self._skipped = count

    def __iter__(self) -> Iterator[Callable[[], dict[str, Tensor | str]]]:
        order = random.Random(mix(self.seed, self._epoch))
        shards = order.sample(self.shards, len(self.shards))
        skipped, self._skipped = self._skipped, 0
        count = 0
        for files in _shuffled(_read(shards), self.shuffle_buffer, order):
            count += 1
            if count > skipped:
                yield partial(self._decoded, files)
        if count != self._length:  # a resume would begin at another sample
            raise UserError(
                f'num_samples is {self._length}, and the shards held {count} pairs: correct it. '
                'If it was counted, a shard has changed meanwhile.'
            )

    def _decoded(self, files: dict[str, Any]) -> dict[str, Tensor | str]:
        images, pair = {}, {}
        for kind in ('gt', 'lq'):
            suffix = next((key for key in files if key.startswith(f'{kind}.')), None)
            name = f'{files["__url__"]}: {files["__key__"]}'
            if suffix is None:
                raise UserError(
                    f'{name} has no {kind} image: its files must be {kind}.<extension>.'
                )
            pair[f'{kind}_path'] = f'{name}.{suffix}'
            path = pair[f'{kind}_path']
            images[kind] = decode_image(files[suffix], path, self.color, self._said)
        return self._sample(images['gt'], images['lq'], pair)


def _check_options(opt: dict) -> None:
    """Refuse options of the wrong type, and those of folders, which have no effect here."""
    shards = opt['shards'] if isinstance(opt['shards'], list) else [opt['shards']]
    if not shards or not all(isinstance(shard, str) and shard for shard in shards):
        raise UserError(f'shards must be a file, a pattern or a list of them: {opt["shards"]!r}.')
    for name, least in (('num_samples', 1), ('shuffle_buffer', 1), ('shuffle_seed', 0)):
        value = opt.get(name, least)
        if not (isinstance(value, int) and value >= least) and (name, value) != (
            'num_samples',
            None,
        ):
            raise UserError(f'{name} must be an integer of at least {least}, got {value!r}.')
    others = [name for name in _OF_FOLDERS if opt.get(name) is not None]
    if others or opt.get('cache', 'off') not in ('auto', 'off', True, False):
        others = others or ['cache']
        raise UserError(f'{", ".join(others)}: PairedTarDataset has no such option; leave it out.')


def find_shards(shards: str | list[str]) -> list[str]:
    """Files and URLs that the option ``shards`` names, in order.

    Raises:
        FileNotFoundError: A name or pattern matches no file.
        ValueError: A URL is not https; this includes commands, which WebDataset would run.
    """
    try:
        from braceexpand import braceexpand  # a dependency of WebDataset
    except ImportError as error:
        raise MissingPackageError("PairedTarDataset needs: pip install 'basicsr[tar]'") from error
    found: list[str] = []
    for name in [shards] if isinstance(shards, str) else shards:
        for part in braceexpand(name):
            if _is_address(part):
                if re.search(r'[\s\'"`\\$\x00-\x1f]', part):  # some releases go through a shell
                    raise UserError(f'shards: the URL {part!r} has blanks or quotes.')
                found.append(part)
            elif re.match(r'[\w+.-]+:', part) and not Path(part).exists():
                raise UserError(f'shards: {part} is neither a file nor an https URL.')
            else:
                # Absolute, since WebDataset would run a name that begins with pipe: as a command.
                found_files = glob(os.path.abspath(Path(part).expanduser()))
                files = sorted(file for file in found_files if Path(file).is_file())
                if not files:
                    raise FileNotFoundError(f'shards: there is no file {part}.')
                found += files
    return found


def _is_address(shard: str) -> bool:
    return shard.startswith('https://')


def _count_pairs(shard: str) -> int:
    """Number of pairs in a file; only the headers are read."""
    try:
        with tarfile.open(shard, tarinfo=_Header) as tar:
            return sum('.gt.' in Path(member.name).name for member in _files_of(tar, shard))
    except (tarfile.TarError, EOFError, lzma.LZMAError) as error:
        reason = str(error).partition(':')[0].strip().rstrip('.')
        raise UserError(f'cannot read {shard}: {reason}.') from error


def _read(shards: list[str]) -> Iterable[dict[str, Any]]:
    """The files of each pair: their contents by suffix, the common ``__key__``, the ``__url__``."""
    from webdataset.tariterators import group_by_keys, url_opener

    # Shards are not split over ranks or workers: the loader splits the samples.
    opened = url_opener({'url': shard} for shard in shards)
    try:
        for shard in opened:  # one by one, since the keys of two may be the same
            yield from group_by_keys(_contents(shard))
    except (tarfile.TarError, ValueError, OSError) as error:
        reason = re.sub(r'\s+', ' ', str(error))[:300]
        raise UserError(f'cannot read the shards {some(shards)}: {reason}') from error


def _contents(shard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The files of an open shard, for ``group_by_keys``."""
    with tarfile.open(fileobj=shard['stream'], mode='r|*', tarinfo=_Header) as tar:
        for member in _files_of(tar, shard['url']):
            content = tar.extractfile(member)
            assert content is not None  # of a regular file
            yield {'fname': member.name, 'data': content.read(), '__url__': shard['url']}


def _files_of(tar: tarfile.TarFile, shard: str) -> Iterator[tarfile.TarInfo]:
    """The headers of the files in a shard.

    Raises:
        ValueError: One claims more bytes than an image may have, or is sparse.
    """
    for member in tar:
        tar.members = []  # tarfile would keep all of them
        if member.issparse() or member.size > _MOST_BYTES:
            raise UserError(
                f'{shard}: {member.name} claims {member.size:,} bytes'
                f'{" with holes" if member.issparse() else ""}; an image has at most '
                f'{_MOST_BYTES:,}, and no holes.'
            )
        if member.isreg():
            yield member


class _Header(tarfile.TarInfo):
    """A header; refused if its long name or its attributes would take much memory.

    A damaged one is an error here, while tarfile would take it for the end of the shard.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.InvalidHeaderError as error:  # pyright: ignore (its stubs lack it)
            raise tarfile.ReadError(f'a header is damaged ({error})') from error
        if header.type in _BEFORE_A_FILE and header.size > _MOST_BYTES_BEFORE:
            raise UserError(
                f'a name or attributes of {header.size:,} bytes; a file has at most '
                f'{_MOST_BYTES_BEFORE:,}.'
            )
        return header


def _shuffled(items: Iterable, size: int, order: random.Random) -> Iterator:
    """The items, each drawn from a buffer of the next ``size`` ones."""
    buffer: list = []
    for item in items:
        buffer.append(item)
        if len(buffer) >= max(size, 1):
            yield _drawn(buffer, order)
    while buffer:
        yield _drawn(buffer, order)


def _drawn(buffer: list, order: random.Random) -> Any:
    place = order.randrange(len(buffer))
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()

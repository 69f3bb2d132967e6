"""Checks that all processes of a run mean the same run: options, programs, data, files."""

import functools
import hashlib
import logging
import platform
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from basicsr.utils.dist_util import gather_lists, get_dist_info
from basicsr.utils.errors import UserError
from basicsr.utils.text import some
from basicsr.utils.yaml_util import OptionError

logger = logging.getLogger(__name__)

# What may be another on each host: where things are, and how they are read.
_OF_HOST = {
    *('path', 'plugins', 'dist_params', 'num_gpu', 'dataroot_gt', 'dataroot_lq', 'meta_info'),
    *('meta_info_file', 'shards', 'io_backend', 'cache', 'num_worker_per_gpu', 'prefetch_mode'),
    *('num_prefetch_queue', 'persistent_workers', 'pin_memory'),
}
_MOST_NAMES = 1000  # file names that are compared


def check_same_options(opt: Mapping[str, Any], **flags: Any) -> None:
    """Compare the options of all ranks, but for what may be another on each host.

    Args:
        opt: As the option file and ``--force_yml`` say.
        flags: Of the command line.

    Raises:
        OptionError: On every rank, if they differ; names the keys, ranks and values.
    """
    own = {key: repr(value) for key, value in _leaves({**opt, **flags})}
    ranks = _all(own)
    keys = dict.fromkeys(key for options in ranks for key in options)
    lines = []
    for key in keys:
        values = [options.get(key, 'nothing') for options in ranks]
        if len(set(values)) > 1:
            lines.append(f'{key}: {_by_rank(values)}')
    if lines:
        raise OptionError(
            'the processes were started with different options:\n'
            + '\n'.join(lines[:20])
            + '\nGive all of them the same option file and flags.'
        )


def warn_of_other_programs() -> None:
    """Warn where ranks run another code, Python or torch than others."""
    if get_dist_info()[1] == 1:
        return
    import numpy
    import torch

    own = {
        'Python': platform.python_version(),
        'torch': str(torch.__version__),
        'numpy': numpy.__version__,
        'the code of basicsr': _digest_of_code(),
    }
    ranks = _all(own)
    for name in own:
        values = [programs[name] for programs in ranks]
        if len(set(values)) > 1:
            logger.warning(
                'The processes differ in %s (%s): results may too.', name, _by_rank(values)
            )


def check_same_data(datasets: Mapping[str, Any]) -> None:
    """Compare the datasets of all ranks: their lengths, and the names of their files.

    Args:
        datasets: By name; of those that have ``paths``, a list of paths or of dicts of them, up to
            1000 names are compared.

    Raises:
        ValueError: On every rank, if they differ.
    """
    if get_dist_info()[1] == 1:
        return
    own = [(name, *_contents(dataset)) for name, dataset in datasets.items()]
    for sets in zip(*_all(own), strict=True):
        name, lengths = sets[0][0], [str(length) for _, length, _ in sets]
        if len(set(lengths)) > 1:
            raise UserError(
                f'dataset {name}: the number of images differs between the processes: '
                f'{_by_rank(lengths)}. Every host needs the same data.'
            )
        names = [digest for _, _, digest in sets]
        if len(set(names)) > 1:
            raise UserError(
                f'dataset {name}: all processes have {lengths[0]} images, but not the same names: '
                f'{_by_rank(names)} (digests). Every host needs the same data.'
            )


def check_file_of_all(path: str | Path) -> None:
    """Check that every rank sees a file.

    Raises:
        FileNotFoundError: On every rank, if some do not.
    """
    ranks = _all((Path(path).is_file(), socket.gethostname()))
    missing = [f'rank {rank} ({host})' for rank, (found, host) in enumerate(ranks) if not found]
    if len(missing) == len(ranks) == 1 or not missing:
        return
    raise FileNotFoundError(
        f'{path} is not there on {some(missing)}: a resume reads it in every process. Put '
        'path.experiments_root into a folder that all hosts share.'
    )


def _all(value: Any) -> list:
    return gather_lists([value])


def _by_rank(values: list[str]) -> str:
    """Which ranks have which value."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return '; '.join(f'rank {some(numbers)}: {value}' for value, numbers in ranks.items())


def _leaves(section: Any, path: str = '') -> Iterable[tuple[str, Any]]:
    """Key and value of each option that has to be the same everywhere."""
    if not isinstance(section, Mapping):
        yield path, section
        return
    for key, value in section.items():
        if key not in _OF_HOST:
            yield from _leaves(value, f'{path}.{key}' if path else str(key))


def _contents(dataset: Any) -> tuple[int | None, str]:
    """The length of a dataset, None for a stream, and a digest of names of its files."""
    try:
        length = len(dataset)
    except TypeError:
        return None, ''
    paths = getattr(dataset, 'paths', None)
    if paths is None or not length:
        return length, ''
    digest = hashlib.sha256()
    for index in range(0, len(paths), -(-len(paths) // _MOST_NAMES)):
        entry = paths[index]
        for path in entry.values() if isinstance(entry, Mapping) else [entry]:
            digest.update(f'{Path(str(path)).name}\n'.encode())
    return length, digest.hexdigest()[:12]


@functools.cache
def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).resolve().parents[1].rglob('*.py')):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]

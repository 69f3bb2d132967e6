"""Check that all ranks of a run agree on options, code, package versions, data and files."""

import hashlib
import logging
import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from basicsr.utils.dist_util import gather_lists, get_dist_info
from basicsr.utils.errors import UserError
from basicsr.utils.text import some
from basicsr.utils.yaml_util import OptionError

logger = logging.getLogger(__name__)

# Options that may differ between hosts: where data is stored and how it is loaded.
_OF_HOST = {
    *('path', 'plugins', 'dist_params', 'num_gpu', 'dataroot_gt', 'dataroot_lq', 'meta_info'),
    *('meta_info_file', 'shards', 'io_backend', 'cache', 'num_worker_per_gpu', 'prefetch_mode'),
    *('num_prefetch_queue', 'persistent_workers', 'pin_memory'),
}
_MOST_NAMES = 1000  # maximum number of file names to compare


def check_same_options(opt: Mapping[str, Any], **flags: Any) -> None:
    """Compare the options of all ranks, except those that may differ between hosts.

    Args:
        opt: Options from the option file and ``--force_yml``.
        flags: Command-line flags.

    Raises:
        OptionError: On every rank, if they differ; lists the keys, ranks and values.
    """
    own = {key: repr(value) for key, value in _leaves({**opt, **flags})}
    if lines := [f'{key}: {values}' for key, values in _differing(own).items()]:
        raise OptionError(
            'the processes were started with different options:\n'
            + '\n'.join(lines[:20])
            + '\nGive all of them the same option file and flags.'
        )


def warn_of_other_programs() -> None:
    """Warn if the ranks run different versions of basicsr, Python, torch or numpy."""
    if get_dist_info()[1] == 1:
        return
    code = hashlib.sha256()
    for file in sorted(Path(__file__).resolve().parents[1].rglob('*.py')):
        code.update(file.read_bytes())
    own = {
        'Python': platform.python_version(),
        'torch': str(torch.__version__),
        'numpy': np.__version__,
        'the code of basicsr': code.hexdigest()[:12],
    }
    for name, values in _differing(own).items():
        logger.warning('The processes differ in %s (%s): results may too.', name, values)


def check_same_data(datasets: Mapping[str, Any]) -> None:
    """Compare the datasets of all ranks: their lengths, and the names of their files.

    Args:
        datasets: Datasets by name. If one has ``paths``, a list of paths or of dicts of paths, up
            to 1000 file names are compared.

    Raises:
        ValueError: On every rank, if they differ.
    """
    if get_dist_info()[1] == 1:
        return
    own = {}
    for name, dataset in datasets.items():
        length, digest = _contents(dataset)
        own[f'{name}: the number of images'] = str(length)
        own[f'{name}: the digest of the names of its {length} images'] = digest
    for what, values in _differing(own).items():
        raise UserError(
            f'dataset {what} differs between the processes: {values}. Every host needs the same '
            'data.'
        )


def check_file_of_all(path: str | Path) -> None:
    """Check that every rank sees a file.

    Raises:
        FileNotFoundError: On every rank, if some do not.
    """
    ranks = gather_lists([(Path(path).is_file(), socket.gethostname())])
    missing = [f'rank {rank} ({host})' for rank, (found, host) in enumerate(ranks) if not found]
    if len(missing) == len(ranks) == 1 or not missing:
        return
    raise FileNotFoundError(
        f'{path} does not exist on {some(missing)}: a resume reads it in every process. Put '
        'path.experiments_root into a folder that all hosts share.'
    )


def _differing(own: Mapping[str, str]) -> dict[str, str]:
    """The entries that differ between ranks, with the ranks of each value; every rank calls it."""
    ranks, found = gather_lists([own]), {}
    for key in dict.fromkeys(key for said in ranks for key in said):
        who: dict[str, list[str]] = {}
        for rank, said in enumerate(ranks):
            who.setdefault(said.get(key, 'nothing'), []).append(str(rank))
        if len(who) > 1:
            found[key] = '; '.join(f'rank {some(them)}: {value}' for value, them in who.items())
    return found


def _leaves(section: Any, path: str = '') -> Iterator[tuple[str, Any]]:
    """Key and value of each option that must be the same on all ranks."""
    if not isinstance(section, Mapping):
        yield path, section
        return
    for key, value in section.items():
        if key not in _OF_HOST:
            yield from _leaves(value, f'{path}.{key}' if path else str(key))


def _contents(dataset: Any) -> tuple[int | None, str]:
    """The length of a dataset (None for a stream) and a digest of its file names."""
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

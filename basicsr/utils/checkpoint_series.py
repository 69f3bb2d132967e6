"""The checkpoints of a run: write, verify and prune training states with their networks.

A state is written last, and records the length and SHA-256 of its networks. So a run can resume
from any intact state whose files match its records.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .checkpoint import check_archive, load_checkpoint, save_checkpoint, tensors_in
from .errors import UserError
from .misc import folder_of_networks, get_time_str, network_file
from .text import sizeof_fmt

logger = logging.getLogger(__name__)


class CheckpointSeries:
    """Writes checkpoints in sequence.

    Args:
        models: Folder of the networks.
        keep_last: States to keep, with their networks; None keeps all.
        every, last: Regular states are those at multiples of ``every`` and at iteration ``last``;
            signals add others.
    """

    def __init__(
        self,
        models: str | Path,
        keep_last: int | None = None,
        every: int = 1,
        last: int | None = None,
    ):
        self._models, self._keep_last = Path(models), keep_last
        self._every, self._last = every, last
        self._records: dict[str, dict[str, Any]] = {}

    def write(self, content: dict, path: Path) -> None:
        """Write a network or, after all networks of its iteration, a state."""
        if path.suffix != '.state':
            self._records[path.name] = save_checkpoint(content, path)
            if path.stem.endswith(('_latest', '_best')):  # remove older ones in the other format
                for suffix in {'.pth', '.safetensors'} - {path.suffix}:
                    other = path.with_suffix(suffix)
                    if other.name not in self._records:
                        other.unlink(missing_ok=True)
            return
        records, self._records = self._records, {}
        own = {n: r for n, r in records.items() if Path(n).stem.endswith(f'_{path.stem}')}
        save_checkpoint({**content, 'files': own, 'regular': self.is_regular(path)}, path)
        self.prune(path.parent, _number(path))

    def is_regular(self, state: Path) -> bool:
        """Whether a run without interruptions also writes this state."""
        return _number(state) % self._every == 0 or _number(state) == self._last

    def prune(self, folder: str | Path, iteration: int) -> None:
        """Remove states that need not be kept, up to an iteration, with their networks.

        Args:
            folder: The folder of the states.
        """
        if self._keep_last is None:
            return
        states = [file for file in numbered_states(folder) if _number(file) <= iteration]
        ranked = sorted(states, key=lambda file: (self.is_regular(file), _number(file)))
        for state in ranked[: -self._keep_last]:
            if _number(state) != iteration:
                self._remove(state)

    def _remove(self, state: Path) -> None:
        """Remove networks, then their state, so that an interrupted removal is finished later.

        Networks without a state are not touched: they may be kept on purpose. The averages of
        ``train.posthoc_ema`` stay for ``basicsr average``, except those that a signal added.
        """
        networks = [*self._models.glob(f'net_*_{state.stem}.*')]
        if not self.is_regular(state):
            networks += self._models.glob(f'averages*_{state.stem}.pth')
        try:
            for file in (*networks, state):
                file.unlink(missing_ok=True)
        except OSError as error:  # the run itself is not affected
            logger.warning('logger.keep_last: cannot remove %s: %s', state, error)


def numbered_states(folder: str | Path) -> list[Path]:
    """The files ``<iter>.state`` of a folder, sorted by iteration; none if there is no folder."""
    states = (file for file in Path(folder).glob('*.state') if re.fullmatch(r'\d+', file.stem))
    return sorted(states, key=_number)


def set_aside_later(path: Mapping[str, Any], iteration: int) -> None:
    """Move checkpoints later than the iteration that a run resumes at to a separate folder.

    They are damaged or abandoned, and the newest state must be one of this run.

    Args:
        path: The option section ``path``.
    """
    states = [
        file for file in numbered_states(path['training_states']) if _number(file) > iteration
    ]
    if not states:
        return
    root = Path(path['experiments_root'])
    target = root / f'given_up_{get_time_str()}'
    for state in states:
        networks = Path(path['models']).glob(f'*_{state.stem}.*')
        for file in (state, *networks):
            (target / file.parent.name).mkdir(parents=True, exist_ok=True)
            file.rename(target / file.parent.name / file.name)
    logger.warning('The checkpoints beyond iteration %d are now in %s.', iteration, target)


def _number(state: Path) -> int:
    return int(state.stem)


def load_state(file: str | Path, opt: Mapping[str, Any]) -> dict[str, Any]:
    """Read a state, and check it and the networks that a run with these options loads with it.

    Raises:
        FileNotFoundError, ValueError: One of them is missing, or is not what was written.
    """
    state = load_checkpoint(file)
    if not _is_state(state):
        raise UserError(
            f'{file} is not a training state, as training_states/<iter>.state is. To start from '
            'pretrained weights, set path.pretrain_network_g.'
        )
    records = state.get('files', {})
    models = folder_of_networks(opt['path'] | {'resume_state': str(file)})
    for network in _needed(state['iter'], opt, models, records):
        check_file(network, records.get(network.name))
    return state


def _is_state(content: Any) -> bool:
    if not isinstance(content, dict):
        return False
    files = content.get('files', {})
    return (
        all(isinstance(content.get(key), int) for key in ('iter', 'epoch'))
        and all(isinstance(content.get(key, 0), int) for key in ('manual_seed', 'samples', 'batch'))
        and all(isinstance(content.get(key), list) for key in ('optimizers', 'schedulers'))
        and isinstance(files, dict)
        and all(isinstance(record, dict) for record in files.values())
        and all(isinstance(record.get('size'), int) for record in files.values())
        and all(isinstance(record.get('sha256'), str) for record in files.values())
        and not any(tensor.is_meta or tensor.is_quantized for tensor in tensors_in(content))
    )


def _needed(
    iteration: int, opt: Mapping[str, Any], models: Path, records: Collection[str]
) -> list[Path]:
    """The files of an iteration that a run reads to resume from it."""
    ignored = opt['path'].get('ignore_resume_networks') or []
    labels = [
        key.removeprefix('network_')
        for key in opt
        if key.startswith('network_') and opt[key] is not None and key not in ignored
    ]
    found = [network_file(models, label, iteration, records) for label in labels]
    files = [file for file in found if file is not None]
    averages = [models / name for name in records if name.startswith('averages_')]
    return files + (averages if averages and opt['train']['posthoc_ema'] else [])


def check_file(file: Path, record: Mapping[str, Any] | None) -> None:
    """Compare a file with the record of its length and SHA-256, if there is one.

    Raises:
        FileNotFoundError, ValueError: It is missing, or is not what was written.
    """
    if not file.is_file():
        advice = ' To go without it, remove train.posthoc_ema.' if 'averages_' in file.name else ''
        raise FileNotFoundError(f'no checkpoint file {file}.{advice}')
    if record is None:  # written by BasicSR 1.x
        check_archive(file)
        return
    size = file.stat().st_size
    if size != record['size']:
        raise UserError(
            f'{file} has {sizeof_fmt(size)}, and {sizeof_fmt(record["size"])} were written with '
            'the state: it is truncated, or from another run.'
        )
    with file.open('rb') as content:
        digest = hashlib.file_digest(content, 'sha256').hexdigest()
    if digest != record['sha256']:
        raise UserError(
            f'{file} is damaged, or from another run: its SHA-256 begins with {digest[:8]}, and '
            f'with {record["sha256"][:8]} when the state was written.'
        )

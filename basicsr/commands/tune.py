"""Find the fastest settings of an option file by short trials of training."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from basicsr.utils.text import sizeof_fmt

from .children import end, end_with_children, start
from .tuning import (
    ACCEPTED,
    BATCH,
    GPU_ALONE,
    KEYS,
    Failure,
    Report,
    difference,
    next_value,
    search,
)

_PATIENCE = 900.0  # seconds beyond those of a trial: compilation takes minutes


class Trials:
    """Trials of one option file, each in a process of its own.

    Args:
        args: The flags of ``basicsr tune``.
        folder: For all that they write.
    """

    def __init__(self, args: argparse.Namespace, folder: Path):
        self._args, self._folder = args, folder
        self.seed: int | None = None

    def __call__(self, settings: Mapping[str, Any]) -> Report | Failure:
        """Train with settings other than the file's, by their name in ``KEYS``."""
        forced = [f'{KEYS[name]}={json.dumps(value)}' for name, value in settings.items()]
        forced.append(f'path:experiments_root={json.dumps(str(self._folder / "experiments"))}')
        if self.seed is not None:
            forced.append(f'manual_seed={self.seed}')
        arguments = ['-opt', self._args.opt, '--force_yml', *self._args.force_yml, *forced]
        report, log = self._folder / 'report.json', self._folder / 'log.txt'
        report.unlink(missing_ok=True)
        request = {
            'seconds': self._args.seconds,
            # The file itself may have taken more.
            'memory': self._args.memory if BATCH in settings else 1.0,
            'cache': str(self._folder / 'cache'),
            'report': str(report),
        }
        with log.open('wb') as file:
            status = self._run([json.dumps(request), *arguments], file)
        text = log.read_text(encoding='utf-8', errors='replace')
        if status or not report.exists():
            return Failure(status, _reason(status, text), text)
        return Report(**json.loads(report.read_text(encoding='utf-8')))

    def _run(self, arguments: list[str], log: Any) -> int | None:
        """The exit status of a trial; None if it took too long."""
        # What torch compiles, and what a process that is killed leaves behind, goes there too.
        process = start(['basicsr.commands.trial', *arguments], log, TMPDIR=str(self._folder))
        try:
            return process.wait(_PATIENCE + 3 * self._args.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def _reason(status: int | None, log: str) -> str:
    """Why a trial failed, in a few words."""
    if status is None:
        return 'no end in sight'
    if 'out of memory' in log.lower() or status == -9:  # as the system ends what takes too much
        return 'out of memory'
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r'[\w.]*(Error|Exception)\b|.* ERROR: ', line)]
    text = (named or lines or [f'exit status {status}'])[-1]
    return re.sub(r'^[-\d]+ [\d:,]+ ERROR: ', '', text)[:100]


def table_row(setting: str, trial: Report | Failure, plain: Report | None, verdict: str) -> str:
    """A line of the table; the losses are compared with those of ``plain``, if that is given."""
    cells = ['-'] * 4
    if isinstance(trial, Report):
        cells[:3] = f'{trial.speed:.1f}', f'{trial.waiting:.0%}', sizeof_fmt(trial.memory)
        if plain:
            cells[3] = f'{difference(trial.losses, plain.losses):.2%}'
    return _line(setting, cells, verdict)


def _line(setting: str, cells: Sequence[str], verdict: str) -> str:
    speed, waiting, memory, losses = cells
    return f'{setting:<26}{speed:>11}{waiting:>10}{memory:>12}{losses:>15}   {verdict}\n'


def conclusion(
    settings: Mapping[str, Any], best: Report, plain: Report, names: Sequence[str], memory: float
) -> str:
    """The text below the table: what was not tried, and the lines to paste."""
    lines, left_out = [''], [name for name in GPU_ALONE if name in names]
    left_out += ['prefetch_mode: cuda'] if 'prefetch_mode' in names else []
    if plain.half is None and left_out:
        lines.append(f'Not tried without a GPU: {", ".join(left_out)}.')
    if BATCH in names and next_value(BATCH, best, memory) is None:
        lines.append(
            f'{BATCH}: {2 * best.settings[BATCH]} was not tried: it might need more than '
            f'{memory:.0%} of {sizeof_fmt(best.total_memory)}.'
        )
    if not settings:
        return '\n'.join([*lines, 'The file is as fast as anything tried.', ''])
    lines.append(
        f'{best.speed / plain.speed:.2f} times as many samples per second with these lines:\n'
    )
    forced, tree = [], {}
    for name, value in settings.items():
        section = tree
        *parents, _ = KEYS[name].split(':')
        for key in parents:
            section = section.setdefault(key, {})
        section[name] = value
        forced.append(shlex.quote(f'{KEYS[name]}={yaml.safe_dump(value).splitlines()[0]}'))
    lines.append(yaml.safe_dump(tree, sort_keys=False))
    lines.append(f'or the flag --force_yml {" ".join(forced)}')
    if BATCH in settings:
        lines.append(
            'A larger batch is another training: fewer steps see as many samples, and a higher '
            'learning rate may suit it (train.scale_lr).'
        )
    return '\n'.join([*lines, ''])


def tune(args: argparse.Namespace, folder: Path) -> int:
    """Make the trials and print their table; returns the exit status."""
    tell, measure = sys.stdout.write, Trials(args, folder)
    plain = measure({})
    if isinstance(plain, Failure):
        sys.stderr.write(plain.log or f'The trial of the file as it is: {plain.reason}.\n')
        return plain.status if plain.status in (1, 2) else 1
    measure.seed = plain.seed
    tell(f'Trials of {args.opt} on {plain.device}, {args.seconds:g} s each\n\n')
    tell(_line('setting', ['samples/s', 'waiting', 'memory', 'losses differ'], 'verdict'))
    tell(table_row('as in the file', plain, None, 'plain'))
    settings, best = {}, plain
    trials = search(measure, plain, args.settings, args.tolerance, args.memory)
    sys.stdout.flush()
    for tried, name, trial, verdict in trials:
        setting = f'{name}: {json.dumps(tried[name])}'.replace('"', '')
        tell(table_row(setting, trial, None if name == BATCH else plain, verdict))
        sys.stdout.flush()
        if verdict == ACCEPTED and isinstance(trial, Report):
            settings, best = tried, trial
    tell(conclusion(settings, best, plain, args.settings, args.memory))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('-opt', required=True, metavar='FILE', help='option file (YAML)')
    parser.add_argument(
        '--force_yml', nargs='+', default=[], metavar='A:B=VALUE', help='set options of the file'
    )
    parser.add_argument('--seconds', type=float, default=10, help='of a trial (default 10)')
    parser.add_argument(
        '--memory', type=float, default=0.9, help='share of it for a batch (default 0.9)'
    )
    parser.add_argument(
        '--tolerance',
        type=float,
        default=0.05,
        help='largest relative difference of the first losses (default 0.05)',
    )
    parser.add_argument(
        '--settings',
        nargs='+',
        default=list(KEYS),
        choices=list(KEYS),
        metavar='NAME',
        help=f'what to tune (default: {" ".join(KEYS)})',
    )


def _check(args: argparse.Namespace) -> None:
    if not (args.seconds > 0 and 0 < args.memory <= 1 and args.tolerance >= 0):
        args.parser.error('--seconds must be above 0, --memory in (0, 1], --tolerance not below 0.')
    if {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'} <= os.environ.keys():  # as torchrun sets them
        args.parser.error('one process tunes what each rank does: start it without torchrun.')


def main(args: argparse.Namespace) -> int:
    """Tune as the flags say; returns the exit status."""
    _check(args)
    end_with_children()
    with TemporaryDirectory(prefix='basicsr_tune_', ignore_cleanup_errors=True) as folder:
        try:
            return tune(args, Path(folder))
        except KeyboardInterrupt:
            sys.stderr.write('Interrupted.\n')
            return 130

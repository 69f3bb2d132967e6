"""``basicsr tune -opt FILE``: find the fastest settings by short trials of training."""

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from basicsr.utils.text import sizeof_fmt

from .children import end, end_with_children, start

# Tuned options, in the notation of --force_yml.
WORKERS, BATCH = 'num_worker_per_gpu', 'batch_size_per_gpu'
KEYS = {name: f'datasets:train:{name}' for name in ('cache', WORKERS, 'prefetch_mode')}
KEYS |= {name: f'train:{name}' for name in ('amp', 'channels_last', 'compile')}
# Workers are tuned twice, since a faster step may have to wait for data.
_ORDER = (*KEYS, WORKERS, BATCH)
KEYS[BATCH] = f'datasets:train:{BATCH}'
_GPU_ALONE = ('amp', 'channels_last', 'prefetch_mode: cuda')
_MARGIN = 0.03  # minimum speedup of an accepted setting, which must also exceed twice the noise
_LITTLE_WAITING = 0.02  # share of the time below which more workers would gain little
_PATIENCE = 900.0  # timeout in seconds in addition to a trial's: compilation takes minutes
_ROW = '{:<26}{:>11}{:>10}{:>12}{:>15}   {}\n'
ACCEPTED = 'accepted'


class Report(NamedTuple):
    """What a trial measured, and where."""

    speed: float  # samples per second
    noise: float  # its relative standard error
    waiting: float  # share of the time spent waiting for data
    memory: int  # peak bytes: of tensors on a GPU, else of the training process
    losses: list[dict[str, float]]  # of each of the first iterations
    settings: dict[str, Any]  # the values of KEYS, defaults filled in
    device: str
    total_memory: int  # of the device, in bytes
    half: str | None  # half precision that the GPU supports natively; None without a GPU
    cores: int  # for the loaders of each GPU


class Failure(NamedTuple):
    """A failed trial: its exit status (None: it timed out), the reason and the log."""

    status: int | None
    reason: str
    log: str = ''


def run_trial(args: argparse.Namespace, folder: Path, settings: dict) -> Report | Failure:
    """Train in a process of its own, with settings other than the file's, by name in ``KEYS``."""
    report, log = folder / 'report.json', folder / 'log.txt'
    report.unlink(missing_ok=True)
    share = args.memory if BATCH in settings else 1.0  # the unchanged file may use more
    request = {'seconds': args.seconds, 'memory': share, 'folder': str(folder)}
    forced = {KEYS[name]: value for name, value in settings.items()}
    forced |= {'path:experiments_root': str(folder / 'experiments'), 'manual_seed': 0}
    command = ['basicsr.commands.trial', json.dumps(request), '-opt', args.opt, '--force_yml']
    command += [*args.force_yml, *(f'{key}={json.dumps(value)}' for key, value in forced.items())]
    with log.open('wb') as file:
        # TMPDIR also receives compiled kernels and the leftovers of killed processes.
        process = start(command, file, TMPDIR=str(folder))
        try:
            status = process.wait(_PATIENCE + 3 * args.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
    if status == 0 and report.exists():
        return Report(**json.loads(report.read_text(encoding='utf-8')))
    text = log.read_text(encoding='utf-8', errors='replace')
    return Failure(status, reason_of_failure(status, text), text)


def reason_of_failure(status: int | None, log: str) -> str:
    """Why a trial failed, in a few words."""
    if status is None:
        return 'no end in sight'
    if 'out of memory' in log.lower() or status == -9:  # -9: killed by the OOM killer
        return 'out of memory'
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r'[\w.]*(Error|Exception)\b|.* ERROR: ', line)]
    text = (named or lines or [f'exit status {status}'])[-1]
    return re.sub(r'^[-\d]+ [\d:,]+ ERROR: ', '', text)[:100]


def next_value(name: str, best: Report, memory: float) -> Any:
    """What to try next for a setting on top of the best trial so far; None: nothing more.

    Args:
        memory: Share of the memory that a batch may take.
    """
    now, has_gpu = best.settings[name], best.half is not None
    if name == WORKERS:
        is_useful = best.waiting > _LITTLE_WAITING and now < best.cores
        return min(max(2 * now, 1), best.cores) if is_useful else None
    if name == BATCH:
        # A full GPU raises an error; a machine without memory takes other processes down.
        has_room = has_gpu or 2 * best.memory <= memory * best.total_memory
        return 2 * now if has_room else None
    on = {'cache': 'auto', 'prefetch_mode': 'cuda' if has_gpu else 'cpu', 'compile': True}
    on |= {'amp': best.half, 'channels_last': has_gpu or None}
    return on[name] if now in (None, False, 'off', 'cpu') and now != on[name] else None


def difference(
    losses: Sequence[Mapping[str, float]], plain: Sequence[Mapping[str, float]]
) -> float:
    """Largest relative difference of an iteration's losses from the plain ones, or NaN."""
    found = [
        sum(abs(other[name] - value) for name, value in own.items())
        / (sum(map(abs, own.values())) or sys.float_info.min)
        for own, other in zip(plain, losses, strict=True)
    ]
    return max(found, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)


def judge(name: str, trial: Report | Failure, best: Report, plain: Report, tolerance: float) -> str:
    """``ACCEPTED``, or why a trial of another value of ``name`` is not.

    Args:
        best, plain: The best trial so far, and that of the unchanged file.
        tolerance: Maximum difference of the losses, ignored for another batch size.
    """
    if isinstance(trial, Failure):
        return f'failed: {trial.reason}'
    if name != BATCH and not difference(trial.losses, plain.losses) <= tolerance:
        return f'losses differ by more than {tolerance:.1%}'
    gain = trial.speed / best.speed - 1
    needed = max(_MARGIN, 2 * math.hypot(trial.noise, best.noise))
    if gain >= needed:
        return ACCEPTED
    return f'slower ({gain:+.1%})' if gain < 0 else f'{gain:+.1%}, less than {needed:.0%}'


def search(
    measure: Callable[[dict[str, Any]], Report | Failure],
    tell: Callable[[str, Any, Report | Failure, str], Any],
    plain: Report,
    names: Sequence[str],
    tolerance: float,
    memory: float,
) -> tuple[dict[str, Any], Report]:
    """Greedy search: try one setting at a time, on top of those accepted so far.

    Args:
        tell: Called with the name, value, outcome and verdict of each trial.

    Returns:
        The settings that were accepted, and their trial.
    """
    accepted, best, tried = {}, plain, []
    for name in [name for name in _ORDER if name in names]:
        while (value := next_value(name, best, memory)) is not None:
            settings = {**accepted, name: value}
            if settings in tried:
                break
            tried.append(settings)
            trial = measure(settings)
            verdict = judge(name, trial, best, plain, tolerance)
            tell(name, value, trial, verdict)
            if verdict != ACCEPTED or isinstance(trial, Failure):
                break
            accepted, best = settings, trial
    return accepted, best


def table_row(setting: str, trial: Report | Failure, plain: Report | None, verdict: str) -> str:
    """A row of the table; losses are compared with those of ``plain``, if given."""
    if isinstance(trial, Failure):
        return _ROW.format(setting, *'----', verdict)
    losses = f'{difference(trial.losses, plain.losses):.2%}' if plain else '-'
    numbers = f'{trial.speed:.1f}', f'{trial.waiting:.0%}', sizeof_fmt(trial.memory), losses
    return _ROW.format(setting, *numbers, verdict)


def conclusion(
    settings: Mapping[str, Any], best: Report, plain: Report, names: Sequence[str], memory: float
) -> str:
    """The text below the table: what was not tried, and the lines to paste."""
    lines = ['']
    left_out = [text for text in _GPU_ALONE if text.partition(':')[0] in names]
    if plain.half is None and left_out:
        lines.append(f'Not tried without a GPU: {", ".join(left_out)}.')
    if BATCH in names and next_value(BATCH, best, memory) is None:
        lines.append(
            f'{BATCH}: {2 * best.settings[BATCH]} was not tried: it might need more than '
            f'{memory:.0%} of {sizeof_fmt(best.total_memory)}.'
        )
    if not settings:
        return '\n'.join([*lines, 'The file is as fast as anything tried.', ''])
    tree = {}
    for name, value in settings.items():
        *parents, _ = KEYS[name].split(':')
        section = functools.reduce(lambda part, key: part.setdefault(key, {}), parents, tree)
        section[name] = value
    gain = f'{best.speed / plain.speed:.2f} times as many samples per second'
    lines += [f'{gain} with these lines:\n', yaml.safe_dump(tree, sort_keys=False)]
    forced = (f'{KEYS[name]}={_yaml(value)}' for name, value in settings.items())
    lines.append(f'or the flag --force_yml {" ".join(forced)}')
    if BATCH in settings:
        lines.append(
            'A larger batch is another training: fewer steps see as many samples, and a higher '
            'learning rate may suit it (train.scale_lr).'
        )
    return '\n'.join([*lines, ''])


def _yaml(value: str | float | bool) -> str:
    return json.dumps(value).strip('"')


def tune(args: argparse.Namespace, folder: Path) -> int:
    """Run the trials and print their table; returns the exit status."""
    measure = functools.partial(run_trial, args, folder)
    plain = measure({})
    if isinstance(plain, Failure):
        sys.stderr.write(plain.log or f'The trial of the file as it is: {plain.reason}.\n')
        return plain.status if plain.status in (1, 2) else 1

    accepted, best = {}, plain  # also after Ctrl-C

    def tell(name: str, value: Any, trial: Report | Failure, verdict: str) -> None:
        nonlocal best
        if verdict == ACCEPTED and isinstance(trial, Report):
            accepted[name], best = value, trial
        reference = None if name == BATCH else plain
        sys.stdout.write(table_row(f'{name}: {_yaml(value)}', trial, reference, verdict))
        sys.stdout.flush()

    head = 'setting', 'samples/s', 'waiting', 'memory', 'losses differ', 'verdict'
    sys.stdout.write(f'Trials of {args.opt} on {plain.device}, {args.seconds:g} s each\n\n')
    sys.stdout.write(_ROW.format(*head) + table_row('as in the file', plain, None, 'plain'))
    sys.stdout.flush()
    limits = args.settings, args.tolerance, args.memory
    try:
        search(measure, tell, plain, *limits)
    finally:
        sys.stdout.write(conclusion(accepted, best, plain, args.settings, args.memory))
        sys.stdout.flush()
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add('-opt', required=True, metavar='FILE', help='option file (YAML)')
    add('--force_yml', nargs='+', default=[], metavar='A:B=VALUE', help='set options of the file')
    add('--seconds', type=float, default=10, help='of a trial (default 10)')
    add('--memory', type=float, default=0.9, help='share of it for a batch (default 0.9)')
    text = 'largest relative difference of the first losses (default 0.05)'
    add('--tolerance', type=float, default=0.05, help=text)
    names, text = list(KEYS), f'what to tune (default: {" ".join(KEYS)})'
    add('--settings', nargs='+', default=names, choices=names, metavar='NAME', help=text)


def main(args: argparse.Namespace) -> int:
    """Tune as the flags say; returns the exit status."""
    if not (args.seconds > 0 and 0 < args.memory <= 1 and args.tolerance >= 0):
        args.parser.error('--seconds must be above 0, --memory in (0, 1], --tolerance not below 0.')
    if {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'} <= os.environ.keys():  # as torchrun sets them
        args.parser.error('one process tunes what each rank does: start it without torchrun.')
    end_with_children()
    with TemporaryDirectory(prefix='basicsr_tune_', ignore_cleanup_errors=True) as folder:
        try:
            return tune(args, Path(folder))
        except KeyboardInterrupt:
            sys.stderr.write('Interrupted.\n')
            return 130

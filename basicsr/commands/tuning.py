"""Which settings of a training are tried, and which are taken: decisions of ``basicsr tune``."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What is tuned, as --force_yml names it.
KEYS = {
    key.rpartition(':')[2]: key
    for key in (
        'datasets:train:cache',
        'datasets:train:num_worker_per_gpu',
        'datasets:train:prefetch_mode',
        'train:amp',
        'train:channels_last',
        'train:compile',
        'datasets:train:batch_size_per_gpu',
    )
}
WORKERS, BATCH = 'num_worker_per_gpu', 'batch_size_per_gpu'
GPU_ALONE = ('amp', 'channels_last')
_MARGIN = 0.03  # by which a setting must be faster at least, and by twice the noise
_LITTLE_WAITING = 0.02  # share of the time that more workers could not make much of
ACCEPTED = 'accepted'


@dataclass(frozen=True)
class Report:
    """What a trial measured, and where.

    Attributes:
        speed: Samples per second.
        noise: Standard error of ``speed``, relative to it.
        waiting: Share of the time spent waiting for data.
        memory: Largest memory in bytes: of a GPU's tensors, else of the training process.
        losses: By name, of each of the first iterations.
        settings: The values of ``KEYS``, defaults filled in.
        device: Its name.
        total_memory: Of the device in bytes.
        half: Half precision that the GPU is built for; None without a GPU.
        cores: Processor cores for the loaders of each GPU.
        seed: ``manual_seed``.
    """

    speed: float
    noise: float
    waiting: float
    memory: int
    losses: list[dict[str, float]]
    settings: dict[str, Any]
    device: str
    total_memory: int
    half: str | None
    cores: int
    seed: int


@dataclass(frozen=True)
class Failure:
    """A trial that measured nothing: its exit status (None: it was ended), why, what it said."""

    status: int | None
    reason: str
    log: str = ''


def next_value(name: str, best: Report, memory: float) -> Any:
    """What to try next for a setting, given the best trial so far; None: nothing more.

    Args:
        name: One of ``KEYS``.
        best: Its report.
        memory: Share of the memory that a batch may take.
    """
    now, has_gpu = best.settings[name], best.half is not None
    if name == 'cache':
        return 'auto' if now in ('off', False) else None
    if name == WORKERS:
        is_useful = best.waiting > _LITTLE_WAITING and now < best.cores
        return min(max(2 * now, 1), best.cores) if is_useful else None
    if name == BATCH:
        # A GPU tells when it is full; a computer that runs out of memory takes others down.
        has_room = has_gpu or 2 * best.memory <= memory * best.total_memory
        return 2 * now if has_room else None
    if name == 'prefetch_mode':
        better = 'cuda' if has_gpu else 'cpu'
        return better if now is None or (has_gpu and now == 'cpu') else None
    if now or (name in GPU_ALONE and not has_gpu):
        return None
    return best.half if name == 'amp' else True


def difference(
    losses: Sequence[Mapping[str, float]], plain: Sequence[Mapping[str, float]]
) -> float:
    """Largest distance of an iteration's losses from those of the plain trial, relative to these.

    NaN if any loss is.
    """
    found = [
        sum(abs(other[name] - value) for name, value in own.items())
        / max(sum(map(abs, own.values())), sys.float_info.min)
        for own, other in zip(plain, losses, strict=True)
    ]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def judge(name: str, trial: Report | Failure, best: Report, plain: Report, tolerance: float) -> str:
    """``ACCEPTED``, or why a trial of another value of ``name`` is not.

    Args:
        trial: What it measured.
        best, plain: The best trial so far, and that of the file as it is.
        tolerance: Largest difference of the losses, relative to those of ``plain``. A batch of
            another size has other losses.
    """
    if isinstance(trial, Failure):
        return f'failed: {trial.reason}'
    if name != BATCH and not difference(trial.losses, plain.losses) <= tolerance:
        return f'losses differ by more than {tolerance:.1%}'
    gain = trial.speed / best.speed - 1
    needed = max(_MARGIN, 2 * math.hypot(trial.noise, best.noise))
    return ACCEPTED if gain >= needed else f'not {needed:.0%} faster ({gain:+.1%})'


def search(
    measure: Callable[[dict[str, Any]], Report | Failure],
    plain: Report,
    names: Sequence[str],
    tolerance: float,
    memory: float,
) -> Iterator[tuple[dict[str, Any], str, Report | Failure, str]]:
    """Try one setting after the other, each on top of those that were accepted.

    Args:
        measure: Makes a trial with settings other than the file's, by their name in ``KEYS``.
        plain: The trial of the file as it is.
        names: What to tune.
        tolerance, memory: As in ``judge`` and ``next_value``.

    Yields:
        The settings tried, the name of the new one, the outcome and the verdict, for each trial.
    """
    accepted: dict[str, Any] = {}
    best, tried = plain, []
    # A faster step may wait for data where a slower one did not.
    order = [*[name for name in KEYS if name != BATCH], WORKERS, BATCH]
    for name in [name for name in order if name in names]:
        while (value := next_value(name, best, memory)) is not None:
            settings = {**accepted, name: value}
            if settings in tried:
                break
            tried.append(settings)
            trial = measure(settings)
            verdict = judge(name, trial, best, plain, tolerance)
            yield settings, name, trial, verdict
            if verdict != ACCEPTED or isinstance(trial, Failure):
                break
            accepted, best = settings, trial

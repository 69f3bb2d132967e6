"""Read curves from TensorBoard's files and from text logs, and smooth them, for plots."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import MissingKeyError, MissingPackageError, UserError
from .text import did_you_mean


def read_data_from_tensorboard(log_path: str | Path, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of a scalar, all that were written.

    Args:
        log_path: An event file, or the folder of a run with such files.
        tag: Name of the scalar, such as ``losses/l_pix``.

    Raises:
        KeyError: There is no such scalar; the message lists those there are.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise MissingPackageError('reading curves needs: pip install tensorboard') from error
    if not Path(log_path).exists():
        raise FileNotFoundError(f'no file or folder {log_path}.')
    events = EventAccumulator(str(log_path), size_guidance={'scalars': 0}).Reload()  # 0: all
    tags = events.Tags()['scalars']
    if tag not in tags:
        known = ', '.join(tags) or 'none'
        hint = did_you_mean(tag, tags)
        raise MissingKeyError(f"{log_path} has no scalar '{tag}'{hint} It has: {known}.")
    scalars = events.Scalars(tag)
    return [scalar.step for scalar in scalars], [scalar.value for scalar in scalars]


def read_data_from_txt_2v(
    path: str | Path, pattern: str, step_one: bool = False
) -> tuple[list[int], list[float]]:
    """Steps and values of the lines of a text log in which ``pattern`` is found.

    Args:
        pattern: A regular expression with two groups, such as ``iter: *([\\d,]+).* l_pix: (\\S+)``.
            Steps may have commas between thousands.
        step_one: Add 1 to the steps, if they are counted from 0.
    """
    found = list(_groups(path, pattern, 2))
    steps = [int(step.replace(',', '')) + step_one for step, _ in found]
    return steps, [float(value) for _, value in found]


def read_data_from_txt_1v(path: str | Path, pattern: str) -> list[float]:
    """Values of the lines of a text log in which ``pattern``, which has one group, is found."""
    return [float(value) for (value,) in _groups(path, pattern, 1)]


def smooth_data(values: Iterable[float], smooth_weight: float) -> list[float]:
    """Exponential moving average, as TensorBoard shows it; it begins with the first value.

    Args:
        smooth_weight: Weight of the average so far, in [0, 1]; 0 changes nothing.
    """
    if not 0 <= smooth_weight <= 1:
        raise UserError(f'smooth_weight must be in [0, 1], got {smooth_weight}.')
    smooth: list[float] = []
    for value in values:
        last = smooth[-1] if smooth else value
        smooth.append(smooth_weight * last + (1 - smooth_weight) * value)
    return smooth


def _groups(path: str | Path, pattern: str, count: int) -> Iterator[tuple[str, ...]]:
    expression = re.compile(pattern)
    if expression.groups != count:
        raise UserError(f'{pattern!r} must have {count} group(s), it has {expression.groups}.')
    with open(path, encoding='utf-8', errors='replace') as lines:
        yield from (found.groups() for found in map(expression.search, lines) if found)

"""Post-hoc EMA: weight averages whose length is chosen after training.

Tero Karras, Miika Aittala, Jaakko Lehtinen, Janne Hellsten, Timo Aila, Samuli Laine, "Analyzing and
Improving the Training Dynamics of Diffusion Models", CVPR 2024, https://arxiv.org/abs/2312.02696

An average at iteration T weights the weights of iteration t by a profile (g + 1) t^g / T^(g + 1).
Its length is the standard deviation of the profile relative to T. From periodic snapshots of the
averages of two lengths, averages of other lengths are reconstructed by least squares.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from basicsr.utils.checkpoint import load_checkpoint, save_checkpoint
from basicsr.utils.errors import UserError
from basicsr.utils.safetensors_file import DESCRIPTION
from basicsr.utils.text import some
from basicsr.utils.wrong_weights import why_unusable

_LONGEST = 12**-0.5  # the length of g = 0, the uniform average
# Relative error of the profile above which the result is not the average that was requested.
_LARGEST_ERROR = 0.1


def exponent(length: float) -> float:
    """The g of a length: the largest root of (g + 2)² (g + 3) length² = g + 1.

    Raises:
        ValueError: No profile with g >= 0 has this length.
    """
    if not 0 < length <= _LONGEST:
        raise UserError(
            f'the length of an average must be above 0 and at most {_LONGEST:.4f}, that of the '
            f'plain mean over all iterations; got {length}.'
        )
    square = length**-2
    return max(0.0, float(np.roots([1, 7, 16 - square, 12 - square]).real.max()))


def profile_products(exponents: Any, ends: Any, others: Any, other_ends: Any) -> np.ndarray:
    """Integrals over the products of two profiles each, given by their g and T; broadcast."""
    exponents, ends, others, other_ends = map(np.asarray, (exponents, ends, others, other_ends))
    later = np.where(ends >= other_ends, exponents, others)
    last = np.maximum(ends, other_ends)
    ratio = np.minimum(ends, other_ends) / last
    return (exponents + 1) * (others + 1) * ratio**later / ((exponents + others + 1) * last)


def shares_of_snapshots(
    exponents: Sequence[float], ends: Sequence[float], length: float
) -> tuple[np.ndarray, float]:
    """Find the linear combination of snapshots closest to the average of a given length.

    The coefficients are constrained to sum to one, unlike in the paper: otherwise constant weights
    would shrink if there are few snapshots.

    Args:
        exponents, ends: g and T of each snapshot; the last T is that of the result.

    Returns:
        The coefficients, and the distance between both profiles relative to the target's norm.
    """
    wanted, times = exponent(length), np.asarray(ends) / ends[-1]
    products = profile_products(np.reshape(exponents, (-1, 1)), times[:, None], exponents, times)
    targets = profile_products(exponents, times, wanted, 1.0)
    count = len(times)
    system = np.ones((count + 1, count + 1))  # with Lagrange's multiplier for the sum
    system[:count, :count], system[count, count] = products, 0
    shares = np.linalg.lstsq(system, np.append(targets, 1), rcond=None)[0][:count]
    norm = profile_products(wanted, 1.0, wanted, 1.0)
    square = 1 + (shares @ products @ shares - 2 * shares @ targets) / norm
    return shares, float(np.sqrt(max(square, 0)))


def snapshot_file(models: str | Path, iteration: int, label: str = 'g') -> Path:
    """The snapshot file of a network at an iteration, in the folder of the networks."""
    name = 'averages' if label == 'g' else f'averages_{label}'
    return Path(models) / f'{name}_{iteration}.pth'


def load_snapshot(models: str | Path, iteration: int, label: str = 'g') -> dict[str, Any]:
    """Read the averages from which a run with ``train.posthoc_ema`` resumes."""
    file = snapshot_file(models, iteration, label)
    if not file.is_file():
        raise FileNotFoundError(
            f'train.posthoc_ema: no {file}. Its averages must begin with the first iteration: '
            'restore the file, or leave the option out.'
        )
    content = load_checkpoint(file)
    if not _is_snapshot(content):
        raise UserError(f'{file} does not hold averages of train.posthoc_ema.')
    return content


def _is_snapshot(content: Any) -> bool:
    if not isinstance(content, dict):
        return False
    lengths, averages, buffers = (content.get(key) for key in ('lengths', 'averages', 'buffers'))
    return (
        all(isinstance(value, list) for value in (lengths, averages, buffers))
        and all(isinstance(length, int | float) for length in lengths)
        and len(lengths) == len(averages) > 0
        and all(isinstance(average, Mapping) for average in averages)
        and all(
            isinstance(value, Tensor) and not why_unusable(name, value)
            for average in averages
            for name, value in average.items()
        )
    )


def write_averages(
    experiment: str | Path,
    lengths: Sequence[float],
    target: str | Path,
    iteration: int | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Reconstruct averages from the snapshots of a run, and write them as networks.

    Args:
        experiment: Folder of the run, such as ``experiments/x``.
        lengths: Lengths of the averages.
        target: Output file; with several lengths, each is appended to its name.
        iteration: The last iteration of the averages; default: that of the last snapshot.
        overwrite: Replace existing files.

    Returns:
        A line for each file that describes its average.

    Raises:
        FileNotFoundError: There are no such snapshots.
        ValueError: They do not belong together, or cannot reproduce that length.
    """
    models = Path(experiment) / 'models'
    files = _targets(Path(target), lengths, overwrite)
    iterations = _iterations(models, iteration)
    newest = load_snapshot(models, iterations[-1])
    exponents = [exponent(length) for _ in iterations for length in newest['lengths']]
    ends = [end for end in iterations for _ in newest['lengths']]
    fits = [_fit(exponents, ends, length) for length in lengths]
    shares = np.array([shares for shares, _ in fits]).reshape(len(lengths), len(iterations), -1)
    states = _add_up(models, iterations, newest, shares)
    described = {key: newest[key] for key in (DESCRIPTION,) if key in newest}
    lines = []
    for file, length, state, (_, error) in zip(files, lengths, states, fits, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint({'params_ema': state, **described}, file)
        lines.append(
            f'{file}: length {length:g} at iteration {iterations[-1]}, from {len(iterations)} '
            f'snapshots since {iterations[0]}; the profile is met up to {error:.2%}'
        )
    return lines


def _targets(target: Path, lengths: Sequence[float], overwrite: bool) -> list[Path]:
    """The output file for each length; none may exist yet, unless it is to be overwritten."""
    if target.suffix not in ('.pth', '.safetensors'):
        raise UserError(f"-o '{target}' must end in .pth or .safetensors.")
    files = [target]
    if len(lengths) > 1:
        files = [target.with_name(f'{target.stem}_{x:g}{target.suffix}') for x in lengths]
    if len(set(files)) < len(files):
        raise UserError(f'two of the lengths {lengths} are the same file: give each once.')
    for file in files:
        if file.exists() and not overwrite:
            raise FileExistsError(f'{file} exists: remove it, or give another name (-o).')
    return files


def drop_later_snapshots(models: str | Path, iteration: int) -> None:
    """Remove snapshots after the iteration at which a run resumes.

    They do not belong to the weights that the resumed run will train.
    """
    for file in Path(models).glob('averages_*.pth'):
        number = file.stem.rpartition('_')[2]
        if number.isdigit() and int(number) > iteration:
            file.unlink()


def _iterations(models: Path, last: int | None) -> list[int]:
    """Iterations of the snapshots up to ``last``, in order."""
    names = (file.stem.removeprefix('averages_') for file in models.glob('averages_*.pth'))
    found = sorted(int(name) for name in names if name.isdigit())
    if not found:
        raise FileNotFoundError(f'no averages_*.pth in {models}: train with train.posthoc_ema.')
    if last is None:
        return found
    if last not in found:
        raise FileNotFoundError(
            f'no {snapshot_file(models, last)}; there are those of {some(list(map(str, found)))}.'
        )
    return [iteration for iteration in found if iteration <= last]


def _fit(
    exponents: Sequence[float], ends: Sequence[int], length: float
) -> tuple[np.ndarray, float]:
    shares, error = shares_of_snapshots(exponents, ends, length)
    if error <= _LARGEST_ERROR:
        return shares, error
    others = np.arange(1, 29) / 100
    good = [
        f'{x:g}' for x in others if shares_of_snapshots(exponents, ends, x)[1] <= _LARGEST_ERROR
    ]
    raise UserError(
        f'length {length:g}: the profile is missed by {error:.0%} with {len(set(ends))} snapshots; '
        f'they can give the lengths: {", ".join(good) or "none"}. Choose one of these, or store '
        'snapshots more often (logger.save_checkpoint_freq).'
    )


def _add_up(
    models: Path, iterations: Sequence[int], newest: Mapping[str, Any], shares: np.ndarray
) -> list[dict[str, Tensor]]:
    """The networks of each row of ``shares``, (number, snapshots, averages of a snapshot)."""
    buffers, like = set(newest['buffers']), newest['averages'][0]
    sums = [
        {name: torch.zeros_like(value).double() for name, value in like.items()} for _ in shares
    ]
    for position, iteration in enumerate(iterations):
        file = snapshot_file(models, iteration)
        snapshot = load_snapshot(models, iteration)
        if snapshot['lengths'] != newest['lengths'] or _shapes(snapshot) != _shapes(newest):
            raise UserError(
                f'{file} is of another network, or of other lengths, than that of iteration '
                f'{iterations[-1]}: move away the files of other runs.'
            )
        for index, average in enumerate(snapshot['averages']):
            for total, row in zip(sums, shares, strict=True):
                for name in average.keys() - buffers:
                    total[name] += row[position, index] * average[name]
    return [
        {
            name: value if name in buffers else total[name].to(value.dtype)
            for name, value in like.items()
        }
        for total in sums
    ]


def _shapes(snapshot: Mapping[str, Any]) -> list[dict[str, torch.Size]]:
    return [{n: value.shape for n, value in state.items()} for state in snapshot['averages']]

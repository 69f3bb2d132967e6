"""Time and memory of a step in the modes that an option switches on: amp, compile and others."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from basicsr.models import build_model

from .measure import Result, Row, in_child, in_turn, seconds
from .plain import GT_SIZE, LR, NETWORK, SCALE

MODES: dict[str, dict[str, Any]] = {
    'bf16': {'amp': 'bf16'},
    'channels_last': {'channels_last': True},
    'bf16, channels_last': {'amp': 'bf16', 'channels_last': True},
    'compile': {'compile': True},
    'bf16, compile': {'amp': 'bf16', 'compile': True},
    'in 4 parts': {'accumulate': 4},
}


def measure(folder: Path, quick: bool) -> Result:
    """Steps of SRModel on one batch in memory, on the CPU, in each mode and in none."""
    sizes = (2, 32, 1) if quick else (16, GT_SIZE, 3)
    modes = {'bf16': MODES['bf16']} if quick else usable_modes()
    raw = in_child(steps_in_turn, modes, NETWORK, sizes, 5, 'cpu')
    return Result(rows_of(raw, 5), raw)


def usable_modes() -> dict[str, dict[str, Any]]:
    """Those that this machine can compute."""
    can_compile = shutil.which('g++') is not None
    return {name: its for name, its in MODES.items() if can_compile or 'compile' not in its}


def rows_of(raw: dict[str, list[float]], steps: int) -> list[Row]:
    """One row a mode: its step, and the plain one."""
    least = {mode: 1000 * min(times) / steps for mode, times in raw.items()}
    return [
        Row(f'a step, {mode} / plain', value, 'ms', least['plain'])
        for mode, value in least.items()
        if mode != 'plain'
    ]


def steps_in_turn(
    modes: dict[str, dict[str, Any]],
    network: dict[str, Any],
    sizes: tuple[int, int, int],
    count: int,
    device: str,
) -> dict[str, list[float]]:
    """Seconds of ``count`` steps in each mode, round by round.

    Args:
        sizes: Samples of a batch, side of its GT, rounds.
    """
    batch, side, rounds = sizes
    models = {
        mode: prepared(network, its, batch, side, device)
        for mode, its in {'plain': {}, **modes}.items()
    }
    return timed(models, count, rounds)


def timed(models: dict[str, Any], count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of ``count`` steps of each model, round by round."""
    return in_turn({m: partial(seconds, _steps, its, count) for m, its in models.items()}, rounds)


def prepared(
    network: dict[str, Any], extra: dict[str, Any], batch: int, side: int, device: str
) -> Any:
    """A model that has its batch, has chosen its kernels and compiled what it compiles."""
    torch.manual_seed(0)
    opt = {
        'name': 'modes',
        'model_type': 'SRModel',
        'num_gpu': int(device == 'cuda'),
        'dist': False,
        'is_train': True,
        'path': {},
        'network_g': network,
        'train': {
            'total_iter': 1,
            'ema_decay': 0.999,
            'optim_g': {'type': 'Adam', 'lr': LR},
            'pixel_opt': {'type': 'L1Loss'},
            **extra,
        },
    }
    model = build_model(opt)
    small = side // SCALE
    model.feed_data(
        {'lq': torch.rand(batch, 3, small, small), 'gt': torch.rand(batch, 3, side, side)}
    )
    _steps(model, 3)
    return model


def _steps(model: Any, count: int) -> None:
    for _ in range(count):
        model.optimize_parameters(1)
    if model.device.type == 'cuda':
        torch.cuda.synchronize()

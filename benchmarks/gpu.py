"""All that needs a GPU, within five minutes: python -m benchmarks.gpu [--seconds 300] [--json FILE]

First the tests marked ``gpu``, then times: a step in each mode, on a small and on a large network,
and an iteration of training against the bare step. One table says what came out.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .__main__ import described, machine, table
from .measure import Row
from .modes import MODES, prepared, rows_of, timed
from .plain import GT_SIZE, NETWORK

ROOT = Path(__file__).resolve().parents[1]
GPU_MODES = {
    **MODES,
    'fp16': {'amp': 'fp16'},
    'fp16, channels_last': {'amp': 'fp16', 'channels_last': True},
    'activations twice': {'checkpoint_activations': True},
    'CUDA graphs': {'compile': {'mode': 'reduce-overhead'}},
}
RRDB = {'type': 'RRDBNet', 'num_in_ch': 3, 'num_out_ch': 3, 'num_block': 6}
NETWORKS = {'SRVGGNetCompact 32 x 8': (NETWORK, 16), 'RRDBNet 6': (RRDB, 8)}
STEPS = 20


def main(args: argparse.Namespace) -> tuple[str, bool]:
    """Run all; returns the table, and whether every test has passed."""
    if not torch.cuda.is_available():
        raise SystemExit('benchmarks.gpu: torch sees no GPU here.')
    end = time.monotonic() + args.seconds
    outcome, passed = _tests(args.seconds / 2)
    found, raw, left_out = {}, {}, []
    for name, (network, batch) in NETWORKS.items():
        raw[name] = {}
        for mode, its in GPU_MODES.items():
            # Compiling takes a minute or two.
            if time.monotonic() > end - (120 if 'compile' in its else 15):
                left_out.append(f'{name}, {mode}')
                continue
            measured = _measure(mode, its, network, batch)
            if isinstance(measured, str):
                left_out.append(f'{name}, {mode} ({measured})')
                continue
            raw[name][mode], memory = measured
            found.setdefault(name, []).extend(rows_of(raw[name][mode], STEPS) + memory)
    found['iteration'] = list(_iteration(end - time.monotonic()))
    if args.json:
        report = {'machine': machine(), 'tests': outcome, 'raw': raw, 'left out': left_out}
        Path(args.json).write_text(json.dumps(report, indent=1) + '\n', encoding='utf-8')
    lines = [table(found), '', f'tests: {outcome}', described(machine())]
    lines.append(f'GPU: {torch.cuda.get_device_name()}; left out: {", ".join(left_out) or "none"}.')
    return '\n'.join(lines), passed


def _tests(limit: float) -> tuple[str, bool]:
    """What pytest says of the tests marked ``gpu``."""
    command = [sys.executable, '-m', 'pytest', '-q', '-m', 'gpu', '-n', '0', '--no-header']
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f'not done after {limit:.0f} s', False
    failed = re.findall(r'^(?:FAILED|ERROR) .*', result.stdout, re.MULTILINE)
    last = result.stdout.strip().splitlines()[-1:] or ['no output']
    return '\n  '.join([*last, *failed]), result.returncode == 0


def _measure(
    mode: str, options: dict[str, Any], network: dict[str, Any], batch: int
) -> tuple[dict[str, list[float]], list[Row]] | str:
    """Times of a mode and of none, and the memory they take; in words if it does not work."""
    models, peaks = {}, {}
    try:
        for name, its in {'plain': {}, mode: options}.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            models[name] = prepared(network, its, batch, GT_SIZE, 'cuda')
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        raw = timed(models, STEPS, rounds=3)
    except (RuntimeError, ValueError) as error:
        return str(error).partition('\n')[0]
    finally:
        torch.compiler.reset()
    return raw, [Row(f'memory, {mode} / plain', peaks[mode], 'MB', peaks['plain'])]


def _iteration(limit: float) -> Iterator[Row]:
    """An iteration of ``train_pipeline`` and the bare step, if that lasts ``limit`` at most."""
    program = 'import sys; from benchmarks.training import on_gpu; print(on_gpu(sys.argv[1]))'
    with TemporaryDirectory(prefix='basicsr-gpu-') as folder:
        command = [sys.executable, '-c', program, folder]
        try:
            result = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=max(limit, 1)
            )
        except subprocess.TimeoutExpired:
            return
    if result.returncode == 0:
        ours, bare = json.loads(result.stdout.splitlines()[-1])
        yield Row('of training / bare step', 1000 * ours, 'ms', 1000 * bare)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.gpu', description=__doc__)
    parser.add_argument('--seconds', type=float, default=300, help='end by then')
    parser.add_argument('--json', metavar='FILE', help='write every number there')
    return parser.parse_args()


if __name__ == '__main__':
    text, passed = main(parse_args())
    print(text)
    sys.exit(not passed)

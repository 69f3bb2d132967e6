"""How long the package takes to import, and a command to answer."""

import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from .measure import Result, Row, in_turn, seconds
from .photos import ROOT

OURS = """
import basicsr.archs, basicsr.data, basicsr.losses, basicsr.metrics, basicsr.models
basicsr.archs.build_network({'type': 'SRVGGNetCompact'})
"""
COMMANDS = {
    'ours': ('-c', OURS),
    'torch, torchvision, cv2': ('-c', 'import torch, torchvision, cv2'),
    'help': ('basicsr/train.py', '--help'),
}


def measure(folder: Path, quick: bool) -> Result:
    """Programs that import and end."""
    sides = {name: partial(_seconds, command) for name, command in COMMANDS.items()}
    raw = in_turn(sides, 1 if quick else 7)
    ours, bare, help_ = (statistics.median(times) for times in raw.values())
    rows = [
        Row('import / torch, torchvision, cv2', ours, 's', bare, ('<=', 1.15)),
        Row('train.py --help', help_, 's', goal=('<=', 1)),
    ]
    return Result(rows, raw)


def _seconds(arguments: tuple[str, ...]) -> float:
    run = partial(subprocess.run, cwd=ROOT, check=True, capture_output=True)
    return seconds(run, [sys.executable, *arguments])

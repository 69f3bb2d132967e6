"""``basicsr train -opt FILE``."""

import argparse
import sys
from pathlib import Path

from basicsr.utils.openmp import spin_briefly
from basicsr.utils.options import add_arguments

__all__ = ['add_arguments', 'main']


def main(args: argparse.Namespace) -> None:
    """Train as ``python basicsr/train.py`` does, below the working directory."""
    spin_briefly()
    from basicsr.run.program import run
    from basicsr.train import train_pipeline

    sys.argv = [f'{sys.argv[0]} train', *sys.argv[2:]]  # where pipelines read their flags
    run(train_pipeline, Path.cwd())

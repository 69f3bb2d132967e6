"""``basicsr test -opt FILE``."""

import argparse
import sys
from pathlib import Path

from basicsr.utils.openmp import spin_briefly
from basicsr.utils.options import add_arguments

__all__ = ['add_arguments', 'main']


def main(args: argparse.Namespace) -> None:
    """Test as ``python basicsr/test.py`` does, below the working directory."""
    spin_briefly()
    from basicsr.run.program import run
    from basicsr.test import test_pipeline

    sys.argv = [f'{sys.argv[0]} test', *sys.argv[2:]]  # where pipelines read their flags
    run(test_pipeline, Path.cwd())

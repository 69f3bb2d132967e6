"""``basicsr test -opt FILE``."""

import argparse
import sys
from pathlib import Path

from basicsr.utils import options
from basicsr.utils.openmp import spin_briefly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_arguments(parser, is_train=False)


def main(args: argparse.Namespace) -> None:
    """Test as ``python basicsr/test.py`` does, below the working directory."""
    spin_briefly()
    from basicsr.run.program import run
    from basicsr.test import test_pipeline

    sys.argv = [f'{sys.argv[0]} test', *sys.argv[2:]]  # where pipelines read their flags
    run(test_pipeline, Path.cwd())

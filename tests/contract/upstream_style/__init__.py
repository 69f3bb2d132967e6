"""A project that depends on basicsr, written as those for upstream are.

It registers its classes by importing every file of its own folder, reads its files through a
FileClient opened in a worker, and has the training step and the validation loop written out.
"""

import importlib
from pathlib import Path

from basicsr.utils import scandir

for file in sorted(
    scandir(str(Path(__file__).parent), suffix=('_arch.py', '_dataset.py', '_model.py'))
):
    importlib.import_module(f'{__name__}.{Path(file).stem}')

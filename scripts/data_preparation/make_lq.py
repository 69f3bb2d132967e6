"""Make the low-quality images of a dataset: ``basicsr prepare lq``, under its older name."""

import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.commands.prepare import script

if __name__ == '__main__':
    script('lq')

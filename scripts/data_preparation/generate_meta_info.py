"""List the images of a folder with their sizes: ``basicsr prepare meta``, under its older name."""

import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from basicsr.commands.prepare import script

if __name__ == '__main__':
    script('meta')

"""Download a shared file of Google Drive."""

import argparse
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.run.program import run
from basicsr.utils.download_util import download_file_from_google_drive


def main(args: argparse.Namespace) -> str:
    download_file_from_google_drive(args.id, args.output)
    return f'{args.output}: {Path(args.output).stat().st_size} bytes of the file {args.id}.'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--id', required=True, help='the long name in the address of the file')
    parser.add_argument('--output', required=True, help='path for the file')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

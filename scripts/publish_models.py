"""Name weights after their content: x.pth becomes x-<first 8 digits of its SHA-256>.pth.

Whoever downloads such a file can tell whether it is whole; load_file_from_url does. The content is
checked and stays as it is.
"""

import argparse
import hashlib
import logging
import re
import sys
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from basicsr.run.program import run
from basicsr.utils.checkpoint import load_checkpoint, state_dicts

logger = logging.getLogger('basicsr.publish_models')


def main(args: argparse.Namespace) -> str:
    files = [args.input] if args.input.is_file() else sorted(args.input.rglob('*.pth'))
    if not files:
        raise FileNotFoundError(f'{args.input} holds no files *.pth.')
    names = [publish(file, args.bare) for file in files]
    lines = [f'{file} -> {name}' for file, name in zip(files, names, strict=True) if name]
    return '\n'.join([*lines, f'{len(lines)} of {len(files)} files have their digits.'])


def publish(file: Path, allow_bare: bool) -> str | None:
    """Rename a file; returns its new name, or None if it is left out."""
    content = load_checkpoint(file)
    keys = state_dicts(content) if isinstance(content, dict) else {}
    if not allow_bare and not {'params', 'params_ema'} & keys.keys():
        logger.warning('%s has neither params nor params_ema: left out; --bare takes it.', file)
        return None
    with file.open('rb') as stream:
        digits = hashlib.file_digest(stream, 'sha256').hexdigest()[:8]
    stem = re.sub(r'-[0-9a-f]{8}$', '', file.stem)
    target = file.with_name(f'{stem}-{digits}{file.suffix}')
    if target != file and target.exists():
        raise FileExistsError(f'{target} exists already: remove it, or {file}.')
    file.rename(target)
    return target.name


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path('experiments/pretrained_models')
    parser.add_argument(
        '--input',
        type=Path,
        default=folder,
        help='file, or folder with all below; default: %(default)s',
    )
    parser.add_argument('--bare', action='store_true', help='take files without params as well')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

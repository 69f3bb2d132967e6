"""Give the authors' weights of RIDNet the names of this package: a bare state dict.

The weights of both have one order, in which they are taken; all shapes must agree.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

if __name__ == '__main__':  # use the checkout that this script is part of
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

from basicsr.archs.ridnet_arch import RIDNet
from basicsr.run.program import run
from basicsr.utils.checkpoint import load_checkpoint, save_checkpoint, select_params
from basicsr.utils.errors import UserError


def main(args: argparse.Namespace) -> str:
    if os.path.lexists(args.output):
        raise FileExistsError(f'{args.output} exists: remove it, or give another name.')
    state, _ = select_params(load_checkpoint(args.input), None, args.input)
    with torch.device('meta'):  # names and shapes alone
        wanted = RIDNet(in_channels=3, mid_channels=64, out_channels=3).state_dict()
    save_checkpoint(by_position(state, wanted), args.output)
    return f'{args.output}: {len(wanted)} tensors of {args.input}.'


def by_position(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of ``state``, in their order, under the names of ``wanted``.

    Raises:
        ValueError: Their numbers or shapes differ; the first such pair is named.
    """
    nothing = 'nothing', torch.empty(0)
    for given, (name, tensor) in zip_longest(state.items(), wanted.items(), fillvalue=nothing):
        if given[1].shape != tensor.shape:
            raise UserError(
                f'{given[0]} {tuple(given[1].shape)} stands where {name} {tuple(tensor.shape)} '
                'is needed: these are no weights of RIDNet with 64 features.'
            )
    return dict(zip(wanted, state.values(), strict=True))


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--input', required=True, help="the authors' file")
    parser.add_argument('--output', required=True, help='the new file, *.pth')
    args = parser.parse_args()
    run(lambda _: print(main(args)), Path.cwd())

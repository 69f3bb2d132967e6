"""Parse the command line and the option file of a training or test run into one dict."""

import argparse
import os
import random
import shlex
import sys
import time
from pathlib import Path

from .option_file import OptionFile, Process
from .yaml_util import OptionError, ordered_yaml, yaml_load

__all__ = [
    'OptionError',
    'OptionFile',
    'Process',
    'copy_opt_file',
    'dict2str',
    'ordered_yaml',
    'parse_args',
    'parse_options',
    'yaml_load',
]


def parse_args(argv: list[str] | None = None, is_train: bool = True) -> argparse.Namespace:
    """The flags of a training or a test."""
    parser = argparse.ArgumentParser(description=sys.modules['__main__'].__doc__)
    add_arguments(parser, is_train)
    return parser.parse_args(argv)


def add_arguments(parser: argparse.ArgumentParser, is_train: bool = True) -> None:
    """Declare the flags of training and testing; the help of a test shows only its own."""
    parser.add_argument(
        '-opt',
        required=True,
        metavar='FILE',
        help='option file (YAML)'
        if is_train
        else 'option file (YAML) of a test or a training, or the folder of a run',
    )
    if not is_train:
        parser.add_argument(
            '--weights',
            choices=['best', 'last'],
            help='which of a training to test; default: the best, if the run kept it',
        )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm'],
        default='none',
        help='how the processes were started; torchrun is recognised without it',
    )
    parser.add_argument(
        '--auto_resume',
        action='store_true',
        help='resume from the newest state of this name' if is_train else argparse.SUPPRESS,
    )
    parser.add_argument(
        '--debug', action='store_true', help='prefix the name with debug_; log and save often'
    )
    parser.add_argument(
        '--verbose', action='store_true', help='print all that the log file says, as the options'
    )
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        '--force_yml',
        nargs='+',
        default=[],
        metavar='A:B=VALUE',
        help='override options of the file, such as train:total_iter=200',
    )


def parse_options(root_path: str | Path, is_train: bool = True) -> tuple[dict, argparse.Namespace]:
    """Read the command line and its option file, without side effects.

    ``basicsr.run.program.prepare`` also imports plug-ins, joins the process group and seeds.

    Args:
        root_path: Parent of ``experiments/`` and ``results/``.
        is_train: Whether the file describes a training or a test run.

    Returns:
        The complete options, and the flags.

    Raises:
        FileNotFoundError: No such option file or plug-in folder.
        OptionError: All problems of the options, one line each.
    """
    args = parse_args(is_train=is_train)
    file = OptionFile(args.opt, is_train, args.force_yml)
    launcher = launcher_of(args)
    names = ('RANK', 'WORLD_SIZE') if launcher == 'pytorch' else ('SLURM_PROCID', 'SLURM_NTASKS')
    numbers = [
        int(os.environ.get(name, n)) if launcher != 'none' else n for n, name in enumerate(names)
    ]
    seed = random.SystemRandom().randint(1, 10000)
    process = Process(launcher, *numbers, os.cpu_count() or 1, seed)
    return file.complete(file.checked(), args, root_path, process), args


def launcher_of(args: argparse.Namespace) -> str:
    """Who started the processes of the run; torchrun is recognised without ``--launcher``."""
    is_torchrun = {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'} <= os.environ.keys()
    return 'pytorch' if args.launcher == 'none' and is_torchrun else args.launcher


def command_line(*more: str) -> str:
    """The command line of this program, with further flags, to be pasted into a shell."""
    program, *flags = sys.argv
    flags = list(dict.fromkeys([*flags, *more])) if more else flags
    if 'TORCHELASTIC_RUN_ID' in os.environ:
        name = f'torchrun … {shlex.quote(program)}'
    else:
        is_command = program.endswith((' train', ' test'))
        name = f'basicsr {program.split()[-1]}' if is_command else f'python {shlex.quote(program)}'
    return f'{name} {shlex.join(flags)}'


def dict2str(opt: dict, indent_level: int = 1) -> str:
    """Options as indented lines, for the log."""
    indent, text = '  ' * indent_level, '\n'
    for key, value in dict.items(opt):  # showing an option does not count as reading it
        if isinstance(value, dict):
            text += f'{indent}{key}:[{dict2str(value, indent_level + 1)}{indent}]\n'
        else:
            text += f'{indent}{key}: {value}\n'
    return text


def copy_opt_file(opt_file: str | Path, experiments_root: str | Path) -> None:
    """Copy the option file into the run's folder, below a header with the time and the command.

    An earlier copy of different options is kept: the new one gets the time in its name.
    """
    from .misc import atomic_path, get_time_str

    source, target = Path(opt_file), Path(experiments_root) / Path(opt_file).name
    if target.exists() and source.samefile(target):
        return
    text = source.read_text(encoding='utf-8')
    if target.exists():
        if target.read_text(encoding='utf-8', errors='replace').endswith(f'\n\n{text}'):
            return
        target = target.with_stem(f'{target.stem}_{get_time_str()}')
    header = f'# GENERATE TIME: {time.asctime()}\n# CMD:\n# {command_line()}\n\n'
    with atomic_path(target, durable=False) as temporary:
        temporary.write_text(header + text, encoding='utf-8')

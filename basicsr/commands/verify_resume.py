"""``basicsr verify-resume -opt FILE``: check that a killed training resumes bit-exactly."""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from basicsr.utils import progress
from basicsr.utils.yaml_util import OptionError, yaml_load

from .children import end, end_with_children, start


class TrainingError(RuntimeError):
    """A training failed without being killed."""

    def __init__(self, status: int, log: str):
        super().__init__(log)
        self.status = status


class Trainings:
    """Trainings of one option file that differ only in where they are interrupted.

    Args:
        args: The flags of ``basicsr verify-resume``.
        folder: Folder for all their output.
    """

    def __init__(self, args: argparse.Namespace, folder: Path):
        opt = yaml_load(args.opt)
        forced = {
            'train:total_iter': args.iters,
            'logger:save_checkpoint_freq': args.save_every,
            'logger:print_freq': 1,
            'logger:use_tb_logger': False,
            'logger:wandb': {'project': None},
            'deterministic': True,  # otherwise a GPU may select other kernels at each start
        }
        if opt.get('val'):
            forced['val:val_freq'] = max(args.iters // 2, 1)
        seeded = any(entry.startswith('manual_seed=') for entry in args.force_yml)
        if opt.get('manual_seed') is None and not seeded:
            forced['manual_seed'] = args.seed
        entries = [f'{key}={json.dumps(value)}' for key, value in forced.items()]
        self._arguments = ['-opt', args.opt, '--force_yml', *args.force_yml, *entries]
        self._program = ['basicsr.commands.verify_resume']
        if args.nproc > 1:
            torchrun = ['torch.distributed.run', '--standalone', f'--nproc_per_node={args.nproc}']
            self._program = [*torchrun, '-m', 'basicsr.commands.verify_resume']
        self._folder = folder

    def run(self, name: str, kill_after: int | None = None, wait: float = 0) -> bool:
        """Start a training, or resume it; returns whether it was killed.

        Args:
            name: Name of its folder.
            kill_after: Iteration after which to kill it; None lets it finish.
            wait: Seconds from the end of that iteration to the kill.

        Raises:
            TrainingError: It failed without being killed.
        """
        root, mark = self._folder / name, self._folder / 'killed.mark'
        mark.unlink(missing_ok=True)
        request = json.dumps({'kill_after': kill_after, 'wait': wait, 'mark': str(mark)})
        where = f'path:experiments_root={json.dumps(str(root))}'
        resumes = ['--auto_resume'] if root.exists() else []
        log_file = self._folder / f'{name}.log'
        with log_file.open('ab') as log:
            arguments = [*self._program, request, *self._arguments, where, *resumes]
            process = start(arguments, log, TMPDIR=str(self._folder))
            try:
                process.wait()
            finally:
                end(process)
        if process.returncode and not mark.exists():
            text = log_file.read_text(encoding='utf-8', errors='replace')
            raise TrainingError(process.returncode, text)
        return mark.exists()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The logged rows of a run."""
        file = self.folder_of(name) / 'metrics.jsonl'
        return list(map(json.loads, file.read_bytes().rpartition(b'\n')[0].splitlines()))

    def folder_of(self, name: str) -> Path:
        """The folder of a run that has started."""
        folders = [file.parent for file in (self._folder / name).glob('*/metrics.jsonl')]
        # A training killed before its first state starts over; its first folder is archived.
        [folder] = (folder for folder in folders if '_archived_' not in folder.name)
        return folder


def differences(one: Path, other: Path) -> Iterator[str]:
    """Bitwise differences between the files of two runs.

    Compares networks, averages, states and logged values except times. The list of unreadable
    images is skipped: which sample encounters one first depends on the timing of the workers.
    """
    from basicsr.utils.checkpoint import load_checkpoint
    from basicsr.utils.json_lines import read_rows

    names = [
        sorted(
            str(file.relative_to(folder))
            for pattern in ('models/*', 'training_states/*', '*.jsonl')
            for file in folder.glob(pattern)
            if not file.name.startswith('.') and file.name != 'skipped.jsonl'
        )
        for folder in (one, other)
    ]
    yield from (f'only one has {name}' for name in sorted({*names[0]} ^ {*names[1]}))
    for name in names[0]:
        if name not in names[1]:
            continue
        read: Callable[[Path], Any] = read_rows if name.endswith('.jsonl') else load_checkpoint
        yield from _different(read(one / name), read(other / name), name)


def _different(a: Any, b: Any, path: str) -> Iterator[str]:
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f'{path}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}'
        elif not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b))):
            yield f'{path}: by up to {(a.double() - b.double()).abs().max():.3g}'
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if str(key).startswith('time/'):
                continue
            if key in a and key in b:
                yield from _different(a[key], b[key], f'{path}: {key}')
            else:
                yield f'{path}: only one has {key}'
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for number, pair in enumerate(zip(a, b, strict=True)):
            yield from _different(*pair, f'{path} [{number}]')
    elif a != b and (a == a or b == b):  # two losses may be NaN
        yield f'{path}: {a!r} and {b!r}'


def verify(args: argparse.Namespace, folder: Path, tell: Callable[[str], Any]) -> int:
    """Run the trainings, report on them, and compare; returns the exit status."""
    random_moments = random.Random(args.seed)
    trainings = Trainings(args, folder)
    begin = time.monotonic()
    trainings.run('whole')
    tell(f'{args.iters} iterations in one go: {time.monotonic() - begin:.1f} s\n')
    times = [row['time/iteration'] for row in trainings.rows('whole') if 'time/iteration' in row]
    step = statistics.median(times)  # a median, since the first one also selects kernels
    moments = sorted(random_moments.choices(range(1, args.iters), k=args.kills))
    kills = 0
    for number, moment in enumerate(moments, 1):
        wait = random_moments.uniform(0, 2 * step)  # so that kills also hit saving and validation
        killed = trainings.run('killed', moment, wait)
        rows = trainings.rows('killed')
        last = rows[-1]['iter'] if rows else 0
        kills += killed and last < args.iters  # else nothing is left to resume
        where = f'after iteration {last} was logged' if killed else 'too late, it had ended'
        tell(f'kill {number} of {args.kills}: {where}\n')
        if not killed:
            break
    trainings.run('killed')
    folders = [trainings.folder_of(name) for name in ('whole', 'killed')]
    found = next(differences(*folders), None)
    if found:
        tell(f'first difference: {found}\n')
        return 1
    if not kills:
        tell('All kills came too late to prove anything: take more iterations (--iters).\n')
        return 1
    counts = [len(list((folders[0] / kind).iterdir())) for kind in ('models', 'training_states')]
    tell(f'identical: {counts[0]} files of networks, {counts[1]} states, all logged values\n')
    return 0


def _tell(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('-opt', required=True, metavar='FILE', help='option file (YAML)')
    parser.add_argument(
        '--force_yml', nargs='+', default=[], metavar='A:B=VALUE', help='set options of the file'
    )
    parser.add_argument('--iters', type=int, default=20, help='length of the training; 20')
    parser.add_argument('--save-every', type=int, help='iterations; default: a quarter of them')
    parser.add_argument('--kills', type=int, default=3, help='how often it is killed; 3')
    parser.add_argument('--nproc', type=int, default=1, help='processes, by torchrun; 1')
    parser.add_argument('--seed', type=int, default=0, help='of the moments of the kills; 0')
    parser.add_argument('--keep', metavar='FOLDER', help='a new folder for both trainings, kept')


def _check(args: argparse.Namespace) -> None:
    if args.save_every is None:
        args.save_every = max(args.iters // 4, 1)
    if args.iters < 2 or min(args.kills, args.nproc, args.save_every) < 1:
        args.parser.error('--iters must be above 1; --kills, --nproc and --save-every above 0.')
    if args.keep and Path(args.keep).exists():
        args.parser.error(f'--keep: {args.keep} is there already; name a new folder.')


def main(args: argparse.Namespace) -> int:
    """Run the trainings and compare them; returns the exit status."""
    _check(args)
    end_with_children()
    try:
        if args.keep:
            Path(args.keep).mkdir(parents=True)
            return verify(args, Path(args.keep), _tell)
        with TemporaryDirectory(prefix='basicsr_verify_', ignore_cleanup_errors=True) as folder:
            return verify(args, Path(folder), _tell)
    except KeyboardInterrupt:
        sys.stderr.write('Interrupted.\n')
        return 130
    except (OSError, OptionError) as error:
        sys.stderr.write(f'basicsr verify-resume: {error}\n')
        return 2
    except TrainingError as error:
        sys.stderr.write(f'{error}\nA training has ended with status {error.status}: see above.\n')
        return 1


def train_until_killed(kill_after: int | None, wait: float, mark: str) -> None:
    """Run the training of the command line in this process, which kills itself and its workers.

    Killing from outside would be too imprecise for a fast training.
    """
    from basicsr.run.program import run
    from basicsr.train import train_pipeline

    if kill_after is not None and os.environ.get('RANK', '0') == '0':
        threading.Thread(target=_kill, args=(kill_after, wait, mark), daemon=True).start()
    run(train_pipeline, Path.cwd())


def _kill(after: int, wait: float, mark: str) -> None:
    """Kill this process and its workers ``wait`` seconds after the step of an iteration."""
    now = progress.current
    while now.iteration < after or (now.iteration == after and now.phase in ('data', 'step')):
        time.sleep(0.001)
    time.sleep(wait)
    Path(mark).touch()
    os.killpg(0, signal.SIGKILL)


if __name__ == '__main__':
    request = json.loads(sys.argv.pop(1))
    train_until_killed(**request)

"""The console command: ``basicsr train -opt FILE``, ``basicsr test -opt FILE``, and tools."""

import argparse
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from basicsr.utils.failures import explain
from basicsr.utils.options import OptionError, parse_args
from basicsr.utils.registry import BUILDING

_PACKAGE = Path(__file__).resolve().parent
USAGE = """usage: basicsr COMMAND -opt FILE [flags]

commands:
  train    train a network from an option file
  test     run a trained network on images, and score it
  tune     find the fastest settings of an option file by short trials
  verify-resume
           prove that a training which is killed goes on exactly
  average  make networks of the averages that train.posthoc_ema has stored
  replay   make the step of a batch whose loss or gradient was not finite again
  convert  write a .pth file of networks as .safetensors, or the other way round
  cache    list the caches of decoded images; `basicsr cache clear` removes them

basicsr COMMAND --help lists the flags."""


def main() -> None:
    """Entry point of the console command."""
    command = sys.argv[1] if len(sys.argv) > 1 else ''
    if command in ('-h', '--help'):
        sys.stdout.write(f'{USAGE}\n')
        sys.exit(0)
    if command == 'average':
        make_averages(sys.argv[2:])
        return
    if command == 'replay':
        replay_incident(sys.argv[2:])
        return
    if command == 'convert':
        convert_checkpoint(sys.argv[2:])
        return
    if command == 'cache':
        manage_caches(sys.argv[2:])
        return
    if command == 'tune':
        from basicsr.tune import main as tune

        sys.exit(tune(sys.argv[2:]))
    if command == 'verify-resume':
        from basicsr.verify_resume import main as verify_resume

        sys.exit(verify_resume(sys.argv[2:]))
    if command not in ('train', 'test'):
        sys.stderr.write(f"{USAGE}\nbasicsr: error: unknown command '{command}'\n")
        sys.exit(2)
    sys.argv = [f'{sys.argv[0]} {command}', *sys.argv[2:]]
    parse_args()  # --help and mistyped flags are answered before torch is imported
    if command == 'train':
        from basicsr.train import train_pipeline as pipeline
    else:
        from basicsr.test import test_pipeline as pipeline
    run(pipeline, Path.cwd())


def make_averages(arguments: list[str]) -> None:
    """``basicsr average experiments/NAME --lengths 0.05 0.1 -o FILE.pth``."""
    parser = argparse.ArgumentParser(prog='basicsr average', description=make_averages.__doc__)
    parser.add_argument('experiment', help='folder of a run with train.posthoc_ema')
    parser.add_argument(
        '--length',
        '--lengths',
        dest='lengths',
        nargs='+',
        type=float,
        required=True,
        help='standard deviation of the average over the iterations so far: 0.1 for a tenth',
    )
    parser.add_argument('--iter', type=int, help='iteration to end at; default: the last one')
    parser.add_argument(
        '-o', dest='target', required=True, help='file; of several lengths, each is added to it'
    )
    args = parser.parse_args(arguments)

    def write(_: Path) -> None:
        from basicsr.models.averaging import write_averages

        lines = write_averages(args.experiment, args.lengths, args.target, args.iter)
        sys.stdout.write('\n'.join([*lines, '']))

    run(write, Path.cwd())


def replay_incident(arguments: list[str]) -> None:
    """``basicsr replay experiments/NAME/incidents/FILE.pt -opt options/NAME.yml``."""
    parser = argparse.ArgumentParser(prog='basicsr replay', description=replay_incident.__doc__)
    parser.add_argument('incident', help='file of a run, see train.on_nonfinite')
    parser.add_argument('-opt', required=True, metavar='FILE', help='option file of the run')
    parser.add_argument(
        '--force_yml', nargs='+', default=[], metavar='A:B=VALUE', help='as in the training'
    )
    parser.add_argument(
        '--weights', help='of net_g; default: the last checkpoint of the run before the incident'
    )
    args = parser.parse_args(arguments)

    def write(root: Path) -> None:
        from basicsr.replay import replay
        from basicsr.utils.text import printable

        lines = replay(args.incident, args.opt, args.weights, root, args.force_yml)
        sys.stdout.write(printable('\n'.join([*lines, ''])))

    run(write, Path.cwd())


def convert_checkpoint(arguments: list[str]) -> None:
    """``basicsr convert net_g_latest.pth net_g.safetensors [--key params_ema]``."""
    parser = argparse.ArgumentParser(prog='basicsr convert', description=convert_checkpoint.__doc__)
    parser.add_argument('source', help='file to read')
    parser.add_argument('target', help='file to write; its ending, .pth or .safetensors, counts')
    parser.add_argument('--key', help='write the state dict of this key alone, and bare')
    args = parser.parse_args(arguments)

    def convert(_: Path) -> None:
        from basicsr.utils.checkpoint import convert

        convert(args.source, args.target, args.key)
        sys.stdout.write(f'{args.target}: written from {args.source}\n')

    run(convert, Path.cwd())


def manage_caches(arguments: list[str]) -> None:
    """``basicsr cache [list|clear] [--folder FOLDER]``."""
    parser = argparse.ArgumentParser(prog='basicsr cache', description=manage_caches.__doc__)
    parser.add_argument('action', nargs='?', choices=['list', 'clear'], default='list')
    parser.add_argument('--folder', help='folder named by datasets.*.cache; default: that of auto')
    args = parser.parse_args(arguments)
    from basicsr.data.image_cache import clear_caches, default_root, list_caches
    from basicsr.utils.text import printable, sizeof_fmt

    try:
        root = Path(args.folder or default_root())
    except FileNotFoundError as error:
        parser.error(str(error))
    if args.folder and not root.is_dir():
        parser.error(f'{root} is no folder.')
    if args.action == 'clear':
        sys.stdout.write(f'{sizeof_fmt(clear_caches(root))} freed in {root}\n')
        return
    caches = sorted(list_caches(root), key=lambda cache: cache['size'], reverse=True)
    for cache in caches:
        about = printable(f'{cache["images"]} {cache["kind"]} images, first {cache["first"]}')
        sys.stdout.write(f'{sizeof_fmt(cache["size"]):>10}  {cache["folder"]}  {about}\n')
    total = sizeof_fmt(sum(cache['size'] for cache in caches))
    sys.stdout.write(f'{total:>10}  {len(caches)} caches in {root}\n')


def run(pipeline: Callable[[Path], None], root_path: Path) -> None:
    """Run a pipeline as a program: a user's mistake ends in one message, not a traceback.

    The exit status is 2 for a wrong option file, 1 for other errors, 130 after Ctrl-C, and of a
    training that was asked to stop ``basicsr.utils.preemption.STATUS``.
    """
    # The status is acted on when the error is gone, and with it the frames that hold a loader: its
    # workers end before this process does, and have nothing to complain about.
    status = _run(pipeline, root_path)
    if status:
        sys.exit(status)


def _run(pipeline: Callable[[Path], None], root_path: Path) -> int:
    """Run a pipeline; returns the exit status."""
    from basicsr.utils.dist_util import get_dist_info
    from basicsr.utils.logger import get_root_logger
    from basicsr.utils.preemption import INTERRUPTED, STATUS
    from basicsr.utils.watchdog import tell_of_failure

    logger, status = get_root_logger(), 0
    try:
        pipeline(root_path)
    except KeyboardInterrupt as interrupt:
        tell_of_failure(interrupt)
        logger.error('%s', ' '.join(['Interrupted.', *filter(None, map(str, interrupt.args))]))
        return INTERRUPTED
    except SystemExit as stop:
        if stop.code not in (STATUS, INTERRUPTED):  # those of all ranks that were asked to stop
            tell_of_failure(stop)
            raise
        status = int(stop.code)
    except Exception as error:
        message, (rank, world_size) = _message_for_users(error), get_dist_info()
        status = 2 if isinstance(error, OptionError) else 1
        if tell_of_failure(error):
            return status
        prefix = f'rank {rank}: ' if world_size > 1 else ''
        if message is None:
            if prefix:
                logger.error('%s%s', prefix, error)
            raise
        logger.error('%s%s', prefix, message)
        return status
    _close_process_group()
    return status


def _message_for_users(error: Exception) -> str | None:
    """The text of an error that this package raised on purpose; None for any other error."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    from basicsr.utils.watchdog import phase

    if explained := explain(error, phase()):
        return explained
    if _passed_through_plugins(error):
        return None
    if isinstance(error, OSError | OptionError):
        return message
    # Of a component that cannot be made of its options.
    notes = [note for note in getattr(error, '__notes__', []) if note.startswith(BUILDING)]
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    file, line = innermost.filename, innermost.line or ''
    if message.startswith('Caught ') and 'DataLoader worker' in message.partition('\n')[0]:
        # The worker's traceback is part of the text; the message stands behind it.
        file, line = re.findall(r'File "([^"]+)", line \d+, in .*\n +(.*)', message)[-1]
        message = message.rpartition(f'\n{type(error).__name__}: ')[2].strip()
    on_purpose = line.startswith('raise ') and Path(file).resolve().is_relative_to(_PACKAGE)
    if notes and not on_purpose and not isinstance(error, TypeError):
        message = f'{type(error).__name__}: {message}'
    return '\n'.join([message, *notes]) if on_purpose or notes else None


def _passed_through_plugins(error: BaseException | None) -> bool:
    """Whether the user's own code took part: they want to see where."""
    from basicsr.utils.registry import plugin_modules

    files = {getattr(sys.modules.get(name), '__file__', None) for name in plugin_modules}
    while error is not None:
        if any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__)):
            return True
        error = error.__cause__
    return False


def _close_process_group() -> None:
    import torch.distributed as dist

    from basicsr.utils import watchdog

    watchdog.stop()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == '__main__':
    main()

"""A disk that gets full in the middle of a run: nothing that was saved is lost."""

import contextlib
import random
import resource
import shutil
import subprocess
from pathlib import Path

import small_run
from tally import Budget, Tally

from basicsr.models.base_model import BaseModel

USUAL = 160
SIZE = 1_500_000  # bytes of the disk; a run takes 60 KB


def run(folder: Path, budget: Budget) -> list[Tally]:
    """Fill the disk, or forbid larger files, at a random iteration, and go on when there is room.

    A file system of its own is made for the former, where that is permitted.
    """
    expected = 'one message, last state whole; then same bits'
    full = Tally('disk full in the middle of a run', expected)
    limit = Tally('files limited in size in the middle of a run', expected)
    reference = folder / 'reference'
    reference.mkdir()
    opt = small_run.options(reference, 'run', use_tb_logger=True)
    small_run.train(reference, opt)
    expected_result = small_run.result(reference / 'experiments/run')
    with _small_disk(folder / 'disk') as disk:
        for case in budget.cases(USUAL):
            chance = random.Random(case)
            root, fill = (
                (folder / 'plain', None) if disk is None or case % 2 else (disk / 'x', disk)
            )
            root.mkdir()
            problem = _problem(root, opt, expected_result, fill, chance)
            tally = full if fill else limit
            tally.record(not problem, f'case {case}: {problem}')
            shutil.rmtree(root)
    return [tally for tally in (full, limit) if tally.cases]


@contextlib.contextmanager
def _small_disk(folder):
    """A file system in memory; None where it may not be made."""
    folder.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', f'size={SIZE}', 'tmpfs', str(folder)]
    mounted = shutil.which('mount') and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(['umount', '-l', str(folder)], check=True)


def _problem(root, opt, expected, disk, chance):
    """What went wrong, in words; '' if nothing did."""
    opt = {**opt, 'val': {**opt['val'], 'save_img': chance.random() < 0.5}}
    opt['logger'] = {**opt['logger'], 'use_tb_logger': chance.random() < 0.5}
    if chance.random() < 0.3:
        opt['logger']['keep_last'] = 1
    iteration, room = chance.randrange(1, 7), chance.randrange(0, 20_000 if disk else 10_000)
    where = f'at iteration {iteration} with {room} bytes left, {opt["logger"]}'
    with _scarce(disk, iteration, room):
        printed, error = small_run.train(root, opt)
    if 'Traceback' in printed or 'Exception' in printed:
        return f'{where}: {printed[-800:]}'
    if error is not None and 'cannot write' not in str(error):
        return f'{where}: {error}'
    folder = root / 'experiments/run'
    left = sorted(int(file.stem) for file in (folder / 'training_states').glob('*.state'))
    due = [i for i in (2, 4, 6) if i < iteration]
    if due and not [number for number in left if number >= due[-1]]:
        return f'{where}: the state of iteration {due[-1]} is lost, there are {left}'
    printed, error = small_run.train(root, opt, '--auto_resume')
    if error is not None or not small_run.same(folder, expected):
        return f'{where}: did not end with the same bits: {error}'
    if 'newer states are skipped' in printed:
        return f'{where}: a state was left that is not whole'
    return ''


@contextlib.contextmanager
def _scarce(disk, iteration, room):
    """From an iteration on ``disk`` has ``room`` bytes; without a disk, no file may be larger."""
    begin, filler = BaseModel.begin_iteration, disk and disk / 'filler'
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def step(model, data, current_iter, batch_size):
        if current_iter == iteration:
            model.saver._finish(0)  # what is due must have been saved
        if current_iter == iteration and disk:
            free = shutil.disk_usage(disk).free
            with contextlib.suppress(OSError):  # nothing is left: as well
                filler.write_bytes(bytes(max(0, free - room)))
        elif current_iter == iteration:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        begin(model, data, current_iter, batch_size)

    BaseModel.begin_iteration = step
    try:
        yield
    finally:
        BaseModel.begin_iteration = begin
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if disk:
            filler.unlink(missing_ok=True)

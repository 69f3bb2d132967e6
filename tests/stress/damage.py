"""Checkpoints that are damaged: a run goes on from the one before, or refuses."""

import io
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import small_run
import torch
from tally import Budget, Tally

USUAL = 400


def run(folder: Path, budget: Budget) -> list[Tally]:
    """Damage one or all checkpoints of a run that stopped at iteration 4 of 6, and go on."""
    tallies = {
        (kind, widely): Tally(
            f'{"all checkpoints" if widely else "newest checkpoint"} {kind}',
            'refused, nothing lost' if widely else 'goes on from the one before, same bits',
        )
        for widely in (False, True)
        for kind in DAMAGES
    }
    formats = {}
    for form in ('pth', 'safetensors'):
        root = folder / form
        root.mkdir()
        opt = small_run.options(root, 'run', checkpoint_format=form)
        small_run.train(root, {**opt, 'name': 'whole'})
        small_run.train(root, small_run.shorter(opt, 4))
        small_run.train(root, small_run.shorter({**opt, 'name': 'other', 'manual_seed': 8}, 4))
        expected = small_run.result(root / 'experiments/whole')
        shutil.copytree(root / 'experiments/run', root / 'template')
        formats[form] = root, opt, expected

    for case in budget.cases(USUAL):
        chance = random.Random(case)
        form = chance.choice(list(formats))
        kind, widely = chance.choice(list(DAMAGES)), chance.random() < 0.25
        root, opt, expected = formats[form]
        case_name = f'case {case} ({form}, {kind}, {"all" if widely else "newest"})'
        problem = _problem(root, opt, expected, kind, widely, chance)
        tallies[kind, widely].record(not problem, f'{case_name}: {problem}')
    return [tally for tally in tallies.values() if tally.cases]


def _problem(root, opt, expected, kind, widely, chance):
    """What went wrong, in words; '' if nothing did."""
    target = root / 'experiments/run'
    shutil.rmtree(target)
    shutil.copytree(root / 'template', target)
    changed, victims = [], []
    for iteration in (4, 2) if widely else (4,):
        # The first in order, .pth, is what a resume reads; one in plain names may stand beside it.
        network, *_ = sorted((target / 'models').glob(f'net_g_{iteration}.*'))
        state = target / f'training_states/{iteration}.state'
        # A state that is not there is none to go on from, and no error.
        victim = network if kind == 'deleted' else chance.choice([state, network])
        victims.append(victim)
        changed.append(DAMAGES[kind](victim, root / 'experiments/other', chance))
    before = {file: file.read_bytes() for file in target.rglob('*.state') if file.is_file()}
    printed, error = small_run.train(root, opt, '--auto_resume')
    if kind == FOLDER and not widely and isinstance(error, IsADirectoryError):
        victims[0].rmdir()  # it is not the run's to remove; the message has named it
        printed, error = small_run.train(root, opt, '--auto_resume')
    named = ', '.join(victim.name for victim in victims)
    if 'Traceback' in printed:
        return f'{named}: {printed[-800:]}'
    if error is None:
        if not small_run.same(target, expected):
            return f'{named}: went on and ended with other bits ({changed})'
        if 'training_states/2.state' in printed:
            return ''
        return f'{named}: the damage was not seen ({changed})'
    if not widely:
        return f'{named}: refused, though iteration 2 is whole: {error}'
    after = {file: file.read_bytes() for file in before}
    return '' if 'Restore the files' in str(error) and before == after else f'{named}: {error}'


def _truncate(file, other, chance):
    length = chance.randrange(1, file.stat().st_size)
    os.truncate(file, length)
    return f'cut at {length}'


def _flip(file, other, chance):
    content = bytearray(file.read_bytes())
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f'bit {bit} of byte {place}'


def _zero(file, other, chance):
    """As after a power cut on some file systems."""
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content) - 64)
    block = content[place : place + 4096]
    if not any(block):
        return _truncate(file, other, chance)
    content[place : place + len(block)] = bytes(len(block))
    file.write_bytes(content)
    return f'zeros from {place} on'


def _empty(file, other, chance):
    file.write_bytes(b'')
    return 'empty'


def _delete(file, other, chance):
    file.unlink()
    return 'deleted'


def _replace(file, other, chance):
    name, content = chance.choice(list(_foreign().items()))
    file.write_bytes(content)
    return name


def _make_folder(file, other, chance):
    file.unlink()
    file.mkdir()
    return 'a folder'


def _foreign():
    """Contents of files that are no checkpoints, by name."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, 'w') as file:
        file.writestr('readme.txt', 'text')
    contents = {
        'text': b'iter: 4\n',
        'a PNG': b'\x89PNG\r\n\x1a\n' + bytes(range(256)),
        'a pickle': pickle.dumps({'iter': 4, 'at': Path('x')}),
        'a ZIP': archive.getvalue(),
        'random bytes': random.Random(0).randbytes(3000),
    }
    for name, value in {'a list': [1, 2], 'a number': 4, 'a bare tensor': torch.ones(3)}.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        contents[f'a torch file of {name}'] = buffer.getvalue()
    return contents


def _swap(file, other, chance):
    shutil.copy(other / file.relative_to(file.parents[1]), file)
    return "another run's"


FOLDER = 'replaced by a folder'
DAMAGES = {
    'cut off': _truncate,
    'one byte flipped': _flip,
    'overwritten with zeros': _zero,
    'emptied': _empty,
    'deleted': _delete,
    'replaced by a foreign file': _replace,
    FOLDER: _make_folder,
    "replaced by another run's": _swap,
}

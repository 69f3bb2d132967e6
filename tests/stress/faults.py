"""One of two or three processes hangs, fails or is lost at a random moment of a training."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import small_run
from runs import checkpoint, differences, rows
from tally import Budget, Tally

PROGRAM = Path(__file__).resolve().parents[1] / 'faults_program.py'
TIMEOUT = 3  # dist_params.timeout, in seconds
IN_TIME = TIMEOUT + 25  # and the start and the end of the processes, on a loaded machine
KINDS = ('hang', 'stop', 'collective', 'exit', 'kill', 'error')
PLACES = ('data', 'step', 'validation', 'saving')
AT_ONCE = 8  # cases that share one import of torch


def run(folder: Path, budget: Budget) -> list[Tally]:
    """Break trainings, and let each go on."""
    ends = {
        kind: Tally(f'{what}, of 2 or 3', f'the run ends within {IN_TIME} s and names it')
        for kind, what in {
            'hang': 'A process hangs',
            'stop': 'A process is stopped (SIGSTOP)',
            'collective': 'A process waits for what the others never do',
            'exit': 'A process ends with status 0',
            'kill': 'A process is killed (SIGKILL)',
            'error': 'A process raises an error',
        }.items()
    }
    goes_on = Tally('The run is started again', 'its files equal an undisturbed run, bit for bit')
    for number in budget.cases(3):
        _break(folder, number * AT_ONCE, ends, goes_on)
    return [*ends.values(), goes_on]


def _break(folder: Path, first: int, ends: dict[str, Tally], goes_on: Tally) -> None:
    plan = [_case(folder, f'whole_{first}_{count}', count) for count in (2, 3)]
    faults = []
    for number in range(first, first + AT_ONCE):
        draw = random.Random(number)
        count = draw.choice([2, 3])
        fault = {
            'kind': KINDS[number % len(KINDS)],
            'place': draw.choice(PLACES),
            'rank': draw.randrange(count),
            'at': draw.randint(1, 5),
        }
        faults.append((number, count, fault))
        plan.append(_case(folder, f'cut_{number}', count, fault))
        plan.append(_case(folder, f'cut_{number}', count, after=len(plan) - 1))
    (folder / 'plan.json').write_text(json.dumps({'cases': plan, 'together': 2}))
    subprocess.run([sys.executable, str(PROGRAM), 'plan.json'], cwd=folder, check=True)
    answers = json.loads((folder / 'answers.json').read_text())[2:]
    for (number, count, fault), end, again in zip(faults, answers[::2], answers[1::2], strict=True):
        case = f'seed {number}, {count} processes, {fault}'
        problem = _problem_of_end(fault, end)
        ends[fault['kind']].record(not problem, f'{case}: {problem}')
        runs = folder / 'experiments'
        whole, cut = runs / f'whole_{first}_{count}', runs / f'cut_{number}'
        problem = _problem_of_files(again, whole, cut)
        goes_on.record(not problem, f'{case}: {problem}')


def _problem_of_end(fault: dict[str, Any], answer: dict[str, Any]) -> str:
    """What is wrong with how a run has ended; '' if all is right."""
    statuses, text = answer['statuses'], '\n'.join(answer['texts'])
    others = [status for rank, status in enumerate(statuses) if rank != fault['rank']]
    if answer['seconds'] is None or answer['seconds'] > IN_TIME or None in others:
        return f'the end took {answer["seconds"]} s, statuses {statuses}'
    if 0 in others:
        return f'statuses {statuses}'
    spoken = re.findall(r'(?:ERROR: |Its last report: )rank ([\d, ]+?)(?=:| [(h])', text)
    if str(fault['rank']) not in ','.join(spoken).replace(' ', '').split(','):
        return f'rank {fault["rank"]} is not named: {text}'
    return ''


def _problem_of_files(answer: dict[str, Any], whole: Path, cut: Path) -> str:
    if set(answer['statuses']) != {0}:
        return f'statuses {answer["statuses"]}: {answer["texts"]}'
    for name in ('net_g_latest.pth', '6.state'):
        found = differences(checkpoint(whole, name), checkpoint(cut, name))
        if found:
            return f'{name} differs in {found[:3]}'
    return '' if rows(whole) == rows(cut) else 'metrics.jsonl differs'


def _case(
    folder: Path, name: str, count: int, fault: dict | None = None, after: int | None = None
) -> dict[str, Any]:
    file = folder / f'{name}.yml'
    file.write_text(json.dumps(_options(folder, name)))
    argv = ['-opt', str(file), '--auto_resume']
    return {'argv': argv, 'world_size': count, 'limit': IN_TIME + 5, 'fault': fault, 'after': after}


def _options(folder: Path, name: str) -> dict[str, Any]:
    opt = small_run.options(folder, name, save_checkpoint_freq=1)
    opt['val']['val_freq'] = 1
    # Else sums of three gradients differ in their last bits after a resume, see docs/train.md.
    return opt | {'deterministic': True, 'dist_params': {'timeout': TIMEOUT}, 'path': {}}

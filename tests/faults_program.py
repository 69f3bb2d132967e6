"""Trains in forked processes of which one goes wrong, and writes down how they end.

The argument is a JSON file: {'cases': [CASE, …], 'together': how many at a time}. A CASE has
'argv' of the training, 'world_size', 'limit' (seconds after which the processes are killed),
'fault': {'kind', 'rank', 'place', 'at'} or null ('at_end' beside them has the rank hang when its
program is over, as in a handler of atexit), and 'after': the number of a case that has to have
ended before, or null. The answers are written beside it, as
``answers.json``: of each case 'seconds', 'statuses' and 'texts' by rank; a status is None where the
limit came first, and negative after a signal. Forks share one import of torch.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torchvision  # noqa: F401 - like the one above, imported once here instead of in each fork

import basicsr.train
from basicsr.data.paired_image_dataset import PairedImageDataset
from basicsr.models.base_model import BaseModel
from basicsr.models.sr_model import SRModel
from basicsr.run import loaders, program
from basicsr.utils import progress


def never_again():
    while True:
        time.sleep(0.1)


def end_without_a_word():
    os._exit(0)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error():
    raise RuntimeError('on purpose')


def be_late():
    if not LATE:
        LATE.append(True)
        time.sleep(8)  # longer than a run waits once it has made a step


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def ask_to_stop():
    os.kill(os.getpid(), signal.SIGTERM)


def leave():
    sys.exit(0)


def wait_for_nobody():
    dist.all_reduce(torch.zeros(7))
    dist.barrier()
    dist.barrier()


LATE = []
FAULTS = {
    'late': be_late,
    'interrupt': interrupt,
    'ask to stop': ask_to_stop,
    'leave': leave,
    'hang': never_again,
    'exit': end_without_a_word,
    'kill': kill,
    'stop': stop,
    'error': raise_error,
    'collective': wait_for_nobody,
}
PLACES = {
    'building': (loaders, 'build_dataset'),
    'data': (PairedImageDataset, '__getitem__'),
    'step': (BaseModel, 'begin_iteration'),
    'validation': (SRModel, 'test'),
    'saving': (SRModel, 'save'),
}


def inject(fault, rank):
    """Have something go wrong at the place's first call in or after an iteration."""
    if fault is None or fault['rank'] != rank:
        return
    owner, name = PLACES[fault['place']]
    function = getattr(owner, name)

    def faulty(*args, **kwargs):
        if progress.current.iteration >= fault['at']:
            FAULTS[fault['kind']]()
        return function(*args, **kwargs)

    setattr(owner, name, faulty)


def be_rank(case, rank, port, file):
    """What a forked process does; never returns."""
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case['world_size']),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(port),
    )
    status = 0
    try:
        inject(case['fault'], rank)
        argv = case['argv']
        sys.argv = ['program', *(argv[rank] if isinstance(argv[0], list) else argv)]
        basicsr.train.draw_results = lambda *_: None
        program.run(basicsr.train.train_pipeline, Path.cwd())
    except SystemExit as error:
        status = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if (case['fault'] or {}).get('at_end') and case['fault']['rank'] == rank:
            never_again()
        os._exit(status)


def start(case, number):
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    pids, files = [], []
    for rank in range(case['world_size']):
        file = os.open(f'case_{number}_{rank}.txt', os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        pid = os.fork()
        if pid == 0:
            be_rank(case, rank, port, file)
        os.close(file)
        pids.append(pid)
        files.append(Path(f'case_{number}_{rank}.txt'))
    return {'case': case, 'pids': pids, 'files': files, 'begin': time.monotonic(), 'statuses': {}}


def look(run):
    """Take the statuses of what has ended; returns whether all have, or had to be."""
    seconds = time.monotonic() - run['begin']
    late = seconds > run['case']['limit']
    for pid in run['pids']:
        if pid in run['statuses']:
            continue
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            run['statuses'][pid] = os.waitstatus_to_exitcode(status)
            run['seconds'] = seconds
        elif late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            run['statuses'][pid] = None
    return len(run['statuses']) == len(run['pids'])


def main(file):
    plan = json.loads(file.read_text())
    waiting, running, answers = list(enumerate(plan['cases'])), {}, {}
    while waiting or running:
        ready = [entry for entry in waiting if entry[1]['after'] in (None, *answers)]
        for number, case in ready[: plan['together'] - len(running)]:
            waiting.remove((number, case))
            running[number] = start(case, number)
        for number, run in list(running.items()):
            if look(run):
                del running[number]
                answers[number] = {
                    'seconds': run.get('seconds'),
                    'statuses': [run['statuses'][pid] for pid in run['pids']],
                    'texts': [path.read_text(errors='replace') for path in run['files']],
                }
        time.sleep(0.05)
    ordered = [answers[number] for number in sorted(answers)]
    file.with_name('answers.json').write_text(json.dumps(ordered))


if __name__ == '__main__':
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

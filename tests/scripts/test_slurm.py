"""The template of a SLURM job, with the programs of a cluster replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / 'scripts' / 'slurm' / 'train.sbatch'

PROGRAMS = {
    'scontrol': 'case "$1" in show) echo "$3" ;; requeue) echo "$@" >> "$QUEUE" ;; esac',
    'srun': 'export BATCH=$PPID; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    'torchrun': f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def test_bash_can_read_the_template():
    subprocess.run(['bash', '-n', TEMPLATE], check=True)


# A model that has the batch script asked to stop, as SLURM does before the time is over.
ASKING = """
import os
import signal

from basicsr.models.sr_model import SRModel
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class AskingModel(SRModel):
    def optimize_parameters(self, current_iter):
        super().optimize_parameters(current_iter)
        if current_iter == 2 and self.opt['rank'] == 0:
            os.kill(int(os.environ['BATCH']), signal.SIGUSR1)
"""


@pytest.mark.slow
def test_a_job_saves_its_state_before_its_end_queues_again_and_goes_on(train_opt, tmp_path):
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{text}\n')
        (tmp_path / name).chmod(0o755)
    slurm = {
        'SLURM_JOB_ID': str(os.getpid()),
        'SLURM_JOB_NODELIST': 'localhost',
        'SLURM_JOB_NUM_NODES': '1',
        'SLURM_GPUS_ON_NODE': '2',
        'SLURM_CPUS_PER_TASK': '2',
    }
    path = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'QUEUE': str(tmp_path / 'queue')}
    (tmp_path / 'plug_ins').mkdir()
    (tmp_path / 'plug_ins' / 'asking_model.py').write_text(ASKING)

    def job(total_iter):
        options = {'train__total_iter': total_iter, 'logger__save_checkpoint_freq': 10**6}
        where = {'path__experiments_root': str(tmp_path), 'plugins': [str(tmp_path / 'plug_ins')]}
        opt = train_opt(val=None, model_type='AskingModel', **options, **where)
        (tmp_path / 'x.yml').write_text(json.dumps(opt))
        return subprocess.run(
            ['bash', TEMPLATE, tmp_path / 'x.yml'],
            cwd=ROOT,
            env={**os.environ, **slurm, **path},
            capture_output=True,
            text=True,
            timeout=600,
        )

    first = job(10**6)
    assert 'on the CPU, 2 processes' in first.stderr
    assert 'starting at iteration 0' in first.stderr
    assert first.stderr.count('Asked to stop: the state of iteration') == 1
    assert (tmp_path / 'queue').read_text().split() == ['requeue', slurm['SLURM_JOB_ID']]
    [state] = (tmp_path / 'tiny' / 'training_states').iterdir()

    total = int(state.stem) + 2
    second = job(total)
    assert second.returncode == 0, second.stderr
    assert f'resuming from {state}' in second.stderr
    assert (state.parent / f'{total}.state').is_file()


def test_the_template_asks_for_an_option_file():
    job = subprocess.run(['bash', TEMPLATE], capture_output=True, text=True)
    assert job.returncode in (1, 127), 'as the versions of bash differ'
    assert 'give an option file: sbatch train.sbatch options/x.yml' in job.stderr
    assert job.stdout == ''

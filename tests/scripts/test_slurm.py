"""The template of a SLURM job, with the programs of a cluster replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / 'scripts' / 'slurm' / 'train.sbatch'

PROGRAMS = {
    'scontrol': 'test "$1 $2 $3" = "show hostnames localhost" && echo localhost',
    'srun': 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    'torchrun': f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def test_bash_can_read_the_template():
    subprocess.run(['bash', '-n', TEMPLATE], check=True)


def test_the_template_trains_on_one_node(train_opt, tmp_path):
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
    env = {**os.environ, **slurm, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
    opt = train_opt(train__total_iter=2, val=None, path__experiments_root=str(tmp_path))
    (tmp_path / 'x.yml').write_text(json.dumps(opt))
    job = subprocess.run(
        ['bash', TEMPLATE, tmp_path / 'x.yml'], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert job.returncode == 0, job.stderr
    assert 'Processes: 2 (backend gloo)' in job.stderr
    assert 'starting at iteration 0' in job.stderr
    assert (tmp_path / 'tiny' / 'training_states' / '2.state').is_file()


def test_the_template_asks_for_an_option_file():
    job = subprocess.run(['bash', TEMPLATE], capture_output=True, text=True)
    assert job.returncode != 0
    assert 'give an option file' in job.stderr

"""A loader process that dies is explained in one line."""

import json

from basicsr.utils.dead_worker import why_worker_died

PLUGIN = """
import os
import signal

import torch
from torch.utils.data import Dataset, get_worker_info

from basicsr.utils.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class Mortal(Dataset):
    def __init__(self, opt):
        self.opt = opt

    def __len__(self):
        return 50

    def __getitem__(self, index):
        if get_worker_info() is not None and index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return {'lq': torch.rand(3, 8, 8), 'gt': torch.rand(3, 16, 16)}
"""


def test_a_run_whose_loader_process_is_killed_ends_with_one_message(
    run_program, train_opt, tmp_path
):
    (tmp_path / 'mortal_dataset.py').write_text(PLUGIN)
    opt = train_opt(val=None, plugins=[str(tmp_path)], train__total_iter=100)
    opt['datasets'] = {
        'train': {
            'type': 'Mortal',
            'batch_size_per_gpu': 2,
            'num_worker_per_gpu': 1,
        }
    }
    (tmp_path / 'x.yml').write_text(json.dumps(opt))
    result = run_program('-m', 'basicsr.cli', 'train', '-opt', 'x.yml')
    assert result.returncode == 1
    assert 'Traceback' not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if 'DataLoader worker (pid' in line]
    assert ' ERROR: DataLoader worker (pid ' in line
    assert 'was killed (signal 9), most likely because the machine ran out of memory' in line
    assert 'num_worker_per_gpu' in line


def test_causes_are_searched_and_other_errors_are_none():
    inner = RuntimeError('DataLoader worker (pid 12) is killed by signal: Bus error. It is …')
    crash = RuntimeError('DataLoader worker (pid 7) is killed by signal: Segmentation fault. ')
    assert '(pid 7) crashed (signal 11, Segmentation fault)' in str(why_worker_died(crash))
    outer = ValueError('something else')
    outer.__cause__ = inner
    assert '/dev/shm is full' in str(why_worker_died(outer))
    gone = RuntimeError('DataLoader worker (pid(s) 12, 13) exited unexpectedly')
    assert 'worker (pid 12, 13) ended without an error' in str(why_worker_died(gone))
    assert why_worker_died(RuntimeError('CUDA out of memory')) is None
    assert why_worker_died(None) is None

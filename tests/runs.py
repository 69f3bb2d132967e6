"""Reading what a run has written."""

import json
from pathlib import Path

import torch

# How a test starts two processes: python <these> PROGRAM
TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2')


def rows(folder):
    """Lines of a run's ``metrics.jsonl`` without the measured times."""
    lines = (Path(folder) / 'metrics.jsonl').read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith('time/')}
        for line in lines
    ]


def log_text(folder):
    """The newest text log of a run."""
    return max(Path(folder).glob('*.log'), key=lambda file: file.stat().st_mtime_ns).read_text()


def checkpoint(folder, name):
    """A file of ``models/`` or ``training_states/``, read safely."""
    kind = 'training_states' if name.endswith('.state') else 'models'
    return torch.load(Path(folder) / kind / name, weights_only=True)


def differences(a, b, path=''):
    """Paths at which two nested values differ in any bit."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f'{path}/{key}' for key in a.keys() ^ b.keys()]
        for key in a.keys() & b.keys():
            found += differences(a[key], b[key], f'{path}/{key}')
        return found
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [
            d
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for d in differences(x, y, f'{path}/{i}')
        ]
    return [] if a == b else [path]


def psnr_of(run, opt, weights, param_key):
    """The PSNR that a test gives weights, on the validation set of a training run's options."""
    kept = ('model_type', 'scale', 'num_gpu', 'network_g', 'val', 'plugins')
    test = {'name': 'tested', **{key: opt[key] for key in kept if key in opt}}
    test['datasets'] = {'val': opt['datasets']['val']}
    test['path'] = {'pretrain_network_g': str(weights), 'param_key_g': param_key}
    results = json.loads((run(test, pipeline='test') / 'results.json').read_text())
    return results['sets']['val']['metrics']['psnr']


class Recorder:
    """A writer of scalars that keeps what it is given."""

    def __init__(self):
        self.values, self.flushed = {}, 0

    def add_scalar(self, tag, value, step):
        self.values[tag, step] = value

    def flush(self):
        self.flushed += 1

"""A step makes no host wait for the device, and asks for no number."""

import pytest
import torch
from blind import adversarial
from torch.utils._python_dispatch import TorchDispatchMode

from basicsr.models import build_model
from basicsr.run.incidents import Guard

MODELS = {
    'SRModel': {},
    'everything': {
        'train__clip_grad_norm': 1.0,
        'train__clip_grad_value': 0.1,
        'train__accumulate': 2,
        'train__amp': 'bf16',
        'train__checkpoint_activations': True,
        'train__ema_warmup': True,
        'train__losses': [{'type': 'WeightedTVLoss', 'name': 'tv'}],
        'network_g': {'type': 'MSRResNet', 'num_feat': 4, 'num_block': 2, 'upscale': 2},
    },
}


class ReadsNumbers(TorchDispatchMode):
    """Counts the operations for which a GPU would have to finish: numbers and copies to the CPU."""

    WAITING = ('_local_scalar_dense', 'is_nonzero', 'equal', 'nonzero', 'masked_select')

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix('aten::') in self.WAITING:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def steps(opt, device='cpu'):
    """A model that has made two steps, and a function that makes another."""
    opt = opt | {'dist': False, 'is_train': True}
    for dataset in opt['datasets'].values():
        dataset['phase'] = 'train'
    model = build_model(opt)
    batch = {'lq': torch.rand(2, 3, 8, 8), 'gt': torch.rand(2, 3, 16, 16)}
    batch = {key: value.to(device) for key, value in batch.items()}

    def step(current_iter):
        model.update_learning_rate(current_iter, 4)
        model.stepper.begin(model.trained_networks().values())
        model.feed_data(batch)
        model.optimize_parameters(current_iter)

    step(1)
    step(2)
    return model, step


def options_of(kind, train_opt):
    if kind == 'fp16':  # fused optimizers take the scaler's findings as tensors
        return train_opt(train__amp='fp16')
    return adversarial(train_opt()) if kind == 'SRGANModel' else train_opt(**MODELS[kind])


@pytest.mark.parametrize('policy', ['stop', 'skip', 'rollback'])
@pytest.mark.parametrize('kind', [*MODELS, 'SRGANModel'])
def test_a_step_reads_no_number(train_opt, kind, policy):
    opt = options_of(kind, train_opt)
    opt['train']['on_nonfinite'] = policy
    _, step = steps(opt)
    with ReadsNumbers() as mode:
        step(3)
    assert mode.found == []


def test_reading_a_number_is_noticed():
    for read in (torch.Tensor.item, float, bool):
        with ReadsNumbers() as mode:
            read(torch.ones(1))
        assert mode.found, read


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='only a GPU works while the host goes on')
@pytest.mark.parametrize('policy', ['stop', 'skip', 'rollback'])
@pytest.mark.parametrize('kind', [*MODELS, 'SRGANModel', 'fp16'])
def test_a_step_on_a_gpu_waits_for_nothing(train_opt, kind, policy, tmp_path):
    """Nor does looking at the numbers of the iteration before."""
    opt = options_of(kind, train_opt) | {'num_gpu': 1}
    opt['train']['on_nonfinite'] = policy
    opt['path']['experiments_root'] = str(tmp_path)
    model, step = steps(opt, 'cuda')
    guard = Guard(model, None)
    guard.note(2, {})
    torch.cuda.set_sync_debug_mode('error')
    try:
        step(3)
        guard.note(3, {})
    finally:
        torch.cuda.set_sync_debug_mode('default')

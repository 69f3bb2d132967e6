"""Golden numbers: inputs and outputs of the reference toolkit (upstream BasicSR 1.4.2).

``recipe.py`` makes the inputs and compares the outputs; the ``*.json`` files hold the cases with
their tolerances, the ``*.npz`` files the stored arrays.
"""

import importlib
import random

import numpy as np
import pytest
import torch

from . import recipe


def params(group, keep=lambda case: True):
    """The cases of a group as pytest parameters, one test id each."""
    return [pytest.param(case, id=case['id']) for case in recipe.load(group) if keep(case)]


def resolve(spec):
    return recipe.resolve(spec, torch.from_numpy)


def target(case):
    module, name = case['target'].split(':')
    return getattr(importlib.import_module(module), name)


def seed(case):
    if 'seed' in case:
        random.seed(case['seed'])
        np.random.seed(case['seed'])
        torch.manual_seed(case['seed'])


def call(case):
    """Output of a case of kind ``call``."""
    function = target(case)
    calls = case.get('many') or [case]
    calls = [(resolve(c.get('args', [])), resolve(c.get('kwargs', {}))) for c in calls]
    seed(case)
    outputs = [function(*args, **kwargs) for args, kwargs in calls]
    return outputs if case.get('many') else outputs[0]


def fill(net, case):
    """Load the recipe's weights into every entry of the network's state dict."""
    options = {k: case[k] for k in ('gain', 'fan', 'bias') if k in case}
    state = net.state_dict()
    for name, value in state.items():
        if not recipe.keep_as_built(name, value.dtype, case.get('keep', ())):
            state[name] = torch.from_numpy(recipe.weight_value(name, value.shape, **options))
    net.load_state_dict(state)
    return net


def forward(net, case):
    """Leaves of a golden case of kind ``net``."""
    args, kwargs = resolve(case['args']), resolve(case.get('kwargs', {}))
    fill(net, case).train(case.get('mode') == 'train')
    with torch.set_grad_enabled(case.get('grads', False)):
        for _ in range(case.get('forwards', 1) - 1):
            net(*args, **kwargs)
        if case.get('then_eval'):
            net.eval()
        leaves = {'out': net(*args, **kwargs)}
    state = net.state_dict()
    leaves['after'] = {name.replace('.', '/'): state[name] for name in case.get('after', [])}
    if case.get('grads'):
        leaves['out'].square().mean().backward()
        grads = {n: p.grad for n, p in sorted(net.named_parameters()) if p.grad is not None}
        leaves['grad_names'] = '\n'.join(grads)
        leaves['grad_norms'] = torch.stack([grad.double().norm() for grad in grads.values()])
    return leaves

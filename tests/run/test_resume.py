"""Training states of BasicSR 1.x, built by plain torch as its files are described."""

import copy
import math
from collections import Counter

import pytest
import torch
from blind import adversarial, blind
from runs import checkpoint, differences, log_text, rows
from torch.nn import functional as F

from basicsr.archs import build_network
from basicsr.models.base_model import BaseModel
from basicsr.models.sr_model import SRModel

DECAY, RATE = 0.9, 1e-3

# The rate of an iteration (from 1), and what a scheduler holds beside its place, per option.
MULTI_STEP = (
    {'type': 'MultiStepLR', 'milestones': [2, 4], 'gamma': 0.5},
    lambda i: RATE * 0.5 ** ((i > 2) + (i > 4)),
    {
        'milestones': Counter([2, 4]),
        'gamma': 0.5,
        'restarts': (0,),
        'restart_weights': (1,),
    },
)
COSINE = (
    {
        'type': 'CosineAnnealingRestartLR',
        'periods': [4, 4],
        'restart_weights': [1, 0.5],
        'eta_min': 1e-7,
    },
    lambda i: (
        1e-7
        + (0.5 if i > 5 else 1)
        * (RATE - 1e-7)
        * (1 + math.cos(math.pi * (i - 1 - 4 * (i > 5)) / 4))
        / 2
    ),
    {
        'periods': [4, 4],
        'restart_weights': [1, 0.5],
        'eta_min': 1e-7,
        'cumulative_period': [4, 8],
    },
)


class PlainTraining:
    """A training in plain torch: the steps that a run makes, and the files that 1.x writes."""

    def __init__(self, opt, rate, scheduler):
        self.rate, self.scheduler, self.iteration = rate, scheduler, 0
        self.nets = {'g': build_network(opt['network_g'])}
        if 'network_d' in opt:
            self.nets['d'] = build_network(opt['network_d'])
        self.ema = copy.deepcopy(self.nets['g'])
        self.optimizers = [
            torch.optim.Adam(net.parameters(), RATE, betas=(0.9, 0.99))
            for net in self.nets.values()
        ]

    def step(self, lq, gt):
        self.iteration += 1
        for optimizer, net in zip(self.optimizers, self.nets.values(), strict=True):
            optimizer.param_groups[0]['lr'] = self.rate(self.iteration)
            optimizer.zero_grad()
            if net is self.nets['g']:
                F.l1_loss(net(lq), gt).backward()
            else:
                net(gt).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for average, value in zip(
                self.ema.parameters(), self.nets['g'].parameters(), strict=True
            ):
                average.mul_(DECAY).add_(value, alpha=1 - DECAY)

    def state(self):
        schedule = {
            **self.scheduler,
            'base_lrs': [RATE],
            'last_epoch': self.iteration - 1,
            'verbose': False,
            '_step_count': self.iteration,
            '_get_lr_called_within_step': False,
            '_last_lr': [self.rate(self.iteration)],
        }
        optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        for optimizer in optimizers:  # the arguments that Adam had in earlier releases of torch
            (group,) = optimizer['param_groups']
            kept = ('lr', 'betas', 'eps', 'weight_decay', 'amsgrad', 'params')
            group = {'initial_lr': RATE, **{key: group[key] for key in kept}}
            optimizer['param_groups'] = [group]
            for moments in optimizer['state'].values():
                moments['step'] = int(moments['step'])
        return {
            'epoch': 1,
            'iter': self.iteration,
            'optimizers': optimizers,
            'schedulers': [copy.deepcopy(schedule) for _ in optimizers],
        }

    def save(self, folder, prefix=''):
        for name in ('models', 'training_states'):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for label, net in self.nets.items():
            content = {'params': net.state_dict()}
            if label == 'g':
                content['params_ema'] = self.ema.state_dict()
            content = {
                key: {prefix + name: value for name, value in weights.items()}
                for key, weights in content.items()
            }
            torch.save(content, folder / f'models/net_{label}_{self.iteration}.pth')
        torch.save(self.state(), folder / f'training_states/{self.iteration}.state')


@pytest.fixture
def begun(train_opt, tmp_path):
    """A training that 1.x has begun: what it is, and its options."""

    def make(kind=MULTI_STEP, adapt=lambda opt: opt, prefix='', **overrides):
        options, rate, held = kind
        opt = adapt(train_opt(val=None, **overrides))
        opt['train']['scheduler'] = options
        for name in ('optim_g', 'optim_d'):
            if name in opt['train']:
                opt['train'][name] = {'type': 'Adam', 'lr': RATE, 'betas': [0.9, 0.99]}
        training = PlainTraining(opt, rate, held)
        for _ in range(3):
            training.step(torch.rand(2, 3, 8, 8), torch.rand(2, 3, 16, 16))
        training.save(tmp_path / 'experiments' / opt['name'], prefix)
        return training, opt

    return make


@pytest.fixture
def batches(monkeypatch):
    """The batches that runs train with, as they come."""
    found, step = [], SRModel.optimize_parameters

    def watched(self, current_iter):
        found.append((self.lq.clone(), self.gt.clone()))
        step(self, current_iter)

    monkeypatch.setattr(SRModel, 'optimize_parameters', watched)
    return found


@pytest.mark.parametrize('kind', [MULTI_STEP, COSINE], ids=['multi_step', 'cosine'])
@pytest.mark.parametrize('prefix', ['', 'module.'])
def test_a_run_of_1x_goes_on_as_plain_torch_would(begun, run, batches, kind, prefix):
    """Weights, moments, average and rates, with the data that comes at this iteration."""
    training, opt = begun(kind, prefix=prefix)
    folder = run(opt, '--auto_resume')
    resumed = batches.copy()
    for batch in resumed:
        training.step(*batch)
    assert training.iteration == 6
    saved = checkpoint(folder, 'net_g_6.pth')
    for key, net in (('params', training.nets['g']), ('params_ema', training.ema)):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(saved[key][name], value, atol=1e-6, rtol=1e-5)
    moments = checkpoint(folder, '6.state')['optimizers'][0]['state']
    for number, expected in training.optimizers[0].state_dict()['state'].items():
        for name, value in expected.items():
            torch.testing.assert_close(moments[number][name], value, atol=1e-7, rtol=1e-4)
    logged = rows(folder)
    assert [row['iter'] for row in logged] == [4, 5, 6]
    assert [row['lr'] for row in logged] == pytest.approx([*map(kind[1], (4, 5, 6))], rel=1e-9)
    batches.clear()
    run(dict(opt, name='whole'))
    assert differences(resumed, batches[3:]) == []


def test_what_a_state_of_1x_does_not_hold_is_said_once_and_nothing_else_is_warned_of(begun, run):
    _, opt = begun()
    folder = run(opt, '--auto_resume')
    warnings = [line for line in log_text(folder).splitlines() if 'WARNING' in line]
    (warning,) = [line for line in warnings if 'val is not used' not in line]
    assert '3.state was written by BasicSR 1.x' in warning
    assert 'a run of this version that has reached iteration 3 with manual_seed 7' in warning
    again = run(opt | {'train': opt['train'] | {'total_iter': 7}}, '--auto_resume')
    assert '1.x' not in log_text(again)


def test_an_average_that_1x_has_not_kept_begins_with_the_weights_and_a_warning(
    begun, run, tmp_path
):
    training, opt = begun()
    file = tmp_path / 'experiments/tiny/models/net_g_3.pth'
    torch.save({'params': training.nets['g'].state_dict()}, file)
    folder = run(opt | {'train': opt['train'] | {'total_iter': 4}}, '--auto_resume')
    saved, before = checkpoint(folder, 'net_g_4.pth'), training.nets['g'].state_dict()
    for name, value in saved['params_ema'].items():
        expected = DECAY * before[name] + (1 - DECAY) * saved['params'][name]
        torch.testing.assert_close(value, expected, atol=1e-7, rtol=1e-6)
    assert f'WARNING: Loading: {file} has no params_ema; the average of net_g' in log_text(folder)


def test_a_warm_up_of_1x_goes_on_towards_the_scheduled_rate(begun, run):
    """There its rate has replaced the scheduled one, also in the file."""
    options, _, held = MULTI_STEP
    options, held = options | {'milestones': [9]}, held | {'milestones': Counter([9])}
    kind = (options, lambda i: RATE * i / 5, held)
    _, opt = begun(kind, train__warmup_iter=5)
    logged = rows(run(opt, '--auto_resume'))
    assert [row['lr'] for row in logged] == pytest.approx([0.8 * RATE, RATE, RATE], rel=1e-9)


@pytest.mark.parametrize('adapt', [adversarial, lambda opt: blind(opt, 'RealESRGANModel')])
def test_both_networks_and_optimizers_of_1x_are_resumed(begun, run, monkeypatch, adapt, tmp_path):
    """By the name of the state, in the folder of another run."""
    training, opt = begun(adapt=adapt)
    resume, found = BaseModel.resume_training, []

    def watched(self, resume_state):
        resume(self, resume_state)
        nets = self.net_g, self.net_d, self.net_g_ema
        parts = [[optimizer.state_dict() for optimizer in self.optimizers]]
        found.extend(copy.deepcopy([*parts, [dict(net.state_dict()) for net in nets]]))

    monkeypatch.setattr(BaseModel, 'resume_training', watched)
    opt['path'] = {'resume_state': str(tmp_path / 'experiments/tiny/training_states/3.state')}
    folder = run(dict(opt, name='other'))
    optimizers, nets = found
    plain = (training.nets['g'], training.nets['d'], training.ema)
    assert differences(nets, [dict(net.state_dict()) for net in plain]) == []
    for ours, theirs in zip(optimizers, training.optimizers, strict=True):
        assert differences(ours['state'], theirs.state_dict()['state']) == []
    assert [row['iter'] for row in rows(folder)] == [4, 5, 6]
    assert checkpoint(folder, '6.state')['samples'] == 12


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'scheduler': COSINE[0]}, 'not one of CosineAnnealingRestartLR, which has no gamma, mile'),
        ({'optim_g': {'type': 'SGD', 'lr': RATE}}, 'not one of SGD, which has no amsgrad, betas'),
    ],
)
def test_a_state_of_1x_of_another_optimizer_or_schedule_is_refused(begun, run, changes, message):
    _, opt = begun()
    opt['train'].update(changes)
    with pytest.raises(ValueError, match=message):
        run(opt, '--auto_resume')

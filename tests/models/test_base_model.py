"""Optimizers, schedules, the averaged copy and checkpoints of a model."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from golden import params, recipe
from torch import nn

from basicsr.models import build_model
from basicsr.models.base_model import BaseModel
from basicsr.utils.checkpoint import load_checkpoint


@pytest.fixture
def tiny_model(base_opt):
    """A model with one parameter group at rate 1e-3, and the schedule of ``train_opt``."""

    def make(train_opt, net=None):
        model = BaseModel({**base_opt, 'train': train_opt})
        net = net or nn.Conv2d(1, 1, 1)
        model.optimizers.append(torch.optim.Adam(net.parameters(), lr=1e-3))
        model.setup_schedulers()
        return model

    return make


def rates(model, iters, warmup_iter=-1):
    history = []
    for iteration in range(1, iters + 1):
        model.update_learning_rate(iteration, warmup_iter)
        history.append(model.get_current_learning_rate()[0])
        model.optimizers[0].step()
    return history


def prepared(tiny_model, case):
    model = tiny_model(case['train'])
    if 'torch_scheduler' in case:
        scheduler = getattr(torch.optim.lr_scheduler, case['torch_scheduler'])
        model.schedulers = [scheduler(model.optimizers[0], **case['torch_kwargs'])]
    return model


PLAIN = params('schedulers', lambda c: c['kind'] == 'lr_model' and not c.get('advisory'))
WARMUP = params('schedulers', lambda c: c['kind'] == 'lr_model' and c.get('advisory'))


@pytest.mark.parametrize('case', PLAIN)
def test_rates_over_a_run_are_those_of_the_reference(tiny_model, case):
    history = rates(prepared(tiny_model, case), case['iters'])
    assert recipe.compare(case, np.array(history)) is None


@pytest.mark.parametrize('case', WARMUP)
def test_warm_up_multiplies_the_scheduled_rate(tiny_model, case):
    scheduled = rates(prepared(tiny_model, case), case['iters'])
    warmup = case['train']['warmup_iter']
    warmed = rates(prepared(tiny_model, case), case['iters'], warmup)
    expected = [r * min(i / warmup, 1) for i, r in enumerate(scheduled, 1)]
    assert warmed == pytest.approx(expected, rel=1e-9)


def test_any_schedule_of_torch_is_found_by_name(tiny_model):
    model = tiny_model({'scheduler': {'type': 'StepLR', 'step_size': 2, 'gamma': 0.1}})
    assert rates(model, 5) == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5])


def test_an_unknown_schedule_or_argument_is_named(tiny_model):
    with pytest.raises(ValueError, match="did you mean 'MultiStepRestartLR'"):
        tiny_model({'scheduler': {'type': 'MultiStepRestart'}})
    with pytest.raises(ValueError, match="did you mean 'step_size'"):
        tiny_model({'scheduler': {'type': 'StepLR', 'size': 2}})


@pytest.mark.parametrize('name', ['SGD', 'RMSprop', 'AdamW', 'Adagrad', 'NAdam', 'Rprop'])
def test_any_optimizer_of_torch_is_found_by_name(base_opt, name):
    optimizer = BaseModel(base_opt).get_optimizer(name, [nn.Parameter(torch.ones(2))], lr=0.25)
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.param_groups[0]['lr'] == 0.25


def test_an_optimizer_is_fused_where_it_can_be_unless_an_option_says_how(base_opt):
    def fused(name, **kwargs):
        optimizer = BaseModel(base_opt).get_optimizer(name, [nn.Parameter(torch.ones(2))], lr=1)
        group = optimizer.param_groups[0]
        given = BaseModel(base_opt).get_optimizer(
            name, iter([{'params': [nn.Parameter(torch.ones(2))]}]), lr=1, **kwargs
        )
        return group.get('fused'), given.param_groups[0].get('fused')

    assert fused('Adam', fused=False) == (True, False)
    assert fused('AdamW', foreach=True) == (True, None)
    assert fused('SGD', momentum=0.9) == (True, True)
    assert fused('RMSprop') == (None, None)


@pytest.mark.parametrize('name', ['Adam', 'AdamW', 'SGD', 'Adagrad'])
def test_a_fused_optimizer_makes_the_steps_of_the_plain_one(base_opt, name):
    torch.manual_seed(0)
    nets = [nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [
        BaseModel(base_opt).get_optimizer(name, nets[0].parameters(), lr=1e-3, weight_decay=0.1),
        getattr(torch.optim, name)(nets[1].parameters(), lr=1e-3, weight_decay=0.1, foreach=False),
    ]
    x = torch.rand(2, 3, 9, 9)
    for _ in range(20):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_an_unknown_optimizer_or_argument_is_named(base_opt):
    model, weights = BaseModel(base_opt), [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="'Adamm' is not in torch.optim; did you mean 'Adam'"):
        model.get_optimizer('Adamm', weights, lr=1)
    with pytest.raises(TypeError, match='while building Adam'):
        model.get_optimizer('Adam', weights, lr=1, beta=0.9)


# ---------------------------------------------------------------------------- averaging


class Tensors(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize('case', params('schedulers', lambda c: c['kind'] == 'ema'))
def test_the_average_is_that_of_the_reference(base_opt, case):
    shapes = {'a': (2,), 'b': (1, 3), 'c': ()}
    model = BaseModel(base_opt)
    model.net_g, model.net_g_ema = Tensors(**shapes), Tensors(**shapes)
    history = []
    for step, decay in enumerate(case['decays']):
        for name, shape in shapes.items():
            value = torch.from_numpy(recipe.det_array(shape, f'{case["key"]}/{step}/{name}'))
            getattr(model.net_g, name).data.copy_(value)
        model.model_ema(decay)
        average = [getattr(model.net_g_ema, name).detach().flatten() for name in sorted(shapes)]
        history.append(torch.cat(average))
    assert recipe.compare(case, torch.stack(history)) is None


def test_buffers_of_the_average_are_copied(base_opt):
    model = BaseModel(base_opt)
    model.net_g, model.net_g_ema = (
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)) for _ in '12'
    )
    by_hand = {name: p.detach().clone() for name, p in model.net_g_ema.named_parameters()}
    for _ in range(20):
        model.net_g(torch.randn(4, 1, 5, 5))
        with torch.no_grad():
            for name, parameter in model.net_g.named_parameters():
                parameter += 0.1
                by_hand[name] = 0.9 * by_hand[name] + 0.1 * parameter
        model.model_ema(0.9)
    for own, current in zip(model.net_g_ema.buffers(), model.net_g.buffers(), strict=True):
        assert torch.equal(own, current)
    for name, parameter in model.net_g_ema.named_parameters():
        assert torch.allclose(parameter, by_hand[name], atol=1e-6)


# ---------------------------------------------------------------------------- the log


def test_log_values_stay_on_the_device_until_they_are_asked_for(base_opt):
    model = BaseModel(base_opt)
    loss = torch.tensor(0.5, requires_grad=True)
    model.log_dict = model.reduce_loss_dict(OrderedDict(l_pix=loss, other=2))
    assert isinstance(model.log_dict['l_pix'], torch.Tensor)
    assert not model.log_dict['l_pix'].requires_grad
    assert model.get_current_log() == OrderedDict(l_pix=0.5, other=2.0)
    assert all(type(value) is float for value in model.get_current_log().values())


# ---------------------------------------------------------------------------- checkpoints


def test_files_hold_tensors_and_plain_values_only(run, train_opt):
    """Safe loading, plain numbers."""
    folder = run(train_opt(train__total_iter=4))

    def check(value):
        if isinstance(value, dict):
            for item in value.values():
                check(item)
        elif isinstance(value, list | tuple):
            for item in value:
                check(item)
        else:
            assert type(value) in (torch.Tensor, int, float, str, bool, type(None))

    for file in [*folder.rglob('*.pth'), *folder.rglob('*.state')]:
        check(torch.load(file, weights_only=True))


def test_saving_and_validating_leave_the_weights_as_they_are(run, train_opt, monkeypatch):
    """The averaged weights never end up in the trained network."""
    from basicsr.models.sr_model import SRModel

    def guarded(method):
        original = getattr(SRModel, method)

        def wrapper(self, *args, **kwargs):
            before = {k: v.clone() for k, v in self.net_g.state_dict().items()}
            result = original(self, *args, **kwargs)
            for key, value in self.net_g.state_dict().items():
                assert torch.equal(value, before[key])
            assert self.net_g.training
            return result

        monkeypatch.setattr(SRModel, method, wrapper)

    guarded('save')
    guarded('validation')
    run(train_opt())


def test_building_a_model_leaves_the_options_as_they_are(run, train_opt, monkeypatch):
    """An option dict serves more than once."""
    seen = []

    def keep(opt):
        seen.append(opt)
        return build_model(opt)

    monkeypatch.setattr('basicsr.train.build_model', keep)
    run(train_opt(train__total_iter=2))
    assert seen[0]['train']['optim_g']['type'] == 'Adam'
    assert seen[0]['train']['scheduler']['type'] == 'MultiStepLR'
    model = build_model(seen[0])
    model.setup_schedulers()
    assert model.opt['train']['optim_g']['type'] == 'Adam'


def test_functions_in_the_state_of_a_schedule_are_not_saved(base_opt, tmp_path):
    """SWALR of some releases of torch has one; the schedule that is resumed has its own."""
    model = BaseModel(base_opt | {'path': {'models': tmp_path, 'training_states': tmp_path}})
    inner = {'anneal_func': max, 'last_epoch': 3}
    schedule = {'_schedulers': [inner], 'milestones': Counter([4]), 'last_epoch': 3}
    model.schedulers = [type('Schedule', (), {'state_dict': lambda self: schedule})()]
    model.save_training_state(0, 3)
    saved = load_checkpoint(tmp_path / '3.state')['schedulers']
    assert saved == [schedule | {'_schedulers': [{'last_epoch': 3}]}]

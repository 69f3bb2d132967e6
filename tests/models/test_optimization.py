"""Optimizers and parameter groups from options."""

import pytest
import torch
from runs import checkpoint, differences, log_text, rows
from torch import nn

from basicsr.models.optimization import (
    build_optimizer,
    evaluation_weights,
    optimizer_problems,
    parameter_groups,
    train_weights,
)

# Those that are tested on their own, the abstract one, and one for sparse gradients.
SPECIAL = {'LBFGS', 'Muon', 'Optimizer', 'SparseAdam'}
OPTIMIZERS = sorted({k for k, v in vars(torch.optim).items() if isinstance(v, type)} - SPECIAL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        self.norm = nn.LayerNorm(4)
        self.upsampler = nn.Conv2d(4, 3, 1)


def names_of(net, groups):
    """The names of the parameters of each group, and its other entries."""
    names = {id(p): name for name, p in net.named_parameters()}
    return [
        ([names[id(p)] for p in group['params']], {k: v for k, v in group.items() if k != 'params'})
        for group in groups
    ]


def test_without_description_there_is_one_group_of_what_is_trained():
    net = Net()
    net.body[0].requires_grad_(False)
    groups, options = parameter_groups(net, {'lr': 1e-3})
    ((names, rest),) = names_of(net, groups)
    assert names == [n for n, p in net.named_parameters() if p.requires_grad]
    assert (rest, options) == ({}, {'lr': 1e-3})


def test_the_first_pattern_that_is_found_in_a_name_decides():
    net = Net()
    described = [{'pattern': 'upsampler', 'lr': 1e-5}, {'pattern': r'^body|ups', 'weight_decay': 1}]
    groups, options = parameter_groups(net, {'lr': 1e-3, 'groups': described})
    upsampler, body, rest = names_of(net, groups)
    assert upsampler == (['upsampler.weight', 'upsampler.bias'], {'lr': 1e-5})
    assert all(name.startswith('body') for name in body[0]) and body[1] == {'weight_decay': 1}
    assert rest == (['norm.weight', 'norm.bias'], {})
    assert options == {'lr': 1e-3} and described[0]['pattern'] == 'upsampler', 'left as they are'


def test_norms_and_biases_may_be_without_weight_decay():
    net = Net()
    groups, options = parameter_groups(
        net, {'lr': 1, 'weight_decay': 0.1, 'decay_norms': False, 'groups': [{'pattern': 'body'}]}
    )
    kept = [(names, rest.get('weight_decay', 'own')) for names, rest in names_of(net, groups)]
    assert kept == [
        (['body.0.weight', 'body.2.weight'], 'own'),
        (['body.0.bias', 'body.1.weight', 'body.1.bias', 'body.2.bias'], 0),
        (['upsampler.weight'], 'own'),
        (['norm.weight', 'norm.bias', 'upsampler.bias'], 0),
    ]
    assert options == {'lr': 1, 'weight_decay': 0.1}


def test_a_pattern_that_finds_nothing_is_named():
    with pytest.raises(ValueError, match="no trained parameter has 'upsample_' in its name"):
        parameter_groups(Net(), {'groups': [{'pattern': 'upsample_'}]})


def test_groups_keep_their_rates_through_warm_up_and_schedule(run, train_opt):
    optim_g = {'type': 'Adam', 'lr': 1e-3, 'groups': [{'pattern': 'body.0', 'lr': 1e-4}]}
    folder = run(train_opt(train__optim_g=optim_g))
    groups = checkpoint(folder, '6.state')['optimizers'][0]['param_groups']
    assert [group['lr'] for group in groups] == pytest.approx([5e-5, 5e-4])


def test_any_optimizer_is_built_by_module_and_class():
    optimizer = build_optimizer('torch.optim.sgd:SGD', [nn.Parameter(torch.ones(2))], lr=0.25)
    assert type(optimizer) is torch.optim.SGD
    for name, message in (
        ('no_such_module:SGD', 'cannot be imported: No module'),
        ('torch.optim:Adamm', 'cannot be imported'),
        ('Adamm', "not in torch.optim; did you mean 'Adam'"),
    ):
        with pytest.raises(ValueError, match=message):
            build_optimizer(name, [nn.Parameter(torch.ones(2))], lr=1)


@pytest.mark.parametrize(('rule', 'factor'), [('linear', 0.25), ('sqrt', 0.5)])
def test_rates_scale_with_the_batch(run, train_opt, rule, factor):
    optim_g = {'type': 'Adam', 'lr': 1e-3, 'groups': [{'pattern': 'body.0', 'lr': 1e-4}]}
    scale = {'batch': 8, 'rule': rule}
    folder = run(train_opt(train__optim_g=optim_g, train__scale_lr=scale))
    first = next(row for row in rows(folder) if 'lr' in row)
    assert (first['lr'], first['lr_1']) == pytest.approx((1e-4 * factor, 1e-3 * factor))


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_optimizer_of_torch_makes_the_steps_it_makes_alone(run, train_opt, name):
    """The last three of six steps are made after a resume."""
    options = {'type': name, 'lr': 1e-3}
    folder = run(train_opt(train__optim_g=options, train__scheduler=None, train__total_iter=3))
    run(train_opt(train__optim_g=options, train__scheduler=None), '--auto_resume')
    weights = checkpoint(folder, 'net_g_6.pth')['params']
    whole = run(train_opt(name='whole', train__optim_g=options, train__scheduler=None))
    assert differences(weights, checkpoint(whole, 'net_g_6.pth')['params']) == []

    ours = nn.Parameter(torch.ones(3, 4))
    theirs = nn.Parameter(torch.ones(3, 4))
    optimizers = build_optimizer(name, [ours], lr=0.1), getattr(torch.optim, name)([theirs], lr=0.1)
    for _ in range(3):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ours, torch.ones(3, 4))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


OTHERS = {'type': 'AdamW', 'lr': 1e-2}


def test_muon_trains_the_matrices_and_another_optimizer_the_rest():
    ours, theirs = linear(), linear()
    groups, options = parameter_groups(ours, {'lr': 1e-3, 'others': OTHERS, 'decay_norms': False})
    optimizer = build_optimizer('Muon', groups, **options)
    matrices = [theirs[0].weight, theirs[2].weight]
    rest = [p for p in theirs.parameters() if p.ndim < 2]
    alone = [
        torch.optim.Muon(matrices, lr=1e-3),
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0),
    ]
    x = torch.rand(5, 4)
    for step in range(6):
        for net, parts in ((ours, [optimizer]), (theirs, alone)):
            net.zero_grad()
            net(x).square().mean().backward()
            for part in parts:
                part.step()
        if step == 2:  # the state of both, in a new optimizer
            state = optimizer.state_dict()
            optimizer = build_optimizer('Muon', parameter_groups(ours, {})[0], others=OTHERS)
            groups, options = parameter_groups(
                ours, {'lr': 1, 'others': OTHERS, 'decay_norms': False}
            )
            optimizer = build_optimizer('Muon', groups, **options)
            optimizer.load_state_dict(state)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_muon_says_what_it_needs(run, train_opt):
    with pytest.raises(ValueError, match=r'other parameters \(biases, norms, convolutions\)'):
        build_optimizer('Muon', linear().parameters(), lr=1e-3)
    with pytest.raises(ValueError, match='this network has none: its convolutions'):
        run(train_opt(train__optim_g={'type': 'Muon', 'lr': 1e-3, 'others': OTHERS}))


def test_a_transformer_is_trained_with_muon_and_resumed(run, train_opt):
    network_g = {'type': 'SwinIR', 'img_size': 8, 'embed_dim': 8, 'depths': [2], 'num_heads': [2]}
    network_g |= {'window_size': 4, 'upsampler': 'pixelshuffle', 'upscale': 2}
    options = {
        'model_type': 'SwinIRModel',
        'network_g': network_g,
        'train__optim_g': {'type': 'Muon', 'lr': 1e-3, 'others': OTHERS},
        'train__scale_lr': {'batch': 4},
    }
    whole = run(train_opt(name='whole', **options))
    first = next(row for row in rows(whole) if 'lr' in row)
    assert (first['lr'], first['lr_1']) == pytest.approx((5e-4, 5e-3))
    run(train_opt(name='cut', **options, train__total_iter=3))
    cut = run(train_opt(name='cut', **options), '--auto_resume')
    assert differences(checkpoint(whole, '6.state'), checkpoint(cut, '6.state')) == []


@pytest.mark.parametrize(
    ('groups', 'message'),
    [
        ({'pattern': 'body'}, 'groups must be a list'),
        ([{'lr': 1}], 'groups must be a list'),
        ([{'pattern': '(body'}], r"tiny.yml:1: train.optim_g: groups: pattern '\(body'"),
        ([{'pattern': 5}], "pattern '5'"),
        ({}, 'groups must be a list'),
        ([{'pattern': 'body', 'weight_dekay': 1}], "did you mean 'weight_decay'"),
    ],
)
def test_groups_that_cannot_be_are_named(run, train_opt, groups, message):
    with pytest.raises(ValueError, match=message):
        run(train_opt(train__optim_g={'type': 'AdamW', 'lr': 1e-3, 'groups': groups}))


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ({'decay_norms': 'no'}, "decay_norms must be true or false, got 'no'"),
        ({'betas': '99'}, "betas must be a list, got '99'"),
        ({'betas': [0.9, '0.99']}, 'betas must be a list of numbers'),
        ({'weight_decay': None}, 'weight_decay must be a number, got None'),
    ],
)
def test_arguments_of_an_optimizer_have_their_kinds(option, message):
    problems = optimizer_problems({'type': 'AdamW', 'lr': 1e-3, **option})
    assert len(problems) == 1 and message in problems[0]


def test_norms_decay_where_decay_norms_has_no_value():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    groups, _ = parameter_groups(net, {'lr': 1e-3, 'decay_norms': None})
    assert len(groups) == 1


FREE = {'type': 'schedulefree:AdamWScheduleFree', 'lr': 1e-2, 'warmup_steps': 3}


def test_a_schedule_free_optimizer_is_resumed_with_equal_bits(run, train_opt):
    """The weights of a checkpoint and of a validation are not those that gradients are taken at."""
    opts = {'train__optim_g': FREE, 'train__warmup_iter': 2, 'train__ema_decay': 0}
    whole = run(train_opt(name='whole', **opts))
    run(train_opt(name='cut', train__total_iter=4, **opts))
    cut = run(train_opt(name='cut', **opts), '--auto_resume')
    assert rows(cut) == rows(whole)
    for name in ('6.state', 'net_g_6.pth', 'net_g_latest.pth'):
        assert differences(checkpoint(whole, name), checkpoint(cut, name)) == []
    assert 'is not used' not in log_text(cut).replace('\n', ' ')


def test_a_checkpoint_holds_the_weights_that_a_schedule_free_optimizer_evaluates(run, train_opt):
    folder = run(train_opt(train__optim_g=FREE, train__ema_decay=0))
    state = checkpoint(folder, '6.state')['optimizers'][0]
    assert not state['param_groups'][0]['train_mode']
    # It never trained at other rates than its own warm-up says.
    assert state['param_groups'][0]['lr_max'] == pytest.approx(1e-2)
    losses = [row['losses/l_pix'] for row in rows(folder) if 'losses/l_pix' in row]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize('kind', ['AdamW', 'RAdam', 'SGD'])
def test_saving_and_scoring_change_no_schedule_free_weight(run, train_opt, kind):
    """The way there and back would round; and what is resumed has been saved in between."""
    optimizer = {'type': f'schedulefree:{kind}ScheduleFree', 'lr': 0.03}
    opts = {'train__optim_g': optimizer, 'train__ema_decay': 0, 'train__total_iter': 10}
    whole = run(train_opt(name='whole', val=None, logger__save_checkpoint_freq=10, **opts))
    often = {'logger__save_checkpoint_freq': 1, 'val__val_freq': 1}
    run(train_opt(name='often', **often, **opts | {'train__total_iter': 5}))
    often = run(train_opt(name='often', **often, **opts), '--auto_resume')
    for name in ('10.state', 'net_g_10.pth'):
        ours, theirs = (checkpoint(folder, name) for folder in (whole, often))
        ours.pop('best_metric_results', None), theirs.pop('best_metric_results', None)
        assert differences(ours, theirs) == []


def test_schedule_free_weights_change_for_a_block_and_back():
    from schedulefree import SGDScheduleFree

    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = SGDScheduleFree([weight], lr=0.1)
    train_weights([optimizer])
    for _ in range(4):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    trained, kept = weight.detach().clone(), list(optimizer.state[weight])
    with evaluation_weights([optimizer, torch.optim.SGD([weight], 0.1)]):
        z, x = optimizer.state[weight]['z'], weight.detach().clone()
    assert torch.equal(weight.detach(), trained)
    assert list(optimizer.state[weight]) == kept, 'the optimizer has no more state than before'
    torch.testing.assert_close(trained, 0.9 * x + 0.1 * z)  # eq. 1 of the paper, with beta 0.9
    assert not torch.allclose(x, trained)


@pytest.mark.parametrize(
    'average', [{'ema_decay': 0.9}, {'swa': {'start': 2}}, {'posthoc_ema': True}]
)
def test_a_schedule_free_optimizer_takes_no_other_average(run, train_opt, average):
    opt = train_opt(train__optim_g=FREE, train__ema_decay=0)
    opt['train'].update(average)
    with pytest.raises(ValueError, match='has an average of its own: set ema_decay: 0'):
        run(opt)


@pytest.mark.parametrize('optim_g', [{}, {'lr': 'a'}, {'lr': -1e-2}, {'lr': True}])
def test_a_learning_rate_is_a_number(run, train_opt, optim_g):
    with pytest.raises(
        ValueError,
        match='train.optim_g: (needs a learning rate, such as lr: 1e-4|lr is the string)',
    ):
        run(train_opt(train__optim_g={'type': 'Adam', **optim_g}))

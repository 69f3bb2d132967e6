"""What is done to networks before they are trained."""

import shutil
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from blind import adversarial, blind
from runs import checkpoint, differences, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from basicsr.archs import build_network
from basicsr.models import build_model, preparation
from basicsr.models.preparation import channels_last_is_faster, prepare_for_training


def gradients(net, x):
    net.zero_grad()
    net(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def network(**options):
    torch.manual_seed(0)
    return build_network(
        {'type': 'MSRResNet', 'num_feat': 4, 'num_block': 3, 'upscale': 2} | options
    )


def test_blocks_that_are_computed_twice_give_the_same_gradients_and_keep_less():
    x = torch.rand(2, 3, 8, 8)
    plain, twice = (
        network(),
        prepare_for_training(network(), {'checkpoint_activations': True}, False),
    )
    assert differences(plain.state_dict(), twice.state_dict()) == []
    assert differences(gradients(plain, x), gradients(twice, x)) == []

    def kept(net):
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        )
        with hooks:
            net(x)
        return sum(sizes)

    assert kept(twice) < 0.8 * kept(plain)


@pytest.mark.parametrize(
    ('options', 'count'),
    [
        ({'type': 'EDSR', 'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 3}, 3),
        ({'type': 'RRDBNet', 'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 2}, 2),
        (
            {'type': 'RCAN', 'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_group': 2}
            | {'num_block': 3, 'squeeze_factor': 2},
            6,
        ),
        (
            {'type': 'SwinIR', 'img_size': 8, 'embed_dim': 8, 'depths': [2, 3], 'window_size': 4}
            | {'num_heads': [2, 2], 'mlp_ratio': 2, 'upsampler': 'pixelshuffle', 'upscale': 2},
            5,
        ),
    ],
    ids=['EDSR', 'RRDBNet', 'RCAN', 'SwinIR'],
)
def test_the_blocks_of_every_body_are_computed_twice(options, count, caplog):
    """Of chains within chains the innermost; random parts of a block are drawn alike."""
    caplog.set_level('INFO')
    torch.manual_seed(0)
    nets = [build_network(options).train() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    prepare_for_training(nets[1], {'checkpoint_activations': True}, False)
    assert f'The activations of {count} blocks' in caplog.text
    found = []
    for net in nets:
        torch.manual_seed(1)
        found.append(gradients(net, torch.rand(2, 3, 8, 8)))
    assert differences(*found) == []


def test_a_network_without_a_chain_of_blocks_is_named(caplog):
    prepare_for_training(nn.Conv2d(3, 3, 3), {'checkpoint_activations': True}, False)
    assert 'has no effect on Conv2d: it has no chain of blocks' in caplog.text


def test_blocks_with_running_statistics_are_computed_once(caplog):
    caplog.set_level('INFO')

    def chain():
        block = [nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)]
        return nn.Sequential(nn.Sequential(*block), nn.Sequential(*block))

    prepare_for_training(chain(), {'checkpoint_activations': True}, False)
    assert 'no effect' in caplog.text
    caplog.clear()
    prepare_for_training(chain(), {'checkpoint_activations': True, 'norms': 'frozen'}, False)
    assert 'The activations of 2 blocks' in caplog.text


def test_channels_last_changes_the_layout_and_no_key():
    net = prepare_for_training(network(), {'channels_last': True}, False)
    assert net.conv_first.weight.is_contiguous(memory_format=torch.channels_last)
    assert net.state_dict().keys() == network().state_dict().keys()


def test_a_single_buffer_is_shared_over_processes_in_every_layout():
    """As DistributedDataParallel shares them; PyTorch refuses (1, c, 1, 1) with other strides."""
    options = {'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 1}
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layout in (True, 'auto'):
            net = build_network({'type': 'EDSR', **options})
            net = prepare_for_training(net, {'channels_last': layout}, True)
            if layout == 'auto':
                channels_last_is_faster(net, [torch.rand(1, 3, 8, 8)], nullcontext())
            wrapped = DistributedDataParallel(net)
            assert wrapped(torch.rand(1, 3, 4, 4)).shape == (1, 3, 16, 16)
    finally:
        dist.destroy_process_group()


def test_frozen_norms_keep_statistics_and_weights_while_the_rest_is_trained():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    net = prepare_for_training(net, {'norms': 'frozen'}, False).train()
    before = {k: v.clone() for k, v in net.state_dict().items() if k.startswith('1.')}
    out = net(torch.rand(2, 3, 8, 8))
    out.mean().backward()
    assert differences(before, {k: v for k, v in net.state_dict().items() if k in before}) == []
    assert net[0].training and not net[1].training
    assert net[1].weight.grad is None and net[0].weight.grad is not None


def test_norms_synced_over_processes_need_gpus():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match='synced needs GPUs'):
        prepare_for_training(net, {'norms': 'synced'}, True)
    assert prepare_for_training(net, {'norms': 'synced'}, False) is net, 'one process is in sync'
    without_norms = network()
    assert prepare_for_training(without_norms, {'norms': 'synced'}, True) is without_norms


@pytest.mark.parametrize(
    'options',
    [{'channels_last': True}, {'checkpoint_activations': True}, {'norms': 'frozen'}],
)
def test_a_run_is_the_same_but_for_rounding(run, train_opt, options):
    network_g = {'type': 'MSRResNet', 'num_feat': 4, 'num_block': 2, 'upscale': 2}
    plain = run(train_opt(name='plain', network_g=network_g))
    changed = {f'train__{key}': value for key, value in options.items()}
    other = run(train_opt(name='other', network_g=network_g, **changed))
    a, b = (checkpoint(folder, 'net_g_latest.pth')['params'] for folder in (plain, other))
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-5)


def test_compiled_networks_train_validate_and_save_the_usual_keys(run, train_opt):
    """Without a C++ compiler: the graph is captured and run as it is."""
    options = {'train__compile': {'backend': 'eager'}, 'train__ema_decay': 0}
    plain = run(train_opt(name='plain', train__ema_decay=0))
    compiled = run(train_opt(name='compiled', **options))
    a, b = (checkpoint(folder, 'net_g_latest.pth')['params'] for folder in (plain, compiled))
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a C++ compiler')
def test_networks_and_losses_compiled_to_code_train_as_they_do_without(run, train_opt):
    losses = [{'type': 'CharbonnierLoss', 'loss_weight': 0.1}]
    options = {'train__losses': losses, 'train__total_iter': 3}
    plain = run(train_opt(name='plain', **options))
    compiled = run(train_opt(name='compiled', train__compile=True, **options))
    for a, b in zip(rows(plain), rows(compiled), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    a, b = (checkpoint(folder, 'net_g_3.pth') for folder in (plain, compiled))
    for key in a['params']:
        torch.testing.assert_close(a['params'][key], b['params'][key], rtol=0, atol=1e-5)


def test_losses_are_compiled_with_the_networks(train_opt):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    opt = blind(train_opt(), 'RealESRGANModel')
    opt['train'].update(compile={'backend': backend}, losses=[{'type': 'CharbonnierLoss'}])
    opt['datasets']['train']['scale'] = 2
    model = build_model(opt | {'dist': False, 'is_train': True})
    images = torch.rand(2, 3, 16, 16)
    for module, arguments in (
        (model.cri_pix, (images, images)),
        (model.cri_others['charbonnier'], (images, images)),
        (model.cri_gan, (images, True)),
    ):
        before = len(graphs)
        module(*arguments)
        assert len(graphs) > before, type(module)


def test_a_validation_of_images_of_many_sizes_compiles_nothing(train_opt):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    opt = train_opt(train__compile={'backend': backend}, train__ema_decay=0)
    sr = build_model(opt | {'dist': False, 'is_train': True})
    plain = build_network(opt['network_g'])
    plain.load_state_dict(sr.net_g.state_dict())
    sr.feed_data({'lq': torch.rand(2, 3, 8, 8), 'gt': torch.rand(2, 3, 16, 16)})
    with torch.no_grad():
        assert differences(sr.net_g(sr.lq), plain(sr.lq)) == []
    count = len(graphs)
    assert count
    for height in (8, 9, 12, 20):
        sr.feed_data({'lq': torch.rand(1, 3, height, 10)})
        sr.test()
        with torch.no_grad():
            assert differences(sr.output, plain(sr.lq)) == []
    assert len(graphs) == count


def test_tf32_is_switched_for_products_and_convolutions(run, train_opt):
    cudnn, products = torch.backends.cudnn, torch.get_float32_matmul_precision()
    convolutions = cudnn.allow_tf32
    try:
        for value, word in ((True, 'high'), (False, 'highest')):
            run(train_opt(name=word, train__tf32=value, train__total_iter=1))
            assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == (word, value)
    finally:
        torch.set_float32_matmul_precision(products)
        cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize(('usual', 'last', 'chosen'), [(1.0, 0.9, True), (1.0, 0.98, False)])
def test_a_layout_is_taken_if_it_saves_three_percent(monkeypatch, usual, last, chosen):
    now, net = [0.0], network()

    def passes(*_):
        is_last = net.conv_first.weight.is_contiguous(memory_format=torch.channels_last)
        now[0] += last if is_last else usual

    monkeypatch.setattr(preparation.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(preparation, '_pass_through', passes)
    assert channels_last_is_faster(net, [torch.rand(2, 3, 8, 8)], nullcontext()) is chosen
    assert net.conv_first.weight.is_contiguous()


def test_measuring_a_layout_leaves_no_trace():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(), nn.Conv2d(4, 3, 3))
    images = torch.rand(2, 3, 8, 8)
    before, state = deepcopy(net.state_dict()), torch.get_rng_state()
    channels_last_is_faster(net, [images], nullcontext())
    assert differences(before, net.state_dict()) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.is_contiguous() for p in net.parameters())


@pytest.mark.parametrize('chosen', [False, True])
def test_a_measured_layout_trains_as_one_that_is_given_and_is_resumed(
    run, train_opt, monkeypatch, chosen
):
    asked = []

    def measure(net, inputs, autocast):
        asked.append(tuple(inputs[0].shape))
        return chosen

    monkeypatch.setattr('basicsr.models.base_model.channels_last_is_faster', measure)
    given = run(train_opt(name='given', train__channels_last=chosen, train__accumulate=2))
    options = {'train__channels_last': 'auto', 'train__accumulate': 2}
    whole = run(train_opt(name='whole', **options))
    run(train_opt(name='cut', train__total_iter=4, **options))
    cut = run(train_opt(name='cut', **options), '--auto_resume')
    assert asked == [(1, 3, 8, 8)] * 2, 'once a run, on a part of its batch, and never on a resume'
    assert checkpoint(cut, '6.state')['channels_last'] is chosen
    for name in ('6.state', 'net_g_6.pth'):
        assert differences(checkpoint(whole, name), checkpoint(cut, name)) == []
    a, b = (checkpoint(folder, 'net_g_6.pth')['params'] for folder in (given, whole))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize(('first', 'then'), [(False, True), (True, False), (False, 'auto')])
def test_a_resume_may_change_the_layout(run, train_opt, monkeypatch, first, then):
    """Moments keep to their places: fused optimizers do not look at strides."""
    monkeypatch.setattr('basicsr.models.base_model.channels_last_is_faster', lambda *_: True)
    options = {'network_g': {'type': 'MSRResNet', 'num_feat': 4, 'num_block': 1, 'upscale': 2}}
    options['train__optim_g'] = {'type': 'Adam', 'lr': 1e-2}
    plain = run(train_opt(name='plain', **options))
    run(train_opt(name='cut', train__total_iter=4, train__channels_last=first, **options))
    state_file = plain.parent / 'cut/training_states/4.state'
    state = torch.load(state_file, weights_only=True)
    if then == 'auto':
        del state['channels_last']  # as of a version that did not have it
        torch.save(state, state_file)
    cut = run(train_opt(name='cut', train__channels_last=then, **options), '--auto_resume')
    a, b = (checkpoint(folder, 'net_g_6.pth')['params'] for folder in (plain, cut))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=2e-3)


def test_networks_that_have_been_trained_change_their_layout_with_their_moments(
    run, train_opt, monkeypatch
):
    monkeypatch.setattr('basicsr.models.base_model.channels_last_is_faster', lambda *_: True)

    def weights(name, **more):
        opt = adversarial(train_opt(name=name, train__net_d_init_iters=3, **more))
        opt['train']['optim_d'] = {'type': 'Adam', 'lr': 1e-2}
        return checkpoint(run(opt), 'net_d_6.pth')['params']

    given, chosen = weights('given'), weights('chosen', train__channels_last='auto')
    for key in given:
        torch.testing.assert_close(given[key], chosen[key], rtol=0, atol=2e-3)


@pytest.mark.parametrize('options', [{'foo': 1}, {'mode': 'x'}])
def test_arguments_that_torch_compile_does_not_have_are_named(options):
    with pytest.raises(ValueError, match=r'train\.compile: .* are not arguments of torch\.compile'):
        prepare_for_training(network(), {'compile': options}, False)

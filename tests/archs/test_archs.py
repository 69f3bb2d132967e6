"""Build every network small and hold it to the contract of all; compare with the reference's.

A network joins by one line in NETWORKS.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import golden
import numpy as np
import pytest
import torch
from golden import recipe

from basicsr.archs import build_network

RECORDED = json.loads((Path(__file__).parent / 'state_dicts.json').read_text(encoding='utf-8'))
STATES = json.loads((recipe.HERE / 'archs_state.json').read_text(encoding='utf-8'))


class Tiny(NamedTuple):
    """The options of a small network, and what they make of its input (1, 3, h, w)."""

    options: dict
    scale: int = 1  # height of the output over that of the input
    out_channels: int = 3


RGB = {'num_in_ch': 3, 'num_out_ch': 3}
ECB = RGB | {'num_block': 1, 'num_channel': 4, 'scale': 2}
RRDB = RGB | {'num_feat': 8, 'num_block': 1, 'num_grow_ch': 4}
RCAB = RGB | {'num_feat': 8, 'num_group': 1, 'num_block': 2}
EAM = {'in_channels': 3, 'mid_channels': 8, 'out_channels': 3, 'num_block': 1}
SWIN = {'embed_dim': 8, 'depths': [2], 'num_heads': [2], 'window_size': 4}

NETWORKS = {
    'MSRResNet-x2': Tiny({'num_feat': 8, 'num_block': 1, 'upscale': 2}, 2),
    'MSRResNet-x3': Tiny({'num_feat': 8, 'num_block': 1, 'upscale': 3}, 3),
    'MSRResNet-x4': Tiny({'num_feat': 8, 'num_block': 1, 'upscale': 4}, 4),
    'EDSR-x1': Tiny(RGB | {'num_feat': 8, 'num_block': 1, 'upscale': 1}, 1),
    'EDSR-x3': Tiny(RGB | {'num_feat': 8, 'num_block': 1, 'upscale': 3}, 3),
    'EDSR-x4': Tiny(RGB | {'num_feat': 8, 'num_block': 1, 'upscale': 4}, 4),
    'RCAN-x2': Tiny(RCAB | {'upscale': 2}, 2),
    'RRDBNet-x1': Tiny(RRDB | {'scale': 1}, 1),
    'RRDBNet-x2': Tiny(RRDB | {'scale': 2}, 2),
    'RRDBNet-x4': Tiny(RRDB | {'scale': 4}, 4),
    'SRVGGNetCompact-x1': Tiny({'num_feat': 8, 'num_conv': 1, 'upscale': 1}, 1),
    'SRVGGNetCompact-x4': Tiny({'num_feat': 8, 'num_conv': 1, 'upscale': 4}, 4),
    'ECBSR-x2': Tiny(ECB | {'with_idt': False, 'act_type': 'prelu'}, 2),
    'ECBSR-x2-identity': Tiny(ECB | {'with_idt': True, 'act_type': 'relu'}, 2),
    'RIDNet': Tiny(EAM),
    'UNetDiscriminatorSN': Tiny({'num_in_ch': 3, 'num_feat': 4}, 1, 1),
    'SwinIR-x2': Tiny(SWIN | {'upsampler': 'pixelshuffledirect', 'upscale': 2}, 2),
}

# test_video_archs.py holds these to their own contract.
VIDEO = {'SpyNet', 'TOFlow', 'DUF', 'EDVR', 'BasicVSR', 'IconVSR', 'BasicVSRPlusPlus'}

every_network = pytest.mark.parametrize('name', NETWORKS)


def build(name, **options):
    torch.manual_seed(0)
    return build_network({'type': name.partition('-')[0], **NETWORKS[name].options, **options})


def image(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@every_network
@pytest.mark.parametrize('size', [(17, 23), (8, 8), (5, 40), (1, 1)])
@torch.no_grad()
def test_output_is_exactly_scale_times_an_input_of_any_size(name, size):
    _, scale, channels = NETWORKS[name]
    out = build(name).eval()(image(1, 3, *size))
    assert out.shape == (1, channels, size[0] * scale, size[1] * scale)
    assert out.isfinite().all()


@every_network
def test_every_trainable_parameter_and_the_input_get_a_finite_gradient(name):
    net = build(name)
    x = image(2, 3, 12, 9).requires_grad_()
    net(x).square().mean().backward()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    for tensor in [x, *trained.values()]:
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert x.grad.any()
    # A constant before a Sobel or Laplace filter, of ECBSR, may have none but zeros, and so may
    # the gates of RCAN, of one channel: a ReLU that is off.
    zero = [name for name, p in trained.items() if not p.grad.any()]
    assert [name for name in zero if not name.endswith('.b0') and '.attention.' not in name] == []


@every_network
@torch.no_grad()
def test_saved_weights_make_another_instance_equal(name, tmp_path):
    net, other = build(name), build(name)
    for parameter in other.parameters():
        parameter.add_(1)
    torch.save(net.state_dict(), tmp_path / 'net.pth')
    other.load_state_dict(torch.load(tmp_path / 'net.pth', weights_only=True), strict=True)
    x = image(1, 3, 12, 9)
    assert torch.equal(net.eval()(x), other.eval()(x))


@every_network
@pytest.mark.parametrize(
    ('dtype', 'tolerance'), [(torch.float64, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
@torch.no_grad()
def test_other_precisions_give_nearly_the_same_output_in_their_type(name, dtype, tolerance):
    net, x = build(name), image(1, 3, 12, 9)
    for _ in range(5):  # spectral norms are settled by training steps
        net(x)
    want = net.eval()(x)
    out = net.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert (out.float() - want).norm() <= tolerance * want.norm()


@every_network
def test_autocast_runs_forward_and_backward(name):
    net = build(name)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = net(image(1, 3, 12, 9))
    out.float().mean().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize('channels', [(1, 1), (4, 4), (1, 3), (3, 1), (4, 3)])
@pytest.mark.parametrize(
    ('name', 'names'),
    [
        ('MSRResNet-x2', ('num_in_ch', 'num_out_ch')),
        ('EDSR-x3', ('num_in_ch', 'num_out_ch')),
        ('RCAN-x2', ('num_in_ch', 'num_out_ch')),
        ('RRDBNet-x2', ('num_in_ch', 'num_out_ch')),
        ('SRVGGNetCompact-x4', ('num_in_ch', 'num_out_ch')),
        ('ECBSR-x2', ('num_in_ch', 'num_out_ch')),
        ('RIDNet', ('in_channels', 'out_channels')),
    ],
)
@torch.no_grad()
def test_input_and_output_have_the_channels_that_the_options_say(name, names, channels):
    net = build(name, **dict(zip(names, channels, strict=True)))
    scale = NETWORKS[name].scale
    out = net(image(1, channels[0], 9, 10))
    assert out.shape == (1, channels[1], 9 * scale, 10 * scale)


def test_build_network_leaves_its_options_as_they_are(caplog):
    opt = {'type': 'EDSR', 'rgb_mean': [0.5, 0.5, 0.5], **RGB, 'num_feat': 4, 'num_block': 1}
    before = json.dumps(opt)
    with caplog.at_level(logging.INFO):
        net = build_network(opt)
        build_network(opt)
    assert type(net).__name__ == 'EDSR'
    assert json.dumps(opt) == before
    assert caplog.messages == ['Network [EDSR] is created.'] * 2


def test_build_network_says_which_options_a_wrong_argument_came_from():
    opt = {'type': 'SRVGGNetCompact', 'num_feet': 4}
    with pytest.raises(TypeError, match='num_feet') as caught:
        build_network(opt)
    assert caught.value.__notes__ == [f"while building arch 'SRVGGNetCompact' from {opt}"]


def test_build_network_suggests_a_name_for_a_misspelt_type():
    with pytest.raises(KeyError, match='Did you mean MSRResNet'):
        build_network({'type': 'MSRResNett'})


def test_build_network_asks_for_a_type():
    with pytest.raises(KeyError, match="have no 'type', the name of the arch"):
        build_network({'num_feat': 64})


def test_importing_the_package_imports_neither_networks_nor_torchvision():
    code = (
        'import sys, basicsr.archs, basicsr.archs.arch_util;'
        'archs = [m for m in sys.modules if m.startswith("basicsr") and m.endswith("_arch")];'
        'print(archs + [m for m in sys.modules if m == "torchvision"])'
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ('[]', '')


def is_ours(case):
    images = {name.partition('-')[0] for name in NETWORKS}
    return case['network'] in images | {'VGGStyleDiscriminator'} | VIDEO


@pytest.mark.parametrize('case', golden.params('archs', is_ours))
def test_keys_and_shapes_of_the_weights_are_the_references(case):
    with torch.device('meta'):
        net = build_network(case['net'] | {'type': case['network']})
    shapes = {name: list(value.shape) for name, value in net.state_dict().items()}
    assert shapes == STATES[case['state']]


@pytest.mark.parametrize(
    'case', golden.params('archs', lambda c: is_ours(c) and not c.get('structure_only'))
)
def test_outputs_and_gradients_are_the_references(case):
    net = build_network(case['net'] | {'type': case['network']})
    assert recipe.compare(case, golden.forward(net, case)) is None


def recorded_id(entry):
    return '-'.join(str(value) for value in entry['network'].values())


@pytest.mark.parametrize('entry', RECORDED, ids=recorded_id)
def test_weights_have_the_recorded_order_and_number(entry):
    with torch.device('meta'):
        net = build_network(entry['network'])
    state = [[name, list(value.shape)] for name, value in net.state_dict().items()]
    assert len(state) == entry['num_keys']
    assert sum(p.numel() for p in net.parameters()) == entry['num_params']
    if 'state' in entry:
        assert state == entry['state']


@torch.no_grad()
def fill_with_cosines(net, gain):
    """The weights with which the outputs of state_dicts.json were recorded."""
    parameters = dict(net.named_parameters())
    for i, name in enumerate(sorted(parameters)):
        parameter = parameters[name]
        if name.endswith('.mask'):
            continue
        fan = parameter[0].numel() if parameter.ndim > 1 else 4
        value = gain * np.cos(0.7 * np.arange(parameter.numel()) + 0.3 * i) / np.sqrt(fan)
        if parameter.ndim == 1 and name.endswith('.weight'):
            value = 1 + 0.1 * value
        parameter.copy_(torch.from_numpy(value).reshape(parameter.shape))
    for conv in (m for m in net.modules() if hasattr(m, 'weight_orig')):
        weight = conv.weight_orig.flatten(1)
        u = torch.ones(len(weight), dtype=weight.dtype)
        for _ in range(200):
            v = torch.nn.functional.normalize(weight.T @ u, dim=0)
            u = torch.nn.functional.normalize(weight @ v, dim=0)
        conv.weight_u.copy_(u)
        conv.weight_v.copy_(v)
    return net


def with_output(entry):
    """An entry as a parameter; most networks for video take long in double precision."""
    is_slow = entry['network']['type'] in VIDEO - {'EDVR'}
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(entry, id=recorded_id(entry), marks=marks)


@pytest.mark.parametrize('entry', [with_output(e) for e in RECORDED if 'output' in e])
@torch.no_grad()
def test_double_precision_outputs_are_the_recorded_ones(entry):
    single = entry['network']['type'] == 'ECBSR'  # recorded in float32
    net = build_network(entry['network']).to(torch.float32 if single else torch.float64)
    fill_with_cosines(net, entry['gain'])
    inputs = entry['input'] if isinstance(entry['input'][0], list) else [entry['input']]
    waves = [0.9 * np.arange(np.prod(shape)) + 0.5 * i for i, shape in enumerate(inputs)]
    xs = [0.5 + 0.4 * np.sin(x).reshape(shape) for x, shape in zip(waves, inputs, strict=True)]
    xs = [torch.from_numpy(x).to(torch.float32 if single else torch.float64) for x in xs]
    out, want = net.eval()(*xs).double(), entry['output']
    flat = out.flatten()
    samples = flat[[j * (flat.numel() - 1) // 4 for j in range(5)]].tolist()
    tolerance = {'rel': 1e-5 if single else 1e-9, 'abs': 1e-5 if single else 1e-9}
    assert list(out.shape) == want['shape']
    assert samples == pytest.approx(want['samples'], **tolerance)
    assert flat.sum().item() == pytest.approx(want['sum'], **tolerance)
    assert flat.square().mean().item() == pytest.approx(want['mean_square'], **tolerance)

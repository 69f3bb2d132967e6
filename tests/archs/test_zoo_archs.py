"""Modern networks: the contract of all of them, and the numbers of their reference implementations.

A network joins by its lines in NETWORKS.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

import golden
import pytest
import torch
from golden import recipe

from basicsr.archs import build_network
from basicsr.models.preparation import prepare_for_training

STATES = json.loads((recipe.HERE / 'zoo_state.json').read_text(encoding='utf-8'))
PUBLISHED = json.loads(Path(__file__).with_name('zoo.json').read_text(encoding='utf-8'))


class Tiny(NamedTuple):
    """The options of a small network, and what they make of its input (1, channels, h, w)."""

    options: dict
    scale: int = 1  # height of the output over that of the input
    channels: int = 3
    smallest: int = 1  # shortest side of an input


NETWORKS: dict[str, Tiny] = {}

every_network = pytest.mark.parametrize('name', NETWORKS)


def build(name, **options):
    torch.manual_seed(0)
    return build_network({'type': name.partition('-')[0], **NETWORKS[name].options, **options})


def image(name, height=17, width=23, batch=1):
    shape = batch, NETWORKS[name].channels, height, width
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@every_network
@torch.no_grad()
def test_output_is_exactly_scale_times_an_input_of_any_size(name):
    _, scale, channels, smallest = NETWORKS[name]
    net = build(name).eval()
    for height, width in [(17, 23), (40, 16), (smallest, smallest)]:
        out = net(image(name, max(height, smallest), max(width, smallest)))
        size = max(height, smallest) * scale, max(width, smallest) * scale
        assert out.shape == (1, channels, *size)
        assert out.isfinite().all()


@every_network
def test_every_trainable_parameter_and_the_input_get_a_finite_gradient(name):
    net = golden.fill(build(name), {})  # branches that start as nothing take part
    x = image(name, 24, 24, batch=2).requires_grad_()
    net(x).square().mean().backward()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert [key for key, p in trained.items() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in trained.values())
    assert x.grad.isfinite().all()
    assert x.grad.any()


@every_network
def test_autocast_and_bfloat16_give_nearly_the_same_output(name):
    net, x = build(name).eval(), image(name, 24, 24)
    with torch.no_grad():
        want = net(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = net(x)
    out.float().mean().backward()
    assert (out.float() - want).norm() <= 0.05 * want.norm()
    with torch.no_grad():
        half = net.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - want).norm() <= 0.1 * want.norm()


@every_network
def test_channels_last_gives_the_same_output(name):
    net, x = build(name).eval(), image(name, 24, 24)
    with torch.no_grad():
        want = net(x)
        out = net.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert torch.allclose(out, want, rtol=1e-4, atol=1e-5)


@every_network
def test_blocks_that_are_computed_twice_give_the_same_gradients(name, caplog):
    x, found = image(name, 24, 24, batch=2), []
    caplog.set_level(logging.INFO)
    for twice in (False, True):
        net = build(name).train()
        prepare_for_training(net, {'checkpoint_activations': twice}, False)
        torch.manual_seed(2)  # of drop paths
        net(x).square().mean().backward()
        found.append([p.grad for p in net.parameters() if p.requires_grad])
    assert 'recomputed in the backward pass' in caplog.text
    for plain, again in zip(*found, strict=True):
        assert torch.allclose(plain, again, rtol=1e-4, atol=1e-6)


def is_ours(case):
    return case['network'] in {name.partition('-')[0] for name in NETWORKS}


@pytest.mark.parametrize('case', golden.params('zoo', is_ours))
def test_keys_and_shapes_of_the_weights_are_the_references(case):
    with torch.device('meta'):
        net = build_network(case['net'] | {'type': case['network']})
    shapes = {name: list(value.shape) for name, value in net.state_dict().items()}
    assert shapes == STATES[case['state']]


@pytest.mark.parametrize(
    'case', golden.params('zoo', lambda c: is_ours(c) and not c.get('structure_only'))
)
def test_outputs_and_gradients_are_the_references(case):
    net = build_network(case['net'] | {'type': case['network']})
    assert recipe.compare(case, golden.forward(net, case)) is None


def digest(value):
    text = json.dumps(value, separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    'entry',
    [
        pytest.param(e, id=f'{e["type"]}-{e["id"]}')
        for e in PUBLISHED
        if e['type'] in {name.partition('-')[0] for name in NETWORKS}
    ],
)
def test_a_published_configuration_has_the_published_weights_in_their_order(entry):
    with torch.device('meta'):
        net = build_network({'type': entry['type'], **entry['options']})
    state = [[name, list(value.shape)] for name, value in net.state_dict().items()]
    assert digest(sorted(state)) == entry['digest']
    assert sum(p.numel() for p in net.parameters()) == entry['params']
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == entry['trainable']
    if 'order' in entry:
        names = json.dumps([name for name, _ in state])
        assert hashlib.sha256(names.encode()).hexdigest()[:16] == entry['order']

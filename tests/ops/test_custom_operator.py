"""The operator of the guide: what docs/extending.md shows of torch.library holds."""

import re
import sys

import pytest
import torch
from runs import log_text, rows

from basicsr.utils.registry import ARCH_REGISTRY, import_plugins


@pytest.fixture
def guide(repository):
    """The two blocks of the guide: the plug-in, and how it is checked."""
    text = (repository / 'docs' / 'extending.md').read_text(encoding='utf-8')
    section = text.split('\n## An operator of your own\n')[1].split('\n## ')[0]
    return re.findall(r'^```python\n(.*?)^```$', section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def scale_add(guide, tmp_path):
    (tmp_path / 'operator_arch.py').write_text(guide[0])
    import_plugins([tmp_path])
    return sys.modules['operator_arch'].scale_add


def tensors(*shape, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2)]


def test_the_checks_of_the_guide_pass(scale_add, guide):
    exec(guide[1], {'torch': torch, 'scale_add': scale_add})


@pytest.mark.parametrize('shape', [(), (3,), (2, 3, 4, 5)])
def test_registration_and_gradients_are_right(scale_add, shape):
    results = torch.library.opcheck(scale_add, tensors(*shape))
    assert set(results.values()) == {'SUCCESS'}
    assert torch.autograd.gradcheck(scale_add, tensors(*shape))


def test_it_is_twice_the_first_plus_the_second(scale_add):
    x, y = tensors(2, 3, 4, 5, dtype=torch.float32)
    assert torch.equal(scale_add(x, y), 2 * x + y)


def test_compiling_keeps_it_in_one_graph_with_its_gradients(scale_add):
    x, y = tensors(4, 6)
    compiled = torch.compile(
        lambda x, y: scale_add(x, y).sin().sum(), backend='aot_eager', fullgraph=True
    )
    got = torch.autograd.grad(compiled(x, y), (x, y))
    torch.testing.assert_close(got, torch.autograd.grad((2 * x + y).sin().sum(), (x, y)))


@pytest.mark.parametrize('compile', [False, {'backend': 'aot_eager', 'fullgraph': True}])
def test_a_network_with_it_trains(scale_add, run, train_opt, compile):
    opt = train_opt(plugins=['.'], train__total_iter=2, train__compile=compile)
    opt['network_g'] = {'type': 'ScaleAddNet', 'upscale': 2}
    folder = run(opt)
    assert 'Network [ScaleAddNet] is created.' in log_text(folder)
    assert len([row for row in rows(folder) if 'losses/l_pix' in row]) == 2


def test_the_network_adds_twice_its_correction(scale_add):
    net = ARCH_REGISTRY.get('ScaleAddNet')(4, 2).eval()
    x = torch.rand(1, 3, 5, 6)
    enlarged = torch.nn.functional.interpolate(x, scale_factor=2, mode='bilinear')
    torch.testing.assert_close(net(x), 2 * net.correction(x) + enlarged)

import copy

import pytest
import torch

from basicsr.archs.ecbsr_arch import ECB, ECBSR, SeqConv3x3

SEQ_TYPES = ['conv1x1-conv3x3', 'conv1x1-sobelx', 'conv1x1-sobely', 'conv1x1-laplacian']


def image(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def block(**options):
    """A block whose branches all matter (scales start near zero)."""
    torch.manual_seed(0)
    ecb = ECB(4, 4, 2.0, **options)
    for parameter in ecb.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    return ecb


@pytest.mark.parametrize('seq_type', SEQ_TYPES)
@torch.no_grad()
def test_one_convolution_does_the_work_of_the_sequence(seq_type):
    torch.manual_seed(0)
    sequence = SeqConv3x3(seq_type, 3, 5, 2.0)
    x = image(1, 3, 6, 7)
    merged = torch.nn.functional.conv2d(x, *sequence.rep_params(), padding=1)
    assert torch.allclose(merged, sequence(x), atol=1e-5)


@pytest.mark.parametrize(
    ('seq_type', 'direction'),
    [('conv1x1-sobelx', 'left minus right'), ('conv1x1-sobely', 'top minus bottom')],
)
def test_edge_filters_point_left_and_up(seq_type, direction):
    mask = SeqConv3x3(seq_type, 1, 1).mask[0, 0]
    along = mask.sum(0) if direction == 'left minus right' else mask.sum(1)
    assert along.tolist() == [4, 0, -4]


def test_an_unknown_sequence_lists_the_choices():
    with pytest.raises(ValueError, match=r"'conv1x1-prewitt' is unknown; choose one of .*sobelx"):
        SeqConv3x3('conv1x1-prewitt', 3, 3)


def test_an_unknown_activation_lists_the_choices():
    with pytest.raises(ValueError, match=r"'gelu' is unknown; choose one of .*'prelu'"):
        ECBSR(3, 3, 1, 4, False, 'gelu', 2)


def test_the_block_and_its_gradients_are_those_of_the_sum_of_its_branches():
    merged = block(act_type='linear', with_idt=True).double()
    branches = copy.deepcopy(merged)
    x = image(1, 4, 6, 7).double()
    out = merged(x)
    want = sum(branch(x) for branch in branches.children() if branch is not branches.act) + x
    assert torch.allclose(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(merged.parameters(), branches.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.allclose(a.grad, b.grad)


@pytest.fixture
def merges(monkeypatch):
    """The list of blocks merged so far."""
    merged, rep_params = [], ECB.rep_params
    monkeypatch.setattr(ECB, 'rep_params', lambda ecb: merged.append(ecb) or rep_params(ecb))
    return merged


@torch.no_grad()
def test_evaluation_merges_each_block_once(merges):
    net = ECBSR(1, 1, 2, 4, False, 'prelu', 2).eval()
    x = image(1, 1, 6, 7)
    first = net(x)
    keys = list(net.state_dict())
    assert all(torch.equal(net(x), first) for _ in range(3))
    assert len(merges) == 4
    assert list(net.state_dict()) == keys


def edit_in_place(net):
    net.conv3x3.weight.add_(1)


def edit_data_then_eval(net):
    net.conv3x3.weight.data.add_(1)
    net.eval()


def load(net):
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def load_by_assignment(net):
    state = {name: value + 1 for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


@torch.no_grad()
@pytest.mark.parametrize('change', [edit_in_place, edit_data_then_eval, load, load_by_assignment])
def test_a_changed_parameter_is_merged_again(change):
    net, x = block().eval(), image(1, 4, 6, 7)
    before = net(x)
    change(net)
    after = net(x)
    assert not torch.allclose(after, before)
    assert torch.equal(after, net.train()(x))


def test_evaluation_with_gradients_is_differentiable_after_one_without():
    net, x = block().eval(), image(1, 4, 6, 7)
    with torch.no_grad():
        net(x)
    net(x).sum().backward()
    assert net.conv1x1_sbx.k0.grad.abs().sum() > 0


@torch.no_grad()
def test_precision_can_change_after_evaluation_and_a_copy_stays_independent():
    net, x = block().eval(), image(1, 4, 6, 7)
    want = net(x)
    other = copy.deepcopy(net).double()
    assert torch.allclose(other(x.double()).float(), want, atol=1e-5)
    other.conv3x3.weight.add_(1)
    assert not torch.allclose(other(x.double()).float(), want)
    assert torch.equal(net(x), want)


@torch.inference_mode()
def test_a_network_built_and_run_in_inference_mode_works():
    net = ECBSR(3, 3, 1, 4, True, 'relu', 2).eval()
    assert net(image(1, 3, 5, 6)).shape == (1, 3, 10, 12)
    assert torch.equal(net(image(1, 3, 5, 6)), net(image(1, 3, 5, 6)))


@torch.no_grad()
def test_autocast_does_not_leave_a_coarse_kernel_behind():
    net, x = block().eval(), image(1, 4, 6, 7)
    want = copy.deepcopy(net)(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        net(x)
    assert torch.equal(net(x), want)


def test_edge_filters_are_frozen_parameters():
    net = ECBSR(1, 1, 1, 4, False, 'prelu', 2)
    frozen = {name.split('.')[-1] for name, p in net.named_parameters() if not p.requires_grad}
    assert frozen == {'mask'}


def test_a_randomised_slope_is_random_in_training_only():
    net, x = ECBSR(3, 3, 2, 4, False, 'rrelu', 2), image(1, 3, 5, 6)
    assert not torch.equal(net.train()(x), net(x))
    assert torch.equal(net.eval()(x), net(x))

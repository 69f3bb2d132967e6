"""Files of weights that are not of the network: one line says what they are and what to do."""

import pytest
import torch
from runs import differences
from torch.optim.swa_utils import AveragedModel

from basicsr.archs import build_network, load_network_from
from basicsr.models.base_model import BaseModel
from basicsr.models.state import load_weights
from basicsr.utils.checkpoint import save_checkpoint

ONE = torch.ones(2, 3)


def compact(scale=4, **options):
    return build_network({'type': 'SRVGGNetCompact', 'num_feat': 4, 'upscale': scale, **options})


def edsr(scale, **options):
    size = {'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 3}
    return build_network({'type': 'EDSR', 'upscale': scale, **size, **options})


def rrdb(scale):
    size = {'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 1, 'num_grow_ch': 2}
    return build_network({'type': 'RRDBNet', 'scale': scale, **size})


def discriminator(kind, **options):
    return build_network({'type': kind, 'num_in_ch': 3, 'num_feat': 4, **options})


@pytest.fixture
def load(tmp_path):
    """Load a file with that content into a network, as the one with that label."""
    path = {'models': str(tmp_path)}
    model = BaseModel({'num_gpu': 0, 'is_train': True, 'dist': False, 'path': path, 'scale': 4})

    def call(net, content, label='g', **options):
        torch.save(content, tmp_path / 'x.pth')
        setattr(model, f'net_{label}', net)
        model.load_network(net, tmp_path / 'x.pth', **options)

    return call


# ---------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (lambda s: {**s, 'step': 3}, 'has non-tensors, which are left out: step'),
        (lambda s: {'params': {**s, 'step': None}}, 'has non-tensors, which are left out: step'),
        (lambda s: {**s, 4: 5, None: None}, 'has non-tensors, which are left out: 4, None'),
        (lambda s: {4: 5, 'state_dict': s}, r'it has: 4, state_dict'),
        (
            lambda s: {'state_dict': {f'net_g.{k}': v for k, v in s.items()} | {'net_d.a': ONE}},
            'prefix net_g. are used, without it; 1 others are not',
        ),
    ],
)
def test_what_is_beside_the_weights_is_named_and_left_out(load, change, said, caplog):
    net, other = compact(), compact()
    load(net, change(other.state_dict()))
    assert differences(dict(net.state_dict()), dict(other.state_dict())) == []
    assert said in caplog.text


def test_the_average_that_torch_makes_is_read(load, caplog):
    """Its names begin with ``module.``, and there is ``n_averaged`` beside them."""
    net, other = compact(), compact()
    load(net, AveragedModel(other).state_dict())
    assert differences(dict(net.state_dict()), dict(other.state_dict())) == []
    assert 'prefix module. are used, without it; 1 others' in caplog.text


def test_a_safetensors_file_of_another_name_is_read(tmp_path):
    net, other = compact(), compact()
    save_checkpoint({'params': other.state_dict()}, tmp_path / 'y.safetensors')
    (tmp_path / 'y.safetensors').rename(tmp_path / 'y.pth')
    load_weights(net, tmp_path / 'y.pth')
    assert differences(dict(net.state_dict()), dict(other.state_dict())) == []


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'', 'it has 0 bytes, .* Download it again'),
        (b'\n<!DOCTYPE html><html>404</html>', 'it is a web page .HTML., .* raw or download link'),
        (b'version https://git-lfs.github.com/spec/v1\noid sha256:0', 'git-lfs pointer.*lfs pull'),
    ],
)
@pytest.mark.parametrize('name', ['x.pth', 'x.safetensors'])
def test_what_is_no_checkpoint_at_all_is_named(tmp_path, content, message, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_network_from(tmp_path / name)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('strict', [True, False])
@pytest.mark.parametrize('kind', [torch.int64, torch.complex64])
def test_numbers_of_another_kind_are_no_weights(load, kind, strict):
    net = compact()
    state = {name: value.to(kind) for name, value in net.state_dict().items()}
    message = rf'holds body\.0\.weight as {str(kind)[6:]}, .* where the network has floats'
    with pytest.raises(ValueError, match=message):
        load(net, {'params': state}, strict=strict)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ({'params': {0: ONE, 'w': ONE}}, 'the name 0, but names of weights are strings'),
        ({'w': ONE.to('meta')}, 'w on the meta device, without values'),
        ({'w': torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8)}, 'w quantized: save what'),
        ({'params': {'w': ONE.to_sparse()}}, 'w as a sparse tensor: save what'),
        ({'params': {}}, 'It holds no weights'),
        ({'params': {'a.w': ONE, 'b.w': ONE * torch.nan}}, 'only NaN in b.w: its training div'),
        ({'model': {'params': {'w': ONE}}}, r"nested, at \['model'\]\['params'\]: save only these"),
        ({'params': {'net': {'w': ONE}}}, r"nested, at \['params'\]\['net'\]: save only these"),
        ({f'layer_{i}': i for i in range(900)}, 'layer_4 and 895 more. It holds no weights'),
        ({'net': {'w': ONE}, 'epoch': 3}, 'keys are net, epoch. Set path.param_key_. to net'),
        ({'epoch': 0, 'iter': 4, 'optimizers': []}, 'is a training state, .* models/net_g_4.pth'),
        ({'lengths': [0.05], 'averages': [{'w': ONE}]}, 'with basicsr average'),
        ({'a.body.0.bias': ONE, 'b.body.0.bias': ONE}, 'several such networks: set .* of a, b'),
    ],
)
@pytest.mark.parametrize('strict', [True, False])
def test_a_file_without_weights_for_a_network_is_named_in_a_line(load, content, message, strict):
    with pytest.raises(ValueError, match=message) as caught:
        load(compact(), content, strict=strict)
    assert len(str(caught.value).replace('\n', ' ')) < 500


@pytest.mark.parametrize('strict', [True, False])
@pytest.mark.parametrize('kind', ['UNetDiscriminatorSN', 'VGGStyleDiscriminator'])
def test_a_discriminator_is_none_to_load_in_part(load, kind, strict):
    message = f'a {kind}, a discriminator: path.pretrain_network_g needs one of this network'
    with pytest.raises(ValueError, match=message) as caught:
        load(compact(), {'params': discriminator(kind).state_dict()}, strict=strict)
    assert 'strict_load' not in str(caught.value)


def test_advice_names_the_option_of_the_network_that_is_loaded(load):
    net, other = (discriminator('VGGStyleDiscriminator', input_size=n) for n in (128, 256))
    with pytest.raises(ValueError, match='strict_load_d to false to load the 60 of 60'):
        load(net, {'params': other.state_dict()}, label='d')
    with pytest.raises(ValueError, match=r'another network: path\.pretrain_network_d'):
        load(net, {'params': compact().state_dict()}, label='d')


@pytest.mark.parametrize(
    ('net', 'other', 'message'),
    [
        (compact(4), compact(2), 'for x2: use one for x4'),
        (compact(4), compact(3), 'for x3: use one for x4'),
        (rrdb(4), rrdb(2), 'for x2: use one for x4'),  # the first layer differs
        (edsr(4), edsr(2), 'for another scale: use one for x4'),
        (edsr(4), edsr(3), 'for another scale: use one for x4'),
        (edsr(4), edsr(4, num_feat=6), 'network_g as it was when the file was trained, or set'),
    ],
)
def test_weights_for_another_scale_are_named(load, net, other, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(net, {'params': other.state_dict()})
    own, state = net.state_dict(), other.state_dict()
    count = sum(name in own and own[name].shape == value.shape for name, value in state.items())
    assert f'false to load the {count} of {len(own)} that fit' in str(caught.value)

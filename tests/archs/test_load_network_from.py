"""A checkpoint says which network it holds; other programs load it as before."""

from itertools import pairwise

import pytest
import torch

from basicsr.archs import build_network, load_network_from
from basicsr.utils.checkpoint import DESCRIPTION, description, save_checkpoint
from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY
from basicsr.utils.weights import convert

RGB = {'num_in_ch': 3, 'num_out_ch': 3}
COMPACT = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}
RRDB = {'type': 'RRDBNet', **RGB, 'num_feat': 8, 'num_block': 2}
SWIN = {'type': 'SwinIR', 'embed_dim': 8, 'depths': [2], 'num_heads': [2], 'window_size': 4}

# What spandrel calls the network, our options, the scale.
KNOWN_TO_SPANDREL = [
    ('ESRGAN', RRDB | {'scale': 4}, 4),
    ('ESRGAN', RRDB | {'scale': 2}, 2),
    ('ESRGAN', RRDB | {'scale': 1}, 1),
    ('ESRGAN', RRDB | {'num_in_ch': 1, 'num_out_ch': 1}, 4),
    ('RealESRGAN Compact', COMPACT | {'upscale': 4}, 4),
    ('RealESRGAN Compact', COMPACT | {'upscale': 1}, 1),
    ('RealESRGAN Compact', COMPACT | {'num_in_ch': 1, 'num_out_ch': 1}, 2),
    ('SwinIR', SWIN | {'upsampler': 'pixelshuffle', 'upscale': 3}, 3),
    ('SwinIR', SWIN | {'upsampler': 'pixelshuffledirect', 'upscale': 2}, 2),
    ('SwinIR', SWIN | {'upsampler': 'nearest+conv', 'upscale': 4}, 4),
    ('SwinIR', SWIN | {'upsampler': '', 'upscale': 1, 'resi_connection': '3conv'}, 1),
    ('SwinIR', SWIN | {'upsampler': '', 'in_chans': 1, 'window_size': 7, 'img_range': 255.0}, 1),
]

UNKNOWN_TO_SPANDREL = [
    {'type': 'MSRResNet', 'num_feat': 8, 'num_block': 1},
    {'type': 'EDSR', **RGB, 'num_feat': 8, 'num_block': 1},
    # It knows the one of the authors' program, which names its weights otherwise.
    {'type': 'RCAN', **RGB, 'num_feat': 16, 'num_group': 1, 'num_block': 2},
    {
        'type': 'ECBSR',
        **RGB,
        'num_block': 1,
        'num_channel': 4,
        'with_idt': True,
        'act_type': 'relu',
        'scale': 2,
    },
    {'type': 'RIDNet', 'in_channels': 3, 'mid_channels': 8, 'out_channels': 3, 'num_block': 1},
    {'type': 'UNetDiscriminatorSN', 'num_in_ch': 3, 'num_feat': 4},
    {'type': 'VGGStyleDiscriminator', 'num_in_ch': 3, 'num_feat': 4, 'input_size': 128},
]

VIDEO = [
    {'type': 'SpyNet'},
    {'type': 'TOFlow'},
    {'type': 'DUF', 'num_layer': 16},
    {'type': 'EDVR', 'num_feat': 8, 'num_frame': 7, 'num_reconstruct_block': 1},
    {'type': 'BasicVSR', 'num_feat': 8, 'num_block': 1},
    {'type': 'IconVSR', 'num_feat': 8, 'num_block': 1, 'keyframe_stride': 2},
    {'type': 'BasicVSRPlusPlus', 'mid_channels': 8, 'num_blocks': 1},
]

NETWORKS = [options for _, options, _ in KNOWN_TO_SPANDREL] + UNKNOWN_TO_SPANDREL + VIDEO


def image(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def inputs_of(options):
    if options['type'] == 'SpyNet':
        return [image(1, 3, 8, 8), image(1, 3, 8, 8)]
    if options in VIDEO:
        return [image(1, 7, 3, 8, 8)]
    channels = options.get('num_in_ch', options.get('in_chans', 3))
    return [image(1, channels, *[options.get('input_size', 12)] * 2)]


def state_of(net, factor=1.0):
    return {name: value * factor for name, value in net.state_dict().items()}


def described(options=COMPACT, **changes):
    """The content of a file of a network."""
    state = build_network(COMPACT).state_dict()
    return {'params': state, DESCRIPTION: description(options, 2) | changes}


@pytest.fixture
def file(tmp_path):
    return tmp_path / 'net_g_latest.pth'


@pytest.fixture
def write(file):
    def call(content):
        save_checkpoint(content, file)
        return file

    return call


def test_every_network_of_the_package_is_tried():
    ours = {net.__name__ for name, net in ARCH_REGISTRY if not ARCH_REGISTRY.is_users(name)}
    assert ours == {options['type'] for options in NETWORKS} | {'VGGFeatureExtractor'}


@pytest.mark.parametrize('ending', ['pth', 'safetensors'])
@pytest.mark.parametrize('options', NETWORKS, ids=lambda options: options['type'])
@torch.no_grad()
def test_every_network_is_built_again_with_its_weights(options, ending, tmp_path):
    net, file = build_network(options).eval(), tmp_path / f'net_g_6.{ending}'
    entry = description(options, None)
    save_checkpoint({'params': net.state_dict(), DESCRIPTION: entry}, file)
    loaded = load_network_from(str(file))
    assert type(loaded) is type(net)
    assert not loaded.training
    inputs = inputs_of(options)
    assert torch.equal(loaded(*inputs), net(*inputs))


@pytest.mark.parametrize(
    ('keys', 'param_key', 'used'),
    [
        (('params', 'params_swa', 'params_ema'), None, 'params_ema'),
        (('params_swa', 'params'), None, 'params'),
        (('params', 'params_swa', 'params_ema'), 'params', 'params'),
        (('params', 'params_swa', 'params_ema'), 'params_swa', 'params_swa'),
    ],
)
def test_the_averaged_weights_are_taken_unless_others_are_asked_for(write, keys, param_key, used):
    net = build_network(COMPACT)
    states = {key: state_of(net, factor) for factor, key in enumerate(keys, 1)}
    file = write({DESCRIPTION: description(COMPACT, 2), **states})
    loaded = load_network_from(file, param_key).state_dict()
    assert all(torch.equal(value, states[used][name]) for name, value in loaded.items())


def test_a_class_of_ones_own_is_built_once_it_is_registered(write, monkeypatch):
    class TwoConvs(torch.nn.Sequential):
        def __init__(self, widths=(3, 3)):
            super().__init__(*(torch.nn.Conv2d(a, b, 1) for a, b in pairwise(widths)))

    options = {'type': 'TwoConvs', 'widths': (3, 5, 3)}
    net = TwoConvs((3, 5, 3))
    file = write({'params': net.state_dict(), DESCRIPTION: description(options, 1)})
    message = r"No object named 'TwoConvs' found .*import_plugins\(\[folder\]\) does that"
    with pytest.raises(UserError, match=message):
        load_network_from(file)
    monkeypatch.setattr(ARCH_REGISTRY, '_obj_map', {'TwoConvs': TwoConvs})
    assert [conv.out_channels for conv in load_network_from(file)] == [5, 3]


@pytest.mark.parametrize(
    ('entry', 'key'),
    [
        ({}, "['params']"),
        ({DESCRIPTION: 'by hand'}, "['params']"),
        ({DESCRIPTION: {'version': '3'}}, "['params']"),
        ({DESCRIPTION: {'network': {'num_feat': 4}}}, "['params']"),
        (None, ''),
    ],
)
def test_a_file_that_does_not_name_its_network_says_what_to_do(write, entry, key):
    state = build_network(COMPACT).state_dict()
    file = write(state if entry is None else {'params': state, **entry})
    with pytest.raises(UserError) as caught:
        load_network_from(file)
    assert str(caught.value).startswith(f'{file} does not say which network it holds')
    assert str(caught.value).endswith(f'net.load_state_dict(load_checkpoint(file){key}).')


def changed(**options):
    return {DESCRIPTION: description({**COMPACT, **options}, 2)}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (changed(type='SRVGGNetCompakt'), "No object named 'SRVGGNetCompakt' .* mean SRVGGNet"),
        (changed(type=['EDSR']), 'cannot be built: unhashable'),
        (changed(num_feet=4), "cannot be built: SRVGGNetCompact: no argument 'num_feet'"),
        (changed(upscale=0), 'cannot be built: SRVGGNetCompact: upscale 0 must be'),
        (changed(num_feat=-4), 'cannot be built: '),
        (changed(num_feat='many'), 'cannot be built: '),
        (changed(num_feat=8), r"by basicsr 2\S+, does not fit .*'num_feat': 8.* size mismatch"),
        (changed(num_conv=2), 'does not fit the network .* Missing key'),
        ({'params': {}, 'params_ema': {'x': 1}}, 'does not fit the network'),
    ],
)
def test_a_network_that_cannot_be_built_or_does_not_fit_is_an_error(write, change, message):
    file = write({**described(), **change})
    with pytest.raises(UserError, match=message) as caught:
        load_network_from(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize('key', ['params_ema', DESCRIPTION, 'iter'])
def test_weights_that_are_not_there_are_an_error_that_names_those_that_are(write, key, caplog):
    file = write({**described(), 'params_swa': {}, 'iter': 3})
    caplog.clear()
    with pytest.raises(UserError, match=f"no weights '{key}'; it has: params, params_swa.$"):
        load_network_from(file, key)
    assert 'WARNING' not in caplog.text


def test_what_is_no_file_of_a_network_is_refused_by_what_it_is(write, file, tmp_path):
    with pytest.raises(FileNotFoundError, match='no checkpoint file'):
        load_network_from(file)
    with pytest.raises(UserError, match='is a training state, which holds no network weights'):
        load_network_from(write({'iter': 5, 'optimizers': [], 'epoch': 1}))
    with pytest.raises(UserError, match=r"no weights 'params'; it has: none\."):
        load_network_from(write([1, 2]), 'params')
    content = bytearray(write(described()).read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f'cannot load {file}: it is damaged'):
        load_network_from(file)


# ---------------------------------------------------------------------------- other programs


def test_a_program_that_takes_the_weights_by_their_key_loads_them(write):
    file = write(described())
    content = torch.load(file, weights_only=True)
    net = build_network(COMPACT)
    net.load_state_dict(content['params'], strict=True)
    assert content[DESCRIPTION] == {'network': COMPACT, 'scale': 2, 'version': '2.0.0'}


@pytest.fixture(scope='module')
def spandrel():
    import spandrel  # here, since it imports torchvision

    return spandrel


@pytest.mark.filterwarnings('ignore:torch.meshgrid')
@pytest.mark.parametrize('kind', ['pth', 'safetensors'])
@pytest.mark.parametrize(('name', 'options', 'scale'), KNOWN_TO_SPANDREL)
@torch.no_grad()
def test_spandrel_finds_the_same_network(spandrel, name, options, scale, kind, tmp_path):
    """A file as it is; as safetensors, the bare weights, which say what they are all the same."""
    net, file = build_network(options).eval(), tmp_path / 'net_g.pth'
    states = {'params': state_of(net, 0), 'params_ema': net.state_dict()}
    save_checkpoint({DESCRIPTION: description(options, scale), **states}, file)
    if kind == 'safetensors':
        convert(file, file := tmp_path / 'bare.safetensors', 'params_ema')
    found = spandrel.ModelLoader().load_from_file(file)
    x = image(1, found.input_channels, 12, 16)
    out = net(x)
    assert (found.architecture.name, found.scale) == (name, scale)
    assert torch.allclose(found.model.eval()(x), out, rtol=1e-5, atol=2e-6)
    assert torch.equal(load_network_from(file)(x), out)


@pytest.mark.parametrize('options', UNKNOWN_TO_SPANDREL, ids=lambda options: options['type'])
def test_spandrel_says_so_of_a_network_that_it_does_not_know(spandrel, options, write):
    state = build_network(options).state_dict()
    file = write({'params': state, DESCRIPTION: description(options, 4)})
    with pytest.raises(spandrel.UnsupportedModelError):
        spandrel.ModelLoader().load_from_file(file)


@pytest.mark.parametrize(
    ('options', 'error', 'message'),
    [
        (RRDB | {'num_grow_ch': 16}, RuntimeError, 'size mismatch for model.1.sub.0.RDB1.conv1'),
        (COMPACT | {'act_type': 'relu'}, None, None),
        (SWIN | {'ape': True}, RuntimeError, 'Unexpected key.* "absolute_pos_embed"'),
    ],
)
def test_spandrel_refuses_arguments_that_it_takes_for_granted(
    spandrel, options, error, message, write
):
    state = build_network(options).state_dict()
    file = write({'params': state, DESCRIPTION: description(options, 4)})
    with pytest.raises(error or spandrel.UnsupportedModelError, match=message):
        spandrel.ModelLoader().load_from_file(file)

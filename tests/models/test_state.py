"""Loading weights of any usual layout, whole or as far as they fit."""

import logging

import pytest
import torch
from runs import differences
from torch import nn

from basicsr.archs import build_network
from basicsr.models.base_model import BaseModel
from basicsr.utils.checkpoint import save_checkpoint


def weights_differ(*nets):
    return differences(*(dict(net.state_dict()) for net in nets))


NET = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}


@pytest.mark.parametrize('key', ['params', 'params_ema', 'state_dict', None])
@pytest.mark.parametrize('prefix', ['', 'module.', '_orig_mod.', 'module._orig_mod.'])
def test_weights_load_from_every_usual_layout(base_opt, tmp_path, key, prefix):
    net, other = build_network(NET), build_network(NET)
    state = {prefix + name: value for name, value in net.state_dict().items()}
    torch.save({key: state} if key else state, tmp_path / 'w.pth')
    BaseModel(base_opt).load_network(other, tmp_path / 'w.pth')
    for name, value in other.state_dict().items():
        assert torch.equal(value, net.state_dict()[name])


WRAPPED = ['model.', 'net_g.', 'generator._orig_mod.', 'module.net_g.', '_orig_mod.model.module.']


@pytest.mark.parametrize('prefix', WRAPPED)
@pytest.mark.parametrize('strict', [True, False])
def test_the_network_of_a_lightning_checkpoint_is_found(base_opt, tmp_path, prefix, strict, caplog):
    """Its names begin with an attribute's, and it holds much else."""
    net, other = build_network(NET), build_network(NET)
    state = {prefix + name: value for name, value in net.state_dict().items()}
    state |= {'net_d.conv0_0.weight': torch.zeros(3), 'criterion.body.0.mean': torch.zeros(1)}
    content = {'epoch': 3, 'state_dict': state, 'loops': {'fit_loop': {}}, 'optimizer_states': []}
    torch.save({'pytorch-lightning_version': '2.5', **content}, tmp_path / 'last.ckpt')
    BaseModel(base_opt).load_network(other, tmp_path / 'last.ckpt', strict)
    assert weights_differ(net, other) == []
    assert (
        f'only the keys with the prefix {prefix} are used, without it; 2 others are not'
        in caplog.text
    )


@pytest.mark.parametrize('ending', ['pth', 'safetensors'])
def test_one_of_several_networks_of_a_file_is_chosen_by_name(base_opt, tmp_path, ending, caplog):
    nets = {'net_g': build_network(NET), 'net_g_ema': build_network(NET)}
    state = {
        f'{key}.module.{name}': value
        for key, net in nets.items()
        for name, value in net.state_dict().items()
    }
    file, model, loaded = tmp_path / f'both.{ending}', BaseModel(base_opt), build_network(NET)
    save_checkpoint({'state_dict': state, 'epoch': 3} if ending == 'pth' else state, file)
    for key, net in nets.items():
        model.load_network(loaded, file, param_key=key)
        assert weights_differ(net, loaded) == []
    assert weights_differ(*nets.values()) != []
    assert [record for record in caplog.records if record.levelname == 'WARNING'] == []
    with pytest.raises(ValueError, match=r'several such networks: set path\.param_key_\*'):
        model.load_network(loaded, file)


def test_an_average_begins_with_the_weights_that_the_network_has_loaded(base_opt, tmp_path, caplog):
    """Also where the file has others under a usual key."""
    net = build_network(NET)
    content = {'mine': net.state_dict(), 'params': build_network(NET).state_dict()}
    torch.save(content, tmp_path / 'w.pth')
    base_opt['path'] |= {'pretrain_network_g': str(tmp_path / 'w.pth'), 'param_key_g': 'mine'}
    model = BaseModel({**base_opt, 'network_g': NET, 'train': {'ema_decay': 0.9}})
    with caplog.at_level(logging.INFO):
        model.add_network('g', ema=True)
    assert weights_differ(net, model.net_g) == weights_differ(net, model.net_g_ema) == []
    assert 'w.pth has no params_ema; the average of net_g begins with the weights' in caplog.text
    assert [record for record in caplog.records if record.levelname == 'WARNING'] == []


def test_a_file_without_the_key_asked_for_says_what_it_has(base_opt, tmp_path, caplog):
    net = build_network(NET)
    torch.save({'params': net.state_dict()}, tmp_path / 'w.pth')
    with caplog.at_level(logging.WARNING):
        BaseModel(base_opt).load_network(net, tmp_path / 'w.pth', param_key='params_ema')
    assert 'has no key params_ema; using params' in caplog.text
    torch.save({'weights': net.state_dict()}, tmp_path / 'w.pth')
    with pytest.raises(ValueError, match='its keys are weights'):
        BaseModel(base_opt).load_network(net, tmp_path / 'w.pth')


def test_a_layer_of_the_networks_own_called_module_survives(base_opt, tmp_path):

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Conv2d(1, 1, 1)

    model, net = BaseModel(base_opt), Net()
    model.save_network(net, 'net_g', 3)
    path = tmp_path / 'models/net_g_3.pth'
    assert list(torch.load(path, weights_only=True)['params']) == ['module.weight', 'module.bias']
    other = Net()
    model.load_network(other, path)
    assert torch.equal(other.module.weight, net.module.weight)


def test_strict_loading_names_file_keys_and_shapes(base_opt, tmp_path):
    torch.save({'params': build_network(NET).state_dict()}, tmp_path / 'x2.pth')
    wider = build_network(dict(NET, upscale=4))
    with pytest.raises(
        ValueError, match=r'x2\.pth does not fit SRVGGNetCompact: other shapes'
    ) as e:
        BaseModel(base_opt).load_network(wider, tmp_path / 'x2.pth')
    assert 'body.4.weight (12, 4, 3, 3) in the file, (48, 4, 3, 3) in the network' in str(e.value)
    assert 'strict_load' in str(e.value)


def test_loose_loading_takes_what_fits_and_reports_the_rest(base_opt, tmp_path, caplog):
    """Weights for x2 into a x4 network."""
    net, wider = build_network(NET), build_network(dict(NET, upscale=4))
    before = wider.state_dict()['body.4.weight'].clone()
    torch.save({'params': net.state_dict()}, tmp_path / 'x2.pth')
    with caplog.at_level(logging.INFO):
        BaseModel(base_opt).load_network(wider, tmp_path / 'x2.pth', strict=False)
    assert 'Loaded 6 of 8 keys (75 %)' in caplog.text
    assert 'body.4.weight' in caplog.text
    assert torch.equal(wider.state_dict()['body.0.weight'], net.state_dict()['body.0.weight'])
    assert torch.equal(wider.state_dict()['body.4.weight'], before)


TRANSFERS = {
    'EDSR': ('num_in_ch num_out_ch', 'upscale', ['upsample.2.weight', 'upsample.2.bias'], []),
    'MSRResNet': ('', 'upscale', ['upconv2.weight', 'upconv2.bias'], []),
    'RCAN': ('num_in_ch num_out_ch', 'upscale', ['upsample.2.weight', 'upsample.2.bias'], []),
    'RRDBNet': ('num_in_ch num_out_ch', 'scale', [], ['conv_first.weight']),
    'SwinIR': ('', 'upscale', ['upsample.2.weight', 'upsample.2.bias'], []),
}
SIZES = {
    'EDSR': {'num_feat': 4, 'num_block': 1},
    'MSRResNet': {'num_feat': 4, 'num_block': 1},
    'RCAN': {'num_feat': 4, 'num_group': 1, 'num_block': 1, 'squeeze_factor': 2},
    'RRDBNet': {'num_feat': 4, 'num_block': 1, 'num_grow_ch': 2},
    'SwinIR': {
        **{'img_size': 16, 'window_size': 8, 'depths': [2], 'num_heads': [2], 'embed_dim': 12},
        **{'mlp_ratio': 2, 'upsampler': 'pixelshuffle'},
    },
}


@pytest.mark.parametrize('name', TRANSFERS)
def test_weights_for_x2_begin_a_x4_network(base_opt, tmp_path, caplog, name):
    """All but what the scale adds or changes, and the report says which that is."""
    channels, scale, missing, unlike = TRANSFERS[name]
    options = {'type': name, **dict.fromkeys(channels.split(), 3), **SIZES[name]}
    source, target = (build_network(options | {scale: number}) for number in (2, 4))
    old = {key: value.clone() for key, value in target.state_dict().items()}
    torch.save({'params': source.state_dict()}, tmp_path / 'x2.pth')
    with caplog.at_level(logging.INFO):
        BaseModel(base_opt).load_network(target, tmp_path / 'x2.pth', strict=False)
    own, given = target.state_dict(), source.state_dict()
    left = {*missing, *unlike}
    assert own.keys() - left <= given.keys()
    assert all(torch.equal(own[key], (old if key in left else given)[key]) for key in own)
    assert f'Loaded {len(own) - len(left)} of {len(own)} keys' in caplog.text
    reported = [message for message in caplog.messages if message.startswith('Not loaded: ')]
    assert len(reported) == 1
    assert all(key in reported[0] for key in left)
    assert ('missing in the file' if missing else 'other shapes') in reported[0]


def test_loose_loading_of_nothing_is_an_error(base_opt, tmp_path):
    torch.save({'params': nn.Linear(2, 2).state_dict()}, tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='nothing that fits'):
        BaseModel(base_opt).load_network(build_network(NET), tmp_path / 'other.pth', strict=False)


def test_missing_and_damaged_files_are_named(base_opt, tmp_path):
    model, net = BaseModel(base_opt), build_network(NET)
    with pytest.raises(FileNotFoundError, match='absent.pth'):
        model.load_network(net, tmp_path / 'absent.pth')
    (tmp_path / 'cut.pth').write_bytes(b'PK\x03\x04 not much')
    with pytest.raises(ValueError, match='cut.pth: it is damaged'):
        model.load_network(net, tmp_path / 'cut.pth')

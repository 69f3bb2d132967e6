"""Files of networks: interpolated, averaged, stripped, and described."""

import hashlib

import pytest
import torch

from basicsr.archs import build_network, load_network_from
from basicsr.utils.checkpoint import description, load_checkpoint, save_checkpoint
from basicsr.utils.weights import check_target, combine, report, strip, what_fits

COMPACT = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}
ENTRY = {'basicsr': description(COMPACT, 2)}


def write(path, value, **more):
    save_checkpoint({'params': {'w': torch.full((2,), value), 'n': torch.tensor(3)}} | more, path)
    return path


def test_a_quarter_of_the_way_is_three_parts_of_a_and_one_of_b(tmp_path):
    a, b = write(tmp_path / 'a.pth', 1.0, **ENTRY), write(tmp_path / 'b.pth', 5.0)
    assert combine([a, b], [0.75, 0.25], tmp_path / 'c.safetensors') == ['params']
    made = load_checkpoint(tmp_path / 'c.safetensors')
    assert made['params']['w'].tolist() == [2.0, 2.0]
    assert made['params']['w'].dtype == torch.float32
    assert made['params']['n'].item() == 3
    assert made['basicsr'] == ENTRY['basicsr']


def test_the_mean_of_several_files_is_that_of_each_state_dict_they_share(tmp_path):
    state = {'w': torch.zeros(2), 'n': torch.tensor(3)}
    files = [
        write(tmp_path / f'{value:g}.pth', value, params_ema=state) for value in (1.0, 2.0, 6.0)
    ]
    assert combine(files, [1 / 3] * 3, tmp_path / 'mean.pth') == ['params', 'params_ema']
    made = load_checkpoint(tmp_path / 'mean.pth')
    torch.testing.assert_close(made['params']['w'], torch.full((2,), 3.0))
    assert made['params_ema']['w'].tolist() == [0.0, 0.0]


def test_weights_of_two_networks_are_not_mixed(tmp_path):
    a = write(tmp_path / 'a.pth', 1.0, **ENTRY)
    other = {'basicsr': description({**COMPACT, 'act_type': 'relu'}, 2)}
    b = write(tmp_path / 'b.pth', 1.0, **other)
    with pytest.raises(ValueError, match=r'a.pth holds .*, and .*b.pth holds .*same network'):
        combine([a, b], [0.5, 0.5], tmp_path / 'c.pth')
    save_checkpoint({'params': {'w': torch.ones(3), 'n': torch.tensor(3)}}, b)
    with pytest.raises(ValueError, match=r'names or shapes differ \(w\)'):
        combine([a, b], [0.5, 0.5], tmp_path / 'c.pth')
    save_checkpoint({'params_ema': {'w': torch.ones(2)}}, b)
    with pytest.raises(ValueError, match='no state dict in common'):
        combine([a, b], [0.5, 0.5], tmp_path / 'c.pth')
    assert not (tmp_path / 'c.pth').exists()


def test_files_that_are_there_are_replaced_only_if_that_is_asked_for(tmp_path):
    a = write(tmp_path / 'a.pth', 1.0)
    with pytest.raises(FileExistsError, match=r'a.pth exists: .* --overwrite'):
        check_target(a)
    strip(a, a, overwrite=True)
    assert load_checkpoint(a)['params']['w'].tolist() == [1.0, 1.0]


def test_what_is_stripped_to_publish_is_a_network_with_its_description(tmp_path):
    net = build_network(COMPACT)
    states = {'params': net.state_dict(), 'params_ema': net.state_dict(), 'epoch': 3}
    save_checkpoint(states | ENTRY, tmp_path / 'a.pth')
    file = strip(tmp_path / 'a.pth', tmp_path / 'mine.pth', with_hash=True)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert file.name == f'mine-{digest[:8]}.pth'
    assert load_checkpoint(file).keys() == {'params_ema', 'basicsr'}
    assert load_network_from(file).state_dict().keys() == net.state_dict().keys()
    assert strip(tmp_path / 'a.pth', tmp_path / 'b.pth', 'params') == tmp_path / 'b.pth'
    assert load_checkpoint(tmp_path / 'b.pth').keys() == {'params', 'basicsr'}
    with pytest.raises(ValueError, match="no state dict 'params_swa'"):
        strip(tmp_path / 'a.pth', tmp_path / 'c.pth', 'params_swa')
    assert {f.name for f in tmp_path.iterdir()} == {'a.pth', 'b.pth', file.name}


def test_a_file_is_described_by_entries_network_and_names(tmp_path):
    state = build_network(COMPACT).state_dict()
    save_checkpoint({'params': state, 'params_ema': state} | ENTRY, tmp_path / 'a.pth')
    lines = list(report(tmp_path / 'a.pth'))
    # 3x3 convolutions 3 -> 4 -> 4 -> 12 with biases, and four slopes of each of two PReLUs
    count = 9 * (3 * 4 + 4 * 4 + 4 * 12) + (4 + 4 + 12) + 2 * 4
    assert lines[1] == f'  params: 8 tensors, {count} numbers, float32'
    assert lines[3].startswith('Network: SRVGGNetCompact (num_feat: 4, num_conv: 1, upscale: 2)')
    assert lines[4] == 'Fits: SRVGGNetCompact, as described'
    assert lines[5] == 'params, params_ema:'
    assert lines[6] == '  body.0.weight  (4, 3, 3, 3)  float32'
    assert len(lines) == 6 + 8


@pytest.mark.parametrize('network', ['EDSR', {'num_feat': 4}, {'type': ['EDSR']}, None])
def test_a_description_that_is_none_is_told_and_no_error(tmp_path, network):
    state = build_network(COMPACT).state_dict()
    save_checkpoint({'params': state, 'basicsr': {'network': network}}, tmp_path / 'a.pth')
    lines = list(report(tmp_path / 'a.pth'))
    assert lines[2].startswith('Network: ')
    assert lines[3].startswith('Fits: ')


def test_what_is_no_network_is_named(tmp_path):
    save_checkpoint({'iter': 4, 'optimizers': [], 'epoch': 0}, tmp_path / '4.state')
    assert 'The file is a training state' in list(report(tmp_path / '4.state'))[-1]


@pytest.mark.parametrize(
    'options',
    [
        {'type': 'RRDBNet', 'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 8, 'num_block': 2},
        {'type': 'EDSR', 'num_in_ch': 1, 'num_out_ch': 1, 'num_feat': 8, 'num_block': 3},
        {'type': 'MSRResNet', 'num_feat': 8, 'num_block': 2},
        {'type': 'SwinIR', 'embed_dim': 8, 'depths': [2], 'num_heads': [2], 'upscale': 4}
        | {'upsampler': 'pixelshuffle', 'window_size': 4},
        {'type': 'UNetDiscriminatorSN', 'num_in_ch': 3, 'num_feat': 8},
        COMPACT,
    ],
)
def test_weights_without_a_description_are_known_by_their_names(options):
    assert what_fits(build_network(options).state_dict()).startswith(f'{options["type"]}, by its')


def test_weights_that_fit_nothing_are_said_to():
    assert what_fits({'conv.w': torch.ones(1)}) == 'no network here'
    state = build_network(COMPACT).state_dict()
    wide = what_fits(state, COMPACT | {'num_feat': 5})
    assert wide.startswith('SRVGGNetCompact, but for body.0.bias, body.0.weight')

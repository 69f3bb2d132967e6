"""Networks are found by the names and shapes of their weights."""

import pytest
import torch

from basicsr.archs import build_network
from basicsr.archs.recognition import options_from_weights
from basicsr.utils.errors import UserError

RGB = {'num_in_ch': 3, 'num_out_ch': 3}
SWIN = {'type': 'SwinIR', 'depths': [2, 4], 'num_heads': [2, 3], 'embed_dim': 12, 'mlp_ratio': 2}
SWIN_SR = SWIN | {'window_size': 8, 'img_size': 48}

KNOWN = [
    {'type': 'RRDBNet', **RGB},
    {'type': 'RRDBNet', **RGB, 'scale': 2, 'num_feat': 8, 'num_block': 2, 'num_grow_ch': 4},
    {'type': 'RRDBNet', 'num_in_ch': 1, 'num_out_ch': 1, 'scale': 1, 'num_feat': 8, 'num_block': 1},
    *({'type': 'MSRResNet', 'num_feat': 8, 'num_block': 2, 'upscale': x} for x in (2, 3, 4)),
    {'type': 'EDSR', **RGB, 'upscale': 4},
    {'type': 'EDSR', **RGB, 'num_feat': 256, 'num_block': 32, 'upscale': 3, 'res_scale': 0.1},
    {'type': 'RCAN', **RGB, 'num_group': 2, 'num_block': 3, 'upscale': 2},
    {'type': 'SRVGGNetCompact', 'num_feat': 8, 'num_conv': 12, 'upscale': 4},
    {'type': 'RIDNet', 'in_channels': 3, 'mid_channels': 16, 'out_channels': 3, 'num_block': 2},
    SWIN_SR | {'upsampler': 'pixelshuffle', 'upscale': 3},
    SWIN_SR | {'upsampler': 'pixelshuffledirect', 'upscale': 2},
    SWIN_SR | {'upsampler': 'nearest+conv', 'upscale': 4, 'resi_connection': '3conv'},
    SWIN
    | {'upsampler': '', 'upscale': 1, 'in_chans': 1, 'window_size': 7, 'img_size': 126}
    | {'img_range': 255.0},
    {'type': 'SpyNet'},
    {'type': 'EDVR', 'num_feat': 16, 'num_frame': 7, 'deformable_groups': 4, 'with_tsa': False},
    {'type': 'EDVR', 'num_feat': 8, 'with_predeblur': True, 'hr_in': True, 'num_extract_block': 2},
    {'type': 'BasicVSR', 'num_feat': 8, 'num_block': 2},
    {'type': 'IconVSR', 'num_feat': 64, 'num_block': 30, 'temporal_padding': 3},
    *({'type': 'BasicVSRPlusPlus', 'is_low_res_input': x} for x in (True, False)),
]


def weights(options):
    with torch.device('meta'):
        return build_network(options).state_dict()


@pytest.mark.parametrize('options', KNOWN, ids=lambda options: options['type'])
def test_weights_show_the_arguments_of_their_network(options):
    state = weights(options)
    in_order_of_names = {name: state[name] for name in sorted(state)}
    for found in (options_from_weights(state), options_from_weights(in_order_of_names)):
        assert found.items() >= options.items()


@torch.no_grad()
def test_a_network_found_by_its_weights_computes_the_same():
    net = build_network({'type': 'RRDBNet', **RGB, 'scale': 2, 'num_feat': 8, 'num_block': 1})
    found = build_network(options_from_weights(net.state_dict()))
    found.load_state_dict(net.state_dict())
    x = torch.rand(1, 3, 12, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found(x), net(x))


@pytest.mark.parametrize(
    ('options', 'unknown'),
    [
        ({'type': 'EDSR', **RGB, 'num_feat': 8, 'num_block': 2}, 'res_scale'),
        ({'type': 'SRVGGNetCompact', 'num_feat': 8, 'act_type': 'relu'}, 'act_type'),
        (SWIN_SR | {'window_size': 4, 'upsampler': 'pixelshuffle'}, 'img_range'),
        (
            {'type': 'ECBSR', **RGB, 'num_block': 2, 'num_channel': 8, 'scale': 2}
            | {'with_idt': True, 'act_type': 'relu'},
            'with_idt and act_type',
        ),
        ({'type': 'TOFlow'}, 'adapt_official_weights'),
        ({'type': 'DUF', 'num_layer': 28, 'scale': 3}, 'adapt_official_weights'),
        ({'type': 'IconVSR', 'num_feat': 8, 'num_block': 2}, 'keyframe_stride'),
        ({'type': 'BasicVSRPlusPlus', 'mid_channels': 16}, 'max_residue_magnitude'),
    ],
    ids=lambda value: value if isinstance(value, str) else value['type'],
)
def test_arguments_that_no_weight_shows_are_asked_for(options, unknown):
    message = f'are of {options["type"]}, and do not show {unknown}. .*{{type: {options["type"]}, '
    with pytest.raises(UserError, match=message):
        options_from_weights(weights(options))


def test_other_networks_are_not_taken_for_one_that_is_known():
    assert options_from_weights(weights({'type': 'UNetDiscriminatorSN', 'num_in_ch': 3})) is None
    one_more = weights(KNOWN[10]) | {'body.0.conv1.weight': torch.zeros(8, 8, 3, 3)}
    assert options_from_weights(one_more) is None
    assert options_from_weights({'body.0.weight': torch.zeros(4)}) is None

"""Build every video network small and hold it to the contract of all.

Weights and outputs are compared with the reference's in test_archs.py.
"""

import logging

import pytest
import torch

from basicsr.archs import build_network, load_network_from
from basicsr.archs.basicvsr_arch import EDVRFeatureExtractor
from basicsr.archs.spynet_arch import SpyNet
from basicsr.models.preparation import prepare_for_training
from basicsr.utils.checkpoint import DESCRIPTION, description, save_checkpoint
from basicsr.utils.errors import UserError

EDVR = {'num_feat': 8, 'num_frame': 3, 'deformable_groups': 2, 'num_extract_block': 1}
EDVR |= {'num_reconstruct_block': 2}
BLUR = EDVR | {'hr_in': True, 'with_predeblur': True, 'with_tsa': False}
VSR = {'num_feat': 8, 'num_block': 2}
PP = {'mid_channels': 8, 'num_blocks': 2}

# Options, frames of the input, scale; one frame comes out of EDVR, TOFlow and DUF.
NETWORKS = {
    'TOFlow': ({}, 7, 1),
    'DUF': ({'num_layer': 16, 'scale': 2}, 7, 2),
    'EDVR': (EDVR, 3, 4),
    'EDVR-deblur': (BLUR, 3, 1),
    'BasicVSR': (VSR, 2, 4),
    'IconVSR': (VSR | {'keyframe_stride': 2}, 3, 4),
    'BasicVSRPlusPlus': (PP, 3, 4),
    'BasicVSRPlusPlus-deblur': (PP | {'is_low_res_input': False}, 3, 1),
}
RECURRENT = [name for name in NETWORKS if 'VSR' in name]

every_network = pytest.mark.parametrize('name', NETWORKS)
# Convolutions of 7 x 7 in bfloat16 take seconds on CPUs.
in_bfloat16 = pytest.mark.parametrize(
    'name',
    [name if 'EDVR' in name else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS],
)


def build(name, **options):
    torch.manual_seed(0)
    net = build_network({'type': name.partition('-')[0], **NETWORKS[name][0], **options})
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if 'conv_offset' in key:  # zero at first, which would hide what they see
                parameter.normal_(std=0.02)
    return net.eval()


def clip(frames, h, w, seed=1):
    return torch.rand(1, frames, 3, h, w, generator=torch.Generator().manual_seed(seed))


@every_network
@pytest.mark.parametrize('size', [(9, 13), (1, 1)])
@torch.no_grad()
def test_output_is_exactly_scale_times_an_input_of_any_size(name, size):
    _, frames, scale = NETWORKS[name]
    out = build(name)(clip(frames, *size))
    images = (1, frames, 3) if name in RECURRENT else (1, 3)
    assert out.shape == (*images, size[0] * scale, size[1] * scale)
    assert out.isfinite().all()


@every_network
def test_every_parameter_and_the_input_get_a_finite_gradient(name):
    net = build(name).train()
    x = clip(NETWORKS[name][1], 12, 16).requires_grad_()
    net(x).square().mean().backward()
    without = [key for key, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert all(p.grad.isfinite().all() for p in [x, *net.parameters()])
    assert x.grad.any((0, 2, 3, 4)).all()  # every frame counts


@in_bfloat16
def test_autocast_runs_forward_and_backward(name):
    net, x = build(name), clip(NETWORKS[name][1], 12, 16)
    with torch.no_grad():
        want = net(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = net(x)
    out.float().mean().backward()
    assert (out.float() - want).norm() <= 0.05 * want.norm()
    assert all(p.grad.isfinite().all() for p in net.parameters())


@in_bfloat16
@torch.no_grad()
def test_bfloat16_gives_nearly_the_same_output_in_its_type(name):
    net, x = build(name), clip(NETWORKS[name][1], 12, 16)
    want = net(x)
    out = net.bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.float() - want).norm() <= 0.1 * want.norm()


@pytest.mark.parametrize('name', ['EDVR', 'BasicVSR', 'BasicVSRPlusPlus'])
def test_blocks_that_are_computed_twice_give_the_same_gradients(name, caplog):
    x, found = clip(NETWORKS[name][1], 8, 8), []
    caplog.set_level(logging.INFO)
    for twice in (False, True):
        net = build(name).train()
        prepare_for_training(net, {'checkpoint_activations': twice}, False)
        net(x).square().mean().backward()
        found.append([p.grad for p in net.parameters()])
    assert 'recomputed in the backward pass' in caplog.text
    for plain, again in zip(*found, strict=True):
        assert torch.allclose(plain, again, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('name', ['BasicVSR', 'IconVSR', 'BasicVSRPlusPlus'])
@torch.no_grad()
def test_a_clip_of_one_frame_is_restored(name):
    assert build(name)(clip(1, 8, 12)).shape == (1, 1, 3, 32, 48)


@pytest.mark.parametrize('name', ['TOFlow', 'DUF', 'EDVR'])
def test_another_number_of_frames_than_a_window_has_is_refused(name):
    frames = NETWORKS[name][1]
    with pytest.raises(UserError, match=rf'takes clips \(b, {frames}, 3, h, w\), not \(1, 5, 3'):
        build(name)(clip(5, 16, 16))


@every_network
def test_a_single_image_is_refused(name):
    with pytest.raises(UserError, match=r'takes clips \(b, .*, 3, h, w\), not \(1, 3, 16, 16\)'):
        build(name)(clip(1, 16, 16)[:, 0])


@pytest.mark.parametrize(
    ('network', 'options', 'message'),
    [
        ('EDVR', {'hr_in': True}, 'hr_in: true needs with_predeblur: true'),
        ('EDVR', {'center_frame_idx': 5}, 'center_frame_idx 5 is not below num_frame 5'),
        ('DUF', {'num_layer': 20}, r'num_layer 20; choose \[16, 28, 52\]'),
        ('IconVSR', {'temporal_padding': 1}, 'temporal_padding 1 must be 2 or 3'),
        ('IconVSR', {'keyframe_stride': 0}, 'keyframe_stride 0 must be 1 or more'),
        ('BasicVSRPlusPlus', {'mid_channels': 12}, 'mid_channels 12 is no multiple of 8'),
    ],
)
def test_options_that_it_cannot_honour_are_refused(network, options, message):
    with torch.device('meta'), pytest.raises(UserError, match=message):
        build_network({'type': network, **options})


@pytest.mark.parametrize(('name', 'multiple'), [('EDVR', 4), ('EDVR-deblur', 16), ('TOFlow', 8)])
@torch.no_grad()
def test_an_odd_size_is_continued_by_reflection_and_cropped(name, multiple):
    _, frames, scale = NETWORKS[name]
    net, x = build(name), clip(frames, 18, 21)
    whole = torch.nn.functional.pad(x[0], (0, -21 % multiple, 0, -18 % multiple), 'reflect')[None]
    out, want = net(x), net(whole)[..., : 18 * scale, : 21 * scale]
    if name == 'EDVR':  # the frame that is added is interpolated without its continuation
        out, want = out[..., :-4, :-4], want[..., :-4, :-4]
    assert torch.allclose(out, want, atol=1e-6)


@pytest.mark.parametrize('channels', [(1, 1), (1, 3), (3, 1), (4, 4)])
@torch.no_grad()
def test_edvr_has_the_channels_that_its_options_say(channels):
    net = build('EDVR', num_in_ch=channels[0], num_out_ch=channels[1])
    assert net(torch.rand(1, 3, channels[0], 8, 8)).shape == (1, channels[1], 32, 32)


@torch.no_grad()
def test_flow_of_an_image_smaller_than_the_pyramid_is_scaled_to_its_size():
    net = SpyNet()
    for parameter in net.parameters():
        parameter.zero_()
    net.basic_module[5].basic_module[8].bias.copy_(torch.tensor([8.0, 4.0]))
    flow = net(torch.rand(1, 3, 8, 16), torch.rand(1, 3, 8, 16))  # enlarged to 32 x 32
    assert torch.allclose(flow, torch.tensor([4.0, 1.0]).view(1, 2, 1, 1).expand_as(flow))


@torch.no_grad()
def test_iconvsr_continues_a_clip_by_frames_of_its_own():
    net, seen = build('IconVSR'), []
    net.edvr.forward = lambda x: seen.append(x[0, :, 0, 0, 0].int().tolist())
    for t in (6, 3):
        x = torch.arange(t).view(1, t, 1, 1, 1).expand(1, t, 3, 4, 4).float()
        net.get_keyframe_feature(x, [0, t - 1])
    assert seen == [[4, 3, 0, 1, 2], [3, 4, 5, 2, 1], [2, 2, 0, 1, 2], [0, 1, 2, 0, 0]]


@torch.no_grad()
def test_flows_of_a_mirrored_clip_are_computed_once_and_of_the_next_clip_anew():
    net, plain = build('BasicVSRPlusPlus'), clip(4, 8, 8)
    mirrored, calls = torch.cat((plain[:, :2], plain[:, :2].flip(1)), 1), []
    want = net(plain)
    net.spynet.register_forward_hook(lambda *_: calls.append(1))
    flows = net.compute_flow(mirrored)
    assert len(calls) == 1
    both = net.train().compute_flow(mirrored)
    assert len(calls) == 3
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(flows, both, strict=True))
    assert torch.equal(net.eval()(plain), want)


@torch.no_grad()
def test_a_clip_whose_features_wait_in_main_memory_is_restored_alike():
    x = clip(3, 8, 8)
    cached = build('BasicVSRPlusPlus', cpu_cache_length=1)(x)
    assert torch.equal(cached, build('BasicVSRPlusPlus')(x))


@torch.no_grad()
def test_offsets_of_the_second_order_alignment_are_the_flows_at_first():
    net = build_network({'type': 'BasicVSRPlusPlus', **PP})
    align = net.deform_align['forward_1']
    flow = torch.tensor([[2.0, 1], [-1, 0]]).view(2, 1, 2, 1, 1).expand(2, 1, 2, 6, 7)
    x, found = torch.rand(1, 16, 6, 7), []
    align.convolve = lambda x, offset, mask: found.extend((offset, mask))
    align(x, torch.rand(1, 24, 6, 7), *flow)
    assert found[0][0, :4, 0, 0].tolist() == [1, 2, 1, 2]  # vertical first
    assert found[0][0, -4:, 0, 0].tolist() == [0, -1, 0, -1]
    assert (found[1] == 0.5).all()


def test_weights_of_the_parts_are_loaded_from_their_files(tmp_path):
    parts = {'spynet': SpyNet(), 'edvr': EDVRFeatureExtractor(5, 8, None)}
    for name, part in parts.items():
        torch.save({'params': part.state_dict()}, tmp_path / f'{name}.pth')
    paths = {f'{name}_path': str(tmp_path / f'{name}.pth') for name in parts}
    net = build_network({'type': 'IconVSR', **VSR, **paths})
    for name, part in parts.items():
        loaded = getattr(net, name).state_dict()
        assert all(torch.equal(value, loaded[key]) for key, value in part.state_dict().items())


def test_a_checkpoint_is_loaded_without_the_files_of_its_parts(tmp_path):
    torch.save({'params': SpyNet().state_dict()}, tmp_path / 'spynet.pth')
    options = {'type': 'BasicVSR', **VSR, 'spynet_path': str(tmp_path / 'spynet.pth')}
    content = {'params': build_network(options).state_dict(), DESCRIPTION: description(options, 4)}
    save_checkpoint(content, tmp_path / 'net.pth')
    (tmp_path / 'spynet.pth').unlink()
    loaded = load_network_from(tmp_path / 'net.pth').state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in content['params'].items())


def test_a_file_of_weights_that_is_missing_or_of_another_network_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'spynet_path: no file .*no\.pth with weights of'):
        build_network({'type': 'BasicVSR', **VSR, 'spynet_path': str(tmp_path / 'no.pth')})
    torch.save({'params': torch.nn.Conv2d(1, 1, 1).state_dict()}, tmp_path / 'conv.pth')
    with pytest.raises(UserError, match=r'edvr_path: .*conv\.pth does not fit EDVRFeatureExtrac'):
        build_network({'type': 'IconVSR', **VSR, 'edvr_path': str(tmp_path / 'conv.pth')})
    with pytest.raises(UserError, match=r'load_path of SpyNet: .*conv\.pth does not fit SpyNet'):
        build_network({'type': 'SpyNet', 'load_path': str(tmp_path / 'conv.pth')})

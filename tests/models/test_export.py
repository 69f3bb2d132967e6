"""A file for another runtime is written only if that runtime gives the network's output."""

import json
import re
import sys

import pytest
import torch
from torch import nn

from basicsr import cli
from basicsr.archs import build_network
from basicsr.models.export import TARGETS, export_network
from basicsr.utils.checkpoint import DESCRIPTION, description, load_checkpoint, save_checkpoint
from basicsr.utils.errors import UserError

RGB = {'num_in_ch': 3, 'num_out_ch': 3}
SMALL = RGB | {'num_feat': 8, 'num_block': 1}
ECB = RGB | {'num_block': 1, 'num_channel': 4, 'with_idt': True, 'scale': 2}
SWIN = {'embed_dim': 8, 'depths': [2], 'num_heads': [2], 'window_size': 4, 'mlp_ratio': 2}
COMPACT = {'num_feat': 8, 'num_conv': 1}
NETWORKS = {  # by their rows in docs/networks.md
    'MSRResNet': {'num_feat': 8, 'num_block': 1, 'upscale': 4},
    'EDSR': SMALL | {'upscale': 3},
    'RCAN': RGB | {'num_feat': 16, 'num_group': 2, 'num_block': 2, 'upscale': 2},
    'RRDBNet, x4': SMALL | {'scale': 4},
    'RRDBNet, x2': SMALL | {'scale': 2},
    'RRDBNet, x1': SMALL | {'scale': 1},
    'SRVGGNetCompact, prelu': COMPACT | {'upscale': 4},
    'SRVGGNetCompact, relu': COMPACT | {'upscale': 2, 'act_type': 'relu'},
    'ECBSR': ECB | {'act_type': 'prelu'},
    'RIDNet': {'in_channels': 3, 'mid_channels': 16, 'out_channels': 3, 'num_block': 1},
    'SwinIR, pixelshuffle': SWIN | {'upsampler': 'pixelshuffle', 'upscale': 2},
    'SwinIR, pixelshuffledirect': SWIN | {'upsampler': 'pixelshuffledirect', 'upscale': 3},
    'SwinIR, nearest+conv': SWIN | {'upsampler': 'nearest+conv', 'upscale': 4},
    'SwinIR, same size, window 7, range 255': SWIN | {'window_size': 7, 'img_range': 255.0},
    'SwinIR, pixelshuffle, range 255': SWIN
    | {'upsampler': 'pixelshuffle', 'upscale': 2, 'img_range': 255.0},
}


def build(name, **options):
    torch.manual_seed(0)
    return build_network({'type': name.partition(',')[0], **NETWORKS[name], **options}).eval()


@pytest.fixture
def export(tmp_path):
    def call(net, target, ending=None, **options):
        file = tmp_path / f'net{ending or TARGETS[target][0][0]}'
        return export_network(net, target, file, **options), file

    return call


def image(*size):
    return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('name', ['SRVGGNetCompact, prelu', 'SwinIR, pixelshuffle'])
def test_onnxruntime_gives_the_output_for_any_size(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip('onnx')
    onnxruntime = pytest.importorskip('onnxruntime')
    net, options = build(name), {'type': name.partition(',')[0], **NETWORKS[name]}
    scale = options['upscale']
    entry = description(options, scale)
    save_checkpoint({'params': net.state_dict(), DESCRIPTION: entry}, tmp_path / 'a.pth')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, 'argv', ['basicsr', 'export', '-m', 'a.pth', '--to', 'onnx', '-o', 'a.onnx']
    )
    cli.main()
    found = re.fullmatch(
        r'a.onnx: for any size. onnxruntime \S+ \(opset 17\) gives the output of the network on '
        r'37 x 53, 24 x 40, 61 x 32: largest difference (\S+)\.\n',
        capsys.readouterr().out,
    )
    session = onnxruntime.InferenceSession(tmp_path / 'a.onnx')
    noted = json.loads(session.get_modelmeta().custom_metadata_map['basicsr'])
    assert noted.items() >= {**entry, 'multiple': 1}.items()
    assert f'{noted["max_difference"]:.1e}' == found[1]
    assert noted['max_difference'] < 1e-5
    for size in ((12, 20), (33, 47)):
        x = image(*size)
        (output,) = session.run(None, {'input': x.numpy()})
        assert output.shape[2:] == (size[0] * scale, size[1] * scale)
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(output), net(x), atol=1e-5)
    with pytest.raises(SystemExit):
        cli.main()
    assert 'a.onnx exists: remove it, or --overwrite.' in capsys.readouterr().err


def test_torch_export_keeps_what_is_known_of_the_file(export):
    net = nn.Conv2d(3, 3, 3, padding=1).eval()  # of larger ones the exporter takes its time
    exported, file = export(net, 'torch')
    noted = {DESCRIPTION: ''}
    module = torch.export.load(file, extra_files=noted).module()
    noted = json.loads(noted[DESCRIPTION])
    assert noted['network'] == {'type': 'Conv2d'}
    assert (noted['scale'], noted['max_difference']) == (1, exported.difference)
    with torch.no_grad():
        assert torch.allclose(module(image(18, 100)), net(image(18, 100)), atol=1e-6)


def test_ncnn_reads_two_files_that_give_the_output(export):
    pytest.importorskip('ncnn', reason='ncnn is not installed: pip install basicsr[export]')
    exported, file = export(build('SRVGGNetCompact, prelu'), 'ncnn')
    assert exported.files == [file, file.with_suffix('.bin')]
    assert all(part.stat().st_size > 0 for part in exported.files)
    assert sorted(file.parent.iterdir()) == sorted(exported.files)
    assert exported.difference < 1e-5


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('RCAN', {}),
        ('RCAN', {'img_range': 1.0}),
        ('RCAN', {'num_in_ch': 1, 'num_out_ch': 1}),
        ('ECBSR', {'act_type': 'leakyrelu'}),
        ('SRVGGNetCompact, relu', {}),
    ],
)
def test_other_names_are_used_where_spandrel_has_others(export, name, options):
    net = build(name, **options)
    for parameter in net.parameters():  # else biases and slopes have one value
        nn.init.normal_(parameter, 0, 0.1) if parameter.requires_grad else None
    exported, file = export(net, 'spandrel', '.pth')
    assert exported.difference < 2e-5
    content = load_checkpoint(file)
    assert content['params'].keys() != net.state_dict().keys()
    assert content[DESCRIPTION]['network'] is None


def test_a_file_for_spandrel_is_bare_and_still_ours(export):
    net = build('RRDBNet, x4')
    _, file = export(net, 'spandrel', described=description({'type': 'RRDBNet', **RGB}, 4))
    from safetensors.torch import load_file

    assert load_file(file).keys() == net.state_dict().keys()
    assert load_checkpoint(file)[DESCRIPTION]['network'] == {'type': 'RRDBNet', **RGB}


class Fixed(nn.Conv2d):
    """Its output depends on the width in a way that tracing does not see."""

    def forward(self, x):
        return super().forward(x) * (int(x.shape[-1]) / 64)


@pytest.mark.parametrize(
    ('net', 'target', 'message'),
    [
        ('SwinIR, pixelshuffle, range 255', 'spandrel', 'assumes img_range 1.0$'),
        ('EDSR', 'spandrel', 'EDSR is not written for spandrel, which does not know it'),
        (('ECBSR', {'act_type': 'softplus'}), 'spandrel', 'PReLU alone, not Softplus'),
        (('RCAN', {'res_scale': 0.5}), 'spandrel', r'differs by .*e-0\d, and 1e-04 is allowed'),
        (Fixed(3, 3, 1), 'onnx', r'onnxruntime .* differs by \d.*, and 1e-04 is allowed'),
    ],
)
def test_what_the_runtime_would_compute_otherwise_is_not_written(
    export, net, target, message, tmp_path
):
    if target == 'onnx':
        pytest.importorskip('onnxruntime')
    if not isinstance(net, nn.Module):
        name, options = net if isinstance(net, tuple) else (net, {})
        net = build(name, **options)
    with pytest.raises(UserError, match=message):
        export(net, target)
    assert list(tmp_path.iterdir()) == []


def test_a_bound_that_is_not_met_leaves_the_earlier_file(export, tmp_path):
    (tmp_path / 'net.pth').write_text('earlier')
    with pytest.raises(UserError, match='differs by 0.0e[+]00, and -1e[+]00 is allowed'):
        export(build('RRDBNet, x4'), 'spandrel', '.pth', bound=-1, overwrite=True)
    assert (tmp_path / 'net.pth').read_text() == 'earlier'
    with pytest.raises(UserError, match=r'net.pth must end in .onnx for onnx'):
        export(build('EDSR'), 'onnx', '.pth')


@pytest.fixture
def rows(repository):
    """The table of docs/networks.md: cells by network and target."""
    lines = re.findall(r'^\| (.+) \|$', (repository / 'docs/networks.md').read_text(), re.M)
    heads, *rest = [[cell.strip() for cell in line.split('|')] for line in lines]
    return {name: dict(zip(heads[1:], cells, strict=True)) for name, *cells in rest}


def test_every_network_has_its_row_in_the_table(rows):
    assert list(rows) == list(NETWORKS)
    assert all(list(row) == list(TARGETS) for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('name', NETWORKS)
def test_the_table_of_networks_says_what_is_written(name, target, export, rows):
    """Differences are of the order that it states; where it has words, nothing is written."""
    for package in {'onnx': ['onnx', 'onnxruntime'], 'ncnn': ['ncnn', 'pnnx']}.get(target, []):
        pytest.importorskip(package, reason=f'{package}: pip install basicsr[export]')
    cell = rows[name][target]
    stated = re.fullmatch(r'(\d\.?\d*(?:e-\d+)?)(?:, multiples of (\d+))?', cell)
    if not stated:
        with pytest.raises(UserError, match='is not written for'):
            export(build(name), target)
        return
    exported, _ = export(build(name), target)
    assert exported.multiple == int(stated[2] or 1)
    assert exported.difference <= 4 * float(stated[1]) + 1e-7

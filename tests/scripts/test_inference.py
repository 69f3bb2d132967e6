"""The scripts that restore images, with small networks and as published."""

import cv2
import numpy as np
import pytest
import torch

from basicsr.archs import build_network
from basicsr.utils.checkpoint import description, save_checkpoint
from basicsr.utils.img_util import img2tensor, tensor2img

ESRGAN = 'inference/inference_esrgan.py'
SWINIR = 'inference/inference_swinir.py'
RIDNET = 'inference/inference_ridnet.py'
SMALL = {
    'RRDBNet': {'num_in_ch': 3, 'num_out_ch': 3, 'num_feat': 4, 'num_block': 1, 'num_grow_ch': 2},
    'SwinIR': {'embed_dim': 4, 'depths': [1], 'num_heads': [1], 'window_size': 4, 'img_size': 8},
    'RIDNet': {'in_channels': 3, 'mid_channels': 16, 'out_channels': 3, 'num_block': 1},
}


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    """Elsewhere the last bits differ from those that are expected."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)


@pytest.fixture
def weights(tmp_path):
    """A small network with random weights, and the file that holds it."""

    def make(kind, scale, **options):
        options = {'type': kind, **SMALL[kind], **options}
        net = build_network(options).eval()
        entry = description(options, scale)
        save_checkpoint({'params': net.state_dict(), 'basicsr': entry}, tmp_path / 'net.pth')
        return net, tmp_path / 'net.pth'

    return make


def restored(net, img, white=1, dtype=np.uint8):
    """The output of a network for an image (h, w, 3), as an image."""
    top = np.iinfo(img.dtype).max
    with torch.no_grad():
        output = net(img2tensor(img / np.float32(top))[None] * white) / white
    return tensor2img(output, out_type=dtype)


def test_esrgan_enlarges_the_images_of_a_folder(script, write, read, weights, tmp_path):
    net, file = weights('RRDBNet', 4)
    images = {name: write(tmp_path / 'in' / f'{name}.png', 9, 11, 3) for name in ('a', 'bb')}
    args = ['--model_path', file, '--input', tmp_path / 'in', '--output', tmp_path / 'out']
    assert script(ESRGAN, *args) == f'2 images of {tmp_path / "in"} are restored in {args[-1]}.\n'
    for name, img in images.items():
        result = read(tmp_path / 'out' / f'{name}_ESRGAN.png')
        assert np.array_equal(result, restored(net, img))
        assert result.std() > 0


def test_gray_16_bits_and_transparency_are_kept(script, write, read, weights, tmp_path):
    net, file = weights('RRDBNet', 4)
    gray = write(tmp_path / 'in' / 'gray.png', 9, 11)
    deep = write(tmp_path / 'in' / 'deep.png', 9, 11, 3, dtype=np.uint16)
    bgra = write(tmp_path / 'in' / 'alpha.png', 9, 11, 4)
    bgra[..., 3] = np.repeat([255, 0], [6, 5])
    cv2.imwrite(str(tmp_path / 'in' / 'alpha.png'), bgra)
    args = ['--model_path', file, '--input', tmp_path / 'in', '--output', tmp_path / 'out']
    script(ESRGAN, *args)

    def result(name):
        return read(tmp_path / 'out' / f'{name}_ESRGAN.png')

    colours = restored(net, cv2.merge([gray] * 3))
    assert np.array_equal(result('gray'), cv2.cvtColor(colours, cv2.COLOR_BGR2GRAY))
    assert np.array_equal(result('deep'), restored(net, deep, dtype=np.uint16))
    assert result('deep').dtype == np.uint16
    assert np.array_equal(result('alpha')[..., :3], restored(net, bgra[..., :3]))
    assert (result('alpha')[:, :16, 3] == 255).all()
    assert (result('alpha')[:, -12:, 3] == 0).all()


def test_an_image_that_fails_keeps_no_other_from_its_result(
    script, write, weights, tmp_path, capsys
):
    _, file = weights('RRDBNet', 4)
    write(tmp_path / 'in' / 'b.png', 9, 11, 3)
    (tmp_path / 'in' / 'a.png').write_bytes(b'nothing')
    args = ['--model_path', file, '--input', tmp_path / 'in', '--output', tmp_path / 'out']
    with pytest.raises(SystemExit) as info:
        script(ESRGAN, *args)
    assert info.value.code == 1
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['b_ESRGAN.png']
    shown = capsys.readouterr().err
    assert 'a.png: The 7 bytes are not a PNG' in shown
    assert '1 of 2 images have no result: a.png' in shown


def test_weights_of_another_network_are_refused(script, write, weights, tmp_path, capsys):
    _, file = weights('SwinIR', 1)
    write(tmp_path / 'a.png', 9, 11, 3)
    with pytest.raises(SystemExit):
        script(ESRGAN, '--model_path', file, '--input', tmp_path / 'a.png')
    assert 'net.pth holds a SwinIR, not a RRDBNet' in capsys.readouterr().err


def test_published_weights_say_nothing_and_fit_the_published_network(script, write, read, tmp_path):
    net = build_network({'type': 'RRDBNet', 'num_in_ch': 3, 'num_out_ch': 3}).eval()
    torch.save({'params': net.state_dict()}, tmp_path / 'ESRGAN.pth')
    img = write(tmp_path / 'a.png', 5, 6, 3)
    args = ['--model_path', tmp_path / 'ESRGAN.pth', '--output', tmp_path / 'out']
    script(ESRGAN, '--input', tmp_path / 'a.png', *args)
    assert np.array_equal(read(tmp_path / 'out' / 'a_ESRGAN.png'), restored(net, img))


def test_weights_of_another_size_are_named(script, write, tmp_path, capsys):
    net = build_network({'type': 'RRDBNet', **SMALL['RRDBNet']})
    torch.save({'params': net.state_dict()}, tmp_path / 'small.pth')
    write(tmp_path / 'a.png', 5, 6, 3)
    with pytest.raises(SystemExit):
        script(ESRGAN, '--model_path', tmp_path / 'small.pth', '--input', tmp_path / 'a.png')
    assert 'small.pth does not fit RRDBNet' in capsys.readouterr().err


# RIDNet


def test_ridnet_takes_values_up_to_255(script, write, read, weights, tmp_path, monkeypatch):
    net, file = weights('RIDNet', 1)
    monkeypatch.chdir(tmp_path)
    img = write(tmp_path / 'sets' / 'RNI15' / 'X50' / 'dog.png', 9, 11, 3)
    script(RIDNET, '--test_path', 'sets/RNI15', '--noise_g', 50, '--model_path', file)
    result = read(tmp_path / 'results/RIDNet/RNI15/dog_x50_RIDNet.png')
    assert np.array_equal(result, restored(net, img, white=255))


def test_ridnet_takes_a_bare_state_dict(script, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = build_network({'type': 'RIDNet', **SMALL['RIDNet'], 'mid_channels': 64, 'num_block': 4})
    torch.save(net.state_dict(), 'RIDNet.pth')
    write(tmp_path / 'datasets/denoise/RNI15/X25' / 'a.png', 5, 6, 3)
    assert '1 images' in script(RIDNET, '--model_path', 'RIDNet.pth')


# SwinIR


@pytest.mark.parametrize('task', ['gray_dn', 'jpeg_car'])
def test_networks_of_one_channel_take_gray_and_colour(script, write, read, weights, tmp_path, task):
    net, file = weights('SwinIR', 1, in_chans=1)
    colour = write(tmp_path / 'in' / 'colour.png', 9, 11, 3)
    gray = write(tmp_path / 'in' / 'gray.png', 9, 11)
    args = ['--input', tmp_path / 'in', '--output', tmp_path / 'out', '--model_path', file]
    script(SWINIR, '--task', task, *args)
    assert np.array_equal(read(tmp_path / 'out' / 'gray_SwinIR.png'), restored(net, gray))
    result = read(tmp_path / 'out' / 'colour_SwinIR.png')
    expected = cv2.cvtColor(colour / np.float32(255), cv2.COLOR_BGR2GRAY)
    assert np.array_equal(result, tensor2img(net(img2tensor(expected)[None]).detach()))


def test_swinir_enlarges_images_of_any_size(script, write, read, weights, tmp_path):
    net, file = weights('SwinIR', 3, upscale=3, upsampler='pixelshuffledirect')
    img = write(tmp_path / 'a.png', 9, 11, 3)
    args = ['--output', tmp_path / 'out', '--model_path', file, '--scale', 3]
    script(SWINIR, '--input', tmp_path / 'a.png', *args)
    result = read(tmp_path / 'out' / 'a_SwinIR.png')
    assert result.shape == (27, 33, 3)
    assert np.array_equal(result, restored(net, img))


@pytest.fixture
def network(script, monkeypatch):
    """The network that the script builds for its arguments, without weights."""
    built = []

    def find_network(file, options):
        with torch.device('meta'):
            built.append(build_network(options))
        return built[-1]

    def call(*flags):
        monkeypatch.setattr('basicsr.models.restore_files.find_network', find_network)
        monkeypatch.setattr('basicsr.models.restore_files.restore_files', lambda *_, **__: '')
        script(SWINIR, *flags, '--input', 'x', '--model_path', 'x.pth')
        return built[-1]

    return call


@pytest.mark.parametrize(('scale', 'thousands'), [(2, 878), (3, 886), (4, 897)])
def test_the_lightweight_networks_have_the_sizes_of_the_paper(network, scale, thousands):
    """Table 2, where the position biases are not counted."""
    net = network('--task', 'lightweight_sr', '--scale', scale)
    parameters = net.named_parameters()
    count = sum(p.numel() for name, p in parameters if 'relative_position' not in name)
    assert round(count / 1000) == thousands


def test_each_task_has_its_network(network):
    repair, large = network('--task', 'jpeg_car'), network('--task', 'real_sr', '--large_model')
    assert (repair.scale, repair.window_size, repair.img_range) == (1, 7, 255)
    assert (large.scale, large.embed_dim, len(large.layers)) == (4, 240, 9)
    assert network('--task', 'classical_sr', '--scale', 3).upsampler == 'pixelshuffle'


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--task', 'color_dn', '--noise', 25], 'noise15.pth is for noise 15, not for 25'),
        (['--task', 'color_dn', '--jpeg', 40], '--jpeg is for jpeg_car; the task is color_dn'),
        (['--large_model'], '--large_model is a network of real_sr, not of classical_sr'),
    ],
)
def test_flags_that_do_not_fit_are_refused(script, capsys, flags, message):
    with pytest.raises(SystemExit):
        script(SWINIR, *flags, '--input', 'x', '--model_path', 'x_noise15.pth')
    assert message in capsys.readouterr().err

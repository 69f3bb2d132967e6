"""Image files restored with the network of a checkpoint."""

import logging
import shutil
import zlib

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from basicsr.archs import build_network
from basicsr.models import restore_files as module
from basicsr.models.restore_files import find_network, restore_files, restore_image, shape_of
from basicsr.utils.checkpoint import DESCRIPTION, description, save_checkpoint
from basicsr.utils.img_util import img2tensor, tensor2img

NET = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return build_network(NET).eval()


@pytest.fixture
def picture():
    def make(height=20, width=24, channels=3, dtype=np.uint8):
        size = (height, width, channels) if channels > 1 else (height, width)
        return np.random.default_rng(1).integers(0, np.iinfo(dtype).max, size).astype(dtype)

    return make


def direct(net, img):
    """The output of the network for an image (h, w, 3)."""
    with torch.no_grad():
        output = net(img2tensor(img.astype(np.float32) / np.iinfo(img.dtype).max)[None])
    return tensor2img(output, out_type=img.dtype.type)


# images


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_an_image_keeps_its_depth(net, picture, dtype):
    img = picture(dtype=dtype)
    result = restore_image(net, img)
    assert result.dtype == dtype
    assert np.array_equal(result, direct(net, img))


def test_a_gray_image_stays_gray_and_transparency_is_enlarged(net, picture):
    assert restore_image(net, picture(channels=1)).shape == (40, 48)
    img = picture(channels=4)
    img[..., 3] = 100
    result = restore_image(net, img)
    assert np.array_equal(result[..., :3], direct(net, img[..., :3]))
    assert np.array_equal(result[..., 3], np.full((40, 48), 100))


def test_a_network_of_one_channel_takes_colours_as_gray(picture):
    net = build_network({**NET, 'num_in_ch': 1, 'num_out_ch': 1}).eval()
    assert shape_of(net) == (1, 2, 1)
    assert restore_image(net, picture()).shape == (40, 48)


@pytest.mark.parametrize('tile', [1, 16, 37, 100])
def test_tiles_change_no_pixel_of_a_convolutional_network(net, picture, tile):
    img = picture(90, 70)
    assert np.array_equal(restore_image(net, img, tile=tile), restore_image(net, img, tile=0))


def test_tiles_keep_the_phase_of_a_network_that_downsamples(picture):
    options = {'num_in_ch': 3, 'num_out_ch': 3, 'scale': 2, 'num_feat': 4, 'num_block': 1}
    net = build_network({'type': 'RRDBNet', 'num_grow_ch': 2, **options}).eval()
    img = picture(150, 141, dtype=np.uint16)
    off = restore_image(net, img, tile=101) - restore_image(net, img, tile=0).astype(int)
    assert np.abs(off).max() <= 1


def test_an_image_without_room_is_restored_in_smaller_tiles(net, picture, monkeypatch, caplog):
    img = picture(200, 150)
    whole = restore_image(net, img, tile=0)
    forward = type(net).forward

    def limited(self, x):
        if x.shape[-1] > 100:
            raise torch.OutOfMemoryError('CUDA out of memory.')
        return forward(self, x)

    monkeypatch.setattr(type(net), 'forward', limited)
    monkeypatch.setattr(module, 'exact_halo', lambda *_: None)  # is measured with wide images
    monkeypatch.setattr(module, 'BLENDED', 8)
    with caplog.at_level(logging.WARNING):
        result = restore_image(net, img, shape=(3, 2, 1), tile=0)
    assert 'Not enough memory: going on with tiles of 64 x 64.' in caplog.text
    off = np.abs(result.astype(int) - whole)  # tiles are blended, with what their borders see
    assert off.max() <= 3
    assert off.mean() < 0.05


def test_other_errors_of_a_network_are_not_taken_for_a_lack_of_memory(net, picture, monkeypatch):
    def broken(self, x):
        raise RuntimeError('expected 5 channels')

    monkeypatch.setattr(type(net), 'forward', broken)
    with pytest.raises(RuntimeError, match='expected 5 channels'):
        restore_image(net, picture(), shape=(3, 2, 1))


# files


@pytest.fixture
def folder(tmp_path, picture):
    for name in ('a.png', 'sub/b.png'):
        (tmp_path / 'in' / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / 'in' / name), picture())
    return tmp_path / 'in'


def test_a_folder_keeps_its_names_and_sub_folders(net, folder, tmp_path, picture):
    text = restore_files(net, folder, tmp_path / 'out', suffix='_x2')
    assert text == f'2 images of {folder} are restored in {tmp_path / "out"}.'
    for name in ('a_x2.png', 'sub/b_x2.png'):
        assert np.array_equal(cv2.imread(str(tmp_path / 'out' / name)), direct(net, picture()))


def test_results_are_kept_unless_they_are_to_be_replaced(net, folder, tmp_path):
    restore_files(net, folder, tmp_path / 'out')
    (tmp_path / 'out/a.png').write_bytes(b'mine')
    with pytest.raises(FileExistsError, match='2 results are there already, such as .*a.png'):
        restore_files(net, folder, tmp_path / 'out')
    (tmp_path / 'out/sub/b.png').unlink()
    text = restore_files(net, folder, tmp_path / 'out', existing='skip')
    assert text.endswith('; 1 had a result.')
    assert (tmp_path / 'out/a.png').read_bytes() == b'mine'
    restore_files(net, folder, tmp_path / 'out', existing='replace')
    assert cv2.imread(str(tmp_path / 'out/a.png')).shape == (40, 48, 3)


def test_an_unreadable_image_is_reported_and_the_others_are_restored(net, folder, tmp_path, caplog):
    (folder / 'bad.png').write_bytes(b'no image')
    with pytest.raises(ValueError, match=r'1 of 3 images have no result: bad\.png'):
        restore_files(net, folder, tmp_path / 'out')
    assert sorted(p.name for p in (tmp_path / 'out').rglob('*.png')) == ['a.png', 'b.png']
    assert 'bad.png' in caplog.text


@pytest.mark.parametrize('tag', range(1, 9))
def test_results_are_upright_whatever_the_orientation_tag_says(net, tmp_path, picture, tag):
    stored = Image.fromarray(picture()[..., ::-1])
    exif = Image.Exif()
    exif[274] = tag
    stored.save(tmp_path / 'x.png', exif=exif)
    from PIL import ImageOps

    with Image.open(tmp_path / 'x.png') as image:
        upright = np.array(ImageOps.exif_transpose(image))[..., ::-1]
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out')
    result = cv2.imread(str(tmp_path / 'out/x.png'))
    assert np.array_equal(result, direct(net, np.ascontiguousarray(upright)))


def test_png_keeps_a_colour_profile(net, tmp_path, picture):
    profile = b'0123456789abcdef' + b'RGB ' + b'not a real profile ' * 20
    Image.fromarray(picture()).save(tmp_path / 'x.png', icc_profile=profile)
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out')
    with Image.open(tmp_path / 'out/x.png') as image:
        assert image.info['icc_profile'] == profile
        assert image.size == (48, 40)
    content = (tmp_path / 'out/x.png').read_bytes()
    place = content.index(b'iCCP')
    end = place + 4 + int.from_bytes(content[place - 4 : place], 'big')
    assert zlib.crc32(content[place:end]) == int.from_bytes(content[end : end + 4], 'big')


@pytest.mark.parametrize('ending', ['.jpg', '.webp', '.tif'])
@pytest.mark.parametrize('channels', [1, 3, 4])
def test_other_formats_keep_a_colour_profile_and_the_pixels(
    net, tmp_path, picture, ending, channels
):
    space = b'GRAY' if channels == 1 else b'RGB '
    profile = b'0123456789abcdef' + space + b'not a real profile ' * 20
    Image.fromarray(picture(channels=channels)).save(tmp_path / 'x.png', icc_profile=profile)
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out')
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out', ending=ending)
    with (
        Image.open(tmp_path / f'out/x{ending}') as image,
        Image.open(tmp_path / 'out/x.png') as reference,
    ):
        assert image.info['icc_profile'] == profile
        found, expected = (np.array(i.convert('RGB')).astype(int) for i in (image, reference))
    shown = np.array(reference)[..., 3:] > 0 if channels == 4 else np.bool_(True)
    error = (np.abs(found - expected) * shown).mean()
    assert error <= (30 if ending == '.jpg' else 0), 'JPEG alone loses of the noise'


def test_tiff_of_16_bits_warns_of_the_profile(net, tmp_path, picture, caplog, monkeypatch):
    cv2.imwrite(str(tmp_path / 'x.png'), picture(dtype=np.uint16))
    profile = b'0123456789abcdef' + b'RGB ' + b'not a real profile ' * 20
    monkeypatch.setattr(module, '_colour_profile', lambda _: profile)
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out', ending='.tif')
    assert 'the colour profile is not kept in TIFF of 16 bits' in caplog.text
    assert cv2.imread(str(tmp_path / 'out/x.tif'), cv2.IMREAD_UNCHANGED).dtype == np.uint16


def test_the_weights_are_named_and_can_be_chosen(tmp_path, caplog):
    caplog.set_level('INFO')
    nets = [build_network(NET) for _ in range(2)]
    content = {k: n.state_dict() for k, n in zip(('params', 'params_ema'), nets, strict=True)}
    save_checkpoint(content | {DESCRIPTION: description(NET, 2)}, tmp_path / 'x.pth')
    for key, chosen in ((None, nets[1]), ('params', nets[0])):
        found = find_network(tmp_path / 'x.pth', NET, key).state_dict()
        assert all(torch.equal(found[name], value) for name, value in chosen.state_dict().items())
    assert 'Restoring with params_ema of' in caplog.text and '(also there: params)' in caplog.text


@pytest.mark.parametrize('ending', ['.jpg', '.webp', '.tif'])
def test_results_have_the_format_that_is_asked_for(net, folder, tmp_path, ending):
    restore_files(net, folder, tmp_path / 'out', ending=ending, quality=100)
    with Image.open(tmp_path / f'out/a{ending}') as image:
        assert image.format == {'.jpg': 'JPEG', '.webp': 'WEBP', '.tif': 'TIFF'}[ending]


def test_a_profile_of_other_colours_is_left_out(net, tmp_path, picture):
    profile = b'0123456789abcdef' + b'CMYK' + b'not a real profile ' * 20
    Image.fromarray(picture()).save(tmp_path / 'x.png', icc_profile=profile)
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out')
    with Image.open(tmp_path / 'out/x.png') as image:
        assert 'icc_profile' not in image.info


def test_16_bits_become_8_where_a_format_has_no_more(net, tmp_path, picture, caplog):
    img = picture(channels=4, dtype=np.uint16)
    cv2.imwrite(str(tmp_path / 'x.png'), img)
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out', ending='.webp', quality=101)
    result = cv2.imread(str(tmp_path / 'out/x.webp'), cv2.IMREAD_UNCHANGED)
    expected = restore_image(net, img) / 257
    assert np.abs(result[..., :3] - expected[..., :3])[expected[..., 3] > 200].max() <= 1
    restore_files(net, tmp_path / 'x.png', tmp_path / 'out', ending='.jpg', quality=100)
    result = cv2.imread(str(tmp_path / 'out/x.jpg')).astype(float)
    assert abs(result.mean() - expected[..., :3].mean()) < 5  # noise, of which JPEG keeps little
    assert 'its transparency is not kept in JPEG' in caplog.text


def test_results_never_replace_or_become_the_images_they_are_made_of(net, folder):
    before = (folder / 'a.png').read_bytes()
    with pytest.raises(ValueError, match='2 results would replace the images they are made of'):
        restore_files(net, folder, folder, existing='replace')
    assert (folder / 'a.png').read_bytes() == before
    for _ in range(2):
        restore_files(net, folder, folder / 'out', existing='skip')
    assert sorted(p.name for p in (folder / 'out').rglob('*')) == ['a.png', 'b.png', 'sub']


# networks


def test_the_network_is_that_of_the_file_its_run_or_its_weights(net, tmp_path):
    weights = net.state_dict()
    (tmp_path / 'run/models').mkdir(parents=True)
    described = {'params': weights, 'basicsr': description(NET, 2)}
    save_checkpoint(described, tmp_path / 'described.pth')
    save_checkpoint({'params': weights}, tmp_path / 'run/models/net_g_5.pth')
    shutil.copy(tmp_path / 'run/models/net_g_5.pth', tmp_path / 'alone.pth')
    bare = build_network({**NET, 'act_type': 'relu'}).state_dict()
    save_checkpoint({'params': bare}, tmp_path / 'relu.pth')
    with pytest.raises(ValueError, match=r'holds \(.*show act_type.*\), and lies in no run'):
        find_network(tmp_path / 'relu.pth')
    lines = ', '.join(f'{key}: {value}' for key, value in NET.items())
    (tmp_path / 'run/x.yml').write_text(f'name: x\nnetwork_g: {{{lines}}}\n')
    for file in ('described.pth', 'run/models/net_g_5.pth', 'alone.pth'):
        found = find_network(tmp_path / file).state_dict()
        assert all(torch.equal(found[key].cpu(), value) for key, value in weights.items())
    with pytest.raises(ValueError, match='does not fit SRVGGNetCompact'):
        find_network(tmp_path / 'alone.pth', {**NET, 'num_feat': 5})


def test_the_average_is_used_if_there_is_one(net, tmp_path):
    average = {key: value + 1 for key, value in net.state_dict().items()}
    content = {'params': net.state_dict(), 'params_ema': average}
    save_checkpoint(content | {'basicsr': description(NET, 2)}, tmp_path / 'x.pth')
    found = find_network(tmp_path / 'x.pth').state_dict()
    assert all(torch.equal(found[key].cpu(), value) for key, value in average.items())

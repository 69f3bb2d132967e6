import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from basicsr.data import preparing_published
from basicsr.data.preparing_published import extract_tfrecords, regroup_reds


def integer(value):
    out = b''
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number, data):
    return integer(number << 3 | 2) + integer(len(data)) + data


def feature(name, kind, *values):
    """An entry of the map of features: kind 1 holds bytes, 3 integers."""
    return field(1, field(1, name.encode()) + field(2, field(kind, b''.join(values))))


def example(array, packed=True, name='data'):
    """The record of an array of bytes, as TensorFlow and as older writers write its shape."""
    shape = [integer(n) for n in array.shape]
    listed = [field(1, b''.join(shape))] if packed else [b'\x08' + number for number in shape]
    more = feature('label', 3, b'\x08', integer(300))
    return field(
        1, more + feature('shape', 3, *listed) + feature(name, 1, field(1, array.tobytes()))
    )


def crc32c(data):
    """CRC-32C by division of polynomials, a bit at a time, the lowest first."""
    bits = [byte >> n & 1 for byte in data for n in range(8)] + [0] * 32
    bits[:32] = [bit ^ 1 for bit in bits[:32]]
    divisor = [1, *(0x1EDC6F41 >> n & 1 for n in range(31, -1, -1))]
    for place in range(len(bits) - 32):
        if bits[place]:
            bits[place : place + 33] = [
                a ^ b for a, b in zip(bits[place : place + 33], divisor, strict=True)
            ]
    return sum((bit ^ 1) << n for n, bit in enumerate(bits[-32:]))


def write(path, *records):
    content = b''
    for record in records:
        length = struct.pack('<Q', len(record))
        crc = crc32c(length)
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
        content += length + struct.pack('<I', masked) + record + b'\0\0\0\0'
    path.write_bytes(content)
    return path


def noise(*shape):
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def read(path):
    return cv2.imread(str(path), cv2.IMREAD_UNCHANGED)


def test_the_checksum_is_the_one_of_the_standard():
    assert crc32c(b'123456789') == 0xE3069283  # RFC 3720, B.4


@pytest.mark.parametrize('packed', [True, False])
def test_images_of_records_are_numbered_over_the_files(tmp_path, packed):
    first, second, gray = noise(3, 16, 12), noise(8, 10, 3), noise(1, 4, 4)
    files = [
        write(tmp_path / 'a.tfrecords', example(first, packed), example(second, packed)),
        write(tmp_path / 'b.tfrecords', example(gray, packed)),
    ]
    said = extract_tfrecords(files, tmp_path / 'out', workers=2)
    assert said == f'3 images of 2 files are in {tmp_path / "out"}.'
    assert np.array_equal(read(tmp_path / 'out/00000000.png'), first.transpose(1, 2, 0)[..., ::-1])
    assert np.array_equal(read(tmp_path / 'out/00000001.png'), second[..., ::-1])
    assert np.array_equal(read(tmp_path / 'out/00000002.png'), gray[0])


def test_records_that_are_damaged_or_of_another_kind_are_named(tmp_path):
    whole = write(tmp_path / 'x', example(noise(3, 8, 8))).read_bytes()
    for damaged, message in (
        (whole[:-9], 'ends within a record'),
        (b'\7' + whole[1:], 'is not a TFRecord file'),
        (whole[:5], 'is not a TFRecord file'),
    ):
        (tmp_path / 'x').write_bytes(damaged)
        with pytest.raises(ValueError, match=f'x {message}'):
            extract_tfrecords([tmp_path / 'x'], tmp_path / 'out')
    for record, message in (
        (example(noise(3, 8, 8), name='image/encoded'), 'no feature data; there are label, shape,'),
        (example(noise(2, 8, 8)), r'the shape \[2, 8, 8\] has neither'),
        (example(noise(8, 8)), r'64 bytes are not 8-bit values of the shape \[8, 8\]'),
        (b'\x0a\xff', 'record 0 holds no image'),
        (b'no Example', 'record 0 holds no image'),
    ):
        file = write(tmp_path / 'x', record)
        with pytest.raises(ValueError, match=message):
            extract_tfrecords([file], tmp_path / 'out')
    assert not list((tmp_path / 'out').glob('*.png'))


def test_an_extraction_goes_on_with_the_same_files_only(tmp_path, monkeypatch):
    records = [example(noise(3, 8, width)) for width in range(4, 10)]
    file, output = write(tmp_path / 'x', *records), tmp_path / 'out'
    imwrite, made = preparing_published.imwrite, []

    def interrupted(img, path, params):
        if path.name == '00000003.png' and len(made) < 6:
            raise KeyboardInterrupt
        made.append(path.name)
        imwrite(img, path, params)

    monkeypatch.setattr(preparing_published, 'imwrite', interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract_tfrecords([file], output)
    with pytest.raises(FileExistsError, match=r'00000000\.png exists: add --resume'):
        extract_tfrecords([file], output)
    with pytest.raises(ValueError, match='out was made with the files .*x, and not the files .*y'):
        extract_tfrecords([write(tmp_path / 'y', *records)], output, resume=True)
    made[:] = [''] * 6
    assert extract_tfrecords([file], output, resume=True).startswith('6 images')
    assert set(made) <= {'', '00000003.png', '00000004.png', '00000005.png'}
    assert [read(path).shape[1] for path in sorted(output.glob('*.png'))] == list(range(4, 10))
    extract_tfrecords([write(tmp_path / 'y', *records[:2])], output, overwrite=True)
    assert sorted(p.name for p in output.glob('*.png')) == ['00000000.png', '00000001.png']


@pytest.fixture
def reds(tmp_path):
    """Two training and three validation clips of two frames."""
    for part, clips in (('train', ('000', '001')), ('val', ('000', '001', '029'))):
        for clip in clips:
            for frame in ('00000000.png', '00000001.png'):
                path = tmp_path / f'{part}_sharp' / clip / frame
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f'{part} {clip} {frame}')
    return tmp_path / 'train_sharp', tmp_path / 'val_sharp'


def test_the_validation_clips_of_reds_follow_those_for_training(reds):
    train, val = reds
    said = regroup_reds(train, val, workers=2)
    assert said == f'3 clips of {val} are in {train}, from 240 on.'
    assert sorted(clip.name for clip in train.iterdir()) == ['000', '001', '240', '241', '269']
    assert (train / '269/00000001.png').read_text() == 'val 029 00000001.png'
    assert (train / '001/00000001.png').read_text() == 'train 001 00000001.png'
    assert (val / '029/00000001.png').is_file()
    with pytest.raises(FileExistsError, match='240 exists: add --resume'):
        regroup_reds(train, val)


def test_a_clip_is_copied_whole_or_not_at_all(reds, monkeypatch):
    train, val = reds
    copy, copied = preparing_published.shutil.copytree, []

    def interrupted(source, target):
        copy(source, target)
        copied.append(Path(source).name)
        if len(copied) > 1:  # the first clip is whole; no other will be
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing_published.shutil, 'copytree', interrupted)
        with pytest.raises(KeyboardInterrupt):
            regroup_reds(train, val)
    assert not (train / '241').exists()
    said = regroup_reds(train, val, resume=True)
    assert said.endswith('from 240 on (1 were there already).')
    assert sorted(clip.name for clip in train.iterdir() if clip.name[0] != '.') == [
        *('000', '001', '240', '241', '269')
    ]
    assert (train / '241/00000001.png').read_text() == 'val 001 00000001.png'


def test_both_folders_of_reds_are_regrouped_without_being_named(reds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('datasets/REDS').mkdir(parents=True)
    for folder in reds:
        (Path('datasets/REDS') / folder.name).symlink_to(folder)
        reduced = Path('datasets/REDS', f'{folder.name}_bicubic', 'X4', '000')
        reduced.mkdir(parents=True)
        (reduced / '00000000.png').touch()
    assert len(regroup_reds().splitlines()) == 2
    assert Path('datasets/REDS/train_sharp_bicubic/X4/240/00000000.png').is_file()
    with pytest.raises(ValueError, match='give --train and --val, or none'):
        regroup_reds(train='x')
    with pytest.raises(FileNotFoundError, match='no folder x'):
        regroup_reds('x', 'y')

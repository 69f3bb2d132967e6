"""Bring published sets into the layout that a training reads: REDS, images in TFRecord files."""

import math
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from basicsr.utils.errors import UserError
from basicsr.utils.img_util import cv2, imwrite
from basicsr.utils.parallel import for_each_file, made_with, map_in_order
from basicsr.utils.progress_bar import progress_bar

from .preparing import check_existing

_REDS = 'datasets/REDS/'
# Folders of clips: those for training, and those for validation that are added to them.
_CLIPS = (
    (f'{_REDS}train_sharp', f'{_REDS}val_sharp'),
    (f'{_REDS}train_sharp_bicubic/X4', f'{_REDS}val_sharp_bicubic/X4'),
)
_FIRST_VAL_CLIP = 240  # after the 240 clips for training, 000 to 239


def regroup_reds(
    train: str | Path | None = None,
    val: str | Path | None = None,
    *,
    workers: int = 1,
    resume: bool = False,
) -> str:
    """Copy the clips for validation of REDS to those for training: 000 becomes 240, and so on.

    Published experiments draw their validation clips from all 270. Without folders, the clips of
    ``datasets/REDS`` and their reduced versions are copied.
    """
    if bool(train) != bool(val):
        raise UserError('give --train and --val, or none of them for the folders of datasets/REDS.')
    folders = [(train, val)] if train and val else _CLIPS
    return '\n'.join(_add_clips(Path(t), Path(v), workers, resume) for t, v in folders)


def _add_clips(train: Path, val: Path, workers: int, resume: bool) -> str:
    for folder in (train, val):
        if not folder.is_dir():
            raise FileNotFoundError(f'no folder {folder}.')
    clips = sorted(clip for clip in val.iterdir() if clip.is_dir() and clip.name.isdecimal())
    if not clips:
        raise FileNotFoundError(f'{val} holds no clips, such as 000.')
    target_of = {clip: train / f'{int(clip.name) + _FIRST_VAL_CLIP:03d}' for clip in clips}
    existing = [target for target in target_of.values() if target.exists()]
    if existing and not resume:
        raise FileExistsError(f'{existing[0]} exists: add --resume to go on.')
    missing = [clip for clip in clips if not target_of[clip].exists()]
    for _ in for_each_file(
        lambda clip: _copy(clip, target_of[clip]), missing, workers, len(existing)
    ):
        pass
    there = f' ({len(existing)} were there already)' if existing else ''
    return f'{len(clips)} clips of {val} are in {train}, from {target_of[clips[0]].name} on{there}.'


def _copy(clip: Path, target: Path) -> None:
    """Copy a folder; it appears whole or not at all."""
    temporary = target.with_name(f'.{target.name}.tmp')
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(clip, temporary)
    temporary.rename(target)


def extract_tfrecords(
    sources: Sequence[str | Path],
    output: str | Path,
    *,
    compression_level: int = 1,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
) -> str:
    """Write the images of TFRecord files, as of FFHQ and CelebA-HQ, to ``<number>.png``.

    Each record is an Example with the features ``data``, the values of an image in RGB, and
    ``shape``, (c, h, w) or (h, w, c). TensorFlow is not needed.
    """
    output, files = Path(output), [Path(source) for source in sources]
    existing = sorted(output.glob(f'{"[0-9]" * 8}.png'))
    check_existing(existing, resume, overwrite)
    params = (cv2.IMWRITE_PNG_COMPRESSION, compression_level)

    def write(item: tuple[int, Path, bytes]) -> Path:
        number, file, record = item
        target = output / f'{number:08d}.png'
        if not (resume and target.exists()):
            try:
                imwrite(_image_of(record), target, params)
            except (ValueError, IndexError) as error:
                raise UserError(f'{file}: record {number} holds no image: {error}') from error
        return target

    with made_with(output, {'the files': ', '.join(map(str, files))}, bool(existing), overwrite):
        items = enumerate((file, record) for file in files for record in _records(file))
        results = map_in_order(write, ((n, *item) for n, item in items), workers)
        written = set(progress_bar(results, unit='image', disable=None))
        for path in set(existing) - written if overwrite else []:
            path.unlink()
    return f'{len(written)} images of {len(files)} files are in {output}.'


def _records(file: Path) -> Iterator[bytes]:
    """The records of a TFRecord file: length, its checksum, data, checksum of the data.

    The checksum of the data is not looked at: in Python it takes longer than all the rest.
    """
    with file.open('rb') as stream:
        while header := stream.read(12):
            if len(header) < 12 or _masked_crc(header[:8]) != struct.unpack('<I', header[8:])[0]:
                raise UserError(f'{file} is not a TFRecord file, or is damaged.')
            (length,) = struct.unpack('<Q', header[:8])
            record = stream.read(length + 4)
            if len(record) < length + 4:
                raise UserError(f'{file} ends within a record: truncated.')
            yield record[:-4]


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _image_of(record: bytes) -> np.ndarray:
    """The image (h, w, c) in BGR of an Example."""
    features = _features(record)
    missing = [name for name in ('data', 'shape') if name not in features]
    if missing:
        raise UserError(f'no feature {missing[0]}; there are {", ".join(features) or "none"}.')
    shape, data = list(features['shape']), features['data'][0]
    if len(shape) != 3 or math.prod(shape) != len(data):
        raise UserError(f'{len(data)} bytes are not 8-bit values of the shape {shape}.')
    img = np.frombuffer(data, np.uint8).reshape(shape)
    img = np.moveaxis(img, 0, 2) if shape[0] in (1, 3) else img
    if img.shape[2] not in (1, 3):
        raise UserError(f'the shape {shape} has neither 1 nor 3 channels.')
    return np.ascontiguousarray(img[..., ::-1])


def _features(record: bytes) -> dict[str, list[Any]]:
    """Features of an Example, by name: a list of bytes, or of integers.

    Example{1: Features{1: {1: name, 2: Feature{1: BytesList, 3: Int64List}}}}, and the values of
    a list are its fields 1; integers may be packed into one of them.
    """
    found: dict[str, list[Any]] = {}
    for features in (value for _, value in _fields(record)):
        for entry in (value for _, value in _fields(features)):
            parts = dict(_fields(entry))
            for kind, values in _fields(parts.get(2, b'')):
                listed = [value for _, value in _fields(values)]
                if kind == 3 and listed and isinstance(listed[0], bytes):
                    listed = _integers(listed[0])
                found[parts[1].decode()] = listed
    return found


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message: integers, or bytes of any other kind."""
    place = 0
    while place < len(message):
        key, place = _integer(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _integer(message, place)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if kind == 2:
                size, place = _integer(message, place)
            if size is None or place + size > len(message):
                raise UserError('not a protobuf message.')
            value, place = message[place : place + size], place + size
        yield key >> 3, value


def _integers(packed: bytes) -> list[int]:
    place, values = 0, []
    while place < len(packed):
        value, place = _integer(packed, place)
        values.append(value)
    return values


def _integer(data: bytes, place: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, the lowest first, and where the next value begins."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place

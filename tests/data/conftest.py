"""Fixtures: files for datasets, and the reference's dataset cases."""

import shutil
import struct
import zlib

import cv2
import golden
import numpy as np
import pytest
from golden import recipe, resolve

from basicsr.data import build_dataset


def _image(spec):
    if isinstance(spec, np.ndarray):
        return spec
    if 'box_down' in spec:
        return recipe.box_down(_image(spec['of']), spec['box_down'])
    return resolve(spec)


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Work in ``tmp_path``; returns a function that writes images and texts there."""
    monkeypatch.chdir(tmp_path)

    def write(files=None, texts=None):
        for name, spec in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(tmp_path / name), _image(spec))
        for name, text in (texts or {}).items():
            (tmp_path / name).write_text(text)

    return write


@pytest.fixture
def dataset_output(in_folder, tmp_path):
    """Output of a golden case of kind ``dataset``: some items, then the length."""

    def build(case):
        in_folder(case.get('files'), case.get('texts'))
        for name, source in case.get('lmdb', {}).items():
            shutil.copytree(recipe.HERE / source, tmp_path / name)
        dataset, items = build_dataset(case['opt']), []
        for index in case['indices']:
            golden.seed(case)
            item = dataset[index]
            items.append({field: item[field] for field in case['fields']})
        return [*items, len(dataset)]

    return build


@pytest.fixture
def palette_png():
    """Bytes of a PNG of one size with a palette of red and blue, blue being transparent."""

    def chunk(kind, data):
        content = kind + data
        return struct.pack('>I', len(data)) + content + struct.pack('>I', zlib.crc32(content))

    def make(height, width, comment=b''):
        row = bytes([0, *(x % 2 for x in range(width))])
        return (
            b'\x89PNG\r\n\x1a\n'
            + chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 3, 0, 0, 0))
            + chunk(b'tEXt', b'Comment\0' + comment)
            + chunk(b'PLTE', bytes([255, 0, 0, 0, 0, 255]))
            + chunk(b'tRNS', bytes([255, 0]))
            + chunk(b'IDAT', zlib.compress(row * height))
            + chunk(b'IEND', b'')
        )

    return make

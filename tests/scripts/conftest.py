"""Fixtures: images in folders, and the scripts as commands."""

import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from basicsr.utils.img_util import imfrombytes

SCRIPTS = Path(__file__).parents[2] / 'scripts' / 'data_preparation'


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a script with arguments, two workers unless told otherwise; returns what it prints."""

    def run(name, *args):
        path = SCRIPTS / f'{name}.py'
        monkeypatch.setattr(sys, 'path', list(sys.path))
        monkeypatch.setattr(sys, 'argv', [str(path), '--workers', '2', *map(str, args)])
        capsys.readouterr()
        runpy.run_path(str(path), run_name='__main__')
        return capsys.readouterr().out

    return run


@pytest.fixture
def write():
    """Write an image of noise, of a shape and a type, and return it."""

    def write(path, *shape, dtype=np.uint8):
        high = np.iinfo(dtype).max + 1
        img = np.random.default_rng(len(str(path))).integers(0, high, shape, dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(path), img)
        return img

    return write


@pytest.fixture
def read():
    return lambda path: imfrombytes(path.read_bytes(), 'unchanged')


@pytest.fixture
def contents():
    """Bytes of all files of a folder but for hidden ones, by their path."""

    def contents(folder):
        files = (path for path in folder.rglob('[!.]*') if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return contents

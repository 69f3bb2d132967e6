"""Fixtures: images in folders, and the scripts as commands."""

import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from basicsr.utils.img_util import imfrombytes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script, given by its path in the checkout, with arguments; returns what it prints."""

    def run(name, *args):
        path = str(ROOT / name)
        monkeypatch.setattr(sys, 'path', list(sys.path))
        monkeypatch.setattr(sys, 'argv', [path, *map(str, args)])
        capsys.readouterr()
        runpy.run_path(path, run_name='__main__')
        return capsys.readouterr().out

    return run


@pytest.fixture
def command(script):
    """Run a script that prepares data, with two workers unless told otherwise."""
    return lambda name, *args: script(f'scripts/data_preparation/{name}.py', '--workers', 2, *args)


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

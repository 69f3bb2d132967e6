"""Tiles that fit into the free memory."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from basicsr.archs import build_network
from basicsr.models import tile_size as module
from basicsr.models.restore_files import restore_image
from basicsr.models.tile_size import bytes_per_pixel, choose_tiles, free_memory

NET = {'type': 'SRVGGNetCompact', 'num_feat': 4, 'num_conv': 1, 'upscale': 2}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return build_network(NET).eval()


@pytest.fixture
def memory(monkeypatch, net):
    """Sets the free memory, in LQ pixels that fit into the share of it that is used."""

    def set_to(pixels):
        free = math.ceil(2 * pixels * bytes_per_pixel(net, 3))
        monkeypatch.setattr(module, 'free_memory', lambda _: free)
        monkeypatch.setattr(module, '_SMALL', 0)

    return set_to


def test_memory_of_a_pixel_counts_the_tensors_that_exist_together():
    class Chain(nn.Sequential):
        def forward(self, x):
            y = self[0](x)  # 8 channels
            y = y.view(1, 4, -1, x.shape[-1])  # no memory of its own
            return self[1](y.reshape(1, 8, *x.shape[-2:])) + x  # 3 channels twice, beside the 8

    net = Chain(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1))
    assert bytes_per_pixel(net, 3) == 4 * (8 + 3 + 3)
    freed = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(9)))
    assert bytes_per_pixel(freed, 3) == 4 * (3 + 3), 'an output is freed by the layer after next'


def test_an_image_that_fits_is_restored_whole_and_another_in_exact_tiles(net, memory):
    lq = torch.zeros(1, 3, 200, 200)
    memory(200 * 200)
    assert choose_tiles(net, lq, 2, 1) == (0, None)
    memory(200 * 200 - 1)
    assert choose_tiles(net, lq, 2, 1) == (199 - 2 * 16 - 7, None), 'a multiple of 16, its halo 16'
    memory(200 * 200 * (1 + 16 * 4 * 3 * 2**2 / bytes_per_pixel(net, 3)))
    assert choose_tiles(net, lq, 2, 1, ensemble=True) == (0, None)
    memory(200 * 200)
    assert choose_tiles(net, lq, 2, 1, ensemble=True)[0] < 160


def test_tiles_are_blended_where_exact_ones_do_not_fit(net, memory, monkeypatch, caplog):
    monkeypatch.setattr(module, 'required_halo', lambda *_: 48)
    lq = torch.zeros(1, 3, 300, 300)
    memory(160**2)  # exact tiles would have a side of 64, below their halo times 2
    monkeypatch.setattr(module, 'SMALLEST', 80)
    with caplog.at_level('INFO'):
        assert choose_tiles(net, lq, 2, 1) == (96, 32)
    assert 'images of 300 x 300 are restored in tiles of 96, blended over 32 pixels' in caplog.text
    memory(1)
    assert choose_tiles(net, lq, 2, 1) == (80, 32)


def test_the_choice_changes_no_pixel_of_a_convolutional_network(net, memory):
    img = np.random.default_rng(0).integers(0, 255, (170, 150, 3)).astype(np.uint8)
    memory(120**2)
    assert np.array_equal(restore_image(net, img), restore_image(net, img, tile=0))


def test_a_container_has_the_memory_of_its_group(monkeypatch, tmp_path):
    own = free_memory(torch.device('cpu'))
    assert own > 2**20
    (tmp_path / 'memory.max').write_text('3000\n')
    (tmp_path / 'memory.current').write_text('1000\n')
    path = module.Path
    monkeypatch.setattr(module, 'Path', lambda p: tmp_path if p == '/sys/fs/cgroup' else path(p))
    assert free_memory(torch.device('cpu')) == 2000
    (tmp_path / 'memory.max').write_text('max\n')
    assert free_memory(torch.device('cpu')) > 2**20

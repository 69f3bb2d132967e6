"""Choose tiles by the free memory: an operating system kills a program instead of refusing it."""

import logging
import math
import os
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from basicsr.utils.errors import UserError
from basicsr.utils.text import sizeof_fmt

from .restore import GRID, evaluating, required_halo

logger = logging.getLogger(__name__)

BLENDED = 32  # LQ pixels over which tiles are blended
SMALLEST = 64
_SMALL = 2**16  # LQ pixels, up to which an image is restored whole without being asked
_PROBE = 64  # side of the image that memory is measured with
# Of the free memory: kernels need up to half as much again as the tensors that are counted.
_SHARE = 0.5

_costs: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


def choose_tiles(
    net: nn.Module, lq: Tensor, scale: int, multiple: int, ensemble: bool = False
) -> tuple[int, int | None]:
    """Side and overlap of the tiles of an image; 0 if it fits into the free memory as a whole.

    The overlap is None for tiles that give exactly the whole image. Where these would not fit, or
    take ten times as long, tiles are blended.

    Args:
        lq: (1, c, h, w), on any device.
        multiple: Input sizes of the network are multiples of this.
        ensemble: Eight results are in memory, and again to be averaged.
    """
    height, width = lq.shape[-2:]
    if height * width <= _SMALL:
        return 0, None
    free = free_memory(next(net.parameters(), lq).device)
    cost = bytes_per_pixel(net, lq.shape[1], multiple)
    cost += 16 * 4 * lq.shape[1] * scale**2 if ensemble else 0
    side = math.isqrt(int(_SHARE * free / cost))
    if height * width <= side**2:
        return 0, None
    halo = exact_halo(net, lq.shape[1], scale, multiple)
    is_exact = halo is not None and side - 2 * halo >= max(halo, SMALLEST)
    grid = math.lcm(GRID, multiple)
    tile = (side - 2 * (halo if is_exact and halo is not None else BLENDED)) // grid * grid
    tile = max(tile, SMALLEST)
    blended = '' if is_exact else f', blended over {BLENDED} pixels'
    logger.info(
        'For %s of free memory, images of %d x %d are restored in tiles of %d%s.',
        *(sizeof_fmt(free), width, height, tile, blended),
    )
    return tile, None if is_exact else BLENDED


def exact_halo(net: nn.Module, channels: int, scale: int, multiple: int) -> int | None:
    """LQ pixels around a tile with which it is that of the whole image; None if none suffice."""
    try:
        return required_halo(net, channels, scale, multiple)
    except UserError:
        return None


def free_memory(device: torch.device) -> int:
    """Bytes that a program can still allocate on a device."""
    if device.type == 'cuda':
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = []
    meminfo, group = Path('/proc/meminfo'), Path('/sys/fs/cgroup')
    if meminfo.is_file() and (found := re.search(r'MemAvailable: +(\d+) kB', meminfo.read_text())):
        limits.append(1024 * int(found[1]))
    else:  # of another system than Linux
        limits.append(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2)
    most, used = group / 'memory.max', group / 'memory.current'
    if most.is_file() and used.is_file() and (most_text := most.read_text().strip()) != 'max':
        limits.append(int(most_text) - int(used.read_text()))
    return max(min(limits), 0)


def bytes_per_pixel(net: nn.Module, channels: int, multiple: int = 1) -> float:
    """Memory that a network takes for a pixel of its input, measured once by a small image."""
    if net not in _costs:
        side = math.ceil(_PROBE / multiple) * multiple
        image = torch.zeros(1, channels, side, side)
        with evaluating(net), _Memory() as memory:
            net(image.to(next(net.parameters(), image)))
        _costs[net] = max(memory.most / side**2, 1)
    return _costs[net]


class _Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that there are at a time.

    Attributes:
        most: The largest number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = self.most = 0
        self._users: Counter[int] = Counter()  # tensors by the place of their memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                self._now += 0 if self._users[place] else size
                self._users[place] += 1
                self.most = max(self.most, self._now)
                weakref.finalize(tensor, self._release, place, size)
        return output

    def _release(self, place: int, size: int) -> None:
        self._users[place] -= 1
        self._now -= 0 if self._users[place] else size

"""Counter-based random numbers: decisions depend on (seed, position), not on generator history.

So results do not depend on the number of workers, the prefetch depth, or interruptions of a run.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """64-bit hash of integers, by the splitmix64 finaliser (Steele et al., OOPSLA 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mix_array(values: np.ndarray, key: int) -> np.ndarray:
    """``mix(value + key)`` of every value of a uint64 array."""
    state = values + np.uint64((key + 0x9E3779B97F4A7C15) & _MASK)  # wraps around
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def seed_cpu(*values: int) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator from integers."""
    value = mix(*values)
    random.seed(value)
    np.random.seed([value >> 32, value & 0xFFFFFFFF])
    torch.default_generator.manual_seed(value)


def seed_all(*values: int) -> None:
    """As ``seed_cpu``, and the generators of the GPUs."""
    seed_cpu(*values)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(mix(*values))


@contextmanager
def seeded(*values: int) -> Iterator[None]:
    """Seed the CPU generators within the block, then restore their states."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_cpu(*values)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

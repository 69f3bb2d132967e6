"""Limit how long idle OpenMP threads spin, which slows training on busy machines."""

import os


def spin_briefly() -> None:
    """Let waiting threads sleep early; call this before torch is imported.

    By default GNU OpenMP spins for milliseconds. That gains little on idle cores, but where other
    programs run, a spinning thread may keep the thread it waits for off its core: beside two busy
    loops on two cores, a step of the quickstart's network took 1.3 s, and 0.12 s with this limit
    (0.06 s on idle cores, either way). ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` are respected
    if they are set.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', '2000')

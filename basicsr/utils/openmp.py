"""How long OpenMP's threads spin while they wait for each other."""

import os


def spin_briefly() -> None:
    """Let waiting threads sleep soon; call it before torch is imported.

    By default GNU OpenMP spins for milliseconds. That saves little on idle cores, but where other
    programs run, the thread that is waited for may be kept from its core by the one that spins:
    beside two busy loops on two cores a step of the quickstart's network took 1.3 s, and 0.12 s
    with as few rounds as here (0.06 s on idle cores, either way). ``OMP_WAIT_POLICY`` and
    ``GOMP_SPINCOUNT``, if set, are left as they are.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', '2000')

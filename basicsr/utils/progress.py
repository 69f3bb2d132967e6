"""Current iteration and phase of this process, for the watchdog and error messages."""

from dataclasses import dataclass


@dataclass
class Progress:
    """How far a process has got.

    Attributes:
        phase: start, data, step, saving, validation or end.
        iteration: The iteration that it belongs to.
        steps: How many steps have begun.
        notes: How often ``note`` was called; it stops growing when the process hangs.
    """

    phase: str = 'start'
    iteration: int = 0
    steps: int = 0
    notes: int = 0


current = Progress()


def note(phase: str, iteration: int | None = None) -> None:
    """Note progress, cheaply: it sets a few attributes and sends nothing.

    Args:
        phase: See ``Progress``.
        iteration: The iteration it belongs to; default: as before.
    """
    current.phase = phase
    if iteration is not None:
        current.iteration = iteration
    current.steps += phase == 'step'
    current.notes += 1


class Preempted(Exception):
    """Raised on all ranks to abandon work when a signal asks the run to stop."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = number

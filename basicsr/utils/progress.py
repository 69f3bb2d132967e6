"""Current iteration and phase of this process, for the watchdog and error messages."""

from dataclasses import dataclass


@dataclass
class Progress:
    """How far a process has got.

    Attributes:
        phase: start, data, step, saving, validation or end.
        iteration: The iteration that it belongs to.
        steps: How many steps have begun.
        notes: How often ``note`` was called: a process that hangs calls it no longer.
    """

    phase: str = 'start'
    iteration: int = 0
    steps: int = 0
    notes: int = 0


current = Progress()


def note(phase: str, iteration: int | None = None) -> None:
    """Note progress: a few attributes are set, nothing is sent.

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
    """Work was left because a signal asks the run to stop; on all ranks alike."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = number

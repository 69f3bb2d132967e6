"""Counting of what went right, which all kinds of stress share."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Budget:
    """When to stop.

    Args:
        deadline: On the clock of ``time.monotonic``.
        share: Part of the usual number of cases to make, above 0.
    """

    deadline: float
    share: float = 1.0

    def cases(self, count: int) -> Iterator[int]:
        """Numbers from 0, ``count`` times the share of them, while there is time."""
        for number in range(max(1, round(count * self.share))):
            if time.monotonic() > self.deadline:
                return
            yield number


@dataclass
class Tally:
    """Cases of one kind: a row of the table."""

    what: str
    expected: str
    cases: int = 0
    failures: list[str] = field(default_factory=list)

    def record(self, right: bool, case: str) -> None:
        """Count a case; what went wrong is named at once."""
        self.cases += 1
        if not right:
            self.failures.append(case)
            sys.stderr.write(f'{self.what}: {case}\n')

    @property
    def right(self) -> int:
        return self.cases - len(self.failures)

"""What the measurements share: rows of the table, repeats in turn, processes and their memory."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple


@dataclass
class Row:
    """One line of the table.

    Args:
        what: What was measured.
        value: The number, in ``unit``.
        reference: What it is compared with, in the same unit.
        goal: '>=' or '<=', and a bound of the ratio, or of the value where there is no reference.
    """

    what: str
    value: float
    unit: str
    reference: float | None = None
    goal: tuple[str, float] | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.reference is None else self.value / self.reference

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        comparison, bound = self.goal
        number = self.value if self.ratio is None else self.ratio
        return number >= bound if comparison == '>=' else number <= bound


class Result(NamedTuple):
    """Rows for the table, and every number they were made from."""

    rows: list[Row]
    raw: dict[str, Any]


def seconds(function: Callable, *args: Any) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def in_turn(sides: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, list]:
    """Call every side once a round: what else the machine does meets all of them alike."""
    results: dict[Any, list] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            results[name].append(side())
    return results


def in_child(function: Callable, *args: Any) -> Any:
    """The result of a call in a fresh copy of this process, whose log lines are dropped."""
    with ProcessPoolExecutor(1, get_context('fork')) as pool:
        return pool.submit(_silent, function, *args).result()


def _silent(function: Callable, *args: Any) -> Any:
    with Path(os.devnull).open('w') as nowhere, contextlib.redirect_stderr(nowhere):
        return function(*args)


def with_peak(function: Callable, *args: Any) -> tuple[Any, float]:
    """The result of a call, and how many MB the process grew by at most on the way.

    ``ru_maxrss`` would not do: a child process begins with the largest value of its parent.
    """
    gc.collect()  # what is freed in between would count as less
    Path('/proc/self/clear_refs').write_text('5')  # sets VmHWM back to VmRSS
    before = _megabytes(Path('/proc/self/status'))['VmRSS']
    result = function(*args)
    return result, _megabytes(Path('/proc/self/status'))['VmHWM'] - before


def memory(pid: int) -> dict[str, float]:
    """MB of a process: all it maps (rss), its share of that (pss), what it alone has (uss)."""
    found = _megabytes(Path(f'/proc/{pid}/smaps_rollup'))
    uss = found['Private_Clean'] + found['Private_Dirty']
    return {'rss': found['Rss'], 'pss': found['Pss'], 'uss': uss}


def _megabytes(file: Path) -> dict[str, float]:
    """The lines ``Name:  number kB`` of a file."""
    fields = (line.split() for line in file.read_text().splitlines() if line.endswith(' kB'))
    return {name.rstrip(':'): int(number) / 1024 for name, number, _ in fields}

"""The kinds of decision that ``forebay bench`` measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from timeit import Timer
from typing import Final

from forebay.benchmarking.timing import time_per_call

__all__ = [
    "FLOORS",
    "KEYS",
    "LEASED",
    "LIMITERS",
    "PROCESSES",
    "REDIS",
    "STRICT",
    "SYNCED",
    "THREADS",
    "Subject",
    "loop",
]

ROUND_NS: Final = 2_000_000
TRIAL_CALLS: Final = 20

FLOORS, LIMITERS, KEYS = "floors", "limiters, one hot key", "one process, many keys"
PROCESSES, THREADS, REDIS = "processes at the same time", "threads at the same time", "over Redis"
STRICT, LEASED, SYNCED = "RedisStore: allow", "LeasedStore: allow", "SyncedStore: allow"


def _no_fault() -> str:
    return ""


@dataclass(frozen=True)
class Subject:
    """A kind of decision. Its name is unique in its group, and stays the same from run to run."""

    group: str
    name: str
    measure: Callable[[int], float]
    """Measures so many rounds, and returns the median of the nanoseconds per decision."""
    fault: Callable[[], str] = _no_fault
    """Afterwards: why the figure is not what the name says, or nothing."""
    workers: int = 1
    """How many processes or threads decide at the same time."""


def loop(
    group: str,
    name: str,
    timer: Timer | Callable[[], tuple[Timer, int]],
    *,
    operations: int = 1,
    fault: Callable[[], str] = _no_fault,
) -> Subject:
    """A timer's loop of about two milliseconds, each turn of which is so many `operations`. Or a function that makes
    a timer for one turn, untimed, and the number of its operations.
    """
    calls = 0

    def one_round() -> float:
        nonlocal calls
        if not isinstance(timer, Timer):
            made, count = timer()
            return time_per_call(made, 1, count)
        if not calls:
            timer.timeit(TRIAL_CALLS)
            calls = max(1, round(ROUND_NS / time_per_call(timer, TRIAL_CALLS)))
        return time_per_call(timer, calls, operations)

    return Subject(group, name, lambda rounds: statistics.median(one_round() for _ in range(rounds)), fault)

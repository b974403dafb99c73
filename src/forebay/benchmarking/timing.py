"""Timing a statement in a loop that is compiled for it alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from timeit import Timer

__all__ = ["statement", "time_per_call"]


def statement(text: str, *, timer: Callable[[], float] = time.perf_counter, **values: object) -> Timer:
    """Compiles a loop around `text` alone, with `values` as local variables. `timer` is the clock, in seconds."""
    setup = "; ".join(f"{name} = values[{name!r}]" for name in values) or "pass"
    return Timer(text, setup, timer, globals={"values": values})


def time_per_call(timer: Timer, calls: int, operations_per_call: int = 1) -> float:
    """Nanoseconds per operation. Garbage collection is off meanwhile."""
    return timer.timeit(calls) * 1e9 / (calls * operations_per_call)

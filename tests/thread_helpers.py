"""Threads that act at the same moment, many times.

Most races that these tests provoke exist only on free-threaded CPython. With the GIL the same tests show that the
promises hold there, too.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from process_helpers import DEADLINE_S, Hung

T = TypeVar("T")

FREE_THREADED: Final = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
"""Whether this interpreter is built for threads without the GIL, which may be on nevertheless."""

HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()
SPINS: Final = 0 if HAS_GIL else 200
"""So often a thread looks before it lets others run: threads on two processors leave a meeting within a microsecond.
With the GIL no other thread arrives while one looks."""


def often(count: int) -> int:
    """More rounds without the GIL, where each takes microseconds."""
    return count if HAS_GIL else 5 * count


class ThreadMeeting:
    """A barrier at which `size` threads wait for each other, any number of times."""

    def __init__(self, size: int) -> None:
        # Each number has one writer.
        self._arrivals = [0] * size

    def wait(self, me: int) -> None:
        arrivals = self._arrivals
        arrivals[me] += 1
        mine, spins, deadline = arrivals[me], 0, time.monotonic() + DEADLINE_S
        while min(arrivals) < mine:
            spins += 1
            if spins > SPINS:
                time.sleep(0)
                if time.monotonic() > deadline:
                    raise Hung(f"meeting {mine} of {len(arrivals)} threads: {arrivals}")


class _Race:
    """What the threads of a race share."""

    def __init__(self, size: int) -> None:
        self.meeting = ThreadMeeting(size)
        self.subject: Any = None
        self.results: list[Any] = [None] * size
        self.errors: list[BaseException] = []
        self.is_over = False

    def act(self, me: int, step: Callable[[Any], Any]) -> None:
        try:
            self.results[me] = step(self.subject)
        except BaseException as error:
            self.errors.append(error)

    def run(self, me: int, step: Callable[[Any], Any]) -> None:
        """The rounds of one thread."""
        while True:
            self.meeting.wait(me)
            if self.is_over:
                return
            self.act(me, step)
            self.meeting.wait(me)


def race(rounds: int, prepare: Callable[[], T], *steps: Callable[[T], object]) -> Iterator[tuple[T, list[Any]]]:
    """In each round call `prepare`, then pass its result to all `steps` at once, each in a thread of its own.

    Yields the prepared object and the results of the steps, in order. An exception in a step ends the race.
    """
    shared = _Race(len(steps))
    first, *others = steps
    threads = [threading.Thread(target=shared.run, args=(me, step)) for me, step in enumerate(others, 1)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            shared.subject = subject = prepare()
            shared.meeting.wait(0)
            shared.act(0, first)
            shared.meeting.wait(0)
            if shared.errors:
                raise shared.errors[0]
            yield subject, list(shared.results)
            del subject
            shared.subject = None
    finally:
        shared.is_over = True
        shared.meeting.wait(0)
        for thread in threads:
            thread.join(DEADLINE_S)


def together(*works: Callable[[], T]) -> list[T]:
    """Run all at once, each in a thread of its own. Returns their results, or raises the first exception."""
    [(_, results)] = race(1, lambda: None, *[lambda _, work=work: work() for work in works])
    return results

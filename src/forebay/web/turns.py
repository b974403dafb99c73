"""Turns: an admitted request is held back until the time that it has booked.

Held requests are bounded in each process: a thread that sleeps handles no other request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from typing import Final

from forebay import forking
from forebay.core.reservation import Reservation
from forebay.rate import NS
from forebay.store import Store

__all__ = ["HeldBack", "Turn", "sleep_until_due", "sleep_until_due_async"]

MOST_IN_THREADS: Final = 4
MOST_IN_LOOP: Final = 1000


class HeldBack:
    """How many requests of this process a rule holds back, of at most `most` at once.

    `most` None: `MOST_IN_THREADS`, or `MOST_IN_LOOP` of an event loop. *Threads*: safe. *Fork*: safe; a child holds
    none of its parent's requests.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another one at the moment."""
        return _counts.get(self, 0) >= self._bound()

    def add(self) -> bool:
        """Count a request; False if there is no room for it. ``remove`` ends each that was counted."""
        most = self._bound()
        with _lock:
            count = _counts.get(self, 0)
            if count >= most:
                return False
            _counts[self] = count + 1
            return True

    def remove(self) -> None:
        with _lock:
            count = _counts.pop(self, 0)
            if count > 1:
                _counts[self] = count - 1

    def _bound(self) -> int:
        return self._most or (MOST_IN_LOOP if _is_in_loop() else MOST_IN_THREADS)


_lock = threading.Lock()
_counts: Final[dict[HeldBack, int]] = {}


def _reset_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _counts.clear()


# A forked child has neither the thread that holds the lock nor those that wait.
forking.in_child(_reset_in_child)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Turn:
    """The booked time of one request, which `held_back` has counted."""

    __slots__ = ("_held_back", "_reservation", "_store")

    def __init__(self, store: Store, reservation: Reservation, held_back: HeldBack) -> None:
        self._store, self._reservation, self._held_back = store, reservation, held_back

    @property
    def left_s(self) -> float:
        """Seconds until it is due, at least 0. A manual clock is advanced to that time."""
        left_ns = self._reservation.due_ns - self._store.now_ns()
        if left_ns > 0 and self._store.manual_clock is not None:
            self._store.manual_clock.set_ns(self._reservation.due_ns)
            left_ns = 0
        return max(left_ns, 0) / NS

    def end(self) -> None:
        """The request is no longer held back. Call it once."""
        self._held_back.remove()

    def cancel(self) -> None:
        """Give the place back, unless a later booking waits behind it."""
        self._reservation.cancel()


def sleep_until_due(turns: Iterable[Turn]) -> None:
    """Sleep in this thread until all of them are due. Their stores may have different clocks."""
    time.sleep(max(turn.left_s for turn in turns))


async def sleep_until_due_async(turns: Iterable[Turn]) -> None:
    """As ``sleep_until_due``, in a task."""
    await asyncio.sleep(max(turn.left_s for turn in turns))

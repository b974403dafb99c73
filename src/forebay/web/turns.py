"""Turns: an admitted request is held back until the time that it has booked.

Held requests are bounded in each process: a thread that sleeps handles no other request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from forebay.core.reservation import Reservation
from forebay.rate import NS
from forebay.store import Store

__all__ = ["HeldBack", "Turn"]

MOST_IN_THREADS: Final = 4
MOST_IN_LOOP: Final = 1000


class HeldBack:
    """How many requests of this process a rule holds back, of at most `most` at once. Thread-safe.

    `most` None: `MOST_IN_THREADS`, or `MOST_IN_LOOP` of an event loop.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._count = 0
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self, most: int) -> Iterator[bool]:
        """Count a request within the block; False if there is no room for it. `most` is the default."""
        with self._lock:
            is_counted = self._count < (self._most or most)
            self._count += is_counted
        try:
            yield is_counted
        finally:
            with self._lock:
                self._count -= is_counted


class Turn:
    """The booked time of one request. `deny` makes what its denial is if too many others are held back."""

    __slots__ = ("_deny", "_held_back", "_reservation", "_store")

    def __init__(self, store: Store, reservation: Reservation, held_back: HeldBack, deny: Callable[[], Any]) -> None:
        self._store, self._reservation, self._held_back, self._deny = store, reservation, held_back, deny

    @property
    def due_ns(self) -> int:
        """The time of the limiter's store."""
        return self._reservation.due_ns

    def wait(self) -> Any:
        """Sleep in this thread until it is due. The denial if too many threads do."""
        with self._held_back.one_more(MOST_IN_THREADS) as is_held:
            if not is_held:
                return self._deny()
            time.sleep(self._left_s())
        return None

    async def wait_async(self) -> Any:
        """As ``wait``, for a task."""
        with self._held_back.one_more(MOST_IN_LOOP) as is_held:
            if not is_held:
                return self._deny()
            await asyncio.sleep(self._left_s())
        return None

    def cancel(self) -> None:
        """Give the place back, unless a later booking waits behind it."""
        self._reservation.cancel()

    def _left_s(self) -> float:
        left_ns = self.due_ns - self._store.now_ns()
        if left_ns > 0 and self._store.manual_clock is not None:
            self._store.manual_clock.set_ns(self.due_ns)
            left_ns = 0
        return max(left_ns, 0) / NS

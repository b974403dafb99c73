"""Turns: an admitted request is held back until the time that it has booked.

Held requests are bounded in each process: a thread that sleeps handles no other request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final

from forebay import forking
from forebay.core.reservation import Reservation
from forebay.rate import NS
from forebay.store import Store
from forebay.web.renewals import Renewals

__all__ = ["HeldBack", "Turn", "sleep_until_due", "sleep_until_due_async", "sleeps_until_due"]

MOST_IN_THREADS: Final = 4
MOST_IN_LOOP: Final = 1000


class HeldBack:
    """How many requests of this process a rule holds back, of at most `most` at once.

    `most` None: `MOST_IN_THREADS`, or `MOST_IN_LOOP` of an event loop. *Threads*: safe. *Fork*: safe; a child holds
    none of its parent's requests.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.counted_as: Hashable = self
        """All of this process that have the same one count together: a rule in its versions, a canary and its rule.
        Set it first.
        """

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another one at the moment."""
        return _counts.get(self.counted_as, 0) >= self._bound()

    def add(self) -> bool:
        """Count a request; False if there is no room for it. ``remove`` ends each that was counted."""
        most = self._bound()
        with _lock:
            count = _counts.get(self.counted_as, 0)
            if count >= most:
                return False
            _counts[self.counted_as] = count + 1
            return True

    def remove(self) -> None:
        with _lock:
            count = _counts.pop(self.counted_as, 0)
            if count > 1:
                _counts[self.counted_as] = count - 1

    def _bound(self) -> int:
        return self._most or (MOST_IN_LOOP if _is_in_loop() else MOST_IN_THREADS)


_lock = threading.Lock()
_counts: Final[dict[Hashable, int]] = {}


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

    __slots__ = ("_count", "_held_back", "_reservation", "_store")

    def __init__(
        self,
        store: Store,
        reservation: Reservation,
        held_back: HeldBack,
        count: Callable[[], object] | None = None,
    ) -> None:
        """`count` is called once if the request is not due when it begins to wait."""
        self._store, self._reservation, self._held_back, self._count = store, reservation, held_back, count

    @property
    def left_ns(self) -> int:
        """Nanoseconds until it is due, at least 0."""
        return max(self._reservation.due_ns - self._store.now_ns(), 0)

    def begin(self) -> int:
        """Begin to wait. Returns ``left_ns``."""
        left_ns = self.left_ns
        if left_ns and self._count is not None:
            self._count()
        return left_ns

    def advance_clock(self, duration_ns: int) -> bool:
        """Advance a manual clock. False: the store has another clock, so the caller sleeps."""
        clock = self._store.manual_clock
        if clock is not None:
            clock.set_ns(self._store.now_ns() + duration_ns)
        return clock is not None

    def end(self) -> None:
        """The request is no longer held back. Call it once."""
        self._held_back.remove()

    def cancel(self) -> None:
        """Give the place back, unless a later booking waits behind it."""
        self._reservation.cancel()


def sleeps_until_due(turns: Iterable[Turn], renewals: Renewals) -> Iterator[float]:
    """The lengths, in seconds, of the sleeps after which all turns are due. Between them the leases are renewed.

    The stores of the turns may have different clocks.
    """
    for turn in turns:
        left_ns = turn.begin()
        if left_ns:
            renewals.renew()
        while left_ns:
            slice_ns = int(min(left_ns, renewals.slice_s * NS))
            if not turn.advance_clock(slice_ns):
                yield slice_ns / NS
            renewals.renew()
            # The last sleep isn't measured again: it is as long as what was left.
            left_ns = turn.left_ns if slice_ns < left_ns else 0


def sleep_until_due(turns: Iterable[Turn], renewals: Renewals) -> None:
    """Sleep in this thread until all of them are due."""
    for seconds in sleeps_until_due(turns, renewals):
        time.sleep(seconds)


async def sleep_until_due_async(turns: Iterable[Turn], renewals: Renewals) -> None:
    """As ``sleep_until_due``, in a task."""
    for seconds in sleeps_until_due(turns, renewals):
        await asyncio.sleep(seconds)

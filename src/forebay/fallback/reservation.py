"""The result of ``reserve``."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import Signature
from typing import Any, ClassVar, NoReturn, Self, final

from forebay.errors import StoreFull
from forebay.fallback.decision import seconds_from_ns
from forebay.rate import as_delay_ns

__all__ = ["Reservable", "Reservation", "longest_delay_ns", "reservation_of"]

ANY_DELAY_NS = 2**64 - 1


def longest_delay_ns(max_delay: Any) -> int:
    return ANY_DELAY_NS if max_delay is None else min(as_delay_ns(max_delay, "max_delay is None or"), ANY_DELAY_NS)


class Reservable:
    """Base class of limiters and of ``AllOf``, which make reservations."""


@final
class Reservation:
    """Permits booked for later use. True if they were booked.

    * ``allowed``
    * ``delay``: seconds from the booking until the permits may be used; if nothing was booked, until another attempt
      may succeed; ``delay_ns``: the same in exact nanoseconds
    * ``due_ns``: the store's time at the end of the delay
    * ``full``: the store had no room for the key, and its ``on_full`` decided

    Only limiters make reservations.
    """

    __slots__ = ("_pid", "_undo", "allowed", "delay_ns", "due_ns", "full")
    __signature__: ClassVar[Signature] = Signature()

    allowed: bool
    delay_ns: int
    due_ns: int
    full: bool
    _undo: list[Callable[[], object]]
    _pid: int

    def __new__(cls) -> Self:
        raise TypeError("reservations are made by limiters: use limiter.reserve(key)")

    def __init_subclass__(cls) -> None:
        raise TypeError("no class derives from Reservation")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Reservation is immutable")

    @property
    def delay(self) -> float:
        return seconds_from_ns(self.delay_ns)

    def cancel(self) -> None:
        """Give back those of the permits that still count. Further calls do nothing.

        Later bookings keep their times, so no other request can take the place of this one. Nothing is given back while
        a later booking still waits for its time. In a child that was forked since the booking, ``cancel`` does nothing.
        After ``StoreFull``, which only ``Credits`` raise, another call tries again.
        """
        if self._pid != os.getpid():
            return
        try:
            # One step: of several threads that cancel, one gives back.
            undo = self._undo.pop()
        except IndexError:
            return
        try:
            undo()
        except StoreFull:
            self._undo.append(undo)
            raise

    def __bool__(self) -> bool:
        return self.allowed

    def __repr__(self) -> str:
        return f"Reservation(allowed={self.allowed}, delay={self.delay})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Reservation can't be pickled or copied")


def reservation_of(
    allowed: bool, now_ns: int, delay_ns: int, undo: Callable[[], object] | None, *, full: bool
) -> Reservation:
    """`undo` gives back what was charged; None if nothing was."""
    made = object.__new__(Reservation)
    fields = {"allowed": allowed, "delay_ns": delay_ns, "due_ns": now_ns + delay_ns, "full": full}
    for name, value in (*fields.items(), ("_undo", [] if undo is None else [undo]), ("_pid", os.getpid())):
        object.__setattr__(made, name, value)
    return made

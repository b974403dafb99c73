"""A clock that stands still until a test moves it."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

from forebay.errors import InvalidRate, short_repr
from forebay.rate import NS, Duration, as_delay_ns

__all__ = ["ManualClock"]

# Half of the range of a segment's time: the other half is for times ahead of now.
MAX_NS: Final = 2**61


class Moved(Protocol):
    """The part of a store's memory that has its time."""

    def now_ns(self) -> int: ...
    def set_manual_ns(self, now_ns: int, /) -> None: ...


class ManualClock:
    """A clock that stands still until a test moves it.

    Give it to a store as ``clock=``. The segment holds the time, so every process that attaches the segment sees it.
    One clock can serve several stores and moves them together. It starts at `start`; if a segment's time has moved
    already, it starts at that time. Move it in one thread at a time.

    A time is text like ``"1 minute"``, a number of seconds or a ``timedelta``. Raises ``InvalidRate``, a
    ``ValueError``, for any other value, and for one below 0 or above 73 years.

    A ``SlidingLog`` whose permits return (``refund``, ``reset``) and are taken again while the clock stands still
    counts them some nanoseconds ahead of the clock: after the entries that they replace.
    """

    def __init__(self, start: Duration = 0) -> None:
        self._segments: list[Moved] = []
        self.set_ns(as_delay_ns(start, "a clock starts after"))

    def now(self) -> float:
        """The time in seconds."""
        return self.now_ns() / NS

    def set(self, time: Duration) -> None:
        """Move to `time` since 0. It may be earlier than now: limiters must bear a clock that goes back."""
        self.set_ns(as_delay_ns(time, "a clock's time is"))

    def advance(self, duration: Duration) -> None:
        """Move forward by `duration`, rounded to the nanosecond; ``set`` can move back."""
        self.set_ns(self.now_ns() + as_delay_ns(duration, "a clock goes back by set, and advances by"))

    def set_ns(self, now_ns: int) -> None:
        """``set`` in nanoseconds."""
        if now_ns > MAX_NS:
            raise InvalidRate(f"a clock's time is from 0 to {MAX_NS // NS} seconds, not {short_repr(now_ns // NS)}")
        self._now_ns = now_ns
        # A copy: another thread may make or close a store meanwhile.
        for segment in self._segments[:]:
            segment.set_manual_ns(now_ns)

    def now_ns(self) -> int:
        """The time in nanoseconds."""
        first = self._segments[:1]
        return first[0].now_ns() if first else self._now_ns

    def attach(self, segment: Moved) -> None:
        """Called by a store: move the segment's time from now on."""
        # Another process may be moving the segment's time at this moment, so it is set only if it is still 0.
        if segment.now_ns() == 0:
            segment.set_manual_ns(self.now_ns())
        elif self._segments:
            self.set_ns(segment.now_ns())
        self._segments.insert(0, segment)

    def detach(self, segment: Moved) -> None:
        """Called by a store that closes: leave the segment's time alone from now on."""
        self._now_ns = self.now_ns()
        with suppress(ValueError):
            self._segments.remove(segment)

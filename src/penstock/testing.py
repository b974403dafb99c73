"""What tests of code that uses penstock need."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.core.segment import Segment

__all__ = ["ManualClock"]

NS: Final = 1_000_000_000
# Half of the time that a segment can tell: the other half is for what lies ahead of now.
MAX_NS: Final = 2**61


class ManualClock:
    """A clock that stands still until it is told to move.

    Give it to a store as ``clock=``. The time is kept in the segment, so every process that has the segment attached
    sees it; one clock can be given to several stores and moves them together. It starts at `start` seconds, or, with a
    segment whose time has moved already, where that one is. Move it in one thread at a time.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._segments: list[Segment] = []
        self._set_ns(_to_ns(start))

    def now(self) -> float:
        """The time in seconds."""
        return self._read_ns() / NS

    def set(self, seconds: float) -> None:
        """Move to `seconds`. Earlier than now is allowed: limiters must bear a clock that goes back."""
        self._set_ns(_to_ns(seconds))

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, to the nearest nanosecond."""
        if not seconds >= 0:
            raise ValueError(f"advance goes forwards, not by {seconds!r}: use set to go back")
        self._set_ns(self._read_ns() + _to_ns(seconds))

    def _set_ns(self, now_ns: int) -> None:
        if now_ns > MAX_NS:
            raise ValueError(_refusal(now_ns / NS))
        self._now_ns = now_ns
        for segment in self._segments:
            segment.set_manual_ns(now_ns)

    def _read_ns(self) -> int:
        return self._segments[0].now_ns() if self._segments else self._now_ns

    def _bind(self, segment: Segment) -> None:
        # Another process may be moving the segment's time right now: it is only ever written when it stands at 0.
        if segment.now_ns() == 0:
            segment.set_manual_ns(self._read_ns())
        elif self._segments:
            self._set_ns(segment.now_ns())
        self._segments.insert(0, segment)

    def _unbind(self, segment: Segment) -> None:
        self._now_ns = self._read_ns()
        self._segments = [bound for bound in self._segments if bound is not segment]


def _to_ns(seconds: float) -> int:
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(_refusal(seconds))
    return round(Fraction(seconds) * NS)


def _refusal(seconds: float) -> str:
    return f"a clock's time is from 0 to {MAX_NS // NS} seconds, not {seconds!r}"

"""Permits that services hold over Redis: a server remembers its own leases."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["HeldLeases", "HeldPermits"]

_MOST: Final = 1 << 17
"""Leases at once."""
_MOST_BYTES: Final = 256 << 20
"""Of all leases, about."""
_OF_LEASE: Final = 512
_OF_LIMIT: Final = 1024
_OF_PERMIT: Final = 192
_SWEEP_AT_LEAST: Final = 1024
_SWEEP_EVERY_S: Final = 1.0
"""If there is no room. O(leases)."""
_GRACE_S: Final = 10.0
"""A lease is known for so long after its end: a renewal may be under way then."""


@dataclass(slots=True)
class HeldPermits:
    """The permits of one question, which are held by one lease of each limit."""

    leases: Sequence[Any]
    lasts_s: float
    """Until the first of them ends, without a renewal."""
    longest_s: float
    """Until the last of them ends."""
    size: int
    end_s: float
    """A time of the monotonic clock. By then Redis has ended all of them, unless several renewals had no reply."""
    is_ending: bool = False
    """It is being given back: no renewal that was under way before counts."""

    def is_over(self, now_s: float) -> bool:
        return self.end_s + _GRACE_S <= now_s


class HeldLeases:
    """What services hold, by ids that only they know. *Threads*: safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, HeldPermits] = {}
        self._bytes = 0
        self._sweep_at = _SWEEP_AT_LEAST
        self._swept_s = 0.0

    def have_room(self) -> bool:
        """Whether another one may be held."""
        with self._lock:
            now_s = time.monotonic()
            if len(self._by_id) >= self._sweep_at or (self._is_full() and now_s - self._swept_s >= _SWEEP_EVERY_S):
                self._sweep(now_s)
            return not self._is_full()

    def add(
        self, leases: Sequence[Any], keys: Sequence[str | tuple[str, ...]], permits: int, each_lasts_s: Sequence[float]
    ) -> str:
        """The id of a new lease of so many permits of these keys. `each_lasts_s`: how long that of each limit lasts."""
        lease = secrets.token_hex(16)
        texts = [text for key in keys for text in (key if isinstance(key, tuple) else (key,))]
        # The limiter has a key, and Redis may have it, too.
        size = _OF_LEASE + _OF_LIMIT * len(leases) + _OF_PERMIT * permits + 2 * sum(map(len, texts))
        with self._lock:
            longest_s = max(each_lasts_s)
            self._by_id[lease] = HeldPermits(leases, min(each_lasts_s), longest_s, size, time.monotonic() + longest_s)
            self._bytes += size
        return lease

    def get(self, lease: str) -> HeldPermits | None:
        """What the lease holds; None if it isn't known, or not any more."""
        with self._lock:
            held = self._by_id.get(lease)
            return held if held is not None and not held.is_over(time.monotonic()) else None

    def begin_end(self, lease: str) -> HeldPermits | None:
        """As `get`, of a lease that is given back now."""
        held = self.get(lease)
        if held is not None:
            with self._lock:
                held.is_ending = True
        return held

    def restart(self, lease: str, held: HeldPermits, is_sure: bool) -> bool:
        """The lease begins anew, or may do so later if that isn't sure. False if it is over, or given back, meanwhile.

        Redis may begin it anew as late as at its end. So it is known for twice its time then, also if another renewal
        is answered meanwhile.
        """
        with self._lock:
            is_known = self._by_id.get(lease) is held and not held.is_ending
            if is_known:
                held.end_s = max(held.end_s, time.monotonic() + held.longest_s * (1 if is_sure else 2))
            return is_known

    def remove(self, lease: str) -> None:
        """The lease is over."""
        with self._lock:
            self._pop(lease)

    def _pop(self, lease: str) -> None:
        held = self._by_id.pop(lease, None)
        if held is not None:
            self._bytes -= held.size

    def _is_full(self) -> bool:
        return len(self._by_id) >= _MOST or self._bytes >= _MOST_BYTES

    def _sweep(self, now_s: float) -> None:
        for lease in [lease for lease, held in self._by_id.items() if held.is_over(now_s)]:
            self._pop(lease)
        self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(self._by_id))
        self._swept_s = now_s

"""Counts of a store and its limiters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

__all__ = ["HotKey", "LimiterStats", "StoreStats"]


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """Counts of one limiter since its segment was made, over all processes, living and gone."""

    allowed: int = 0
    """Allowed requests."""
    denied: int = 0
    """Denied requests."""
    inserted: int = 0
    """Keys put into the table."""
    evicted: int = 0
    """Live keys that another key replaced: make the store larger if this grows."""
    full: int = 0
    """Decisions by ``on_full``, because there was no cell for their key."""
    cas_retries: int = 0
    """CASes that failed because another process or thread was first, and were retried."""
    algorithm: str = field(default="", kw_only=True)
    """The limiter's class, such as ``"TokenBucket"`` or ``"leased TokenBucket"``; empty in a sum over several."""

    def __add__(self, other: LimiterStats) -> LimiterStats:
        counts = (getattr(self, name) + getattr(other, name) for name in _COUNTS)
        return LimiterStats(*counts, algorithm=self.algorithm if self.algorithm == other.algorithm else "")


_COUNTS: Final = ("allowed", "denied", "inserted", "evicted", "full", "cas_retries")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The result of ``Store.stats()``."""

    keys: int
    """Live keys that the segment was made for."""
    live_keys: int
    """Keys whose state matters now. A limiter forgets a key itself once its state equals a fresh key's."""
    bytes: int
    """The size of the segment's file as ``ls`` shows it, all allocated, with the extents of single limiters."""
    limiters: dict[str, LimiterStats] = field(default_factory=dict)
    """By name. Where limiters of several algorithms share a name, each has ``name (algorithm)`` instead, such as
    ``"api (TokenBucket)"``, and none has the bare name."""

    @property
    def total(self) -> LimiterStats:
        """The sum over all limiters."""
        return sum(self.limiters.values(), LimiterStats())


@dataclass(frozen=True, slots=True)
class HotKey:
    """A key that was denied or allowed often of late, from ``Store.hot_keys()``."""

    limiter: str
    """The limiter's name, of more than 48 bytes its beginning and a digest."""
    algorithm: str
    """The limiter's class, such as ``"TokenBucket"``."""
    digest: str
    """14 hexadecimal digits of the key's hash under a secret of the segment: it stores no key itself."""
    denied: int
    """Denied requests. Every 69 seconds all counts are halved, so it stands for the latest one to two minutes."""
    denied_ago: float | None
    """Seconds since the latest denial, to about a second. None if the record has none."""
    allowed: int
    """Allowed requests, estimated from every 61st, and halved as `denied`."""

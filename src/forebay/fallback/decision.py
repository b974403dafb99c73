"""The result of ``hit`` and ``peek``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from inspect import Signature
from typing import ClassVar, Literal, NoReturn, Self, final

from forebay.rate import is_never

__all__ = ["Decision", "Outlook", "decision_of", "seconds_from_ns"]


def seconds_from_ns(duration_ns: int) -> float:
    """A duration in seconds, never less than in ns: a caller that sleeps that long must not wake too early."""
    if is_never(duration_ns):
        return math.inf
    seconds = duration_ns / 1e9
    if duration_ns < 2**50:
        return seconds
    return math.nextafter(math.nextafter(seconds, math.inf), math.inf)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The requests that a key may send after a decision, and when.

    `available` is time at the rate, or, at 1 per 1, permits.
    """

    available: int = 0
    rate_limit: int = 1
    rate_period_ns: int = 1
    retry_after_ns: int = 0
    reset_after_ns: int = 0


@final
class Decision:
    """A limiter's decision about one request. True if the request was allowed.

    * ``allowed``
    * ``limiter``: the name of the limiter whose limit bound the request
    * ``limit``: the most permits that can be allowed at once (a bucket's burst)
    * ``remaining``: the permits that would still be allowed right after this decision; more than the limit if ``add``
      gave a key more
    * ``retry_after``, ``reset_after``, ``next_after``: seconds, and the same with ``_ns`` in exact nanoseconds
    * ``degraded``: Redis was unavailable, and the store's ``when_unavailable`` policy decided
    * ``full``: the store had no room for the key, and its ``on_full`` decided
    * ``reason``: ``"limit"``, ``"no room"``, or None if it was allowed

    Immutable, so safe to share between threads. Only limiters make decisions.
    """

    __slots__ = ("allowed", "degraded", "full", "limit", "limiter", "outlook")
    __signature__: ClassVar[Signature] = Signature()

    allowed: bool
    degraded: bool
    full: bool
    limit: int
    limiter: str
    outlook: Outlook

    def __new__(cls) -> Self:
        raise TypeError("decisions are made by limiters: use limiter.hit(key)")

    def __init_subclass__(cls) -> None:
        raise TypeError("no class derives from Decision")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Decision is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Decision is immutable")

    @property
    def reason(self) -> Literal["limit", "no room"] | None:
        return None if self.allowed else "no room" if self.full else "limit"

    @property
    def remaining(self) -> int:
        outlook = self.outlook
        if outlook.rate_limit == outlook.rate_period_ns:
            return outlook.available
        return min(self.limit, outlook.available * outlook.rate_limit // outlook.rate_period_ns)

    @property
    def retry_after_ns(self) -> int:
        return self.outlook.retry_after_ns

    @property
    def reset_after_ns(self) -> int:
        return self.outlook.reset_after_ns

    @property
    def next_after_ns(self) -> int:
        outlook = self.outlook
        if not self.allowed:
            return outlook.retry_after_ns
        if outlook.rate_limit == outlook.rate_period_ns:
            return outlook.reset_after_ns
        if self.remaining >= self.limit:
            return 0
        if outlook.available:
            return self._time_of(self.remaining + 1) - outlook.available
        # The overdraft is unknown. But after `reset_after_ns` all permits are back, and the others come after the next.
        others_ns = self._time_of(self.limit) - self._time_of(1)
        return outlook.reset_after_ns - min(others_ns, outlook.reset_after_ns)

    def _time_of(self, permits: int) -> int:
        return -(-permits * self.outlook.rate_period_ns // self.outlook.rate_limit)

    @property
    def retry_after(self) -> float:
        return seconds_from_ns(self.retry_after_ns)

    @property
    def reset_after(self) -> float:
        return seconds_from_ns(self.reset_after_ns)

    @property
    def next_after(self) -> float:
        return seconds_from_ns(self.next_after_ns)

    def __bool__(self) -> bool:
        return self.allowed

    def __repr__(self) -> str:
        return (
            f"Decision(allowed={self.allowed}, limit={self.limit}, remaining={self.remaining}, "
            f"retry_after={self.retry_after}, reset_after={self.reset_after}"
            f"{', degraded=True' if self.degraded else ''}{', full=True' if self.full else ''})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Decision can't be pickled or copied: take the fields you need")


def decision_of(
    limiter: str, allowed: bool, limit: int, outlook: Outlook, *, degraded: bool = False, full: bool = False
) -> Decision:
    decision = object.__new__(Decision)
    fields = {"limiter": limiter, "allowed": allowed, "limit": limit, "outlook": outlook}
    for name, value in (*fields.items(), ("degraded", degraded), ("full", full)):
        object.__setattr__(decision, name, value)
    return decision


def _decision(
    limiter: str,
    allowed: bool,
    limit: int,
    available: int,
    rate_limit: int,
    rate_period_ns: int,
    retry_after_ns: int,
    reset_after_ns: int,
    degraded: bool = False,
    full: bool = False,
) -> Decision:
    """Make a Decision, for limiters whose state is elsewhere."""
    outlook = Outlook(available, rate_limit, rate_period_ns, retry_after_ns, reset_after_ns)
    return decision_of(limiter, bool(allowed), limit, outlook, degraded=bool(degraded), full=bool(full))

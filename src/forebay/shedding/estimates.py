"""How an adaptive limit follows the latency: the algorithms of Netflix's concurrency-limits, as functions of a window.

The source of both algorithms is https://github.com/Netflix/concurrency-limits (``Gradient2Limit``, ``AIMDLimit`` and
``WindowedLimit``), which is Java under the Apache License 2.0. This is our own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration, as_period_ns
from forebay.shedding.shedder import check_count

__all__ = ["AIMD", "Estimate", "Gradient2", "LongLatency", "Window"]

WARM_UP: Final = 10
"""The first so many windows have equal weight in the long latency."""
DRIFT: Final = 0.95
"""The long latency shrinks by this factor in a window whose latency is less than half of it."""


class Window(NamedTuple):
    """The requests that ended in a window."""

    latency_us: float
    """Their mean latency; 0 without one."""
    is_used: bool
    """Whether at least half of the limit was in flight. If not, a higher limit would change nothing."""
    has_drop: bool
    """Whether what a request needs refused it or timed out."""


class LongLatency(NamedTuple):
    """The mean latency over many windows, the newer of which weigh more."""

    latency_us: float = 0.0
    windows: int = 0
    """How many it is made of, up to `WARM_UP`."""


class Estimate(NamedTuple):
    """The limit and the long latency after a window."""

    limit: float
    long: LongLatency


@dataclass(frozen=True)
class Gradient2:
    """A limit that follows the ratio of the long-term latency to that of the last window.

    After each window of requests: ``gradient = tolerance * long / short``, from 0.5 to 1;
    ``limit = (1 - smoothing) * limit + smoothing * (gradient * limit + queue)``. While the latency is at most
    `tolerance` times the usual one, the limit grows by `queue` requests, smoothed; as it rises above that, the limit
    shrinks. The long latency is an exponential mean over `long_windows` windows. The limit is from `least` to `most`,
    and begins at `initial`. A limit that isn't used, because fewer than half as many requests come, stays.

    It needs no figure of the backend, but learns the usual latency from the first ten windows: if all of these are
    overloaded, it takes that for usual. Raises ``InvalidLimiter``. Immutable. O(1) per window.
    """

    initial: int = 20
    least: int = 1
    most: int = 200
    queue: float = 4
    tolerance: float = 1.5
    smoothing: float = 0.2
    long_windows: int = 600

    def __post_init__(self) -> None:
        _check_limits(self)
        _check_number(self, "queue", 0, self.most)
        _check_number(self, "tolerance", 1, 1000)
        _check_number(self, "smoothing", 0.001, 1)
        _check_number(self, "long_windows", 1, 10**6)

    def after(self, limit: float, long: LongLatency, window: Window) -> Estimate:
        """The estimate after a window."""
        short_us = window.latency_us
        if short_us <= 0:
            return Estimate(limit, long)
        long = self._long_after(long, short_us)
        # The gradient is that of the long latency before it shrinks.
        drift = DRIFT if long.latency_us > 2 * short_us else 1.0
        kept = LongLatency(long.latency_us * drift, long.windows)
        if not window.is_used:
            return Estimate(limit, kept)
        gradient = max(0.5, min(1.0, self.tolerance * long.latency_us / short_us))
        limit = limit * (1 - self.smoothing) + (limit * gradient + self.queue) * self.smoothing
        return Estimate(min(max(limit, self.least), self.most), kept)

    def _long_after(self, long: LongLatency, short_us: float) -> LongLatency:
        if long.windows < WARM_UP:
            windows = long.windows + 1
            return LongLatency(long.latency_us + (short_us - long.latency_us) / windows, windows)
        weight = 2 / (self.long_windows + 1)
        return LongLatency(long.latency_us + (short_us - long.latency_us) * weight, WARM_UP)


@dataclass(frozen=True)
class AIMD:
    """A limit that grows by one after each window of requests, and shrinks when requests fail or take too long.

    Additive increase, multiplicative decrease. If a request of the window was dropped, or their mean latency exceeds
    `timeout`, the limit is multiplied by `backoff`. The limit is from `least` to `most`, and begins at `initial`. A
    limit that isn't used, because fewer than half as many requests come, doesn't grow.

    Raises ``InvalidLimiter``, ``InvalidRate``. Immutable. O(1) per window.
    """

    initial: int = 20
    least: int = 1
    most: int = 200
    backoff: float = 0.9
    timeout: Duration = "5s"

    def __post_init__(self) -> None:
        _check_limits(self)
        _check_number(self, "backoff", 0.5, 0.999)
        as_period_ns(self.timeout)

    def after(self, limit: float, long: LongLatency, window: Window) -> Estimate:
        """The estimate after a window. It has no long latency."""
        if window.has_drop or window.latency_us * 1000 > as_period_ns(self.timeout):
            limit *= self.backoff
        elif window.is_used:
            limit += 1
        return Estimate(min(max(limit, self.least), self.most), long)


def _check_limits(algorithm: Gradient2 | AIMD) -> None:
    kind = type(algorithm).__name__
    for what in ("initial", "least", "most"):
        check_count(f"{what} of {kind}", getattr(algorithm, what))
    if not algorithm.least <= algorithm.initial <= algorithm.most:
        raise InvalidLimiter(
            f"the limit of {kind} begins at initial={algorithm.initial}, which is not from least={algorithm.least} to "
            f"most={algorithm.most}"
        )


def _check_number(algorithm: Gradient2 | AIMD, what: str, least: float, most: float) -> None:
    value: Any = getattr(algorithm, what)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise InvalidLimiter(
            f"{what} of {type(algorithm).__name__} is a number from {least:g} to {most:g}, not {short_repr(value)}"
        )

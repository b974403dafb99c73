"""The limits to compare: every algorithm with the same rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.core.cell_limiter import CellLimiter
from forebay.core.kinds import (
    BucketedWindow,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)
from forebay.rate import NS, Rate
from forebay.store import Store

__all__ = ["ALGORITHMS", "Candidate", "candidates"]

BUCKETS: Final = 60
STORE_BYTES_PER_KEY: Final = 21
STORE_BYTES: Final = 100 * 1024


@dataclass(frozen=True)
class Candidate:
    """One algorithm with one limit. `burst` is that of a token bucket, or the capacity of a leaky bucket.

    Its name shows a burst that isn't the rate's limit.
    """

    algorithm: str
    rate: Rate
    burst: int | None = None

    @property
    def label(self) -> str:
        """The name without the rate."""
        return self.algorithm if self.burst in (None, self.rate.limit) else f"{self.algorithm}, burst {self.burst:,}"

    def __str__(self) -> str:
        return f"{self.rate}, {self.label}"

    def make(self, store: Store, keys: int) -> CellLimiter:
        """The limiter, for so many live keys."""
        return _MAKERS[self.algorithm](store, self, keys)

    @property
    def live_span_ns(self) -> int:
        """A key has state for no longer than this after its last request."""
        period_ns = self.rate.period_ns
        if self.burst is not None:
            return max(period_ns, -(-period_ns * self.burst // self.rate.limit))
        if self.algorithm == "sliding-window":
            return 2 * period_ns
        if self.algorithm == "bucketed-window":
            return period_ns + -(-period_ns // BUCKETS)
        return period_ns

    def bytes_needed(self, keys: int) -> int:
        """About the memory of the store and the limiter for so many live keys."""
        if self.algorithm == "sliding-log":
            return STORE_BYTES + SlidingLog.bytes_needed(self.rate, keys=keys)
        if self.algorithm == "bucketed-window":
            return STORE_BYTES + BucketedWindow.bytes_needed(BUCKETS, keys=keys)
        return STORE_BYTES + STORE_BYTES_PER_KEY * keys

    def store_keys(self, keys: int) -> int:
        """How many of so many live keys are in the store's own table."""
        return 1 if self.algorithm in ("sliding-log", "bucketed-window") else keys


def _interval_s(rate: Rate) -> str:
    interval_ns = -(-rate.period_ns // rate.limit)
    return f"{interval_ns // NS}.{interval_ns % NS:09} s"


_Maker = Callable[[Store, Candidate, int], CellLimiter]
_MAKERS: Final[dict[str, _Maker]] = {
    "token-bucket": lambda store, one, keys: TokenBucket(store, "tune", one.rate, one.burst),
    "leaky-bucket": lambda store, one, keys: LeakyBucket(store, "tune", one.rate, one.burst or one.rate.limit),
    "min-interval": lambda store, one, keys: MinInterval(store, "tune", _interval_s(one.rate)),
    "fixed-window": lambda store, one, keys: FixedWindow(store, "tune", one.rate),
    "sliding-window": lambda store, one, keys: SlidingWindow(store, "tune", one.rate),
    "bucketed-window": lambda store, one, keys: BucketedWindow(store, "tune", one.rate, BUCKETS, keys=keys),
    "sliding-log": lambda store, one, keys: SlidingLog(store, "tune", one.rate, keys=keys),
}
ALGORITHMS: Final = tuple(_MAKERS)


def candidates(rates: Sequence[Rate], algorithms: Sequence[str], bursts: Sequence[int]) -> Iterator[Candidate]:
    """Every algorithm with every rate, and each bucket with every burst; without bursts, with the rate's limit."""
    for rate in dict.fromkeys(rates):
        for algorithm in dict.fromkeys(algorithms):
            if algorithm in ("token-bucket", "leaky-bucket"):
                for burst in dict.fromkeys(bursts or [rate.limit]):
                    yield Candidate(algorithm, rate, burst)
            else:
                yield Candidate(algorithm, rate)

"""Every algorithm, with limits that allow or deny all requests of one key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from forebay.core.all_of import AllOf
from forebay.core.kinds import (
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)
from forebay.rate import Rate
from forebay.store import Store

__all__ = ["ALLOWING", "DENYING", "GENEROUS", "LASTING", "Make", "busy_concurrency", "three_buckets"]

# Never denied in a run, and its keys stay live: a thousand permits come back each second, and far more are taken.
GENEROUS: Final[dict[str, Any]] = {"rate": "1000/second", "burst": 2_000_000_000}
# A key stays live for a day after one request, and allows very many.
LASTING: Final[dict[str, Any]] = {"rate": "1/day", "burst": 10_000}

# A process can't take 25 permits per microsecond, so a window is never full, and its previous period never empty: the
# sliding window has a previous count to weigh, the log has entries to overwrite.
PERMITS_PER_US: Final = 25
WINDOW_MS: Final = 100

Limiting = BucketedWindow | FixedWindow | LeakyBucket | MinInterval | SlidingLog | SlidingWindow | TokenBucket
Make = Callable[[Store], Limiting]


def _log(limit: int) -> Make:
    return lambda store: SlidingLog(store, "x", Rate.per_ns(limit, limit * 1000 // PERMITS_PER_US), keys=1)


ALLOWING: Final[dict[str, Make]] = {
    "token bucket": lambda store: TokenBucket(store, "x", **GENEROUS),
    "token bucket, interval refill": lambda store: TokenBucket(store, "x", **GENEROUS, refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "x", "1000/second", GENEROUS["burst"]),
    "minimum interval": lambda store: MinInterval(store, "x", "0.00001 ms"),
    "fixed window": lambda store: FixedWindow(store, "x", "1000000000/day"),
    "fixed window, from the first request": lambda store: FixedWindow(store, "x", "1000000000/day", align="first"),
    "fixed window, staggered": lambda store: FixedWindow(store, "x", "1000000000/day", align="stagger"),
    "sliding window": lambda store: SlidingWindow(
        store, "x", Rate.per_ns(PERMITS_PER_US * WINDOW_MS * 1000, WINDOW_MS * 10**6)
    ),
    # All requests are in one bucket, so a decision reads every mark.
    "bucketed window, one bucket in use": lambda store: BucketedWindow(store, "x", "1000000000/day", keys=1),
    **{f"sliding log, limit {limit:,}": _log(limit) for limit in (10, 1000, 1_000_000)},
}

# They allow one request.
DENYING: Final[dict[str, Make]] = {
    "token bucket": lambda store: TokenBucket(store, "x", "1/day"),
    "token bucket, interval refill": lambda store: TokenBucket(store, "x", "1/day", refill="interval"),
    "leaky bucket, full": lambda store: LeakyBucket(store, "x", "1/day", 1),
    "minimum interval": lambda store: MinInterval(store, "x", "1 day"),
    "fixed window": lambda store: FixedWindow(store, "x", "1/day"),
    "sliding window": lambda store: SlidingWindow(store, "x", "1/day"),
    "bucketed window, one bucket in use": lambda store: BucketedWindow(store, "x", "1/day", keys=1),
    "sliding log, limit 1": lambda store: SlidingLog(store, "x", "1/day", keys=1),
}


def three_buckets(store: Store) -> AllOf:
    return AllOf(*[TokenBucket(store, name, **GENEROUS) for name in ("second", "hour", "everybody")])


def busy_concurrency(store: Store, limit: int, held: int, key: str) -> Concurrency:
    """One of which so many permits are held."""
    concurrency = Concurrency(store, "x", limit, lease="1 day", keys=1)
    concurrency.acquire(key, held)
    return concurrency

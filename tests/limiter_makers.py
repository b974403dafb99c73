"""Makers of limiters, one of each kind, all with the same limit, for any store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay import (
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)

Make = Callable[[Store], Any]

OF_A_HUNDRED: dict[str, Make] = {
    "bucket": lambda store: TokenBucket(store, "api", "100/hour"),
    "interval": lambda store: TokenBucket(store, "api", "100/hour", refill="interval"),
    "queue": lambda store: LeakyBucket(store, "api", "100/hour", 100),
    "fixed": lambda store: FixedWindow(store, "api", "100/hour"),
    "first": lambda store: FixedWindow(store, "api", "100/hour", align="first"),
    "sliding": lambda store: SlidingWindow(store, "api", "100/hour"),
    "bucketed": lambda store: BucketedWindow(store, "api", "100/hour", 4, keys=64),
    "log": lambda store: SlidingLog(store, "api", "100/hour", keys=64),
}

OF_FIVE: dict[str, Make] = {
    "fixed window": lambda s: FixedWindow(s, "five", "5/hour"),
    "sliding window": lambda s: SlidingWindow(s, "five", "5/hour"),
    "bucketed window": lambda s: BucketedWindow(s, "five", "5/hour", buckets=3, keys=2),
    "sliding log": lambda s: SlidingLog(s, "five", "5/hour", keys=2),
    "token bucket": lambda s: TokenBucket(s, "five", "5/hour"),
    "token bucket in intervals": lambda s: TokenBucket(s, "five", "5/hour", refill="interval"),
    "leaky bucket": lambda s: LeakyBucket(s, "five", "1/hour", 5),
    "concurrency": lambda s: Concurrency(s, "five", 5, lease="1h", keys=2),
}

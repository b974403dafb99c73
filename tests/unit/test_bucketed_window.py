"""Bucketed windows in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import BucketedWindow, InvalidLimiter, Rate, Store
from forebay.testing import ManualClock

NS = 1_000_000_000
YEAR = 31_536_000
START = 3600


def test_bucketed_window_shows_its_parameters(store: Store) -> None:
    limiter = BucketedWindow(store, "api", "500/hour", buckets=12, keys=40)
    assert (limiter.rate, limiter.buckets) == (Rate(500, 3600), 12)
    assert repr(limiter) == "<BucketedWindow 'api' 500 per hour, buckets=12, keys=40>"
    assert BucketedWindow(store, "other", "500/hour").buckets == 60


def test_bucketed_window_refuses_buckets_below_a_nanosecond(store: Store) -> None:
    with pytest.raises(InvalidLimiter):
        BucketedWindow(store, "api", Rate(1, 1e-8), buckets=60)


@pytest.mark.parametrize("keys", [0, -1, True, 1.0, "60", 2**40])
def test_bucketed_window_refuses_invalid_numbers_of_keys(store: Store, keys: Any) -> None:
    with pytest.raises(InvalidLimiter, match="keys"):
        BucketedWindow(store, "api", "5/hour", keys=keys)


def test_bytes_needed_counts_buckets_and_keys() -> None:
    assert BucketedWindow.bytes_needed(60, keys=1000) >= 1000 * 60 * 8
    assert BucketedWindow.bytes_needed(60, keys=1000) < 2 * 1000 * (60 * 8 + 16)
    for buckets in (0, -1, True, 1.5, 2**16 + 1):
        with pytest.raises(InvalidLimiter, match="whole number from 1 to 2"):
            BucketedWindow.bytes_needed(buckets)  # type: ignore[arg-type]


def test_bucket_length_is_rounded_up_to_the_nanosecond(store: Store, clock: ManualClock) -> None:
    limiter = BucketedWindow(store, "api", "1/second", buckets=3, keys=8)
    clock.set(0)
    # Three buckets of 333,333,334 ns.
    assert limiter.hit("k").reset_after_ns == 1_000_000_002


@pytest.mark.parametrize(("limit", "period"), [(1, 0.01), (1000, 0.01), (10**6, 60), (10**8, 3600), (10**9, YEAR)])
def test_bucketed_window_keeps_limits_and_periods_of_every_size(
    store: Store, clock: ManualClock, limit: int, period: float
) -> None:
    limiter = BucketedWindow(store, "api", Rate(limit, period), buckets=10, keys=8)
    bucket_ns = round(period * NS) // 10
    clock.set((START // period + 1) * period)
    assert limiter.hit("k", limit).reset_after_ns == 10 * bucket_ns
    assert limiter.hit("k").retry_after_ns == 10 * bucket_ns
    clock.advance(period)
    assert limiter.peek("k").remaining == limit

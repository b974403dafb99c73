"""Token buckets with interval refill in memory, by example. tests/behaviour has the properties of every place."""

from __future__ import annotations

import pytest

from forebay import InvalidLimiter, Rate, Store, TokenBucket
from forebay.testing import ManualClock

NS = 1_000_000_000
YEAR = 31_536_000
START = 1200  # the start of a minute


@pytest.fixture
def bucket(store: Store, clock: ManualClock) -> TokenBucket:
    clock.set(START)
    return TokenBucket(store, "api", "3/minute", burst=10, refill="interval")


def test_interval_bucket_shows_its_parameters(bucket: TokenBucket) -> None:
    assert (bucket.refill, bucket.burst, bucket.rate) == ("interval", 10, Rate(3, 60))
    assert repr(bucket) == "<TokenBucket 'api' 3 per minute, burst=10, refill='interval'>"
    assert TokenBucket(bucket.store, "other", "3/minute").refill == "continuous"


@pytest.mark.parametrize("period", [0.01, 1, 60, YEAR])
@pytest.mark.parametrize("limit", [1, 1000, 10**9])
def test_interval_bucket_keeps_rates_of_every_size(store: Store, clock: ManualClock, period: float, limit: int) -> None:
    period_ns = round(period * NS)
    limit = min(limit, period_ns)
    limiter = TokenBucket(store, "api", Rate(limit, period), burst=3 * limit, refill="interval")
    clock.set((START // period + 1) * period)
    assert limiter.hit("k", 3 * limit).reset_after_ns == 3 * period_ns
    denied = limiter.hit("k", limit + 1) if limit > 1 else limiter.hit("k", 2)
    assert denied.retry_after_ns == 2 * period_ns
    clock.advance(2 * period)
    assert limiter.peek("k").remaining == 2 * limit


def test_refill_longer_than_the_clocks_range_is_refused(store: Store) -> None:
    assert TokenBucket(store, "api", "1/year", burst=72, refill="interval").hit("k", 72)
    with pytest.raises(InvalidLimiter, match="73 years"):
        TokenBucket(store, "api", "1/year", burst=74, refill="interval")

"""Token buckets with refill in intervals, by example. The rest is in tests/property."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import InvalidLimiter, Rate, Store, TokenBucket
from penstock.testing import ManualClock

NS = 1_000_000_000
YEAR = 31_536_000
START = 1200  # of a minute


@pytest.fixture
def bucket(store: Store, clock: ManualClock) -> TokenBucket:
    clock.set(START)
    return TokenBucket(store, "api", "3/minute", burst=10, refill="interval")


def test_what_it_tells_of_itself(bucket: TokenBucket) -> None:
    assert (bucket.refill, bucket.burst, bucket.rate) == ("interval", 10, Rate(3, 60))
    assert repr(bucket) == "<TokenBucket 'api' 3 per minute, burst=10, refill='interval'>"
    assert TokenBucket(bucket.store, "other", "3/minute").refill == "continuous"


@pytest.mark.parametrize("refill", ["", "Interval", "never", None, 1, b"interval"])
def test_a_refill_that_is_none(store: Store, refill: Any) -> None:
    with pytest.raises(InvalidLimiter, match="'continuous' or 'interval'"):
        TokenBucket(store, "api", "3/minute", refill=refill)


def test_three_are_put_back_at_each_minute_and_never_more_than_the_burst(
    bucket: TokenBucket, clock: ManualClock
) -> None:
    clock.set(START + 30)
    decision = bucket.hit("k", 10)
    assert (decision.remaining, decision.reset_after_ns) == (0, 210 * NS)  # full again at the fourth minute
    for cost, minute in ((1, 1), (3, 1), (4, 2), (7, 3), (10, 4)):
        assert bucket.peek("k", cost).retry_after_ns == (minute * 60 - 30) * NS
    for minute, remaining in ((1, 3), (2, 6), (3, 9), (4, 10), (5, 10)):
        clock.set(START + minute * 60 - 1e-9)
        assert bucket.peek("k").remaining == max(0, 3 * (minute - 1)) if minute < 5 else 10
        clock.set(START + minute * 60)
        assert bucket.peek("k").remaining == remaining


def test_what_is_above_the_burst_is_lost(bucket: TokenBucket, clock: ManualClock) -> None:
    assert bucket.hit("k", 1).reset_after_ns == 60 * NS
    clock.set(START + 60)
    assert bucket.hit("k", 10).remaining == 0


def test_it_has_one_limit_for_all_calls(bucket: TokenBucket) -> None:
    calls: list[dict[str, Any]] = [{"rate": "5/minute"}, {"rate": "3/minute"}, {"rate": "5/hour", "burst": 5}]
    for options in calls:
        for ask in (bucket.hit, bucket.peek, bucket.refund):
            with pytest.raises(InvalidLimiter):
                ask("k", **options)


def test_a_continuous_bucket_of_the_same_name_is_another_state(bucket: TokenBucket) -> None:
    bucket.hit("k", 10)
    assert TokenBucket(bucket.store, "api", "3/minute", burst=10).peek("k").remaining == 10


@pytest.mark.parametrize("period", [0.01, 1, 60, YEAR])
@pytest.mark.parametrize("limit", [1, 1000, 10**9])
def test_rates_of_every_size(store: Store, clock: ManualClock, period: float, limit: int) -> None:
    period_ns = round(period * NS)
    limit = min(limit, period_ns)
    limiter = TokenBucket(store, "api", Rate(limit, period), burst=3 * limit, refill="interval")
    clock.set((START // period + 1) * period)
    assert limiter.hit("k", 3 * limit).reset_after_ns == 3 * period_ns
    denied = limiter.hit("k", limit + 1) if limit > 1 else limiter.hit("k", 2)
    assert denied.retry_after_ns == 2 * period_ns
    clock.advance(2 * period)
    assert limiter.peek("k").remaining == 2 * limit


def test_a_bucket_that_takes_longer_than_a_clock_runs_is_refused(store: Store) -> None:
    assert TokenBucket(store, "api", "1/year", burst=72, refill="interval").hit("k", 72)
    with pytest.raises(InvalidLimiter, match="73 years"):
        TokenBucket(store, "api", "1/year", burst=74, refill="interval")

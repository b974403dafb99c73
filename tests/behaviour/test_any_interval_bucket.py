"""Token buckets with interval refill, by example."""

from __future__ import annotations

from typing import Any

import pytest
from places import STRICT, Clock, Place

from forebay import InvalidLimiter, TokenBucket

pytestmark = pytest.mark.places(*STRICT)

NS = 1_000_000_000
START = 1200  # the start of a minute


@pytest.fixture
def bucket(store: Any, clock: Clock) -> TokenBucket:
    clock.set(START)
    return TokenBucket(store, "api", "3/minute", burst=10, refill="interval")


@pytest.mark.parametrize("refill", ["", "Interval", "never", None, 1, b"interval"])
def test_token_bucket_refuses_unknown_refills(store: Any, refill: Any) -> None:
    with pytest.raises(InvalidLimiter, match="'continuous' or 'interval'"):
        TokenBucket(store, "api", "3/minute", refill=refill)


def test_refill_adds_three_each_minute_up_to_the_burst(bucket: TokenBucket, clock: Clock, place: Place) -> None:
    clock.set(START + 30)
    decision = bucket.hit("k", 10)
    assert (decision.remaining, decision.reset_after_ns) == (0, 210 * NS)  # full again at the fourth minute
    for cost, minute in ((1, 1), (3, 1), (4, 2), (7, 3), (10, 4)):
        assert bucket.peek("k", cost).retry_after_ns == (minute * 60 - 30) * NS
    for minute, remaining in ((1, 3), (2, 6), (3, 9), (4, 10), (5, 10)):
        clock.set_ns((START + minute * 60) * NS - place.grain_ns)
        assert bucket.peek("k").remaining == max(0, 3 * (minute - 1)) if minute < 5 else 10
        clock.set(START + minute * 60)
        assert bucket.peek("k").remaining == remaining


def test_refill_above_the_burst_is_lost(bucket: TokenBucket, clock: Clock) -> None:
    assert bucket.hit("k", 1).reset_after_ns == 60 * NS
    clock.set(START + 60)
    assert bucket.hit("k", 10).remaining == 0


def test_interval_bucket_refuses_a_rate_for_one_call(bucket: TokenBucket) -> None:
    calls: list[dict[str, Any]] = [{"rate": "5/minute"}, {"rate": "3/minute"}, {"rate": "5/hour", "burst": 5}]
    for options in calls:
        for method in (bucket.hit, bucket.peek, bucket.refund):
            with pytest.raises(InvalidLimiter):
                method("k", **options)


def test_continuous_bucket_of_the_same_name_has_another_state(bucket: TokenBucket) -> None:
    bucket.hit("k", 10)
    assert TokenBucket(bucket.store, "api", "3/minute", burst=10).peek("k").remaining == 10

"""Sliding logs by example."""

from __future__ import annotations

from typing import Any

import pytest
from places import STRICT, Clock

from forebay import CostExceedsLimit, InvalidLimiter, Rate, SlidingLog

pytestmark = pytest.mark.places(*STRICT)

NS = 1_000_000_000
YEAR = 31_536_000


def test_log_allows_a_million_permits_and_a_cost_of_nearly_all(store: Any, clock: Clock) -> None:
    limiter = SlidingLog(store, "export", "1000000/hour", keys=1)
    first = limiter.hit("k", 999_999)
    assert (first.allowed, first.remaining, first.reset_after_ns) == (True, 1, 3600 * NS)
    clock.advance(10)
    assert [limiter.allow("k"), limiter.allow("k")] == [True, False]
    assert limiter.peek("k", 999_999).retry_after_ns == 3590 * NS
    assert limiter.peek("k", 1_000_000).retry_after_ns == 3600 * NS
    clock.advance(3590)
    assert limiter.hit("k", 999_999).remaining == 0
    clock.advance(10)
    assert limiter.peek("k").remaining == 1
    limiter.refund("k", 1000)
    assert limiter.peek("k").remaining == 1001
    with pytest.raises(CostExceedsLimit):
        limiter.hit("k", 1_000_001)


def test_log_allows_exactly_its_limit_in_every_period(store: Any, clock: Clock) -> None:
    limiter = SlidingLog(store, "export", "3/second", keys=8)
    clock.set(10)
    passed = []
    for step in range(100):
        clock.set(10 + step / 10)
        if limiter.allow("k"):
            passed.append(step)
    assert passed == [10 * second + number for second in range(10) for number in range(3)]


def test_refund_gives_back_the_oldest_permits(store: Any, clock: Clock) -> None:
    limiter = SlidingLog(store, "export", "4/minute", keys=8)
    for _ in range(4):
        assert limiter.allow("k")
        clock.advance(10)
    limiter.refund("k", 2)
    assert limiter.peek("k").remaining == 2
    assert limiter.peek("k", 3).retry_after_ns == 40 * NS  # the permits of 20 and 30 s remain


def test_refunded_permits_can_be_taken_at_the_same_instant(store: Any) -> None:
    limiter = SlidingLog(store, "export", "6/day", keys=8)
    for _ in range(3):
        assert limiter.hit("k", 6)
        limiter.refund("k", 6)
    assert [limiter.allow("k") for _ in range(8)] == [True] * 6 + [False] * 2
    limiter.reset("k")
    assert [limiter.allow("k") for _ in range(8)] == [True] * 6 + [False] * 2


@pytest.mark.parametrize("period", [0.01, 1, 60, YEAR])
def test_log_keeps_periods_of_every_length(store: Any, clock: Clock, period: float) -> None:
    limiter = SlidingLog(store, "export", Rate(2, period), keys=8)
    assert limiter.hit("k", 2).reset_after_ns == round(period * NS)
    clock.advance(period)
    assert limiter.hit("k", 2).remaining == 0


def test_log_refuses_a_rate_for_one_call(store: Any) -> None:
    limiter = SlidingLog(store, "export", "5/hour", keys=8)
    for method in (limiter.hit, limiter.peek, limiter.refund):
        with pytest.raises(InvalidLimiter):
            method("k", rate="6/hour")

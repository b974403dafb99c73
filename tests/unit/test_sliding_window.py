"""Sliding windows in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest

from forebay import InvalidLimiter, Rate, SlidingWindow, Store
from forebay.testing import ManualClock

NS = 1_000_000_000
YEAR = 31_536_000
START = 1200  # the start of a minute


def test_sliding_window_shows_its_parameters(store: Store) -> None:
    limiter = SlidingWindow(store, "api", "1000/hour")
    assert (limiter.store, limiter.name, limiter.rate) == (store, "api", Rate(1000, 3600))
    assert repr(limiter) == "<SlidingWindow 'api' 1000 per hour>"
    assert limiter.rounding == "down"
    assert repr(SlidingWindow(store, "api", "5/hour")) == "<SlidingWindow 'api' 5 per hour>"
    assert repr(SlidingWindow(store, "up", "6/hour", rounding="up")) == "<SlidingWindow 'up' 6 per hour rounding='up'>"
    assert repr(SlidingWindow(store, "x", "5/hour", rounding="down")) == (
        "<SlidingWindow 'x' 5 per hour rounding='down'>"
    )
    with pytest.raises(AttributeError):
        limiter.rounding = "up"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("limit", "period"),
    [
        (1, 0.000_001),
        (3, 0.000_001),
        (5, 0.001),
        (7, 0.001),
        (1, 0.01),
        (100, 0.01),
        (1000, 1),
        (30_000, 1),
        (250_000, 60),
        (10**6, 3600),
        (10**6, YEAR),
        (10**7, YEAR),
    ],
)
def test_both_counts_are_exact_if_they_fit(store: Store, clock: ManualClock, limit: int, period: float) -> None:
    limiter = SlidingWindow(store, "api", Rate(limit, period), rounding="down")
    start = (1000 // period + 1) * period
    clock.set(start)
    assert limiter.hit("k", limit).remaining == 0
    clock.set(start + period + period / 2)
    assert limiter.peek("k").remaining == limit - limit // 2
    assert SlidingWindow(store, "api", limiter.rate, rounding="up").peek("k").remaining == limit // 2
    clock.set(start + 2 * period)
    assert limiter.peek("k").reset_after_ns == 0


@pytest.mark.parametrize(("limit", "period"), [(10**9, 60), (10**9, 3600), (10**9, YEAR), (10**7, 1)])
def test_previous_count_of_a_larger_limit_is_rounded_up_by_less_than_a_sixteenth(
    store: Store, clock: ManualClock, limit: int, period: int
) -> None:
    limiter = SlidingWindow(store, "api", Rate(limit, period))
    start = 1000 // period * period + period
    clock.set(start)
    count = limit // 3 + 1
    assert limiter.hit("k", count).remaining == limit - count
    clock.set(start + period + period // 2)
    left = period - period // 2
    remaining = limiter.peek("k").remaining
    assert limit - (count + limit // 16) * left // period <= remaining <= limit - count * left // period
    # The reported remainder is exact nevertheless.
    assert limiter.peek("k", remaining)
    assert not limiter.peek("k", remaining + 1)
    denied = limiter.peek("k", remaining + 1)
    clock.advance(denied.retry_after)
    assert limiter.hit("k", remaining + 1)


@pytest.mark.parametrize("rounding", ["up", "down"])
def test_wait_to_the_windows_end_includes_the_rounding_of_its_count(
    store: Store, clock: ManualClock, rounding: Literal["up", "down"]
) -> None:
    limiter = SlidingWindow(store, "api", "1000000/second", rounding=rounding)  # previous counts in units of 1024
    clock.set(START)
    limiter.hit("k")
    clock.set(START + 1)
    limiter.hit("k", 500_000)
    denied = limiter.hit("k", 500_000)
    assert not denied
    clock.advance(Fraction(denied.retry_after_ns - 1, NS))  # type: ignore[arg-type]
    assert not limiter.peek("k", 500_000)
    clock.advance(Fraction(1, NS))  # type: ignore[arg-type]
    assert limiter.peek("k", 500_000)


def test_limits_with_different_units_of_the_previous_count_have_separate_keys(store: Store, clock: ManualClock) -> None:
    limits = 2**20 - 1024, 2**20 - 1  # the first counts in units of 1024, the second of 2048, in as many bits
    fine, coarse = (SlidingWindow(store, "api", Rate(limit, 1)) for limit in limits)
    clock.set(START)
    assert fine.hit("k", 500_000)
    clock.set(START + 1)
    assert fine.hit("k")
    assert coarse.peek("k").remaining == limits[1]


@pytest.mark.parametrize("limit", [2**25, 15 * 2**22, 15 * 2**22 + 1, 2**26 - 1])
def test_previous_count_of_the_largest_limits_is_rounded_up_by_less_than_a_seventh_of_the_limit(
    store: Store, clock: ManualClock, limit: int
) -> None:
    limiter = SlidingWindow(store, "api", Rate(limit, 1))
    clock.set(START)
    limiter.hit("k")
    clock.set(START + 1)
    assert limit // 2**4 <= limit - limiter.peek("k").remaining < limit // 7


@pytest.mark.parametrize("period_ns", [100, 1000, 10**6, 2**20 - 1, 2**20, NS, 60 * NS, 3600 * NS])
def test_limits_to_a_sixteenth_of_the_period_are_accepted_and_above_an_eighth_refused(
    store: Store, period_ns: int
) -> None:
    for limit in {1, 2, 5, 7, 8, 100, period_ns // 100, period_ns // 17, period_ns // 16}:
        if 0 < limit <= period_ns // 16:
            assert SlidingWindow(store, "api", Rate.per_ns(limit, period_ns)).peek("k", limit)
    for limit in (period_ns // 8 + 4, period_ns // 4, min(period_ns, 2**40)):
        with pytest.raises(InvalidLimiter, match="longer period"):
            SlidingWindow(store, "api", Rate.per_ns(limit, period_ns))

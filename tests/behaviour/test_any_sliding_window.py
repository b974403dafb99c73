"""Sliding windows by example."""

from __future__ import annotations

from typing import Any

import pytest
from places import EXACT, STRICT, Clock

from forebay import InvalidLimiter, Rate, SlidingWindow

pytestmark = pytest.mark.places(*EXACT)

START = 1200  # the start of a minute


def test_refund_reduces_this_windows_count_first(store: Any, clock: Clock) -> None:
    limiter = SlidingWindow(store, "api", "100/minute")
    clock.set(START)
    limiter.hit("k", 40)
    clock.set(START + 90)
    limiter.hit("k", 10)
    assert limiter.peek("k").remaining == 100 - 10 - 20
    limiter.refund("k", 10)
    assert limiter.peek("k").remaining == 100 - 20
    limiter.refund("k", 100)
    assert limiter.peek("k").remaining == 100


@pytest.mark.places(*STRICT)
def test_rate_for_one_call_must_have_the_same_period(store: Any, clock: Clock) -> None:
    limiter = SlidingWindow(store, "api", "100/minute")
    clock.set(START)
    assert limiter.hit("k", 40, rate="60/minute").remaining == 20
    clock.set(START + 90)
    assert limiter.peek("k", rate="60/minute").remaining == 40
    assert limiter.hit("k", 40, rate="60/minute").remaining == 0
    assert not limiter.hit("k", rate="60/minute")
    assert limiter.peek("k").remaining == 40
    calls: list[dict[str, Any]] = [{"rate": "100/hour"}, {"burst": 5}, {"rate": Rate(2**40, 3600)}]
    for options in calls:
        for method in (limiter.hit, limiter.peek, limiter.refund):
            with pytest.raises(InvalidLimiter):
                method("k", **options)
    assert limiter.peek("k").remaining == 40


@pytest.mark.parametrize("rounding", ["", "Up", "nearest", 1, True, b"up", ["up"]])
def test_sliding_window_refuses_unknown_roundings(store: Any, rounding: Any) -> None:
    with pytest.raises(InvalidLimiter, match="'up' or 'down'"):
        SlidingWindow(store, "api", "5/minute", rounding=rounding)


def test_default_rounding_is_up_for_small_limits_and_else_down(store: Any) -> None:
    for limit in (1, 2, 5, 6, 7, 1000):
        assert SlidingWindow(store, "api", Rate(limit, 60)).rounding == ("up" if limit <= 5 else "down")
        for rounding in ("up", "down"):
            assert SlidingWindow(store, "api", Rate(limit, 60), rounding=rounding).rounding == rounding


@pytest.mark.parametrize(
    ("rate", "options", "at_the_edge"),
    [
        ("1/minute", {}, 1),
        ("2/minute", {}, 2),
        ("5/minute", {}, 5),
        ("100/minute", {"rounding": "up"}, 100),
        ("1/minute", {"rounding": "down"}, 2),
        ("7/minute", {}, 8),
        ("100/minute", {}, 101),
    ],
)
def test_requests_at_an_edge_exceed_the_limit_by_the_documented_amount(
    store: Any, clock: Clock, rate: str, options: Any, at_the_edge: int
) -> None:
    limiter = SlidingWindow(store, "api", rate, **options)
    clock.set(START + 59.999)
    passed = sum(limiter.allow("k") for _ in range(200))
    clock.set(START + 60.001)
    passed += sum(limiter.allow("k") for _ in range(200))
    assert passed == at_the_edge


@pytest.mark.parametrize("limit", [1, 5, 30])
def test_window_rounded_up_admits_its_limit_and_its_share_over_an_edge(store: Any, clock: Clock, limit: int) -> None:
    limiter = SlidingWindow(store, "api", Rate(limit, 60), rounding="up")
    clock.set(START + 59)
    passed = sum(limiter.allow("k") for _ in range(limit + 1))
    for second in range(61):
        clock.set(START + 60 + second)
        while limiter.allow("k"):
            passed += 1
        assert 60 * passed <= limit * (60 + second)
    assert passed == 2 * limit


def test_previous_count_rounded_up_weighs_one_to_the_windows_end(store: Any, clock: Clock) -> None:
    limiter = SlidingWindow(store, "api", "3/minute")
    clock.set(START)
    assert limiter.hit("k", 2).reset_after == 120
    clock.set(START + 60)
    assert limiter.hit("k", 2).retry_after == 30
    assert limiter.hit("k", 3).retry_after == 60
    clock.set(START + 90)
    assert limiter.hit("k", 2)
    assert limiter.peek("k", 0).reset_after == 90


def test_limiters_with_different_roundings_share_counts(store: Any, clock: Clock) -> None:
    up, down = (SlidingWindow(store, "api", "10/minute", rounding=rounding) for rounding in ("up", "down"))
    clock.set(START)
    assert up.hit("k", 3).remaining == 7
    assert down.hit("k", 4).remaining == 3
    clock.set(START + 70)  # five sixths of the seven are 5.83
    assert (up.peek("k").remaining, down.peek("k").remaining) == (4, 5)
    assert up.hit("k", 4)
    assert not up.allow("k")
    assert down.allow("k")
    assert not down.allow("k")

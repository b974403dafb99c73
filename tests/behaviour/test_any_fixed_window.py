"""Fixed windows by example: alignments, tiers."""

from __future__ import annotations

from typing import Any

import pytest
from places import STRICT, Clock, Place

from forebay import FixedWindow, InvalidLimiter, InvalidRate, Rate

pytestmark = pytest.mark.places(*STRICT)

NS = 1_000_000_000
MINUTE_NS = 60 * NS
YEAR = 31_536_000


@pytest.mark.parametrize("align", ["", "Clock", "last", None, 1, b"clock", True, ["clock"]])
def test_fixed_window_refuses_unknown_alignments(store: Any, align: Any) -> None:
    with pytest.raises(InvalidLimiter, match="'clock', 'first', 'stagger' or 'calendar'"):
        FixedWindow(store, "login", "5/minute", align=align)


@pytest.mark.parametrize("rate", [None, 5, "often", "5", (5, 60)])
def test_fixed_window_refuses_invalid_rates(store: Any, rate: Any) -> None:
    with pytest.raises(InvalidRate):
        FixedWindow(store, "login", rate)


def test_first_request_window_begins_with_the_request(place: Place, store: Any, clock: Clock) -> None:
    limiter = FixedWindow(store, "api", "1/minute", align="first")
    clock.set(1234.567)
    assert limiter.hit("k").reset_after_ns == MINUTE_NS
    clock.set_ns(clock.now_ns + MINUTE_NS - place.grain_ns)
    assert limiter.hit("k").retry_after_ns == place.grain_ns
    clock.set_ns(clock.now_ns + 100 * NS + place.grain_ns)
    # The next window begins with the next request, not at this one's end.
    assert limiter.hit("k").reset_after_ns == MINUTE_NS


def test_first_request_window_ends_alike_for_later_requests(store: Any, clock: Clock) -> None:
    limiter = FixedWindow(store, "api", "3/minute", align="first")
    end_ns = limiter.hit("k").reset_after_ns
    assert MINUTE_NS <= end_ns < MINUTE_NS + 3
    for seconds in (10, 20):
        clock.advance(10)
        assert limiter.hit("k").reset_after_ns == end_ns - seconds * NS
    assert limiter.hit("k").retry_after_ns == end_ns - 20 * NS


def test_staggered_keys_have_constant_phases_of_their_own(store: Any, clock: Clock) -> None:
    limiter = FixedWindow(store, "api", "5/minute", align="stagger")
    left_ns = [limiter.hit(key).reset_after_ns for key in range(1000)]
    assert all(0 < ns <= MINUTE_NS for ns in left_ns)
    # The phases spread over the whole minute: each tenth has about a tenth of the keys.
    tenths = [sum(ns * 10 // (MINUTE_NS + 1) == tenth for ns in left_ns) for tenth in range(10)]
    assert min(tenths) >= 40
    for seconds in (60, 7 * 60, YEAR - YEAR % 60):
        clock.advance(seconds)
        assert [limiter.hit(key).reset_after_ns for key in range(1000)] == left_ns


@pytest.mark.parametrize("align", ["clock", "first", "stagger"])
def test_rate_for_one_call_must_have_the_same_period(store: Any, align: Any) -> None:
    limiter = FixedWindow(store, "api", "100/minute", align=align)
    assert limiter.hit("k", 50, rate="60/minute").remaining == 10
    assert limiter.hit("k", 10, rate=Rate(60, 60)).remaining == 0
    assert not limiter.hit("k", rate="60/minute")
    assert limiter.peek("k").remaining == 40
    assert limiter.peek("k", rate="30/minute").remaining == 0
    limiter.refund("k", 20, rate="60/minute")
    assert limiter.peek("k").remaining == 60
    for method in (limiter.hit, limiter.peek, limiter.refund):
        with pytest.raises(InvalidLimiter, match="period"):
            method("k", rate="100/hour")
        with pytest.raises(InvalidLimiter, match="burst"):
            method("k", burst=5)
        with pytest.raises(InvalidLimiter):
            method("k", rate=Rate(2**40, 3600))
    assert limiter.peek("k").remaining == 60


def test_windows_of_one_name_with_different_periods_are_separate(store: Any) -> None:
    assert FixedWindow(store, "api", "5/minute").hit("k", 5)
    assert FixedWindow(store, "api", "5/hour").hit("k").remaining == 4
    assert not FixedWindow(store, "api", "5/minute").hit("k")

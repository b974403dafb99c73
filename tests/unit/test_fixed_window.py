"""Fixed windows by example: alignments, extreme rates, tiers. The rest is in tests/property."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import FixedWindow, InvalidLimiter, InvalidRate, Rate, Store
from penstock.testing import ManualClock

NS = 1_000_000_000
MINUTE_NS = 60 * NS
YEAR = 31_536_000


def test_what_it_tells_of_itself(store: Store) -> None:
    limiter = FixedWindow(store, "login", "5/minute", align="first")
    assert (limiter.store, limiter.name, limiter.rate, limiter.align) == (store, "login", Rate(5, 60), "first")
    assert repr(limiter) == "<FixedWindow 'login' 5 per minute align='first'>"
    assert repr(FixedWindow(store, "other", "5/minute")) == "<FixedWindow 'other' 5 per minute>"
    for name in ("store", "name", "rate", "align"):
        with pytest.raises(AttributeError):
            setattr(limiter, name, None)


@pytest.mark.parametrize("align", ["", "Clock", "last", None, 1, b"clock", True, ["clock"]])
def test_an_alignment_that_is_none(store: Store, align: Any) -> None:
    with pytest.raises(InvalidLimiter, match="'clock', 'first' or 'stagger'"):
        FixedWindow(store, "login", "5/minute", align=align)


@pytest.mark.parametrize("rate", [None, 5, "often", "5", (5, 60)])
def test_a_rate_that_is_none(store: Store, rate: Any) -> None:
    with pytest.raises(InvalidRate):
        FixedWindow(store, "login", rate)


@pytest.mark.parametrize("align", ["clock", "first", "stagger"])
@pytest.mark.parametrize("period", [0.01, 1, 60, 86_400, YEAR])
@pytest.mark.parametrize("limit", [1, 7, 1_000_000, 10**9])
def test_limits_to_a_billion_in_windows_from_10_ms_to_a_year(
    store: Store, clock: ManualClock, align: Any, period: float, limit: int
) -> None:
    period_ns = round(period * NS)
    limit = min(limit, period_ns)  # one per nanosecond is the fastest rate there is
    limiter = FixedWindow(store, "api", Rate(limit, period), align=align)
    assert limiter.hit("k", limit).remaining == 0
    denied = limiter.hit("k")
    assert not denied
    assert 0 < denied.retry_after_ns == denied.reset_after_ns < period_ns + max(1, limit)
    clock.advance(denied.retry_after)
    assert limiter.peek("k", limit)


def test_the_window_of_the_first_request_begins_with_it(store: Store, clock: ManualClock) -> None:
    limiter = FixedWindow(store, "api", "1/minute", align="first")
    clock.set(1234.567)
    assert limiter.hit("k").reset_after_ns == MINUTE_NS
    clock.advance(59.999999999)
    assert limiter.hit("k").retry_after_ns == 1
    clock.advance(100)
    # And the next one with the first request after that, not at its end.
    assert limiter.hit("k").reset_after_ns == MINUTE_NS


def test_the_window_of_the_first_request_is_the_same_for_later_ones(store: Store, clock: ManualClock) -> None:
    limiter = FixedWindow(store, "api", "3/minute", align="first")
    end_ns = limiter.hit("k").reset_after_ns
    assert MINUTE_NS <= end_ns < MINUTE_NS + 3
    for seconds in (10, 20):
        clock.advance(10)
        assert limiter.hit("k").reset_after_ns == end_ns - seconds * NS
    assert limiter.hit("k").retry_after_ns == end_ns - 20 * NS


def test_staggered_keys_begin_at_times_of_their_own_which_stay(store: Store, clock: ManualClock) -> None:
    limiter = FixedWindow(store, "api", "5/minute", align="stagger")
    left_ns = [limiter.hit(key).reset_after_ns for key in range(1000)]
    assert all(0 < ns <= MINUTE_NS for ns in left_ns)
    # Spread over the whole minute: the same tenth of it is not a tenth of all keys' by chance alone.
    tenths = [sum(ns * 10 // (MINUTE_NS + 1) == tenth for ns in left_ns) for tenth in range(10)]
    assert min(tenths) >= 40
    for seconds in (60, 7 * 60, YEAR - YEAR % 60):
        clock.advance(seconds)
        assert [limiter.hit(key).reset_after_ns for key in range(1000)] == left_ns


def test_staggered_keys_begin_at_the_same_time_in_every_process(store: Store, in_child: Any) -> None:
    limiter = FixedWindow(store, "api", "5/minute", align="stagger")
    left_ns = [limiter.hit(key).reset_after_ns for key in range(50)]
    assert in_child(lambda: [limiter.hit(key).reset_after_ns for key in range(50)]) == left_ns
    again = FixedWindow(store, "api", "5/minute", align="stagger")
    decisions = [again.hit(key) for key in range(50)]
    assert [decision.reset_after_ns for decision in decisions] == left_ns
    assert {decision.remaining for decision in decisions} == {2}


@pytest.mark.parametrize("align", ["clock", "first", "stagger"])
def test_a_rate_for_one_call_has_the_same_period(store: Store, align: Any) -> None:
    limiter = FixedWindow(store, "api", "100/minute", align=align)
    assert limiter.hit("k", 50, rate="60/minute").remaining == 10
    assert limiter.hit("k", 10, rate=Rate(60, 60)).remaining == 0
    assert not limiter.hit("k", rate="60/minute")
    assert limiter.peek("k").remaining == 40
    assert limiter.peek("k", rate="30/minute").remaining == 0
    limiter.refund("k", 20, rate="60/minute")
    assert limiter.peek("k").remaining == 60
    for ask in (limiter.hit, limiter.peek, limiter.refund):
        with pytest.raises(InvalidLimiter, match="period"):
            ask("k", rate="100/hour")
        with pytest.raises(InvalidLimiter, match="burst"):
            ask("k", burst=5)
        with pytest.raises(InvalidLimiter):
            ask("k", rate=Rate(2**40, 3600))
    assert limiter.peek("k").remaining == 60


def test_windows_of_one_name_and_another_period_do_not_misread_each_other(store: Store) -> None:
    assert FixedWindow(store, "api", "5/minute").hit("k", 5)
    assert FixedWindow(store, "api", "5/hour").hit("k").remaining == 4
    assert not FixedWindow(store, "api", "5/minute").hit("k")

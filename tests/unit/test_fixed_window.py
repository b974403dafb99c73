"""Fixed windows in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from forebay import FixedWindow, Rate, Store
from forebay.testing import ManualClock

NS = 1_000_000_000
YEAR = 31_536_000


def test_fixed_window_shows_its_parameters(store: Store) -> None:
    limiter = FixedWindow(store, "login", "5/minute", align="first")
    assert (limiter.store, limiter.name, limiter.rate, limiter.align) == (store, "login", Rate(5, 60), "first")
    assert repr(limiter) == "<FixedWindow 'login' 5 per minute align='first'>"
    assert repr(FixedWindow(store, "other", "5/minute")) == "<FixedWindow 'other' 5 per minute>"
    for name in ("store", "name", "rate", "align"):
        with pytest.raises(AttributeError):
            setattr(limiter, name, None)


@pytest.mark.parametrize("align", ["clock", "first", "stagger"])
@pytest.mark.parametrize("period", [0.01, 1, 60, 86_400, YEAR])
@pytest.mark.parametrize("limit", [1, 7, 1_000_000, 10**9])
def test_fixed_window_keeps_limits_to_a_billion_and_periods_from_10_ms_to_a_year(
    store: Store, clock: ManualClock, align: Any, period: float, limit: int
) -> None:
    period_ns = round(period * NS)
    limit = min(limit, period_ns)  # the fastest rate is one per nanosecond
    limiter = FixedWindow(store, "api", Rate(limit, period), align=align)
    assert limiter.hit("k", limit).remaining == 0
    denied = limiter.hit("k")
    assert not denied
    assert 0 < denied.retry_after_ns == denied.reset_after_ns <= period_ns
    clock.advance(denied.retry_after)
    assert limiter.peek("k", limit)


@pytest.mark.parametrize("limit", [4, 100, 1000, 2**20 - 1, 10**8])
@pytest.mark.parametrize("seconds", [0, 1, 1234.5, 7_654_321])
def test_first_request_window_ends_after_its_period(
    store: Store, clock: ManualClock, limit: int, seconds: float
) -> None:
    limiter = FixedWindow(store, "api", Rate(limit, 60), align="first")
    clock.set(seconds)
    assert limiter.hit("k", limit).reset_after == 60
    clock.advance(59.999)
    assert limiter.hit("k").retry_after == 0.001
    clock.advance(0.001)
    assert limiter.hit("k", limit)


@pytest.mark.parametrize("period_ns", [2, 50, 333_333_333, 999_999_937, 60 * NS, 31 * 86_400 * NS, YEAR * NS])
@pytest.mark.parametrize("limit", [1, 5, 1000, 2**20 - 1, 2**40])
def test_first_request_window_begins_with_a_request_and_lasts_its_period(
    store: Store, clock: ManualClock, period_ns: int, limit: int
) -> None:
    """The begin is exact to a step: up to 10 ns early for each permit of the limit."""
    limit = min(limit, period_ns)
    limiter = FixedWindow(store, "api", Rate(limit, Fraction(period_ns, NS)), align="first")  # type: ignore[arg-type]
    late_ns = now_ns = begun_ns = 0
    for number in range(50):
        now_ns += late_ns
        clock.set(Fraction(now_ns, NS))  # type: ignore[arg-type]
        decision = limiter.hit("k", limit)
        assert decision, "the window ends at the reported time"
        earlier_ns = period_ns - decision.reset_after_ns
        assert 0 <= earlier_ns <= 10 * limit
        assert now_ns - earlier_ns >= begun_ns + period_ns or number == 0
        begun_ns = now_ns - earlier_ns
        clock.set(Fraction(begun_ns + period_ns - 1, NS))  # type: ignore[arg-type]
        assert limiter.hit("k").retry_after_ns == 1 or begun_ns + period_ns - 1 < now_ns
        now_ns, late_ns = begun_ns + period_ns, (late_ns + 1) * 7919 % period_ns // 8
        assert now_ns > begun_ns


def test_staggered_keys_have_the_same_phase_in_every_process(store: Store, in_child: Any) -> None:
    limiter = FixedWindow(store, "api", "5/minute", align="stagger")
    left_ns = [limiter.hit(key).reset_after_ns for key in range(50)]
    assert in_child(lambda: [limiter.hit(key).reset_after_ns for key in range(50)]) == left_ns
    again = FixedWindow(store, "api", "5/minute", align="stagger")
    decisions = [again.hit(key) for key in range(50)]
    assert [decision.reset_after_ns for decision in decisions] == left_ns
    assert {decision.remaining for decision in decisions} == {2}

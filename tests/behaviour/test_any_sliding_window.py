"""Sliding windows by example."""

from __future__ import annotations

from typing import Any

import pytest
from places import EXACT, STRICT, Clock

from penstock import InvalidLimiter, Rate, SlidingWindow

pytestmark = pytest.mark.places(*EXACT)

START = 1200  # of a minute


def test_what_is_given_back_comes_from_this_windows_count_first(store: Any, clock: Clock) -> None:
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
def test_a_rate_for_one_call_has_the_same_period(store: Any, clock: Clock) -> None:
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
        for ask in (limiter.hit, limiter.peek, limiter.refund):
            with pytest.raises(InvalidLimiter):
                ask("k", **options)
    assert limiter.peek("k").remaining == 40

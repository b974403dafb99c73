"""Minimum intervals between requests, by example."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from places import STRICT, Clock

from forebay import CostExceedsLimit, InvalidRate, MinInterval

pytestmark = pytest.mark.places(*STRICT)

NS = 1_000_000_000


@pytest.mark.parametrize(
    ("interval", "ns"),
    [
        ("2s", 2 * NS), ("500 ms", NS // 2), ("1.5 minutes", 90 * NS), ("minute", 60 * NS), ("1 year", 31_536_000 * NS),
        (2, 2 * NS), (0.25, NS // 4), (1e-6, 1000), (timedelta(hours=1), 3600 * NS), ("10ms", NS // 100),
    ],
)  # fmt: skip
def test_min_interval_takes_every_form(store: Any, clock: Clock, interval: Any, ns: int) -> None:
    limiter = MinInterval(store, "sms", interval)
    assert limiter.interval_ns == ns
    first = limiter.hit("k")
    assert (first.allowed, first.limit, first.remaining, first.reset_after_ns) == (True, 1, 0, ns)
    assert limiter.hit("k").retry_after_ns == ns
    assert limiter.allow("l")
    clock.advance(ns / NS)
    assert [limiter.allow("k"), limiter.allow("k")] == [True, False]


@pytest.mark.parametrize(
    "interval",
    ["", "2", "s2", "2 parsecs", "-2s", "1/s", 0, -1, 0.0, 1e-10, float("nan"), float("inf"), True, None, b"2s",
     "11 years", timedelta(days=3651), timedelta(0)],
)  # fmt: skip
def test_min_interval_refuses_invalid_intervals(store: Any, interval: Any) -> None:
    with pytest.raises(InvalidRate):
        MinInterval(store, "sms", interval)


def test_min_interval_allows_a_cost_of_one(store: Any) -> None:
    limiter = MinInterval(store, "sms", "30s")
    with pytest.raises(CostExceedsLimit) as caught:
        limiter.hit("k", 2)
    assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (2, 1, "sms")

"""Minimum intervals in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

from forebay import MinInterval, Store
from forebay.testing import ManualClock


def test_min_interval_shows_its_parameters(store: Store) -> None:
    assert repr(MinInterval(store, "sms", "30s")) == "<MinInterval 'sms' 1 per 30 seconds>"


def test_shortest_interval_is_a_nanosecond(store: Store, clock: ManualClock) -> None:
    limiter = MinInterval(store, "sms", 1e-9)
    assert limiter.hit("k").reset_after_ns == limiter.hit("k").retry_after_ns == limiter.interval_ns == 1
    clock.advance(1e-9)
    assert [limiter.allow("k"), limiter.allow("k")] == [True, False]

"""The gap between requests, by example. What holds wherever limits are kept is in tests/behaviour."""

from __future__ import annotations

from forebay import MinInterval, Store
from forebay.testing import ManualClock


def test_what_it_tells_of_itself(store: Store) -> None:
    assert repr(MinInterval(store, "sms", "30s")) == "<MinInterval 'sms' 1 per 30 seconds>"


def test_the_shortest_interval(store: Store, clock: ManualClock) -> None:
    limiter = MinInterval(store, "sms", 1e-9)
    assert limiter.hit("k").reset_after_ns == limiter.hit("k").retry_after_ns == limiter.interval_ns == 1
    clock.advance(1e-9)
    assert [limiter.allow("k"), limiter.allow("k")] == [True, False]

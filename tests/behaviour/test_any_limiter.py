"""Properties of all limiters: rates for one call, shared states, waits that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from places import STRICT

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)

pytestmark = pytest.mark.places(*STRICT)

EVERY_KIND: dict[str, Callable[..., Any]] = {
    "token bucket": lambda store, name: TokenBucket(store, name, "5/minute"),
    "interval bucket": lambda store, name: TokenBucket(store, name, "5/minute", refill="interval"),
    "leaky bucket": lambda store, name: LeakyBucket(store, name, "5/minute", capacity=5),
    "minimum interval": lambda store, name: MinInterval(store, name, "12s"),
    "fixed window": lambda store, name: FixedWindow(store, name, "5/minute"),
    "fixed window, first": lambda store, name: FixedWindow(store, name, "5/minute", align="first"),
    "fixed window, stagger": lambda store, name: FixedWindow(store, name, "5/minute", align="stagger"),
    "sliding window": lambda store, name: SlidingWindow(store, name, "5/minute"),
    "bucketed window": lambda store, name: BucketedWindow(store, name, "5/minute", buckets=6, keys=9),
    "sliding log": lambda store, name: SlidingLog(store, name, "5/minute", keys=9),
    "concurrency": lambda store, name: Concurrency(store, name, 5, lease="1 minute", keys=9),
    "several": lambda store, name: AllOf(MinInterval(store, "g", "20 ms"), SlidingLog(store, name, "2/s", keys=9)),
}
every_kind = pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)


@every_kind
def test_wait_beyond_its_timeout_is_refused_at_once_and_charges_nothing(make: Callable[..., Any], store: Any) -> None:
    """The clock stands still, so no permit ever comes."""
    limiter = make(store, "w")
    while limiter.wait("ada", timeout=0):
        pass
    before = repr(limiter.peek("ada"))
    assert not limiter.wait("ada", timeout=0.001)
    assert not limiter.wait("ada", 1, 0)
    assert repr(limiter.peek("ada")) == before


def test_limiter_without_a_burst_takes_a_rate_for_one_call_but_no_burst(store: Any) -> None:
    for limiter in (MinInterval(store, "m", 1), LeakyBucket(store, "l", "1/s", capacity=2)):
        assert limiter.allow("ada")
        assert limiter.hit("bob", rate="1/hour").reset_after == 3600
        with pytest.raises(InvalidLimiter, match="burst"):
            limiter.hit("ada", rate="1/hour", burst=2)
    log = SlidingLog(store, "g", "1/s", keys=9)
    interval = TokenBucket(store, "i", "1/s", refill="interval")
    for one in (log.hit, log.reserve, log.wait, interval.hit, interval.reserve, interval.wait):
        with pytest.raises(InvalidLimiter, match="one limit"):
            one("ada", rate="2/s")


def test_a_window_waits_and_reserves_by_the_rate_of_one_call(store: Any) -> None:
    for window in (FixedWindow(store, "f", "2/minute"), SlidingWindow(store, "s", "2/minute")):
        assert window.reserve("ada", 2, rate="5/minute")
        assert not window.reserve("ada")
        booked = window.reserve("ada", 2, rate="5/minute")
        assert (booked.allowed, booked.delay_ns) == (True, 0)
        booked.cancel()
        assert window.peek("ada", rate="5/minute").remaining == 3
        assert [window.wait("ada", 3, 0, rate="5/minute") for _ in range(2)] == [True, False]
        with pytest.raises(InvalidLimiter, match="own period"):
            window.wait("ada", rate="5/hour")


def test_limiters_share_a_state_if_their_states_are_comparable(store: Any) -> None:
    for make in EVERY_KIND.values():
        assert make(store, "one").hit("ada").remaining == make(store, "one").peek("ada").remaining
    first, second = TokenBucket(store, "t", "5/minute"), TokenBucket(store, "t", "10/minute")
    assert first.hit("ada").remaining == 4
    assert second.peek("ada").remaining == 8  # a state is a time, at any rate
    for one, other in (
        (FixedWindow(store, "w", "5/minute"), FixedWindow(store, "w", "5/hour")),
        (FixedWindow(store, "w", "5/minute"), FixedWindow(store, "w", "5/minute", align="first")),
        (SlidingWindow(store, "w", "5/minute"), SlidingWindow(store, "w", "5/hour")),
        (BucketedWindow(store, "w", "5/minute"), BucketedWindow(store, "w", "5/minute", 30)),
        (SlidingLog(store, "w", "5/minute", keys=9), SlidingLog(store, "w", "5/hour", keys=9)),
    ):
        assert one.hit("ada").remaining == 4 or one.peek("ada").remaining < 4
        assert other.peek("ada").remaining == 5

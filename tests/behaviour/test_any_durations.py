"""Every duration may be text, a number of seconds or a timedelta."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from places import STRICT

from forebay import AllOf, Concurrency, FixedWindow, InvalidRate, LimitExceeded, TokenBucket

pytestmark = pytest.mark.places(*STRICT)

TWO_SECONDS = ["2s", "2 seconds", "2000 ms", 2, 2.0, timedelta(seconds=2)]
NO_TIME = ["0s", "0 ms", 0, 0.0, timedelta(0)]
NONE = [-1, -1e-9, "-1s", "soon", "1", "", b"1s", True, [1], float("nan"), float("inf"), timedelta(seconds=-1)]


@pytest.mark.parametrize("max_delay", TWO_SECONDS, ids=repr)
def test_max_delay_takes_every_form(store: Any, max_delay: Any) -> None:
    bucket = TokenBucket(store, "api", "1/second", burst=1)
    booked = [bucket.reserve("k", 1, max_delay) for _ in range(4)]
    assert [(bool(one), one.delay) for one in booked[:3]] == [(True, 0.0), (True, 1.0), (True, 2.0)]
    assert not booked[3]


@pytest.mark.parametrize("timeout", NO_TIME, ids=repr)
def test_timeout_takes_every_form(store: Any, timeout: Any) -> None:
    window = FixedWindow(store, "api", "1/hour")
    for limiter in (window, AllOf(window)):
        limiter.reset("k")
        assert [limiter.wait("k", 1, timeout) for _ in range(2)] == [True, False]
    slots = Concurrency(store, "slots", 1, lease="1h", keys=1)
    assert slots.allow("k")
    with pytest.raises(LimitExceeded), slots.hold("k", 1, timeout):
        pytest.fail("there was no permit")


@pytest.mark.parametrize("time", NONE, ids=repr)
def test_invalid_durations_are_refused(store: Any, time: Any) -> None:
    window, slots = FixedWindow(store, "api", "1/hour"), Concurrency(store, "slots", 1, keys=1)
    for limiter in (window, slots, AllOf(window)):
        with pytest.raises(InvalidRate, match=r"max_delay is None or a length of time of at least 0, not .*500 ms"):
            limiter.reserve("k", 1, time)
        with pytest.raises(InvalidRate, match=r"timeout is None or a length of time of at least 0, not .*500 ms"):
            limiter.wait("k", 1, time)
    assert window.peek("k").remaining == slots.peek("k").remaining == 1

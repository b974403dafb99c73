"""Sliding logs by example: the largest limits and costs. What holds wherever limits are kept is in tests/behaviour."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import InvalidLimiter, Rate, SlidingLog, Store
from forebay.testing import ManualClock

YEAR = 31_536_000


def test_what_it_tells_of_itself(store: Store) -> None:
    limiter = SlidingLog(store, "export", "10/hour", keys=40)
    assert limiter.rate == Rate(10, 3600)
    assert repr(limiter) == "<SlidingLog 'export' 10 per hour, keys=40>"


@pytest.mark.parametrize("keys", [0, -1, True, 1.0, None, "60", 2**40])
def test_keys_that_are_none(store: Store, keys: Any) -> None:
    with pytest.raises(InvalidLimiter, match="keys"):
        SlidingLog(store, "export", "5/hour", keys=keys)


def test_the_bytes_that_it_takes_are_told_before() -> None:
    needed = SlidingLog.bytes_needed("1000/hour", keys=100)
    assert 100 * 1000 * 8 <= needed < 2 * 100 * 1000 * 8
    with pytest.raises(InvalidLimiter):
        SlidingLog.bytes_needed(Rate(2**31, YEAR), keys=1)


def test_a_charge_that_has_all_but_left_is_not_cancelled() -> None:
    """Its date is known to a quantum: what may have left is not given back, or another's permit would be."""
    clock = ManualClock(1e-9)
    with Store.private(keys=1, clock=clock) as store:
        log = SlidingLog(store, "log", "5/second", keys=1)
        reservation = log.reserve("key", 1)
        clock.advance(1)
        assert log.hit("key", 5)
        reservation.cancel()
        assert not log.allow("key")

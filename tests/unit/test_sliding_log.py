"""Sliding logs in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import InvalidLimiter, Rate, SlidingLog, Store
from forebay.testing import ManualClock

YEAR = 31_536_000


def test_sliding_log_shows_its_parameters(store: Store) -> None:
    limiter = SlidingLog(store, "export", "10/hour", keys=40)
    assert limiter.rate == Rate(10, 3600)
    assert repr(limiter) == "<SlidingLog 'export' 10 per hour, keys=40>"


@pytest.mark.parametrize("keys", [0, -1, True, 1.0, None, "60", 2**40])
def test_sliding_log_refuses_invalid_numbers_of_keys(store: Store, keys: Any) -> None:
    with pytest.raises(InvalidLimiter, match="keys"):
        SlidingLog(store, "export", "5/hour", keys=keys)


def test_bytes_needed_counts_permits_and_keys() -> None:
    needed = SlidingLog.bytes_needed("1000/hour", keys=100)
    assert 100 * 1000 * 8 <= needed < 2 * 100 * 1000 * 8
    with pytest.raises(InvalidLimiter):
        SlidingLog.bytes_needed(Rate(2**31, YEAR), keys=1)


def test_charge_within_a_quantum_of_its_end_is_not_cancelled() -> None:
    """A date is known to a quantum. A charge that may have expired is not given back, as its place may be another's."""
    clock = ManualClock(1e-9)
    with Store.private(keys=1, clock=clock) as store:
        log = SlidingLog(store, "log", "5/second", keys=1)
        reservation = log.reserve("key", 1)
        clock.advance(1)
        assert log.hit("key", 5)
        reservation.cancel()
        assert not log.allow("key")

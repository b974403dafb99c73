"""Fixed windows by example: extreme rates. What holds wherever limits are kept is in tests/behaviour."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import FixedWindow, Rate, Store
from penstock.testing import ManualClock

NS = 1_000_000_000
YEAR = 31_536_000


def test_what_it_tells_of_itself(store: Store) -> None:
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


def test_staggered_keys_begin_at_the_same_time_in_every_process(store: Store, in_child: Any) -> None:
    limiter = FixedWindow(store, "api", "5/minute", align="stagger")
    left_ns = [limiter.hit(key).reset_after_ns for key in range(50)]
    assert in_child(lambda: [limiter.hit(key).reset_after_ns for key in range(50)]) == left_ns
    again = FixedWindow(store, "api", "5/minute", align="stagger")
    decisions = [again.hit(key) for key in range(50)]
    assert [decision.reset_after_ns for decision in decisions] == left_ns
    assert {decision.remaining for decision in decisions} == {2}

"""The worked examples of the token bucket, each under its number, on every kind of store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest

from penstock import Decision, Store, TokenBucket
from penstock.testing import ManualClock

Hit = Callable[..., Any]
MINUTE = 60


@pytest.fixture(
    params=["private", "private and forked child", "named", "named, attached twice", "named and forked child"]
)
def hit_of(
    request: pytest.FixtureRequest, clock: ManualClock, store_name: str, in_child: Any
) -> Iterator[Callable[[str, int], Hit]]:
    """From a rate and a burst to the `hit` of a limiter, which is asked in turn by all who share its store."""
    if request.param.startswith("private"):
        stores = [Store.private(keys=100, clock=clock)]
    else:
        count = 2 if "twice" in request.param else 1
        stores = [Store(store_name, keys=100, clock=clock) for _ in range(count)]

    def make(rate: str, burst: int) -> Hit:
        limiters = [TokenBucket(store, "example", rate, burst=burst) for store in stores]
        askers: list[Hit] = [limiter.hit for limiter in limiters]
        if "child" in request.param:
            askers.append(lambda *asked: in_child(lambda: Copy(limiters[0].hit(*asked))))
        turns = cycle(askers)
        return lambda *asked: next(turns)(*asked)

    yield make
    for store in stores:
        store.close()


class Copy:
    """What a decision said, sent by a child."""

    def __init__(self, decision: Decision) -> None:
        self.allowed = decision.allowed
        self.remaining = decision.remaining
        self.retry_after = decision.retry_after

    def __bool__(self) -> bool:
        return self.allowed


def test_w11_requests_a_second_apart_pass_and_the_second_of_two_at_once_waits_a_second(
    hit_of: Callable[[str, int], Hit], clock: ManualClock
) -> None:
    hit = hit_of("60/minute", 1)
    for _ in range(5):
        assert hit("k")
        clock.advance(1)
    first, second = hit("k"), hit("k")
    assert first
    assert not second
    assert second.retry_after == 1.0


def test_w13_a_denied_request_changes_nothing_and_retry_after_is_exact(
    hit_of: Callable[[str, int], Hit], clock: ManualClock
) -> None:
    hit = hit_of("60/minute", 1)
    start = clock.now()
    for _ in range(4):
        assert hit("k")
        clock.advance(0.25)
        denied = hit("k")
        assert not denied
        assert denied.retry_after == 0.75
        for _ in range(3):
            assert hit("k").retry_after == 0.75
        clock.advance(denied.retry_after - 0.001)
        assert not hit("k")
        clock.advance(0.001)
    assert hit("k")
    assert clock.now() == start + 4


def test_w14_credit_never_exceeds_the_burst_after_a_long_idle_time(
    hit_of: Callable[[str, int], Hit], clock: ManualClock
) -> None:
    hit = hit_of("60/minute", 5)
    for idle in (0, 5, MINUTE, 365 * 24 * 60 * MINUTE):
        clock.advance(idle)
        answers = [hit("k") for _ in range(7)]
        assert [bool(answer) for answer in answers] == [True] * 5 + [False] * 2
        assert [answer.remaining for answer in answers] == [4, 3, 2, 1, 0, 0, 0]
        assert answers[-1].retry_after == 1.0
        clock.advance(5)

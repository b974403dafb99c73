"""Leaky buckets as queues, by example."""

from __future__ import annotations

from typing import Any

import pytest
from places import STRICT, Clock

from forebay import CostExceedsLimit, InvalidLimiter, LeakyBucket

pytestmark = pytest.mark.places(*STRICT)

NS = 1_000_000_000


@pytest.fixture
def queue(store: Any) -> LeakyBucket:
    return LeakyBucket(store, "printer", "1/second", capacity=4)


@pytest.mark.parametrize(
    "capacity", [0, -1, True, 1.0, None, "4", 2**64, 10**5000], ids=lambda value: type(value).__name__
)
def test_leaky_bucket_refuses_invalid_capacities(store: Any, capacity: Any) -> None:
    with pytest.raises(InvalidLimiter, match="capacity"):
        LeakyBucket(store, "printer", "1/second", capacity)


def test_queue_frees_one_place_a_second(queue: LeakyBucket, clock: Clock) -> None:
    assert queue.allow_many(["k"] * 6) == [True] * 4 + [False] * 2
    denied = queue.hit("k")
    assert (denied.allowed, denied.remaining, denied.retry_after_ns, denied.reset_after_ns) == (False, 0, NS, 4 * NS)
    clock.advance(1)
    assert [queue.allow("k"), queue.allow("k")] == [True, False]
    with pytest.raises(CostExceedsLimit):
        queue.reserve("k", 5)


def test_departures_are_as_far_apart_as_their_costs(queue: LeakyBucket) -> None:
    first, second = queue.reserve("k", 3), queue.reserve("k")
    assert (first.delay_ns, second.delay_ns) == (0, 3 * NS)
    second.cancel()
    assert queue.reserve("k").delay_ns == 3 * NS


def test_departure_beyond_max_delay_takes_no_place(queue: LeakyBucket) -> None:
    assert queue.reserve("k", 2)
    late = queue.reserve("k", max_delay=1.5)
    assert (late.allowed, late.delay) == (False, 2.0)
    assert queue.peek("k").remaining == 2
    assert queue.reserve("k", max_delay=2)

"""The leaky bucket as a queue, by example. What holds wherever limits are kept is in tests/behaviour."""

from __future__ import annotations

import pytest

from forebay import LeakyBucket, Rate, Store


@pytest.fixture
def queue(store: Store) -> LeakyBucket:
    return LeakyBucket(store, "printer", "1/second", capacity=4)


def test_what_it_tells_of_itself(queue: LeakyBucket) -> None:
    assert (queue.name, queue.rate, queue.capacity) == ("printer", Rate(1, 1), 4)
    assert repr(queue) == "<LeakyBucket 'printer' 1 per second, capacity=4>"
    assert queue.hit("k").limit == 4

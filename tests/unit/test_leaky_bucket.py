"""Leaky buckets in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

import pytest

from forebay import LeakyBucket, Rate, Store


@pytest.fixture
def queue(store: Store) -> LeakyBucket:
    return LeakyBucket(store, "printer", "1/second", capacity=4)


def test_leaky_bucket_shows_its_parameters(queue: LeakyBucket) -> None:
    assert (queue.name, queue.rate, queue.capacity) == ("printer", Rate(1, 1), 4)
    assert repr(queue) == "<LeakyBucket 'printer' 1 per second, capacity=4>"
    assert queue.hit("k").limit == 4

"""``take_up_to``, by example. The oracle's machine tests it at every place, and processes race for it elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import FixedWindow, InvalidCost, InvalidKey, InvalidLimiter, LeakyBucket, MinInterval, Store, TokenBucket
from forebay.testing import ManualClock


def test_takes_what_is_there_and_no_more_than_is_wanted(store: Store, clock: ManualClock) -> None:
    bucket = TokenBucket(store, "api", "1/second", burst=10)
    assert [bucket.take_up_to("k", most) for most in (4, 0, 100, 1)] == [4, 0, 6, 0]
    clock.advance(2.5)
    assert bucket.take_up_to("k", 100) == 2
    assert bucket.peek("k").retry_after == 0.5
    assert store.stats().total.allowed == 3
    assert store.stats().total.denied == 1


def test_a_rate_of_its_own_takes_from_the_same_state(store: Store) -> None:
    bucket = TokenBucket(store, "api", "1/second", burst=10)
    assert bucket.take_up_to("k", 100) == 10
    assert bucket.take_up_to("k", 100, rate="2/second", burst=30) == 10
    window = FixedWindow(store, "w", "3/minute")
    assert [window.take_up_to("k", 5), window.take_up_to("k", 5, rate="7/minute")] == [3, 4]


def test_queue_and_gap_give_their_places(store: Store) -> None:
    assert LeakyBucket(store, "queue", "1/second", 4).take_up_to("k", 9) == 4
    assert [MinInterval(store, "gap", "1s").take_up_to("k", 9) for _ in range(2)] == [1, 0]


def test_wrong_arguments_are_refused(store: Store) -> None:
    bucket: Any = TokenBucket(store, "api", "1/second", burst=10)
    for most in (-1, 1.5, None, True):
        with pytest.raises(InvalidCost):
            bucket.take_up_to("k", most)
    with pytest.raises(InvalidKey):
        bucket.take_up_to(1.5, 1)
    with pytest.raises(InvalidLimiter, match="one limit"):
        TokenBucket(store, "i", "1/second", refill="interval").take_up_to("k", 1, rate="2/second")
    assert bucket.take_up_to("k", 2**70) == 10

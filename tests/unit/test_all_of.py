"""``AllOf`` in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from process_helpers import extents, path_of

from forebay import (
    AllOf,
    Concurrency,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.segment import layout
from forebay.segment.process_identity import Owners
from forebay.testing import ManualClock


@pytest.fixture
def both(store: Store) -> AllOf:
    return AllOf(FixedWindow(store, "window", "10/minute"), TokenBucket(store, "bucket", "5/second"))


def test_all_of_shows_its_limiters(both: AllOf, store: Store) -> None:
    assert both.store is store
    assert [limiter.name for limiter in both.limiters] == ["window", "bucket"]
    assert "window" in repr(both)
    assert "bucket" in repr(both)
    with pytest.raises(TypeError):
        pickle.dumps(both)


def test_each_limiter_counts_its_own_denials(both: AllOf, store: Store) -> None:
    both.hit("k", 5)
    both.hit("k", 2)
    limiters = store.stats().limiters
    assert (limiters["window"].allowed, limiters["window"].denied) == (1, 0)
    assert (limiters["bucket"].allowed, limiters["bucket"].denied) == (1, 1)


def test_all_of_raises_after_its_store_is_closed(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock) as store:
        limits = AllOf(TokenBucket(store, "one", "1/second"))
    with pytest.raises(StoreClosed):
        limits.allow("k")


class Clearing:
    """A cost of 1 that empties a list when it is read."""

    def __init__(self, emptied: list[Any]) -> None:
        self._emptied = emptied

    def __index__(self) -> int:
        self._emptied.clear()
        return 1


METHODS: dict[str, Callable[[AllOf, Any, Any], object]] = {
    "hit": AllOf.hit,
    "peek": AllOf.peek,
    "refund": AllOf.refund,
    "allow_many": lambda limits, keys, costs: limits.allow_many([keys], [costs]),
}


@pytest.mark.parametrize("emptied", ["keys", "costs"])
@pytest.mark.parametrize("method", METHODS)
def test_all_of_refuses_lists_that_shrink_while_it_reads_them(
    both: AllOf, in_child: Any, method: str, emptied: str
) -> None:
    keys: list[Any] = ["k", "k"]
    costs: list[Any] = [1, 1]
    costs[0] = Clearing(keys if emptied == "keys" else costs)
    assert both.hit("k", 2)
    # A refund reads all costs before it counts the keys.
    refused = (InvalidCost, InvalidKey) if method == "refund" else RuntimeError
    with pytest.raises(refused, match=r"need one|shortened"):
        in_child(lambda: METHODS[method](both, keys, costs))
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [8, 3]


def test_cancellation_uses_the_keys_and_costs_as_they_were_charged(both: AllOf) -> None:
    keys: list[Any] = ["k", "k"]
    costs: list[Any] = [1, 1]
    costs[0] = Clearing(keys)
    reservation = both.reserve(keys, costs)
    costs.clear()
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [9, 4]
    reservation.cancel()
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [10, 5]


def test_rollback_takes_no_other_requests_permit_after_a_key_was_let_in_uncharged(
    name: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that a full table let in is charged meanwhile by another request, then the first request is rolled back.

    Before a concurrency limit denies, it looks for ended processes: there the test steps in. The bits that say which
    slots are taken are hints; the test clears them, so that a slot seems free at first.
    """
    with Store(name, keys=1, on_full="allow", clock=clock) as store:
        bucket, crowd = TokenBucket(store, "bucket", "5/hour"), TokenBucket(store, "crowd", "1/hour")
        gate = Concurrency(store, "gate", 1, lease="1h", keys=1)
        crowd.allow_many(range(5000))
        homeless = next(key for key in range(5000) if bucket.hit(key, 5) and bucket.hit(key, 5))
        assert gate.allow("k")
        (extent,) = extents(path_of(name))
        with open(path_of(name), "r+b") as file:
            os.pwrite(file.fileno(), bytes(8), extent["offset"] + layout.GROUP_BYTES)

        def make_room_and_charge(owners: Owners, among: set[int]) -> set[int]:
            for key in range(5000):
                crowd.reset(key)
            assert bucket.hit(homeless, 3).remaining == 2
            return set()

        monkeypatch.setattr(Owners, "dead_among", make_room_and_charge)
        assert not AllOf(bucket, gate).allow([homeless, "k"])
        assert bucket.peek(homeless).remaining == 2

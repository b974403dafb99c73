"""Several limits at once, by example. The rest is in tests/property."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from process_helpers import extents, path_of

from penstock import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    Store,
    StoreClosed,
    TokenBucket,
    layout,
)
from penstock.owners import Owners
from penstock.testing import ManualClock

NS = 1_000_000_000


@pytest.fixture
def both(store: Store) -> AllOf:
    return AllOf(FixedWindow(store, "window", "10/minute"), TokenBucket(store, "bucket", "5/second"))


def test_what_it_tells_of_itself(both: AllOf, store: Store) -> None:
    assert both.store is store
    assert [limiter.name for limiter in both.limiters] == ["window", "bucket"]
    assert "window" in repr(both)
    assert "bucket" in repr(both)
    with pytest.raises(TypeError):
        pickle.dumps(both)


def test_it_takes_limiters_of_one_store(store: Store, clock: ManualClock) -> None:
    one = TokenBucket(store, "one", "1/second")
    with pytest.raises(InvalidLimiter):
        AllOf()
    for other in (None, "one", store, 1):
        wrong: Any = other
        with pytest.raises(InvalidLimiter):
            AllOf(one, wrong)
    with Store.private(keys=1, clock=clock) as another, pytest.raises(InvalidLimiter, match="one store"):
        AllOf(one, TokenBucket(another, "one", "1/second"))
    assert AllOf(one).hit("k").limiter == "one"


def test_a_key_for_all_or_one_for_each(both: AllOf) -> None:
    window, bucket = both.limiters
    assert both.allow("k")
    assert both.allow(["a", "b"])
    assert both.hit(["a", "b"], [3, 2])
    assert [window.peek(key).remaining for key in ("k", "a", "b")] == [9, 6, 10]
    assert [bucket.peek(key).remaining for key in ("k", "a", "b")] == [4, 5, 2]
    both.refund(["a", "b"], [3, 2])
    both.reset("k")
    assert [window.peek(key).remaining for key in ("k", "a", "b")] == [10, 9, 10]
    assert [bucket.peek(key).remaining for key in ("k", "a", "b")] == [5, 5, 4]


def test_as_many_keys_and_costs_as_limiters(both: AllOf) -> None:
    for ask in (both.hit, both.peek):
        for keys in ([], ["a"], ["a", "b", "c"]):
            with pytest.raises(InvalidKey):
                ask(keys)
        for costs in ([], [1], [1, 2, 3]):
            wrong: Any = costs
            with pytest.raises(InvalidCost):
                ask("k", wrong)
    assert both.peek("k").remaining == 5


def test_a_denied_request_is_charged_nowhere(both: AllOf, clock: ManualClock) -> None:
    window, bucket = both.limiters
    assert both.hit("k", 5)
    denied = both.hit("k", 2)
    assert (denied.allowed, denied.limiter, denied.limit, denied.retry_after_ns) == (False, "bucket", 5, 2 * NS // 5)
    assert both.allow_many(["k", "l"]) == [False, True]
    assert window.peek("k").remaining == 5
    clock.advance(1)
    assert both.hit("k", 5)
    clock.advance(1)
    denied = both.hit("k")
    assert (denied.limiter, denied.limit) == ("window", 10)
    assert bucket.peek("k").remaining == 5


def test_of_those_that_deny_the_longest_is_told(store: Store) -> None:
    limits = AllOf(MinInterval(store, "short", "1s"), MinInterval(store, "long", "9s"), MinInterval(store, "mid", "5s"))
    assert limits.hit("k").limiter == "short"  # of equals the first
    denied = limits.hit("k")
    assert (denied.limiter, denied.retry_after_ns) == ("long", 9 * NS)


def test_a_cost_that_one_of_them_can_never_allow(both: AllOf) -> None:
    with pytest.raises(CostExceedsLimit) as caught:
        both.hit("k", 6)
    assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (6, 5, "bucket")
    assert both.limiters[0].peek("k").remaining == 10


def test_each_counts_its_own_denials(both: AllOf, store: Store) -> None:
    both.hit("k", 5)
    both.hit("k", 2)
    limiters = store.stats().limiters
    assert (limiters["window"].allowed, limiters["window"].denied) == (1, 0)
    assert (limiters["bucket"].allowed, limiters["bucket"].denied) == (1, 1)


def test_after_its_store_is_closed(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock) as store:
        limits = AllOf(TokenBucket(store, "one", "1/second"))
    with pytest.raises(StoreClosed):
        limits.allow("k")


@pytest.mark.parametrize("keys", [[], ["k"], ["k", "k", "k"]])
def test_what_gives_back_or_forgets_takes_as_many_keys_as_limiters(both: AllOf, keys: list[str]) -> None:
    assert both.hit("k", 2)
    for do in (both.refund, both.reset):
        with pytest.raises(InvalidKey):
            do(keys)
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [8, 3]


@pytest.mark.parametrize(
    ("keys", "costs", "error"),
    [
        ("k", [1, 6], CostExceedsLimit),
        ("k", [1, -1], InvalidCost),
        ("k", [1, 0.5], InvalidCost),
        ("k", [1], InvalidCost),
        ("k", [1, 1, 1], InvalidCost),
        (["k", 0.5], 1, InvalidKey),
        (["k", ["k"]], 1, InvalidKey),
    ],
)
def test_a_refund_that_is_refused_gives_nothing_back(
    both: AllOf, keys: Any, costs: Any, error: type[Exception]
) -> None:
    assert both.hit("k", 2)
    with pytest.raises(error):
        both.refund(keys, costs)
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [8, 3]


def test_a_cancellation_gives_back_what_was_charged_and_still_counts(both: AllOf, clock: ManualClock) -> None:
    reservation = both.reserve(["k", "j"], [4, 2])
    assert both.reserve("k", 5)
    assert both.reserve("k", 5).delay > 0
    reservation.cancel()
    window, bucket = both.limiters
    assert [window.peek("k").remaining, bucket.peek("j").remaining] == [5, 5]
    late = both.reserve("j", 3)
    clock.advance(60)
    assert both.hit("j", 3)
    late.cancel()
    assert [limiter.peek("j").remaining for limiter in both.limiters] == [7, 2]


def test_a_cancellation_takes_the_place_of_nobody_who_queues_behind(store: Store) -> None:
    queue = LeakyBucket(store, "queue", "1/second", capacity=5)
    reservation = AllOf(queue).reserve("k")
    behind = [queue.reserve("k").delay for _ in range(3)]
    reservation.cancel()
    assert behind == [1, 2, 3]
    assert queue.reserve("k").delay == 4


class Clearing:
    """A cost of one, that empties a list when it is read."""

    def __init__(self, emptied: list[Any]) -> None:
        self._emptied = emptied

    def __index__(self) -> int:
        self._emptied.clear()
        return 1


ASK: dict[str, Callable[[AllOf, Any, Any], object]] = {
    "hit": AllOf.hit,
    "peek": AllOf.peek,
    "refund": AllOf.refund,
    "allow_many": lambda limits, keys, costs: limits.allow_many([keys], [costs]),
}


@pytest.mark.parametrize("emptied", ["keys", "costs"])
@pytest.mark.parametrize("ask", ASK)
def test_lists_that_are_emptied_while_they_are_read(both: AllOf, in_child: Any, ask: str, emptied: str) -> None:
    keys: list[Any] = ["k", "k"]
    costs: list[Any] = [1, 1]
    costs[0] = Clearing(keys if emptied == "keys" else costs)
    assert both.hit("k", 2)
    with pytest.raises(RuntimeError, match="shortened"):
        in_child(lambda: ASK[ask](both, keys, costs))
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [8, 3]


def test_a_reservation_is_of_the_keys_and_costs_as_they_were(both: AllOf) -> None:
    keys: list[Any] = ["k", "k"]
    costs: list[Any] = [1, 1]
    costs[0] = Clearing(keys)
    reservation = both.reserve(keys, costs)
    costs.clear()
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [9, 4]
    reservation.cancel()
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [10, 5]


def test_what_a_full_table_let_in_is_not_given_back_from_anothers_charge(
    name: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens in between: before a concurrency limit denies, it looks for ended processes, and a test can step in.

    The bits that say which slots are taken are hints. With them gone, it seems at first that one is free.
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


def test_hit_each_tells_of_every_limit(both: AllOf) -> None:
    window, bucket = both.limiters
    assert [(d.limiter, d.allowed, d.remaining) for d in both.hit_each("ada", [4, 3])] == [
        ("window", True, 6),
        ("bucket", True, 2),
    ]
    told = both.hit_each("ada", 3)
    assert [d.allowed for d in told] == [True, False]
    assert told[1].retry_after_ns > 0
    # Nothing was charged.
    assert [limiter.peek("ada", 0).remaining for limiter in (window, bucket)] == [6, 2]  # type: ignore[attr-defined]
    with pytest.raises(InvalidKey):
        both.hit_each(["ada"])
    with pytest.raises(CostExceedsLimit):
        both.hit_each("ada", 11)

"""Several limits at once, by example. The rest is in tests/property."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock import (
    AllOf,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    MinInterval,
    Store,
    StoreClosed,
    TokenBucket,
)
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

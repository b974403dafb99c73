"""Batches decide like single requests in order, or raise and charge nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from places import EXACT, STRICT

from forebay import InvalidCost, InvalidKey, StoreClosed, TokenBucket

pytestmark = pytest.mark.places(*EXACT)


@pytest.fixture
def bucket(store: Any) -> TokenBucket:
    return TokenBucket(store, "api", "10/second", burst=3)


def charged(bucket: TokenBucket, keys: Any) -> int:
    return sum(3 - bucket.peek(key).remaining for key in set(keys))


def test_batch_takes_any_iterable_of_keys_and_costs(bucket: TokenBucket) -> None:
    make: list[Callable[[list[Any]], Any]] = [list, tuple, iter, lambda items: (item for item in items)]
    for n, (keys, costs) in enumerate((keys, costs) for keys in make for costs in make):
        names = [f"{n}a", f"{n}b", f"{n}a"]
        assert bucket.allow_many(keys(names), costs([2, 3, 2])) == [True, True, False]
        assert bucket.allow_many(keys(names)) == [True, False, False]
    assert bucket.allow_many({"x": 1, "y": 2}) == [True, True]
    assert bucket.allow_many(range(3), range(3)) == [True, True, True]
    assert bucket.allow_many(keys=["x"], costs=[2]) == [True]


def test_empty_batch_gives_no_answers(bucket: TokenBucket) -> None:
    assert bucket.allow_many([]) == bucket.allow_many((), ()) == bucket.allow_many(iter(()), []) == []


@pytest.mark.places(*STRICT)
def test_empty_batch_on_a_closed_store_raises(bucket: TokenBucket) -> None:
    bucket.store.close()
    for keys in ([], (), iter(())):
        with pytest.raises(StoreClosed):
            bucket.allow_many(keys)


def test_batch_takes_keys_of_all_types(bucket: TokenBucket) -> None:
    keys = ["1", b"1", 1, ("1",), (1,), "é", "\ud800", 2**70, ()]
    assert bucket.allow_many(keys, [3] * len(keys)) == [True] * len(keys)
    assert bucket.allow_many(keys) == [False] * len(keys)
    assert [bucket.allow(key) for key in keys] == [False] * len(keys)


@pytest.mark.parametrize("keys", [None, 5, object()])
def test_batch_refuses_keys_that_are_not_iterable(bucket: TokenBucket, keys: Any) -> None:
    with pytest.raises(TypeError):
        bucket.allow_many(keys)
    with pytest.raises(InvalidCost, match="one cost for each key"):
        bucket.allow_many(["k"], 5)  # type: ignore[arg-type]
    assert bucket.peek("k").remaining == 3


@pytest.mark.parametrize("key", ["abc", b"abc", ""])
def test_batch_refuses_a_single_key(bucket: TokenBucket, key: Any) -> None:
    with pytest.raises(InvalidKey, match="a list of keys"):
        bucket.allow_many(key)


def test_iterable_that_raises_charges_nothing(bucket: TokenBucket) -> None:
    def broken(items: list[Any]) -> Iterator[Any]:
        yield from items
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bucket.allow_many(broken(["k", "l"]))
    with pytest.raises(ZeroDivisionError):
        bucket.allow_many(["k", "l"], broken([1, 1]))
    assert charged(bucket, ["k", "l"]) == 0


def test_batch_leaves_its_lists_unchanged(bucket: TokenBucket) -> None:
    keys, costs = ["a", "b"], [1, 2]
    bucket.allow_many(keys, costs)
    assert (keys, costs) == (["a", "b"], [1, 2])


def test_large_batch_is_decided_in_order(store: Any) -> None:
    bucket = TokenBucket(store, "b", "1200/minute")
    assert bucket.allow_many(["ada"] * 1500) == [True] * 1200 + [False] * 300
    assert bucket.allow_many([]) == []
    assert bucket.allow_many(["bob", "cid"], [1200, 1]) == [True, True]
    for wrong in ((["a"], [1, 2]), ("ada", None), (["a"], 1)):
        with pytest.raises((TypeError, ValueError)):
            bucket.allow_many(*wrong)

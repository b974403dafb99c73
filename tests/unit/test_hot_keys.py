"""The record of hot keys: which keys a store's processes deny and allow most, as ``Store.hot_keys`` returns them."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import c_api
import pytest
from limiter_makers import OF_FIVE
from process_helpers import extents, path_of

from forebay import (
    AllOf,
    Concurrency,
    FixedWindow,
    HotKey,
    SegmentError,
    SegmentSizeWarning,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.core.limiter import hot_name_of
from forebay.segment import layout
from forebay.segment.hot_keys import ALLOWED_PER_NOTE, UNIT_NS, hot_digest
from forebay.testing import ManualClock
from forebay.verification import verify

HALVING_S = UNIT_NS * 2**layout.HOT_HALVING_BITS / 1e9


def make(name: str, clock: ManualClock, hot_keys: int | None = 64) -> Store:
    return Store(name, keys=1000, clock=clock, hot_keys=hot_keys)


def digest(limiter: Any, key: Any) -> str:
    return hot_digest(hot_name_of(limiter, key))


def denied(store: Store) -> dict[tuple[str, str], int]:
    return {(one.limiter, one.digest): one.denied for one in store.hot_keys() if one.denied}


def deny(limiter: Any, key: Any, times: int = 1) -> None:
    """Use up the key's limit, which is 1, and deny it so often."""
    limiter.allow(key)
    for _ in range(times):
        assert not limiter.allow(key)


@pytest.mark.parametrize("kind", OF_FIVE)
def test_each_kind_of_limiter_notes_the_keys_that_it_denies(kind: str, clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock, hot_keys=8) as store:
        limiter = OF_FIVE[kind](store)
        assert [limiter.allow("key") for _ in range(5)] == [True] * 5
        assert store.hot_keys() == []
        assert not limiter.allow("key")
        assert not limiter.hit("key", 2).allowed
        assert denied(store) == {("five", digest(limiter, "key")): 2}
        assert store.hot_keys()[0].algorithm == type(limiter).__name__


def test_every_way_to_ask_notes_a_denial(clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1/hour")
        bucket.allow("key")
        ways = [
            lambda: bucket.allow("key"),
            lambda: bucket.hit("key"),
            lambda: bucket.hit("key", request_id="a"),
            lambda: bucket.take_up_to("key", 1),
            lambda: bucket.reserve("key", max_delay=0),
            lambda: bucket.allow_many(["key"]),
            lambda: bucket.allow_many(["key"], [1]),
            lambda: AllOf(bucket).allow("key"),
            lambda: AllOf(bucket).hit("key"),
        ]
        for number, way in enumerate(ways, 1):
            way()
            assert denied(store) == {("api", digest(bucket, "key")): number}
        bucket.peek("key")
        assert denied(store) == {("api", digest(bucket, "key")): len(ways)}


def test_a_concurrency_notes_denials_of_each_call(clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock, hot_keys=8) as store:
        limit = Concurrency(store, "fleet", 1, lease="1h", keys=4)
        lease = limit.acquire("key")
        ways = [limit.acquire, limit.hit, limit.allow, lambda key: limit.acquire(key, request_id="a")]
        for number, way in enumerate(ways, 1):
            way("key")
            assert denied(store) == {("fleet", digest(limit, "key")): number}
        lease.release()


def test_native_threads_note_denials(clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1/hour")
        with c_api.Handle(bucket) as handle:
            thread = handle.attach()
            for _ in range(3):
                thread.allow(b"key")
            thread.decide(b"key")
            thread.decide_many([c_api.request_of(b"key"), c_api.request_of(b"other"), c_api.request_of(b"other")])
            c_api.decide_all([thread], [c_api.request_of(b"key")])
            thread.detach()
        assert denied(store) == {("api", digest(bucket, "key")): 5, ("api", digest(bucket, "other")): 1}


def test_every_61st_allowed_request_is_noted(clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1000000/hour")
        for _ in range(ALLOWED_PER_NOTE - 1):
            assert bucket.allow("key")
        assert store.hot_keys() == []
        assert bucket.allow("key")
        bucket.allow_many(["key"] * ALLOWED_PER_NOTE)
        assert store.hot_keys() == [
            HotKey("api", "TokenBucket", digest(bucket, "key"), denied=0, denied_ago=None, allowed=2 * ALLOWED_PER_NOTE)
        ]


def test_limiters_have_their_keys_apart_and_the_most_denied_key_comes_first(clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock, hot_keys=8) as store:
        first, second = TokenBucket(store, "first", "1/hour"), FixedWindow(store, "second", "1/hour")
        deny(first, "key", 2)
        deny(second, ("a", 1), 3)
        assert [(one.limiter, one.digest, one.denied) for one in store.hot_keys()] == [
            ("second", digest(second, ("a", 1)), 3),
            ("first", digest(first, "key"), 2),
        ]


def test_counts_are_halved_with_the_time_and_the_latest_denial_is_dated(clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1/year")
        deny(bucket, "key", 20)
        clock.advance(HALVING_S)
        (found,) = store.hot_keys()
        assert found.denied == 10
        assert found.denied_ago is not None
        assert HALVING_S <= found.denied_ago <= HALVING_S + 2
        bucket.allow("key")
        clock.advance(2 * HALVING_S)
        assert store.hot_keys()[0].denied == 2
        clock.advance(100 * HALVING_S)
        assert store.hot_keys()[0].denied == 0


def test_keys_that_come_once_do_not_displace_those_that_come_often(clock: ManualClock) -> None:
    with Store.private(keys=100_000, clock=clock, hot_keys=64) as store:
        bucket = TokenBucket(store, "api", "1/hour")
        often = [f"often {number}" for number in range(10)]
        for key in often:
            deny(bucket, key, 500)
        for number in range(10_000):
            deny(bucket, f"once {number}")
        found = denied(store)
        kept = [key for key in often if found.get(("api", digest(bucket, key)), 0) == 500]
        # The slot with the least count is worn in each line; hardly ever do four of ten keys share one.
        assert len(kept) >= 7
        assert len(store.hot_keys()) <= 96 * 2


def test_a_store_without_the_option_notes_nothing_and_appends_nothing(name: str, clock: ManualClock) -> None:
    with make(name, clock, hot_keys=None) as store:
        deny(TokenBucket(store, "api", "1/hour"), "key")
        with pytest.raises(SegmentError, match="no record of hot keys"):
            store.hot_keys()
        assert extents(path_of(name)) == []
        with make(name, clock) as noting:
            assert noting.hot_keys() == []
            deny(TokenBucket(store, "api", "1/hour"), "key")
            assert store.hot_keys() == []


def test_stores_of_one_name_share_the_record(name: str, clock: ManualClock) -> None:
    with make(name, clock) as one, make(name, clock) as other:
        limiters = [TokenBucket(store, "api", "1/hour") for store in (one, other)]
        for limiter in limiters:
            deny(limiter, "key", 2) if limiter is limiters[0] else limiter.allow("key")
        assert denied(one) == denied(other) == {("api", digest(limiters[0], "key")): 3}
        with Store.attach(name) as looking:
            assert looking.hot_keys() == one.hot_keys()


def test_an_existing_record_keeps_its_size(name: str, clock: ManualClock) -> None:
    with make(name, clock, 64):
        with pytest.warns(SegmentSizeWarning, match="made for 64 keys"):
            store = make(name, clock, 8)
        deny(TokenBucket(store, "api", "1/hour"), "key")
        assert [one.denied for one in store.hot_keys()] == [1]
        store.close()


@pytest.mark.parametrize("hot_keys", [3, 0, -1, 2**16 + 1, True, "64", 64.0])
def test_a_wrong_number_of_hot_keys_is_refused(name: str, hot_keys: Any) -> None:
    with pytest.raises(ValueError, match="hot_keys is a whole number from 4 to 65536"):
        Store(name, keys=100, hot_keys=hot_keys)
    with pytest.raises(ValueError, match="hot_keys"):
        Store.private(keys=100, hot_keys=hot_keys)
    assert not Path(path_of(name)).exists()


def test_a_closed_store_has_no_hot_keys(clock: ManualClock) -> None:
    store = Store.private(keys=100, clock=clock, hot_keys=8)
    store.close()
    with pytest.raises(StoreClosed):
        store.hot_keys()


def test_the_segment_has_no_key_and_is_sound(name: str, clock: ManualClock) -> None:
    with make(name, clock) as store:
        deny(TokenBucket(store, "api", "1/hour"), "customer@example.org", 5)
        assert b"customer" not in Path(path_of(name)).read_bytes()
        assert verify(name).findings == ()
        assert "forebay.hot keys" in store.stats().limiters


@pytest.mark.parametrize("seed", range(20))
def test_damage_changes_no_decision_and_no_note_crashes(name: str, clock: ManualClock, seed: int) -> None:
    draw = random.Random(seed)
    with make(name, clock, 16) as store:
        bucket = TokenBucket(store, "api", "3/year")
        (extent,) = extents(path_of(name))
        size = extent["bytes"]
        words = [draw.choice([0, 2**64 - 1, draw.getrandbits(64), draw.getrandbits(33)]) for _ in range(size // 8)]
        with Path(path_of(name)).open("r+b", buffering=0) as file:
            file.seek(extent["offset"])
            file.write(struct.pack(f"<{len(words)}Q", *words))
        for number in range(30):
            answers = [bucket.allow(number) for _ in range(5)]
            assert answers == [True] * 3 + [False] * 2
        found = store.hot_keys()
        assert all(one.limiter in {"api", "forebay.hot keys"} and one.denied >= 0 for one in found)
        # A key that goes on is in the list again, whatever was there.
        clock.advance(64 * HALVING_S)
        assert sum(bucket.allow("key") for _ in range(13)) == 3
        assert denied(store)["api", digest(bucket, "key")] >= 1

"""Credits in a store: what no time brings, and a store without room."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from forebay import AllOf, CostExceedsLimit, Credits, InvalidLimiter, LimitExceeded, Store, StoreFull, TokenBucket
from forebay.rate import NEVER_NS
from forebay.testing import ManualClock

CROWD = range(5000)
MOST = 2**48 - 1
KEPT_S = 300


@pytest.fixture
def prepaid(store: Store) -> Credits:
    return Credits(store, "api calls")


def test_key_begins_with_nothing_and_spends_what_was_added(prepaid: Credits, clock: ManualClock) -> None:
    assert not prepaid.allow("ada")
    assert prepaid.add("ada", 3) == 3
    assert prepaid.hit("ada", 2).remaining == 1
    clock.advance(10**9)
    assert [prepaid.allow("ada"), prepaid.allow("ada")] == [True, False]
    assert prepaid.add("ada", 0) == 0
    assert prepaid.add("ada", 1) == 1


def test_denial_says_that_no_time_helps(prepaid: Credits) -> None:
    prepaid.add("ada", 2)
    decision = prepaid.hit("ada", 3)
    assert (decision.allowed, decision.reason, decision.limit, decision.remaining) == (False, "limit", 2, 2)
    assert (decision.retry_after, decision.reset_after, decision.next_after) == (math.inf,) * 3
    assert (decision.retry_after_ns, decision.next_after_ns) == (NEVER_NS, NEVER_NS)
    allowed = prepaid.hit("ada", 2)
    assert (allowed.limit, allowed.remaining, allowed.retry_after, allowed.next_after) == (0, 0, 0.0, math.inf)


def test_cost_above_what_a_key_can_have_is_an_error(prepaid: Credits) -> None:
    assert not prepaid.hit("ada", MOST)
    with pytest.raises(CostExceedsLimit):
        prepaid.hit("ada", MOST + 1)


@pytest.mark.parametrize("timeout", [None, "1 hour"])
def test_wait_for_what_never_comes_ends_at_once(prepaid: Credits, clock: ManualClock, timeout: Any) -> None:
    before_ns = prepaid.store.now_ns()
    assert not prepaid.wait("ada", timeout=timeout)
    assert not asyncio.run(_waited(prepaid, timeout))
    with pytest.raises(LimitExceeded, match="the key has 0 left, and no time brings more"), prepaid.limited("ada"):
        pass
    assert prepaid.store.now_ns() == before_ns
    prepaid.add("ada", 1)
    assert prepaid.wait("ada", timeout=timeout)


async def _waited(prepaid: Credits, timeout: Any) -> bool:
    return await prepaid.wait_async("ada", timeout=timeout)


def test_wait_of_several_limits_ends_at_once_without_credits(store: Store) -> None:
    prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "free", "1/minute")
    limits = AllOf(bucket, prepaid)
    assert not limits.wait("ada")
    prepaid.add("ada", 2)
    assert limits.wait("ada")
    assert limits.wait("ada")
    assert prepaid.peek("ada", 0).remaining == 0


def test_denial_of_a_new_key_inserts_and_evicts_nothing(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="evict", clock=clock) as store:
        bucket, prepaid = TokenBucket(store, "api", "1/hour"), Credits(store, "paid")
        bucket.allow_many(CROWD)
        before = store.stats()
        assert prepaid.allow_many(CROWD) == [False] * len(CROWD)
        assert not any(prepaid.hit(key, 2) or prepaid.reserve(key) or prepaid.take_up_to(key, 5) for key in CROWD)
        assert not any(AllOf(bucket, prepaid).allow_many(CROWD))
        after = store.stats()
        assert after.limiters["paid"].inserted == after.limiters["paid"].full == 0
        assert (after.total.evicted, after.live_keys) == (before.total.evicted, before.live_keys)


def test_key_with_credits_is_never_evicted(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="evict", clock=clock) as store:
        prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "api", "1/hour")
        for key in range(100):
            prepaid.add(key, key + 1)
        for second in range(10):
            bucket.allow_many(range(second * 2000, second * 2000 + 2000))
            clock.advance(3600)
        assert [prepaid.peek(key, 0).remaining for key in range(100)] == [key + 1 for key in range(100)]


@pytest.mark.parametrize("on_full", ["deny", "allow"])
def test_store_without_room_adds_nothing_and_says_so(clock: ManualClock, on_full: Any) -> None:
    with Store.private(keys=1, on_full=on_full, clock=clock) as store:
        prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "api", "1/hour")
        bucket.allow_many(CROWD)
        crowded_out = next(key for key in CROWD if not bucket.peek(key).allowed)
        with pytest.raises(StoreFull, match=r"if take_up_to\(\) takes all of a key's Credits, its place is free"):
            prepaid.add(crowded_out, 1)
        assert store.stats().limiters["paid"].full == 1


def test_spent_key_keeps_its_cell_for_what_comes_back(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="deny", clock=clock) as store:
        prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "api", "1/day")
        prepaid.add("ada", 1)
        reservation = prepaid.reserve("ada")
        clock.advance(KEPT_S - 1)
        bucket.allow_many(CROWD)
        reservation.cancel()
        assert prepaid.peek("ada").remaining == 1


def test_charge_that_finds_no_room_when_it_comes_back_is_an_error(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="deny", clock=clock) as store:
        prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "api", "1/day")
        prepaid.add("ada", 1)
        reservation = prepaid.reserve("ada")
        clock.advance(KEPT_S)
        bucket.allow_many(CROWD)
        with pytest.raises(StoreFull):
            reservation.cancel()
        with pytest.raises(StoreFull):
            prepaid.refund("ada")


def test_charge_that_found_no_room_comes_back_by_another_call(clock: ManualClock) -> None:
    # Several keys, as the cell of a request's mark may be one that its key may have. Then there is room.
    keys = [f"bob {number}" for number in range(16)]
    with Store.private(keys=1, on_full="deny", clock=clock) as store:
        prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "api", "1/day")
        for key in ("ada", *keys):
            prepaid.add(key, 3)
        reservation = prepaid.reserve("ada", 3)
        assert all(prepaid.hit(key, 3, request_id=key, request_ttl="2 days") for key in keys)

        def finds_room(key: str) -> bool:
            try:
                prepaid.refund(key, 3, request_id=key)
            except StoreFull:
                return False
            return True

        clock.advance(KEPT_S)
        bucket.allow_many(CROWD)
        full = [key for key in keys if not finds_room(key)]
        assert full
        assert not any(finds_room(key) for key in full)
        for _ in range(2):
            with pytest.raises(StoreFull):
                reservation.cancel()
        clock.advance(86_400)
        for _ in range(2):
            reservation.cancel()
            assert all(finds_room(key) for key in keys)
        assert [prepaid.peek(key, 0).remaining for key in ("ada", *keys)] == [3] * 17


def test_charge_comes_back_to_a_key_that_lost_its_cell(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="evict", clock=clock) as store:
        prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "api", "1/day")
        prepaid.add("ada", 2)
        assert prepaid.hit("ada", 2)
        clock.advance(KEPT_S)
        bucket.allow_many(CROWD)
        prepaid.refund("ada", 2)
        prepaid.refund("bob", 0)
        assert prepaid.peek("ada", 0).remaining == 2
        assert store.stats().limiters["paid"].inserted == 2


def test_denied_request_to_several_limits_leaves_the_balance(store: Store) -> None:
    prepaid, bucket = Credits(store, "paid"), TokenBucket(store, "api", "1/hour")
    limits = AllOf(prepaid, bucket)
    prepaid.add("ada", 5)
    assert limits.allow("ada")
    assert not limits.allow("ada")
    decision = limits.hit("bob")
    assert (decision.allowed, decision.limiter, decision.retry_after) == (False, "paid", math.inf)
    assert prepaid.peek("ada", 0).remaining == 4
    assert bucket.peek("bob", 0).remaining == 1
    reservation = limits.reserve("cyd")
    assert (reservation.allowed, reservation.delay) == (False, math.inf)


def test_request_id_is_charged_once(prepaid: Credits) -> None:
    prepaid.add("ada", 5)
    assert [prepaid.hit("ada", 2, request_id="r").remaining for _ in range(3)] == [3, 3, 3]
    prepaid.refund("ada", 2, request_id="r")
    prepaid.refund("ada", 2, request_id="r")
    assert prepaid.peek("ada", 0).remaining == 5


def test_whole_balance_can_be_taken(prepaid: Credits) -> None:
    prepaid.add("ada", 7)
    assert [prepaid.take_up_to("ada", 2**48), prepaid.take_up_to("ada", 2**48)] == [7, 0]


def test_reset_is_refused_as_it_would_delete_what_was_paid_for(store: Store, prepaid: Credits) -> None:
    prepaid.add("ada", 7)
    with pytest.raises(InvalidLimiter, match="take_up_to"):
        prepaid.reset("ada")
    bucket = TokenBucket(store, "api", "1/hour")
    assert bucket.allow("ada")
    with pytest.raises(InvalidLimiter, match="take_up_to"):
        AllOf(bucket, prepaid).reset("ada")
    assert prepaid.peek("ada", 0).remaining == 7
    assert bucket.peek("ada").remaining == 1


def test_rate_for_one_call_is_refused(prepaid: Credits) -> None:
    with pytest.raises(InvalidLimiter, match="one limit for all calls"):
        prepaid.hit("ada", rate="1/s")


def test_bucket_of_the_same_name_has_another_state(store: Store) -> None:
    bucket = TokenBucket(store, "both", "1/hour")
    prepaid = Credits(store, "both")
    prepaid.add("ada", 5)
    assert bucket.allow("ada")
    assert not bucket.allow("ada")
    assert prepaid.peek("ada", 0).remaining == 5


def test_two_charges_of_one_balance_are_both_given_back(store: Store) -> None:
    bucket, prepaid = TokenBucket(store, "api", "1/day"), Credits(store, "paid")
    prepaid.add("ada", 1)
    assert not AllOf(bucket, prepaid, Credits(store, "paid")).hit(["bob", "ada", "ada"])
    assert prepaid.peek("ada", 0).remaining == 1
    assert bucket.peek("bob").remaining == 1

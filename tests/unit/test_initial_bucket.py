"""Token buckets whose keys start with fewer permits than the burst, by example. tests/property has the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import AllOf, CostExceedsLimit, InvalidLimiter, LeakyBucket, Store, TokenBucket
from forebay.testing import ManualClock


@pytest.fixture
def bucket(store: Store) -> TokenBucket:
    return TokenBucket(store, "api", "60/minute", burst=10, initial=3)


def test_a_new_key_has_the_initial_permits_and_fills_from_its_first_request_on(
    bucket: TokenBucket, clock: ManualClock
) -> None:
    clock.advance(1000)
    assert bucket.peek("k").remaining == 3
    assert [bucket.allow("k") for _ in range(4)] == [True, True, True, False]
    denied = bucket.hit("k")
    assert (denied.limit, denied.remaining, denied.retry_after, denied.reset_after) == (10, 0, 1.0, 10.0)
    clock.advance(4)
    assert bucket.peek("k").remaining == 4
    clock.advance(6)
    full = bucket.peek("k")
    assert (full.remaining, full.reset_after) == (10, 0.0)
    assert bucket.take_up_to("k", 99) == 10


def test_a_key_is_forgotten_when_its_bucket_was_full_for_as_long_as_a_new_one_takes_to_fill(
    bucket: TokenBucket, clock: ManualClock, store: Store
) -> None:
    assert bucket.hit("k").reset_after == 8.0
    clock.advance(8 + 7 - 0.001)
    assert (bucket.peek("k").remaining, store.stats().live_keys) == (10, 1)
    clock.advance(0.001)
    assert (bucket.peek("k").remaining, store.stats().live_keys) == (3, 0)


def test_a_key_that_was_reset_or_evicted_is_new(bucket: TokenBucket, clock: ManualClock) -> None:
    bucket.hit("k")
    clock.advance(8)
    assert bucket.peek("k").remaining == 10
    bucket.reset("k")
    assert bucket.peek("k").remaining == 3
    with Store.private(keys=1, clock=ManualClock(1000)) as small:
        limiter = TokenBucket(small, "api", "1/hour", burst=10, initial=3)
        keys = range(5000)
        assert sum(limiter.allow_many(keys)) == len(keys)
        assert small.stats().total.evicted > 0
        assert {limiter.peek(key).remaining for key in keys} == {2, 3}


def test_a_refund_gives_back_up_to_the_burst(bucket: TokenBucket, clock: ManualClock) -> None:
    bucket.refund("never seen", 3)
    assert bucket.peek("never seen").remaining == 3
    bucket.hit("k", 3)
    bucket.refund("k", 3)
    assert bucket.peek("k").remaining == 3
    clock.advance(2)
    assert bucket.peek("k").remaining == 5
    bucket.hit("k", 2)
    bucket.refund("k", 10**9)
    assert bucket.peek("k").remaining == 10
    assert bucket.hit("k", 2, request_id="r")
    bucket.refund("k", 2, request_id="r")
    bucket.refund("k", 2, request_id="r")
    assert bucket.peek("k").remaining == 10


def test_bookings_wait_for_their_permits(bucket: TokenBucket, clock: ManualClock) -> None:
    reservations = [bucket.reserve("k", 2) for _ in range(3)]
    assert [reservation.delay for reservation in reservations] == [0.0, 1.0, 3.0]
    reservations[-1].cancel()
    assert bucket.reserve("k", 1).delay == 2.0
    assert not bucket.reserve("k", 1, max_delay=2)
    assert bucket.wait("k", 3, timeout=10)
    assert bucket.peek("k").remaining == 0


def test_a_cost_above_the_initial_permits_is_refused(bucket: TokenBucket, store: Store) -> None:
    other = LeakyBucket(store, "other", "1/s", 10)
    methods: list[Any] = [bucket.hit, bucket.peek, bucket.reserve, AllOf(other, bucket).hit]
    for method in methods:
        with pytest.raises(CostExceedsLimit) as caught:
            method("k", 4)
        assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (4, 3, "api")
    with pytest.raises(CostExceedsLimit):
        bucket.allow_many(["k", "k"], [1, 4])
    assert bucket.peek("k").remaining == 3
    assert AllOf(other, bucket).hit("k", 3).remaining == 0


def test_parameters_are_shown_and_checked(bucket: TokenBucket, store: Store) -> None:
    assert (bucket.initial, bucket.burst, bucket.refill) == (3, 10, "continuous")
    assert repr(bucket) == "<TokenBucket 'api' 60 per minute, burst=10, initial=3>"
    assert TokenBucket(store, "plain", "1/s").initial is None
    assert isinstance(bucket, TokenBucket)
    for wrong in (0, -1, 11, 1.0, True, "3"):
        with pytest.raises(InvalidLimiter, match="from 1 to its burst, 10"):
            TokenBucket(store, "wrong", "60/minute", burst=10, initial=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidLimiter, match="in intervals"):
        TokenBucket(store, "wrong", "60/minute", burst=10, refill="interval", initial=3)
    with pytest.raises(InvalidLimiter, match="one limit for all calls"):
        bucket.hit("k", rate="10/s")
    with pytest.raises(InvalidLimiter, match="for too long"):
        TokenBucket(store, "wrong", "1/year", burst=70, initial=1)
    whole = TokenBucket(store, "whole", "60/minute", burst=10, initial=10)
    assert [whole.hit("k", 10).remaining, whole.allow("k")] == [0, False]


def test_a_bucket_with_other_initial_permits_has_a_state_of_its_own(store: Store) -> None:
    assert TokenBucket(store, "api", "60/minute", burst=10, initial=3).hit("k", 3)
    assert not TokenBucket(store, "api", "60/minute", burst=10, initial=3).allow("k")
    assert TokenBucket(store, "api", "60/minute", burst=10, initial=2).peek("k").remaining == 2
    assert TokenBucket(store, "api", "60/minute", burst=10).peek("k").remaining == 10

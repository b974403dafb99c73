"""`add`: permits above a token bucket's burst, wherever limits are kept."""

from __future__ import annotations

from typing import Any

import pytest
from places import STRICT, Clock

from forebay import AllOf, InvalidCost, InvalidKey, InvalidLimiter, InvalidRate, StoreClosed, TokenBucket

pytestmark = pytest.mark.places(*STRICT)

DAY = 86_400
MOST = 2**48 - 1


@pytest.fixture
def bucket(store: Any, clock: Clock) -> Any:
    clock.set(DAY)
    return TokenBucket(store, "api", "10/second", burst=10)


def test_new_key_has_permits_above_the_burst(bucket: Any, clock: Clock) -> None:
    assert bucket.add("ada", 5) == 15
    decision = bucket.peek("ada")
    assert decision.allowed
    assert (decision.limit, decision.remaining) == (10, 15)
    assert (decision.retry_after, decision.reset_after, decision.next_after) == (0, 0, 0)
    assert bucket.peek("eve").remaining == 10


def test_nothing_is_refilled_above_the_burst(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 5)
    assert bucket.hit("ada", 3).remaining == 12
    clock.advance(365 * DAY)
    assert bucket.peek("ada").remaining == 12
    assert bucket.hit("ada", 7).remaining == 5
    clock.advance(0.2)
    assert bucket.peek("ada").remaining == 7
    clock.advance(DAY)
    assert bucket.peek("ada").remaining == 10


def test_permits_fill_the_bucket_first(bucket: Any, clock: Clock) -> None:
    bucket.hit("ada", 8)
    assert bucket.add("ada", 3) == 5
    assert bucket.add("ada", 5) == 10
    assert bucket.add("ada", 2) == 12
    bucket.reset("ada")
    assert bucket.peek("ada").remaining == 10


def test_part_of_a_permit_is_rounded_against_the_key(bucket: Any, clock: Clock) -> None:
    bucket.hit("ada", 3)
    clock.advance(0.05)
    assert bucket.peek("ada").remaining == 7
    # Two and a half permits are missing.
    assert bucket.add("ada", 4) == 11


def test_exactly_the_permits_above_the_burst_leave_a_full_bucket(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 4)
    decision = bucket.hit("ada", 4)
    assert (decision.remaining, decision.reset_after) == (10, 0)
    assert bucket.hit("ada", 10)
    assert not bucket.allow("ada")


def test_no_request_costs_more_than_the_burst(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 100)
    with pytest.raises(ValueError, match="at most 10"):
        bucket.hit("ada", 11)
    assert bucket.take_up_to("ada", 1000) == 10
    assert bucket.peek("ada").remaining == 100


def test_all_added_permits_are_admitted_and_no_more(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 7)
    assert bucket.allow_many(["ada"] * 20) == [True] * 17 + [False] * 3


def test_refund_never_goes_above_the_burst(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 2)
    bucket.hit("ada", 1)
    bucket.refund("ada", 1)
    assert bucket.peek("ada").remaining == 11
    bucket.hit("ada", 3)
    bucket.refund("ada", 9)
    assert bucket.peek("ada").remaining == 10


def test_cancelled_charge_goes_back_above_the_burst(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 5)
    reservation = bucket.reserve("ada", 3)
    assert reservation.allowed
    assert reservation.delay == 0
    assert bucket.peek("ada").remaining == 12
    clock.advance(DAY)
    for _ in range(2):
        reservation.cancel()
    assert bucket.peek("ada").remaining == 15


def test_cancelled_charge_gives_nothing_to_a_key_below_its_burst(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 5)
    reservation = bucket.reserve("ada", 3)
    bucket.hit("ada", 8)
    clock.advance(0.1)
    reservation.cancel()
    assert bucket.peek("ada").remaining == 5


def test_booking_ahead_is_charged_behind_the_added_permits(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 1)
    bucket.hit("ada", 10)
    assert bucket.reserve("ada", 2).delay == 0.1
    assert bucket.add("ada", 3) == 2


def test_another_rate_takes_as_many_permits_as_it_costs(bucket: Any, clock: Clock) -> None:
    slow = {"rate": "1/hour", "burst": 5}
    bucket.add("ada", 8)
    assert bucket.peek("ada", **slow).remaining == 13
    assert bucket.hit("ada", 4, **slow).remaining == 9
    assert bucket.peek("ada").remaining == 14
    assert bucket.add("ada", 1, **slow) == 10
    # The fifth permit above the burst, and two more.
    assert bucket.hit("ada", 5, **slow).remaining == 5
    assert bucket.hit("ada", 2, **slow).remaining == 3
    assert bucket.add("ada", 1, **slow) == 4
    clock.advance(3600)
    assert bucket.peek("ada", **slow).remaining == 5


def test_converted_key_keeps_its_permits_above_the_new_burst(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 8)
    for keep in ("permits", "share", "used"):
        assert bucket.convert("ada", "10/second", 10, rate="2/minute", keep=keep) == 10
    assert bucket.peek("ada").remaining == 18


def test_repeated_request_is_charged_once(bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 8)
    for _ in range(2):
        decision = bucket.hit("ada", 5, request_id="r")
        assert (decision.allowed, decision.remaining) == (True, 13)


def test_several_limits_charge_all_or_none(store: Any, bucket: Any, clock: Clock) -> None:
    other = TokenBucket(store, "other", "1/hour", burst=2)
    both = AllOf(bucket, other)
    bucket.add("ada", 5)
    other.add("ada", 1)
    assert [both.allow("ada") for _ in range(4)] == [True, True, True, False]
    assert bucket.peek("ada").remaining == 12
    assert other.peek("ada").remaining == 0


def test_cancelled_charge_of_several_limits_goes_back(store: Any, bucket: Any, clock: Clock) -> None:
    other = TokenBucket(store, "other", "1/hour", burst=2)
    bucket.add("ada", 5)
    AllOf(bucket, other).reserve("ada").cancel()
    assert (bucket.peek("ada").remaining, other.peek("ada").remaining) == (15, 2)


def test_limits_of_one_state_take_added_permits_one_after_the_other(store: Any, bucket: Any, clock: Clock) -> None:
    bucket.add("ada", 1)
    again = TokenBucket(store, "api", "10/second", burst=10)
    assert AllOf(bucket, again).hit("ada", [1, 1])
    assert bucket.peek("ada").remaining == 9


def test_most_that_can_be_added(bucket: Any, clock: Clock) -> None:
    assert bucket.add("ada", MOST) == MOST + 10
    with pytest.raises(InvalidCost, match=r"at most 281474976710655 above its burst"):
        bucket.add("ada", 1)
    assert bucket.peek("ada").remaining == MOST + 10
    bucket.hit("ada", 9)
    assert bucket.add("ada", 9) == MOST + 10
    reservation = bucket.reserve("ada", 5)
    bucket.add("ada", 5)
    reservation.cancel()
    assert bucket.peek("ada").remaining == MOST + 10


@pytest.mark.parametrize("permits", [-1, 1.5, "3", None, True, MOST + 1, 10**30])
def test_permits_that_cannot_be_added(bucket: Any, clock: Clock, permits: Any) -> None:
    with pytest.raises(InvalidCost):
        bucket.add("ada", permits)
    assert bucket.peek("ada").remaining == 10


def test_nothing_added(bucket: Any, clock: Clock) -> None:
    bucket.hit("ada", 4)
    assert bucket.add("ada", 0) == 6
    assert bucket.add("eve", 0) == 10


def test_wrong_arguments(bucket: Any, clock: Clock) -> None:
    with pytest.raises(InvalidKey):
        bucket.add(1.5, 1)
    with pytest.raises(InvalidRate):
        bucket.add("ada", 1, rate="fast")
    with pytest.raises(InvalidLimiter, match="needs a rate"):
        bucket.add("ada", 1, burst=5)


def test_bucket_in_intervals_refuses(store: Any, clock: Clock) -> None:
    bucket = TokenBucket(store, "api", "10/second", refill="interval")
    with pytest.raises(InvalidLimiter, match="refill='continuous' can"):
        bucket.add("ada", 1)


def test_closed_store(store: Any, bucket: Any, clock: Clock) -> None:
    store.close()
    with pytest.raises(StoreClosed):
        bucket.add("ada", 1)

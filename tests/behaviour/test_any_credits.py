"""Credits, wherever limits are kept: prepaid permits, which no time brings."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Prepaid
from places import STRICT, Clock

from forebay import (
    AllOf,
    CostExceedsLimit,
    Credits,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LimitExceeded,
    StoreClosed,
    TokenBucket,
)

pytestmark = pytest.mark.places(*STRICT)

YEAR = 365 * 86_400
MOST = Prepaid.most
numbers = itertools.count()


@pytest.fixture
def prepaid(store: Any) -> Any:
    return Credits(store, "paid")


def test_key_has_what_was_added(prepaid: Any, clock: Clock) -> None:
    assert not prepaid.allow("ada")
    assert prepaid.add("ada", 3) == 3
    assert prepaid.add("ada", 2) == 5
    decision = prepaid.hit("ada", 4)
    assert (decision.allowed, decision.limit, decision.remaining, decision.reason) == (True, 1, 1, None)
    clock.advance(YEAR)
    assert [prepaid.allow("ada"), prepaid.allow("ada"), prepaid.allow("eve")] == [True, False, False]


def test_no_time_helps_a_denied_request(prepaid: Any, clock: Clock) -> None:
    prepaid.add("ada", 2)
    for decision in (prepaid.hit("ada", 3), prepaid.peek("ada", 3)):
        assert (decision.allowed, decision.limit, decision.remaining, decision.reason) == (False, 2, 2, "limit")
        assert (decision.retry_after, decision.reset_after, decision.next_after) == (math.inf,) * 3
    assert prepaid.peek("ada", 2).allowed
    reservation = prepaid.reserve("ada", 3)
    assert (reservation.allowed, reservation.delay) == (False, math.inf)


def test_wait_ends_at_once_without_credits(store: Any, prepaid: Any, clock: Clock) -> None:
    both = AllOf(TokenBucket(store, "api", "1/hour", burst=5), prepaid)
    assert not prepaid.wait("ada")
    assert not prepaid.wait("ada", timeout="1 hour")
    assert not both.wait("ada")
    with pytest.raises(LimitExceeded, match="the key has 0 left, and no time brings more"), prepaid.limited("ada"):
        pass
    prepaid.add("ada", 2)
    assert prepaid.wait("ada")
    assert both.wait("ada")


def test_charge_is_given_back(prepaid: Any, clock: Clock) -> None:
    prepaid.add("ada", 5)
    reservation = prepaid.reserve("ada", 5)
    assert prepaid.peek("ada", 0).remaining == 0
    clock.advance(YEAR)
    reservation.cancel()
    reservation.cancel()
    assert prepaid.peek("ada", 0).remaining == 5
    assert prepaid.hit("ada", 2)
    prepaid.refund("ada", 2)
    assert prepaid.peek("ada", 0).remaining == 5


def test_request_id_is_charged_and_refunded_once(prepaid: Any, clock: Clock) -> None:
    prepaid.add("ada", 5)
    assert [prepaid.hit("ada", 2, request_id="r").remaining for _ in range(3)] == [3, 3, 3]
    prepaid.refund("ada", 2, request_id="r")
    prepaid.refund("ada", 2, request_id="r")
    assert prepaid.peek("ada", 0).remaining == 5


def test_several_limits_charge_all_or_none(store: Any, prepaid: Any, clock: Clock) -> None:
    bucket = TokenBucket(store, "api", "1/hour", burst=2)
    both = AllOf(bucket, prepaid)
    assert not both.allow("ada")
    prepaid.add("ada", 5)
    assert [both.allow("ada") for _ in range(3)] == [True, True, False]
    assert (prepaid.peek("ada", 0).remaining, bucket.peek("ada", 0).remaining) == (3, 0)
    denied = both.hit("eve")
    assert (denied.allowed, denied.limiter, denied.retry_after) == (False, "paid", math.inf)
    assert bucket.peek("eve", 0).remaining == 2


def test_limits_of_one_balance_take_it_one_after_the_other(store: Any, prepaid: Any, clock: Clock) -> None:
    prepaid.add("ada", 3)
    both = AllOf(prepaid, Credits(store, "paid"))
    assert both.allow("ada")
    assert not both.allow("ada")
    assert prepaid.peek("ada", 0).remaining == 1


def test_balance_is_taken_whole(prepaid: Any, clock: Clock) -> None:
    prepaid.add("ada", 7)
    assert [prepaid.take_up_to("ada", 5), prepaid.take_up_to("ada", 2**48), prepaid.take_up_to("ada", 1)] == [5, 2, 0]


def test_batch(prepaid: Any, clock: Clock) -> None:
    prepaid.add("ada", 2)
    assert prepaid.allow_many(["ada", "eve", "ada", "ada"]) == [True, False, True, False]


def test_most_that_a_key_has(prepaid: Any, clock: Clock) -> None:
    assert prepaid.add("ada", MOST) == MOST
    with pytest.raises(InvalidCost, match="281474976710655"):
        prepaid.add("ada", 1)
    prepaid.refund("ada", 3)
    assert prepaid.peek("ada", MOST).remaining == MOST
    with pytest.raises(CostExceedsLimit):
        prepaid.hit("ada", MOST + 1)
    assert prepaid.hit("ada", MOST)


def test_wrong_arguments(store: Any, prepaid: Any, clock: Clock) -> None:
    for permits in (-1, 1.5, "3", None, True, MOST + 1):
        with pytest.raises(InvalidCost):
            prepaid.add("ada", permits)
    with pytest.raises(InvalidKey):
        prepaid.add(1.5, 1)
    with pytest.raises(InvalidLimiter, match="one limit for all calls"):
        prepaid.hit("ada", rate="1/s")
    with pytest.raises(TypeError):
        Credits(store, "paid", 5)  # type: ignore[call-overload]
    assert prepaid.add("ada", 0) == 0


def test_reset_is_refused(store: Any, prepaid: Any, clock: Clock) -> None:
    prepaid.add("ada", 7)
    with pytest.raises(InvalidLimiter, match="take_up_to"):
        prepaid.reset("ada")
    with pytest.raises(InvalidLimiter, match="take_up_to"):
        AllOf(TokenBucket(store, "api", "1/hour"), prepaid).reset("ada")
    assert prepaid.peek("ada", 0).remaining == 7


def test_closed_store(store: Any, prepaid: Any, clock: Clock) -> None:
    store.close()
    with pytest.raises(StoreClosed):
        prepaid.add("ada", 1)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "hit", "allow", "peek", "refund", "cancel", "take_up_to"]),
        st.integers(0, 5) | st.integers(0, MOST) | st.sampled_from([MOST - 1, MOST]),
        st.sampled_from([0, 1, 299, 301, YEAR]),
    ),
    max_size=12,
)


@given(steps=steps)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_answer_is_the_oracles(prepaid: Any, clock: Clock, steps: list[tuple[str, int, int]]) -> None:
    rule, key, left = Prepaid(), f"key {next(numbers)}", 0
    for what, number, seconds in steps:
        clock.advance(seconds % 1000)
        now_ns = clock.now_ns
        allowed = rule.allows(left, now_ns, number)
        if what == "add":
            added = rule.added(left, now_ns, number)
            if added is None:
                with pytest.raises(InvalidCost):
                    prepaid.add(key, number)
            else:
                left = added
                assert prepaid.add(key, number) == left
        elif what == "hit":
            left = rule.charged(left, now_ns, number) if allowed else left
            decision = prepaid.hit(key, number)
            assert (decision.allowed, decision.remaining) == (allowed, left)
        elif what == "allow":
            assert prepaid.allow(key) == (left > 0)
            left = max(left - 1, 0)
        elif what == "peek":
            assert prepaid.peek(key, number).allowed == allowed
        elif what == "refund":
            prepaid.refund(key, number)
            left = rule.refunded(left, now_ns, number)
        elif what == "cancel":
            reservation = prepaid.reserve(key, number)
            assert reservation.allowed == allowed
            reservation.cancel()
        else:
            assert prepaid.take_up_to(key, number) == min(left, number)
            left -= min(left, number)
        assert prepaid.peek(key, 0).remaining == left

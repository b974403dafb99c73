"""Several limits at once, by example."""

from __future__ import annotations

from typing import Any

import pytest
from places import STRICT, Clock, Place

from forebay import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    TokenBucket,
)

pytestmark = pytest.mark.places(*STRICT)

NS = 1_000_000_000


@pytest.fixture
def both(store: Any) -> AllOf:
    return AllOf(FixedWindow(store, "window", "10/minute"), TokenBucket(store, "bucket", "5/second"))


def test_all_of_takes_limiters_of_one_store(place: Place, store: Any) -> None:
    one = TokenBucket(store, "one", "1/second")
    with pytest.raises(InvalidLimiter):
        AllOf()
    for other in (None, "one", store, 1):
        wrong: Any = other
        with pytest.raises(InvalidLimiter):
            AllOf(one, wrong)
    with (
        place.another("private" if place.kind == "named" else place.kind) as another,
        pytest.raises(InvalidLimiter, match="one store"),
    ):
        AllOf(one, TokenBucket(another, "one", "1/second"))
    assert AllOf(one).hit("k").limiter == "one"


@pytest.mark.parametrize("several", [list, tuple])
def test_all_of_takes_its_limiters_as_separate_arguments(store: Any, several: Any) -> None:
    limiters = several([TokenBucket(store, "one", "1/second"), TokenBucket(store, "two", "1/second")])
    with pytest.raises(InvalidLimiter, match=r"AllOf\(\*limiters\)"):
        AllOf(limiters)


def test_all_of_takes_one_key_or_one_for_each_limiter(both: AllOf) -> None:
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


def test_all_of_needs_as_many_keys_and_costs_as_limiters(both: AllOf) -> None:
    for method in (both.hit, both.peek):
        for keys in ([], ["a"], ["a", "b", "c"]):
            with pytest.raises(InvalidKey):
                method(keys)
        for costs in ([], [1], [1, 2, 3]):
            wrong: Any = costs
            with pytest.raises(InvalidCost):
                method("k", wrong)
    assert both.peek("k").remaining == 5


def test_ambiguous_tuple_key_is_refused(both: AllOf) -> None:
    key: Any = ("user", "all")
    for method in (both.allow, both.hit, both.hit_each, both.peek, both.reserve, both.wait, both.refund, both.reset):
        with pytest.raises(InvalidKey, match=r"\['user', 'all'\] for a key each, or \[\('user', 'all'\)\] \* 2"):
            method(key)
    with pytest.raises(InvalidKey, match="for a key each"):
        both.allow_many([key])
    assert both.limiters[1].peek(key).remaining == both.limiters[1].peek("all").remaining == 5
    # A list is unambiguous.
    assert both.hit([key] * 2)
    assert both.hit(["user", "all"])
    assert both.hit(("user", "all", "of them"))
    assert [bucket.remaining for bucket in (both.peek([key] * 2), both.peek(["user", "all"]))] == [4, 4]
    assert AllOf(both.limiters[1]).hit(("user",))


def test_denied_request_is_charged_nowhere(both: AllOf, clock: Clock) -> None:
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


def test_denial_reports_the_longest_wait(store: Any) -> None:
    limits = AllOf(MinInterval(store, "short", "1s"), MinInterval(store, "long", "9s"), MinInterval(store, "mid", "5s"))
    assert limits.hit("k").limiter == "short"  # the first of equals
    denied = limits.hit("k")
    assert (denied.limiter, denied.retry_after_ns) == ("long", 9 * NS)


def test_cost_above_one_limit_raises(both: AllOf) -> None:
    with pytest.raises(CostExceedsLimit) as caught:
        both.hit("k", 6)
    assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (6, 5, "bucket")
    assert both.limiters[0].peek("k").remaining == 10


def test_refund_fills_each_limit_at_most(both: AllOf) -> None:
    assert both.hit("k", 5)
    both.refund("k", [1, 6])
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [6, 5]
    both.refund("k", 2**64)
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [10, 5]


@pytest.mark.parametrize("keys", [[], ["k"], ["k", "k", "k"]])
def test_refund_and_reset_need_as_many_keys_as_limiters(both: AllOf, keys: list[str]) -> None:
    assert both.hit("k", 2)
    for do in (both.refund, both.reset):
        with pytest.raises(InvalidKey):
            do(keys)
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [8, 3]


@pytest.mark.parametrize(
    ("keys", "costs", "error"),
    [
        ("k", [1, -1], InvalidCost),
        ("k", [1, 0.5], InvalidCost),
        ("k", [1], InvalidCost),
        ("k", [1, 1, 1], InvalidCost),
        (["k", 0.5], 1, InvalidKey),
        (["k", ["k"]], 1, InvalidKey),
    ],
)
def test_refused_refund_gives_nothing_back(both: AllOf, keys: Any, costs: Any, error: type[Exception]) -> None:
    assert both.hit("k", 2)
    with pytest.raises(error):
        both.refund(keys, costs)
    assert [limiter.peek("k").remaining for limiter in both.limiters] == [8, 3]


def test_cancellation_gives_back_the_part_that_still_counts(both: AllOf, clock: Clock) -> None:
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


def test_cancellation_moves_no_later_booking(store: Any) -> None:
    queue = LeakyBucket(store, "queue", "1/second", capacity=5)
    reservation = AllOf(queue).reserve("k")
    behind = [queue.reserve("k").delay for _ in range(3)]
    reservation.cancel()
    assert behind == [1, 2, 3]
    assert queue.reserve("k").delay == 4


def test_hit_each_returns_a_decision_for_every_limit(both: AllOf) -> None:
    window, bucket = both.limiters
    assert [(d.limiter, d.allowed, d.remaining) for d in both.hit_each("ada", [4, 3])] == [
        ("window", True, 6),
        ("bucket", True, 2),
    ]
    each = both.hit_each("ada", 3)
    assert [d.allowed for d in each] == [True, False]
    assert each[1].retry_after_ns > 0
    # The denied request charged nothing.
    assert [limiter.peek("ada", 0).remaining for limiter in (window, bucket)] == [6, 2]  # type: ignore[attr-defined]
    with pytest.raises(InvalidKey):
        both.hit_each(["ada"])
    with pytest.raises(CostExceedsLimit):
        both.hit_each("ada", 11)


def test_limiter_given_twice_is_charged_twice(store: Any) -> None:
    bucket = TokenBucket(store, "api", "1/minute", burst=3)
    twice = AllOf(bucket, bucket)
    assert twice.hit("ada").remaining == 1
    assert not twice.allow("ada")
    assert bucket.peek("ada").remaining == 1  # the denied request charged nothing
    assert twice.allow(["bob", "cid"])
    twice.refund("ada")
    assert bucket.peek("ada").remaining == 3


def test_limiters_of_different_algorithms_share_only_a_name(store: Any) -> None:
    both = AllOf(FixedWindow(store, "api", "5/minute"), SlidingLog(store, "api", "5/minute", keys=9))
    assert [both.allow("ada") for _ in range(6)] == [True] * 5 + [False]


def test_permits_taken_with_other_limits_are_given_back(store: Any) -> None:
    held, bucket = Concurrency(store, "c", 2, keys=9), TokenBucket(store, "b", "9/minute")
    both = AllOf(held, bucket)
    assert both.allow("ada")
    reservation = both.reserve("ada")
    assert not held.peek("ada")
    reservation.cancel()
    assert (held.peek("ada").remaining, bucket.peek("ada").remaining) == (1, 8)
    both.refund("ada")
    assert (held.peek("ada").remaining, bucket.peek("ada").remaining) == (2, 9)


def test_cancellation_gives_back_every_charge_to_a_shared_state(store: Any) -> None:
    queue = LeakyBucket(store, "q", "1/second", capacity=4)
    booked = AllOf(queue, queue).reserve("ada")
    assert queue.peek("ada").remaining == 2
    booked.cancel()
    assert queue.peek("ada").remaining == 4

"""A request that is repeated under one id is charged once, in whichever worker it arrives."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any, Final

import pytest
from limiter_makers import OF_A_HUNDRED
from places import IN_MEMORY, NS, STRICT, Clock, Place

from forebay import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    StoreClosed,
    TokenBucket,
)

pytestmark = pytest.mark.places(*STRICT)
# Over Redis a mark ends by the server's clock, which tests can't move: see tests/redis/test_redis_waiting.py.
marks_by_this_clock = pytest.mark.places(*IN_MEMORY)

LIMIT: Final = 100


@pytest.fixture(params=OF_A_HUNDRED)
def limiter(request: pytest.FixtureRequest, store: Any) -> Any:
    return OF_A_HUNDRED[request.param](store)


def left(limiter: Any, key: Any = "k") -> int:
    remaining = limiter.peek(key).remaining
    assert isinstance(remaining, int)
    return remaining


def test_repeated_request_is_charged_once(limiter: Any) -> None:
    for _ in range(5):
        decision = limiter.hit("k", 3, request_id="r")
        assert decision.allowed
        assert (decision.limit, decision.remaining, decision.retry_after) == (LIMIT, LIMIT - 3, 0.0)
        assert decision.reset_after == limiter.peek("k").reset_after
    assert limiter.hit("k", request_id="another").remaining == LIMIT - 4
    assert limiter.hit("k", 3).remaining == LIMIT - 7


@marks_by_this_clock
@pytest.mark.parametrize("ttl", ["90s", 90, 90.0, timedelta(seconds=90)])
def test_request_is_remembered_for_its_ttl(limiter: Any, place: Place, clock: Clock, ttl: Any) -> None:
    def method() -> bool:
        return bool(limiter.hit("k", 50, request_id="r", request_ttl=ttl))

    clock.set(3600 * 500)
    assert [method() for _ in range(3)] == [True] * 3
    clock.set_ns(clock.now_ns + 90 * NS - place.grain_ns)
    # A repetition doesn't prolong it.
    assert [method() for _ in range(3)] == [True] * 3
    assert 50 <= left(limiter) <= 52
    clock.set_ns(clock.now_ns + place.grain_ns)
    assert method()
    assert left(limiter) <= 2
    assert [method() for _ in range(3)] == [True] * 3


@marks_by_this_clock
def test_default_ttl_is_five_minutes(limiter: Any, clock: Clock) -> None:
    clock.set(3600 * 500)
    assert limiter.hit("k", 60, request_id="r")
    clock.advance(299)
    assert limiter.hit("k", 60, request_id="r")
    clock.advance(1)
    assert not limiter.hit("k", 60, request_id="r")


def test_repeated_request_is_allowed_when_no_permits_remain(limiter: Any) -> None:
    assert limiter.hit("k", LIMIT, request_id="r")
    decision = limiter.hit("k", LIMIT, request_id="r")
    assert (decision.allowed, decision.remaining, decision.retry_after) == (True, 0, 0.0)
    assert not limiter.hit("k", request_id="another")
    assert not limiter.allow("k")


def test_denied_request_leaves_no_mark(limiter: Any, clock: Clock) -> None:
    assert limiter.hit("k", LIMIT)
    assert not limiter.hit("k", request_id="r")
    limiter.refund("k", request_id="r")
    assert left(limiter) == 0
    clock.advance(2 * 3600)
    assert limiter.hit("k", 7, request_id="r").remaining == LIMIT - 7


def test_request_with_cost_0_leaves_no_mark(limiter: Any) -> None:
    assert limiter.hit("k", 0, request_id="r")
    assert limiter.hit("k", 5, request_id="r")
    assert left(limiter) == LIMIT - 5


def test_refund_by_id_gives_back_once(limiter: Any) -> None:
    assert limiter.hit("k", 10)
    assert limiter.hit("k", 3, request_id="r")
    limiter.refund("k", 3, request_id="unknown")
    limiter.refund("other", 3, request_id="r")
    assert left(limiter) == LIMIT - 13
    for _ in range(3):
        limiter.refund("k", 3, request_id="r")
        assert left(limiter) == LIMIT - 10
    # The refund deletes the mark, so a repetition is charged.
    for _ in range(3):
        assert limiter.hit("k", 3, request_id="r")
        assert left(limiter) == LIMIT - 13


def test_refund_by_id_gives_back_at_most_its_charge(limiter: Any) -> None:
    assert limiter.hit("k", 10)
    assert limiter.hit("k", 3, request_id="r")
    limiter.refund("k", 13, request_id="r")
    assert left(limiter) <= LIMIT - 10


@marks_by_this_clock
def test_refund_after_the_ttl_gives_back_nothing(limiter: Any, clock: Clock) -> None:
    clock.set(3600 * 500)
    assert limiter.hit("k", 50, request_id="r", request_ttl="1s")
    clock.advance(1)
    limiter.refund("k", 50, request_id="r")
    assert left(limiter) == LIMIT - 50


def test_ids_of_different_keys_and_limiters_are_independent(store: Any) -> None:
    limiters = [
        TokenBucket(store, "one", "100/hour"),
        TokenBucket(store, "two", "100/hour"),
        FixedWindow(store, "three", "100/hour"),
        FixedWindow(store, "three", "100/minute"),
        SlidingWindow(store, "one", "100/hour"),
        SlidingLog(store, "log", "100/hour", keys=64),
        SlidingLog(store, "log", "100/minute", keys=64),
    ]
    keys: list[Any] = ["k", "l", b"k", 1, "1", ("k",), ("k", "r"), ""]
    ids: list[Any] = ["k", "l", b"k", 1, "1", ("k",), ("k", "r"), "", 0, b"", (), -1, 2**70]
    for _ in range(2):
        for limiter, key, request_id in itertools.product(limiters, keys, ids):
            assert limiter.hit(key, request_id=request_id)
    for limiter, key in itertools.product(limiters, keys):
        assert left(limiter, key) == LIMIT - len(ids)


def test_mark_is_never_a_limiters_key(limiter: Any) -> None:
    """None of these keys collides with the mark of any of these ids."""
    for request_id in ("k", ("k", "k"), ("k",), "r"):
        assert limiter.hit("k", 1, request_id=request_id)
    for key in (("k", "k"), ("k",), "r", "kk", "k\0k"):
        assert left(limiter, key) == LIMIT
        limiter.reset(key)
    before = left(limiter)
    for request_id in ("k", ("k", "k"), ("k",), "r"):
        assert limiter.hit("k", 1, request_id=request_id)
    assert left(limiter) == before


def test_ids_are_compared_by_value(limiter: Any) -> None:
    class Text(str):
        pass

    for request_id in ("r\u00e4", Text("r\u00e4"), "".join(["r", "\u00e4"])):
        assert limiter.hit("k", request_id=request_id)
    assert left(limiter) == LIMIT - 1


def test_reset_of_a_key_keeps_its_request_ids(limiter: Any) -> None:
    assert limiter.hit("k", 5, request_id="r")
    limiter.reset("k")
    assert limiter.hit("k", 5, request_id="r")
    assert left(limiter) == LIMIT


@pytest.mark.parametrize("request_id", [1.5, [], ["r"], {}, object(), ("r", None), (("r",),), bytearray(b"r")])
def test_invalid_ids_are_refused(limiter: Any, request_id: Any) -> None:
    with pytest.raises(InvalidKey):
        limiter.hit("k", request_id=request_id)
    with pytest.raises(InvalidKey):
        limiter.refund("k", request_id=request_id)
    with pytest.raises(InvalidKey):
        limiter.hit(1.5, request_id="r")
    assert left(limiter) == LIMIT


def test_invalid_ttls_are_refused(limiter: Any) -> None:
    for ttl in (
        *("", "soon", "5", "0s", "-1s", "1 month", "11 years", b"5s"),
        *(0, -1, 1e-10, float("nan"), float("inf"), 10**400, True, timedelta(0), timedelta.max),
    ):
        with pytest.raises(InvalidRate):
            limiter.hit("k", request_id="r", request_ttl=ttl)
    assert left(limiter) == LIMIT


def test_ttl_without_an_id_is_refused(limiter: Any) -> None:
    with pytest.raises(InvalidKey, match=r"request_ttl of '1 hour'.*request_id"):
        limiter.hit("k", request_ttl="1 hour")
    assert left(limiter) == LIMIT


def test_cost_above_the_limit_raises_with_an_id(limiter: Any, store: Any) -> None:
    with pytest.raises(CostExceedsLimit):
        limiter.hit("k", LIMIT + 1, request_id="r")
    # The refused request left no charge to give back, and its id is free for another cost.
    assert limiter.hit("k", LIMIT, request_id="r")
    limiter.refund("k", LIMIT + 1, request_id="r")
    assert left(limiter) == 0
    limiter.refund("k", LIMIT, request_id="r")
    assert left(limiter) == LIMIT
    store.close()
    for method in (limiter.hit, limiter.refund):
        with pytest.raises(StoreClosed):
            method("k", request_id="r")


def test_request_of_a_tier_is_charged_once(store: Any) -> None:
    limiter = TokenBucket(store, "api", "100/hour")
    for _ in range(3):
        assert limiter.hit("k", 10, rate="1000/hour", request_id="r").remaining == 990
    limiter.refund("k", 10, rate="1000/hour", request_id="r")
    assert left(limiter) == LIMIT


def test_min_interval_allows_repeated_requests(store: Any, clock: Clock) -> None:
    limiter = MinInterval(store, "sms", "30s")
    assert [bool(limiter.hit("k", request_id="r")) for _ in range(3)] == [True] * 3
    assert not limiter.hit("k", request_id="other")
    clock.advance(30)
    assert limiter.hit("k", request_id="other")
    assert limiter.hit("k", request_id="r")


def test_min_interval_does_not_remember_denied_requests(store: Any, clock: Clock) -> None:
    gap = MinInterval(store, "g", "10s")
    assert gap.allow("ada")
    assert not gap.hit("ada", request_id="r")
    clock.advance(10)
    assert gap.hit("ada", request_id="r")
    repeated = gap.hit("ada", request_id="r")
    assert repeated
    assert repeated.retry_after == 0
    gap.refund("ada", request_id="other")
    assert not gap.peek("ada")
    gap.refund("ada", request_id="r")
    assert gap.peek("ada")


# Several limits


@pytest.fixture
def several(store: Any) -> Any:
    return AllOf(TokenBucket(store, "hour", "100/hour"), FixedWindow(store, "day", "100/day", align="first"))


def test_repeated_request_to_several_limits_is_charged_once_to_all(several: Any) -> None:
    for _ in range(3):
        decision = several.hit(["k", "all"], [3, 5], request_id="r", request_ttl="10 minutes")
        assert (decision.allowed, decision.remaining, decision.retry_after) == (True, LIMIT - 5, 0.0)
        assert [one.peek(key).remaining for one, key in zip(several.limiters, ["k", "all"], strict=True)] == [97, 95]
    # Another id, other keys and other costs are other requests.
    several.hit(["k", "all"], [3, 5], request_id="another")
    several.hit(["l", "all"], [3, 5], request_id="r")
    several.hit(["k", "all"], [5, 3], request_id="r")
    assert [one.peek(key).remaining for one, key in zip(several.limiters, ["k", "all"], strict=True)] == [89, 82]


def test_request_to_several_limits_is_allowed_again_when_no_permits_remain(several: Any) -> None:
    assert several.hit("k", LIMIT, request_id="r")
    repeated = several.hit("k", LIMIT, request_id="r")
    assert (repeated.allowed, repeated.remaining, repeated.retry_after) == (True, 0, 0.0)
    denied = several.hit("k", request_id="another")
    assert not denied
    assert denied.retry_after > 0
    several.refund("k", request_id="another")
    assert not several.allow("k")


def test_refund_of_a_request_to_several_limits_gives_back_once(several: Any) -> None:
    assert several.hit("k", 10)
    assert several.hit("k", 3, request_id="r")
    for unknown in ({"key": "k", "cost": 4}, {"key": "l", "cost": 3}, {"key": "k", "cost": 2**70}):
        several.refund(**unknown, request_id="r")
        assert left(several) == LIMIT - 13
    for _ in range(3):
        several.refund("k", 3, request_id="r")
        assert [left(one) for one in several.limiters] == [LIMIT - 10] * 2
    assert several.hit("k", 3, request_id="r").remaining == LIMIT - 13


def test_request_to_several_limits_with_cost_0_leaves_no_mark(several: Any) -> None:
    assert several.hit("k", 0, request_id="r")
    assert several.hit("k", [0, 2], request_id="r")
    assert several.hit("k", [0, 2], request_id="r").remaining == LIMIT - 2


def test_wrong_request_ids_of_several_limits_charge_nothing(several: Any, store: Any) -> None:
    with pytest.raises(InvalidKey, match="request_id is str"):
        several.hit("k", request_id=1.5)
    with pytest.raises(InvalidKey, match="request_ttl of 5 says"):
        several.hit("k", request_ttl=5)
    with pytest.raises(InvalidRate):
        several.hit("k", request_id="r", request_ttl="soon")
    with pytest.raises(CostExceedsLimit):
        several.hit("k", [1, LIMIT + 1], request_id="r")
    assert left(several) == LIMIT
    with_slots = AllOf(several.limiters[0], Concurrency(store, "c", 5, keys=9))
    for method in (with_slots.hit, with_slots.refund):
        with pytest.raises(InvalidLimiter, match=r"takes no request_id.*a call of its own"):
            method("k", request_id="r")
    assert left(several) == LIMIT

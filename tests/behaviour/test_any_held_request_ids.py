"""Permits of a request that is repeated under one id: the latest request holds them, and no second ones are taken."""

from __future__ import annotations

from typing import Any

import pytest
from places import IN_MEMORY, OVER_REDIS, STRICT, Clock, Place

from forebay import AllOf, Concurrency, CostExceedsLimit, FixedWindow, InvalidKey, InvalidLimiter

pytestmark = pytest.mark.places(*STRICT)


@pytest.fixture
def three(store: Any) -> Concurrency:
    return Concurrency(store, "three", 3, lease=30, keys=4)


def remaining(limiter: Concurrency, key: Any = "k") -> int:
    return limiter.peek(key).remaining


@pytest.mark.parametrize("cost", [1, 2, 3])
def test_repeated_request_takes_no_second_permits(three: Concurrency, cost: int) -> None:
    leases = [three.acquire("k", cost, request_id="r") for _ in range(5)]
    assert all(leases)
    assert remaining(three) == 3 - cost
    assert leases[-1].release()
    assert remaining(three) == 3


@pytest.mark.parametrize("cost", [1, 3])
def test_permits_move_to_the_latest_request(three: Concurrency, cost: int) -> None:
    first = three.acquire("k", cost, request_id="r")
    second = three.acquire("k", cost, request_id="r")
    assert not first.renew()
    assert not first.release()
    assert remaining(three) == 3 - cost
    assert second.renew()
    assert second.release()
    assert not second.release()
    assert remaining(three) == 3


def test_repeated_request_is_allowed_when_no_permits_remain(three: Concurrency) -> None:
    assert three.acquire("k", 2)
    assert three.acquire("k", request_id="r")
    assert three.acquire("k", request_id="r")
    assert not three.acquire("k", request_id="another")
    assert not three.acquire("k")
    repeated = three.hit("k", request_id="r")
    assert (repeated.allowed, repeated.remaining, repeated.retry_after) == (True, 0, 0.0)


@pytest.mark.parametrize("cost", [1, 2])
def test_id_is_free_after_a_release(three: Concurrency, cost: int) -> None:
    assert three.acquire("k", cost, request_id="r").release()
    others = three.acquire("k", 3)
    assert others
    # The mark of the first request leads to a slot that another request holds.
    assert not three.acquire("k", cost, request_id="r")
    assert others.renew()
    assert others.release()
    assert three.acquire("k", cost, request_id="r")
    assert remaining(three) == 3 - cost


def test_id_is_free_after_a_reset(three: Concurrency) -> None:
    before = three.acquire("k", request_id="r")
    three.reset("k")
    others = [three.acquire("k", request_id=number) for number in range(3)]
    assert all(others)
    assert not three.acquire("k", request_id="r")
    assert not before.release()
    assert remaining(three) == 0
    assert all(lease.release() for lease in others)


def test_id_is_free_after_the_end_of_the_lease(three: Concurrency, clock: Clock) -> None:
    first = three.acquire("k", request_id="r")
    # A lease by an id may be longer by a sixteenth.
    clock.advance(32)
    assert remaining(three) == 3
    assert three.acquire("k", 3)
    assert not three.acquire("k", request_id="r")
    assert not first.renew()


def test_renewed_lease_keeps_its_id(three: Concurrency, clock: Clock) -> None:
    lease = three.acquire("k", 2, request_id="r")
    for _ in range(4):
        clock.advance(20)
        assert lease.renew()
        assert remaining(three) == 1
    clock.advance(20)
    moved = three.acquire("k", 2, request_id="r")
    assert moved
    assert remaining(three) == 1
    clock.advance(20)
    assert not lease.renew()
    assert remaining(three) == 1
    assert moved.release()


def test_repeated_request_starts_the_lease_anew(three: Concurrency, clock: Clock) -> None:
    for _ in range(4):
        assert three.acquire("k", request_id="r")
        clock.advance(20)
        assert remaining(three) == 2
    clock.advance(12)
    assert remaining(three) == 3


def test_many_repetitions_leave_earlier_leases_without_permits(three: Concurrency, clock: Clock) -> None:
    leases = [three.acquire("k", request_id="r") for _ in range(300)]
    assert not any(lease.release() for lease in leases[:-1])
    assert remaining(three) == 2
    assert leases[-1].release()


def test_other_keys_costs_and_limiters_are_other_requests(store: Any, three: Concurrency) -> None:
    four = Concurrency(store, "four", 4, lease=30, keys=4)
    for _ in range(2):
        for limiter, key, cost in ((three, "k", 1), (three, "k", 2), (three, "l", 1), (four, "k", 1)):
            assert limiter.acquire(key, cost, request_id="r")
    assert (remaining(three), remaining(three, "l"), remaining(four)) == (0, 2, 3)


def test_repeated_hit_takes_no_second_permits(three: Concurrency) -> None:
    for _ in range(3):
        decision = three.hit("k", 2, request_id="r")
        assert (decision.allowed, decision.limit, decision.remaining) == (True, 3, 1)
    assert not three.hit("k", 2, request_id="another")
    three.refund("k", 2)
    assert remaining(three) == 3
    assert three.hit("k", 3, request_id="r")


def test_refund_by_id_gives_back_once(three: Concurrency) -> None:
    assert three.hit("k", 2)
    assert three.hit("k", request_id="r")
    for wrong in ({"key": "k", "cost": 2}, {"key": "k", "cost": 2**70}, {"key": "l"}, {"key": "k", "cost": 0}):
        three.refund(**wrong, request_id="r")
    three.refund("k", request_id="unknown")
    assert remaining(three) == 0
    for _ in range(3):
        three.refund("k", request_id="r")
        assert remaining(three) == 1
    three.refund("k", 2)
    assert remaining(three) == 3


def test_refund_by_id_gives_back_the_permits_of_a_lease(three: Concurrency) -> None:
    lease = three.acquire("k", 2, request_id="r")
    three.refund("k", 2, request_id="r")
    assert remaining(three) == 3
    assert not lease.release()


@pytest.mark.places("named", *OVER_REDIS)
def test_another_store_moves_and_refunds_the_permits(place: Place, three: Concurrency) -> None:
    with place.another(place.kind) as another:
        there: Any = Concurrency(another, "three", 3, lease=30, keys=4)
        here = three.acquire("k", 2, request_id="r")
        moved = there.acquire("k", 2, request_id="r")
        assert remaining(three) == 1
        assert not here.release()
        assert moved.renew()
        three.refund("k", 2, request_id="r")
        assert not moved.release()
        assert remaining(three) == 3


def test_denied_request_and_cost_0_leave_no_id(three: Concurrency) -> None:
    held = three.acquire("k", 3)
    assert not three.acquire("k", request_id="r")
    assert three.acquire("k", 0, request_id="r")
    assert not three.hit("k", request_id="r")
    assert three.hit("k", 0, request_id="r")
    assert held.release()
    assert three.acquire("k", request_id="r")
    assert remaining(three) == 2


@pytest.mark.parametrize("request_id", [1.5, [], {}, object(), ("r", None), bytearray(b"r")])
def test_invalid_ids_are_refused(three: Concurrency, request_id: Any) -> None:
    for method in (three.acquire, three.hit, three.refund):
        with pytest.raises(InvalidKey, match="request_id is str"):
            method("k", request_id=request_id)
    with pytest.raises(CostExceedsLimit):
        three.acquire("k", 4, request_id="r")
    assert remaining(three) == 3


def test_ids_of_held_permits_have_no_ttl(place: Place, three: Concurrency) -> None:
    hit: Any = three.hit
    with pytest.raises(TypeError if place.kind in IN_MEMORY else InvalidLimiter, match="request_ttl"):
        hit("k", request_id="r", request_ttl=5)
    assert remaining(three) == 3


def test_several_limits_refuse_ids_beside_held_permits(store: Any, three: Concurrency) -> None:
    several = AllOf(FixedWindow(store, "day", "100/day"), three)
    for method in (several.hit, several.refund):
        with pytest.raises(InvalidLimiter, match="the id in a call of its own"):
            method("k", request_id="r")
    assert several.peek("k").remaining == 3

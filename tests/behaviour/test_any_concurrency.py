"""Concurrency limits, by example."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from places import IN_MEMORY, STRICT, Clock, Place

from forebay import (
    Concurrency,
    CostExceedsLimit,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    Lease,
    LimitExceeded,
)

pytestmark = pytest.mark.places(*STRICT)

NS = 1_000_000_000


@pytest.fixture
def three(store: Any) -> Concurrency:
    return Concurrency(store, "three", 3, lease=30, keys=4)


@pytest.fixture
def refused(place: Place) -> type[Exception]:
    """The error for an argument that the method lacks: in memory its signature lacks it, elsewhere its check names
    it."""
    return TypeError if place.kind in IN_MEMORY else InvalidLimiter


def remaining(limiter: Concurrency, key: Any = "k") -> int:
    return limiter.peek(key).remaining


def test_permit_is_held_until_it_is_released(three: Concurrency) -> None:
    leases = [three.acquire("k") for _ in range(3)]
    assert all(leases)
    assert not three.acquire("k")
    assert three.acquire("another")
    assert leases[1].release()
    assert three.acquire("k")
    assert not three.acquire("k")


def test_denied_lease_holds_nothing(three: Concurrency) -> None:
    held = three.acquire("k", 3)
    denied = three.acquire("k")
    assert not denied.allowed
    assert not denied.renew()
    assert not denied.release()
    with pytest.raises(LimitExceeded), denied:
        pytest.fail("the block must not run")
    assert remaining(three) == 0
    assert held.release()


@pytest.mark.parametrize("cost", [1, 3])
def test_lease_is_released_once(three: Concurrency, cost: int) -> None:
    first = three.acquire("k", cost)
    assert first.release()
    second = three.acquire("k", cost)
    assert not first.release()
    assert not first.renew()
    assert remaining(three) == 3 - cost
    assert second.release()


@pytest.mark.parametrize("limit", [1, 3])
def test_refund_after_a_reset_gives_back_only_later_permits(store: Any, clock: Clock, limit: int) -> None:
    """Permits that a reset has freed can't be given back again."""
    limiter = Concurrency(store, "some", limit, lease=30, keys=1)
    for _ in range(3):
        assert all(limiter.allow("k") for _ in range(limit))
        limiter.reset("k")
        clock.advance(1)
        assert all(limiter.allow("k") for _ in range(limit))
        limiter.refund("k", limit)
        assert remaining(limiter) == limit


@pytest.mark.parametrize("cost", [1, 3])
def test_lease_ends_by_itself(three: Concurrency, place: Place, clock: Clock, cost: int) -> None:
    first = three.acquire("k", cost)
    clock.set_ns(1030 * NS - place.grain_ns)
    assert remaining(three) == 3 - cost
    assert three.peek("k", 3).retry_after_ns == place.grain_ns
    clock.set_ns(1030 * NS)
    assert remaining(three) == 3
    second = three.acquire("k", cost)
    assert second
    # Another request holds the permits now: the first lease can't renew or release them.
    assert not first.renew()
    assert not first.release()
    assert remaining(three) == 3 - cost
    assert second.release()


def test_renewed_lease_lasts_its_full_length(three: Concurrency, clock: Clock) -> None:
    one, two = three.acquire("k"), three.acquire("k", 2)
    for _ in range(5):
        clock.advance(29)
        assert two.renew()
        if one is not None:
            one.renew()
    clock.advance(29)
    assert remaining(three) == 0
    assert one.release()
    assert remaining(three) == 1
    assert two.release()
    assert remaining(three) == 3


def test_renewal_of_a_partly_lost_lease_takes_no_other_permit(store: Any, clock: Clock) -> None:
    pair = Concurrency(store, "pair", 2, lease=10, keys=1)
    lapsed = pair.acquire("k", 2)
    clock.advance(11)
    held = pair.acquire("k")
    assert not lapsed.renew()
    lapsed.release()
    assert remaining(pair) == 1
    assert held.release()


def test_several_permits_are_granted_all_or_none(three: Concurrency) -> None:
    two = three.acquire("k", 2)
    assert two
    assert not three.acquire("k", 2)
    assert not three.hit("k", 2)
    assert three.allow_many(["k", "k", "other"], [2, 1, 3]) == [False, True, True]
    assert remaining(three) == 0
    assert remaining(three, "other") == 0
    with pytest.raises(CostExceedsLimit) as caught:
        three.acquire("k", 4)
    assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (4, 3, "three")
    three.refund("k", 4)
    assert two.release()
    assert three.acquire("k", 0)
    assert remaining(three) == 3


def test_block_releases_its_permit_after_an_error(three: Concurrency) -> None:
    with three.acquire("k", 2) as lease:
        assert lease
        assert remaining(three) == 1
    with pytest.raises(ZeroDivisionError), three.hold("k", 3):
        raise ZeroDivisionError(remaining(three))
    assert remaining(three) == 3


def test_hold_entered_twice_holds_two_permits(three: Concurrency) -> None:
    hold = three.hold("k")
    with hold:
        with hold:
            assert remaining(three) == 1
        assert remaining(three) == 2
    assert remaining(three) == 3


def test_concurrency_has_the_methods_of_every_limiter(three: Concurrency, clock: Clock) -> None:
    assert three.allow("k")
    decision = three.hit("k", 2)
    assert (decision.allowed, decision.limit, decision.remaining, decision.retry_after_ns) == (True, 3, 0, 0)
    assert decision.reset_after_ns == 30 * NS
    clock.advance(10)
    denied = three.hit("k")
    assert (denied.allowed, denied.remaining, denied.retry_after_ns) == (False, 0, 20 * NS)
    three.refund("k", 2)
    assert remaining(three) == 2
    booking = three.reserve("k", 2)
    assert (booking.allowed, booking.delay_ns) == (True, 0)
    refused = three.reserve("k")
    assert (refused.allowed, refused.delay_ns) == (False, 20 * NS)
    refused.cancel()
    assert remaining(three) == 0
    booking.cancel()
    booking.cancel()
    assert remaining(three) == 2
    three.reset("k")
    assert remaining(three) == 3


def test_retry_after_is_exact_for_every_cost(three: Concurrency, place: Place, clock: Clock) -> None:
    for _ in range(3):
        three.allow("k")
        clock.advance(5)
    start_ns = 1015 * NS
    for cost in (1, 2, 3):
        retry_ns = three.peek("k", cost).retry_after_ns
        assert retry_ns == (10 + 5 * cost) * NS
    for cost in (1, 2, 3):
        clock.set_ns(start_ns + (10 + 5 * cost) * NS - place.grain_ns)
        assert not three.peek("k", cost)
        clock.set_ns(start_ns + (10 + 5 * cost) * NS)
        assert three.peek("k", cost)
    assert three.peek("k").reset_after_ns == 0


def test_refund_gives_back_the_permit_that_ends_first(store: Any, clock: Clock) -> None:
    pair = Concurrency(store, "pair", 2, lease=30, keys=1)
    assert pair.allow("k")
    clock.advance(20)
    assert pair.allow("k")
    clock.advance(5)
    pair.refund("k")
    clock.advance(6)
    # The remaining permit lasts 30 s from t=20 on.
    assert remaining(pair) == 1


def test_refund_of_more_than_was_taken_frees_no_lease(three: Concurrency) -> None:
    lease = three.acquire("k")
    assert three.allow("k")
    for _ in range(3):
        three.refund("k", 3)
    assert remaining(three) == 2
    assert lease.release()


def test_reset_frees_permits_that_are_held(three: Concurrency, clock: Clock) -> None:
    lease = three.acquire("k", 2)
    assert three.allow("k")
    three.reset("k")
    assert not lease.renew()
    clock.advance(1)
    new = three.acquire("k", 3)
    assert not lease.release()
    three.refund("k")
    assert remaining(three) == 0
    assert new.release()


def test_garbage_collected_lease_holds_its_permit_to_its_end(three: Concurrency, clock: Clock) -> None:
    three.acquire("k", 3)
    gc.collect()
    assert not three.acquire("k")
    clock.advance(30)
    assert three.acquire("k")


@pytest.mark.parametrize("limit", [0, -1, 2**24 + 1, True, 1.0, "3", None])
def test_invalid_limits_are_refused(store: Any, limit: Any) -> None:
    with pytest.raises(InvalidLimiter):
        Concurrency(store, "c", limit)


def test_invalid_arguments_are_refused(store: Any, three: Concurrency) -> None:
    wrong: Any
    for wrong in (0, -1, "soon", None):
        with pytest.raises(InvalidRate):
            Concurrency(store, "c", 1, lease=wrong)
    for wrong in (-1, 1.5, "1"):
        for method in (three.acquire, three.hit, three.peek, three.refund, three.reserve):
            with pytest.raises(InvalidCost):
                method("k", wrong)
    for wrong in (None, 1.5, []):
        with pytest.raises(InvalidKey):
            three.acquire(wrong)
    with pytest.raises(InvalidKey):
        three.allow_many("keys")
    with pytest.raises(TypeError):
        Lease()


def test_limiters_of_one_name_share_permits_with_different_leases(store: Any, clock: Clock) -> None:
    short, long = (Concurrency(store, "c", 2, lease=lease, keys=1) for lease in (1, 100))
    held = long.acquire("k")
    assert short.acquire("k")
    assert not short.acquire("k")
    clock.advance(1)
    assert short.acquire("k")
    clock.advance(50)
    assert short.acquire("k")
    assert not short.acquire("k")
    assert held.release()


def test_lease_grants_renews_and_releases(place: Place, store: Any, clock: Clock) -> None:
    held = Concurrency(store, "c", 3, lease="30s", keys=9)
    first, second = held.acquire("ada"), held.acquire("ada", 2)
    assert first
    assert second
    assert not held.acquire("ada")
    with pytest.raises(LimitExceeded, match="allows 3"), held.acquire("ada"):
        pass
    assert held.hit("ada").retry_after == 30
    assert first.release()
    assert not first.release()
    assert held.peek("ada").remaining == 1
    with held.acquire("ada"):
        assert held.peek("ada").remaining == 0
    assert held.peek("ada").remaining == 1
    clock.advance(20)
    assert second.renew()
    clock.advance(20)
    assert held.peek("ada").remaining == 1
    clock.advance(10)
    # A host that fails releases nothing, but its leases end.
    assert held.peek("ada").remaining == 3
    # In memory, an expired permit that no request has taken meanwhile is as good as held.
    assert second.renew() is (place.kind in IN_MEMORY)
    assert second.release() is (place.kind in IN_MEMORY)
    with pytest.raises(RuntimeError, match="released before"), second:
        pass
    assert "not held" in repr(second)


def test_concurrency_refuses_rates_for_one_call(store: Any, refused: type[Exception]) -> None:
    held = Concurrency(store, "c", 3, keys=9)
    methods: list[Any] = [held.hit, held.refund]
    for method in methods:
        with pytest.raises(refused, match="rate" if refused is TypeError else "one limit"):
            method("ada", rate="1/s")
    assert held.peek("ada").remaining == 3

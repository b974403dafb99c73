"""A cancelled reservation gives back its own charge, if that still counts, and no other request's."""

from __future__ import annotations

from typing import Any

import pytest
from limiter_makers import OF_FIVE
from places import STRICT, Clock

from forebay import (
    AllOf,
    Concurrency,
    InvalidCost,
    TokenBucket,
)

pytestmark = pytest.mark.places(*STRICT)


def left(limiter: Any, key: Any = "k") -> int:
    remaining: int = limiter.peek(key, 0).remaining
    return remaining


@pytest.fixture(params=OF_FIVE)
def five(request: pytest.FixtureRequest, store: Any) -> Any:
    return OF_FIVE[request.param](store)


# Buckets refill between reservation and cancellation.


@pytest.mark.parametrize("refill", ["continuous", "interval"])
@pytest.mark.parametrize("together", [False, True])
def test_refilled_permits_are_not_given_back_again(store: Any, clock: Clock, refill: Any, together: bool) -> None:
    bucket = TokenBucket(store, "bucket", "1/second", burst=5, refill=refill)
    limiter: Any = AllOf(bucket) if together else bucket
    reservation = limiter.reserve("k", 5)
    clock.advance(4)
    assert bucket.hit("k", 4)
    reservation.cancel()
    assert left(bucket) == 1


# Held permits.


def test_cancellation_after_the_lease_frees_no_other_permit(store: Any, clock: Clock) -> None:
    gate = Concurrency(store, "gate", 1, lease="10s")
    first = gate.reserve("k")
    clock.advance(11)
    assert gate.reserve("k")
    first.cancel()
    assert not gate.reserve("k")


def test_each_cancellation_gives_back_its_own_permits(store: Any, clock: Clock) -> None:
    gate = Concurrency(store, "gate", 5, lease="10s")
    early = gate.reserve("k", 2)
    clock.advance(6)
    late = gate.reserve("k", 3)
    late.cancel()
    assert left(gate) == 3
    clock.advance(3)
    assert left(gate) == 3
    early.cancel()
    assert left(gate) == 5


def test_cancellation_gives_back_a_permit_after_a_refund_took_another(store: Any, clock: Clock) -> None:
    """A refund doesn't know which permit it is for; it takes the oldest."""
    gate = Concurrency(store, "gate", 3, lease="10s")
    reservation = gate.reserve("k")
    clock.advance(1)
    assert gate.allow("k")
    gate.refund("k")
    assert left(gate) == 2
    reservation.cancel()
    assert left(gate) == 3


# Several limits.


def test_limiter_given_several_times_gets_every_charge_back(five: Any) -> None:
    reservation = AllOf(five, five, five).reserve("k", [1, 2, 1])
    assert left(five) == 1
    reservation.cancel()
    assert left(five) == 5


def test_denial_by_a_limiter_given_several_times_charges_nothing(five: Any) -> None:
    assert not AllOf(five, five, five).hit("k", 2)
    assert left(five) == 5


@pytest.mark.parametrize("max_delay", ["1", -1, float("nan"), True])
def test_invalid_max_delays_are_refused(five: Any, max_delay: Any) -> None:
    for limiter in (five, AllOf(five)):
        with pytest.raises(ValueError, match="max_delay"):
            limiter.reserve("k", 1, max_delay)
    assert left(five) == 5


class Growing:
    """A cost that grows each time it is read."""

    def __init__(self) -> None:
        self._cost = 0

    def __index__(self) -> int:
        self._cost += 1
        return self._cost


def test_cancellation_uses_the_cost_as_charged(five: Any) -> None:
    assert five.hit("k", 2)
    for limiter in (five, AllOf(five)):
        reservation = limiter.reserve("k", Growing())
        assert left(five) == 2
        reservation.cancel()
        assert left(five) == 3


def test_invalid_costs_are_refused(five: Any) -> None:
    for cost in (1.0, "1", True, -1):
        with pytest.raises(InvalidCost):
            AllOf(five).reserve("k", cost)  # type: ignore[arg-type]

"""Reservations that several threads cancel, and lists that other threads change during a decision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest
from limiter_makers import OF_A_HUNDRED, OF_FIVE
from thread_helpers import often, race, together

from forebay import AllOf, Concurrency, ForebayError, Reservation, Store, TokenBucket
from forebay.redis.commands import Booked, CommandFlow

ROUNDS: Final = often(300)

RESERVED: Final[dict[str, Callable[[Store], Any]]] = {
    **{f"{name} of 100": make for name, make in OF_A_HUNDRED.items() if name != "queue"},
    "concurrency": OF_FIVE["concurrency"],
    "several": lambda store: AllOf(OF_A_HUNDRED["fixed"](store), OF_FIVE["concurrency"](store)),
}


def left(limiter: Any) -> int:
    remaining: int = limiter.peek("k", 0).remaining
    return remaining


@pytest.mark.parametrize("kind", RESERVED)
def test_reservation_that_two_threads_cancel_is_given_back_once(store: Store, kind: str) -> None:
    limiter = RESERVED[kind](store)
    assert limiter.hit("k", 2)
    before = left(limiter)
    for _ in race(ROUNDS, lambda: limiter.reserve("k", 2), Reservation.cancel, Reservation.cancel):
        assert left(limiter) == before


def test_booking_in_redis_that_two_threads_cancel_is_given_back_once() -> None:
    def cancelling() -> CommandFlow[None]:
        yield "command"  # type: ignore[misc]

    def cancel(booked: Booked) -> int:
        return len(list(booked.cancel()))

    for _, sent in race(ROUNDS, lambda: Booked.now(True, 0, cancelling()), cancel, cancel):
        assert sorted(sent) == [0, 1]


def test_lists_that_other_threads_change_crash_nothing(store: Store) -> None:
    """A call decides by what it has read, or raises."""
    limiters = [OF_A_HUNDRED["fixed"](store), TokenBucket(store, "b", "100/hour"), Concurrency(store, "c", 100)]
    limits = AllOf(*limiters)
    keys: list[Any] = ["a", "b", "c"]
    costs: list[Any] = [1, 1, 1]

    def change() -> None:
        for turn in range(2000):
            for changed, value in ((keys, f"key {turn}"), (costs, turn % 3)):
                changed.pop()
                changed[:] = changed[::-1]
                changed.append(value)

    def decide() -> None:
        for _ in range(1000):
            for call in (
                lambda: limits.hit(keys, costs),
                lambda: limits.reserve(keys, costs).cancel(),
                lambda: limits.peek(keys, costs),
                lambda: limits.refund(keys, costs),
                lambda: limits.allow_many([keys, keys], [costs, costs]),
                lambda: limits.reset(keys),
                *[
                    lambda limiter=limiter: limiter.allow_many(keys, costs)  # type: ignore[misc]
                    for limiter in limiters
                ],
            ):
                with contextlib.suppress(ForebayError, RuntimeError, ValueError):
                    call()

    together(change, decide, decide)
    keys[:], costs[:] = ["a", "b", "c"], [1, 1, 1]
    limits.reset(keys)
    assert limits.hit(keys, costs)

"""What a cancelled reservation gives back: what it was charged, as far as that still counts, and nobody else's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from process_helpers import extents, path_of

from penstock import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    InvalidCost,
    LeakyBucket,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
    layout,
    waiting,
)
from penstock.owners import Owners
from penstock.testing import ManualClock

Make = Callable[[Store], Any]

OF_FIVE: dict[str, Make] = {
    "fixed window": lambda s: FixedWindow(s, "five", "5/hour"),
    "sliding window": lambda s: SlidingWindow(s, "five", "5/hour"),
    "bucketed window": lambda s: BucketedWindow(s, "five", "5/hour", buckets=3, keys=2),
    "sliding log": lambda s: SlidingLog(s, "five", "5/hour", keys=2),
    "token bucket": lambda s: TokenBucket(s, "five", "5/hour"),
    "token bucket in intervals": lambda s: TokenBucket(s, "five", "5/hour", refill="interval"),
    "leaky bucket": lambda s: LeakyBucket(s, "five", "1/hour", 5),
    "concurrency": lambda s: Concurrency(s, "five", 5, lease="1h", keys=2),
}


def left(limiter: Any, key: Any = "k") -> int:
    remaining: int = limiter.peek(key, 0).remaining
    return remaining


@pytest.fixture(params=OF_FIVE)
def five(request: pytest.FixtureRequest, store: Store) -> Any:
    return OF_FIVE[request.param](store)


# A bucket refills meanwhile.


@pytest.mark.parametrize("refill", ["continuous", "interval"])
@pytest.mark.parametrize("together", [False, True])
def test_what_has_been_refilled_is_not_given_back_once_more(
    store: Store, clock: ManualClock, refill: Any, together: bool
) -> None:
    bucket = TokenBucket(store, "bucket", "1/second", burst=5, refill=refill)
    limiter: Any = AllOf(bucket) if together else bucket
    reservation = limiter.reserve("k", 5)
    clock.advance(4)
    assert bucket.hit("k", 4)
    reservation.cancel()
    assert left(bucket) == 1


# Permits that are held.


def test_a_lease_that_is_over_frees_nobody_elses_permit(store: Store, clock: ManualClock) -> None:
    gate = Concurrency(store, "gate", 1, lease="10s")
    first = gate.reserve("k")
    clock.advance(11)
    assert gate.reserve("k")
    first.cancel()
    assert not gate.reserve("k")


def test_each_of_several_gives_back_its_own(store: Store, clock: ManualClock) -> None:
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


def test_permits_that_were_taken_for_each_other_all_come_back(store: Store, clock: ManualClock) -> None:
    """A refund doesn't know which permit it is about, and takes the oldest."""
    gate = Concurrency(store, "gate", 3, lease="10s")
    reservation = gate.reserve("k")
    clock.advance(1)
    assert gate.allow("k")
    gate.refund("k")
    assert left(gate) == 2
    reservation.cancel()
    assert left(gate) == 3


def test_one_whose_permit_a_block_has_taken_gives_back_the_blocks(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens when another thread books between the end of a block's wait and its beginning."""
    gate = Concurrency(store, "gate", 3, lease="10s")
    booked = []

    def wait(limiter: Concurrency, key: str, *arguments: object) -> bool:
        assert limiter.allow(key)
        clock.advance(1)
        booked.append(limiter.reserve(key))
        return True

    monkeypatch.setattr(waiting, "wait", wait)
    with gate.hold("k"):
        booked[0].cancel()
        assert left(gate) == 2
    assert left(gate) == 3


@pytest.mark.parametrize("together", [False, True])
def test_one_that_was_let_in_without_room_frees_nobody_elses_permit(clock: ManualClock, together: bool) -> None:
    with Store.private(keys=1, on_full="allow", clock=clock) as store:
        gate = Concurrency(store, "gate", 1, lease="10s", keys=1)
        limiter: Any = AllOf(gate) if together else gate
        key, reservation = next(
            (key, reservation)
            for key in range(5000)
            if (reservation := limiter.reserve(key)) and gate.peek(key).remaining == 1
        )
        clock.advance(100)
        assert [gate.allow(key) for _ in range(2)] == [True, False]
        reservation.cancel()
        assert not gate.allow(key)


def test_a_denial_of_several_frees_nobody_elses_permit(
    name: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See `test_what_a_full_table_let_in_is_not_given_back_from_anothers_charge` for how a test can step in."""
    with Store(name, keys=1, on_full="allow", clock=clock) as store:
        held = Concurrency(store, "held", 1, lease="10s", keys=1)
        gate = Concurrency(store, "gate", 1, lease="1h", keys=1)
        homeless = next(key for key in range(5000) if held.hit(key) and held.hit(key))
        assert gate.allow("k")
        _, extent = extents(path_of(name))
        with open(path_of(name), "r+b") as file:
            os.pwrite(file.fileno(), bytes(8), extent["offset"] + layout.GROUP_BYTES)

        def make_room_and_take(owners: Owners, among: set[int]) -> set[int]:
            clock.advance(30)
            assert held.allow(homeless)
            return set()

        with monkeypatch.context() as patch:
            patch.setattr(Owners, "dead_among", make_room_and_take)
            assert not AllOf(held, gate).allow([homeless, "k"])
        assert held.peek(homeless).remaining == 0


# Several at once.


def test_one_limiter_several_times_gets_all_back(five: Any) -> None:
    reservation = AllOf(five, five, five).reserve("k", [1, 2, 1])
    assert left(five) == 1
    reservation.cancel()
    assert left(five) == 5


def test_a_denial_by_the_same_limiter_keeps_nothing(five: Any) -> None:
    assert not AllOf(five, five, five).hit("k", 2)
    assert left(five) == 5


@pytest.mark.parametrize("give_back", ["cancel", "refund", "reset"])
def test_an_interrupt_leaves_no_member_charged(store: Store, monkeypatch: pytest.MonkeyPatch, give_back: str) -> None:
    """Where a limiter wakes those who wait, Python code runs, and so do signal handlers."""
    gate, log = Concurrency(store, "gate", 1, keys=2), SlidingLog(store, "log", "1/hour", keys=2)
    both = AllOf(gate, log, gate)
    reservation = both.reserve("k", [0, 1, 1])
    assert reservation

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "released", interrupted)
    with pytest.raises(KeyboardInterrupt):
        {
            "cancel": reservation.cancel,
            "refund": lambda: both.refund("k", [0, 1, 1]),
            "reset": lambda: both.reset("k"),
        }[give_back]()
    assert [left(gate), left(log)] == [1, 1]


def test_an_interrupt_is_heard_though_the_store_is_closed_by_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reservation = AllOf(FixedWindow(store, "window", "1/hour"), Concurrency(store, "gate", 1)).reserve("k")

    def interrupted(*arguments: object) -> None:
        store.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "released", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reservation.cancel()


# In which process, and with what arguments.


def test_only_the_process_that_has_booked_cancels(five: Any, in_child: Callable[..., Any]) -> None:
    for limiter in (five, AllOf(five)):
        reservation = limiter.reserve("k", 2)
        assert five.reserve("k", 3)
        in_child(reservation.cancel)
        assert left(five) == 0
        five.reset("k")


@pytest.mark.parametrize("max_delay", ["1", -1, float("nan"), True])
def test_what_is_no_longest_delay(five: Any, max_delay: Any) -> None:
    for limiter in (five, AllOf(five)):
        with pytest.raises(ValueError, match="max_delay"):
            limiter.reserve("k", 1, max_delay)
    assert left(five) == 5


class Growing:
    """A cost that is larger each time it is read."""

    def __init__(self) -> None:
        self._cost = 0

    def __index__(self) -> int:
        self._cost += 1
        return self._cost


def test_a_cost_is_what_it_was_when_it_was_charged(five: Any) -> None:
    assert five.hit("k", 2)
    for limiter in (five, AllOf(five)):
        reservation = limiter.reserve("k", Growing())
        assert left(five) == 2
        reservation.cancel()
        assert left(five) == 3


def test_a_cost_that_is_none(five: Any) -> None:
    for cost in (1.0, "1", True, -1):
        with pytest.raises(InvalidCost):
            AllOf(five).reserve("k", cost)  # type: ignore[arg-type]

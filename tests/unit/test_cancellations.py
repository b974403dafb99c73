"""A cancelled reservation gives back its own charge, if that still counts, and no other request's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from limiter_makers import OF_FIVE
from process_helpers import extents, path_of

from forebay import (
    AllOf,
    Concurrency,
    FixedWindow,
    SlidingLog,
    Store,
    waiting,
)
from forebay.segment import layout
from forebay.segment.process_identity import Owners
from forebay.testing import ManualClock


def left(limiter: Any, key: Any = "k") -> int:
    remaining: int = limiter.peek(key, 0).remaining
    return remaining


@pytest.fixture(params=OF_FIVE)
def five(request: pytest.FixtureRequest, store: Store) -> Any:
    return OF_FIVE[request.param](store)


def test_cancellation_after_a_block_took_its_permit_gives_back_the_blocks_permit(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread books between the end of a block's wait and the block's begin."""
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
def test_cancellation_of_an_uncharged_request_frees_no_other_permit(clock: ManualClock, together: bool) -> None:
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


def test_denial_by_several_limits_frees_no_other_permit(
    name: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test steps in as in `test_rollback_takes_no_other_requests_permit_after_a_key_was_let_in_uncharged`."""
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


@pytest.mark.parametrize("give_back", ["cancel", "refund", "reset"])
def test_interrupt_leaves_no_limiter_charged(store: Store, monkeypatch: pytest.MonkeyPatch, give_back: str) -> None:
    """Waking waiters runs Python code, and so signal handlers."""
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


def test_interrupt_is_raised_even_if_its_handler_closes_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservation = AllOf(FixedWindow(store, "window", "1/hour"), Concurrency(store, "gate", 1)).reserve("k")

    def interrupted(*arguments: object) -> None:
        store.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "released", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reservation.cancel()


# Processes and arguments.


def test_only_the_booking_process_can_cancel(five: Any, in_child: Callable[..., Any]) -> None:
    for limiter in (five, AllOf(five)):
        reservation = limiter.reserve("k", 2)
        assert five.reserve("k", 3)
        in_child(reservation.cancel)
        assert left(five) == 0
        five.reset("k")

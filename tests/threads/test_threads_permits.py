"""Permits of ``Concurrency`` that several threads take, renew and give back at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Final

import pytest
from thread_helpers import often, race, together

from forebay import Concurrency, Lease, Store
from forebay.testing import ManualClock

ROUNDS: Final = often(400)
TURNS: Final = often(1000)
THREADS: Final = 4


def free(limiter: Concurrency, key: Any = "k") -> int:
    return limiter.peek(key).remaining


@pytest.mark.parametrize("cost", [1, 3])
def test_lease_that_two_threads_release_frees_no_permit_of_another(store: Store, cost: int) -> None:
    """The clock stands still, so a permit that is taken again has the same owner and the same end."""
    gate = Concurrency(store, "gate", cost, lease=30)

    def release_and_acquire(lease: Lease) -> Lease:
        lease.release()
        return gate.acquire("k", cost)

    for _, (_, again) in race(ROUNDS, lambda: gate.acquire("k", cost), Lease.release, release_and_acquire):
        if again:
            assert free(gate) == 0
            assert again.release()
        else:
            # The other thread was between its decision to release and the release.
            assert free(gate) == cost


@pytest.mark.parametrize("cost", [1, 3])
def test_one_thread_of_two_that_release_a_lease_has_held_it(store: Store, cost: int) -> None:
    gate = Concurrency(store, "gate", 3, lease=30)
    for _, results in race(ROUNDS, lambda: gate.acquire("k", cost), Lease.release, Lease.release):
        assert sorted(results) == [False, True]
        assert free(gate) == 3


@pytest.mark.parametrize("cost", [1, 3])
def test_released_lease_that_is_renewed_meanwhile_holds_nothing(store: Store, clock: ManualClock, cost: int) -> None:
    gate = Concurrency(store, "gate", 3, lease=30)

    def acquire() -> Lease:
        lease = gate.acquire("k", cost)
        clock.advance(1)
        return lease

    for _ in race(ROUNDS, acquire, Lease.release, Lease.renew):
        assert free(gate) == 3


@pytest.mark.parametrize("cost", [1, 3])
def test_lease_that_two_threads_renew_is_held(store: Store, clock: ManualClock, cost: int) -> None:
    gate = Concurrency(store, "gate", 3, lease=30)

    def acquire() -> Lease:
        lease = gate.acquire("k", cost)
        clock.advance(1)
        return lease

    for lease, results in race(ROUNDS, acquire, Lease.renew, Lease.renew):
        assert results == [True, True]
        assert lease.release()
        assert free(gate) == 3


def test_permits_that_threads_take_and_refund_are_all_given_back(store: Store) -> None:
    gate = Concurrency(store, "gate", 8, lease=30)

    def take_and_refund() -> None:
        for turn in range(TURNS):
            cost = 1 + turn % 2
            if gate.hit("k", cost):
                gate.refund("k", cost)

    together(*[take_and_refund] * THREADS)
    assert free(gate) == 8


def test_permits_that_threads_book_and_cancel_are_all_given_back(store: Store) -> None:
    gate = Concurrency(store, "gate", 8, lease=30)

    def book_and_cancel() -> None:
        for turn in range(TURNS):
            gate.reserve("k", 1 + turn % 2).cancel()

    together(*[book_and_cancel] * THREADS)
    assert free(gate) == 8


def test_permits_of_many_keys_are_all_given_back_though_lapsed_ones_are_forgotten(
    store: Store, clock: ManualClock
) -> None:
    """One thread's keys make the limiter forget lapsed permits; the others take and refund a permit of one key."""
    gate = Concurrency(store, "gate", 8, lease=30, keys=4096)

    def lapse() -> None:
        for key in range(3000):
            gate.allow(key)

    def take_and_refund() -> None:
        for _ in range(TURNS):
            if gate.allow("k"):
                gate.refund("k")

    for _ in range(3):
        together(lapse, take_and_refund, take_and_refund)
        assert free(gate) == 8
        clock.advance(31)


def test_first_permits_that_threads_take_are_given_back(store: Store) -> None:
    """The first request of a limiter in a process makes the process an owner of permits."""
    gates = iter(range(10**9))

    def make() -> Concurrency:
        return Concurrency(store, f"gate {next(gates) % 8}", 2, lease=30, keys=1)

    def allow(gate: Concurrency) -> bool:
        return gate.allow("k")

    for gate, results in race(ROUNDS, make, allow, allow):
        assert results == [True, True]
        gate.refund("k", 2)
        assert free(gate) == 2


@pytest.mark.parametrize("how", ["acquire", "hold", "allow"])
def test_threads_never_hold_more_than_the_limit(how: str) -> None:
    with Store.private(keys=1) as store:
        gate = Concurrency(store, "gate", 2, lease=30)
        held = [0] * 8
        most = [0] * 8

        def work(me: int) -> None:
            for _ in range(TURNS // 10):
                use(me)

        def hold(me: int) -> None:
            held[me] = 1
            most[me] = max(most[me], sum(held))
            held[me] = 0

        def wait(me: int) -> None:
            with gate.hold("k"):
                hold(me)

        def allow(me: int) -> None:
            if gate.allow("k"):
                hold(me)
                gate.refund("k")

        def acquire(me: int) -> None:
            if lease := gate.acquire("k"):
                with lease:
                    hold(me)

        use: Callable[[int], None] = {"acquire": acquire, "hold": wait, "allow": allow}[how]
        together(*[lambda me=me: work(me) for me in range(8)])  # type: ignore[misc]
        assert max(most) <= 2
        assert free(gate) == 2


def test_denials_of_one_key_do_not_delay_the_permits_of_another(store: Store, clock: ManualClock) -> None:
    """A denial remembers the last scan of all slots. Two keys' scans must not mix."""
    limit = 256
    late, soon = Concurrency(store, "gate", limit, lease=1000), Concurrency(store, "gate", limit, lease=10)

    def fill() -> None:
        late.reset("late")
        soon.reset("soon")
        assert late.hit("late", limit)
        assert soon.hit("soon", limit)

    def denied(limiter: Concurrency, key: str) -> Callable[[None], None]:
        def deny(_: None) -> None:
            for _ in range(20):
                assert not limiter.allow(key)

        return deny

    for _ in race(ROUNDS // 3, fill, denied(soon, "late"), denied(soon, "soon")):
        clock.advance(11)
        assert soon.allow("soon")


def test_permits_may_be_taken_while_lapsed_ones_are_forgotten(store: Store, clock: ManualClock) -> None:
    """The garbage collector runs code of others wherever an object is made; other threads run there, too."""
    gate = Concurrency(store, "gate", 8, lease=30, keys=16_384)
    collected = 0

    def take(phase: str, _info: object) -> None:
        nonlocal collected
        if phase == "start":
            collected += 1
            gate.allow(f"collection {collected}")

    thresholds = gc.get_threshold()
    gc.callbacks.append(take)
    try:
        gc.set_threshold(3)
        for key in range(3000):
            assert gate.allow(key)
        clock.advance(31)
        for key in range(3000, 6000):
            assert gate.allow(key)
            gate.refund(key)
    finally:
        gc.callbacks.remove(take)
        gc.set_threshold(*thresholds)
    assert all(gate.peek(key).remaining == 8 for key in range(6000))

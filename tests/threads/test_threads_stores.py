"""Stores that are made, closed and forked while threads decide; clocks, names and caches that threads share."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any, Final

import pytest
from limiter_makers import OF_A_HUNDRED, OF_FIVE
from process_helpers import Worker
from thread_helpers import HAS_GIL, race, together

from forebay import AllOf, Concurrency, Store, StoreClosed
from forebay.redis.fallback import UnleasedCounts
from forebay.redis.leased.fetch import Holding, Holdings
from forebay.seldom import Seldom
from forebay.testing import ManualClock

ROUNDS: Final = 300


def all_kinds(store: Store) -> list[Any]:
    kinds = [make(store) for make in OF_A_HUNDRED.values()]
    gate = OF_FIVE["concurrency"](store)
    return [*kinds, gate, AllOf(kinds[0], gate)]


def decide(limiter: Any) -> None:
    limiter.allow("k")
    limiter.hit("k", 2)
    limiter.peek("k")
    limiter.reserve("k").cancel()
    limiter.allow_many(["k", "l", 7])
    limiter.refund("k")


def test_close_beside_decisions_ends_them_by_an_exception() -> None:
    def use(made: tuple[Store, list[Any]]) -> bool:
        for _ in range(3):
            for limiter in made[1]:
                try:
                    decide(limiter)
                except StoreClosed:
                    return True
        return False

    def make() -> tuple[Store, list[Any]]:
        store = Store.private(keys=1)
        return store, all_kinds(store)

    for (store, limiters), _ in race(60, make, lambda made: made[0].close(), use, use):
        for limiter in limiters:
            with pytest.raises(StoreClosed):
                limiter.allow("k")
        assert store.closed


def test_two_threads_close_a_store() -> None:
    for store, _ in race(ROUNDS, lambda: Store.private(keys=1), Store.close, Store.close):
        assert store.closed


def test_child_forked_beside_deciding_threads_decides_and_closes_its_store() -> None:
    """A thread of the parent may be anywhere at the fork. Without the GIL the child uses no `Concurrency` and no list
    that those threads use: CPython may have left a lock of such an object held.
    """
    with Store.private(keys=16) as store:
        rates = tuple(make(store) for make in OF_A_HUNDRED.values())
        limiters = (*rates, AllOf(rates[0], rates[1]), *([OF_FIVE["concurrency"](store)] if HAS_GIL else []))
        gate = Concurrency(store, "gate", 4, keys=16)
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                for limiter in limiters:
                    decide(limiter)

        def in_child() -> tuple[bool, int]:
            for limiter in limiters:
                decide(limiter)
            with gate.hold("k", timeout=60), gate.acquire("mine", 4) as lease:
                renewed = lease.renew()
            remaining = gate.peek("mine").remaining
            store.close()
            return renewed, remaining

        def fork() -> None:
            try:
                for _ in range(25):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", DeprecationWarning)
                        child = Worker(in_child)
                    assert child.result() == (True, 4)
            finally:
                is_over.set()

        together(fork, work, work)
        assert gate.peek("k").remaining == 4


def test_first_permits_that_threads_of_a_child_take_are_given_back(store: Store) -> None:
    """A child is an owner of its own, and its parent's permits aren't its own."""
    gates = [Concurrency(store, f"gate {number}", 3, lease=30, keys=1) for number in range(40)]
    for gate in gates:
        assert gate.allow("k")

    def in_child() -> list[int]:
        waiting = iter(gates)
        found = []
        for gate, results in race(len(gates), lambda: next(waiting), *[lambda gate: gate.allow("k")] * 2):
            assert results == [True, True]
            gate.refund("k", 3)
            found.append(gate.peek("k").remaining)
        return found

    for _ in range(4):
        assert Worker(in_child).result() == [2] * len(gates)


def test_clock_moves_every_open_store_though_threads_make_and_close_others() -> None:
    clock = ManualClock(100)

    def make() -> Store:
        clock.advance(1)
        return Store.private(keys=1, clock=clock)

    def make_another(_: Store) -> Store:
        return Store.private(keys=1, clock=clock)

    for before, (_, made) in race(ROUNDS, make, Store.close, make_another):
        clock.advance(1)
        assert made.now_ns() == clock.now_ns()
        made.close()
        assert before.closed


def test_manual_clock_is_read_while_threads_make_and_close_stores() -> None:
    clock = ManualClock(100)

    def make_and_close() -> None:
        for _ in range(ROUNDS):
            Store.private(keys=1, clock=clock).close()

    def read() -> None:
        for _ in range(20 * ROUNDS):
            assert clock.now() == 100

    together(make_and_close, make_and_close, read)


def test_counts_of_a_fallback_belong_to_their_process_in_all_threads() -> None:
    """The first call in a child begins its counts."""
    parents = [UnleasedCounts(3600) for _ in range(ROUNDS)]
    for counts in parents:
        counts.add("k", 5)

    def in_child() -> set[int]:
        waiting = iter(parents)

        def add(counts: UnleasedCounts) -> None:
            counts.add("k", 1)

        return {counts.take("k", 9) for counts, _ in race(ROUNDS, lambda: next(waiting), add, add)}

    # Threads that spin take long turns where more run than there are processors.
    assert Worker(in_child).result(600) == {2}
    assert {counts.take("k", 9) for counts in parents} == {5}


def test_one_of_several_threads_is_chosen() -> None:
    def is_due(seldom: Seldom) -> list[bool]:
        return [seldom.is_due(), seldom.is_due("subject")]

    for _, results in race(ROUNDS, Seldom, is_due, is_due, is_due):
        assert [sum(chosen) for chosen in zip(*results, strict=True)] == [1, 1]


def test_lease_that_another_thread_fetches_is_not_forgotten_with_the_one_before() -> None:
    """The thread that gives back unused leases forgets a holding while a fetch replaces it."""
    permits: Any = object()

    def holding() -> Holding:
        return Holding(permits, 7, None, 0, 0)  # type: ignore[arg-type]

    def make() -> tuple[Holdings, Holding, Holding]:
        holdings, before, after = Holdings(), holding(), holding()
        holdings.add(before)
        return holdings, before, after

    def drop(made: tuple[Holdings, Holding, Holding]) -> None:
        holdings, before, _ = made
        holdings._drop((id(permits), 7), before)

    def add(made: tuple[Holdings, Holding, Holding]) -> None:
        made[0].add(made[2])

    for (holdings, _, after), _ in race(4 * ROUNDS, make, drop, add):
        assert list(holdings.leases.values()) == [after]


def test_process_that_forks_in_a_thread_keeps_its_own_permits() -> None:
    with Store.private(keys=4) as store:
        gate = Concurrency(store, "gate", 8)

        def take_and_refund() -> None:
            for _ in range(2000):
                if gate.allow("k"):
                    gate.refund("k")

        def fork() -> None:
            for _ in range(10):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if pid == 0:
                    os._exit(0)
                os.waitpid(pid, 0)

        together(take_and_refund, take_and_refund, fork)
        assert gate.peek("k").remaining == 8

"""Concurrency limits in memory, by example, most with a manual clock."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forebay import (
    AllOf,
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    Lease,
    LimitExceeded,
    Store,
    StoreClosed,
    waiting,
)
from forebay.segment.process_identity import Owners
from forebay.testing import ManualClock

NS = 1_000_000_000


@pytest.fixture
def three(store: Store) -> Concurrency:
    return Concurrency(store, "three", 3, lease=30, keys=4)


def remaining(limiter: Concurrency, key: Any = "k") -> int:
    return limiter.peek(key).remaining


def test_lease_that_was_never_granted_does_not_crash(in_child: Callable[..., Any]) -> None:
    async def enter() -> None:
        async with Lease.__new__(Lease):
            pytest.fail("the block must not run")

    def use(do: Callable[[Any], object]) -> object:
        return do(Lease.__new__(Lease))

    uses: list[Callable[[Any], object]] = [repr, str, Lease.__enter__, lambda lease: asyncio.run(enter())]
    for do in uses:
        with pytest.raises(AttributeError, match="NoneType"):
            in_child(lambda do=do: use(do))
    for do in (bool, Lease.release, Lease.renew):
        assert in_child(lambda do=do: use(do)) is False


def test_asynchronous_block_holds_permits(three: Concurrency) -> None:
    async def run() -> None:
        async with three.hold("k", 2), three.acquire("k"):
            assert remaining(three) == 0
        assert remaining(three) == 3
        with pytest.raises(ZeroDivisionError):
            async with three.hold("k"):
                raise ZeroDivisionError

    asyncio.run(run())
    assert remaining(three) == 3


def test_hold_raises_when_its_timeout_passes(three: Concurrency) -> None:
    lease = three.acquire("k", 3)
    with pytest.raises(LimitExceeded) as caught, three.hold("k", timeout=5):
        pytest.fail("the block must not run")
    assert (caught.value.limiter, caught.value.limit) == ("three", 3)
    assert 0 < caught.value.retry_after <= 30

    async def run() -> None:
        async with three.hold("k", timeout=5):
            pytest.fail("the block must not run")

    with pytest.raises(LimitExceeded):
        asyncio.run(run())
    assert lease.release()
    with three.hold("k", 3, timeout=0):
        assert remaining(three) == 0
    assert remaining(three) == 3


def test_hold_moves_a_manual_clock_to_the_end_of_a_lease(three: Concurrency, clock: ManualClock) -> None:
    three.acquire("k", 3)
    with three.hold("k", 2) as lease:
        assert lease
        assert clock.now() == 1030
    assert remaining(three) == 3


def test_wait_moves_a_manual_clock_to_the_end_of_a_lease(three: Concurrency, clock: ManualClock) -> None:
    assert three.hit("k")
    clock.advance(10)
    assert three.wait("k", 2)
    assert not three.wait("k", timeout=1)
    assert asyncio.run(three.wait_async("k"))
    assert clock.now() == 1030


def test_each_call_of_a_decorated_function_holds_a_permit(three: Concurrency) -> None:
    @three.limited("k", 2)
    def fixed(number: int) -> int:
        """What it does."""
        return number + remaining(three)

    @three.limited(lambda user, **_: ("user", user))
    def by_user(user: str, *, fail: bool = False) -> int:
        if fail:
            raise ZeroDivisionError
        return remaining(three, ("user", user))

    assert fixed.__name__ == "fixed"
    assert fixed.__doc__ == "What it does."
    assert fixed(10) == 11
    assert by_user("a") == 2
    with pytest.raises(ZeroDivisionError):
        by_user("a", fail=True)
    assert remaining(three) == 3
    assert remaining(three, ("user", "a")) == 3
    three.acquire("k", 3)
    impatient = three.limited("k", timeout=0)(fixed)
    with pytest.raises(LimitExceeded):
        impatient(1)


def test_decorator_without_a_key_shows_its_usage(three: Concurrency) -> None:
    ran: list[object] = []
    decorate: Any = three.limited(ran.append)  # as `@three.limited` alone
    for arguments, by_name in (((), {}), ((1,), {}), ((ran.append, 2), {}), ((ran.append,), {"number": 3})):
        with pytest.raises(TypeError, match=r"limiter '.*' limits a function by @limiter.limited\(key\) above it"):
            decorate(*arguments, **by_name)
    assert not ran


def test_each_run_of_a_decorated_coroutine_holds_a_permit(three: Concurrency) -> None:
    most = 0
    running = 0

    @three.limited(lambda number: "k")
    async def work(number: int) -> int:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    async def run() -> list[int]:
        return await asyncio.gather(*(work(number) for number in range(3)))

    assert asyncio.run(run()) == [0, 1, 2]
    assert most == 3
    assert remaining(three) == 3


@pytest.mark.parametrize("limit", [1, 63, 64, 65, 127, 128, 129, 5000, 20_000])
def test_limit_of_any_size_grants_exactly_that_many_permits(store: Store, limit: int) -> None:
    many = Concurrency(store, "many", limit, keys=1)
    leases = [many.acquire("k") for _ in range(limit)]
    assert all(leases)
    assert not many.acquire("k")
    for lease in leases[1::3]:
        assert lease.release()
    freed = len(leases[1::3])
    assert remaining(many) == freed
    assert sum(map(bool, [many.acquire("k") for _ in range(freed + 2)])) == freed


def test_child_does_not_own_its_parents_permits(three: Concurrency, in_child: Callable[..., Any]) -> None:
    lease = three.acquire("k", 2)
    assert three.allow("k")

    def child() -> tuple[bool, ...]:
        three.refund("k")
        return lease.release(), lease.renew(), three.allow("k"), three.peek("k").remaining == 0

    assert in_child(child) == (False, False, False, True)
    assert lease.renew()
    assert lease.release()
    three.refund("k")
    assert remaining(three) == 3


def test_permits_of_an_ended_child_are_free(three: Concurrency, in_child: Callable[..., Any]) -> None:
    assert in_child(lambda: bool(three.acquire("k", 3)))
    assert all(three.acquire("k") for _ in range(3))


def test_lease_can_be_released_after_the_store_is_closed(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock) as store:
        limiter = Concurrency(store, "three", 3, keys=1)
        lease = limiter.acquire("k")
    assert lease.release()
    for method in (limiter.acquire, limiter.allow, limiter.hit, limiter.refund, limiter.reset):
        with pytest.raises(StoreClosed):
            method("k")


def test_renewal_after_the_store_is_closed_raises(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock) as store:
        lease = Concurrency(store, "three", 3, keys=1).acquire("k")
    with pytest.raises(StoreClosed):
        lease.renew()


@pytest.mark.parametrize(("on_full", "granted"), [("evict", True), ("deny", False), ("allow", True)])
def test_key_without_room_follows_on_full(clock: ManualClock, on_full: Any, granted: bool) -> None:
    with Store.private(keys=1, clock=clock, on_full=on_full) as store:
        limiter = Concurrency(store, "few", 2, lease=30, keys=1)
        first = limiter.acquire("first")
        second = limiter.acquire("second")
        assert bool(second) is granted
        assert second.release() is (on_full == "evict")
        assert not second.release()
        if on_full == "deny":
            denied = limiter.hit("second")
            assert (denied.allowed, denied.remaining) == (False, 0)
            clock.advance(denied.retry_after_ns // NS + 1)
            assert limiter.hit("second")
        else:
            # An evicted key's holder can still release its permit.
            assert first.release()


def test_cancellation_at_the_instant_of_a_reset_gives_back_nothing(three: Concurrency, clock: ManualClock) -> None:
    """Memory doesn't record which of the permits that end together were reset: too few are given back rather than too
    many.
    """
    assert three.hit("k", 2)
    three.reset("k")
    booked = three.reserve("k")
    booked.cancel()
    assert remaining(three) == 2
    three.reset("k")
    clock.advance(1)
    booked = three.reserve("k")
    booked.cancel()
    assert remaining(three) == 3


@pytest.mark.parametrize("keys", [0, -1, 1.5, True, "many"])
def test_concurrency_refuses_invalid_numbers_of_keys(store: Store, keys: Any) -> None:
    with pytest.raises(InvalidLimiter):
        Concurrency(store, "c", 1, keys=keys)


def test_bytes_needed_counts_slots_and_keys(store: Store) -> None:
    needed = Concurrency.bytes_needed(1000, keys=3)
    assert 3 * 1000 * 16 <= needed < 4 * 1000 * 16
    assert Concurrency(store, "c", 1000, keys=3).keys == 3
    assert Concurrency(store, "d", 1000).keys >= 64
    for limit in (0, -1, True, 1.5, 2**24 + 1):
        with pytest.raises(InvalidLimiter, match="whole number from 1 to 2"):
            Concurrency.bytes_needed(limit)  # type: ignore[arg-type]


@pytest.fixture
def waiting_store() -> Iterator[Store]:
    """A store with the real clock, for threads that sleep."""
    with Store.private(keys=1) as store:
        yield store


def test_release_wakes_a_waiter_of_this_process(waiting_store: Store) -> None:
    one = Concurrency(waiting_store, "one", 1, lease=3600, keys=1)
    order: list[int] = []

    def work(number: int) -> None:
        with one.hold("k"):
            order.append(number)

    with one.hold("k"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        assert not order
    for thread in threads:
        thread.join(60)
    assert sorted(order) == [0, 1, 2, 3]
    assert remaining(one) == 1


def interrupt_the_wait() -> None:
    """As Ctrl-C does, when a thread waits."""
    end_s = time.monotonic() + 60
    while not waiting._queues and time.monotonic() < end_s:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_during_a_wait_loses_no_permit(waiting_store: Store) -> None:
    one = Concurrency(waiting_store, "one", 1, lease=3600, keys=1)
    lease = one.acquire("k")
    interrupt = threading.Thread(target=interrupt_the_wait)
    interrupt.start()
    with pytest.raises(KeyboardInterrupt), one.hold("k"):
        pytest.fail("the block must not run")
    interrupt.join()
    assert lease.release()
    assert one.acquire("k")


def test_cancelled_task_loses_no_permit(waiting_store: Store) -> None:
    one = Concurrency(waiting_store, "one", 1, lease=3600, keys=1)

    async def hold() -> None:
        async with one.hold("k"):
            await asyncio.Event().wait()

    async def run() -> None:
        tasks = [asyncio.create_task(hold()) for _ in range(5)]
        for task in tasks:
            await asyncio.sleep(0.002)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert one.acquire("k")


def test_interrupt_of_the_search_for_ended_processes_loses_no_permit(
    waiting_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = Concurrency(waiting_store, "three", 3, lease=3600, keys=1)
    lease = three.acquire("k")

    def interrupted(self: Owners, owners: set[int]) -> set[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Owners, "dead_among", interrupted)
        with pytest.raises(KeyboardInterrupt):
            three.acquire("k", 3)
    assert remaining(three) == 2
    assert lease.release()


def test_first_use_by_several_threads_loses_no_permit(waiting_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Concurrency(waiting_store, "pair", 2, lease=3600, keys=1)
    made, go_on = threading.Event(), threading.Event()
    turns = itertools.count()

    class Slow(Owners):
        def __init__(self) -> None:
            super().__init__()
            if next(turns) == 0:
                made.set()
                go_on.wait(60)

    monkeypatch.setattr("forebay.core.algorithms.concurrency.Owners", Slow)
    slow = threading.Thread(target=pair.allow, args=("k",))
    slow.start()
    assert made.wait(60)
    assert pair.allow("k")
    go_on.set()
    slow.join(60)
    pair.refund("k", 2)
    assert remaining(pair) == 2


def test_threads_hammering_one_key_never_exceed_the_limit(waiting_store: Store) -> None:
    pair = Concurrency(waiting_store, "pair", 2, lease=3600, keys=1)
    held, over, errors = [0], [0], []

    def work() -> None:
        try:
            for _ in range(2000):
                lease = pair.acquire("k")
                if lease:
                    held.append(1)
                    over[0] += len(held) - 1 > 2
                    held.pop()
                    lease.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert over == [0]
    assert remaining(pair) == 2


# With other limits.


def test_permit_is_given_back_when_another_limit_denies(three: Concurrency, store: Store) -> None:
    window = FixedWindow(store, "window", "5/minute")
    for order in (1, -1):
        both = AllOf(*(three, window)[::order])
        for _ in range(3):
            assert both.allow("k")
        denied = both.hit("k")
        assert (denied.allowed, denied.limiter) == (False, "three")
        assert window.peek("k").remaining == 2
        both.refund("k", 3)
        assert (remaining(three), window.peek("k").remaining) == (3, 5)
        assert both.hit("k", [1, 5][::order])
        for _ in range(10):
            assert both.hit("k").limiter == "window"
        assert remaining(three) == 2
        booking = both.reserve(["other", "another"][::order], [2, 1][::order])
        assert booking.allowed
        assert remaining(three, "other") == 1
        booking.cancel()
        assert (remaining(three, "other"), window.peek("another").remaining) == (3, 5)
        both.refund("k", [1, 5][::order])
    assert (remaining(three), window.peek("k").remaining) == (3, 5)


def test_several_limits_reuse_expired_permits(three: Concurrency, store: Store, clock: ManualClock) -> None:
    both = AllOf(three, FixedWindow(store, "window", "1000000/second"))
    for _ in range(20):
        assert both.hit("k", 3)
        assert not both.hit("k")
        clock.advance(30)
    both.refund("k", 3)
    assert remaining(three) == 3

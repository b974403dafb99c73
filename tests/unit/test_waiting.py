"""Waiting, with minimal fake limiters and a time that only sleeping moves. Real limiters are at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any, Final

import pytest

from forebay import (
    BucketedWindow,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    LeakyBucket,
    MinInterval,
    Rate,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    TokenBucket,
    waiting,
)
from forebay.testing import ManualClock

DEADLINE_S: Final = 60.0
"""A wait that takes longer fails the test."""

SECOND: Final = 1_000_000_000


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the awaited condition does not come true"
        os.sched_yield()


async def until_async(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the awaited condition does not come true"
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.0005)


def run_in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(DEADLINE_S)


def lock_is_free() -> bool:
    free = waiting._lock.acquire(blocking=False)
    if free:
        waiting._lock.release()
    return free


def queued() -> int:
    # A copy, because without the GIL a waiter may join while this counts.
    return sum(map(len, list(waiting._queues.values())))


class Timeline:
    """The time that `waiting` sees: a sleep moves it on at once, as soon as the gate is open."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.sleeps: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.interrupt: BaseException | None = None
        """The next sleep raises this."""
        self.part = 1.0
        """The share of a sleep that passes before it returns."""

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        assert self.gate.wait(DEADLINE_S)
        self._pass(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await until_async(self.gate.is_set)
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            raise interrupt
        self.now_ns += max(round(seconds * self.part * SECOND), 1)


class FakeReservation:
    def __init__(self, limiter: FakeLimiter, caller: object, allowed: bool, delay_ns: int) -> None:
        self.limiter, self.caller, self.allowed, self.delay_ns = limiter, caller, allowed, delay_ns
        self.due_ns = limiter.store.timeline.now_ns + delay_ns

    def cancel(self) -> None:
        if self.limiter.store.closed:
            raise StoreClosed("closed")
        if self.allowed:
            self.limiter.charged.remove(self.caller)


class FakeStore:
    """A store with the timeline's time, which may begin elsewhere than the host's."""

    manual_clock: ManualClock | None = None

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.closed = False

    def now_ns(self) -> int:
        if self.closed:
            raise StoreClosed("closed")
        return self.timeline.now_ns


class FakeLimiter:
    """Identifies its callers by the cost."""

    may_free_early = False
    name = "fake"

    def __init__(self, timeline: Timeline) -> None:
        self.store = FakeStore(timeline)
        self.attempts: list[object] = []
        self.patience: list[float | None] = []
        self.charged: list[object] = []

    def reserve(self, key: object, cost: object, max_delay: float | None) -> FakeReservation:
        if self.store.closed:
            raise StoreClosed("closed")
        self.attempts.append(cost)
        self.patience.append(max_delay)
        allowed, delay_ns = self.decide(self.store.now_ns(), max_delay)
        if allowed:
            self.charged.append(cost)
        return FakeReservation(self, cost, allowed, delay_ns)

    def peek(self, key: object, cost: object) -> None:
        """Every request can be allowed some time."""

    @abstractmethod
    def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
        """(whether the request is allowed, its delay in nanoseconds)."""


class Booking(FakeLimiter):
    """One request a second, booked any time ahead."""

    next_ns = 0

    def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
        due_ns = max(self.next_ns, now_ns)
        if max_delay is not None and due_ns - now_ns > round(max_delay * SECOND):
            return False, due_ns - now_ns
        self.next_ns = due_ns + SECOND
        return True, due_ns - now_ns


class Window(FakeLimiter):
    """`limit` requests in each second."""

    def __init__(self, timeline: Timeline, limit: int = 1) -> None:
        super().__init__(timeline)
        self.limit = limit
        self.counts: dict[int, int] = {}

    def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
        window = now_ns // SECOND
        if self.counts.get(window, 0) >= self.limit:
            return False, (window + 1) * SECOND - now_ns
        self.counts[window] = self.counts.get(window, 0) + 1
        return True, 0

    def fill(self) -> None:
        self.counts[self.store.now_ns() // SECOND] = self.limit


class Slots(FakeLimiter):
    """A slot is free when another caller gives one back, and otherwise after half a minute."""

    may_free_early = True

    def __init__(self, timeline: Timeline, free: int = 0) -> None:
        super().__init__(timeline)
        self.free = free

    def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
        if self.free == 0:
            return False, 30 * SECOND
        self.free -= 1
        return True, 0


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    timeline = Timeline()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=timeline.sleep))
    monkeypatch.setattr(waiting, "host_ns", lambda: timeline.now_ns + 5 * SECOND)
    monkeypatch.setattr(asyncio, "sleep", timeline.sleep_async)
    return timeline


@pytest.fixture(autouse=True)
def queue_ends_empty() -> Iterator[None]:
    assert waiting._queues == {}
    yield
    assert waiting._queues == {}


@pytest.fixture(params=["sync", "async"])
def wait(request: pytest.FixtureRequest) -> Callable[..., bool]:
    """`wait`, and `wait_async` in its own loop, with the same signature."""

    def call(limiter: Any, caller: object = "a", timeout: float | None = None, jitter: float = 0.0) -> bool:
        if request.param == "sync":
            return waiting.wait(limiter, "k", caller, timeout, jitter)
        return asyncio.run(waiting.wait_async(limiter, "k", caller, timeout, jitter))

    return call


class Waiters:
    """Concurrent calls of `wait` in threads and of `wait_async` in the loop of one other thread."""

    def __init__(self, limiter: Any) -> None:
        self.limiter = limiter
        self.results: dict[object, bool] = {}
        self.threads: list[threading.Thread] = []
        self.tasks: dict[object, asyncio.Task[None]] = {}
        self.loop = asyncio.new_event_loop()
        self.runner = threading.Thread(target=self.loop.run_forever)
        self.runner.start()

    def thread(self, caller: object, timeout: float | None = None) -> None:
        def work() -> None:
            self.results[caller] = waiting.wait(self.limiter, "k", caller, timeout, 0.0)

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()

    def task(self, caller: object, timeout: float | None = None) -> None:
        async def work() -> None:
            self.results[caller] = await waiting.wait_async(self.limiter, "k", caller, timeout, 0.0)

        async def start() -> None:
            self.tasks[caller] = asyncio.create_task(work())

        asyncio.run_coroutine_threadsafe(start(), self.loop).result(DEADLINE_S)

    def cancel(self, caller: object) -> None:
        async def end() -> None:
            self.tasks[caller].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.tasks[caller]

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(DEADLINE_S)

    def finish(self) -> None:
        async def gather() -> None:
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(gather(), self.loop).result(DEADLINE_S)
            for thread in self.threads:
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.runner.join(DEADLINE_S)
            self.loop.close()


@pytest.fixture
def make_waiters(timeline: Timeline) -> Iterator[Callable[[Any], Waiters]]:
    made: list[Waiters] = []

    def make(limiter: Any) -> Waiters:
        made.append(Waiters(limiter))
        return made[-1]

    yield make
    timeline.gate.set()
    for waiters in made:
        if waiters.runner.is_alive():
            waiters.finish()


# Refused arguments


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), float("inf"), -float("inf"), "5", b"", [1]])
def test_invalid_timeouts_are_refused(timeline: Timeline, wait: Callable[..., bool], timeout: Any) -> None:
    limiter = Booking(timeline)
    with pytest.raises(ValueError, match="timeout is None or a length of time of at least 0") as caught:
        wait(limiter, timeout=timeout)
    assert repr(timeout) in str(caught.value)
    assert limiter.attempts == []


@pytest.mark.parametrize("jitter", [-0.1, 1, 1.0, 2, float("nan"), float("inf"), None, "0.1"])
def test_invalid_jitters_are_refused(timeline: Timeline, wait: Callable[..., bool], jitter: Any) -> None:
    limiter = Booking(timeline)
    with pytest.raises(ValueError, match="jitter is a number from 0 to below 1") as caught:
        wait(limiter, jitter=jitter)
    assert repr(jitter) in str(caught.value)
    assert limiter.attempts == []


@pytest.mark.parametrize("timeout", ["2s", "2000 ms", 2, 2.0, timedelta(seconds=2)], ids=repr)
def test_timeout_takes_durations_of_every_form(timeline: Timeline, wait: Callable[..., bool], timeout: Any) -> None:
    limiter = Booking(timeline)
    assert wait(limiter, timeout=timeout)
    assert limiter.patience == [2.0]


@pytest.mark.parametrize("timeout", [1e300, 10**400, sys.float_info.max])
def test_timeout_may_exceed_the_clocks_range(timeline: Timeline, wait: Callable[..., bool], timeout: float) -> None:
    limiter = Booking(timeline)
    assert [wait(limiter, timeout=timeout) for _ in range(2)] == [True, True]
    assert limiter.patience == [None, None]


# Limiters that book ahead


def test_booked_request_sleeps_until_it_is_due(timeline: Timeline, wait: Callable[..., bool]) -> None:
    limiter = Booking(timeline)
    assert [wait(limiter, caller) for caller in "abc"] == [True, True, True]
    assert timeline.sleeps == [1.0, 1.0]
    assert timeline.now_ns == 2 * SECOND
    assert limiter.attempts == limiter.charged == ["a", "b", "c"]


def test_sleep_that_ends_early_continues(timeline: Timeline, wait: Callable[..., bool]) -> None:
    limiter = Booking(timeline)
    wait(limiter, "a")
    timeline.part = 0.5
    assert wait(limiter, "b")
    assert timeline.sleeps[:3] == [1.0, 0.5, 0.25]
    assert timeline.now_ns == SECOND
    assert limiter.attempts == ["a", "b"]


def test_request_due_after_its_timeout_is_not_booked(timeline: Timeline, wait: Callable[..., bool]) -> None:
    limiter = Booking(timeline)
    limiter.next_ns = 3 * SECOND
    assert not wait(limiter, "a", timeout=2.999)
    assert not wait(limiter, "a", timeout=0)
    assert timeline.sleeps == []
    assert limiter.charged == []
    assert wait(limiter, "b", timeout=3)
    assert timeline.now_ns == 3 * SECOND


def test_timeout_of_0_allows_only_immediate_requests(timeline: Timeline, wait: Callable[..., bool]) -> None:
    for limiter in Booking(timeline), Window(timeline):
        assert [wait(limiter, timeout=0) for _ in range(3)] == [True, False, False]
        assert timeline.sleeps == []


def test_full_queue_is_tried_again_when_it_has_room(timeline: Timeline, wait: Callable[..., bool]) -> None:
    class Queue(Booking):
        """Two places; a denied caller learns when one is free."""

        def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
            if self.next_ns - now_ns > SECOND:
                return False, self.next_ns - now_ns - SECOND
            return super().decide(now_ns, max_delay)

    limiter = Queue(timeline)
    limiter.next_ns = 4 * SECOND
    assert not wait(limiter, "a", timeout=2)
    assert timeline.sleeps == []
    assert wait(limiter, "b", timeout=4)
    assert timeline.sleeps == [3.0, 1.0]
    assert not wait(limiter, "c", timeout=0.5)
    assert limiter.charged == ["b"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), ValueError("a bug elsewhere"), GeneratorExit()])
@pytest.mark.parametrize("make", [Booking, Window])
def test_exception_during_the_sleep_gives_the_permits_back(
    timeline: Timeline, make: Callable[[Timeline], FakeLimiter], error: BaseException
) -> None:
    limiter = make(timeline)
    waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
    timeline.interrupt = error
    with pytest.raises(type(error)):
        waiting.wait(limiter, "k", "b", None, 0.0)  # type: ignore[arg-type]
    assert limiter.charged == ["a"]


@pytest.mark.parametrize("make", [Booking, Window])
def test_cancelled_task_gives_its_permits_back(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters], make: Callable[[Timeline], FakeLimiter]
) -> None:
    limiter = make(timeline)
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    waiters.task("a")
    waiters.task("b")
    until(lambda: len(timeline.sleeps) == 1)
    waiters.cancel("b")
    assert limiter.charged == ["a"]
    waiters.finish()
    assert waiters.results == {"a": True}


def test_dropped_coroutine_gives_its_permits_back(timeline: Timeline) -> None:
    limiter = Booking(timeline)
    limiter.next_ns = SECOND
    timeline.gate.clear()

    async def begin_and_drop() -> None:
        coroutine = waiting.wait_async(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
        coroutine.send(None)
        assert limiter.charged == ["a"]
        coroutine.close()

    asyncio.run(begin_and_drop())
    assert limiter.charged == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError()])
def test_store_closed_during_a_wait_does_not_hide_the_waits_error(timeline: Timeline, error: BaseException) -> None:
    limiter = Booking(timeline)
    limiter.next_ns = SECOND
    timeline.interrupt = error
    timeline.gate.clear()

    def close() -> None:
        until(lambda: timeline.sleeps)
        limiter.store.closed = True
        timeline.gate.set()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(type(error)):
        waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
    closer.join(DEADLINE_S)


# Jitter


@pytest.mark.parametrize("make", [Booking, Window])
@pytest.mark.parametrize(
    ("share", "timeout", "room", "slept"),
    [
        (0.0, None, 0.1, 1.0),
        (0.5, None, 0.1, 1.05),
        (1.0, None, 0.1, 1.1),
        (0.5, 1.2, 0.1, 1.05),
        (0.5, 1.04, 0.04, 1.02),
        (1.0, 1.04, 0.04, 1.04),
        (1.0, 1.0, None, 1.0),
    ],
)
def test_w23_jitter_makes_a_sleep_longer_and_never_too_short(
    timeline: Timeline,
    wait: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Timeline], FakeLimiter],
    share: float,
    timeout: float | None,
    room: float | None,
    slept: float,
) -> None:
    limiter = make(timeline)
    bounds = []

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return low + share * (high - low)

    monkeypatch.setattr(random, "uniform", uniform)
    assert wait(limiter, "a", jitter=0.1)
    assert bounds == []
    assert wait(limiter, "b", timeout=timeout, jitter=0.1)
    assert bounds == ([] if room is None else [(0, pytest.approx(room))])
    assert timeline.sleeps == [pytest.approx(slept)]
    assert timeline.now_ns >= SECOND


def test_random_jitter_stays_within_its_bounds(
    timeline: Timeline, wait: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two draws of other seeds may round to the same nanosecond.
    monkeypatch.setattr(waiting, "random", random.Random(0))
    limiter = Booking(timeline)
    wait(limiter)
    for _ in range(200):
        limiter.next_ns = timeline.now_ns + SECOND
        assert wait(limiter, jitter=0.1)
    assert all(1.0 <= seconds <= 1.1 for seconds in timeline.sleeps)
    # Waiters for one moment are spread: no two go together.
    assert len(set(timeline.sleeps)) == 200
    assert min(timeline.sleeps) < 1.02 < 1.08 < max(timeline.sleeps)


def test_jitter_spreads_waits_whose_timeout_is_near(
    timeline: Timeline, wait: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "random", random.Random(0))
    for make in (Booking, Window):
        limiter: Any = make(timeline)
        timeline.sleeps.clear()
        for _ in range(200):
            limiter.next_ns = timeline.now_ns = (timeline.now_ns // SECOND + 1) * SECOND
            assert limiter.reserve("k", "before", None).delay_ns == 0
            assert wait(limiter, timeout=1.02, jitter=0.1)
        assert all(1.0 <= seconds <= 1.02 for seconds in timeline.sleeps)
        assert len(set(timeline.sleeps)) == 200
        assert min(timeline.sleeps) < 1.002 < 1.018 < max(timeline.sleeps)


# The queue of waiters


def test_waiter_with_a_rate_of_its_own_is_not_behind_those_of_another_rate(timeline: Timeline) -> None:
    class Tiers(Window):
        """Requests with a rate are allowed at once."""

        def reserve(self, key: object, cost: object, max_delay: float | None, **tier: object) -> FakeReservation:
            if tier:
                tiers.append(tier)
                return FakeReservation(self, cost, True, 0)
            return super().reserve(key, cost, max_delay)

    tiers: list[dict[str, object]] = []
    limiter = Tiers(timeline)
    limiter.fill()
    timeline.gate.clear()
    waiter = threading.Thread(target=waiting.wait, args=(limiter, "k", "free", None, 0.0))
    waiter.start()
    until(lambda: timeline.sleeps)
    assert waiting.wait(limiter, "k", "gold", None, 0.0, "5/minute", 7)  # type: ignore[arg-type]
    assert asyncio.run(waiting.wait_async(limiter, "k", "gold", None, 0.0, Rate(5, 60)))  # type: ignore[arg-type]
    assert queued() == 1
    assert tiers == [{"rate": "5/minute", "burst": 7}, {"rate": Rate(5, 60)}]
    timeline.gate.set()
    waiter.join(DEADLINE_S)
    assert limiter.charged == ["free"]


@pytest.mark.parametrize("kinds", [["thread"], ["task"], ["thread", "task"], ["task", "task", "thread"]])
def test_waiters_get_permits_in_order_of_arrival(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters], kinds: list[str]
) -> None:
    limiter = Window(timeline)
    limiter.fill()
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    for caller in range(20):
        getattr(waiters, kinds[caller % len(kinds)])(caller)
        until(lambda wanted=caller + 1: queued() == wanted)
    # Only the first waiter has tried; the others don't poll.
    assert limiter.attempts == [0]
    assert len(timeline.sleeps) == 1
    timeline.gate.set()
    waiters.finish()
    assert limiter.charged == list(range(20))
    assert waiters.results == dict.fromkeys(range(20), True)
    # Each waiter tries when it becomes the first and after its sleep, and not in between.
    assert limiter.attempts == [caller for caller in range(20) for _ in range(2)]
    assert timeline.sleeps == [1.0] * 20


def test_permits_that_are_free_together_are_granted_together(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters]
) -> None:
    limiter = Window(timeline, limit=5)
    limiter.fill()
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    for caller in range(20):
        (waiters.thread if caller % 2 else waiters.task)(caller)
        until(lambda wanted=caller + 1: queued() == wanted)
    timeline.gate.set()
    waiters.finish()
    assert limiter.charged == list(range(20))
    assert timeline.sleeps == [1.0] * 4


def test_loops_of_several_threads_share_a_queue(timeline: Timeline, make_waiters: Callable[[Any], Waiters]) -> None:
    limiter = Window(timeline)
    limiter.fill()
    several = [make_waiters(limiter) for _ in range(4)]
    timeline.gate.clear()
    for caller in range(20):
        several[caller % 4].task(caller)
        until(lambda wanted=caller + 1: queued() == wanted)
    timeline.gate.set()
    for waiters in several:
        waiters.finish()
    assert limiter.charged == list(range(20))


@pytest.mark.parametrize("kind", ["thread", "task"])
def test_newcomer_does_not_overtake(timeline: Timeline, make_waiters: Callable[[Any], Waiters], kind: str) -> None:
    limiter = Window(timeline)
    limiter.fill()
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    getattr(waiters, kind)("first")
    until(lambda: timeline.sleeps)
    assert queued() == 1
    # A permit is free before the first waiter wakes up.
    timeline.now_ns = SECOND
    getattr(waiters, kind)("second")
    until(lambda: queued() == 2)
    getattr(waiters, kind)("in a hurry", timeout=0)
    until(lambda: "in a hurry" in waiters.results)
    assert limiter.attempts == ["first"]
    timeline.gate.set()
    waiters.finish()
    assert limiter.charged == ["first", "second"]
    assert not waiters.results["in a hurry"]


def test_queue_is_for_one_key_of_one_limiter(timeline: Timeline) -> None:
    limiter = Window(timeline)
    limiter.fill()
    timeline.gate.clear()
    first = threading.Thread(target=waiting.wait, args=(limiter, "k", "first", None, 0.0))
    first.start()
    until(lambda: queued() == 1)
    other_name, other_store = Window(timeline), Window(timeline)
    other_name.store, other_name.name = limiter.store, "other"
    for other, key in (limiter, b"k"), (limiter, "l"), (limiter, ["k"]), (other_name, "k"), (other_store, "k"):
        with contextlib.suppress(KeyError):
            other.counts.pop(0)
        assert waiting.wait(other, key, "other", 0, 0.0)  # type: ignore[arg-type]
    # Another object with the same name is the same limit.
    same = Window(timeline)
    same.store = limiter.store
    assert not waiting.wait(same, "k", "same", 0, 0.0)  # type: ignore[arg-type]
    timeline.gate.set()
    first.join(DEADLINE_S)
    assert limiter.charged[-1] == "first"


def test_list_of_keys_is_a_key(timeline: Timeline) -> None:
    limiter = Window(timeline)
    assert [waiting.wait(limiter, ["a", ("b", 1)], caller, None, 0.0) for caller in range(3)] == [True] * 3  # type: ignore[arg-type]
    assert timeline.sleeps == [1.0, 1.0]


@pytest.mark.parametrize("caller", ["first", "second", "third"])
def test_task_cancelled_in_the_queue_lets_the_others_move_up(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters], caller: str
) -> None:
    limiter = Window(timeline)
    limiter.fill()
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    for number, name in enumerate(["first", "second", "third"]):
        waiters.task(name)
        until(lambda wanted=number + 1: queued() == wanted)
    waiters.thread("last")
    until(lambda: queued() == 4)
    waiters.cancel(caller)
    assert queued() == 3
    timeline.gate.set()
    waiters.finish()
    assert limiter.charged == [name for name in ["first", "second", "third", "last"] if name != caller]


def test_thread_interrupted_in_the_queue_lets_the_others_move_up(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters]
) -> None:
    limiter = Window(timeline)
    limiter.fill()
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    errors = []

    def interrupted() -> None:
        try:
            waiting.wait(limiter, "k", "first", None, 0.0)  # type: ignore[arg-type]
        except KeyboardInterrupt as error:
            errors.append(error)

    first = threading.Thread(target=interrupted)
    first.start()
    until(lambda: queued() == 1)
    waiters.thread("second")
    until(lambda: queued() == 2)
    timeline.interrupt = KeyboardInterrupt()
    timeline.gate.set()
    first.join(DEADLINE_S)
    waiters.finish()
    assert len(errors) == 1
    assert limiter.charged == ["second"]


def test_first_waiter_gives_up_as_soon_as_its_timeout_is_certain(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters]
) -> None:
    limiter = Window(timeline)
    limiter.fill()
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    waiters.thread("first", timeout=1.5)
    until(lambda: queued() == 1)
    waiters.thread("second")
    until(lambda: queued() == 2)
    # Another process takes the permit for which the first waiter sleeps.
    limiter.counts[1] = 1
    timeline.gate.set()
    waiters.finish()
    assert waiters.results == {"first": False, "second": True}
    assert limiter.attempts == ["first", "first", "second", "second"]
    assert limiter.charged == ["second"]


def test_first_waiter_sleeps_again_if_another_process_was_faster(timeline: Timeline, wait: Callable[..., bool]) -> None:
    limiter = Window(timeline)
    limiter.counts = dict.fromkeys([0, 1, 2], 1)
    assert wait(limiter, timeout=3)
    assert timeline.sleeps == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["thread", "task"])
def test_waiter_in_the_queue_waits_no_longer_than_its_timeout(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters], kind: str
) -> None:
    limiter = Window(timeline)
    limiter.fill()
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    waiters.thread("first")
    until(lambda: queued() == 1)
    # This waiter's sleep is a real one; the test checks only that it ends.
    getattr(waiters, kind)("second", timeout=0.001)
    until(lambda: queued() == 2 or timeline.now_ns)
    timeline.now_ns += SECOND // 500
    until(lambda: "second" in waiters.results)
    assert queued() == 1
    timeline.gate.set()
    waiters.finish()
    assert waiters.results == {"first": True, "second": False}
    assert limiter.charged == ["first"]


def test_task_of_a_closed_loop_blocks_no_other_waiter(timeline: Timeline, wait: Callable[..., bool]) -> None:
    limiter = Window(timeline)
    limiter.fill()
    timeline.gate.clear()
    loop = asyncio.new_event_loop()
    abandoned = loop.create_task(waiting.wait_async(limiter, "k", "abandoned", None, 0.0))  # type: ignore[arg-type]
    loop.run_until_complete(until_async(lambda: queued() == 1))
    loop.close()
    timeline.gate.set()
    limiter.counts.clear()
    assert wait(limiter, "next", timeout=0)
    assert limiter.charged == ["next"]
    assert waiting._queues == {}
    abandoned._log_destroy_pending = False  # type: ignore[attr-defined]
    abandoned.get_coro().close()  # type: ignore[union-attr]


def test_waiter_denied_while_others_join_goes_behind_them(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters]
) -> None:
    class Slow(Window):
        def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
            if self.attempts == ["slow"]:
                self.fill()
                waiters.thread("quick")
                until(lambda: queued() == 1)
            return super().decide(now_ns, max_delay)

    limiter = Slow(timeline)
    waiters = make_waiters(limiter)
    timeline.gate.clear()
    waiters.thread("slow")
    until(lambda: queued() == 2)
    timeline.gate.set()
    waiters.finish()
    assert limiter.charged == ["quick", "slow"]
    # The slow waiter slept when it had become the first, and not before.
    assert timeline.sleeps == [1.0, 1.0]


def test_frozen_clock_does_not_prolong_a_sleep(timeline: Timeline, wait: Callable[..., bool]) -> None:
    """The store follows ``time.time``, the sleep the host's clock."""
    limiter = Booking(timeline)
    limiter.next_ns = SECOND
    limiter.store.now_ns = lambda: 0  # type: ignore[method-assign]
    assert wait(limiter)
    assert timeline.sleeps == [1.0]


def test_sleep_is_never_longer_than_the_platform_allows(timeline: Timeline) -> None:
    limiter = Booking(timeline)
    limiter.next_ns = 10**10 * SECOND
    timeline.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
    assert timeline.sleeps == [86_400]


def test_closed_store_ends_every_wait(timeline: Timeline) -> None:
    for make in Booking, Window:
        limiter = make(timeline)
        limiter.reserve("k", "before", None)
        sleeping = len(timeline.sleeps)
        timeline.gate.clear()
        errors: list[Exception] = []

        def work(limiter: Any = limiter, errors: list[Exception] = errors) -> None:
            try:
                waiting.wait(limiter, "k", "a", None, 0.0)
            except StoreClosed as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda sleeping=sleeping: len(timeline.sleeps) - sleeping + max(queued() - 1, 0) == 3)
        limiter.store.closed = True
        timeline.gate.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(errors) == 3


def test_error_of_the_limiter_reaches_the_caller(timeline: Timeline, wait: Callable[..., bool]) -> None:
    class Refusing(FakeLimiter):
        def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
            raise TypeError("not a key")

    with pytest.raises(TypeError, match="not a key"):
        wait(Refusing(timeline))


def test_denial_without_a_time_causes_no_busy_loop(timeline: Timeline, wait: Callable[..., bool]) -> None:
    class Vague(FakeLimiter):
        def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
            return len(self.attempts) > 3, 0

    assert wait(Vague(timeline))
    assert timeline.sleeps == [0.001] * 3


# Permits that are released early


class Pauses:
    """Records how long `waiting` waits for its events, and calls `then` meanwhile."""

    def __init__(self, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float | None] = []
        self.then: Callable[[], object] = lambda: None
        pauses = self

        class Wakeup:
            def __init__(self) -> None:
                self.is_set = False

            def set(self) -> None:
                self.is_set = True

            def clear(self) -> None:
                self.is_set = False

            def wait(self, timeout_s: float | None) -> None:
                pauses.seconds.append(timeout_s)
                pauses.then()
                if not self.is_set and timeout_s is not None:
                    timeline.now_ns += round(timeout_s * SECOND)

        monkeypatch.setattr(waiting, "Wakeup", Wakeup)


def test_slot_is_polled_at_growing_intervals(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = Slots(timeline)
    pauses = Pauses(timeline, monkeypatch)
    assert not waiting.wait(limiter, "k", "a", 0.2, 0.0)  # type: ignore[arg-type]
    assert pauses.seconds == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05, 0.037])
    assert timeline.sleeps == []

    def give_back_in_another_process() -> None:
        limiter.free = len(pauses.seconds) > 12

    pauses.then = give_back_in_another_process
    assert waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
    assert len(pauses.seconds) == 13


def test_end_of_a_lease_precedes_the_next_poll(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lease(Slots):
        def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
            left_ns = SECOND // 400 - now_ns
            return left_ns <= 0, max(left_ns, 0)

    pauses = Pauses(timeline, monkeypatch)
    assert waiting.wait(Lease(timeline), "k", "a", None, 0.0)  # type: ignore[arg-type]
    assert pauses.seconds == pytest.approx([0.001, 0.0015])


def test_polls_for_a_slot_have_jitter(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(timeline, monkeypatch)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    assert not waiting.wait(Slots(timeline), "k", "a", 0.005, 0.5)  # type: ignore[arg-type]
    assert pauses.seconds == pytest.approx([0.0015, 0.003, 0.0005])


def test_slot_released_in_this_process_wakes_the_first_waiter(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = Slots(timeline)
    pauses = Pauses(timeline, monkeypatch)

    def give_back() -> None:
        limiter.free = 1
        waiting.released(limiter, "another key")  # type: ignore[arg-type]
        waiting.released(limiter, "k")  # type: ignore[arg-type]

    pauses.then = give_back
    assert waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
    # Its pause had not ended: the release woke it.
    assert timeline.now_ns == 0
    assert limiter.attempts == ["a", "a"]
    waiting.released(limiter, "k")  # type: ignore[arg-type]


def test_waiter_woken_in_vain_pauses_again(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = Slots(timeline)
    pauses = Pauses(timeline, monkeypatch)

    def give_back_for_another_process() -> None:
        if len(pauses.seconds) == 2:
            waiting.released(limiter, "k")  # type: ignore[arg-type]

    pauses.then = give_back_for_another_process
    assert not waiting.wait(limiter, "k", "a", 0.009, 0.0)  # type: ignore[arg-type]
    assert pauses.seconds == pytest.approx([0.001, 0.002, 0.004, 0.004])


@pytest.mark.parametrize("kinds", [["thread"], ["task"], ["task", "thread"]])
def test_released_slots_go_to_waiters_in_order(
    timeline: Timeline, make_waiters: Callable[[Any], Waiters], kinds: list[str]
) -> None:
    limiter = Slots(timeline)
    waiters = make_waiters(limiter)
    for caller in range(20):
        getattr(waiters, kinds[caller % len(kinds)])(caller)
        until(lambda wanted=caller + 1: queued() == wanted)
    for given_back in range(20):
        limiter.free += 1
        waiting.released(limiter, "k")  # type: ignore[arg-type]
        until(lambda wanted=19 - given_back: queued() == wanted)
    waiters.finish()
    assert limiter.charged == list(range(20))
    assert set(limiter.attempts[: limiter.attempts.index(1)]) == {0}


# Interrupts


def test_interrupt_at_any_moment_loses_nothing(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at each moment at which Python checks for signals, one after the other, except in the waits themselves."""

    def booked() -> FakeLimiter:
        limiter = Booking(timeline)
        limiter.next_ns = timeline.now_ns + SECOND
        return limiter

    def denied() -> FakeLimiter:
        limiter = Window(timeline)
        limiter.fill()
        return limiter

    def behind_another() -> FakeLimiter:
        limiter = denied()
        timeline.gate.clear()
        first = threading.Thread(target=waiting.wait, args=(limiter, "k", "first", None, 0.0))
        first.start()
        until(lambda: queued() == 1)

        def let_it_go() -> None:
            timeline.gate.set()
            first.join(DEADLINE_S)

        pauses.then = let_it_go
        endings.append(let_it_go)
        return limiter

    endings: list[Callable[[], None]] = []
    pauses = Pauses(timeline, monkeypatch)
    for make, steps in (
        (booked, {"attempt", "pause_until_due", "left_s"}),
        (denied, {"attempt", "is_first", "pause_until_due", "leave", "_wake_first"}),
        (behind_another, {"attempt", "is_first", "queue_up", "leave", "_wake_first"}),
    ):
        moments: list[str] = []
        returned = False
        while not returned:
            limiter = make()
            try:
                with interrupt_at(len(moments), moments):
                    assert waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
                    returned = True
            except KeyboardInterrupt:
                pass
            while endings:
                endings.pop()()
            assert waiting._queues == {}, moments
            assert limiter.charged.count("a") == returned, moments
            assert run_in_thread(lock_is_free), moments
        assert steps <= set(moments)


@contextlib.contextmanager
def interrupt_at(number: int, moments: list[str]) -> Iterator[None]:
    """Raises KeyboardInterrupt in `waiting` at the moment of that number; appends the moments' functions to `moments`.

    Python checks for signals when a function begins and when a call of a C function returns.
    """
    left = number

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if frame.f_code.co_filename == waiting.__file__ and event in ("call", "c_return"):
            left -= 1
            if left == -1:
                moments.append(frame.f_code.co_name)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_signal_handler_gives_back_at_any_moment(timeline: Timeline) -> None:
    """A handler that releases a permit while its own thread is about to wait for one, or wakes."""
    limiter = Slots(timeline)
    moments: set[str] = set()
    answers: list[bool] = []

    def handle(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_filename in (waiting.__file__, threading.__file__) and event in ("call", "c_return"):
            moments.add(frame.f_code.co_name)
            waiting.released(limiter, "k")  # type: ignore[arg-type]
            limiter.free = len(limiter.attempts) > 3

    def call() -> None:
        sys.setprofile(handle)
        try:
            answers.append(waiting.wait(limiter, "k", "a", None, 0.0))  # type: ignore[arg-type]
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert answers == [True], moments
    assert {"clear", "wait"} <= moments


def test_a_wakeup_is_kept_until_the_wait() -> None:
    event = waiting.Wakeup()
    event.set()
    event.set()
    event.wait(None)
    event.set()
    event.clear()
    event.clear()
    event.wait(-1)
    event.wait(0.001)


# Replaced functions


def test_sleep_is_looked_up_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that replaces ``time.sleep``, as gevent does, replaces it here, too."""
    limiter = Booking(Timeline())
    limiter.next_ns = SECOND

    class Slept(Exception):
        pass

    def sleep(seconds: float) -> Awaitable[None]:
        raise Slept

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(Slept):
        waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
    with pytest.raises(Slept):
        asyncio.run(waiting.wait_async(limiter, "k", "a", None, 0.0))  # type: ignore[arg-type]
    assert limiter.charged == []


# Real limiters; waits move their clock


LIMITERS: Final[dict[str, Callable[[Store], Any]]] = {
    "token bucket": lambda store: TokenBucket(store, "api", "1/second", burst=1),
    "token bucket with intervals": lambda store: TokenBucket(store, "api", "1/second", burst=1, refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "api", "1/second", capacity=50),
    "full leaky bucket": lambda store: LeakyBucket(store, "api", "1/second", capacity=3),
    "gap": lambda store: MinInterval(store, "api", "1s"),
    "fixed window": lambda store: FixedWindow(store, "api", "1/second"),
    "staggered window": lambda store: FixedWindow(store, "api", "1/second", align="stagger"),
    "sliding window": lambda store: SlidingWindow(store, "api", "1/second"),
    "bucketed window": lambda store: BucketedWindow(store, "api", "1/second", buckets=5),
    "log": lambda store: SlidingLog(store, "api", "1/second", keys=8),
}


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("a wait by a manual clock must not sleep")

    async def sleep_async(seconds: float) -> None:
        assert seconds == 0
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0)

    monkeypatch.setattr(waiting, "time", SimpleNamespace(**(dict(vars(time)) | {"sleep": sleep})))
    monkeypatch.setattr(asyncio, "sleep", sleep_async)


@pytest.fixture(params=LIMITERS)
def limiter(request: pytest.FixtureRequest, clock: ManualClock, no_sleep: None) -> Iterator[Any]:
    with Store.private(keys=100, clock=clock) as store:
        yield LIMITERS[request.param](store)


def wait_by(limiter: Any, kind: str, *arguments: Any, **options: Any) -> bool:
    if kind == "sync":
        result = limiter.wait(*arguments, **options)
    else:
        result = asyncio.run(awaited(limiter.wait_async(*arguments, **options)))
    assert isinstance(result, bool)
    return result


async def awaited(awaitable: Awaitable[bool]) -> bool:
    return await awaitable


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_wait_moves_a_manual_clock_to_when_it_is_due(limiter: Any, clock: ManualClock, kind: str) -> None:
    times = []
    for _ in range(10):
        assert wait_by(limiter, kind, "k")
        times.append(clock.now())
    # The first passes at once, then one a second on average, which a sliding window may round up.
    assert times[0] == 1000.0
    assert times == sorted(times)
    assert 1008.0 < times[-1] <= 1018.0
    assert not isinstance(limiter, (TokenBucket, LeakyBucket, SlidingLog)) or times[-1] in (1009.0, 1009.2)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_wait_beyond_its_timeout_moves_and_charges_nothing(limiter: Any, clock: ManualClock, kind: str) -> None:
    assert wait_by(limiter, kind, "k")
    at = clock.now()
    delay_ns = limiter.reserve("k", 1, 0).delay_ns
    assert 0 < delay_ns <= 2 * SECOND
    state = limiter.peek("k").reset_after_ns
    assert not wait_by(limiter, kind, "k", timeout=0)
    assert not wait_by(limiter, kind, "k", timeout=(delay_ns - 1) / SECOND)
    assert clock.now() == at
    assert limiter.peek("k").reset_after_ns == state
    assert wait_by(limiter, kind, "k", timeout=delay_ns / SECOND)
    assert clock.now() == at + delay_ns / SECOND


def test_departure_beyond_the_timeout_is_refused_at_once_in_a_full_queue(clock: ManualClock, no_sleep: None) -> None:
    with Store.private(keys=1, clock=clock) as store:
        queue = LeakyBucket(store, "api", "1/second", capacity=4)
        assert [queue.reserve("k").delay for _ in range(4)] == [0, 1, 2, 3]
        assert not queue.wait("k", timeout=3.999)
        assert clock.now() == 1000.0
        # A place is free after a second, with three requests ahead.
        assert queue.wait("k", timeout=4)
        assert clock.now() == 1004.0


def test_concurrent_waiters_move_a_clock_in_order(limiter: Any, clock: ManualClock) -> None:
    """Threads and tasks at once: all get their permits, and the clock never goes back."""
    seen: list[int] = []
    move = clock.set_ns

    def set_ns(now_ns: int) -> None:
        seen.append(now_ns)
        move(now_ns)

    clock.set_ns = set_ns  # type: ignore[method-assign]

    async def tasks() -> list[bool]:
        return await asyncio.gather(*(awaited(limiter.wait_async("k")) for _ in range(10)))

    results: list[list[bool]] = []
    threads = [threading.Thread(target=lambda: results.append([limiter.wait("k")])) for _ in range(10)]
    threads.append(threading.Thread(target=lambda: results.append(asyncio.run(tasks()))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert sum(results, []) == [True] * 20  # noqa: RUF017
    assert seen == sorted(seen)
    assert 1018.0 < clock.now() <= 1038.0


def test_waiting_task_lets_others_run(limiter: Any) -> None:
    async def work() -> None:
        while True:
            await limiter.wait_async("k")

    async def main() -> None:
        worker = asyncio.create_task(work())
        await asyncio.wait([worker], timeout=0)
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_jitter_moves_a_manual_clock(
    clock: ManualClock, no_sleep: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    with Store.private(keys=1, clock=clock) as store:
        limiter = SlidingLog(store, "api", "1/second", keys=8)
        assert [wait_by(limiter, kind, "k", jitter=0.25) for _ in range(3)] == [True] * 3
        assert clock.now() == 1002.5


def test_slots_on_a_manual_clock_are_free_when_leases_end(timeline: Timeline, no_sleep: None) -> None:
    class Lease(Slots):
        def decide(self, now_ns: int, max_delay: float | None) -> tuple[bool, int]:
            return now_ns >= 30 * SECOND, 30 * SECOND - now_ns if now_ns < 30 * SECOND else 0

    clock = ManualClock()
    limiter = Lease(timeline)
    limiter.store.manual_clock = clock
    limiter.store.now_ns = clock.now_ns  # type: ignore[method-assign]
    reserve = limiter.reserve

    def reserve_at_clock(*arguments: Any) -> FakeReservation:
        timeline.now_ns = clock.now_ns()
        return reserve(*arguments)

    limiter.reserve = reserve_at_clock  # type: ignore[method-assign]
    assert not waiting.wait(limiter, "k", "a", 29, 0.0)  # type: ignore[arg-type]
    assert clock.now() == 0
    assert waiting.wait(limiter, "k", "a", None, 0.0)  # type: ignore[arg-type]
    assert clock.now() == 30.0
    assert limiter.attempts == ["a", "a", "a"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_request_that_can_never_be_allowed_does_not_wait(limiter: Any, kind: str) -> None:
    with pytest.raises(CostExceedsLimit):
        wait_by(limiter, kind, "k", 51)
    with pytest.raises(InvalidKey):
        wait_by(limiter, kind, 1.5)
    limiter.store.close()
    with pytest.raises(StoreClosed):
        wait_by(limiter, kind, "k")


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("key", "cost", "error"),
    [("k", 2, CostExceedsLimit), ("k", -1, InvalidCost), (1.0, 1, InvalidKey), ({}, 1, InvalidKey)],
)
def test_request_that_can_never_be_allowed_does_not_stand_in_line(
    key: Any, cost: int, error: type[Exception], kind: str
) -> None:
    with Store.private(keys=10) as store:
        places = Concurrency(store, "places", 1, keys=8)
        taken = [places.acquire("k"), places.acquire(1)]
        with ThreadPoolExecutor(2) as pool:
            first = [pool.submit(places.wait, its_key) for its_key in ("k", 1)]
            until(lambda: queued() == 2)
            try:
                with pytest.raises(error):
                    wait_by(places, kind, key, cost, timeout=1)
                assert queued() == 2
            finally:
                for lease in taken:
                    lease.release()
            assert all(one.result(DEADLINE_S) for one in first)


def test_booking_whose_store_closes_during_its_sleep_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.private(keys=1) as store:
        limiter = TokenBucket(store, "api", "1/hour", burst=1)
        assert limiter.wait("k")
        monkeypatch.setattr(time, "sleep", lambda seconds: store.close())
        monkeypatch.setattr(waiting._Waiter, "left_s", lambda waiter: 0.0 if store.closed else 1.0)
        with pytest.raises(StoreClosed, match="limiter 'api' was used after its store was closed"):
            limiter.wait("k")


@pytest.mark.parametrize("clock", ["monotonic", ManualClock()])
def test_wait_on_a_closed_store_names_the_limiter(clock: Any) -> None:
    with Store.private(keys=1, clock=clock) as store:
        limiter = TokenBucket(store, "api", "1/hour", burst=1)
    with pytest.raises(StoreClosed, match="limiter 'api' was used after its store was closed"):
        limiter.wait("k", timeout=0)

"""Stores with ``clock="time"``: a test that freezes or moves ``time.time`` freezes or moves their limits."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import freezegun
import pytest
import time_machine

from forebay import (
    BucketedWindow,
    ClockMismatch,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.testing import ManualClock, reset_store

DEADLINE_S = 60.0
"""A wait that takes longer fails the test."""

START = datetime(2030, 1, 1, tzinfo=UTC)


class Mover(Protocol):
    def __call__(self, seconds: float) -> None: ...


@pytest.fixture
def time_store() -> Iterator[Store]:
    with Store.private(keys=100, clock="time") as store:
        yield store


@pytest.fixture(params=["freezegun", "time-machine", "monkeypatch"])
def move(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mover]:
    """Freezes time at START; returns the function that moves it on."""
    if request.param == "freezegun":
        # Without `real_asyncio`, asyncio.sleep never ends.
        with freezegun.freeze_time(START, real_asyncio=True) as frozen:
            yield lambda seconds: frozen.move_to(frozen() + timedelta(seconds=seconds)) and None
    elif request.param == "time-machine":
        with time_machine.travel(START, tick=False) as traveller:
            yield lambda seconds: traveller.shift(seconds)
    else:
        now = [START.timestamp()]

        def move(seconds: float) -> None:
            now[0] = round(now[0] + seconds, 6)

        monkeypatch.setattr(time, "time", lambda: now[0])
        yield move


def test_limits_follow_time_time(time_store: Store, move: Mover) -> None:
    limiter = TokenBucket(time_store, "api", "1/second", burst=2)
    for _ in range(3):
        assert [limiter.allow("k") for _ in range(4)] == [True, True, False, False]
        assert limiter.hit("k").retry_after == 1.0
        move(1)
        assert [limiter.allow("k") for _ in range(2)] == [True, False]
        move(60)


MAKERS: dict[str, Callable[[Store], Any]] = {
    "bucket": lambda store: TokenBucket(store, "api", "1/hour"),
    "interval": lambda store: TokenBucket(store, "api", "1/hour", refill="interval"),
    "queue": lambda store: LeakyBucket(store, "api", "1/hour", 1),
    "gap": lambda store: MinInterval(store, "api", "1 hour"),
    "fixed": lambda store: FixedWindow(store, "api", "1/hour"),
    "first": lambda store: FixedWindow(store, "api", "1/hour", align="first"),
    "sliding": lambda store: SlidingWindow(store, "api", "1/hour"),
    "bucketed": lambda store: BucketedWindow(store, "api", "1/hour", 4, keys=8),
    "log": lambda store: SlidingLog(store, "api", "1/hour", keys=8),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_limiter_and_every_method_follows_time_time(time_store: Store, move: Mover, kind: str) -> None:
    limiter = MAKERS[kind](time_store)
    for method in (
        limiter.allow,
        limiter.hit,
        lambda key: limiter.allow_many([key])[0],
        lambda key: limiter.reserve(key, 1, 0),
        lambda key: limiter.hit(key, request_id=time.time_ns()),
        lambda key: limiter.wait(key, 1, 0),
    ):
        assert limiter.peek("k")
        assert method("k")
        # No gap between permits is longer than two periods.
        assert not limiter.peek("k")
        move(2 * 3600)


def test_windows_begin_by_the_frozen_wall_clock(time_store: Store, move: Mover) -> None:
    limiter = FixedWindow(time_store, "api", "1/hour")
    move(59 * 60)
    assert limiter.hit("k").reset_after == 60.0
    move(60)
    assert limiter.allow("k")


@pytest.mark.parametrize("gap_us", [1000, 10_000, 50_000, 250_000, 333_333, 999_999])
def test_steps_of_microseconds_are_exact(time_store: Store, move: Mover, gap_us: int) -> None:
    """A float can't hold nanoseconds since 1970: times are rounded to microseconds."""
    limiter = MinInterval(time_store, "api", timedelta(microseconds=gap_us))
    for _ in range(50):
        assert limiter.allow("k")
        assert limiter.hit("k").retry_after_ns == gap_us * 1000
        move(gap_us / 1e6)


def test_time_moved_by_one_process_moves_the_others(store_name: str, in_child: Any, move: Mover) -> None:
    with Store(store_name, keys=1, clock="time") as store:
        limiter = TokenBucket(store, "api", "1/minute")
        assert limiter.allow("k")
        # Only the child's time moves.

        def one_minute_later() -> tuple[bool, bool]:
            move(60)
            with Store(store_name, keys=1, clock="time") as again:
                return limiter.allow("k"), TokenBucket(again, "api", "1/minute").allow("k")

        assert in_child(one_minute_later) == (True, False)
        # The time is the segment's: no process falls behind another's reading.
        assert limiter.hit("k").retry_after == 60.0
        assert store.segment.now_ns() == (START + timedelta(minutes=1)).timestamp() * 1e9


def test_process_with_an_earlier_time_does_not_hold_up_others(store_name: str, in_child: Any, move: Mover) -> None:
    with Store(store_name, keys=1, clock="time") as store:
        limiter = TokenBucket(store, "api", "1/minute")
        move(60)
        assert limiter.allow("k")

        def earlier() -> list[bool]:
            with freezegun.freeze_time(START - timedelta(days=1)):
                return [limiter.allow("k") for _ in range(3)]

        assert in_child(earlier) == [False] * 3
        move(60)
        assert limiter.allow("k")


def test_time_never_goes_back(time_store: Store, move: Mover) -> None:
    limiter = TokenBucket(time_store, "api", "1/minute")
    assert limiter.allow("k")
    for earlier in (START - timedelta(seconds=1), START - timedelta(days=3000)):
        with freezegun.freeze_time(earlier) as frozen:
            assert not limiter.allow("k")
            assert limiter.hit("k").retry_after == 60.0
            # Nor does it move on before it has reached the former time.
            frozen.tick(0.5)
            assert limiter.hit("k").retry_after == 60.0
    with freezegun.freeze_time(START + timedelta(seconds=59)) as frozen:
        assert limiter.hit("k").retry_after == 1.0
        frozen.tick(1)
        assert limiter.allow("k")


def test_reset_store_begins_at_the_current_time(time_store: Store) -> None:
    limiter = TokenBucket(time_store, "api", "1/minute")
    assert limiter.allow("k")
    with freezegun.freeze_time("1999-12-31 23:59:59") as frozen:
        reset_store(time_store)
        assert [limiter.allow("k") for _ in range(2)] == [True, False]
        frozen.tick(60)
        assert [limiter.allow("k") for _ in range(2)] == [True, False]
    reset_store(time_store)
    assert [limiter.allow("k") for _ in range(2)] == [True, False]
    assert time_store.segment.now_ns() <= time.time_ns() + 1000


def test_statistics_follow_the_current_time(time_store: Store, move: Mover) -> None:
    limiter = TokenBucket(time_store, "api", "1/minute")
    log = SlidingLog(time_store, "log", "1/minute", keys=4)
    assert limiter.allow("k")
    assert log.allow("k")
    live = time_store.stats().live_keys
    assert live >= 1
    move(120)
    assert time_store.stats().live_keys == 0


def test_real_time_moves_the_store(time_store: Store) -> None:
    limiter = TokenBucket(time_store, "api", "1000000/second", burst=1)
    before = time.time()
    assert limiter.allow("k")
    while not limiter.allow("k"):
        pass
    assert before - 1e-6 <= time_store.segment.now_ns() / 1e9 <= time.time() + 1e-6


@pytest.mark.parametrize("seconds", [-1.0, -1e-3, math.nan, math.inf, -math.inf, 5e9, 1e12, 1e300])
def test_times_outside_a_segments_range_are_refused(
    time_store: Store, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    limiter = TokenBucket(time_store, "api", "1/minute")
    assert limiter.allow("k")
    now_ns = time_store.segment.now_ns()
    monkeypatch.setattr(time, "time", lambda: seconds)
    for method in (limiter.allow, limiter.hit, limiter.peek, limiter.reserve, limiter.refund, limiter.reset):
        with pytest.raises(ValueError, match=r"time\.time"):
            method("k")
    with pytest.raises(ValueError, match=r"time\.time"):
        limiter.allow_many(["k"])
    monkeypatch.undo()
    assert not limiter.allow("k")
    assert time_store.segment.now_ns() - now_ns < 60e9


@pytest.mark.parametrize("when", ["1970-01-01 00:00:01", "1980-01-01", "2038-01-20", "2085-12-31"])
def test_limits_work_at_usual_frozen_times(time_store: Store, when: str) -> None:
    limiters = [make(time_store) for make in MAKERS.values()]
    with freezegun.freeze_time(when) as frozen:
        reset_store(time_store)
        for limiter in limiters:
            limiter.reset("k")
            assert [limiter.allow("k") for _ in range(3)] == [True, False, False]
            frozen.tick(2 * 3600)
            assert limiter.allow("k")


@pytest.mark.parametrize("value", [None, "now", 1j])
def test_time_time_must_return_a_number(time_store: Store, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    limiter = TokenBucket(time_store, "api", "1/minute")
    monkeypatch.setattr(time, "time", lambda: value)
    with pytest.raises(TypeError):
        limiter.allow("k")


def test_error_of_the_clock_reaches_the_caller_and_charges_nothing(
    time_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = TokenBucket(time_store, "api", "2/hour")

    def broken() -> float:
        raise LookupError("no time")

    monkeypatch.setattr(time, "time", broken)
    for method in (limiter.allow, limiter.hit, limiter.peek, limiter.refund, limiter.reset, limiter.reserve):
        with pytest.raises(LookupError):
            method("k")
    monkeypatch.undo()
    assert limiter.peek("k").remaining == 2


def test_clock_that_closes_the_store_or_calls_the_limiter_does_no_harm(
    time_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python code runs before each decision, and the process survives it."""
    limiter = TokenBucket(time_store, "api", "100/hour")
    now = time.time()
    depth = [0]

    def nested() -> float:
        if depth[0] < 3:
            depth[0] += 1
            assert limiter.allow("k")
        return now

    monkeypatch.setattr(time, "time", nested)
    assert limiter.allow("k")
    assert limiter.peek("k").remaining == 96

    def closing() -> float:
        time_store.close()
        return now

    monkeypatch.setattr(time, "time", closing)
    limiter.allow("k")
    for method in (limiter.allow, limiter.hit, limiter.peek, lambda key: limiter.allow_many([key] * 10)):
        with pytest.raises(StoreClosed):
            method("k")


def test_threads_share_one_moving_time(time_store: Store) -> None:
    """time-machine moves the time of every thread; with freezegun, a thread's own calls get the real time."""
    limiter = TokenBucket(time_store, "api", "1/minute", burst=10)
    allowed: list[bool] = []

    def work() -> None:
        allowed.extend(limiter.allow("k") for _ in range(10))

    with time_machine.travel(START, tick=False) as traveller:
        for _ in range(3):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            traveller.shift(60)
    assert allowed.count(True) == 12


def test_timeout_ends_a_wait_in_frozen_time(time_store: Store, move: Mover) -> None:
    limiter = FixedWindow(time_store, "api", "1/hour")
    assert limiter.wait("k")
    assert not limiter.wait("k", timeout=5)
    assert limiter.peek("k").retry_after == 3600.0
    move(3600)
    assert limiter.wait("k", timeout=5)


def test_wait_for_a_booking_sleeps_in_real_time(time_store: Store, move: Mover) -> None:
    limiter = TokenBucket(time_store, "api", "100/second", burst=1)
    assert [limiter.wait("k", timeout=DEADLINE_S) for _ in range(3)] == [True] * 3
    assert [asyncio.run(limiter.wait_async("k", timeout=DEADLINE_S)) for _ in range(3)] == [True] * 3
    # The segment's time stands still, so the bookings are not due in it.
    assert limiter.hit("k").retry_after == 0.06


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_wait_while_time_stands_still_ends_with_its_timeout(time_store: Store, move: Mover, kind: str) -> None:
    limiter = FixedWindow(time_store, "api", "1/10ms")
    assert limiter.allow("k")
    if kind == "sync":
        assert not limiter.wait("k", timeout=0.05)
    else:
        assert not asyncio.run(limiter.wait_async("k", timeout=0.05))
    move(0.01)
    assert limiter.allow("k")


def test_wait_ends_when_another_thread_moves_the_time(time_store: Store, move: Mover) -> None:
    limiter = FixedWindow(time_store, "api", "1/10ms")
    assert limiter.allow("k")
    waited: list[bool] = []
    thread = threading.Thread(target=lambda: waited.append(limiter.wait("k", timeout=DEADLINE_S)))
    thread.start()
    move(0.01)
    thread.join()
    assert waited == [True]


# No boundary of the wall clock lies between.
YEARLY: list[Callable[[Store], Any]] = [
    lambda store: TokenBucket(store, "api", "1/year"),
    lambda store: MinInterval(store, "gap", "1 year"),
    lambda store: FixedWindow(store, "first", "1/year", align="first"),
    lambda store: SlidingLog(store, "log", "1/year", keys=8),
]


@pytest.mark.parametrize("when", ["1999-12-31", "2030-01-01", "2085-12-31"])
@pytest.mark.parametrize("clock", ["monotonic", "manual"])
def test_stores_with_other_clocks_ignore_frozen_time(store_name: str, clock: str, when: str) -> None:
    """freezegun freezes ``time.monotonic``, too, at the date's time."""

    def open_store() -> Store:
        return Store(store_name, keys=10, clock=ManualClock() if clock == "manual" else "monotonic")

    with freezegun.freeze_time(when) as frozen, open_store() as store:
        limiters = [make(store) for make in YEARLY]
        for limiter in limiters:
            assert [limiter.allow("k") for _ in range(3)] == [True, False, False]
        frozen.tick(2 * 3600)
        for limiter in limiters:
            assert not limiter.allow("k")
    with open_store() as store:
        for make in YEARLY:
            assert not make(store).allow("k")


KINDS: dict[str, Any] = {"monotonic": "monotonic", "manual": None, "Python (time.time)": "time"}


@pytest.mark.parametrize("opened", KINDS)
@pytest.mark.parametrize("made", KINDS)
def test_clocks_do_not_mix(store_name: str, made: str, opened: str) -> None:
    with Store(store_name, keys=1, clock=KINDS[made] or ManualClock()):
        if made == opened:
            Store(store_name, keys=1, clock=KINDS[opened] or ManualClock()).close()
            return
        with pytest.raises(ClockMismatch) as caught:
            Store(store_name, keys=1, clock=KINDS[opened] or ManualClock())
        assert caught.value.found == f"a segment with a {made} clock"
        assert caught.value.expected == f"one with a {opened} clock"
        assert made in str(caught.value)
        assert opened in str(caught.value)


@pytest.mark.parametrize("clock", ["Time", "python", "", None, 0, time.time, object])
def test_unknown_clocks_are_refused(clock: Any) -> None:
    with pytest.raises(ValueError, match=r"clock is 'monotonic', 'time' or a forebay\.testing\.ManualClock"):
        Store.private(keys=1, clock=clock)


def test_only_a_manual_clock_can_be_set(time_store: Store) -> None:
    with pytest.raises(ValueError, match="isn't moved by hand"):
        time_store.segment.set_manual_ns(5)


def test_store_with_time_time_survives_a_reboot(store_name: str, move: Mover) -> None:
    """Its time is the wall clock's, so nothing is rebased."""
    with Store(store_name, keys=1, clock="time") as store:
        assert TokenBucket(store, "api", "1/minute").allow("k")
    move(59)
    with Store(store_name, keys=1, clock="time") as store:
        limiter = TokenBucket(store, "api", "1/minute")
        assert not limiter.allow("k")
        move(1)
        assert limiter.allow("k")

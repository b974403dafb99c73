"""Charging once: a request that is repeated under one id, by whichever worker, is charged once."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import pytest

from penstock import (
    BucketedWindow,
    CostExceedsLimit,
    FixedWindow,
    InvalidKey,
    InvalidRate,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    TokenBucket,
)
from penstock.testing import ManualClock

LIMIT: Final = 100
DEADLINE_S: Final = 60.0
"""Whatever takes longer hangs."""

MAKERS: dict[str, Callable[[Store], Any]] = {
    "bucket": lambda store: TokenBucket(store, "api", "100/hour"),
    "interval": lambda store: TokenBucket(store, "api", "100/hour", refill="interval"),
    "queue": lambda store: LeakyBucket(store, "api", "100/hour", LIMIT),
    "fixed": lambda store: FixedWindow(store, "api", "100/hour"),
    "first": lambda store: FixedWindow(store, "api", "100/hour", align="first"),
    "sliding": lambda store: SlidingWindow(store, "api", "100/hour"),
    "bucketed": lambda store: BucketedWindow(store, "api", "100/hour", 4, keys=64),
    "log": lambda store: SlidingLog(store, "api", "100/hour", keys=64),
}


@pytest.fixture(params=MAKERS)
def limiter(request: pytest.FixtureRequest, store: Store) -> Any:
    return MAKERS[request.param](store)


def left(limiter: Any, key: Any = "k") -> int:
    remaining = limiter.peek(key).remaining
    assert isinstance(remaining, int)
    return remaining


def test_a_repeated_request_is_charged_once(limiter: Any) -> None:
    for _ in range(5):
        decision = limiter.hit("k", 3, request_id="r")
        assert decision.allowed
        assert (decision.limit, decision.remaining, decision.retry_after) == (LIMIT, LIMIT - 3, 0.0)
        assert decision.reset_after == limiter.peek("k").reset_after
    assert limiter.hit("k", request_id="another").remaining == LIMIT - 4
    assert limiter.hit("k", 3).remaining == LIMIT - 7


@pytest.mark.parametrize("ttl", ["90s", 90, 90.0, timedelta(seconds=90)])
def test_it_is_remembered_as_long_as_was_said_and_no_longer(limiter: Any, clock: ManualClock, ttl: Any) -> None:
    def ask() -> bool:
        return bool(limiter.hit("k", 50, request_id="r", request_ttl=ttl))

    clock.set(3600 * 500)
    assert [ask() for _ in range(3)] == [True] * 3
    clock.advance(89.999999999)
    # Being repeated doesn't make it last.
    assert [ask() for _ in range(3)] == [True] * 3
    assert 50 <= left(limiter) <= 52
    clock.advance(0.000000001)
    assert ask()
    assert left(limiter) <= 2
    assert [ask() for _ in range(3)] == [True] * 3


def test_five_minutes_if_nothing_is_said(limiter: Any, clock: ManualClock) -> None:
    clock.set(3600 * 500)
    assert limiter.hit("k", 60, request_id="r")
    clock.advance(299)
    assert limiter.hit("k", 60, request_id="r")
    clock.advance(1)
    assert not limiter.hit("k", 60, request_id="r")


def test_a_repeated_request_is_allowed_when_nothing_is_left(limiter: Any) -> None:
    assert limiter.hit("k", LIMIT, request_id="r")
    decision = limiter.hit("k", LIMIT, request_id="r")
    assert (decision.allowed, decision.remaining, decision.retry_after) == (True, 0, 0.0)
    assert not limiter.hit("k", request_id="another")
    assert not limiter.allow("k")


def test_a_denied_request_leaves_no_mark(limiter: Any, store: Store, clock: ManualClock) -> None:
    assert limiter.hit("k", LIMIT)
    live = store.stats().live_keys
    assert not limiter.hit("k", request_id="r")
    assert store.stats().live_keys == live
    limiter.refund("k", request_id="r")
    assert left(limiter) == 0
    clock.advance(2 * 3600)
    assert limiter.hit("k", 7, request_id="r").remaining == LIMIT - 7


def test_asking_for_nothing_leaves_no_mark(limiter: Any) -> None:
    assert limiter.hit("k", 0, request_id="r")
    assert limiter.hit("k", 5, request_id="r")
    assert left(limiter) == LIMIT - 5


def test_a_refund_by_id_gives_back_once(limiter: Any) -> None:
    assert limiter.hit("k", 10)
    assert limiter.hit("k", 3, request_id="r")
    limiter.refund("k", 3, request_id="unknown")
    limiter.refund("other", 3, request_id="r")
    assert left(limiter) == LIMIT - 13
    for _ in range(3):
        limiter.refund("k", 3, request_id="r")
        assert left(limiter) == LIMIT - 10
    # It is forgotten with that, so it is charged when it comes again.
    for _ in range(3):
        assert limiter.hit("k", 3, request_id="r")
        assert left(limiter) == LIMIT - 13


def test_a_refund_by_id_gives_back_no_more_than_was_charged(limiter: Any) -> None:
    assert limiter.hit("k", 10)
    assert limiter.hit("k", 3, request_id="r")
    limiter.refund("k", 13, request_id="r")
    assert left(limiter) <= LIMIT - 10


def test_a_refund_comes_too_late_when_the_request_is_forgotten(limiter: Any, clock: ManualClock) -> None:
    clock.set(3600 * 500)
    assert limiter.hit("k", 50, request_id="r", request_ttl="1s")
    clock.advance(1)
    limiter.refund("k", 50, request_id="r")
    assert left(limiter) == LIMIT - 50


def test_ids_of_different_keys_and_limiters_are_strangers(store: Store) -> None:
    limiters = [
        TokenBucket(store, "one", "100/hour"),
        TokenBucket(store, "two", "100/hour"),
        FixedWindow(store, "three", "100/hour"),
        FixedWindow(store, "three", "100/minute"),
        SlidingWindow(store, "one", "100/hour"),
        SlidingLog(store, "log", "100/hour", keys=64),
        SlidingLog(store, "log", "100/minute", keys=64),
    ]
    keys: list[Any] = ["k", "l", b"k", 1, "1", ("k",), ("k", "r"), ""]
    ids: list[Any] = ["k", "l", b"k", 1, "1", ("k",), ("k", "r"), "", 0, b"", (), -1, 2**70]
    for _ in range(2):
        for limiter, key, request_id in itertools.product(limiters, keys, ids):
            assert limiter.hit(key, request_id=request_id)
    for limiter, key in itertools.product(limiters, keys):
        assert left(limiter, key) == LIMIT - len(ids)


def test_a_mark_is_no_key_of_a_limiter(limiter: Any) -> None:
    """Whatever the id: none of these is the key that a mark could be mistaken for."""
    for request_id in ("k", ("k", "k"), ("k",), "r"):
        assert limiter.hit("k", 1, request_id=request_id)
    for key in (("k", "k"), ("k",), "r", "kk", "k\0k"):
        assert left(limiter, key) == LIMIT
        limiter.reset(key)
    before = left(limiter)
    for request_id in ("k", ("k", "k"), ("k",), "r"):
        assert limiter.hit("k", 1, request_id=request_id)
    assert left(limiter) == before


def test_ids_are_remembered_by_value(limiter: Any) -> None:
    class Text(str):
        pass

    for request_id in ("r\u00e4", Text("r\u00e4"), "".join(["r", "\u00e4"])):
        assert limiter.hit("k", request_id=request_id)
    assert left(limiter) == LIMIT - 1


def test_resetting_a_key_does_not_forget_its_requests(limiter: Any) -> None:
    assert limiter.hit("k", 5, request_id="r")
    limiter.reset("k")
    assert limiter.hit("k", 5, request_id="r")
    assert left(limiter) == LIMIT


@pytest.mark.parametrize("request_id", [1.5, [], ["r"], {}, object(), ("r", None), (("r",),), bytearray(b"r")])
def test_ids_that_are_none(limiter: Any, request_id: Any) -> None:
    with pytest.raises(InvalidKey):
        limiter.hit("k", request_id=request_id)
    with pytest.raises(InvalidKey):
        limiter.refund("k", request_id=request_id)
    with pytest.raises(InvalidKey):
        limiter.hit(1.5, request_id="r")
    assert left(limiter) == LIMIT


@pytest.mark.parametrize(
    "ttl",
    [
        *("", "soon", "5", "0s", "-1s", "1 month", "11 years", b"5s"),
        *(0, -1, 1e-10, float("nan"), float("inf"), 10**400, True, None, timedelta(0), timedelta.max),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_times_to_live_that_are_none(limiter: Any, ttl: Any) -> None:
    with pytest.raises(InvalidRate):
        limiter.hit("k", request_id="r", request_ttl=ttl)
    assert left(limiter) == LIMIT


def test_what_can_never_be_allowed_is_told_so_with_an_id_too(limiter: Any, store: Store) -> None:
    with pytest.raises(CostExceedsLimit):
        limiter.hit("k", LIMIT + 1, request_id="r")
    assert store.stats().live_keys == 0
    store.close()
    for ask in (limiter.hit, limiter.refund):
        with pytest.raises(StoreClosed):
            ask("k", request_id="r")


def test_a_request_of_another_tier_is_charged_once_too(store: Store) -> None:
    limiter = TokenBucket(store, "api", "100/hour")
    for _ in range(3):
        assert limiter.hit("k", 10, rate="1000/hour", request_id="r").remaining == 990
    limiter.refund("k", 10, rate="1000/hour", request_id="r")
    assert left(limiter) == LIMIT


def test_a_gap_between_requests_is_not_for_repeated_ones(store: Store, clock: ManualClock) -> None:
    limiter = MinInterval(store, "sms", "30s")
    assert [bool(limiter.hit("k", request_id="r")) for _ in range(3)] == [True] * 3
    assert not limiter.hit("k", request_id="other")
    clock.advance(30)
    assert limiter.hit("k", request_id="other")
    assert limiter.hit("k", request_id="r")


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_a_store_without_room_for_marks_errs_on_the_safe_side(clock: ManualClock, on_full: Any) -> None:
    """What isn't remembered is charged again; nothing is allowed that was not charged."""
    with Store.private(keys=1, on_full=on_full, clock=clock) as store:
        limiter = TokenBucket(store, "api", "1000000/hour")
        assert limiter.hit("k", 10)
        ids = range(3000)
        for request_id in ids:
            assert limiter.hit("k", request_id=request_id, request_ttl="1s")
        charged = 1_000_000 - left(limiter)
        assert charged == 10 + len(ids)
        for request_id in ids:
            assert limiter.hit("k", request_id=request_id, request_ttl="1s")
        assert charged <= 1_000_000 - left(limiter) <= charged + len(ids)


def test_an_id_takes_a_cell_until_it_is_forgotten(limiter: Any, store: Store, clock: ManualClock) -> None:
    assert limiter.hit("k")
    live = store.stats().live_keys
    for n in range(20):
        assert limiter.hit("k", request_id=n, request_ttl="1 minute")
    assert store.stats().live_keys == live + 20
    clock.advance(60)
    assert store.stats().live_keys == live


# What happens in between: time.time is asked before each step, so a test can do something there.


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets what happens at the next readings of the clock, one after the other, and how far time has moved then."""
    now = [1_800_000_000.0]
    steps: list[Callable[[], float | None] | None] = []

    def read() -> float:
        step = steps.pop(0) if steps else None
        if step:
            now[0] += step() or 0.0
        return now[0]

    def plan(*planned: Callable[[], float | None] | None) -> None:
        steps[:] = planned

    monkeypatch.setattr(time, "time", read)
    yield plan
    assert not steps


@pytest.fixture(params=MAKERS)
def shared_limiter(request: pytest.FixtureRequest, between: Callable[..., None]) -> Iterator[Any]:
    with Store.private(keys=1, clock="time") as store:
        yield MAKERS[request.param](store)


def test_two_at_once_charge_once(shared_limiter: Any, between: Callable[..., None]) -> None:
    def another() -> None:
        assert shared_limiter.hit("k", 3, request_id="r").remaining == LIMIT - 3

    # The other one comes when this one has found no mark, and has not charged yet.
    between(None, another)
    decision = shared_limiter.hit("k", 3, request_id="r")
    between()
    assert decision.allowed
    assert left(shared_limiter) == LIMIT - 3
    assert shared_limiter.hit("k", 3, request_id="r").remaining == LIMIT - 3
    assert left(shared_limiter) == LIMIT - 3


def test_the_second_of_two_finds_nothing_left_but_the_mark(shared_limiter: Any, between: Callable[..., None]) -> None:
    def another() -> None:
        assert shared_limiter.hit("k", LIMIT, request_id="r")

    between(None, another)
    assert shared_limiter.hit("k", LIMIT, request_id="r")
    between()
    assert left(shared_limiter) == 0


def test_who_gives_its_charge_back_late_takes_nothing_from_others(
    shared_limiter: Any, between: Callable[..., None]
) -> None:
    """The loser of a race is stopped before it gives back, until nothing of what it charged counts any more."""

    def another() -> None:
        between()
        assert shared_limiter.hit("k", request_id="r", request_ttl="1 day")
        between(late)

    def late() -> float:
        between(lambda: 3 * 3600.0)
        assert shared_limiter.hit("k", LIMIT)
        return 0.0

    between(None, another)
    assert shared_limiter.hit("k", request_id="r", request_ttl="1 day")
    between()
    assert not shared_limiter.allow("k")


# Processes.


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(0)`, `work(1)`, ... return in forked processes at the same time."""
    children = []
    for number in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            signal.alarm(2 * int(DEADLINE_S))
            try:
                answer = pickle.dumps((True, work(number)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            with open(writing, "wb") as pipe:
                pipe.write(answer)
            os._exit(0)
        os.close(writing)
        children.append((pid, reading))
    answers = []
    for pid, reading in children:
        with open(reading, "rb") as pipe:
            payload = pipe.read()
        os.waitpid(pid, 0)
        assert payload, "a process ended without an answer"
        answers.append(pickle.loads(payload))
    for succeeded, value in answers:
        assert succeeded, value
    return [value for _, value in answers]


def meeting(count: int) -> Callable[[int], None]:
    """A place where `count` processes wait for each other, any number of times."""
    arrivals = memoryview(mmap.mmap(-1, 8 * count)).cast("Q")

    def wait(who: int) -> None:
        arrivals[who] += 1
        mine = arrivals[who]
        deadline = time.monotonic() + DEADLINE_S
        while min(arrivals) < mine:
            assert time.monotonic() < deadline
            os.sched_yield()

    return wait


def open_limiter(kind: str, store: Store) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "bucket": lambda: TokenBucket(store, "api", "100000000/year", burst=10**6),
        "fixed": lambda: FixedWindow(store, "api", "1000000/year"),
        "first": lambda: FixedWindow(store, "api", "1000000/year", align="first"),
        "sliding": lambda: SlidingWindow(store, "api", "1000000/year"),
        "bucketed": lambda: BucketedWindow(store, "api", "1000000/year", 8, keys=4),
        "log": lambda: SlidingLog(store, "api", "100000/year", keys=4),
    }
    return makers[kind]()


KINDS: Final = ["bucket", "fixed", "first", "sliding", "bucketed", "log"]


@pytest.mark.parametrize("kind", KINDS)
def test_another_worker_knows_the_request(kind: str, store_name: str, clock: ManualClock, in_child: Any) -> None:
    with Store(store_name, keys=100, clock=clock) as store:
        limiter = open_limiter(kind, store)
        assert in_child(lambda: limiter.hit("k", 5, request_id="r").allowed)
        charged = left(limiter)

        def attach_and_ask() -> bool:
            with Store(store_name, keys=100, clock=ManualClock()) as again:
                return bool(open_limiter(kind, again).hit("k", 5, request_id="r"))

        assert in_child(attach_and_ask)
        assert limiter.hit("k", 5, request_id="r")
        assert left(limiter) == charged
        in_child(lambda: limiter.refund("k", 5, request_id="r"))
        assert left(limiter) == charged + 5
        limiter.refund("k", 5, request_id="r")
        assert left(limiter) == charged + 5


@pytest.mark.parametrize("kind", KINDS)
def test_workers_with_one_id_at_once_charge_once(kind: str, clock: ManualClock) -> None:
    workers, rounds = 3, 1500
    with Store.private(keys=20_000, clock=clock) as store:
        limiter = open_limiter(kind, store)
        meet = meeting(workers)

        def work(number: int) -> list[bool]:
            allowed = []
            for n in range(rounds):
                if n % 50 == 0:
                    meet(number)
                allowed.append(bool(limiter.hit("k", 2, request_id=n)))
            return allowed

        full = left(limiter)
        assert together(workers, work) == [[True] * rounds] * workers
        assert left(limiter) == full - 2 * rounds


def test_workers_that_race_lost_races(clock: ManualClock) -> None:
    """Else the test above would show nothing.

    Where processes take turns on one core, one must be stopped between its reading and its CAS: they go on until then.
    """
    workers, at_once = 3, 3000
    with Store.private(keys=20_000, clock=clock) as store:
        limiter = FixedWindow(store, "api", "1000000000/year")
        meet = meeting(workers)
        full = left(limiter)

        def work(number: int) -> int:
            for begin in itertools.count(0, at_once):
                meet(number)
                if begin and store.stats().total.cas_retries:
                    return begin
                meet(number)
                if number == 0:
                    # Everybody is past those ids.
                    clock.advance(1)
                meet(number)
                for n in range(begin, begin + at_once):
                    assert limiter.hit("k", request_id=n, request_ttl=1)
            raise AssertionError

        hits = together(workers, work)
        assert hits == [full - left(limiter)] * workers


@pytest.mark.parametrize("kind", ["bucket", "fixed", "log"])
def test_workers_that_refund_one_id_at_once_give_back_once(kind: str, clock: ManualClock) -> None:
    workers, rounds = 3, 300
    with Store.private(keys=20_000, clock=clock) as store:
        limiter = open_limiter(kind, store)
        meet = meeting(workers)
        full = left(limiter)

        def work(number: int) -> None:
            for n in range(rounds):
                limiter.hit("k", 2, request_id=n)
                limiter.hit("k", 1)
                meet(number)
                limiter.refund("k", 2, request_id=n)
                meet(number)

        together(workers, work)
        # What was charged without an id is still there.
        assert left(limiter) == full - workers * rounds


def test_at_the_limit_no_more_ids_are_let_in_than_there_are_permits(clock: ManualClock) -> None:
    workers, permits = 3, 40
    with Store.private(keys=20_000, clock=clock) as store:
        limiter = FixedWindow(store, "api", f"{permits}/year")
        meet = meeting(workers)

        def work(number: int) -> set[tuple[int, int]]:
            allowed = set()
            for key in range(30):
                meet(number)
                order = list(range(2 * permits))
                random.Random(key * workers + number).shuffle(order)
                allowed |= {(key, n) for n in order if limiter.hit(key, request_id=n)}
            return allowed

        allowed = set().union(*together(workers, work))
        for key in range(30):
            ids = {n for k, n in allowed if k == key}
            # Each of them was charged, and nobody else.
            assert left(limiter, key) == permits - len(ids) >= 0
            for n in ids:
                assert limiter.hit(key, request_id=n)
            assert left(limiter, key) == permits - len(ids)


@pytest.mark.parametrize("kind", ["bucket", "fixed", "log"])
def test_a_worker_killed_anywhere_leaves_no_mark_without_a_charge(kind: str, clock: ManualClock) -> None:
    kills = 60
    begun = memoryview(mmap.mmap(-1, 8)).cast("Q")
    chance = random.Random(kind)
    with Store.private(keys=500_000, clock=clock) as store:
        limiter = open_limiter(kind, store)
        full = left(limiter)

        def work() -> None:
            signal.alarm(int(DEADLINE_S))
            for _ in range(1000):
                begun[0] += 1
                limiter.hit("k", request_id=begun[0])
            signal.pause()

        for _ in range(kills):
            before = begun[0]
            pid = os.fork()
            if pid == 0:
                try:
                    work()
                finally:
                    os._exit(1)
            deadline = time.monotonic() + DEADLINE_S
            while begun[0] < before + chance.randrange(5, 50):
                assert time.monotonic() < deadline
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        ids = begun[0]
        # The client tries again whatever it got no answer for, and everything else too.
        for request_id in range(1, ids + 1):
            assert limiter.hit("k", request_id=request_id)
        assert ids <= full - left(limiter) <= ids + kills

"""A request that is repeated under one id is charged once, in whichever worker it arrives."""

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
from typing import Any, Final

import pytest
from limiter_makers import OF_A_HUNDRED

from forebay import (
    BucketedWindow,
    CostExceedsLimit,
    FixedWindow,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.testing import ManualClock

LIMIT: Final = 100
DEADLINE_S: Final = 60.0
"""A wait that takes longer fails the test."""


@pytest.fixture(params=OF_A_HUNDRED)
def limiter(request: pytest.FixtureRequest, store: Store) -> Any:
    return OF_A_HUNDRED[request.param](store)


def left(limiter: Any, key: Any = "k") -> int:
    remaining = limiter.peek(key).remaining
    assert isinstance(remaining, int)
    return remaining


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_store_without_room_for_marks_charges_again(clock: ManualClock, on_full: Any) -> None:
    """A request without a mark is charged again; no request is allowed uncharged."""
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


def test_denied_request_takes_no_cell(limiter: Any, store: Store) -> None:
    with pytest.raises(CostExceedsLimit):
        limiter.hit("k", LIMIT + 1, request_id="r")
    assert store.stats().live_keys == 0
    assert limiter.hit("k", LIMIT)
    live = store.stats().live_keys
    assert not limiter.hit("k", request_id="r")
    assert store.stats().live_keys == live


def test_id_takes_a_cell_until_it_expires(limiter: Any, store: Store, clock: ManualClock) -> None:
    assert limiter.hit("k")
    live = store.stats().live_keys
    for n in range(20):
        assert limiter.hit("k", request_id=n, request_ttl="1 minute")
    assert store.stats().live_keys == live + 20
    clock.advance(60)
    assert store.stats().live_keys == live


# Races: the store reads time.time before each step, so a test can act between two steps.


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets what happens at the next readings of the clock, in order, and by how much time has moved then."""
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


@pytest.fixture(params=OF_A_HUNDRED)
def shared_limiter(request: pytest.FixtureRequest, between: Callable[..., None]) -> Iterator[Any]:
    with Store.private(keys=1, clock="time") as store:
        yield OF_A_HUNDRED[request.param](store)


def test_two_requests_at_once_charge_once(shared_limiter: Any, between: Callable[..., None]) -> None:
    def another() -> None:
        assert shared_limiter.hit("k", 3, request_id="r").remaining == LIMIT - 3

    # The other request comes after this one has found no mark and before it charges.
    between(None, another)
    decision = shared_limiter.hit("k", 3, request_id="r")
    between()
    assert decision.allowed
    assert left(shared_limiter) == LIMIT - 3
    assert shared_limiter.hit("k", 3, request_id="r").remaining == LIMIT - 3
    assert left(shared_limiter) == LIMIT - 3


def test_second_of_two_requests_is_allowed_by_the_mark(shared_limiter: Any, between: Callable[..., None]) -> None:
    def another() -> None:
        assert shared_limiter.hit("k", LIMIT, request_id="r")

    between(None, another)
    assert shared_limiter.hit("k", LIMIT, request_id="r")
    between()
    assert left(shared_limiter) == 0


def test_late_rollback_takes_no_other_requests_permit(shared_limiter: Any, between: Callable[..., None]) -> None:
    """The loser of a race is stopped before it rolls back, until its charge no longer counts."""

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


# Processes


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(0)`, `work(1)`, ... in forked processes at the same time."""
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
        assert payload, "a process ended without a result"
        answers.append(pickle.loads(payload))
    for succeeded, value in answers:
        assert succeeded, value
    return [value for _, value in answers]


def meeting(count: int) -> Callable[[int], None]:
    """A barrier at which `count` processes wait for each other, any number of times."""
    arrivals = memoryview(mmap.mmap(-1, 8 * count)).cast("Q")

    def wait(worker: int) -> None:
        arrivals[worker] += 1
        mine = arrivals[worker]
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
def test_another_worker_recognises_the_request(kind: str, store_name: str, clock: ManualClock, in_child: Any) -> None:
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


def test_racing_workers_lose_races(clock: ManualClock) -> None:
    """Without lost races the test above would show nothing.

    If processes take turns on one core, one must be stopped between its read and its CAS: the test repeats until then.
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
                    # All workers have finished these ids.
                    clock.advance(1)
                meet(number)
                for n in range(begin, begin + at_once):
                    assert limiter.hit("k", request_id=n, request_ttl=1)
            raise AssertionError

        hits = together(workers, work)
        assert hits == [full - left(limiter)] * workers


@pytest.mark.parametrize("kind", ["bucket", "fixed", "log"])
def test_workers_that_refund_one_id_at_once_refund_once(kind: str, clock: ManualClock) -> None:
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
        # The charges without an id still count.
        assert left(limiter) == full - workers * rounds


def test_workers_at_the_limit_let_in_no_more_ids_than_permits(clock: ManualClock) -> None:
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
            # Each of these ids was charged, and no other.
            assert left(limiter, key) == permits - len(ids) >= 0
            for n in ids:
                assert limiter.hit(key, request_id=n)
            assert left(limiter, key) == permits - len(ids)


@pytest.mark.parametrize("kind", ["bucket", "fixed", "log"])
def test_worker_killed_anywhere_leaves_no_mark_without_a_charge(kind: str, clock: ManualClock) -> None:
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
        # The client repeats every request, whether or not it got an answer.
        for request_id in range(1, ids + 1):
            assert limiter.hit("k", request_id=request_id)
        assert ids <= full - left(limiter) <= ids + kills

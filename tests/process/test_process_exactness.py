"""Many processes and threads on one table: new keys, batches, stores that open and close.

The exact bound of every limiter is the subject of ``test_process_limiters.py``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from process_helpers import (
    Crew,
    Meeting,
    SharedNumbers,
    path_of,
    repeated_members,
    until_raced,
)

from forebay import AllOf, BucketedWindow, FixedWindow, SlidingLog, Store, TokenBucket
from forebay.testing import ManualClock

REFILLS_NOTHING = "10000/year"  # a permit in 53 minutes
TAKEN_FROM: dict[str, Callable[[Store, int], Any]] = {
    "token bucket": lambda store, keys: TokenBucket(store, "t", REFILLS_NOTHING, 100),
    "first window": lambda store, keys: FixedWindow(store, "t", "100/year", align="first"),
    "bucketed window": lambda store, keys: BucketedWindow(store, "t", "100/year", 2, keys=2 * keys),
    "sliding log": lambda store, keys: SlidingLog(store, "t", "100/year", keys=2 * keys),
}


def test_attaching_does_not_move_a_manual_clock(crew: Crew, name: str) -> None:
    """Processes that attach while another one moves the time."""
    stop = SharedNumbers(1)
    clock = ManualClock(1000.0)
    with Store(name, keys=1, clock=clock):
        workers = [crew.start(_attach_until, name, stop) for _ in range(3)]
        for step in range(1, 100_001):
            clock.advance(0.5)
            assert clock.now() == 1000.0 + 0.5 * step
        stop[0] = 1
        assert min(crew.results(workers)) > 0


def _attach_until(name: str, stop: SharedNumbers) -> int:
    attached = 0
    while not stop[0]:
        Store(name, keys=1, clock=ManualClock()).close()
        attached += 1
    return attached


def test_a_fresh_key_is_inserted_once(crew: Crew, name: str) -> None:
    """All processes request each key at the same moment: with two members of a key two of them would be admitted."""
    processes, count = 4, 20_000

    def turn(number: int) -> int:
        with Store(name, keys=2 * count) as store:
            # On a busy machine, processes that meet often run in turn.
            interval = 1 if number % 2 == 0 else 1000
            results = crew.run(processes, _ask_once, name, count, interval, Meeting(processes))
            stats = store.stats()
        assert [sum(answers) for answers in zip(*results, strict=True)] == [1] * count
        assert stats.total.inserted == stats.total.allowed == stats.live_keys == count
        assert stats.total.denied == count * (processes - 1)
        assert stats.total.evicted == stats.total.full == 0
        assert repeated_members(path_of(name)) == []
        Store.unlink(name)
        return stats.total.cas_retries

    until_raced(turn)


def _ask_once(me: int, name: str, count: int, keys_per_meeting: int, meeting: Meeting) -> bytes:
    with Store(name, keys=2 * count) as store:
        allow = TokenBucket(store, "once", REFILLS_NOTHING, 1).allow
        answers = bytearray(count)
        for key in range(count):
            if key % keys_per_meeting == 0:
                meeting.wait(me)
            answers[key] = allow(key)
        return bytes(answers)


def test_threads_and_processes_together(crew: Crew, name: str) -> None:
    """Three processes of eight threads: single decisions, and batches that release the GIL while they decide."""
    keys, burst = 3000, 100

    def turn(number: int) -> int:
        with Store(name, keys=2 * keys) as store:
            results = crew.run(3, _hammer_with_threads, name, keys, burst, Meeting(3))
            stats = store.stats()
        admitted = [sum(answers) for answers in zip(*(answers for answers, _ in results), strict=True)]
        assert admitted == [burst] * keys
        assert stats.total.allowed == keys * burst
        assert stats.total.allowed + stats.total.denied == sum(decisions for _, decisions in results)
        assert stats.total.inserted == stats.live_keys == keys
        assert repeated_members(path_of(name)) == []
        Store.unlink(name)
        return stats.total.cas_retries

    until_raced(turn)


def _hammer_with_threads(me: int, name: str, keys: int, burst: int, meeting: Meeting) -> tuple[list[int], int]:
    sys.setswitchinterval(1e-5)
    everything = list(range(keys))
    admitted: list[list[int]] = []
    decisions: list[int] = []
    errors: list[BaseException] = []
    with Store(name, keys=2 * keys) as store:
        limiter = TokenBucket(store, "threads", REFILLS_NOTHING, burst)

        def run(number: int) -> None:
            mine, count = [0] * keys, 0
            try:
                # A quarter of the threads in each process request one by one, each with a limiter of its own.
                single = TokenBucket(store, "threads", REFILLS_NOTHING, burst) if number % 4 == 0 else None
                while True:
                    batch = [single.allow(key) for key in everything] if single else limiter.allow_many(everything)
                    count += keys
                    mine = [a + b for a, b in zip(mine, batch, strict=True)]
                    if not any(batch):
                        break
            except BaseException as error:
                errors.append(error)
            admitted.append(mine)
            decisions.append(count)

        meeting.wait(me)
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    return [sum(counts) for counts in zip(*admitted, strict=True)], sum(decisions)


@pytest.mark.parametrize("kind", TAKEN_FROM)
def test_processes_take_what_is_left_and_no_more(crew: Crew, name: str, kind: str) -> None:
    """100 permits in takes of up to 7 are 14 full takes and one of 2, whichever process comes when.

    Time stands still: a process that is interrupted between its look at the clock and its CAS decides for that earlier
    instant, at which less than a whole permit may be missing, and takes 1 of the last 2.
    """
    processes, keys = 3, 3000

    def turn(number: int) -> int:
        with Store(name, keys=2 * keys, clock=ManualClock(1000.0)) as store:
            results = crew.run(processes, _take_all, name, kind, keys, Meeting(processes))
            stats = store.stats()
        for takes in zip(*results, strict=True):
            assert sorted(permits for process in takes for permits in process) == [2, *[7] * 14]
        assert stats.total.allowed == 15 * keys
        assert stats.total.denied == processes * keys
        Store.unlink(name)
        return stats.total.cas_retries

    until_raced(turn)


def _take_all(me: int, name: str, kind: str, keys: int, meeting: Meeting) -> list[list[int]]:
    with Store(name, keys=2 * keys, clock=ManualClock()) as store:
        take = TAKEN_FROM[kind](store, keys).take_up_to
        meeting.wait(me)
        return [list(iter(partial(take, key, 7), 0)) for key in range(keys)]


def test_a_request_to_several_limits_is_charged_once(crew: Crew, name: str) -> None:
    """All processes send each request at the same moment. One that finds another's mark gives its charges back."""
    processes, requests = 3, 5000

    def turn(number: int) -> int:
        with Store(name, keys=4 * requests) as store:
            results = crew.run(processes, _send_all, name, requests, Meeting(processes))
            left = [limiter.peek("k").remaining for limiter in _two(store, requests)]
            stats = store.stats()
        assert results == [requests] * processes
        assert left == [processes * requests - requests] * 2
        Store.unlink(name)
        return stats.total.cas_retries

    until_raced(turn)


def _two(store: Store, requests: int) -> list[Any]:
    most = 3 * requests
    return [TokenBucket(store, "one", REFILLS_NOTHING, most), FixedWindow(store, "two", f"{most}/year", align="first")]


def _send_all(me: int, name: str, requests: int, meeting: Meeting) -> int:
    with Store(name, keys=4 * requests) as store:
        hit = AllOf(*_two(store, requests)).hit
        meeting.wait(me)
        return sum(hit("k", request_id=number).allowed for number in range(requests))


def test_closing_other_stores_during_batches_loses_no_count(crew: Crew, name: str) -> None:
    """Closing any store makes every limiter of the process take its counter line anew, batches under way included."""
    results = crew.run(3, _batches_while_stores_close, name, Meeting(3))
    with Store(name, keys=5000) as store:
        stats = store.stats().total
    assert stats.allowed == sum(results)
    assert stats.denied == 0


def _batches_while_stores_close(me: int, name: str, meeting: Meeting) -> int:
    sys.setswitchinterval(1e-5)
    keys = [(me, key) for key in range(1500)]
    counts: list[int] = []
    errors: list[BaseException] = []
    stop = threading.Event()
    with Store(name, keys=5000) as store:
        limiter = TokenBucket(store, "batches", "1_000_000_000/second", 10**9)

        def decide() -> None:
            count = 0
            try:
                while not stop.is_set():
                    count += sum(limiter.allow_many(keys))
            except BaseException as error:
                errors.append(error)
            counts.append(count)

        threads = [threading.Thread(target=decide) for _ in range(3)]
        meeting.wait(me)
        for thread in threads:
            thread.start()
        for _ in range(50):
            Store.private(keys=1).close()
            limiter.peek(keys[0])
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    return sum(counts)

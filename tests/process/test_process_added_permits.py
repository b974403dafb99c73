"""Several processes add permits above a bucket's burst and spend them: none is lost, and none is there twice."""

from __future__ import annotations

from process_helpers import Crew, Meeting, SharedNumbers, until_raced, wait_until

from forebay import Store, TokenBucket
from forebay.testing import ManualClock

PROCESSES = 4
ADDS = 2000
BURST = 10


def bucket_in(store: Store) -> TokenBucket:
    return TokenBucket(store, "api", "1/hour", burst=BURST)


def test_permits_that_processes_add_at_once_are_all_there(crew: Crew, name: str) -> None:
    with Store(name, keys=100, clock=ManualClock(1000)) as store:

        def turn(number: int) -> int:
            before = store.stats().total
            key = f"key {number}"
            results = crew.run(PROCESSES, _add_and_spend, name, key, Meeting(PROCESSES))
            assert bucket_in(store).peek(key).remaining == BURST + PROCESSES * ADDS * 3 - sum(results)
            return store.stats().total.cas_retries - before.cas_retries

        bucket_in(store)
        until_raced(turn)


def _add_and_spend(me: int, name: str, key: str, meeting: Meeting) -> int:
    """Add three permits and spend one, again and again. How many were spent."""
    with Store(name, keys=100, clock=ManualClock()) as store:
        bucket = bucket_in(store)
        meeting.wait(me)
        spent = 0
        for _ in range(ADDS):
            bucket.add(key, 3)
            spent += bucket.allow(key)
        return spent


def test_added_permits_are_spent_once(crew: Crew, name: str) -> None:
    """They spend down to below the burst and up again, so that states are permits and times in turns."""
    with Store(name, keys=100, clock=ManualClock(1000)) as store:

        def turn(number: int) -> int:
            before = store.stats().total
            key = f"key {number}"
            results = crew.run(PROCESSES, _spend_down_and_add, name, key, Meeting(PROCESSES))
            left = BURST + PROCESSES * ADDS - sum(results)
            assert left >= 0
            assert bucket_in(store).peek(key).remaining == left
            return store.stats().total.cas_retries - before.cas_retries

        bucket_in(store)
        until_raced(turn)


def _spend_down_and_add(me: int, name: str, key: str, meeting: Meeting) -> int:
    with Store(name, keys=100, clock=ManualClock()) as store:
        bucket = bucket_in(store)
        meeting.wait(me)
        spent = 0
        for _ in range(ADDS):
            spent += 2 * bucket.hit(key, 2).allowed
            bucket.add(key, 1)
        return spent


def test_killed_process_has_added_all_or_nothing(crew: Crew, name: str) -> None:
    with Store(name, keys=100, clock=ManualClock(1000)) as store:
        bucket = bucket_in(store)
        for _ in range(20):
            before = bucket.peek("k").remaining
            begun, ended = SharedNumbers(PROCESSES), SharedNumbers(PROCESSES)
            workers = [crew.start(_add_forever, me, name, begun, ended) for me in range(PROCESSES)]
            wait_until(lambda ended=ended: min(ended) > 100, "a hundred additions")
            for worker in workers:
                worker.kill()
            added = bucket.peek("k").remaining - before
            assert 5 * sum(ended) <= added <= 5 * sum(begun)
            assert added % 5 == 0


def _add_forever(me: int, name: str, begun: SharedNumbers, ended: SharedNumbers) -> None:
    with Store(name, keys=100, clock=ManualClock()) as store:
        bucket = bucket_in(store)
        while True:
            begun[me] += 1
            bucket.add("k", 5)
            ended[me] += 1

"""Several processes add credits and spend them: none is lost, and none is there twice."""

from __future__ import annotations

from process_helpers import Crew, Meeting, SharedNumbers, until_raced, wait_until

from forebay import Credits, Store
from forebay.testing import ManualClock

PROCESSES = 4
TURNS = 2000


def test_credits_are_spent_once(crew: Crew, name: str) -> None:
    """Most of the time nothing is left, so states are numbers and times in turns."""
    with Store(name, keys=100, clock=ManualClock(1000)) as store:
        prepaid = Credits(store, "paid")

        def turn(number: int) -> int:
            before = store.stats().total
            key = f"key {number}"
            results = crew.run(PROCESSES, _spend_and_add, name, key, Meeting(PROCESSES))
            assert prepaid.peek(key, 0).remaining == PROCESSES * TURNS - sum(results)
            return store.stats().total.cas_retries - before.cas_retries

        until_raced(turn)


def _spend_and_add(me: int, name: str, key: str, meeting: Meeting) -> int:
    with Store(name, keys=100, clock=ManualClock()) as store:
        prepaid = Credits(store, "paid")
        meeting.wait(me)
        spent = 0
        for _ in range(TURNS):
            prepaid.add(key, 1)
            spent += 2 * prepaid.hit(key, 2).allowed
            reservation = prepaid.reserve(key, 3)
            reservation.cancel()
        return spent


def test_killed_process_has_changed_the_balance_by_all_or_nothing(crew: Crew, name: str) -> None:
    with Store(name, keys=100, clock=ManualClock(1000)) as store:
        prepaid = Credits(store, "paid")
        for _ in range(20):
            before = prepaid.peek("k", 0).remaining
            begun, ended = SharedNumbers(PROCESSES), SharedNumbers(PROCESSES)
            workers = [crew.start(_add_forever, me, name, begun, ended) for me in range(PROCESSES)]
            wait_until(lambda ended=ended: min(ended) > 100, "a hundred additions")
            for worker in workers:
                worker.kill()
            added = prepaid.peek("k", 0).remaining - before
            assert 2 * sum(ended) <= added <= 5 * sum(begun)


def _add_forever(me: int, name: str, begun: SharedNumbers, ended: SharedNumbers) -> None:
    with Store(name, keys=100, clock=ManualClock()) as store:
        prepaid = Credits(store, "paid")
        while True:
            begun[me] += 1
            prepaid.add("k", 5)
            assert prepaid.hit("k", 3)
            ended[me] += 1

"""Permits that processes hold by one request id."""

from __future__ import annotations

from typing import Any, Final

import pytest
from process_helpers import Crew, Meeting, SharedNumbers, wait_until

from forebay import Concurrency, Store

KEYS: Final = 300


def remaining(limiter: Concurrency, key: Any = "k") -> int:
    return limiter.peek(key).remaining


def test_child_takes_over_from_its_parent(crew: Crew, name: str) -> None:
    with Store(name, keys=100) as store:
        limiter = Concurrency(store, "two", 2)
        lease = limiter.acquire("k", request_id="r")

        def repeat(number: int) -> tuple[bool, int, bool]:
            again = limiter.acquire("k", request_id="r")
            return bool(again), remaining(limiter), again.release()

        assert crew.run(1, repeat) == [(True, 1, True)]
        assert not lease.release()
        assert remaining(limiter) == 2


def test_request_takes_over_from_a_process_that_has_ended(crew: Crew, name: str) -> None:
    with Store(name, keys=100) as store:
        limiter = Concurrency(store, "one", 1)
        assert crew.run(1, lambda number: bool(limiter.hit("k", request_id="r"))) == [True]
        assert limiter.acquire("k", request_id="r")
        assert not limiter.acquire("k", request_id="another")


def test_workers_with_one_id_at_once_hold_one_permit(crew: Crew, name: str) -> None:
    workers = 3
    meeting = Meeting(workers)
    with Store(name, keys=10_000) as store:
        limiter = Concurrency(store, "four", 4, keys=2 * KEYS)

        def work(number: int) -> set[int]:
            for key in range(KEYS):
                if key % 20 == 0:
                    meeting.wait(number)
                for _ in range(3):
                    assert limiter.acquire(key, request_id="r")
            meeting.wait(number)
            # Before any worker ends, and with it its permits.
            left = {remaining(limiter, key) for key in range(KEYS)}
            meeting.wait(number)
            return left

        assert crew.run(workers, work) == [{3}] * workers


@pytest.mark.parametrize("begun_keys", range(3, 60, 7))
def test_worker_killed_anywhere_leaves_ids_that_can_be_repeated(crew: Crew, name: str, begun_keys: int) -> None:
    begun = SharedNumbers(1)
    with Store(name, keys=10_000) as store:
        limiter = Concurrency(store, "one", 1, keys=2 * KEYS)

        def work() -> None:
            for key in range(KEYS):
                begun[0] = key
                for _ in range(2):
                    limiter.acquire(key, request_id="r")

        worker = crew.start(work)
        wait_until(lambda: begun[0] >= begun_keys, "the worker takes permits")
        worker.kill()
        for key in range(KEYS):
            # A permit that no mark leads to comes back by the next search for ended processes, which denials begin.
            wait_until(lambda key=key: limiter.acquire(key, request_id="r"), "the ended worker's permit comes back")
            assert not limiter.acquire(key, request_id="another")

"""Counter lines: sums are exact and never fall, when processes die, fork or close."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from process_helpers import (
    FREE_USER,
    Crew,
    Meeting,
    SharedNumbers,
    Worker,
    as_user,
    counter_lines,
    lock_bytes,
    path_of,
    wait_until,
)

from forebay import LimiterStats, Store, TokenBucket
from forebay.segment import layout

BURST = 1000
REFILLS_NOTHING = "10000/year"


def _decide(bucket: TokenBucket, count: int) -> None:
    for _ in range(count):
        bucket.allow("key")


def _attach_and_decide(name: str, limiter: str, count: int) -> None:
    with Store(name, keys=100) as store:
        _decide(TokenBucket(store, limiter, REFILLS_NOTHING, BURST), count)


def _owners(name: str) -> list[int]:
    """The limiters' numbers, plus one, of the owned lines that were ever used."""
    return [line["limiter"] for line in counter_lines(path_of(name))[: layout.OWNED_COUNTER_LINES] if line["limiter"]]


def _counted(store: Store, limiter: str = "api") -> int:
    stats = store.stats().limiters[limiter]
    return stats.allowed + stats.denied


def test_the_line_of_a_dead_process_is_used_again(crew: Crew, name: str) -> None:
    with Store(name, keys=100) as store:
        last = LimiterStats()
        for turn in range(40):
            worker = crew.start(_attach_and_decide_and_stop, name, "api", 50)
            worker.wait_for_stop()
            stats = store.stats().limiters["api"]
            assert (stats.allowed, stats.denied) == (min(50 * (turn + 1), BURST), max(50 * (turn + 1) - BURST, 0))
            worker.kill()
            assert store.stats().limiters["api"] == stats
            assert stats.allowed >= last.allowed
            last = stats
        assert _owners(name) == [1]


def _attach_and_decide_and_stop(name: str, limiter: str, count: int) -> None:
    with Store(name, keys=100) as store:
        _decide(TokenBucket(store, limiter, REFILLS_NOTHING, BURST), count)
        os.kill(os.getpid(), signal.SIGSTOP)


def test_living_processes_have_lines_of_their_own(crew: Crew, name: str) -> None:
    with Store(name, keys=100) as store:
        workers = [crew.start(_attach_and_decide_and_stop, name, "api", 10) for _ in range(20)]
        for worker in workers:
            worker.wait_for_stop()
        assert _owners(name) == [1] * 20
        assert [line["allowed"] for line in counter_lines(path_of(name)) if line["limiter"]] == [10] * 20
        assert _counted(store) == 200


def test_without_a_free_line_processes_share_one_exactly(crew: Crew, name: str) -> None:
    processes, count = 4, 100_000
    with Store(name, keys=100) as store, Path(path_of(name)).open("r+b") as file:
        lock_bytes(file.fileno(), layout.COUNTERS_OFFSET, layout.OWNED_COUNTER_LINES * layout.COUNTER_LINE.size)
        crew.run(processes, _meet_and_decide, Meeting(processes), name, count)
        assert _owners(name) == []
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (BURST, processes * count - BURST)
        shared = counter_lines(path_of(name))[layout.OWNED_COUNTER_LINES]
        assert shared["allowed"] == BURST


def _meet_and_decide(me: int, meeting: Meeting, name: str, count: int) -> None:
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
        meeting.wait(me)
        _decide(bucket, count)


def test_more_processes_and_limiters_than_lines(crew: Crew, name: str) -> None:
    processes, limiters, count = 5, 200, 30
    with Store(name, keys=10_000) as store:
        crew.run(processes, _decide_in_many, Meeting(processes), name, limiters, count)
        stats = store.stats()
        assert len(_owners(name)) == layout.OWNED_COUNTER_LINES
        assert stats.total.allowed + stats.total.denied == processes * limiters * count
        assert {s.allowed + s.denied for s in stats.limiters.values()} == {processes * count}
        assert sum(line["allowed"] for line in counter_lines(path_of(name))[layout.OWNED_COUNTER_LINES :]) > 0


def _decide_in_many(me: int, meeting: Meeting, name: str, limiters: int, count: int) -> None:
    with Store(name, keys=10_000) as store:
        buckets = [TokenBucket(store, f"limiter {i}", REFILLS_NOTHING, BURST) for i in range(limiters)]
        meeting.wait(me)
        for bucket in buckets:
            _decide(bucket, 1)
        meeting.wait(me)
        for bucket in buckets:
            _decide(bucket, count - 1)
        # No process leaves a line before all have looked for one.
        meeting.wait(me)


def test_two_stores_of_one_process_count_apart(name: str) -> None:
    with Store(name, keys=100) as one, Store(name, keys=100) as two:
        first, second = (TokenBucket(store, "api", REFILLS_NOTHING, BURST) for store in (one, two))
        _decide(first, 10)
        _decide(second, 20)
        _decide(first, 1)
        assert _counted(one) == _counted(two) == 31
        assert _owners(name) == [1, 1]
        two.close()
        _decide(first, 5)
        assert _counted(one) == 36


def _stores() -> dict[str, Callable[[str], Store]]:
    return {"named": lambda name: Store(name, keys=100), "private": lambda name: Store.private(keys=100)}


@pytest.mark.parametrize("kind", _stores())
def test_parent_and_children_count_apart_after_a_fork(crew: Crew, name: str, kind: str) -> None:
    with _stores()[kind](name) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 600_000)
        _decide(bucket, 7)
        workers = [crew.start(_decide, bucket, 100_000) for _ in range(4)]
        _decide(bucket, 100_000)
        crew.results(workers)
        assert store.stats().limiters["api"].allowed == 500_007
        assert not bucket.peek("other", cost=1).reset_after


@pytest.mark.parametrize("kind", _stores())
def test_double_fork_whose_middle_ends_first(crew: Crew, name: str, kind: str) -> None:
    with _stores()[kind](name) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 600_000)
        _decide(bucket, 1)
        done = SharedNumbers(1)
        crew.start(_leave_a_grandchild, bucket, done).result()
        _decide(bucket, 50_000)
        wait_until(lambda: done[0], "the grandchild's decisions")
        assert store.stats().limiters["api"].allowed == 1 + 3 + 50_000 + 50_000


def _leave_a_grandchild(bucket: TokenBucket, done: SharedNumbers) -> None:
    _decide(bucket, 3)
    Worker(_decide_and_say, bucket, 50_000, done)


def _decide_and_say(bucket: TokenBucket, count: int, done: SharedNumbers) -> None:
    _decide(bucket, count)
    done[0] = 1


@pytest.mark.parametrize("child_uses_it_before", [False, True])
def test_a_child_goes_on_after_its_parent_was_killed(crew: Crew, name: str, child_uses_it_before: bool) -> None:
    """Any process may take the parent's line; the child must not write to it any more."""
    numbers = SharedNumbers(3)
    parent = crew.start(_parent_of_a_survivor, name, numbers, child_uses_it_before)
    wait_until(lambda: numbers[0], "the child")
    parent.kill()
    numbers[1] = 1
    others = [crew.start(_attach_and_decide, name, "api", 30_000) for _ in range(3)]
    crew.results(others)
    wait_until(lambda: numbers[2], "the child's decisions")
    with Store(name, keys=100) as store:
        assert _counted(store) == 5 + child_uses_it_before + 30_000 + 3 * 30_000


def _parent_of_a_survivor(name: str, numbers: SharedNumbers, child_uses_it_before: bool) -> None:
    store = Store(name, keys=100)
    bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
    _decide(bucket, 5)
    Worker(_survive, bucket, numbers, child_uses_it_before)
    signal.pause()


def _survive(bucket: TokenBucket, numbers: SharedNumbers, use_it_before: bool) -> None:
    _decide(bucket, int(use_it_before))
    numbers[0] = 1
    wait_until(lambda: numbers[1], "the parent's end")
    _decide(bucket, 30_000)
    numbers[2] = 1


def test_children_that_never_use_the_store(crew: Crew, name: str) -> None:
    """They keep the parent's locks alive, and neither its death nor theirs costs a count."""
    numbers = SharedNumbers(2)
    parent = crew.start(_parent_of_idlers, name, numbers)
    wait_until(lambda: numbers[0], "the parent's decisions")
    parent.kill()
    _attach_and_decide(name, "api", 11)
    numbers[1] = 1
    _attach_and_decide(name, "api", 13)
    with Store(name, keys=100) as store:
        assert _counted(store) == 100 + 11 + 13


def _parent_of_idlers(name: str, numbers: SharedNumbers) -> None:
    store = Store(name, keys=100)
    bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
    _decide(bucket, 50)
    for _ in range(3):
        Worker(wait_until, lambda: numbers[1], "the end")
    _decide(bucket, 50)
    numbers[0] = 1
    signal.pause()


@pytest.mark.parametrize("kind", _stores())
def test_closing_in_a_child_does_not_hurt_the_parent(crew: Crew, name: str, kind: str) -> None:
    with _stores()[kind](name) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
        _decide(bucket, 5)
        crew.results([crew.start(store.close) for _ in range(3)])
        crew.results([crew.start(_use_and_close, store, bucket) for _ in range(3)])
        if kind == "named":
            # The parent's line is still its own: a stranger gets another one.
            crew.start(_attach_and_decide, name, "api", 3).result()
        _decide(bucket, 5)
        assert _counted(store) == 10 + 6 + 3 * (kind == "named")


def _use_and_close(store: Store, bucket: TokenBucket) -> None:
    _decide(bucket, 2)
    store.close()


@pytest.mark.parametrize("kind", _stores())
def test_closing_in_the_parent_does_not_hurt_children(crew: Crew, name: str, kind: str) -> None:
    go = SharedNumbers(1)
    store = _stores()[kind](name)
    bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
    _decide(bucket, 5)
    worker = crew.start(_decide_on_signal, go, store, bucket)
    store.close()
    del bucket, store
    go[0] = 1
    assert worker.result() == 5 + 100


def _decide_on_signal(go: SharedNumbers, store: Store, bucket: TokenBucket) -> int:
    wait_until(lambda: go[0], "the go")
    _decide(bucket, 100)
    return _counted(store)


def test_a_fork_that_python_does_not_know_of(crew: Crew, name: str) -> None:
    """Servers written in C call fork(2) themselves."""
    assert crew.start(_fork_in_c, name).result() == 4 * 1000


def _fork_in_c(name: str) -> int:
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
        _decide(bucket, 1000)
        libc = ctypes.PyDLL(None)
        child = libc.fork()
        _decide(bucket, 1000)
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        _decide(bucket, 1000)
        return _counted(store)


def test_forks_beside_busy_threads(crew: Crew, name: str) -> None:
    """Threads decide, in batches without the GIL and one by one, while the process forks again and again."""
    counted, expected = crew.start(_fork_beside_threads, name).result()
    assert counted == expected


def _fork_beside_threads(name: str) -> tuple[int, int]:
    sys.setswitchinterval(1e-4)
    stop = threading.Event()
    counts: list[int] = []
    keys = list(range(1500))
    with Store(name, keys=5000) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
        threads = [
            threading.Thread(target=_decide_until, args=(stop, bucket, number % 2 == 0, counts)) for number in range(8)
        ]
        for thread in threads:
            thread.start()
        children = 0
        for _ in range(40):
            child = os.fork()
            if child == 0:
                try:
                    _decide(bucket, 500)
                    bucket.allow_many(keys)
                finally:
                    os._exit(0)
            children += 500 + len(keys)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()
        return _counted(store), children + sum(counts)


def _decide_until(stop: threading.Event, bucket: TokenBucket, in_batches: bool, counts: list[int]) -> None:
    """Shares no list and no variable of a closure with a child: without the GIL, both have locks that a fork may find
    held, and nobody releases them in the child."""
    keys = list(range(1500))
    count = 0
    while not stop.is_set():
        if in_batches:
            count += len(bucket.allow_many(keys))
        else:
            _decide(bucket, 100)
            count += 100
    counts.append(count)


def test_workers_of_a_root_master_that_give_up_root(as_root: None, crew: Crew, name: str) -> None:
    """They can't open root's file again; limits and sums are exact nevertheless."""
    processes, count = 4, 50_000
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
        _decide(bucket, 10)
        meeting = Meeting(processes)
        crew.results(
            [
                crew.start(as_user, FREE_USER, FREE_USER, [], _decide_in_a_meeting, i, meeting, bucket, count)
                for i in range(processes)
            ]
        )
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (BURST, 10 + processes * count - BURST)


def test_workers_that_give_up_root_after_their_first_decision(as_root: None, crew: Crew, name: str) -> None:
    processes, count = 4, 50_000
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, BURST)
        meeting = Meeting(processes)
        crew.run(processes, _decide_then_give_up_root, meeting, bucket, count)
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (BURST, processes * (1 + count) - BURST)


def _decide_in_a_meeting(me: int, meeting: Meeting, bucket: TokenBucket, count: int) -> None:
    meeting.wait(me)
    _decide(bucket, count)


def _decide_then_give_up_root(me: int, meeting: Meeting, bucket: TokenBucket, count: int) -> None:
    _decide(bucket, 1)
    as_user(FREE_USER, FREE_USER, [], _decide_in_a_meeting, me, meeting, bucket, count // 2)
    # Another store's end makes every limiter look for a line again.
    Store.private(keys=1).close()
    _decide(bucket, count // 2)


def test_sums_never_fall_while_processes_come_and_go(crew: Crew, name: str) -> None:
    stop = SharedNumbers(1)
    with Store(name, keys=100) as store:
        TokenBucket(store, "api", REFILLS_NOTHING, BURST)
        workers = [crew.start(_come_and_go, name, stop) for _ in range(4)]
        last = LimiterStats()
        for _ in range(100):
            stats = store.stats().limiters["api"]
            for field in ("allowed", "denied", "inserted", "evicted", "full", "cas_retries"):
                assert getattr(stats, field) >= getattr(last, field), field
            last = stats
        stop[0] = 1
        assert _counted(store) <= sum(crew.results(workers)) == _counted(store)


def _come_and_go(name: str, stop: SharedNumbers) -> int:
    count = 0
    while not stop[0]:
        _attach_and_decide(name, "api", 50)
        count += 50
    return count

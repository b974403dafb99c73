"""Decisions of threads that run at once: exact counts, counter lines that come back, and objects that change meanwhile.

Without the GIL each thread has counter lines of its own. The tests hold with the GIL, too, where a process has one line
for each limiter.
"""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from process_helpers import Crew, SharedNumbers, counter_lines, path_of
from thread_helpers import FREE_THREADED

from forebay import (
    AllOf,
    BucketedWindow,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.errors import ForebayError
from forebay.segment import layout, ofd_locks

SLOTS: Final = 128
"""Thread slots of a process."""

MUCH: Final = "1000000/day"


@pytest.fixture(autouse=True)
def fast_switches() -> Iterator[None]:
    """With the GIL, threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work` in so many threads that begin together; raises what one of them raised."""
    results: list[Any] = [None] * count
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(me: int) -> None:
        try:
            start.wait()
            results[me] = work(me)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def used_lines(name: str) -> list[dict[str, int]]:
    """The owned lines that were ever used."""
    return [line for line in counter_lines(path_of(name))[: layout.OWNED_COUNTER_LINES] if line["limiter"]]


def locked_lines(name: str) -> int:
    """How many lines some process owns."""
    size = layout.COUNTER_LINE.size
    with open(path_of(name), "rb") as file:
        return sum(
            ofd_locks.is_locked(file.fileno(), layout.COUNTERS_OFFSET + line * size, size)
            for line in range(layout.OWNED_COUNTER_LINES)
        )


def counted(store: Store) -> int:
    total = store.stats().total
    return total.allowed + total.denied


def test_short_threads_use_no_more_lines_than_live_at_once(store_name: str) -> None:
    with Store(store_name, keys=100) as store:
        bucket = TokenBucket(store, "api", MUCH)
        for _ in range(200):
            in_threads(1, lambda _: bucket.allow("k"))
        assert counted(store) == 200
        assert len(used_lines(store_name)) == 1


def test_an_ended_thread_gives_back_its_lines(store_name: str) -> None:
    with Store(store_name, keys=100) as store:
        buckets = [TokenBucket(store, f"bucket {number}", MUCH) for number in range(3)]
        met = threading.Barrier(4)
        owned = []

        def decide(me: int) -> None:
            for bucket in buckets:
                bucket.allow("k")
            met.wait()
            if me == 0:
                owned.append(locked_lines(store_name))
            met.wait()

        in_threads(4, decide)
        assert owned == [3 * (4 if FREE_THREADED else 1)]
        assert locked_lines(store_name) == (0 if FREE_THREADED else 3)
        assert counted(store) == 12


def test_threads_without_a_slot_share_a_line_exactly(store_name: str) -> None:
    threads = SLOTS + 9
    with Store(store_name, keys=1000) as store:
        bucket = TokenBucket(store, "api", MUCH)
        bucket.allow("k")  # this thread has a slot, too
        met = threading.Barrier(threads)

        def decide(me: int) -> None:
            bucket.allow(me)
            met.wait()  # no thread ends before all have attached
            for _ in range(200):
                bucket.allow(me)

        in_threads(threads, decide)
        assert counted(store) == 1 + threads * 201
        shared = counter_lines(path_of(store_name))[layout.OWNED_COUNTER_LINES]["allowed"]
        assert shared == (10 * 201 if FREE_THREADED else 0)


def test_a_thread_that_decides_while_it_ends_keeps_no_slot(store_name: str) -> None:
    """Its finalizers may run after its slot was given back."""

    class Last:
        def __del__(self) -> None:
            bucket.allow("last")

    with Store(store_name, keys=100) as store:
        bucket = TokenBucket(store, "api", MUCH)
        local = threading.local()
        last = contextvars.ContextVar[Last]("last")

        def decide(first: bool) -> None:
            if first:
                local.last = Last()
            bucket.allow("k")
            if not first:
                last.set(Last())  # a thread's context is freed after its slot was given back

        for turn in range(SLOTS + 10):
            in_threads(1, lambda _, turn=turn: decide(turn % 2 == 0))
        assert counted(store) == 2 * (SLOTS + 10)
        # Every other thread has decided once more after it had lost its slot.
        shared = counter_lines(path_of(store_name))[layout.OWNED_COUNTER_LINES]["allowed"]
        assert shared == ((SLOTS + 10) // 2 if FREE_THREADED else 0)
        assert len(used_lines(store_name)) == 1
        owned = in_threads(1, lambda _: (bucket.allow("k"), locked_lines(store_name))[1])
        assert owned == [1]


def test_an_ending_thread_gives_back_no_line_of_its_slots_next_owner(store_name: str) -> None:
    with Store(store_name, keys=100) as store:
        bucket = TokenBucket(store, "api", MUCH)
        release, attached, done = store.attachment.release_lines, threading.Event(), threading.Event()

        def decide_and_stay() -> None:
            bucket.allow("k")
            attached.set()
            done.wait()

        other = threading.Thread(target=decide_and_stay)

        def begin_another_first(holder: int = 0) -> None:
            if not other.is_alive():
                other.start()
                attached.wait()
            release(holder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.attachment, "release_lines", begin_another_first)
            in_threads(1, lambda _: bucket.allow("k"))
        assert other.is_alive() == FREE_THREADED
        assert locked_lines(store_name) == 1
        if FREE_THREADED:
            done.set()
            other.join()


def test_counts_of_mixed_calls_are_exact(store_name: str) -> None:
    threads, turns = 8, 300
    with Store(store_name, keys=10_000) as store:
        bucket = TokenBucket(store, "bucket", MUCH, burst=1500)
        others = [
            LeakyBucket(store, "leaky", MUCH, capacity=500),
            MinInterval(store, "interval", "1 day"),
            FixedWindow(store, "fixed", "100/day"),
            SlidingWindow(store, "sliding", "100/day"),
            SlidingLog(store, "log", "100/day", keys=100),
            BucketedWindow(store, "bucketed", "100/day", keys=100),
            TokenBucket(store, "intervals", "1000/day", refill="interval"),
        ]
        both = AllOf(TokenBucket(store, "one", MUCH), FixedWindow(store, "two", MUCH))
        keys = [f"user:{number}" for number in range(50)]
        large = [f"user:{number}" for number in range(1100)]

        def decide(me: int) -> int:
            calls = 0
            for turn in range(turns):
                bucket.allow("hot")
                bucket.hit(f"own:{me}:{turn}")
                bucket.hit("hot", 0)
                bucket.peek("hot")
                bucket.reserve("hot").cancel()
                both.allow(f"key:{turn % 7}")
                bucket.allow_many(keys)
                for limiter in others:
                    limiter.allow(f"key:{turn % 3}")
                    limiter.hit("hot")
                calls += 4 + 2 + len(keys) + 2 * len(others)
                if turn % 100 == 0:
                    bucket.allow_many(large)
                    calls += len(large)
            return calls

        calls = sum(in_threads(threads, decide))
        assert counted(store) == calls
        stats = store.stats().limiters
        assert stats["interval"].allowed == 4
        assert stats["log"].allowed == stats["fixed"].allowed == stats["bucketed"].allowed == 400


def test_no_two_threads_get_one_claim_id(store_name: str) -> None:
    """A claim's id is drawn from a line's sequence; from one line by all threads, as there is no other free."""
    threads, keys = 4, 20_000
    with Store(store_name, keys=100_000) as store, open(path_of(store_name), "r+b") as file:
        size = layout.COUNTER_LINE.size
        assert ofd_locks.try_lock(file.fileno(), layout.COUNTERS_OFFSET, layout.OWNED_COUNTER_LINES * size)
        bucket = TokenBucket(store, "api", "1/day")
        in_threads(threads, lambda me: [bucket.allow((me << 32) + number) for number in range(keys)])
        shared = counter_lines(path_of(store_name))[layout.OWNED_COUNTER_LINES]
        assert shared["inserted"] == threads * keys
        assert shared["claims"] >= threads * keys


@pytest.mark.parametrize("how", ["allow", "small batch", "large batch"])
def test_a_close_beside_deciding_threads_loses_no_count(store_name: str, how: str) -> None:
    """A closed store's lines go to others, which count in them at once."""
    threads, rounds = 4, 12
    few, many = ["k"] * 10, ["k"] * 1100
    with Store(store_name, keys=100) as other:
        calls = 0
        for _ in range(rounds):
            store = Store(store_name, keys=100)
            bucket = TokenBucket(store, "api", "1000000/year")
            bucket.reset("k")
            heir = Store(store_name, keys=100)
            inherited = TokenBucket(heir, "api", "1000000/year")
            closed = threading.Event()

            def decide(
                me: int,
                bucket: TokenBucket = bucket,
                store: Store = store,
                inherited: TokenBucket = inherited,
                closed: threading.Event = closed,
            ) -> int:
                done = 0
                if me == 0:
                    while bucket.peek("k").remaining == 1_000_000:
                        os.sched_yield()
                    store.close()
                    closed.set()
                try:
                    while True:
                        if how == "allow":
                            bucket.allow("k")
                            done += 1
                        else:
                            done += len(bucket.allow_many(few if how == "small batch" else many))
                except StoreClosed:
                    closed.wait()
                for _ in range(100):
                    inherited.allow("k")
                return done + 100

            calls += sum(in_threads(threads, decide))
            heir.close()
        assert counted(other) == calls


def test_a_thread_that_attaches_beside_a_close_finds_the_store_closed(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that it got may be another process's by then."""
    with Store(store_name, keys=100) as other:
        store = Store(store_name, keys=100)
        bucket, counter_line = TokenBucket(store, "api", MUCH), store.attachment.counter_line

        def take_and_close(number: int, holder: int | None = 0) -> tuple[int, bool]:
            taken = counter_line(number, holder)
            store.close()
            return taken

        monkeypatch.setattr(store.attachment, "counter_line", take_and_close)
        with pytest.raises(StoreClosed):
            bucket.allow("k")
        assert counted(other) == 0


@pytest.mark.parametrize("size", [200, 2000])
def test_a_batch_survives_threads_that_change_its_list(in_child: Any, size: int) -> None:
    def run() -> bool:
        stop = threading.Event()
        with Store.private(keys=100_000) as store:
            bucket = TokenBucket(store, "api", MUCH)
            keys: list[Any] = []
            costs: list[Any] = []

            def meddle(me: int) -> int:
                if me == 0:
                    try:
                        return sum(decide_batches())
                    finally:
                        stop.set()
                turn = 0
                while not stop.is_set():
                    turn += 1
                    # New objects, so that the former keys are freed.
                    keys[:] = [f"key {turn} {number}" * 5 for number in range(size)]
                    costs[:] = [turn % 3] * size
                    for number in range(0, size // 2, 7):
                        keys[number] = f"other {turn} {number}" * 5
                        keys.pop()
                return 0

            def decide_batches() -> Iterator[int]:
                turn = answered = 0
                while answered < 100:
                    turn += 1
                    try:
                        answers = bucket.allow_many(keys, costs if turn % 3 == 0 else None)
                    except (RuntimeError, ForebayError):
                        continue
                    assert set(answers) <= {True, False}
                    answered += len(answers) > 0
                    yield len(answers)

            return sum(in_threads(3, meddle)) == counted(store)

    assert in_child(run)


def test_all_of_decides_its_lists_as_they_were_at_the_call_where_other_threads_may_change_them(store: Store) -> None:
    class Replacing:
        def __index__(self) -> int:
            keys[1] = "later"
            return 1

    keys: list[Any] = ["k", "k"]
    costs: list[Any] = [Replacing(), 1]
    first, second = TokenBucket(store, "first", "5/day"), TokenBucket(store, "second", "5/day")
    assert AllOf(first, second).hit(keys, costs)
    charged, other = ("k", "later") if FREE_THREADED else ("later", "k")
    assert (second.peek(charged).remaining, second.peek(other).remaining) == (4, 5)


def test_all_of_survives_threads_that_change_its_lists(in_child: Any) -> None:
    def run() -> bool:
        stop = threading.Event()
        with Store.private(keys=1000) as store:
            limits = AllOf(TokenBucket(store, "one", MUCH), TokenBucket(store, "two", MUCH))
            keys: list[Any] = ["a" * 50, "b" * 50]
            costs: list[Any] = [1, 1]

            def meddle(me: int) -> int:
                if me == 0:
                    try:
                        decided = 0
                        while decided < 300:
                            decided += decide()
                        return decided
                    finally:
                        stop.set()
                turn = 0
                while not stop.is_set():
                    turn += 1
                    keys.clear()
                    keys.extend([f"{turn}" * 50, f"{turn + 1}" * 50])
                    costs[:] = []
                    costs[:] = [300 + turn % 100, 300 + turn % 100]  # of new objects
                return 0

            def decide() -> int:
                try:
                    limits.hit(keys, costs)
                except (RuntimeError, ForebayError):
                    os.sched_yield()  # another thread is about to fill the lists
                    return 0
                return 1

            decided = sum(in_threads(3, meddle))
            stats = store.stats().limiters["two"]
            return stats.allowed + stats.denied == decided

    assert in_child(run)


def test_of_two_threads_that_cancel_one_gives_back(store: Store) -> None:
    bucket = TokenBucket(store, "api", "100/day")
    for turn in range(200):
        first, second = bucket.reserve("k", 3), bucket.reserve("k", 3)
        in_threads(2, lambda _, first=first: first.cancel())
        assert bucket.peek("k").remaining == 97, turn
        second.cancel()
        assert bucket.peek("k").remaining == 100


def test_a_child_has_the_slots_of_threads_that_it_lacks(crew: Crew, store_name: str) -> None:
    locked = crew.start(_fork_beside_idle_threads, store_name).result()
    assert locked == ([1, 1 + 100] if FREE_THREADED else [1, 1])


def _fork_beside_idle_threads(name: str) -> list[int]:
    """How many lines the child of a fork has locked with one thread, and with a hundred more."""
    threads, answer = 100, SharedNumbers(2)
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", MUCH)
        met, done = threading.Barrier(threads + 1), threading.Event()

        def stay() -> None:
            bucket.allow("k")
            met.wait()
            done.wait()

        idle = [threading.Thread(target=stay) for _ in range(threads)]
        for thread in idle:
            thread.start()
        met.wait()
        before = locked_lines(name)
        child = os.fork()
        if child == 0:
            bucket.allow("k")
            answer[0] = locked_lines(name) - before
            met = threading.Barrier(threads)

            def decide(me: int) -> None:
                bucket.allow("k")
                met.wait()
                if me == 0:
                    answer[1] = locked_lines(name) - before
                met.wait()

            in_threads(threads, decide)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        done.set()
        for thread in idle:
            thread.join()
        assert counted(store) == threads + 1 + threads
    return list(answer)


def test_import_leaves_the_gil_off() -> None:
    code = "import forebay, sys; print(getattr(sys, '_is_gil_enabled', lambda: True)())"
    command = [sys.executable, "-W", "error", "-c", code]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert answer == f"{not FREE_THREADED}\n"

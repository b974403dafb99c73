"""Leases of the C API: they hold permits as Python's do, come back however a holder ends, and every misuse ends with a
status."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import c_api
import pytest
from c_api import ALLOWED, API, DENIED, HELD, NOT_HELD, Handle, Lease, Thread, array_of, request_of, status_of
from process_helpers import Worker, extents, path_of, wait_until

from forebay import Concurrency, Store, TokenBucket
from forebay.segment.process_identity import INCARNATION_BITS, PID_BITS, this_process
from forebay.testing import ManualClock

NS = 10**9
HOUR = 3600


@pytest.fixture
def api_store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as store:
        yield store


def held(thread: Thread, key: bytes = b"k", cost: int = 1) -> Lease:
    allowed, lease = thread.acquire(key, cost)
    assert allowed
    return lease


def copy_of(lease: Lease, **changed: int) -> Lease:
    copy = Lease.from_buffer_copy(lease)
    for name, value in changed.items():
        setattr(copy, name, value)
    return copy


# They hold as Python's do


@pytest.mark.parametrize("seed", range(4))
def test_a_native_thread_holds_permits_as_python_does(seed: int, clock: ManualClock) -> None:
    """The same acquisitions, by Python in one store and by the C API in another, at the same times."""
    choose = random.Random(seed)
    with Store.private(keys=100, clock=clock) as one, Store.private(keys=100, clock=clock) as other:
        limiter = Concurrency(one, "c", 70, lease=30, keys=4)
        watched = Concurrency(other, "c", 70, lease=30, keys=4)
        with Handle(watched) as handle:
            thread = handle.attach()
            leases: list[tuple[Any, Lease, int]] = []
            answers = set()
            for _ in range(1500):
                cost = choose.choice([0, 1, 1, 1, 2, 5, 40, 70])
                # A lease that has ended may have lost its slots to others, and which ones is each side's affair.
                now_ns = one.now_ns()
                live = [lease for lease in leases if lease[2] > now_ns]
                match choose.choice(["acquire", "acquire", "acquire", "release", "release", "renew", "time"]):
                    case "acquire":
                        mine = limiter.acquire("k", cost)
                        allowed, lease = thread.acquire(b"k", cost)
                        assert allowed == mine.allowed
                        assert bool(lease.permits) == (allowed and cost > 0)
                        assert lease.available == (0 if allowed else limiter.peek("k").remaining)
                        answers.add(allowed)
                        leases.append((mine, lease, now_ns + 30 * NS))
                    case "release" if leases:
                        mine, lease, end_ns = leases.pop(choose.randrange(len(leases)))
                        freed = mine.release(), thread.release(lease)
                        assert freed[0] == freed[1] or end_ns <= now_ns
                        assert thread.release(lease) == NOT_HELD
                    case "renew" if live:
                        mine, lease, end_ns = choose.choice(live)
                        assert thread.renew(lease) == mine.renew()
                        if lease.permits:
                            leases[leases.index((mine, lease, end_ns))] = (mine, lease, now_ns + 30 * NS)
                    case _:
                        clock.advance(choose.choice([0, 0.5, 4, 20]))
                assert watched.peek("k").remaining == limiter.peek("k").remaining
            assert answers == {ALLOWED, DENIED}
            assert other.stats().limiters == one.stats().limiters


def test_python_and_native_threads_hold_one_limit(api_store: Store) -> None:
    limiter = Concurrency(api_store, "c", 3, lease=30)
    with Handle(limiter) as handle:
        thread = handle.attach()
        two = held(thread, cost=2)
        mine = limiter.acquire("k")
        assert mine
        assert thread.acquire(b"k")[0] == DENIED
        assert not limiter.acquire("k")
        assert mine.release()
        one = held(thread)
        assert thread.release(two) == HELD
        assert limiter.acquire("k", 2)
        limiter.reset("k")
        assert thread.renew(one) == NOT_HELD
        assert thread.release(one) == NOT_HELD
        assert limiter.peek("k").remaining == 3


def test_a_lease_by_hash_is_of_the_same_key(api_store: Store) -> None:
    limiter = Concurrency(api_store, "c", 1, lease=30)
    with Handle(limiter) as handle:
        thread = handle.attach()
        lease = Lease()
        assert API.acquire(thread.pointer, request_of(key_hash=handle.hash(b"user:42")), lease) == ALLOWED
        assert not limiter.acquire("user:42")
        assert limiter.acquire("user:43")


def test_a_renewed_lease_ends_later(api_store: Store, clock: ManualClock) -> None:
    limiter = Concurrency(api_store, "c", 2, lease=30)
    with Handle(limiter) as handle:
        thread = handle.attach()
        renewed, other = held(thread), held(thread)
        clock.advance(20)
        assert thread.renew(renewed) == HELD
        clock.advance(10)
        assert held(thread).slot == other.slot
        assert thread.acquire(b"k")[0] == DENIED
        assert thread.renew(other) == NOT_HELD
        assert thread.release(other) == NOT_HELD
        clock.advance(19)
        assert thread.renew(renewed) == HELD
        assert thread.release(renewed) == HELD


def test_any_thread_of_the_process_gives_permits_back(api_store: Store) -> None:
    limiter = Concurrency(api_store, "c", 4, lease=30)
    with Handle(limiter) as handle:
        lease = held(handle.attach(), cost=3)
        other = handle.attach()
        assert other.renew(lease) == HELD
        assert other.release(lease) == HELD
        assert limiter.peek("k").remaining == 4


def test_a_lease_that_has_lost_a_permit_keeps_the_others(api_store: Store) -> None:
    limiter = Concurrency(api_store, "c", 9, lease=30)
    with Handle(limiter) as handle:
        thread = handle.attach()
        three = held(thread, cost=3)
        # Its first slot becomes free.
        assert thread.release(copy_of(three, permits=1)) == HELD
        assert limiter.peek("k").remaining == 7
        assert thread.renew(three) == NOT_HELD
        assert three.permits == 2
        assert thread.renew(three) == HELD
        assert thread.release(copy_of(three, permits=1)) == HELD
        assert thread.renew(three) == NOT_HELD
        assert three.permits == 1
        assert thread.release(three) == HELD
        assert limiter.peek("k").remaining == 9


def test_nothing_is_held_if_not_all_can_be(api_store: Store) -> None:
    limiter = Concurrency(api_store, "c", 130, lease=30)
    with Handle(limiter) as handle:
        thread = handle.attach()
        held(thread, cost=100)
        allowed, lease = thread.acquire(b"k", 31)
        assert (allowed, lease.permits) == (DENIED, 0)
        assert thread.release(lease) == NOT_HELD
        assert limiter.peek("k").remaining == 30
        assert held(thread, cost=30).permits == 30


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_a_full_limiter_decides_by_its_policy(clock: ManualClock, on_full: Any) -> None:
    with Store.private(keys=1, clock=clock, on_full=on_full) as store:
        with Handle(Concurrency(store, "c", 1, lease=30, keys=1)) as handle:
            thread = handle.attach()
            answers = [thread.acquire(b"%d" % i) for i in range(300)]
        full = [(allowed, lease) for allowed, lease in answers if lease.full]
        assert bool(full) == (on_full != "evict")
        assert {allowed for allowed, _ in full} <= {ALLOWED if on_full == "allow" else DENIED}
        assert {lease.permits for _, lease in full} <= {0}
        # A key that comes to an evicted one's cell may find its slots held.
        assert {lease.permits for allowed, lease in answers if allowed and not lease.full} == {1}
        assert store.stats().total.full == len(full)
        for _, lease in full:
            assert not lease.maker


def test_a_lease_of_an_evicted_key_is_renewed_only_where_its_key_is() -> None:
    with (
        Store.private(keys=1, on_full="evict") as store,
        Handle(limiter := Concurrency(store, "c", 1, lease=HOUR, keys=8)) as handle,
    ):
        thread = handle.attach()
        statuses = set()
        for i in range(40):
            lease = held(thread, b"%d" % i)
            others = [thread.acquire(b"other:%d:%d" % (i, other))[1] for other in range(50)]
            status = thread.renew(lease)
            statuses.add(status)
            assert status == NOT_HELD or not limiter.acquire(str(i))
            for taken in (lease, *others):
                thread.release(taken)
        assert NOT_HELD in statuses


def test_threads_never_hold_more_than_the_limit(store_name: str) -> None:
    with Store(store_name, keys=100) as store, Handle(Concurrency(store, "c", 2, lease=HOUR, keys=4)) as handle:
        holders: list[int] = []
        counts = [0] * 4

        def work(index: int, thread: Thread) -> None:
            for _ in range(1500):
                allowed, lease = thread.acquire(b"k")
                if allowed:
                    holders.append(index)
                    counts[index] += 1
                    assert len(holders) <= 2
                    holders.remove(index)
                    assert thread.renew(lease) == HELD
                    assert thread.release(lease) == HELD

        workers = [threading.Thread(target=work, args=(i, handle.attach())) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stats = store.stats().limiters["c"]
        assert (stats.allowed, stats.denied) == (sum(counts), 6000 - sum(counts))
        assert sum(counts) > 1500
        assert held(handle.attach(), cost=2)


# Holders that end


def hold_in_a_child(limiter: Concurrency, cost: int) -> Worker:
    """A process that holds permits until it is killed."""
    reading, writing = os.pipe()

    def hold() -> None:
        with Handle(limiter) as handle:
            held(handle.attach(), cost=cost)
            os.write(writing, b"1")
            signal.pause()

    worker = Worker(hold)
    os.close(writing)
    assert os.read(reading, 1) == b"1"
    os.close(reading)
    return worker


@pytest.mark.parametrize("limit", [1, 3, 500])
def test_a_killed_holder_gives_its_permits_back(limit: int) -> None:
    limiter = Concurrency(Store.private(keys=1), "c", limit, lease=HOUR, keys=1)
    worker = hold_in_a_child(limiter, limit)
    try:
        with Handle(limiter) as handle:
            thread = handle.attach()
            for _ in range(100):
                assert thread.acquire(b"k")[0] == DENIED
            worker.kill()
            wait_until(lambda: thread.acquire(b"k")[0], "a permit")
            assert held(thread, cost=limit - 1).permits == limit - 1
    finally:
        worker.kill()


def test_maintenance_finds_a_holder_that_no_process_has_waited_for() -> None:
    limiter = Concurrency(Store.private(keys=1), "c", 3, lease=HOUR, keys=1)
    worker = hold_in_a_child(limiter, 2)
    try:
        with Handle(limiter) as handle:
            thread = handle.attach()
            assert handle.maintain() == c_api.OK
            mine = held(thread)
            assert thread.acquire(b"k")[0] == DENIED
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            assert handle.maintain() == c_api.OK
            assert held(thread, cost=2)
            assert thread.release(mine) == HELD
    finally:
        worker.kill()


def test_maintenance_frees_the_slots_of_many_holders_and_of_all_keys(store_name: str) -> None:
    """Each slot gets an owner of its own, of a pid that no process has: the largest that Linux gives."""
    with Store(store_name, keys=1) as store:
        limiter = Concurrency(store, "c", 70, lease=HOUR, keys=4)
        with Handle(limiter) as handle:
            thread = handle.attach()
            for key in (b"a", b"b", b"c"):
                held(thread, key, 70)
            mine = held(thread, b"d", 9)
            owners = (own_namespace() | number << PID_BITS | GONE for number in itertools.count(1))
            assert replace_owners(store_name, lambda end_ns: next(owners) if end_ns != mine.end_ns else None) == 210
            assert handle.maintain() == c_api.OK
            # Only what was not freed is replaced now.
            assert replace_owners(store_name, lambda _: this_process(), lambda owner: owner % 2**PID_BITS == GONE) == 0
            assert thread.release(mine) == HELD
            assert held(thread, b"b", 70)


GONE = 2**PID_BITS - 1


def own_namespace() -> int:
    return this_process() >> (PID_BITS + INCARNATION_BITS) << (PID_BITS + INCARNATION_BITS)


def replace_owners(
    name: str,
    owner_for: Callable[[int], int | None],
    of: Callable[[int], bool] = lambda owner: owner == this_process(),
) -> int:
    """Give the slots of some owners in the store's one extent another owner, by their ends; how many were changed."""
    (extent,) = extents(path_of(name))
    count = 0
    with open(path_of(name), "r+b") as file:
        memory = bytearray(os.pread(file.fileno(), extent["bytes"], extent["offset"]))
        words = memoryview(memory).cast("Q")
        for at in range(0, len(words), 2):
            if of(words[at]) and words[at + 1] and (owner := owner_for(words[at + 1])) is not None:
                words[at] = owner
                count += 1
        os.pwrite(file.fileno(), memory, extent["offset"])
    return count


@pytest.mark.parametrize("namespace", [0, 1 << (PID_BITS + INCARNATION_BITS)], ids=["unknown", "another"])
def test_a_holder_in_another_pid_namespace_is_never_taken_for_dead(store_name: str, namespace: int) -> None:
    """Its pid means another process there."""
    with Store(store_name, keys=1) as store, Handle(Concurrency(store, "c", 1, lease=HOUR, keys=1)) as handle:
        thread = handle.attach()
        held(thread)
        assert replace_owners(store_name, lambda _: namespace ^ own_namespace() * bool(namespace) | GONE) == 1
        for _ in range(1000):
            assert thread.acquire(b"k")[0] == DENIED
        assert handle.maintain() == c_api.OK
        assert thread.acquire(b"k")[0] == DENIED
        assert replace_owners(store_name, lambda _: own_namespace() | GONE, lambda o: o % 2**PID_BITS == GONE) == 1
        wait_until(lambda: thread.acquire(b"k")[0], "a permit")


def test_a_child_holds_permits_of_its_own(api_store: Store, in_child: Callable[[Callable[[], Any]], Any]) -> None:
    limiter = Concurrency(api_store, "c", 3, lease=HOUR)
    with Handle(limiter) as handle:
        thread = handle.attach()
        lease = held(thread)

        def child() -> Any:
            found = [status_of(lambda: thread.acquire(b"k")), thread.renew(lease), thread.release(lease)]
            own = handle.attach()
            found += [own.renew(copy_of(lease)), own.release(copy_of(lease))]
            mine = held(own)
            found += [own.renew(mine), own.release(mine), limiter.peek("k").remaining]
            handle.close()
            return found

        forked = c_api.FORKED
        assert in_child(child) == [forked, forked, forked, NOT_HELD, NOT_HELD, HELD, HELD, 2]
        assert thread.renew(lease) == HELD
        assert thread.release(lease) == HELD


def test_permits_come_back_after_the_store_is_closed(store_name: str, clock: ManualClock) -> None:
    store = Store(store_name, keys=10, clock=clock)
    with (
        Handle(Concurrency(store, "c", 2, lease=HOUR, keys=4)) as handle,
        Handle(Concurrency(store, "d", 2, lease=HOUR, keys=4)) as another,
    ):
        thread, wrong = handle.attach(), another.attach()
        lease = held(thread, cost=2)
        store.close()
        assert wrong.release(lease) == wrong.renew(lease) == c_api.WRONG_LIMITER
        assert status_of(lambda: thread.acquire(b"k")) == c_api.CLOSED
        assert thread.renew(lease) == c_api.CLOSED
        assert handle.maintain() == c_api.CLOSED
        with Store(store_name, keys=10, clock=clock) as other:
            limiter = Concurrency(other, "c", 2, lease=HOUR, keys=4)
            assert limiter.peek("k").remaining == 0
            assert thread.release(lease) == HELD
            assert limiter.peek("k").remaining == 2
            assert thread.release(lease) == NOT_HELD


# Misuse


def test_a_lease_is_given_back_once() -> None:
    with Store.private(keys=10) as store, Handle(limiter := Concurrency(store, "c", 2, lease=HOUR)) as handle:
        thread = handle.attach()
        lease, other = held(thread), held(thread)
        copy = copy_of(lease)
        assert thread.release(lease) == HELD
        assert bytes(lease) == bytes(ctypes.sizeof(Lease))
        assert thread.release(lease) == thread.renew(lease) == NOT_HELD
        assert thread.release(copy) == NOT_HELD
        assert limiter.peek("k").remaining == 1
        assert thread.release(other) == HELD


def test_a_lease_of_another_limiter_is_refused(api_store: Store, clock: ManualClock) -> None:
    with Store.private(keys=10, clock=clock) as store:
        limiter = Concurrency(api_store, "c", 2, lease=HOUR)
        others = [
            Concurrency(api_store, "d", 2, lease=HOUR), Concurrency(api_store, "c", 3, lease=HOUR),
            Concurrency(store, "c", 2, lease=HOUR), TokenBucket(api_store, "c", "1/hour"),
        ]  # fmt: skip
        with Handle(limiter) as handle:
            lease = held(handle.attach(), cost=2)
            for other in others:
                with Handle(other) as another:
                    thread = another.attach()
                    assert thread.renew(lease) == thread.release(lease) == c_api.WRONG_LIMITER
            assert limiter.peek("k").remaining == 0
            # An object of its own, of the same limiter.
            with Handle(Concurrency(api_store, "c", 2, lease=HOUR)) as same:
                assert same.attach().release(lease) == HELD


def test_a_damaged_lease_gives_nothing_back(api_store: Store) -> None:
    limiter = Concurrency(api_store, "c", 3, lease=HOUR, keys=4)
    with Handle(limiter) as handle:
        thread = handle.attach()
        lease = held(thread)
        for most in (2**32, 2**63, 2**64 - 1):
            for name in ("cell", "slot"):
                for permits in (1, 2, most):
                    damaged = copy_of(lease, permits=permits, **{name: most})
                    assert thread.renew(damaged) == NOT_HELD
                    assert thread.release(damaged) == NOT_HELD
            assert thread.release(copy_of(lease, owner=most)) == NOT_HELD
            assert thread.release(copy_of(lease, end_ns=most)) == NOT_HELD
            assert thread.renew(copy_of(lease, key=most)) == NOT_HELD
        assert thread.release(copy_of(lease, permits=0)) == NOT_HELD
        assert limiter.peek("k").remaining == 2


def test_misuse_of_acquisitions_takes_nothing(api_store: Store) -> None:
    limiter = Concurrency(api_store, "c", 3, lease=HOUR)
    bucket = TokenBucket(api_store, "bucket", "100/hour")
    with Handle(limiter) as handle, Handle(bucket) as other:
        thread = handle.attach()
        for cost in (4, 2**32, 2**63, 2**64 - 1):
            assert status_of(lambda cost=cost: thread.acquire(b"k", cost)) == c_api.COST_EXCEEDS_LIMIT
        assert status_of(lambda: thread.acquire(b"k", kind=5)) == c_api.INVALID_ARGUMENT
        assert status_of(lambda: thread.acquire(b"k", flags=c_api.BOOK)) == c_api.INVALID_ARGUMENT
        assert status_of(lambda: thread.acquire(b"k", rate=other.rate(5, NS))) == c_api.INVALID_RATE
        assert status_of(lambda: handle.rate(5, NS)) == c_api.INVALID_RATE
        request, invalid = request_of(b"k"), c_api.INVALID_ARGUMENT
        lease = copy_of(Lease(), maker=7, permits=7)
        assert API.acquire(None, request, lease) == invalid
        assert API.acquire(thread.pointer, None, lease) == invalid
        assert API.acquire(thread.pointer, request, None) == invalid
        for call in (API.renew, API.release):
            assert call(None, Lease()) == invalid
            assert call(thread.pointer, None) == invalid
        # What a failed call leaves holds nothing.
        assert bytes(lease) == bytes(ctypes.sizeof(Lease))
        assert limiter.peek("k").remaining == 3
        assert api_store.stats().total.allowed == api_store.stats().total.denied == 0


def test_each_call_refuses_threads_of_the_wrong_kind_of_limiter(api_store: Store) -> None:
    with (
        Handle(Concurrency(api_store, "c", 3, lease=HOUR)) as one,
        Handle(TokenBucket(api_store, "bucket", "100/hour")) as other,
    ):
        holds, decides = one.attach(), other.attach()
        wrong = c_api.WRONG_LIMITER
        for _ in range(2):
            assert holds.allow(b"k") == holds.allow_hash(7) == wrong
            for call in (holds.decide, holds.peek, holds.refund):
                assert status_of(lambda call=call: call(b"k")) == wrong
            assert status_of(lambda: holds.reset(b"k")) == wrong
            assert status_of(lambda: holds.decide_many([request_of(b"k")])) == wrong
            requests = (c_api.Request * 2)(request_of(b"k"), request_of(b"k"))
            for threads in ([holds, holds], [decides, holds], [holds, decides]):
                assert API.decide_all(array_of(threads), requests, 2, None, None) == wrong
            assert status_of(lambda: decides.acquire(b"k")) == wrong
            assert decides.renew(Lease()) == decides.release(Lease()) == wrong
        assert api_store.stats().total.allowed == 0
        # After a close, too.
        api_store.close()
        assert holds.allow(b"k") == decides.release(Lease()) == wrong


def test_a_limiter_that_needs_python_is_refused() -> None:
    with Store.private(keys=10, clock="time") as store:
        assert status_of(lambda: Handle(Concurrency(store, "c", 1, keys=1))) == c_api.NEEDS_PYTHON

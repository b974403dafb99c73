"""The C API: it decides as Python does, keeps what it needs alive, and every misuse ends with a status."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from ctypes import c_int32, c_uint64, c_void_p
from typing import Any

import c_api
import pytest
from c_api import API, Handle, Result, Thread, numbers, numbers_of, request_of, status_of
from limiter_makers import OF_A_HUNDRED
from process_helpers import DEADLINE_S, counter_lines, path_of

import forebay
from forebay import (
    AllOf,
    BucketedWindow,
    CostExceedsLimit,
    Credits,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    Rate,
    SegmentRemovedWarning,
    Store,
    TokenBucket,
)
from forebay.segment import layout
from forebay.snapshots import resize
from forebay.testing import ManualClock

KEY = "user:42"
NS = 10**9


@pytest.fixture
def api_store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as store:
        yield store


# It decides as Python does


@pytest.mark.parametrize("kind", OF_A_HUNDRED)
def test_a_native_thread_decides_as_python_does(kind: str, clock: ManualClock) -> None:
    """The same requests, by Python on one store and by the C API on another, at the same times."""
    choose = random.Random(kind)
    with Store.private(keys=100, clock=clock) as one, Store.private(keys=100, clock=clock) as other:
        limiter = OF_A_HUNDRED[kind](one)
        with Handle(OF_A_HUNDRED[kind](other)) as handle:
            thread = handle.attach()
            bookings: list[tuple[Any, Result, int]] = []
            booked_any = False
            for _ in range(600):
                cost = choose.choice([0, 1, 1, 2, 30, 100])
                match choose.choice(["hit", "hit", "hit", "peek", "reserve", "cancel", "refund", "reset", "time"]):
                    case "hit":
                        assert numbers(thread.decide(b"k", cost)) == numbers_of(limiter.hit("k", cost))
                    case "peek":
                        assert numbers(thread.peek(b"k", cost)) == numbers_of(limiter.peek("k", cost))
                    case "reserve":
                        delay_s = choose.choice([0, 60, 3600])
                        booked = limiter.reserve("k", cost, delay_s)
                        result = thread.decide(b"k", cost, flags=c_api.BOOK, max_delay_ns=delay_s * NS)
                        assert bool(result.allowed) == booked.allowed
                        if booked.allowed:
                            assert result.delay_ns == booked.delay_ns
                            bookings.append((booked, result, cost))
                            booked_any = True
                    case "cancel" if bookings:
                        booked, result, cost = bookings.pop()
                        booked.cancel()
                        if result.charge:
                            thread.refund(b"k", cost, result.charge)
                    case "refund":
                        limiter.refund("k", cost)
                        thread.refund(b"k", cost)
                    case "reset" if choose.random() < 0.2:
                        limiter.reset("k")
                        thread.reset(b"k")
                    case _:
                        clock.advance(choose.choice([0.001, 7, 36, 900]))
            assert booked_any
        counts, native = one.stats().total, other.stats().total
        # Python's cancel of a booking of cost 0 counts nothing either.
        assert (native.allowed, native.denied) == (counts.allowed, counts.denied)
        assert native.denied > 20
        assert native.allowed > 20


@pytest.mark.parametrize("kind", OF_A_HUNDRED)
def test_python_and_native_threads_charge_one_state(kind: str, api_store: Store) -> None:
    limiter = OF_A_HUNDRED[kind](api_store)
    with Handle(limiter) as handle:
        thread = handle.attach()
        allowed = [limiter.allow("k") if turn % 2 else thread.allow(b"k") for turn in range(150)]
        assert sum(allowed) == 100
        assert limiter.peek("k").remaining == thread.peek(b"k").remaining == 0
    assert api_store.stats().total.allowed == 100
    assert api_store.stats().total.denied == 50


def test_a_staggered_window_has_the_same_offset(api_store: Store, clock: ManualClock) -> None:
    limiter = FixedWindow(api_store, "api", "100/hour", align="stagger")
    with Handle(limiter) as handle:
        thread = handle.attach()
        for key in ("a", "b", "c"):
            limiter.allow(key)
            assert numbers(thread.peek(key.encode())) == numbers_of(limiter.peek(key))


@pytest.mark.parametrize(
    ("key", "kind", "encoded"),
    [
        ("", c_api.TEXT, b""),
        ("user:42", c_api.TEXT, b"user:42"),
        ("käse", c_api.TEXT, "käse".encode()),
        ("\N{SNOWMAN}" * 9, c_api.TEXT, ("\N{SNOWMAN}" * 9).encode()),
        (b"", c_api.BYTES, b""),
        (b"\0\xff", c_api.BYTES, b"\0\xff"),
        (0, c_api.INT, bytes(8)),
        (-7, c_api.INT, (-7).to_bytes(8, "little", signed=True)),
        (2**63 - 1, c_api.INT, b"\xff" * 7 + b"\x7f"),
        (2**63, c_api.LARGE_INT, bytes(7) + b"\x80\x00"),
        (-(2**70), c_api.LARGE_INT, (-(2**70)).to_bytes(9, "little", signed=True)),
        ((), c_api.PARTS, b""),
        (
            ("a", b"bc", 7, -300),
            c_api.PARTS,
            b"s" + (1).to_bytes(8, "little") + b"a" + b"b" + (2).to_bytes(8, "little") + b"bc" + b"i"
            + (1).to_bytes(8, "little") + b"\x07" + b"i" + (2).to_bytes(8, "little")
            + (-300).to_bytes(2, "little", signed=True),
        ),
    ],
)  # fmt: skip
def test_a_key_has_the_hash_of_the_python_object(api_store: Store, key: Any, kind: int, encoded: bytes) -> None:
    limiter = TokenBucket(api_store, "api", "100/hour")
    with Handle(limiter) as handle:
        thread = handle.attach()
        limiter.hit(key, 40)
        assert thread.peek(encoded, kind=kind).remaining == 60
        assert thread.peek(key_hash=handle.hash(encoded, kind)).remaining == 60
        assert thread.decide(encoded, 10, kind=kind).remaining == 50
        assert thread.allow_hash(handle.hash(encoded, kind)) == c_api.ALLOWED
        assert limiter.peek(key).remaining == 49
        for other in range(5):
            if other != kind and (other != c_api.INT or len(encoded) == 8):
                assert thread.peek(encoded, kind=other).remaining == 100


@pytest.mark.parametrize("kind", OF_A_HUNDRED)
def test_a_decision_at_a_tick_is_the_one_of_that_time(kind: str, clock: ManualClock) -> None:
    choose = random.Random(kind)
    still = ManualClock(clock.now())
    with Store.private(keys=100, clock=clock) as one, Store.private(keys=100, clock=still) as other:
        limiter = OF_A_HUNDRED[kind](other)
        with Handle(OF_A_HUNDRED[kind](one)) as handle:
            thread = handle.attach()
            decided = []
            for _ in range(600):
                decided.append(thread.allow_at_tick(b"k"))
                assert decided[-1] == limiter.allow("k")
                clock.advance(choose.choice([0, 1, 9]))
                if choose.random() < 0.3:
                    assert thread.tick() == c_api.OK
                    still.set(clock.now())
            assert 100 <= sum(decided) < 600


@pytest.mark.parametrize("kind", OF_A_HUNDRED)
def test_requests_count_at_their_tick(kind: str, clock: ManualClock) -> None:
    """Those of a thread that is late may be as many as at the time of its tick, and others come beside them."""
    clock.advance(7200)
    with Store.private(keys=100, clock=clock) as one, Store.private(keys=100, clock=clock) as other:
        limiter, like = OF_A_HUNDRED[kind](one), OF_A_HUNDRED[kind](other)
        with Handle(limiter) as handle:
            late = handle.attach()
            assert limiter.allow("k") == like.allow("k") is True
            clock.advance(3 * 3600)
            assert late.tick() == c_api.OK
            as_of_then = [like.allow("k") for _ in range(101)]
            clock.advance(3 * 3600)
            assert [late.allow_at_tick(b"k") for _ in range(101)] == as_of_then
            assert [limiter.allow("k") for _ in range(101)] == [like.allow("k") for _ in range(101)]
            # Late requests take no permits that have come since.
            assert late.allow_at_tick(b"k") == c_api.DENIED


def test_a_tick_that_is_late_brings_no_permits_of_later(api_store: Store, clock: ManualClock) -> None:
    limiter = TokenBucket(api_store, "api", "10/second")
    with Handle(limiter) as handle:
        late, thread = handle.attach(), handle.attach()
        clock.advance(3600)
        assert [thread.allow(b"k") for _ in range(11)] == [c_api.ALLOWED] * 10 + [c_api.DENIED]
        assert late.allow_at_tick(b"k") == c_api.DENIED
        clock.advance(0.5)
        assert late.allow_at_tick(b"k") == c_api.DENIED
        assert late.tick() == c_api.OK
        assert [late.allow_at_tick(b"k") for _ in range(6)] == [c_api.ALLOWED] * 5 + [c_api.DENIED]
        assert api_store.stats().limiters["api"].allowed == 15


def test_a_rate_judges_one_request(api_store: Store) -> None:
    limiter = TokenBucket(api_store, "api", "100/hour")
    with Handle(limiter) as handle:
        thread = handle.attach()
        tier = handle.rate(1000, 3600 * NS)
        small = handle.rate(100, 3600 * NS, 10)
        assert thread.decide(b"k", 500, rate=tier).remaining == 500
        assert numbers(thread.peek(b"k", rate=small)) == numbers_of(limiter.peek("k", rate="100/hour", burst=10))
        assert numbers(thread.decide(b"k", 7, rate=tier)) == numbers_of(limiter.peek("k", 0, rate="1000/hour"))
        thread.refund(b"k", 7, rate=tier)
        assert limiter.peek("k", rate="1000/hour").remaining == 500
        assert status_of(lambda: thread.decide(b"k", 501, rate=small)) == c_api.COST_EXCEEDS_LIMIT


def test_a_native_thread_spends_permits_above_the_burst(api_store: Store, clock: ManualClock) -> None:
    limiter = TokenBucket(api_store, "api", "100/hour", burst=10)
    with Handle(limiter) as handle:
        thread = handle.attach()
        tier = handle.rate(1000, 3600 * NS, 50)
        limiter.add("k", 20)
        assert numbers(thread.peek(b"k")) == numbers_of(limiter.peek("k"))
        assert thread.decide(b"k", 7).remaining == 23
        assert thread.decide(b"k", 8, rate=tier).remaining == 55
        booked = thread.decide(b"k", 2, flags=c_api.BOOK, max_delay_ns=NS)
        assert (booked.delay_ns, booked.remaining) == (0, 13)
        thread.refund(b"k", 2)
        assert limiter.peek("k").remaining == 13
        thread.refund(b"k", 2, booked.charge)
        assert limiter.peek("k").remaining == 15
        assert numbers(thread.decide(b"k", 6)) == numbers_of(limiter.peek("k", 0))
        thread.reset(b"k")
        assert limiter.peek("k").remaining == 10


def test_a_window_takes_rates_of_its_period_only(api_store: Store) -> None:
    with Handle(FixedWindow(api_store, "api", "100/hour")) as handle:
        assert handle.attach().decide(b"k", 40, rate=handle.rate(50, 3600 * NS)).remaining == 10
        assert status_of(lambda: handle.rate(50, 60 * NS)) == c_api.INVALID_RATE
        assert status_of(lambda: handle.rate(50, 3600 * NS, 10)) == c_api.INVALID_RATE


@pytest.mark.parametrize(("limit", "period_ns"), [(0, NS), (1, 0), (2, 1), (1, 2**64 - 1), (2**41, 2**60)])
def test_what_is_no_rate_is_refused(api_store: Store, limit: int, period_ns: int) -> None:
    with Handle(TokenBucket(api_store, "api", "100/hour")) as handle:
        with pytest.raises(forebay.InvalidRate):
            Rate.per_ns(limit, period_ns)
        assert status_of(lambda: handle.rate(limit, period_ns)) == c_api.INVALID_RATE


def test_a_rate_of_another_limiter_is_refused(api_store: Store) -> None:
    one = Handle(TokenBucket(api_store, "api", "100/hour"))
    other = Handle(TokenBucket(api_store, "api", "100/hour"))
    thread = one.attach()
    for call in (thread.decide, thread.peek, thread.refund):
        assert status_of(lambda call=call: call(b"k", rate=other.rate(5, NS))) == c_api.INVALID_RATE
    one.close()
    other.close()


def test_minimum_intervals_and_queues_book_ahead(api_store: Store) -> None:
    limiter = LeakyBucket(api_store, "queue", "1/second", 4)
    with Handle(limiter) as handle:
        thread = handle.attach()
        booked = [thread.decide(b"k", flags=c_api.BOOK, max_delay_ns=10 * NS) for _ in range(5)]
        assert [result.delay_ns for result in booked] == [0, NS, 2 * NS, 3 * NS, 0]
        assert [result.allowed for result in booked] == [1, 1, 1, 1, 0]
        thread.refund(b"k", 1, booked[3].charge)
        assert limiter.reserve("k").delay_ns == 3 * NS
    with Handle(MinInterval(api_store, "pause", "5s")) as handle:
        thread = handle.attach()
        assert thread.decide(b"k", flags=c_api.BOOK).delay_ns == 0
        assert thread.decide(b"k", flags=c_api.BOOK).retry_after_ns == 5 * NS
        assert thread.decide(b"k", flags=c_api.BOOK, max_delay_ns=2**64 - 1).delay_ns == 5 * NS


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_a_full_store_decides_by_its_policy(clock: ManualClock, on_full: Any) -> None:
    with Store.private(keys=1, clock=clock, on_full=on_full) as store:
        limiter = TokenBucket(store, "api", "100/hour")
        with Handle(limiter) as handle:
            thread = handle.attach()
            results = [thread.decide(b"%d" % i, 50) for i in range(2000)]
        stats = store.stats().total
        full = [result for result in results if result.full]
        assert stats.full == len(full)
        assert (stats.evicted > 0) == (on_full == "evict")
        assert bool(full) == (on_full != "evict")
        assert {result.allowed for result in full} <= {on_full == "allow"}
        assert all(result.charge == 0 for result in full)
        assert all(result.retry_after_ns for result in full if not result.allowed)


@pytest.mark.parametrize("kind", OF_A_HUNDRED)
def test_a_batch_decides_as_allow_many_does(kind: str, clock: ManualClock) -> None:
    choose = random.Random(kind)
    with Store.private(keys=1000, clock=clock) as one, Store.private(keys=1000, clock=clock) as other:
        limiter = OF_A_HUNDRED[kind](one)
        with Handle(OF_A_HUNDRED[kind](other)) as handle:
            thread = handle.attach()
            for size in (0, 1, 31, 255, 256, 257, 1000):
                keys = [f"user:{choose.randrange(8)}" for _ in range(size)]
                costs = [choose.choice([0, 1, 2, 7]) for _ in range(size)]
                requests = [
                    request_of(None, cost, key_hash=handle.hash(key.encode()))
                    if choose.random() < 0.5
                    else request_of(key.encode(), cost)
                    for key, cost in zip(keys, costs, strict=True)
                ]
                assert thread.decide_many(requests) == limiter.allow_many(keys, costs)
                clock.advance(400)
        assert other.stats().limiters == one.stats().limiters
        assert one.stats().total.denied


def test_a_batch_takes_each_requests_rate(api_store: Store) -> None:
    with Handle(TokenBucket(api_store, "api", "100/hour")) as handle:
        thread = handle.attach()
        rate = handle.rate(10, 3600 * NS)
        assert thread.decide_many([request_of(b"k", 6, rate=rate), request_of(b"k", 6, rate=rate)]) == [1, 0]


def test_an_invalid_request_in_a_batch_charges_nothing(api_store: Store) -> None:
    limiter = TokenBucket(api_store, "api", "100/hour")
    with Handle(limiter) as handle:
        thread = handle.attach()
        good = [request_of(b"k")] * 600
        for bad, status in (
            (request_of(b"k", 101), c_api.COST_EXCEEDS_LIMIT),
            (request_of(b"k", kind=9), c_api.INVALID_ARGUMENT),
            (request_of(b"k", flags=c_api.BOOK), c_api.INVALID_ARGUMENT),
        ):
            assert status_of(lambda bad=bad: thread.decide_many([*good, bad])) == status
        one = request_of(b"k")
        assert API.decide_many(None, one, 1, ctypes.c_uint8()) == c_api.INVALID_ARGUMENT
        assert API.decide_many(thread.pointer, None, 1, ctypes.c_uint8()) == c_api.INVALID_ARGUMENT
        assert API.decide_many(thread.pointer, one, 1, None) == c_api.INVALID_ARGUMENT
        assert API.decide_many(thread.pointer, None, 0, None) == c_api.OK
    assert limiter.peek("k").remaining == 100
    assert api_store.stats().total.allowed == 0


def test_a_refund_with_unknown_flags_is_refused(api_store: Store) -> None:
    with Handle(TokenBucket(api_store, "api", "100/hour")) as handle:
        thread = handle.attach().pointer
        assert API.refund(thread, request_of(b"k", flags=c_api.BOOK), 0) == c_api.OK
        assert API.refund(thread, request_of(b"k", flags=2**31), 0) == c_api.INVALID_ARGUMENT


@pytest.mark.parametrize("size", [-1, -(2**31), -(2**63), 2**63])
def test_a_negative_size_or_count_is_refused(api_store: Store, size: int) -> None:
    """A caller has taken a failed call's result for a length."""
    limiter = TokenBucket(api_store, "api", "100/hour")
    with Handle(limiter) as handle:
        thread = handle.attach().pointer
        request = request_of(b"k")
        request.key_size = size
        invalid = c_api.INVALID_ARGUMENT
        assert API.allow(thread, b"k", size) == invalid
        assert API.allow_at_tick(thread, b"k", size) == invalid
        assert API.hash(handle.pointer, c_api.TEXT, b"k", size, c_uint64()) == invalid
        assert API.decide(thread, request, None) == API.peek(thread, request, None) == invalid
        assert API.refund(thread, request, 0) == API.reset(thread, request) == invalid
        for count in (size, 2**63 // ctypes.sizeof(c_api.Request) + 1):
            assert API.decide_many(thread, request_of(b"k"), count, ctypes.c_uint8()) == invalid
        assert API.decide_many(thread, request, 1, ctypes.c_uint8()) == invalid
        without = request_of(None)
        without.key_size = size
        assert API.decide(thread, without, None) == API.refund(thread, without, 0) == invalid
        assert API.decide_many(thread, without, 1, ctypes.c_uint8()) == invalid
        assert API.decide_all(c_api.array_of(handle.threads), request, 1, None, None) == invalid
        assert API.decide_all(c_api.array_of(handle.threads), request_of(b"k"), size, None, None) == invalid
    assert api_store.stats().total.allowed == 0


# Life


def test_handles_keep_the_limiter_and_its_memory_alive(clock: ManualClock) -> None:
    store = Store.private(keys=100, clock=clock)
    gone = weakref.ref(store)
    handle = Handle(TokenBucket(store, "api", "100/hour"))
    thread, rate = handle.attach(), handle.rate(5, NS)
    del store, handle.limiter
    API.limiter_close(handle.pointer)
    gc.collect()
    assert thread.decide(b"k", 60).remaining == 40
    assert thread.peek(b"k", rate=rate).limit == 5
    assert gone() is not None
    handle.pointer = c_void_p()
    handle.close()
    gc.collect()
    assert gone() is None


def test_a_closed_store_says_so(store_name: str, clock: ManualClock) -> None:
    store = Store(store_name, keys=100, clock=clock)
    other = Store.private(keys=1)
    limiter = TokenBucket(store, "api", "100/hour")
    handle = Handle(limiter)
    thread, rate = handle.attach(), handle.rate(5, NS)
    assert thread.allow(b"k") == c_api.ALLOWED
    other.close()
    assert thread.allow(b"k") == c_api.ALLOWED
    store.close()
    for _ in range(2):
        assert thread.allow(b"k") == c_api.CLOSED
        assert thread.allow_hash(7) == thread.allow_at_tick(b"k") == thread.tick() == c_api.CLOSED
        for call in (thread.decide, thread.peek, thread.refund):
            assert status_of(lambda call=call: call(b"k")) == c_api.CLOSED
        assert status_of(lambda: thread.peek(b"k", rate=rate)) == c_api.CLOSED
        assert status_of(lambda: thread.decide(b"k", 0)) == c_api.CLOSED
        assert status_of(lambda: thread.reset(b"k")) == c_api.CLOSED
        assert status_of(lambda: thread.decide_many([request_of(b"k")])) == c_api.CLOSED
        assert status_of(handle.attach) == c_api.CLOSED
        assert status_of(lambda: Handle(limiter)) == c_api.CLOSED
        assert handle.maintain() == c_api.CLOSED
    handle.close()
    with Store(store_name, keys=100, clock=clock) as store:
        assert store.stats().limiters["api"].allowed == 2


def test_the_file_stays_open_until_the_last_handle_is_closed(store_name: str) -> None:
    """So that no other process counts in a line in which a thread of this one may still count."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    store = Store(store_name, keys=100)
    handle = Handle(TokenBucket(store, "api", "100/hour"))
    first, second = handle.attach(), handle.attach()
    store.close()
    API.limiter_close(handle.pointer)
    handle.pointer = c_void_p()
    first.detach()
    assert descriptors() == before + 1
    second.detach()
    assert descriptors() == before


def test_each_thread_counts_in_a_line_of_its_own(store_name: str) -> None:
    with Store(store_name, keys=100) as store:
        limiter = TokenBucket(store, "api", "1000/hour")
        limiter.allow("k")
        with Handle(limiter) as handle:
            threads = [handle.attach() for _ in range(3)]
            assert lines_of(store_name) == 4
            for thread in threads:
                thread.allow(b"k")
            threads[1].detach()
            # It continues the counts of the line that was given back.
            handle.attach().allow(b"k")
            assert lines_of(store_name) == 4
        assert store.stats().limiters["api"].allowed == 5


def lines_of(name: str) -> int:
    """How many counter lines were ever used."""
    lines = counter_lines(path_of(name))[: layout.OWNED_COUNTER_LINES]
    return sum(line["limiter"] != 0 for line in lines)


def test_threads_beyond_the_last_line_count_in_the_shared_one(store_name: str) -> None:
    with Store(store_name, keys=100) as store, Handle(TokenBucket(store, "api", "10000/hour")) as handle:
        threads = [handle.attach() for _ in range(layout.OWNED_COUNTER_LINES + 4)]
        for thread in threads:
            assert thread.allow(b"k") == c_api.ALLOWED
        assert store.stats().limiters["api"].allowed == len(threads)


def test_a_child_must_attach_again(api_store: Store, in_child: Callable[[Callable[[], Any]], Any]) -> None:
    limiter = TokenBucket(api_store, "api", "100/hour")
    with Handle(limiter) as handle:
        thread = handle.attach()
        rate = handle.rate(50, 3600 * NS)
        assert thread.allow(b"k") == c_api.ALLOWED

        def child() -> Any:
            found = [thread.allow(b"k"), thread.allow_hash(1), status_of(lambda: thread.decide(b"k"))]
            own = handle.attach()
            thread.detach()
            found += [own.allow(b"k"), own.peek(b"k", rate=rate).limit]
            handle.close()
            return found

        assert in_child(child) == [c_api.FORKED, c_api.FORKED, c_api.FORKED, c_api.ALLOWED, 50]
        assert thread.allow(b"k") == c_api.ALLOWED
        assert thread.peek(b"k").remaining == 97
    assert api_store.stats().limiters["api"].allowed == 3


def test_a_close_in_the_child_leaves_the_parents_threads(
    store_name: str, in_child: Callable[[Callable[[], Any]], Any]
) -> None:
    with Store(store_name, keys=100) as store, Handle(TokenBucket(store, "api", "100/hour")) as handle:
        thread = handle.attach()
        thread.allow(b"k")

        def child() -> int:
            store.close()
            status = thread.allow(b"k")
            handle.close()
            return status

        assert in_child(child) == c_api.FORKED
        # The parent still owns its line: a second process takes another one.
        assert thread.allow(b"k") == c_api.ALLOWED

        def other() -> None:
            with Store(store_name, keys=100) as again:
                TokenBucket(again, "api", "100/hour").allow("k")

        in_child(other)
        assert lines_of(store_name) == 2
        assert store.stats().limiters["api"].allowed == 3


def test_maintenance_warns_of_a_removed_store(store_name: str) -> None:
    with Store(store_name, keys=10) as store, Handle(TokenBucket(store, "api", "100/hour")) as handle:
        assert handle.maintain() == c_api.OK
        subprocess.run(
            [sys.executable, "-c", f"import forebay; forebay.Store.unlink({store_name!r})"], check=True, env=os.environ
        )
        with pytest.warns(SegmentRemovedWarning):
            assert handle.maintain() == c_api.OK
        assert handle.maintain() == c_api.OK


def test_decisions_go_on_at_the_end_of_the_interpreter() -> None:
    """Calls that need Python end with a status."""
    program = """
import atexit

def late():
    # Runs after the C API's own handler, which is registered later.
    out = c_api.c_void_p()
    print(thread.allow(b"k"), c_api.API.attach(handle.pointer, out), c_api.API.limiter_open(limiter, out))
    thread.detach()
    handle.close()

atexit.register(late)
import c_api
from forebay import Store, TokenBucket

limiter = TokenBucket(Store.private(keys=1), "api", "100/hour")
handle = c_api.Handle(limiter)
thread = handle.attach()
"""
    assert output_of(program) == "1 -10 -10\n"


def test_the_end_of_the_interpreter_waits_for_calls_that_have_begun() -> None:
    """While it ends, one thread is in `attach`, and stays there until another thread finds the gate shut."""
    program = """
import atexit
import threading

def late():
    # Runs after the C API's own handler, which is registered later.
    print(answers)

atexit.register(late)
import c_api
from forebay import Store, TokenBucket

def slow(*arguments):
    inside.set()
    shut.wait()
    return counter_line(*arguments)

def attach():
    answers.append(c_api.API.attach(handle.pointer, c_api.c_void_p()))

def watch():
    while c_api.API.maintain(handle.pointer) != c_api.FINALIZING:
        pass
    shut.set()

answers = []
inside, shut = threading.Event(), threading.Event()
store = Store.private(keys=1)
handle = c_api.Handle(TokenBucket(store, "api", "100/hour"))
counter_line = store.attachment.counter_line
store.attachment.counter_line = slow
for target in (attach, watch):
    threading.Thread(target=target, daemon=True).start()
inside.wait()
"""
    assert output_of(program) == "[0]\n"


def output_of(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=environment, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


# Misuse


def test_nothing_else_than_a_limiter_of_a_store_is_opened(api_store: Store) -> None:
    bucket = TokenBucket(api_store, "api", "100/hour")
    for thing in (None, 7, "api", api_store, Handle, bucket.allow, AllOf(bucket, bucket)):
        assert status_of(lambda thing=thing: Handle(thing)) == c_api.NOT_A_LIMITER


def test_a_limiter_that_needs_python_is_refused() -> None:
    with Store.private(keys=10, clock="time") as store:
        assert status_of(lambda: Handle(TokenBucket(store, "api", "100/hour"))) == c_api.NEEDS_PYTHON


def test_limiters_whose_decisions_need_python_are_refused(api_store: Store) -> None:
    window = FixedWindow(api_store, "quota", "100/month", align="calendar", timezone="UTC")
    for limiter in (window, TokenBucket(api_store, "api", "100/hour", initial=5), Credits(api_store, "paid")):
        assert status_of(lambda limiter=limiter: Handle(limiter)) == c_api.NEEDS_PYTHON


def test_null_ends_with_a_status(api_store: Store) -> None:
    limiter = TokenBucket(api_store, "api", "100/hour")
    with Handle(limiter) as handle:
        thread = handle.attach()
        request, result, out = request_of(b"k"), Result(), c_void_p()
        invalid = c_api.INVALID_ARGUMENT
        opens = ctypes.CFUNCTYPE(c_int32, c_void_p, ctypes.POINTER(c_void_p))(
            ctypes.cast(API.limiter_open, c_void_p).value
        )
        assert opens(None, out) == invalid
        assert opens(id(limiter), None) == invalid
        assert API.attach(None, out) == invalid
        assert API.attach(handle.pointer, None) == invalid
        assert API.rate_open(None, 1, NS, 0, out) == invalid
        assert API.rate_open(handle.pointer, 1, NS, 0, None) == invalid
        assert API.maintain(None) == invalid
        assert API.hash(None, 0, b"k", 1, c_uint64()) == invalid
        assert API.hash(handle.pointer, 0, b"k", 1, None) == invalid
        assert API.hash(handle.pointer, 0, None, 1, c_uint64()) == invalid
        assert API.allow(None, b"k", 1) == invalid
        assert API.allow(thread.pointer, None, 1) == invalid
        assert API.allow_hash(None, 1) == invalid
        assert API.tick(None) == invalid
        assert API.allow_at_tick(None, b"k", 1) == invalid
        assert API.allow_at_tick(thread.pointer, None, 1) == invalid
        for call in (API.decide, API.peek):
            assert call(None, request, result) == invalid
            assert call(thread.pointer, None, result) == invalid
            assert call(thread.pointer, request, None) == c_api.ALLOWED
        assert API.refund(None, request, 0) == invalid
        assert API.refund(thread.pointer, None, 0) == invalid
        assert API.reset(None, request) == invalid
        assert API.reset(thread.pointer, None) == invalid
        API.limiter_close(None)
        API.detach(None)
        API.rate_close(None)
        assert API.allow(thread.pointer, None, 0) == c_api.ALLOWED
        assert limiter.peek("").remaining == 99


def test_a_failed_open_leaves_null(api_store: Store) -> None:
    out = c_void_p(1)
    assert API.limiter_open(api_store, out) == c_api.NOT_A_LIMITER
    assert out.value is None
    with Handle(TokenBucket(api_store, "api", "100/hour")) as handle:
        out = c_void_p(1)
        assert API.rate_open(handle.pointer, 0, 0, 0, out) == c_api.INVALID_RATE
        assert out.value is None


@pytest.mark.parametrize(
    "fields", [{"kind": 5}, {"kind": 2**32 - 1}, {"kind": c_api.INT}, {"flags": 2}, {"flags": 2**32 - 1}]
)
def test_unknown_kinds_and_flags_are_refused(api_store: Store, fields: dict[str, int]) -> None:
    with Handle(TokenBucket(api_store, "api", "100/hour")) as handle:
        thread = handle.attach()
        for call in (thread.decide, thread.peek):
            assert status_of(lambda call=call: call(b"k", **fields)) == c_api.INVALID_ARGUMENT
    assert api_store.stats().total.allowed == 0


@pytest.mark.parametrize("kind", OF_A_HUNDRED)
@pytest.mark.parametrize("cost", [101, 2**32, 2**63, 2**64 - 1])
def test_a_cost_above_the_limit_is_refused(api_store: Store, kind: str, cost: int) -> None:
    limiter = OF_A_HUNDRED[kind](api_store)
    with Handle(limiter) as handle:
        thread = handle.attach()
        for call in (thread.decide, thread.peek):
            assert status_of(lambda call=call: call(b"k", cost)) == c_api.COST_EXCEEDS_LIMIT
            assert status_of(lambda call=call: call(b"k", cost, flags=c_api.BOOK)) == c_api.COST_EXCEEDS_LIMIT
        with pytest.raises(CostExceedsLimit):
            limiter.hit("k", cost)
        # Several requests may have charged as much: at most the limit comes back.
        limiter.hit("k", 50)
        thread.refund(b"k", cost)
        assert limiter.peek("k").remaining == 100


def test_a_failed_call_writes_no_result(api_store: Store) -> None:
    with Handle(TokenBucket(api_store, "api", "100/hour")) as handle:
        thread = handle.attach()
        before = [7] * len(Result._fields_)
        result = Result(*before)
        assert API.decide(thread.pointer, request_of(b"k", 101), result) == c_api.COST_EXCEEDS_LIMIT
        assert [getattr(result, name) for name, _ in Result._fields_] == before


def test_an_exception_of_python_is_reported_and_ends_with_a_status(
    api_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    with Handle(TokenBucket(api_store, "api", "100/hour")) as handle:
        with monkeypatch.context() as patch:
            patch.setattr(api_store.attachment, "counter_line", lambda *_: 1 / 0)
            assert status_of(handle.attach) == c_api.FAILED
        assert isinstance(reported.pop().exc_value, ZeroDivisionError)
        assert handle.attach().allow(b"k") == c_api.ALLOWED


def test_handles_may_be_closed_while_an_exception_is_handled(api_store: Store) -> None:
    handle = Handle(TokenBucket(api_store, "api", "100/hour"))
    handle.attach()
    try:
        raise KeyError("outer")
    except KeyError:
        handle.close()
        assert isinstance(sys.exc_info()[1], KeyError)


def test_every_status_has_a_message() -> None:
    texts = {API.message(status) for status in range(-11, 2)}
    assert len(texts) == 13
    assert API.message(-12) == API.message(2**31 - 1) == b"no status of forebay"


def test_the_table_says_its_version_and_size() -> None:
    assert API.version == 1
    assert API.size == ctypes.sizeof(c_api.Api)


def test_core_has_no_other_attributes_made_late() -> None:
    with pytest.raises(AttributeError, match="has no attribute '_C_APIS'"):
        forebay.core._C_APIS  # noqa: B018


# Threads


def test_threads_admit_exactly_the_limit(store_name: str) -> None:
    with Store(store_name, keys=100) as store, Handle(BucketedWindow(store, "api", "3000/day", 4, keys=64)) as handle:
        allowed = [0] * 4

        def work(index: int, thread: Thread) -> None:
            for _ in range(1500):
                allowed[index] += thread.allow(b"k")

        workers = [threading.Thread(target=work, args=(i, handle.attach())) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert sum(allowed) == 3000
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (3000, 3000)


def test_a_native_reset_follows_a_resize(store_name: str) -> None:
    """As the first call since: the key is in the table that the resize has made."""
    with Store(store_name, keys=1000) as store, Handle(FixedWindow(store, "api", "10/day")) as handle:
        thread = handle.attach()
        assert thread.allow(b"k") == 1
        resize(path_of(store_name), 5000)
        thread.reset(b"k")
        assert thread.peek(b"k").remaining == 10


def test_a_native_thread_follows_a_resize(store_name: str) -> None:
    """Its view of the table is its own: it moves on at its next decision, without the GIL."""
    with Store(store_name, keys=1000) as store:
        window = FixedWindow(store, "api", "10/day", align="first")
        with Handle(window) as handle:
            thread = handle.attach()
            assert [thread.allow(b"k") for _ in range(3)] == [1, 1, 1]
            for keys in (5000, 2000):
                resize(path_of(store_name), keys)
                assert thread.decide_many([request_of(b"k"), request_of(str(keys).encode())]) == [1, 1]
                thread.refund(b"k")
                thread.reset(str(keys).encode())
                assert thread.peek(str(keys).encode()).remaining == 10
            assert thread.peek(b"k").remaining == 7
            assert window.peek("k").remaining == 7
            assert sum(thread.allow(b"k") for _ in range(20)) == 7
        assert not window.allow("k")
        assert store.stats().live_keys == 1

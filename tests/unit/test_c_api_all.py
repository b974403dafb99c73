"""``decide_all`` of the C API: one request to several limits decides as ``AllOf`` does, and every misuse ends with a
status."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import c_void_p
from typing import Any

import c_api
import pytest
from c_api import API, Handle, Result, Thread, array_of, decide_all, numbers, numbers_of, request_of, status_of

from forebay import AllOf, BucketedWindow, FixedWindow, LeakyBucket, SlidingLog, SlidingWindow, Store, TokenBucket
from forebay.testing import ManualClock

NS = 10**9


@pytest.fixture
def api_store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as store:
        yield store


@pytest.fixture
def attached() -> Iterator[Callable[..., list[Thread]]]:
    """Makes a thread's handle for each limiter."""
    with ExitStack() as stack:
        yield lambda *limiters: [stack.enter_context(Handle(limiter)).attach() for limiter in limiters]


def several(store: Store) -> list[Any]:
    return [
        TokenBucket(store, "bucket", "20/minute"),
        FixedWindow(store, "fixed", "50/hour"),
        SlidingWindow(store, "sliding", "40/hour"),
        BucketedWindow(store, "bucketed", "60/hour", 4, keys=64),
        SlidingLog(store, "log", "30/hour", keys=64),
        LeakyBucket(store, "queue", "1/minute", 25),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_several_limits_decide_as_all_of_does(
    seed: int, clock: ManualClock, attached: Callable[..., list[Thread]]
) -> None:
    """The same requests on three stores at the same times: ``hit``, ``hit_each``, and the C API."""
    choose = random.Random(seed)
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.private(keys=100, clock=clock)) for _ in range(3)]
        limiters = [several(store) for store in stores]
        choose.shuffle(order := list(range(6)))
        limiters = [[those[i] for i in order] for those in limiters]
        one, each, native = AllOf(*limiters[0]), AllOf(*limiters[1]), attached(*limiters[2])
        names = [limiter.name for limiter in limiters[0]]
        bound = set()
        for _ in range(400):
            keys = [choose.choice("ab") for _ in names]
            costs = [choose.choice([0, 1, 1, 2, 7, 20]) for _ in names]
            binding = one.hit(list(keys), costs)
            decisions = each.hit_each(list(keys), costs)
            allowed, result, results = decide_all(
                native, [request_of(key.encode(), cost) for key, cost in zip(keys, costs, strict=True)]
            )
            assert bool(allowed) == binding.allowed == all(decision.allowed for decision in decisions)
            assert numbers(result) == numbers_of(binding)
            assert names[result.binding] == binding.limiter
            assert [numbers(one) for one in results] == [numbers_of(decision) for decision in decisions]
            assert [bool(one.charge) for one in results] == [bool(allowed and cost) for cost in costs]
            bound.add((result.binding, allowed))
            if choose.random() < 0.3:
                clock.advance(choose.choice([0.5, 10, 200, 1000]))
        assert len(bound) > 6
        assert stores[2].stats().limiters == stores[1].stats().limiters


def test_a_charge_that_a_later_limit_denies_is_given_back(
    api_store: Store, attached: Callable[..., list[Thread]]
) -> None:
    """The last two limits are one: it has room for either charge, but not for both."""
    first, last = several(api_store)[:2]
    threads = attached(first, last, last)
    requests = [request_of(b"k", 3), request_of(b"k", 26), request_of(b"k", 26)]
    allowed, result, results = decide_all(threads, requests)
    assert not allowed
    assert (result.binding, result.allowed, result.charge) == (2, 0, 0)
    assert [one.allowed for one in results] == [1, 1, 0]
    assert [one.charge for one in results] == [0, 0, 0]
    assert (first.peek("k").remaining, last.peek("k").remaining) == (20, 50)
    assert decide_all(threads, [request_of(b"k", 3), request_of(b"k", 25), request_of(b"k", 25)])[0]
    assert (first.peek("k").remaining, last.peek("k").remaining) == (17, 0)


def test_two_charges_of_one_key_are_given_back_in_reverse_order(
    api_store: Store, attached: Callable[..., list[Thread]]
) -> None:
    """A queue can't take back a place behind which another one stands."""
    queue, window = LeakyBucket(api_store, "queue", "1/minute", 25), FixedWindow(api_store, "window", "50/hour")
    threads = attached(queue, queue, window, window)
    # Keys that have a cell are charged by their state as it was checked, others by a new decision.
    for _ in range(2):
        assert not decide_all(threads, [request_of(b"k", cost) for cost in (3, 4, 26, 26)])[0]
        assert (queue.peek("k").remaining, window.peek("k").remaining) == (25, 50)


def test_each_charge_can_be_given_back(api_store: Store, attached: Callable[..., list[Thread]]) -> None:
    limiters = several(api_store)
    threads = attached(*limiters)
    fresh = [limiter.peek("k").remaining for limiter in limiters]
    _, _, results = decide_all(threads, [request_of(b"k", 5)] * 6)
    assert [limiter.peek("k").remaining for limiter in limiters] == [most - 5 for most in fresh]
    for thread, result in zip(threads, results, strict=True):
        thread.refund(b"k", 5, result.charge)
    assert [limiter.peek("k").remaining for limiter in limiters] == fresh


def test_each_limit_has_its_own_hash_and_rate(api_store: Store, attached: Callable[..., list[Thread]]) -> None:
    bucket = TokenBucket(api_store, "bucket", "20/minute")
    window = FixedWindow(api_store, "fixed", "50/hour")
    with Handle(bucket) as handle:
        threads = [handle.attach(), *attached(window)]
        requests = [
            request_of(key_hash=handle.hash(b"user:42"), rate=handle.rate(100, 60 * NS)),
            request_of(b"everybody", 30),
        ]
        allowed, result, results = decide_all(threads, requests)
        assert allowed
        assert [one.limit for one in results] == [100, 50]
        assert (result.binding, result.remaining) == (1, 20)
        assert bucket.peek("user:42", rate="100/minute").remaining == 99


def test_without_results_the_first_denial_ends_the_check(
    api_store: Store, attached: Callable[..., list[Thread]]
) -> None:
    limiters = [TokenBucket(api_store, name, "1/hour") for name in ("one", "two")]
    threads = array_of(attached(*limiters))
    requests = (c_api.Request * 2)(request_of(b"k"), request_of(b"k"))
    assert API.decide_all(threads, requests, 2, None, None) == c_api.ALLOWED
    assert API.decide_all(threads, requests, 2, None, None) == c_api.DENIED
    stats = api_store.stats().limiters
    assert [(stats[name].allowed, stats[name].denied) for name in ("one", "two")] == [(1, 1), (1, 0)]
    assert API.decide_all(threads, requests, 2, Result(), None) == c_api.DENIED
    assert API.decide_all(threads, requests, 2, None, None) == c_api.DENIED
    stats = api_store.stats().limiters
    assert [(stats[name].allowed, stats[name].denied) for name in ("one", "two")] == [(1, 3), (1, 1)]


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_a_full_store_decides_by_its_policy_for_several_limits(
    clock: ManualClock, on_full: Any, attached: Callable[..., list[Thread]]
) -> None:
    with Store.private(keys=1, clock=clock, on_full=on_full) as store:
        log = SlidingLog(store, "log", "100/hour", keys=64)
        threads = attached(log, TokenBucket(store, "bucket", "100/hour"))
        TokenBucket(store, "crowd", "1/hour").allow_many(range(5000))
        full = 0
        for i in range(50):
            allowed, result, results = decide_all(threads, [request_of(b"k", 0), request_of(b"%d" % i, 50)])
            full += results[1].full
            assert allowed == (on_full != "deny" or not results[1].full)
            assert bool(results[1].charge) == (allowed and not results[1].full)
            if not allowed:
                assert (result.binding, result.full) == (1, 1)
                assert result.retry_after_ns
        assert bool(full) == (on_full != "evict")


def test_several_limits_are_never_charged_in_part_by_threads(
    store_name: str, attached: Callable[..., list[Thread]]
) -> None:
    with Store(store_name, keys=100) as store:
        limiters = [SlidingLog(store, name, "3000/day", keys=4) for name in ("one", "two", "three")]
        orders = [attached(*limiters), attached(*limiters[::-1]), attached(*limiters[1:], limiters[0])]
        requests = (c_api.Request * 3)(*[request_of(b"k")] * 3)
        allowed = [0] * 3

        def work(index: int) -> None:
            mine = array_of(orders[index])
            for _ in range(2000):
                allowed[index] += API.decide_all(mine, requests, 3, None, None)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        # In a race for the last permits some may be denied.
        assert 2990 <= sum(allowed) <= 3000
        assert [limiter.peek("k").remaining for limiter in limiters] == [3000 - sum(allowed)] * 3


# Misuse


def test_misuse_of_several_limits_charges_nothing(api_store: Store, attached: Callable[..., list[Thread]]) -> None:
    limiters = several(api_store)
    one, other = attached(*limiters[:2])
    good = request_of(b"k")
    with Handle(limiters[0]) as handle:
        for bad, status in (
            (request_of(b"k", 51), c_api.COST_EXCEEDS_LIMIT),
            (request_of(b"k", 2**64 - 1), c_api.COST_EXCEEDS_LIMIT),
            (request_of(b"k", kind=9), c_api.INVALID_ARGUMENT),
            (request_of(b"k", flags=c_api.BOOK), c_api.INVALID_ARGUMENT),
            (request_of(b"k", flags=2**31), c_api.INVALID_ARGUMENT),
            (request_of(b"k", rate=handle.rate(5, NS)), c_api.INVALID_RATE),
        ):
            assert status_of(lambda bad=bad: decide_all([one, other], [good, bad])) == status
    invalid = c_api.INVALID_ARGUMENT
    threads, requests = array_of([one] * 17), (c_api.Request * 17)(*[good] * 17)
    assert API.decide_all(threads, requests, 0, None, None) == invalid
    assert API.decide_all(threads, requests, 17, None, None) == invalid
    assert API.decide_all(threads, requests, 2**64 - 1, None, None) == invalid
    assert API.decide_all(None, requests, 1, None, None) == invalid
    assert API.decide_all(threads, None, 1, None, None) == invalid
    assert API.decide_all((c_void_p * 2)(one.pointer.value, None), requests, 2, None, None) == invalid
    assert api_store.stats().total.allowed == api_store.stats().total.denied == 0
    assert API.decide_all(threads, requests, c_api.MOST_LIMITS, None, None) == c_api.ALLOWED
    assert limiters[0].peek("k").remaining == 20 - c_api.MOST_LIMITS


def test_limits_of_two_stores_are_refused(
    api_store: Store, clock: ManualClock, attached: Callable[..., list[Thread]]
) -> None:
    with Store.private(keys=10, clock=clock) as store:
        threads = attached(*several(api_store)[:1], *several(store)[:1])
        assert status_of(lambda: decide_all(threads, [request_of(b"k")] * 2)) == c_api.WRONG_LIMITER
        assert store.stats().total.allowed == api_store.stats().total.allowed == 0


def test_several_limits_after_a_close_and_in_a_child(
    clock: ManualClock, attached: Callable[..., list[Thread]], in_child: Callable[[Callable[[], Any]], Any]
) -> None:
    store = Store.private(keys=10, clock=clock)
    threads = attached(*several(store)[:2])
    requests = [request_of(b"k")] * 2
    assert in_child(lambda: status_of(lambda: decide_all(threads, requests))) == c_api.FORKED
    assert decide_all(threads, requests)[0]
    store.close()
    assert status_of(lambda: decide_all(threads, requests)) == c_api.CLOSED

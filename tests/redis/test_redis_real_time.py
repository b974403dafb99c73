"""Limiters over Redis by the server's own clock: every reply is judged at the time that came with it."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from oracle import Bucket, Oracle, Queue, Rule
from oracle_counts import (
    BucketedWindow,
    ClockWindow,
    FirstWindow,
    Held,
    IntervalBucket,
    SlidingWindow,
    SortedLog,
)
from redis_server import RedisServer

import forebay
from forebay import Concurrency, FixedWindow, LeakyBucket, MinInterval, TokenBucket
from forebay.redis import RedisStore

make_log: Any = forebay.SlidingLog
# 6 permits per 30 ms.
LIMIT, PERIOD_US = 6, 30_000
RATE = "6 per 30 ms"
KINDS: dict[str, tuple[Callable[[RedisStore], Any], Rule[Any]]] = {
    "token bucket": (lambda store: TokenBucket(store, "r", RATE), Bucket(LIMIT, PERIOD_US, LIMIT)),
    "interval bucket": (
        lambda store: TokenBucket(store, "r", RATE, refill="interval"),
        IntervalBucket(LIMIT, PERIOD_US, LIMIT),
    ),
    "leaky bucket": (lambda store: LeakyBucket(store, "r", RATE, capacity=LIMIT), Queue(LIMIT, PERIOD_US, LIMIT)),
    "minimum interval": (lambda store: MinInterval(store, "r", "5 ms"), Bucket(1, 5000, 1)),
    "fixed window": (lambda store: FixedWindow(store, "r", RATE), ClockWindow(LIMIT, PERIOD_US)),
    "fixed window, first": (lambda store: FixedWindow(store, "r", RATE, align="first"), FirstWindow(LIMIT, PERIOD_US)),
    "sliding window": (lambda store: forebay.SlidingWindow(store, "r", RATE), SlidingWindow(LIMIT, PERIOD_US)),
    "bucketed window": (
        lambda store: forebay.BucketedWindow(store, "r", RATE, 5),
        BucketedWindow(LIMIT, PERIOD_US, 5),
    ),
    "sliding log": (lambda store: make_log(store, "r", RATE), SortedLog(LIMIT, PERIOD_US)),
    "concurrency": (lambda store: Concurrency(store, "r", LIMIT, lease="30 ms"), Held(LIMIT, PERIOD_US)),
}


class Overheard:
    """Records the server's time in each reply."""

    def __init__(self, store: Any) -> None:
        self.now_us = 0
        call = store.executor._call

        def overhear(*arguments: Any) -> Any:
            reply = call(*arguments)
            self.now_us = reply[1]
            return reply

        store.executor._call = overhear


@pytest.mark.parametrize("kind", KINDS)
def test_every_decision_equals_the_oracles_at_its_time(kind: str, redis_store: RedisStore) -> None:
    make, rule = KINDS[kind]
    limiter, overheard, oracle = make(redis_store), Overheard(redis_store), Oracle[Any]()
    chance = random.Random(0)
    denied = 0
    for _ in range(300):
        key = chance.choice(["ada", "bob"])
        cost = chance.randint(0, min(rule.most, 2))
        decision = limiter.hit(key, cost)
        expected = oracle.hit(rule, key, cost, overheard.now_us)
        denied += not decision
        assert (decision.allowed, decision.remaining) == (expected.allowed, expected.remaining)
        assert decision.retry_after_ns == 1000 * expected.retry_after_ns
        assert decision.reset_after_ns == 1000 * expected.reset_after_ns
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.02)
    assert denied


def ask_for_a_while(url: str, kind: str, seed: int, results: Any) -> None:
    admitted = []
    with RedisStore(url, timeout=60) as store:
        limiter, overheard = KINDS[kind][0](store), Overheard(store)
        chance = random.Random(seed)
        for _ in range(300):
            if limiter.allow("ada"):
                admitted.append(overheard.now_us)
            if chance.random() < 0.05:
                time.sleep(chance.random() * 0.01)
    results.put(admitted)


def most_within(times_us: Sequence[int], span_us: int) -> int:
    """The most of them in any span shorter than `span_us`."""
    ordered = sorted(times_us)
    return max(sum(start <= other < start + span_us for other in ordered) for start in ordered)


def most_in_windows(times_us: Sequence[int], window_us: int, count: int) -> int:
    """The most of them in `count` consecutive windows of the clock."""
    return most_within([time_us // window_us for time_us in times_us], count)


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_never_get_more_than_the_guarantee(kind: str, server: RedisServer) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=ask_for_a_while, args=(server.url, kind, seed, results)) for seed in range(3)]
    for worker in workers:
        worker.start()
    admitted = [time_us for _ in workers for time_us in results.get()]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(admitted) >= LIMIT
    match kind:
        case "token bucket" | "leaky bucket":
            # A burst, and what trickles back within the span.
            assert most_within(admitted, PERIOD_US) <= 2 * LIMIT
            assert most_within(admitted, PERIOD_US // LIMIT) <= LIMIT + 1
        case "minimum interval":
            assert most_within(admitted, 5000) == 1
        case "interval bucket":
            assert most_in_windows(admitted, PERIOD_US, 1) <= LIMIT
        case "fixed window" | "sliding window":
            assert most_in_windows(admitted, PERIOD_US, 1) <= LIMIT
        case "fixed window, first":
            assert most_within(admitted, PERIOD_US) <= 2 * LIMIT
        case "bucketed window":
            assert most_in_windows(admitted, PERIOD_US // 5, 5) <= LIMIT
        case "sliding log" | "concurrency":
            assert most_within(admitted, PERIOD_US) <= LIMIT
        case _:
            raise AssertionError(kind)

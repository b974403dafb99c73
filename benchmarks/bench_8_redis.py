"""Limits over Redis with one hot key that is never denied, beside redis-py's bare round trip of the same script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from timeit import Timer
from typing import Any

import limits
import pytest
import redis
import throttled
from conftest import GENEROUS, Measure, must, statement, time_per_call

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)
from forebay.redis import AsyncRedisStore, RedisStore

SECTION = "Over Redis"
KEY = "user:42:abcdefg"
CALLS, ROUNDS = 200, 31
BARE = "a bare `EVALSHA` of the same script"
MOST = 1.1

RATE = "1000000000/hour"
EVERY_KIND: dict[str, Callable[[Any], Any]] = {
    "token bucket in intervals": lambda store: TokenBucket(store, "i", RATE, refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "l", "1000000/second", capacity=GENEROUS["burst"]),
    "fixed window": lambda store: FixedWindow(store, "f", RATE),
    "sliding window": lambda store: SlidingWindow(store, "s", RATE),
    "bucketed window, 60 buckets": lambda store: BucketedWindow(store, "b", RATE, 60),
    "sliding log": lambda store: SlidingLog(store, "g", RATE, keys=None),
}


@pytest.fixture
def store(redis_port: int) -> Iterator[RedisStore]:
    with redis.Redis(host="127.0.0.1", port=redis_port, db=3) as client:
        client.flushdb()
    with RedisStore(f"redis://127.0.0.1:{redis_port}/3", timeout=10) as opened:
        yield opened


@pytest.fixture
def bucket(store: RedisStore) -> Any:
    return TokenBucket(store, "generous", **GENEROUS)


@pytest.fixture
def bare(store: RedisStore, bucket: Any, redis_port: int) -> Iterator[Timer]:
    """redis-py's arguments for the call that `bucket` makes."""
    must(bucket.allow(KEY))
    command = bucket.commands.hit(KEY, 1)
    with redis.Redis(host="127.0.0.1", port=redis_port, db=3) as client:
        yield statement(
            "f(sha, 1, *arguments)",
            f=client.evalsha,
            sha=command.script.sha,
            arguments=[*command.keys, *command.arguments],
        )


@pytest.fixture
def beside(bare: Timer) -> dict[str, Callable[[], float]]:
    return {BARE: lambda: time_per_call(bare, CALLS)}


def bench_bare_evalsha(measure: Measure, bare: Timer) -> None:
    measure("redis-py's `evalsha`, of the token bucket's script", bare, calls=CALLS, rounds=ROUNDS, section=SECTION)


@pytest.mark.parametrize("method", ["allow", "hit"])
def bench_token_bucket(measure: Measure, bucket: Any, beside: dict[str, Any], method: str) -> None:
    timer = statement("f(k)", f=getattr(bucket, method), k=KEY)
    measure(
        f"`TokenBucket.{method}`",
        timer,
        calls=CALLS,
        rounds=ROUNDS,
        beside=beside,
        bar_to=(BARE, MOST),
        section=SECTION,
    )


@pytest.mark.parametrize("kind", EVERY_KIND)
def bench_every_kind(measure: Measure, store: RedisStore, beside: dict[str, Any], kind: str) -> None:
    limiter = EVERY_KIND[kind](store)
    must(limiter.hit(KEY))
    timer = statement("f(k)", f=limiter.hit, k=KEY)
    measure(f"`hit`, {kind}", timer, calls=CALLS, rounds=ROUNDS, beside=beside, bar_to=(BARE, None), section=SECTION)


def bench_concurrency(measure: Measure, store: RedisStore, beside: dict[str, Any]) -> None:
    held = Concurrency(store, "c", 1000)
    timer = statement("f(k).release()", f=held.acquire, k=KEY)
    title = "`acquire` and `release`, two round trips"
    measure(title, timer, calls=CALLS, rounds=ROUNDS, beside=beside, bar_to=(BARE, None), section=SECTION)


def bench_all_of_three(measure: Measure, store: RedisStore, beside: dict[str, Any]) -> None:
    three = AllOf(*[TokenBucket(store, f"generous {number}", **GENEROUS) for number in range(3)])
    must(three.hit(KEY))
    timer = statement("f(k)", f=three.hit, k=KEY)
    title = "`AllOf` of three token buckets, `hit`"
    measure(title, timer, calls=CALLS, rounds=ROUNDS, beside=beside, bar_to=(BARE, None), section=SECTION)


def bench_batch(measure: Measure, bucket: Any, beside: dict[str, Any]) -> None:
    keys = [f"user:{number}" for number in range(500)]
    must(all(bucket.allow_many(keys)))
    timer = statement("f(k)", f=bucket.allow_many, k=keys)
    measure(
        "`allow_many` of 500 keys, per key",
        timer,
        calls=1,
        operations_per_call=len(keys),
        rounds=ROUNDS,
        beside=beside,
        bar_to=(BARE, None),
        section=SECTION,
    )


def bench_asyncio(measure: Measure, redis_port: int, beside: dict[str, Any]) -> None:
    """One task that waits for each reply."""
    loop = asyncio.new_event_loop()
    store = AsyncRedisStore(f"redis://127.0.0.1:{redis_port}/3", timeout=10)
    hit = TokenBucket(store, "generous", **GENEROUS).hit

    async def call() -> None:
        for _ in range(CALLS):
            await hit(KEY)

    try:
        loop.run_until_complete(call())
        timer = statement("run(call())", run=loop.run_until_complete, call=call)
        measure(
            "`TokenBucket.hit` for asyncio",
            timer,
            calls=1,
            operations_per_call=CALLS,
            rounds=ROUNDS,
            beside=beside,
            bar_to=(BARE, None),
            section=SECTION,
        )
    finally:
        loop.run_until_complete(store.close())
        loop.close()


def bench_limits(measure: Measure, redis_port: int, beside: dict[str, Any]) -> None:
    limiter = limits.strategies.FixedWindowRateLimiter(limits.storage.RedisStorage(f"redis://127.0.0.1:{redis_port}/1"))
    item = limits.RateLimitItemPerHour(10**9)
    must(limiter.hit(item, KEY))
    timer = statement("f(i, k)", f=limiter.hit, i=item, k=KEY)
    title = "`limits`, fixed window: a bool"
    measure(title, timer, calls=CALLS, rounds=ROUNDS, beside=beside, bar_to=(BARE, None), section=SECTION)


def bench_throttled(measure: Measure, redis_port: int, beside: dict[str, Any]) -> None:
    limiter = throttled.Throttled(
        using="gcra",
        quota=throttled.per_sec(1000, burst=GENEROUS["burst"]),
        store=throttled.RedisStore(server=f"redis://127.0.0.1:{redis_port}/2"),
    )
    must(not limiter.limit(KEY).limited)
    timer = statement("f(k)", f=limiter.limit, k=KEY)
    title = "`throttled-py`, GCRA"
    measure(title, timer, calls=CALLS, rounds=ROUNDS, beside=beside, bar_to=(BARE, None), section=SECTION)

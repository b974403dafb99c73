"""Synced limits: a decision beside one of the host's store alone, and the cost of an exchange for each key."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from timeit import Timer
from typing import Any

import pytest
from conftest import GENEROUS, Measure, must, statement, time_per_call

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.redis import RedisStore, SyncedStore
from forebay.redis.synced.exchange import SHARDS

SECTION = "Synced over Redis"
KEY = "user:42:abcdefg"
CALLS, KEYS, HOT_KEYS, ROUNDS = 50_000, 20_000, 800, 15
# The same limit over the host's store alone.
MOST = 1.5

KINDS: dict[str, Callable[[Any], Any]] = {
    "token bucket": lambda store: TokenBucket(store, "t", **GENEROUS),
    "fixed window": lambda store: FixedWindow(store, "f", "100000000/year"),
    "sliding window": lambda store: SlidingWindow(store, "s", "10000000/year"),
}


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=2 * KEYS) as opened:
        yield opened


@pytest.fixture
def synced(store: Store, redis_store: RedisStore) -> Iterator[SyncedStore]:
    """A store whose thread doesn't wake during the measurement, with enough cells that no key evicts another."""
    with SyncedStore(redis_store, store, "1 hour", keys=2 * KEYS) as opened:
        yield opened


@pytest.mark.parametrize("method", ["allow", "hit"])
@pytest.mark.parametrize("kind", KINDS)
def bench_decision(measure: Measure, store: Store, synced: SyncedStore, kind: str, method: str) -> None:
    synced_method, alone = (getattr(KINDS[kind](where), method) for where in (synced, store))
    must(bool(synced_method(KEY)) and bool(alone(KEY)))
    local = statement("f(k)", f=alone, k=KEY)
    name = f"`{method}` of the same {kind} that isn't synced"
    measure(
        f"`{method}`, {kind}",
        statement("f(k)", f=synced_method, k=KEY),
        calls=CALLS,
        beside={name: lambda: time_per_call(local, CALLS)},
        bar_to=(name, MOST),
        section=SECTION,
    )


NEW_KEYS = 1_000


@pytest.mark.parametrize("kind", KINDS)
def bench_new_keys(measure: Measure, store: Store, synced: SyncedStore, kind: str) -> None:
    """Each round counts keys that the host hasn't counted. All of them have room."""
    numbers = itertools.count()

    def new_keys(limiter: Any) -> Timer:
        keys = [f"user:{next(numbers)}:abcdefg" for _ in range(NEW_KEYS)]
        return statement("for k in ks: f(k)", f=limiter.allow, ks=keys)

    synced_limiter, alone = (KINDS[kind](where) for where in (synced, store))
    name = f"`allow` of a new key of the same {kind} that isn't synced"
    measure(
        f"`allow` of a new key, {kind}",
        lambda: new_keys(synced_limiter),
        calls=1,
        operations_per_call=NEW_KEYS,
        rounds=ROUNDS,
        beside={name: lambda: time_per_call(new_keys(alone), 1, NEW_KEYS)},
        bar_to=(name, None),
        section=SECTION,
    )
    must(store.stats().total.evicted == 0)


# No permit comes back before the exchange: a full bucket may lose its cell.
SLOW = {**KINDS, "token bucket": lambda store: TokenBucket(store, "t", "1000/day", burst=1_000_000)}


@pytest.mark.parametrize("kind", SLOW)
def bench_exchange(measure: Measure, synced: SyncedStore, redis_store: RedisStore, kind: str) -> None:
    limiter, strict = (SLOW[kind](where) for where in (synced, redis_store))
    keys = [f"user:{number}" for number in range(KEYS)]
    batch = statement("f(k)", f=strict.allow_many, k=keys[:500])

    def pending() -> Timer:
        must(all(limiter.allow_many(keys)))
        must(synced.status().pending_keys == KEYS)
        return statement("f()", f=synced.exchange)

    name = "a key of 500 in `allow_many` of the same limit over Redis"
    measure(
        f"an exchange of {KEYS:,} keys, {kind}, per key",
        pending,
        calls=1,
        operations_per_call=KEYS,
        rounds=ROUNDS,
        beside={name: lambda: time_per_call(batch, 1, 500)},
        bar_to=(name, None),
        section=SECTION,
    )


def bench_news(measure: Measure, synced: SyncedStore, redis_store: RedisStore) -> None:
    """The work that `push=True` adds: another host has counted hot keys since, and this one reads the hot lists."""
    make = KINDS["fixed window"]
    strict = make(redis_store)
    keys = [f"user:{number}" for number in range(HOT_KEYS)]
    batch = statement("f(k)", f=strict.allow_many, k=keys[:500])
    with (
        Store.private(keys=2 * KEYS) as its_store,
        SyncedStore(redis_store, its_store, "1 hour", keys=2 * KEYS) as another,
    ):
        heard, told = (FixedWindow(where, "hot", "10000/year") for where in (synced, another))
        must(all(told.allow_many(keys, [3000] * HOT_KEYS)))
        [exchange] = synced._exchanger.exchanges

        def changed() -> Timer:
            must(all(told.allow_many(keys)))
            another.exchange()
            return statement("f(s)", f=exchange.catch_up, s=range(SHARDS))

        name = "a key of 500 in `allow_many` of the same limit over Redis"
        measure(
            f"news of {HOT_KEYS} hot keys of another host, fixed window, per key",
            changed,
            calls=1,
            operations_per_call=HOT_KEYS,
            rounds=ROUNDS,
            beside={name: lambda: time_per_call(batch, 1, 500)},
            bar_to=(name, None),
            section=SECTION,
        )
        must(told.peek(keys[0]).remaining == heard.peek(keys[0]).remaining)


def bench_nothing_to_exchange(measure: Measure, synced: SyncedStore) -> None:
    limiter = KINDS["fixed window"](synced)
    must(all(limiter.allow_many([f"user:{number}" for number in range(KEYS)])))
    synced.exchange()
    measure(
        f"a scan of the cells of {KEYS:,} keys without news, per key",
        statement("f()", f=synced.status),
        calls=1,
        operations_per_call=KEYS,
        rounds=ROUNDS,
        section=SECTION,
    )

"""Subjects of one process."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from timeit import Timer
from typing import Final

from forebay.benchmarking.limiters import ALLOWING, DENYING, GENEROUS, LASTING, busy_concurrency, three_buckets
from forebay.benchmarking.subjects import FLOORS, KEYS, LIMITERS, Subject, loop
from forebay.benchmarking.timing import statement
from forebay.core.kinds import TokenBucket
from forebay.store import Store

__all__ = ["CLOCK", "crowded_name", "in_batches_name", "live_name", "of_floors", "of_keys", "of_limiters"]

KEY: Final = "user:42:abcdefg"
CLOCK: Final = "time.monotonic_ns()"
KEYS_PER_ROUND: Final = 2000
FILL: Final = 50_000
BATCH: Final = 100
SLOTS: Final = 20


# The thread's CPU time doesn't count what other processes of its core take.
in_loop: Final = functools.partial(statement, timer=time.thread_time)


def of_floors() -> Iterator[Subject]:
    yield loop(FLOORS, "one turn of an empty loop", in_loop("pass"))
    yield loop(FLOORS, CLOCK, in_loop("f()", f=time.monotonic_ns))


def of_limiters(stack: ExitStack) -> Iterator[Subject]:
    """Every algorithm, each limiter in a small store of its own, which ends with `stack`."""

    def store() -> Store:
        return stack.enter_context(Store.private(keys=1000))

    for name, make in ALLOWING.items():
        own = store()
        limiter = make(own)
        yield loop(LIMITERS, f"{name}: allow", in_loop("f(k)", f=limiter.allow, k=KEY), fault=_denies(own))
        yield loop(LIMITERS, f"{name}: hit", in_loop("f(k)", f=limiter.hit, k=KEY), fault=_denies(own))
    for name, make in DENYING.items():
        own = store()
        limiter = make(own)
        limiter.allow(KEY)
        yield loop(LIMITERS, f"{name}: allow, denied", in_loop("f(k)", f=limiter.allow, k=KEY), fault=_allows(own))
    own = store()
    batch = [f"user:{number}:abcdefg" for number in range(BATCH)]
    several = TokenBucket(own, "x", **GENEROUS).allow_many
    yield loop(
        LIMITERS,
        f"token bucket: allow_many, {BATCH} keys, per key",
        in_loop("f(ks)", f=several, ks=batch),
        operations=BATCH,
        fault=_denies(own),
    )
    own = store()
    joined = three_buckets(own)
    yield loop(LIMITERS, "all of three: allow", in_loop("f(k)", f=joined.allow, k=KEY), fault=_denies(own))
    own = store()
    one_free = busy_concurrency(own, SLOTS, SLOTS - 1, KEY)
    yield loop(
        LIMITERS,
        f"concurrency, one of {SLOTS} free: acquire and release",
        in_loop("f(k).release()", f=one_free.acquire, k=KEY),
        fault=_denies(own),
    )
    own = store()
    none_free = busy_concurrency(own, SLOTS, SLOTS, KEY)
    yield loop(
        LIMITERS,
        f"concurrency, none of {SLOTS} free: acquire, denied",
        in_loop("f(k)", f=none_free.acquire, k=KEY),
        fault=_allows(own),
    )


def _denies(store: Store) -> Callable[[], str]:
    def fault() -> str:
        denied = store.stats().total.denied
        return f"{denied:,} requests were denied" if denied else ""

    return fault


def _allows(store: Store) -> Callable[[], str]:
    def fault() -> str:
        allowed = store.stats().total.allowed - 1
        return f"{allowed:,} requests were allowed" if allowed else ""

    return fault


def live_name(keys: int) -> str:
    return f"allow, {keys:,} live keys at random"


def in_batches_name(keys: int) -> str:
    return f"allow_many, {keys:,} live keys, per key"


def crowded_name(keys: int) -> str:
    return f"allow, {keys:,} keys, room for half"


def of_keys(stack: ExitStack, keys: int, rounds: int, filled: Callable[[int], None]) -> tuple[list[Subject], Store]:
    """Random keys of so many, measured in at most so many `rounds`; and the crowded store, in which keys evict others.

    `filled` gets the number of keys that have just been put into a store. Stores end with `stack`. Raises
    ``SegmentSpaceError`` if they don't fit.
    """
    numbers = random.Random(7)
    some = min(KEYS_PER_ROUND, keys)

    def bucket(room: int, rate: str, burst: int | None = None) -> TokenBucket:
        store = stack.enter_context(Store.private(keys=room))
        return TokenBucket(store, "x", rate, burst)

    def full(bucket: TokenBucket) -> TokenBucket:
        for start in range(0, keys, FILL):
            chunk = [f"user:{number}" for number in range(start, min(start + FILL, keys))]
            bucket.allow_many(chunk)
            filled(len(chunk))
        return bucket

    def any_keys() -> list[str]:
        return [f"user:{numbers.randrange(keys)}" for _ in range(some)]

    def each(
        function: Callable[[str], object], make_keys: Callable[[], Sequence[str]]
    ) -> Callable[[], tuple[Timer, int]]:
        def timer() -> tuple[Timer, int]:
            made = make_keys()
            return in_loop("for k in ks: f(k)", f=function, ks=made), len(made)

        return timer

    live = full(bucket(keys, **LASTING))
    returning = full(bucket(keys, rate="1000/second"))  # a permit comes back before its key does
    crowded = full(bucket(max(1, keys // 2), **LASTING))
    new = bucket(keys, **LASTING)
    never_seen = iter(range(2**62))
    at_once = max(1, min(some, keys // (2 * rounds)))

    def new_keys() -> list[str]:
        return [f"new:{next(never_seen)}" for _ in range(at_once)]

    def half_full() -> str:
        count = new.store.stats().live_keys
        return f"{count:,} keys were in the store" if count > 0.6 * keys else ""

    def in_batches() -> tuple[Timer, int]:
        return in_loop("f(ks)", f=live.allow_many, ks=any_keys()), some

    return [
        loop(KEYS, live_name(keys), each(live.allow, any_keys), fault=_denies(live.store)),
        loop(KEYS, in_batches_name(keys), in_batches, fault=_denies(live.store)),
        loop(KEYS, f"allow, {keys:,} keys, states expired", each(returning.allow, any_keys)),
        loop(KEYS, f"allow, new keys, room for {keys:,}", each(new.allow, new_keys), fault=half_full),
        loop(KEYS, crowded_name(keys), each(crowded.allow, any_keys)),
    ], crowded.store

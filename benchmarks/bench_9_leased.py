"""Leased limits with one hot key, beside the same limit with every decision in Redis, and beside one host's alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import GENEROUS, Measure, must, statement, time_per_call

from forebay import AllOf, FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.redis import LeasedStore, RedisStore

SECTION = "Over Redis"
KEY = "user:42:abcdefg"
CALLS, ROUNDS = 50_000, 31
STRICT = "the same over the `RedisStore` alone"
LOCAL = "the same over shared memory"
PARTS = "`allow` of the two, one after the other"
RATE = "1000000000/hour"


@pytest.fixture
def host_store() -> Iterator[Store]:
    with Store.private(keys=100_000) as opened:
        yield opened


@pytest.fixture
def leased(redis_store: RedisStore, host_store: Store) -> Iterator[LeasedStore]:
    with LeasedStore(redis_store, host_store) as opened:
        yield opened


def beside(make: Callable[[Any], Any], redis_store: RedisStore, host_store: Store) -> dict[str, Callable[[], float]]:
    strict = statement("f(k)", f=make(redis_store).allow, k=KEY)
    local = statement("f(k)", f=make(host_store).allow, k=KEY)
    return {STRICT: lambda: time_per_call(strict, 200), LOCAL: lambda: time_per_call(local, CALLS)}


def settled(limiter: Any) -> Any:
    """The limiter after it has learned how much to lease."""
    for _ in range(min(2 * limiter.terms.most_on_loan, 2_000_000)):
        must(limiter.allow(KEY))
    return limiter


def bucket(store: Any) -> Any:
    return TokenBucket(store, "generous", **GENEROUS)


@pytest.mark.parametrize(("other", "bar"), [(STRICT, 1 / 200), (LOCAL, 2.0)], ids=["beside strict", "beside local"])
def bench_leased(
    measure: Measure, redis_store: RedisStore, host_store: Store, leased: LeasedStore, other: str, bar: float
) -> None:
    limiter = settled(bucket(leased))
    measure(
        "leased `TokenBucket.allow`, with all it borrows",
        statement("f(k)", f=limiter.allow, k=KEY),
        calls=CALLS,
        rounds=ROUNDS,
        beside=beside(bucket, redis_store, host_store),
        bar_to=(other, bar),
        section=SECTION,
    )
    must(limiter.allow(KEY))


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def bench_leased_windows(
    measure: Measure, redis_store: RedisStore, host_store: Store, leased: LeasedStore, kind: Any
) -> None:
    def make(store: Any) -> Any:
        return kind(store, "w", RATE)

    limiter = settled(make(leased))
    measure(
        f"leased `{kind.__name__}.allow`, with all it borrows",
        statement("f(k)", f=limiter.allow, k=KEY),
        calls=CALLS,
        rounds=ROUNDS,
        beside=beside(make, redis_store, host_store),
        bar_to=(LOCAL, None),
        section=SECTION,
    )
    must(limiter.allow(KEY))


def bench_leased_denied(measure: Measure, redis_store: RedisStore, host_store: Store, leased: LeasedStore) -> None:
    """A flood of one key that is denied: the host remembers the denial and sends no command."""

    def make(store: Any) -> Any:
        return TokenBucket(store, "denied", "1/hour")

    limiter = make(leased)
    must(limiter.allow(KEY))
    must(not limiter.allow(KEY))
    others = beside(make, redis_store, host_store)
    measure(
        "leased `TokenBucket.allow`, denied",
        statement("f(k)", f=limiter.allow, k=KEY),
        calls=CALLS,
        rounds=ROUNDS,
        beside=others,
        bar_to=(LOCAL, None),
        section=SECTION,
    )
    must(not limiter.allow(KEY))


def bench_leased_all_of(measure: Measure, host_store: Store, leased: LeasedStore) -> None:
    """A request that the host decides: its lease has the permits."""
    limiter, local = settled(bucket(leased)), TokenBucket(host_store, "local", **GENEROUS)
    alone = [statement("f(k)", f=one.allow, k=KEY) for one in (AllOf(local), limiter)]
    several = AllOf(local, limiter)
    measure(
        "`AllOf.allow` of a leased `TokenBucket` and a local one, with all it borrows",
        statement("f(k)", f=several.allow, k=KEY),
        calls=CALLS,
        rounds=ROUNDS,
        beside={PARTS: lambda: sum(time_per_call(one, CALLS) for one in alone)},
        bar_to=(PARTS, 4.0),
        section=SECTION,
    )
    must(several.allow(KEY))

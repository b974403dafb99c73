"""Decisions on keys in the CPU's cache."""

from __future__ import annotations

from timeit import Timer

from conftest import Measure, must, statement

from forebay import Store, TokenBucket

KEY = "user:42:abcdefg"
SECTION = "One process, in cache"


def bench_allow_allowed(measure: Measure, generous: TokenBucket) -> None:
    must(generous.allow(KEY))
    measure("`allow`, one hot key, allowed", statement("f(k)", f=generous.allow, k=KEY), section=SECTION, bar=1.15)
    must(generous.store.stats().total.denied == 0)
    must(generous.store.stats().live_keys == 1)


def bench_allow_denied(measure: Measure, generous: TokenBucket) -> None:
    strict = TokenBucket(generous.store, "strict", "1/day")
    strict.allow(KEY)
    must(not strict.allow(KEY))
    measure("`allow`, one hot key, denied", statement("f(k)", f=strict.allow, k=KEY), section=SECTION, bar=1.15)
    must(strict.store.stats().limiters["strict"].allowed == 1)


def bench_allow_as_attribute(measure: Measure, generous: TokenBucket) -> None:
    measure(
        "`bucket.allow(key)`, the method looked up each time",
        statement("b.allow(k)", b=generous, k=KEY),
        section=SECTION,
    )


def bench_hit_allowed(measure: Measure, generous: TokenBucket) -> None:
    must(generous.hit(KEY).allowed)
    measure("`hit` with a full `Decision`, allowed", statement("f(k)", f=generous.hit, k=KEY), section=SECTION, bar=1.8)


def bench_hit_denied(measure: Measure, generous: TokenBucket) -> None:
    strict = TokenBucket(generous.store, "strict", "1/day")
    strict.hit(KEY)
    must(not strict.hit(KEY).allowed)
    measure("`hit` with a full `Decision`, denied", statement("f(k)", f=strict.hit, k=KEY), section=SECTION, bar=1.8)


def bench_allow_many(measure: Measure, generous: TokenBucket) -> None:
    keys = [f"user:{i}:abcdefg" for i in range(100)]
    must(all(generous.allow_many(keys)))
    measure(
        "`allow_many`, 100 keys, allowed, per key",
        statement("f(ks)", f=generous.allow_many, ks=keys),
        calls=1000,
        operations_per_call=100,
        section=SECTION,
        bar=0.45,
    )
    must(generous.store.stats().total.denied == 0)


def bench_new_keys(measure: Measure, quick: bool) -> None:
    """Each round inserts new keys into a table of a million, which ends half full."""
    per_round, rounds = (5_000, 15) if quick else (8_000, 61)
    with Store.private(keys=1_000_000) as store:
        bucket = TokenBucket(store, "api", "1/day", burst=1000)
        numbers = iter(range(10**9))

        def new_keys() -> Timer:
            keys = [f"user:{next(numbers)}:abcdefg" for _ in range(per_round)]
            return statement("for k in ks: f(k)", f=bucket.allow, ks=keys)

        measure(
            "`allow` of a new key, table filling up to half",
            new_keys,
            calls=1,
            operations_per_call=per_round,
            rounds=rounds,
            section="One process, beyond the cache",
        )
        must(store.stats().total.denied == 0)
        must(store.stats().total.inserted == next(numbers))

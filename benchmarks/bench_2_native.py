"""Decisions through the C API, beside those from Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from timeit import Timer

import pytest
from conftest import GENEROUS, Measure, must, statement, time_per_call
from forebay_native import AllLoop, Loop, least_decision, read_clock

from forebay import AllOf, Concurrency, Store, TokenBucket

KEY = "user:42:abcdefg"
SECTION = "Native code, in cache"
PER_CALL = 1000


def native(function: Callable[[int], int]) -> Timer:
    """A loop of `PER_CALL` decisions in native code for each call."""
    must(function(PER_CALL) == PER_CALL)
    return statement("f(n)", f=function, n=PER_CALL)


def bench_native_clock(measure: Measure, generous: TokenBucket) -> None:
    same = statement("f(k)", f=generous.allow, k=KEY)
    measure(
        "`clock_gettime` in native code, part of every decision but those at a tick",
        native(read_clock),
        calls=50,
        operations_per_call=PER_CALL,
        beside={"`allow` from Python": lambda: time_per_call(same, 50_000)},
        section=SECTION,
    )


@pytest.mark.parametrize("with_hash", [False, True], ids=["key", "hash"])
def bench_least_decision(measure: Measure, generous: TokenBucket, with_hash: bool) -> None:
    """What no decision can do without, however it counts and checks."""
    same = statement("f(k)", f=generous.allow, k=KEY)
    steps = "the clock and a CAS" if with_hash else "a hash, the clock and a CAS"
    measure(
        f"{steps}, in a function of C that does no more",
        native(partial(least_decision, KEY.encode(), with_hash)),
        calls=50,
        operations_per_call=PER_CALL,
        beside={"`allow` from Python": lambda: time_per_call(same, 50_000)},
        section=SECTION,
    )


@pytest.mark.parametrize(
    ("title", "method", "python", "bar"),
    [
        ("`allow` of the C API, allowed", "allow", "allow", 0.7),
        ("`allow_hash` of the C API, allowed", "allow_hash", "allow", 0.7),
        ("`allow_at_tick` of the C API, a tick for 100 requests, allowed", "allow_at_tick", "allow", 0.7),
        ("`decide` of the C API with its result, allowed", "decide", "hit", 0.7),
        ("`decide_many` of the C API, 100 requests, allowed, per request", "decide_many", "allow", 0.7),
    ],
    ids=["allow", "allow_hash", "allow_at_tick", "decide", "decide_many"],
)
def bench_native(
    measure: Measure, generous: TokenBucket, title: str, method: str, python: str, bar: float | None
) -> None:
    loop = Loop(generous, KEY.encode())
    same = statement("f(k)", f=getattr(generous, python), k=KEY)
    name = f"`{python}` from Python"
    measure(
        title,
        native(getattr(loop, method)),
        calls=50,
        operations_per_call=PER_CALL,
        beside={name: lambda: time_per_call(same, 50_000)},
        bar_to=(name, bar),
        section=SECTION,
    )
    must(generous.store.stats().total.denied == 0)
    must(generous.store.stats().live_keys == 1)


@pytest.mark.parametrize(
    ("title", "method", "python"),
    [
        ("`decide_all` of the C API, three limits, allowed", "decide_all", "allow"),
        ("`decide_all` of the C API with its result, three limits, allowed", "decide_all_with_result", "hit"),
    ],
    ids=["decide_all", "decide_all_with_result"],
)
def bench_native_all(measure: Measure, generous: TokenBucket, title: str, method: str, python: str) -> None:
    limiters = [TokenBucket(generous.store, name, **GENEROUS) for name in ("one", "two", "three")]
    loop = AllLoop(limiters, KEY.encode())
    same = statement("f(k)", f=getattr(AllOf(*limiters), python), k=KEY)
    name = f"`AllOf.{python}` from Python"
    measure(
        title,
        native(getattr(loop, method)),
        calls=50,
        operations_per_call=PER_CALL,
        beside={name: lambda: time_per_call(same, 50_000)},
        bar_to=(name, None),
        section=SECTION,
    )
    must(generous.store.stats().total.denied == 0)
    must(generous.store.stats().live_keys == 3)


def bench_native_lease(measure: Measure) -> None:
    with Store.private(keys=100) as store:
        limiter = Concurrency(store, "places", 20)
        loop = Loop(limiter, KEY.encode())
        same = statement("f(k).release()", f=limiter.acquire, k=KEY)
        name = "both from Python"
        measure(
            "`acquire` and `release` of the C API, one permit",
            native(loop.acquire),
            calls=50,
            operations_per_call=PER_CALL,
            beside={name: lambda: time_per_call(same, 50_000)},
            bar_to=(name, None),
            section=SECTION,
        )
        must(store.stats().total.denied == 0)
        must(limiter.peek(KEY).remaining == 20)

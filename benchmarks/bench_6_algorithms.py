"""Every algorithm on one key in cache. `bench_2_decisions.py` measures more of the token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from timeit import Timer

import pytest
from conftest import GENEROUS, Measure, must, statement

from forebay import AllOf, BucketedWindow, Credits, MinInterval, Rate, Store, TokenBucket
from forebay.benchmarking.limiters import ALLOWING, DENYING, busy_concurrency, three_buckets

KEY = "user:42:abcdefg"
SECTION = "Every algorithm, one hot key"

WINDOW_BAR = 1.3
LOG_BAR = 1.8
BUCKETED_BAR = 3
ALL_OF_BAR = 2.6
CONCURRENCY_BAR = 4

# Short, so that the segment is soon older than the window: buckets from before the segment are not read.
BUCKETS = 60
BUSY_WINDOW = Rate.per_ns(1_000_000, 600_000_000)
QUIET_WINDOW = Rate.per_ns(100_000, 60_000_000)

ALLOW_BARS: dict[str, float | None] = {
    **dict.fromkeys(("fixed window", "fixed window, from the first request", "fixed window, staggered"), WINDOW_BAR),
    "sliding window": WINDOW_BAR,
    **{f"sliding log, limit {limit:,}": LOG_BAR for limit in (10, 1000, 1_000_000)},
    **dict.fromkeys(("token bucket, interval refill", "leaky bucket", "minimum interval")),
}
DENY_BARS: dict[str, float | None] = {
    **dict.fromkeys(("fixed window", "sliding window"), WINDOW_BAR),
    "sliding log, limit 1": LOG_BAR,
    **dict.fromkeys(("token bucket, interval refill", "leaky bucket, full", "minimum interval")),
}


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=1000) as store:
        yield store


@pytest.mark.parametrize("algorithm", ALLOW_BARS)
def bench_allow(measure: Measure, store: Store, algorithm: str) -> None:
    limiter = ALLOWING[algorithm](store)
    bar = ALLOW_BARS[algorithm]
    measure(f"{algorithm}: `allow`, allowed", statement("f(k)", f=limiter.allow, k=KEY), section=SECTION, bar=bar)
    must(store.stats().total.denied == 0)


@pytest.mark.parametrize("algorithm", DENY_BARS)
def bench_denied(measure: Measure, store: Store, algorithm: str) -> None:
    limiter = DENYING[algorithm](store)
    bar = DENY_BARS[algorithm]
    must(limiter.allow(KEY))
    measure(f"{algorithm}: `allow`, denied", statement("f(k)", f=limiter.allow, k=KEY), section=SECTION, bar=bar)
    must(store.stats().total.allowed == 1)


@pytest.mark.parametrize("algorithm", ALLOW_BARS)
def bench_hit(measure: Measure, store: Store, algorithm: str) -> None:
    limiter = ALLOWING[algorithm](store)
    measure(f"{algorithm}: `hit`, allowed", statement("f(k)", f=limiter.hit, k=KEY), section=SECTION)
    must(store.stats().total.denied == 0)


@pytest.mark.parametrize("method", ["allow", "hit"])
@pytest.mark.parametrize("allowed", [True, False])
def bench_credits(measure: Measure, store: Store, method: str, allowed: bool) -> None:
    """A denied key has never had any, so its whole probe set is read."""
    prepaid = Credits(store, "x")
    prepaid.add(KEY, GENEROUS["burst"] if allowed else 0)
    what = f"credits: `{method}`, {'allowed' if allowed else 'denied'}"
    measure(what, statement("f(k)", f=getattr(prepaid, method), k=KEY), section=SECTION)
    must((store.stats().total.denied == 0) is allowed)


@pytest.mark.parametrize("method", ["allow", "hit"])
def bench_bucketed_dense(measure: Measure, store: Store, method: str) -> None:
    """Every bucket has a count: the first mark read is the one sought."""
    window = BucketedWindow(store, "x", BUSY_WINDOW, BUCKETS)
    full_ns = time.monotonic_ns() + BUSY_WINDOW.period_ns
    while time.monotonic_ns() < full_ns:
        window.allow(KEY)
        time.sleep(0.001)
    measure(
        f"bucketed window, all {BUCKETS} buckets in use: `{method}`, allowed",
        statement("f(k)", f=getattr(window, method), k=KEY),
        # A few rounds fall into each bucket, with fewer permits than the limit in total.
        calls=5_000,
        section=SECTION,
        bar=BUCKETED_BAR if method == "allow" else None,
    )
    must(store.stats().total.denied == 0)


@pytest.mark.parametrize(("method", "allowed"), [("allow", True), ("allow", False), ("hit", True), ("hit", False)])
def bench_bucketed_sparse(measure: Measure, store: Store, method: str, allowed: bool) -> None:
    """Only the newest bucket has a count, so every mark is read. Each round has its own key."""
    rate = QUIET_WINDOW if allowed else Rate.per_ns(1, QUIET_WINDOW.period_ns)
    window = BucketedWindow(store, "x", rate, BUCKETS, keys=1000)
    time.sleep(2 * rate.period_ns / 1e9)
    numbers = iter(range(1000))

    def of_a_new_key() -> Timer:
        key = f"user:{next(numbers)}:abcdefg"
        must(window.allow(key))
        return statement("f(k)", f=getattr(window, method), k=key)

    measure(
        f"bucketed window, one of {BUCKETS} buckets in use: `{method}`, {'allowed' if allowed else 'denied'}",
        of_a_new_key,
        calls=5_000,
        section=SECTION,
        bar=BUCKETED_BAR if method == "allow" else None,
    )
    must(store.stats().total.denied == 0 if allowed else store.stats().total.allowed == next(numbers))


def three_kinds(store: Store) -> AllOf:
    return AllOf(
        MinInterval(store, "interval", "0.00001 ms"),
        ALLOWING["sliding window"](store),
        TokenBucket(store, "bucket", **GENEROUS),
    )


@pytest.mark.parametrize("method", ["allow", "hit"])
@pytest.mark.parametrize(
    ("what", "make", "key"),
    [
        ("three token buckets", three_buckets, KEY),
        ("three token buckets, a key for each", three_buckets, [KEY, "tenant:7", "everybody"]),
        ("interval, sliding window, token bucket", three_kinds, KEY),
    ],
    ids=["one key", "three keys", "three kinds"],
)
def bench_all_of(
    measure: Measure, store: Store, what: str, make: Callable[[Store], AllOf], key: str | list[str], method: str
) -> None:
    limits = make(store)
    measure(
        f"all of {what}: `{method}`, allowed",
        statement("f(k)", f=getattr(limits, method), k=key),
        section=SECTION,
        bar=ALL_OF_BAR if method == "allow" else None,
    )
    must(store.stats().total.denied == 0)


def bench_all_of_denied(measure: Measure, store: Store) -> None:
    """The last limiter denies, so all three are checked."""
    limits = AllOf(
        TokenBucket(store, "second", **GENEROUS),
        TokenBucket(store, "hour", **GENEROUS),
        TokenBucket(store, "everybody", "1/day"),
    )
    must(limits.allow(KEY))
    measure(
        "all of three token buckets: `allow`, denied by the last",
        statement("f(k)", f=limits.allow, k=KEY),
        section=SECTION,
        bar=ALL_OF_BAR,
    )
    must(store.stats().limiters["everybody"].allowed == 1)


@pytest.mark.parametrize("limit", [20, 10_000])
def bench_concurrency(measure: Measure, store: Store, limit: int) -> None:
    """All permits except one are held."""
    concurrency = busy_concurrency(store, limit, limit - 1, KEY)
    measure(
        f"concurrency, one of {limit:,} free: `acquire` and `release`",
        statement("f(k).release()", f=concurrency.acquire, k=KEY),
        section=SECTION,
        bar=CONCURRENCY_BAR,
    )
    must(store.stats().total.denied == 0)


@pytest.mark.parametrize("limit", [20, 10_000])
def bench_concurrency_denied(measure: Measure, store: Store, limit: int) -> None:
    """Every slot is read."""
    concurrency = busy_concurrency(store, limit, limit, KEY)
    measure(
        f"concurrency, none of {limit:,} free: `acquire`, denied",
        statement("f(k)", f=concurrency.acquire, k=KEY),
        calls=50_000 * 20 // limit,
        section=SECTION,
    )
    must(store.stats().total.allowed == 1)

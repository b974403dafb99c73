"""Makes a limiter of each kind and some decisions, without a test framework: ci can run it on any system."""

import asyncio

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Credits,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)

with Store("shop", keys=100) as store:
    limiters = [
        TokenBucket(store, "bucket", "2/year"),
        TokenBucket(store, "initial", "3/year", initial=2),
        TokenBucket(store, "interval", "2/year", refill="interval"),
        FixedWindow(store, "fixed", "2/year"),
        FixedWindow(store, "first", "2/year", "first"),
        FixedWindow(store, "stagger", "2/year", "stagger"),
        SlidingWindow(store, "sliding", "2/year"),
        BucketedWindow(store, "bucketed", "2/year", 6),
        SlidingLog(store, "log", "2/year", keys=5),
        Concurrency(store, "slots", 2),
        AllOf(TokenBucket(store, "one", "2/year"), FixedWindow(store, "two", "5/year")),
    ]
    for limiter in limiters:
        assert limiter.wait("k"), limiter
        assert asyncio.run(limiter.wait_async("k")), limiter
        assert not limiter.allow("k"), limiter
        assert limiter.hit("k").retry_after > 0, limiter
    assert [MinInterval(store, "gap", "1 year").allow("k") for _ in range(2)] == [True, False]
    assert [LeakyBucket(store, "queue", "2/year", 2).allow("k") for _ in range(3)] == [True, True, False]
    prepaid = Credits(store, "credits")
    assert prepaid.add("k", 1) == 1
    assert [prepaid.wait("k") for _ in range(2)] == [True, False]
    assert store.stats().total.allowed == 4 + 2 * (len(limiters) + 1)
Store.unlink("shop")

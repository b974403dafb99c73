"""Makes a limiter of each kind and some decisions, without a test framework: ci can run it on any system."""

import asyncio

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
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
        TokenBucket(store, "bucket", "2/hour"),
        TokenBucket(store, "initial", "3/hour", initial=2),
        TokenBucket(store, "interval", "2/hour", refill="interval"),
        LeakyBucket(store, "queue", "2/hour", 2),
        FixedWindow(store, "fixed", "2/hour"),
        FixedWindow(store, "first", "2/hour", "first"),
        FixedWindow(store, "stagger", "2/hour", "stagger"),
        SlidingWindow(store, "sliding", "2/hour"),
        BucketedWindow(store, "bucketed", "2/hour", 6),
        SlidingLog(store, "log", "2/hour", keys=5),
        Concurrency(store, "slots", 2),
        AllOf(TokenBucket(store, "one", "2/hour"), FixedWindow(store, "two", "5/hour")),
    ]
    for limiter in limiters:
        assert limiter.wait("k"), limiter
        assert asyncio.run(limiter.wait_async("k")), limiter
        assert not limiter.allow("k"), limiter
        assert limiter.hit("k").retry_after > 0, limiter
    assert [MinInterval(store, "gap", "1h").allow("k") for _ in range(2)] == [True, False]
    assert store.stats().total.denied == 26
Store.unlink("shop")

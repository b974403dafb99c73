"""The types of limiters by their stores, for mypy. An unneeded ignore comment is an error."""

from typing import assert_type

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Credits,
    FixedWindow,
    LeakyBucket,
    Lease,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.core.synced.token_bucket import SyncedTokenBucket
from forebay.core.synced.window import SyncedWindow
from forebay.redis import (
    AsyncLeasedAllOf,
    AsyncLeasedLimiter,
    AsyncLeasedStore,
    AsyncRedisAllOf,
    AsyncRedisConcurrency,
    AsyncRedisLimiter,
    AsyncRedisStore,
    LeasedLimiter,
    LeasedStore,
    RedisAllOf,
    RedisConcurrency,
    RedisLease,
    RedisLimiter,
    RedisStore,
    SyncedStore,
)


def in_memory(store: Store) -> None:
    bucket = assert_type(TokenBucket(store, "a", "1/s"), TokenBucket)
    assert_type(LeakyBucket(store, "b", "1/s", 1), LeakyBucket)
    assert_type(MinInterval(store, "c", "1 s"), MinInterval)
    assert_type(FixedWindow(store, "d", "1/s"), FixedWindow)
    assert_type(SlidingWindow(store, "e", "1/s"), SlidingWindow)
    assert_type(BucketedWindow(store, "f", "1/s"), BucketedWindow)
    assert_type(SlidingLog(store, "g", "1/s", keys=1), SlidingLog)
    SlidingLog(store, "g", "1/s")  # type: ignore[call-overload]
    permits = assert_type(Concurrency(store, "h", 1), Concurrency)
    assert_type(Credits(store, "i"), Credits)
    assert_type(AllOf(bucket, permits), AllOf)
    assert_type(bucket.store, Store)
    with permits.hold("key") as lease:
        assert_type(lease, Lease)


def over_redis(store: RedisStore) -> None:
    bucket = assert_type(TokenBucket(store, "a", "1/s"), RedisLimiter)
    assert_type(TokenBucket(store=store, name="a", rate="1/s", refill="interval"), RedisLimiter)
    TokenBucket(store, "a", 1)  # type: ignore[call-overload]
    assert_type(LeakyBucket(store, "b", "1/s", 1), RedisLimiter)
    assert_type(MinInterval(store, "c", "1 s"), RedisLimiter)
    assert_type(FixedWindow(store, "d", "1/s"), RedisLimiter)
    assert_type(SlidingWindow(store, "e", "1/s"), RedisLimiter)
    assert_type(BucketedWindow(store, "f", "1/s"), RedisLimiter)
    assert_type(SlidingLog(store, "g", "1/s"), RedisLimiter)
    assert_type(Credits(store, "i"), RedisLimiter)
    permits = assert_type(Concurrency(store, "h", 1), RedisConcurrency)
    assert_type(AllOf(bucket), RedisAllOf)
    assert_type(AllOf(bucket, permits), RedisAllOf)
    assert_type(AllOf(permits, bucket), RedisAllOf)
    with permits.hold("key") as lease:
        assert_type(lease, RedisLease)


def over_asyncio(store: AsyncRedisStore) -> None:
    bucket = assert_type(TokenBucket(store, "a", "1/s"), AsyncRedisLimiter)
    assert_type(LeakyBucket(store, "b", "1/s", 1), AsyncRedisLimiter)
    assert_type(MinInterval(store, "c", "1 s"), AsyncRedisLimiter)
    assert_type(FixedWindow(store, "d", "1/s"), AsyncRedisLimiter)
    assert_type(SlidingWindow(store, "e", "1/s"), AsyncRedisLimiter)
    assert_type(BucketedWindow(store, "f", "1/s"), AsyncRedisLimiter)
    assert_type(SlidingLog(store, "g", "1/s"), AsyncRedisLimiter)
    assert_type(Credits(store, "i"), AsyncRedisLimiter)
    permits = assert_type(Concurrency(store, "h", 1), AsyncRedisConcurrency)
    assert_type(AllOf(bucket, permits), AsyncRedisAllOf)


def leased(store: LeasedStore) -> None:
    bucket = assert_type(TokenBucket(store, "a", "1/s"), LeasedLimiter)
    LeakyBucket(store, "b", "1/s", 1)  # type: ignore[arg-type]
    MinInterval(store, "c", "1 s")  # type: ignore[arg-type]
    assert_type(FixedWindow(store, "d", "1/s"), LeasedLimiter)
    assert_type(SlidingWindow(store, "e", "1/s"), LeasedLimiter)
    BucketedWindow(store, "f", "1/s")  # type: ignore[arg-type]
    SlidingLog(store, "g", "1/s")  # type: ignore[arg-type]
    Concurrency(store, "h", 1)  # type: ignore[arg-type]
    Credits(store, "i")  # type: ignore[arg-type]
    assert_type(bucket.store, LeasedStore)


def leased_for_asyncio(store: AsyncLeasedStore) -> None:
    bucket = assert_type(TokenBucket(store, "a", "1/s"), AsyncLeasedLimiter)
    LeakyBucket(store, "b", "1/s", 1)  # type: ignore[arg-type]
    assert_type(FixedWindow(store, "d", "1/s"), AsyncLeasedLimiter)
    assert_type(SlidingWindow(store, "e", "1/s"), AsyncLeasedLimiter)
    Concurrency(store, "h", 1)  # type: ignore[arg-type]
    Credits(store, "i")  # type: ignore[arg-type]
    assert_type(bucket.store, AsyncLeasedStore)


def synced(store: SyncedStore) -> None:
    bucket = assert_type(TokenBucket(store, "a", "1/s"), SyncedTokenBucket[SyncedStore])
    LeakyBucket(store, "b", "1/s", 1)  # type: ignore[arg-type]
    MinInterval(store, "c", "1 s")  # type: ignore[arg-type]
    assert_type(FixedWindow(store, "d", "1/s"), SyncedWindow[SyncedStore])
    window = assert_type(SlidingWindow(store, "e", "1/s"), SyncedWindow[SyncedStore])
    BucketedWindow(store, "f", "1/s")  # type: ignore[arg-type]
    SlidingLog(store, "g", "1/s")  # type: ignore[arg-type]
    Concurrency(store, "h", 1)  # type: ignore[arg-type]
    Credits(store, "i")  # type: ignore[arg-type]
    assert_type(AllOf(bucket, window), AllOf)
    assert_type(bucket.store, Store)
    assert_type(bucket.synced_store, SyncedStore)


def over_any(store: Store | RedisStore | SyncedStore, number: int) -> None:
    assert_type(SlidingWindow(store, "e", "1/s"), SlidingWindow | RedisLimiter | SyncedWindow[SyncedStore])
    TokenBucket(number, "a", "1/s")  # type: ignore[call-overload]
    TokenBucket(None, "a", "1/s")  # type: ignore[call-overload]


def of_several_stores(
    memory: TokenBucket, strict: RedisLimiter, awaited: AsyncRedisLimiter, leased: AsyncLeasedLimiter, store: RedisStore
) -> None:
    AllOf(memory, strict)  # type: ignore[arg-type]
    AllOf(strict, awaited)  # type: ignore[misc]
    AllOf(strict, leased)  # type: ignore[arg-type]
    assert_type(AllOf(leased), AsyncLeasedAllOf)
    assert_type(AllOf(memory, leased), AsyncLeasedAllOf)
    assert_type(AllOf(leased, memory), AsyncLeasedAllOf)
    AllOf(store)  # type: ignore[arg-type]

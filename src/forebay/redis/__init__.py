"""Limiters whose state is in Redis, for limits across hosts: ``pip install forebay[redis]``.

``TokenBucket(RedisStore("redis://localhost"), "api", "100/minute")``: the same classes, over another store.
"""

from forebay.extras import Needs

with Needs("redis", __name__):
    import redis  # noqa: F401

from forebay.redis.concurrency import AsyncRedisLease, RedisLease
from forebay.redis.leased.all_of import AsyncLeasedAllOf, LeasedAllOf
from forebay.redis.leased.store import AsyncLeasedLimiter, AsyncLeasedStore, LeasedLimiter, LeasedStore
from forebay.redis.limiter import AsyncRedisReservation, RedisReservation
from forebay.redis.public_limiters import (
    AsyncRedisAllOf,
    AsyncRedisConcurrency,
    AsyncRedisHold,
    AsyncRedisLimiter,
    RedisAllOf,
    RedisConcurrency,
    RedisLimiter,
)
from forebay.redis.store import AsyncRedisStore, RedisStore
from forebay.redis.synced.store import SyncedStore, SyncStatus
from forebay.redis.transport.breaker import RedisStatus

__all__ = [
    "AsyncLeasedAllOf",
    "AsyncLeasedLimiter",
    "AsyncLeasedStore",
    "AsyncRedisAllOf",
    "AsyncRedisConcurrency",
    "AsyncRedisHold",
    "AsyncRedisLease",
    "AsyncRedisLimiter",
    "AsyncRedisReservation",
    "AsyncRedisStore",
    "LeasedAllOf",
    "LeasedLimiter",
    "LeasedStore",
    "RedisAllOf",
    "RedisConcurrency",
    "RedisLease",
    "RedisLimiter",
    "RedisReservation",
    "RedisStatus",
    "RedisStore",
    "SyncStatus",
    "SyncedStore",
]

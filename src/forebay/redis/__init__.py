"""Limiters whose state is in Redis, for limits across hosts: ``pip install forebay[redis]``.

``TokenBucket(RedisStore("redis://localhost"), "api", "100/minute")``: the same classes, over another store.
"""

from forebay.extras import Needs

with Needs("redis", __name__):
    import redis  # noqa: F401

from forebay.redis.all_of import AsyncRedisAllOf, RedisAllOf
from forebay.redis.concurrency import (
    AsyncRedisConcurrency,
    AsyncRedisHold,
    AsyncRedisLease,
    RedisConcurrency,
    RedisLease,
)
from forebay.redis.leased.limiter import AsyncLeasedLimiter, LeasedLimiter
from forebay.redis.leased.store import AsyncLeasedStore, LeasedStore
from forebay.redis.limiter import AsyncRedisLimiter, AsyncRedisReservation, RedisLimiter, RedisReservation
from forebay.redis.store import AsyncRedisStore, RedisStore
from forebay.redis.synced.store import SyncedStore, SyncStatus
from forebay.redis.transport.breaker import RedisStatus

__all__ = [
    "AsyncLeasedLimiter",
    "AsyncLeasedStore",
    "AsyncRedisAllOf",
    "AsyncRedisConcurrency",
    "AsyncRedisHold",
    "AsyncRedisLease",
    "AsyncRedisLimiter",
    "AsyncRedisReservation",
    "AsyncRedisStore",
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

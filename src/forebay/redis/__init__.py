"""Limiters whose state is in Redis, for limits across hosts: ``pip install forebay[redis]``.

``TokenBucket(RedisStore("redis://localhost"), "api", "100/minute")``: the same classes, over another store.
"""

from forebay.extras import Needs

with Needs("redis", __name__):
    import redis  # noqa: F401

from forebay.redis.aio import AsyncRedisStore
from forebay.redis.aio_held import AsyncRedisConcurrency, AsyncRedisHold, AsyncRedisLease
from forebay.redis.aio_limiters import AsyncRedisAllOf, AsyncRedisLimiter, AsyncRedisReservation
from forebay.redis.leased.limiter import AsyncLeasedLimiter, LeasedLimiter
from forebay.redis.leased.store import AsyncLeasedStore, LeasedStore
from forebay.redis.store import (
    RedisAllOf,
    RedisConcurrency,
    RedisLease,
    RedisLimiter,
    RedisReservation,
    RedisStore,
)
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

"""Limiters whose state is in Redis, for limits across hosts: ``pip install penstock[redis]``.

``TokenBucket(RedisStore("redis://localhost"), "api", "100/minute")``: the same classes, over another store.
"""

from penstock.extras import Needs

with Needs("redis", __name__):
    import redis  # noqa: F401

from penstock.redis.aio import AsyncRedisStore
from penstock.redis.aio_held import AsyncRedisConcurrency, AsyncRedisHold, AsyncRedisLease
from penstock.redis.aio_limiters import AsyncRedisAllOf, AsyncRedisLimiter, AsyncRedisReservation
from penstock.redis.breaker import RedisStatus
from penstock.redis.leased import LeasedLimiter, LeasedStore
from penstock.redis.leased_aio import AsyncLeasedLimiter, AsyncLeasedStore
from penstock.redis.store import (
    RedisAllOf,
    RedisConcurrency,
    RedisLease,
    RedisLimiter,
    RedisReservation,
    RedisStore,
)
from penstock.redis.synced import SyncedStore, SyncStatus

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

from typing import Self, final, overload

from penstock.core.gcra import GcraLimiter
from penstock.core.keys import Key
from penstock.rate import Rate
from penstock.redis.aio import AsyncRedisStore
from penstock.redis.aio_limiters import AsyncRedisLimiter
from penstock.redis.store import RedisLimiter, RedisStore
from penstock.store import Store

@final
class LeakyBucket(GcraLimiter):
    @overload
    def __new__(cls, store: Store, name: str, rate: str | Rate, capacity: int) -> Self: ...
    @overload
    def __new__(cls, store: RedisStore, name: str, rate: str | Rate, capacity: int) -> RedisLimiter: ...  # type: ignore[misc]
    @overload
    def __new__(cls, store: AsyncRedisStore, name: str, rate: str | Rate, capacity: int) -> AsyncRedisLimiter: ...  # type: ignore[misc]
    def allow(self, key: Key, /) -> bool: ...
    @property
    def capacity(self) -> int: ...

from typing import Self, final, overload

from penstock.core.gcra import GcraLimiter
from penstock.core.keys import Key
from penstock.rate import Duration
from penstock.redis.aio import AsyncRedisStore
from penstock.redis.aio_limiters import AsyncRedisLimiter
from penstock.redis.store import RedisLimiter, RedisStore
from penstock.store import Store

@final
class MinInterval(GcraLimiter):
    @overload
    def __new__(cls, store: Store, name: str, interval: Duration) -> Self: ...
    @overload
    def __new__(cls, store: RedisStore, name: str, interval: Duration) -> RedisLimiter: ...  # type: ignore[misc]
    @overload
    def __new__(cls, store: AsyncRedisStore, name: str, interval: Duration) -> AsyncRedisLimiter: ...  # type: ignore[misc]
    def allow(self, key: Key, /) -> bool: ...
    @property
    def interval_ns(self) -> int: ...

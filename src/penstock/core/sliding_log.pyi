from typing import Self, final, overload

from penstock.core.cell_limiter import CellLimiter
from penstock.core.keys import Key
from penstock.extents import ExtentShape
from penstock.rate import Rate
from penstock.redis.aio import AsyncRedisStore
from penstock.redis.aio_limiters import AsyncRedisLimiter
from penstock.redis.store import RedisLimiter, RedisStore
from penstock.store import Store

@final
class SlidingLog(CellLimiter):
    @overload
    def __new__(cls, store: Store, name: str, rate: str | Rate, *, keys: int) -> Self: ...
    @overload
    def __new__(cls, store: RedisStore, name: str, rate: str | Rate, *, keys: int | None = None) -> RedisLimiter: ...  # type: ignore[misc]
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: AsyncRedisStore, name: str, rate: str | Rate, *, keys: int | None = None
    ) -> AsyncRedisLimiter: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def rate(self) -> Rate: ...
    @property
    def keys(self) -> int: ...
    @staticmethod
    def extent_shape(rate: Rate, keys: int, name: str) -> ExtentShape: ...
    @staticmethod
    def bytes_needed(rate: str | Rate, *, keys: int) -> int: ...

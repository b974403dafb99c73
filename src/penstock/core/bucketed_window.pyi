from typing import Self, final, overload

from penstock.core.cell_limiter import CellLimiter
from penstock.core.keys import Key
from penstock.rate import Rate
from penstock.redis.aio import AsyncRedisStore
from penstock.redis.aio_limiters import AsyncRedisLimiter
from penstock.redis.store import RedisLimiter, RedisStore
from penstock.store import Store

def default_keys(buckets: int) -> int: ...

@final
class BucketedWindow(CellLimiter):
    @overload
    def __new__(
        cls, store: Store, name: str, rate: str | Rate, buckets: int = 60, *, keys: int | None = None
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: RedisStore, name: str, rate: str | Rate, buckets: int = 60, *, keys: int | None = None
    ) -> RedisLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: AsyncRedisStore, name: str, rate: str | Rate, buckets: int = 60, *, keys: int | None = None
    ) -> AsyncRedisLimiter: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def rate(self) -> Rate: ...
    @property
    def buckets(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @staticmethod
    def bytes_needed(buckets: int = 60, *, keys: int | None = None) -> int: ...

from typing import Literal, Self, final, overload

from penstock.core.gcra import GcraLimiter
from penstock.core.keys import Key
from penstock.core.synced_bucket import SyncedTokenBucket
from penstock.rate import Rate
from penstock.redis.aio import AsyncRedisStore
from penstock.redis.aio_limiters import AsyncRedisLimiter
from penstock.redis.leased import LeasedLimiter, LeasedStore
from penstock.redis.leased_aio import AsyncLeasedLimiter, AsyncLeasedStore
from penstock.redis.store import RedisLimiter, RedisStore
from penstock.redis.synced import SyncedStore
from penstock.store import Store

@final
class TokenBucket(GcraLimiter):
    @overload
    def __new__(
        cls,
        store: Store,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: RedisStore,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> RedisLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: AsyncRedisStore,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> AsyncRedisLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: SyncedStore,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> SyncedTokenBucket: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: LeasedStore,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> LeasedLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: AsyncLeasedStore,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> AsyncLeasedLimiter: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def burst(self) -> int: ...
    @property
    def refill(self) -> str: ...

from typing import Literal, Self, final, overload

from typing_extensions import disjoint_base

from penstock.core.cell_limiter import CellLimiter
from penstock.core.keys import Key
from penstock.core.synced_window import SyncedWindow
from penstock.rate import Rate
from penstock.redis.aio import AsyncRedisStore
from penstock.redis.aio_limiters import AsyncRedisLimiter
from penstock.redis.leased import LeasedLimiter, LeasedStore
from penstock.redis.leased_aio import AsyncLeasedLimiter, AsyncLeasedStore
from penstock.redis.store import RedisLimiter, RedisStore
from penstock.redis.synced import SyncedStore
from penstock.store import Store

@disjoint_base
class WindowLimiter(CellLimiter):
    @property
    def rate(self) -> Rate: ...

@final
class FixedWindow(WindowLimiter):
    @overload
    def __new__(
        cls, store: Store, name: str, rate: str | Rate, align: Literal["clock", "first", "stagger"] = "clock"
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: RedisStore, name: str, rate: str | Rate, align: Literal["clock", "first", "stagger"] = "clock"
    ) -> RedisLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: AsyncRedisStore, name: str, rate: str | Rate, align: Literal["clock", "first", "stagger"] = "clock"
    ) -> AsyncRedisLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: SyncedStore, name: str, rate: str | Rate, align: Literal["clock", "first", "stagger"] = "clock"
    ) -> SyncedWindow: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: LeasedStore, name: str, rate: str | Rate, align: Literal["clock", "first", "stagger"] = "clock"
    ) -> LeasedLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: AsyncLeasedStore, name: str, rate: str | Rate, align: Literal["clock", "first", "stagger"] = "clock"
    ) -> AsyncLeasedLimiter: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def align(self) -> str: ...

@final
class SlidingWindow(WindowLimiter):
    @overload
    def __new__(
        cls, store: Store, name: str, rate: str | Rate, *, rounding: Literal["up", "down"] | None = None
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: RedisStore, name: str, rate: str | Rate, *, rounding: Literal["up", "down"] | None = None
    ) -> RedisLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: AsyncRedisStore, name: str, rate: str | Rate, *, rounding: Literal["up", "down"] | None = None
    ) -> AsyncRedisLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: SyncedStore, name: str, rate: str | Rate, *, rounding: Literal["up", "down"] | None = None
    ) -> SyncedWindow: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: LeasedStore, name: str, rate: str | Rate, *, rounding: Literal["up", "down"] | None = None
    ) -> LeasedLimiter: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: AsyncLeasedStore, name: str, rate: str | Rate, *, rounding: Literal["up", "down"] | None = None
    ) -> AsyncLeasedLimiter: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def rounding(self) -> str: ...

def rounds_up(rounding: str | None, limit: int) -> bool: ...

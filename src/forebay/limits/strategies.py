"""The strategy ``gcra``: a token bucket. The whole limit at once, and then a permit every ``period / limit``."""

from __future__ import annotations

import limits.aio.strategies
import limits.storage
import limits.strategies
from limits import RateLimitItem, WindowStats

from forebay.limits.counting import whole_cost
from forebay.limits.storages import AsyncForebayStorage, ForebayStorage

__all__ = ["AsyncGCRARateLimiter", "GCRARateLimiter"]


class GCRARateLimiter(limits.strategies.RateLimiter):
    """``gcra``: up to the limit at once; permits come back one by one, evenly over the period.

    In any span of time it allows at most the limit plus the permits that come back in it, rounded up.
    ``get_window_stats`` returns when the next permit comes back. Only for storages of forebay.
    """

    storage: ForebayStorage

    def __init__(self, storage: limits.storage.StorageTypes) -> None:
        _check(storage, ForebayStorage)
        super().__init__(storage)

    def hit(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        return self.storage.acquire_gcra(item.key_for(*identifiers), item.amount, item.get_expiry(), cost)

    def test(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        _, remaining = self.storage.get_gcra(item.key_for(*identifiers), item.amount, item.get_expiry())
        return whole_cost(cost) <= remaining

    def get_window_stats(self, item: RateLimitItem, *identifiers: str) -> WindowStats:
        reset_time, remaining = self.storage.get_gcra(item.key_for(*identifiers), item.amount, item.get_expiry())
        return WindowStats(reset_time, remaining)


class AsyncGCRARateLimiter(limits.aio.strategies.RateLimiter):
    """``GCRARateLimiter`` for asyncio."""

    storage: AsyncForebayStorage

    def __init__(self, storage: limits.storage.StorageTypes) -> None:
        _check(storage, AsyncForebayStorage)
        super().__init__(storage)

    async def hit(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        return await self.storage.acquire_gcra(item.key_for(*identifiers), item.amount, item.get_expiry(), cost)

    async def test(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        _, remaining = await self.storage.get_gcra(item.key_for(*identifiers), item.amount, item.get_expiry())
        return whole_cost(cost) <= remaining

    async def get_window_stats(self, item: RateLimitItem, *identifiers: str) -> WindowStats:
        reset_time, remaining = await self.storage.get_gcra(item.key_for(*identifiers), item.amount, item.get_expiry())
        return WindowStats(reset_time, remaining)


def _check(storage: object, kind: type) -> None:
    if not isinstance(storage, kind):
        raise NotImplementedError(
            f"the strategy gcra needs a {kind.__name__}, of forebay:///shop or async+forebay:///shop, not "
            f"a {type(storage).__name__}"
        )


# Flask-Limiter and slowapi look strategies up here.
limits.strategies.STRATEGIES["gcra"] = GCRARateLimiter  # type: ignore[assignment]
limits.aio.strategies.STRATEGIES["gcra"] = AsyncGCRARateLimiter

"""Hosts that borrow permits, all in this process. Their clocks and the server's stand still together."""

from __future__ import annotations

import itertools
from typing import Any

from scripts_clock import ServerClock

from forebay import Store
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.redis import LeasedStore, RedisStore
from forebay.redis.leased.fetch import Holdings, Outcome, Steps, borrowed, charged, is_alone
from forebay.testing import ManualClock


class Hosts:
    def __init__(self, redis_store: RedisStore, server_clock: ServerClock) -> None:
        self.redis_store, self.executor, self.server_clock = redis_store, redis_store.executor, server_clock
        self.clocks: list[ManualClock] = []
        self.stores: list[LeasedStore] = []

    def new(self, **options: Any) -> LeasedStore:
        self.clocks.append(ManualClock(1000.0))
        # Only the test gives back.
        store = LeasedStore(self.redis_store, Store.private(keys=1000, clock=self.clocks[-1]), **options)
        store.executor.keeper.end()
        self.stores.append(store)
        return store

    def advance(self, seconds: float) -> None:
        self.server_clock.advance(seconds)
        for clock in self.clocks:
            clock.advance(seconds)

    def calls(self) -> int:
        stats: Any = self.redis_store.executor.client._client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))

    def give_back(self, *, everything: bool = False) -> None:
        for store in self.stores:
            store.executor.give_back(store.executor.holdings.unused(everything=everything))


def answered(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[Outcome]:
    """Decide a request that exceeds the lease: the steps of an executor, without its fallback."""
    answer = (yield from charged(permits, key, cost)) if is_alone(permits, cost) else None
    return answer or (yield from borrowed(permits, holdings, key, cost))


def drained(limiter: Any, key: str = "user:42") -> int:
    return sum(1 for _ in itertools.takewhile(bool, (limiter.allow(key) for _ in range(100_000))))

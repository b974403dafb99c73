"""Hosts of a test: each a store of its own and its part in the exchange, as hosts have that share nothing but Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import redis

from penstock import Store
from penstock.redis import RedisStore, SyncedStore
from penstock.testing import ManualClock

NEVER: Final = "1 minute"
"""An interval: what is exchanged is exchanged by the test."""


class Host:
    def __init__(
        self,
        url: str,
        make: Callable[[Any], Any],
        clock: ManualClock | None = None,
        interval: str = NEVER,
        keys: int = 100,
        store: Store | None = None,
    ) -> None:
        self.redis_store = RedisStore(url, timeout=60)
        self.store = store or Store.private(keys=100, clock=clock or "monotonic")
        self.synced = SyncedStore(self.redis_store, self.store, interval, keys=keys)
        self.limiter = make(self.synced)

    def exchange(self) -> None:
        self.synced.exchange()

    @property
    def field(self) -> bytes:
        """What the host is called in the hashes at Redis."""
        return self.synced._exchanges[0].host

    def close(self) -> None:
        self.redis_store.close()
        self.synced.close()
        self.store.close()


@contextlib.contextmanager
def hosts(count: int, url: str, make: Callable[[Any], Any], **options: Any) -> Iterator[list[Host]]:
    made = [Host(url, make, **options) for _ in range(count)]
    try:
        yield made
    finally:
        for host in made:
            host.close()


def sums(client: redis.Redis, pattern: str = "penstock:*:synced-*") -> dict[str, int]:
    """What Redis has as the sum of all hosts, by its keys."""
    return {key.decode(): int(client.hget(key, "sum") or 0) for key in client.scan_iter(pattern, count=1000)}


def sum_of_all(client: redis.Redis) -> int:
    return sum(sums(client).values())


def admitted(limiter: Any, requests: int, key: str = "k") -> int:
    return sum(limiter.allow(key) for _ in range(requests))

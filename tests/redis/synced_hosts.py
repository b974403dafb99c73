"""Hosts for tests of synced limits: each has a store of its own, and they share only Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import redis

from forebay import Store
from forebay.redis import RedisStore, SyncedStore
from forebay.redis.commands import Command
from forebay.redis.synced.exchange import ListsCommand
from forebay.testing import ManualClock

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
        push: bool = False,
    ) -> None:
        self.redis_store = RedisStore(url, timeout=60)
        self.store = store or Store.private(keys=100, clock=clock or "monotonic")
        self.synced = SyncedStore(self.redis_store, self.store, interval, keys=keys, push=push)
        self.limiter = make(self.synced)

    def exchange(self) -> None:
        self.synced.exchange()

    @property
    def field(self) -> bytes:
        """The name of the host in the hashes at Redis."""
        return self.synced._exchanger.exchanges[0].host

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


@contextlib.contextmanager
def two_of_one_host(store: Store, url: str, make: Callable[[Any], Any]) -> Iterator[list[Host]]:
    """Two stores that act as two processes of one host."""
    with contextlib.ExitStack() as stack:
        made = [Host(url, make, store=store) for _ in range(2)]
        for host in made:
            stack.callback(host.redis_store.close)
            stack.callback(host.synced.close)
        yield made


@contextlib.contextmanager
def before_the_answer(host: Host, act: Callable[[], object]) -> Iterator[None]:
    """`act` between the next answer of Redis to reports and its learning."""
    (exchange,) = host.synced._exchanger.exchanges
    send = exchange.send

    def acting(messages: list[Command[None]]) -> Sequence[Any]:
        replies = send(messages)
        if isinstance(messages[0], ListsCommand):
            return replies
        exchange.send = send  # type: ignore[method-assign]
        act()
        return replies

    exchange.send = acting  # type: ignore[method-assign]
    yield
    assert exchange.send == send, "nothing was exchanged"


def sums(client: redis.Redis, pattern: str = "forebay:*:synced-*") -> dict[str, int]:
    """The sums of all hosts at Redis, by their keys."""
    return {key.decode(): int(client.hget(key, "sum") or 0) for key in client.scan_iter(pattern, count=1000)}


def sum_of_all(client: redis.Redis) -> int:
    return sum(sums(client).values())


def admitted(limiter: Any, requests: int, key: str = "k") -> int:
    return sum(limiter.allow(key) for _ in range(requests))

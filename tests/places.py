"""Places where limits are kept, behind one interface: a store for the limiter classes, and a clock for tests to move.

A test of tests/behaviour holds at every place, unless it names its own (``@pytest.mark.places``).

| place | | counts in |
| --- | --- | --- |
| private, named | a table of this process, or in shared memory | nanoseconds |
| redis, asyncio | Redis, called directly or from an event loop | microseconds |
| leased | permits that one host leases from Redis | microseconds |
| synced | one host that exchanges with Redis, with no other host | nanoseconds |

A place that counts in microseconds has no time between two of them: its `Clock` refuses such a time. So a test of all
places moves by whole microseconds, or by `Place.grain_ns`, the place's shortest time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from blocking import blocking_store
from redis_server import RedisServer
from scripts_clock import ServerClock

from forebay import Store
from forebay.redis import LeasedStore, RedisStore, SyncedStore
from forebay.testing import ManualClock

NS: Final = 1_000_000_000

IN_MEMORY: Final = ("private", "named")
OVER_REDIS: Final = ("redis", "asyncio")
STRICT: Final = (*IN_MEMORY, *OVER_REDIS)
"""Places where every limiter can be made, and every answer is exact."""
EXACT: Final = (*STRICT, "synced")
"""Places where every answer of token buckets, clock-aligned fixed windows and sliding windows is exact."""
EVERYWHERE: Final = (*EXACT, "leased")


class Clock:
    """The time of a place: all of its clocks stand still, and are moved together."""

    def __init__(self, grain_ns: int, host: ManualClock | None, server: ServerClock | None, start_ns: int) -> None:
        self._grain_ns, self._host, self._server = grain_ns, host, server
        self.set_ns(start_ns)

    def set_ns(self, now_ns: int) -> None:
        assert now_ns % self._grain_ns == 0, "the place's clocks are too coarse for this time"
        self.now_ns = now_ns
        if self._host is not None:
            self._host.set(Fraction(now_ns, NS))  # type: ignore[arg-type]  # exact, where a float would round
        if self._server is not None:
            self._server.set_us(now_ns // 1000)

    def set(self, seconds: float) -> None:
        self.set_ns(round(Fraction(seconds) * NS / self._grain_ns) * self._grain_ns)

    def advance(self, seconds: float) -> None:
        self.set(Fraction(self.now_ns, NS) + Fraction(seconds))  # type: ignore[arg-type]

    def now(self) -> float:
        return self.now_ns / NS


@dataclass(frozen=True)
class Place:
    kind: str
    store: Any
    clock: Clock
    grain_ns: int
    another: Callable[[str], AbstractContextManager[Any]]
    """One more store of that kind over the same states and times."""


@contextlib.contextmanager
def opened(kind: str, server: RedisServer | None, start_ns: int = 1000 * NS, keys: int = 1) -> Iterator[Place]:
    """A new, empty place. Places other than in memory need a server, and scripts patched by `moved_by_tests`."""
    name = f"test-{os.getpid()}-{secrets.token_hex(6)}"
    host = None if kind in OVER_REDIS else ManualClock()

    def another(kind: str) -> AbstractContextManager[Any]:
        match kind:
            case "private":
                return Store.private(keys=keys, clock=host)  # type: ignore[arg-type]  # `host` is set for these kinds
            case "named":
                return Store(name, keys=keys, clock=host)  # type: ignore[arg-type]
            case "redis":
                return RedisStore(server.url, timeout=60)  # type: ignore[union-attr]
            case "asyncio":
                return blocking_store(server.url, True, timeout=60)  # type: ignore[union-attr]
            case _:
                return _of_one_host(kind, server.url, host)  # type: ignore[union-attr]

    with contextlib.ExitStack() as stack:
        server_clock = None
        if kind == "named":
            stack.callback(Store.unlink, name)
        elif kind != "private":
            assert server is not None
            client = stack.enter_context(server.client())
            client.flushall()
            server_clock = ServerClock(client)
        grain_ns = 1000 if kind in (*OVER_REDIS, "leased") else 1
        clock = Clock(grain_ns, host, server_clock, start_ns)
        yield Place(kind, stack.enter_context(another(kind)), clock, grain_ns, another)


@contextlib.contextmanager
def _of_one_host(kind: str, url: str, clock: Any) -> Iterator[Any]:
    with RedisStore(url, timeout=60) as over, Store.private(keys=1000, clock=clock) as host:
        if kind == "leased":
            with LeasedStore(over, host, share=1.0) as leased:
                leased.executor.keeper.end()  # only the test gives permits back
                yield leased
        else:
            with SyncedStore(over, host, "1 minute", keys=100) as synced:
                yield synced

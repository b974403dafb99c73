"""Leased stores: a host's own shared memory in front of Redis."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.errors import redacted_repr, short_repr
from forebay.rate import NS, Duration
from forebay.redis.commands import LimiterCommands
from forebay.redis.leased.executor import AsyncLeaseExecutor, LeaseExecutor
from forebay.redis.leased.limiter import AsyncLeasedLimiter, LeasedLimiter
from forebay.redis.leased.terms import Terms, checked_options, terms_of
from forebay.redis.operations import awaited
from forebay.redis.store import AsyncRedisStore, RedisStore
from forebay.store import Store

__all__ = ["AsyncLeasedStore", "LeasedStore"]

Leasable: TypeAlias = type[TokenBucket | FixedWindow | SlidingWindow]


class LeasedStoreBase:
    """The base of both leased stores: a store in Redis, a store of the host, and the terms between them."""

    _redis_kind: ClassVar[type]
    redis_store: Any
    executor: LeaseExecutor | AsyncLeaseExecutor

    def __init__(self, redis_store: Any, host_store: Store, lease: Duration, share: float) -> None:
        name = type(self).__name__
        if not isinstance(redis_store, self._redis_kind):
            raise TypeError(
                f"the first argument of {name} is its {self._redis_kind.__name__}, not {redacted_repr(redis_store)} (a "
                "LeasedStore is over a RedisStore, an AsyncLeasedStore over an AsyncRedisStore)"
            )
        if not isinstance(host_store, Store):
            raise TypeError(f"the second argument of {name} is the host's Store, not {short_repr(host_store)}")
        self.redis_store, self.host_store = redis_store, host_store
        self._options = checked_options(lease, share)

    @property
    def closed(self) -> bool:
        return self.executor.closed

    def _terms(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Terms]:
        # The strict limiter checks all other arguments.
        if args:
            args = (self.redis_store, *args[1:])
        else:
            kwargs = {**kwargs, "store": self.redis_store}
        strict: LimiterCommands = kind(*args, **kwargs).commands
        terms = terms_of(kind, strict, self.host_store, self._options, round(self.redis_store.executor.timeout_s * NS))
        return strict.name, terms

    def __repr__(self) -> str:
        lease_s = self._options.lease_ns / NS
        return f"<{type(self).__name__} {self.redis_store!r} {self.host_store!r} lease={lease_s:g}s>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same stores")


class LeasedStore(LeasedStoreBase):
    """A host's shared memory in front of Redis: a limit across hosts that seldom costs a round trip.

    ``TokenBucket(LeasedStore(redis_store, host_store), "api", "10000/second")``. A host borrows permits of a key in
    batches, and its workers spend them as if the limit were the host's own. All hosts together never exceed the limit.
    They stay below it by what is on loan to hosts that don't use it. ``TokenBucket`` with continuous refill,
    ``FixedWindow`` and ``SlidingWindow`` can be made over it.

    `redis_store` is a ``RedisStore``, `host_store` the ``Store`` that all workers of the host share. `lease`, from
    10 ms to a minute, is the longest time that a token bucket's permits stay borrowed. Permits of any limit that are
    unused for a quarter of it are given back. `share` is the largest part of a limit that a host has on loan.

    *Threads*, *fork*: safe. A thread of its own gives back unused permits. ``close`` and the end of the interpreter
    give back all that remain; the two stores stay open. It is a context manager.
    """

    _redis_kind = RedisStore
    manual_clock: ClassVar[None] = None  # waiting threads sleep, and move no clock
    redis_store: RedisStore
    executor: LeaseExecutor

    def __init__(
        self,
        redis_store: RedisStore,
        host_store: Store,
        *,
        lease: Duration = "1 second",
        share: float = 0.1,
    ) -> None:
        super().__init__(redis_store, host_store, lease, share)
        self.executor = LeaseExecutor(redis_store.executor, repr(self), self._options.lease_ns)

    def close(self) -> None:
        """Give back the remaining permits of the leases that this process has fetched. Its limiters can't be used any
        more.
        """
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def now_ns() -> int:
        """The time by which a waiting thread sleeps."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def make_limiter(self, kind: Leasable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LeasedLimiter:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        return LeasedLimiter(self, *self._terms(kind, args, kwargs))


class AsyncLeasedStore(LeasedStoreBase):
    """``LeasedStore`` for asyncio, over an ``AsyncRedisStore``. A task of its own gives back unused permits.

    It belongs to one event loop. ``await store.close()`` gives back the remaining permits; it is an asynchronous
    context manager.
    """

    is_awaited = True
    _redis_kind = AsyncRedisStore
    redis_store: AsyncRedisStore
    executor: AsyncLeaseExecutor

    def __init__(
        self,
        redis_store: AsyncRedisStore,
        host_store: Store,
        *,
        lease: Duration = "1 second",
        share: float = 0.1,
    ) -> None:
        super().__init__(redis_store, host_store, lease, share)
        self.executor = AsyncLeaseExecutor(redis_store.executor, repr(self), self._options.lease_ns)

    @awaited
    async def close(self) -> None:
        """Give back the remaining permits of the leases that this process has fetched. Its limiters can't be used any
        more.
        """
        await self.executor.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def make_limiter(self, kind: Leasable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncLeasedLimiter:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        return AsyncLeasedLimiter(self, *self._terms(kind, args, kwargs))

"""The public classes of limiters over Redis: two of each kind, for a ``RedisStore`` and for an ``AsyncRedisStore``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

from forebay import holding
from forebay.core.all_of import AllOf
from forebay.core.stores import Combinable
from forebay.core.table.keys import Key
from forebay.errors import NotAwaited
from forebay.rate import Duration, Rate
from forebay.redis.all_of import BaseAllOf, Costs, Keys
from forebay.redis.async_executor import AsyncExecutor
from forebay.redis.concurrency import AsyncRedisLease, BaseConcurrency, RedisLease, lease_taken
from forebay.redis.executor import Executor
from forebay.redis.limiter import AsyncRedisReservation, BaseLimiter, RedisReservation, would_block
from forebay.redis.operations import asyncio_operations

__all__ = [
    "AsyncRedisAllOf",
    "AsyncRedisConcurrency",
    "AsyncRedisHold",
    "AsyncRedisLimiter",
    "RedisAllOf",
    "RedisConcurrency",
    "RedisLimiter",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
P = ParamSpec("P")


class RedisLimiter(BaseLimiter[Executor, RedisReservation]):
    """A limiter whose state is in Redis. ``forebay.TokenBucket`` and its like document the methods.

    *Threads*: every method may be called from any thread. *Processes*: all that make a limiter of the same name and
    parameters over the same Redis and namespace share its state. *Fork*: works in parent and child. A call that an
    interrupt ends, as ``KeyboardInterrupt`` does, may have been charged.

    Each method is one round trip. Any may raise ``ForeignState``, and ``StoreUnavailable`` unless the store's
    `when_unavailable` decides instead. ``reset`` always raises it while Redis is unavailable.
    """

    _reservation = RedisReservation

    def make_limiter(
        self, kind: type[AllOf], args: tuple[Combinable[AllOf, RedisAllOf], ...], kwargs: dict[str, Any]
    ) -> RedisAllOf:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        made: RedisAllOf = self._store.all_of(kind, args, kwargs)
        return made

    def wait_async(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> NoReturn:
        raise would_block(self)

    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> holding.Limited:
        return holding.Limited(self, key, cost, timeout, jitter)


@asyncio_operations
class AsyncRedisLimiter(BaseLimiter[AsyncExecutor, AsyncRedisReservation]):
    """A limiter whose state is in Redis, for asyncio. ``forebay.TokenBucket`` and its like document the methods, which
    are awaited here.

    *Tasks*: any number, in one event loop. *Processes*: all that make a limiter of the same name and parameters over
    the same Redis and namespace share its state. A request whose task is cancelled while the reply is on its way may
    have been charged. Permits of a ``Concurrency`` then come back at once.

    Each method is one round trip. Any may raise ``ForeignState``, and ``StoreUnavailable`` unless the store's
    `when_unavailable` decides instead. ``reset`` always raises it while Redis is unavailable.
    """

    _reservation = AsyncRedisReservation
    wait_async = BaseLimiter.wait

    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> holding.AsyncLimited:
        return holding.AsyncLimited(self, key, cost, timeout, jitter)

    def make_limiter(
        self, kind: type[AllOf], args: tuple[Combinable[AllOf, AsyncRedisAllOf], ...], kwargs: dict[str, Any]
    ) -> AsyncRedisAllOf:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        made: AsyncRedisAllOf = self._store.all_of(kind, args, kwargs)
        return made


class RedisConcurrency(BaseConcurrency[Executor, RedisReservation, RedisLease], RedisLimiter):
    """Permits that are held for a while, as with ``forebay.Concurrency``. But Redis doesn't notice that a process has
    ended: its permits come back at the end of their leases. So take a short lease, and renew it.
    """

    _lease = RedisLease

    def hold(self, key: Key, cost: int = 1, timeout: Duration | None = None) -> holding.Hold[RedisLease]:
        return holding.Hold(self, lease_taken, key, cost, timeout)

    def limited(  # type: ignore[override]  # holds the permits, which the others spend
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None
    ) -> Callable[[F], F]:
        return holding.limited(self, key, cost, timeout)


@asyncio_operations
class AsyncRedisConcurrency(BaseConcurrency[AsyncExecutor, AsyncRedisReservation, AsyncRedisLease], AsyncRedisLimiter):
    """Permits that are held for a while, as with ``forebay.Concurrency``. But Redis doesn't notice that a process has
    ended: its permits come back at the end of their leases. So take a short lease, and renew it.
    """

    _lease = AsyncRedisLease

    def hold(self, key: Key, cost: int = 1, timeout: Duration | None = None) -> AsyncRedisHold:
        return AsyncRedisHold(self, key, cost, timeout)

    def limited(  # type: ignore[override]  # holds the permits, which the others spend
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """A decorator: each run of the coroutine holds `cost` permits."""

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            if not inspect.iscoroutinefunction(function):
                raise TypeError(f"limiter {self.name!r} over an AsyncRedisStore limits coroutines, not {function!r}")

            @functools.wraps(function)
            async def held(*args: P.args, **kwargs: P.kwargs) -> T:
                async with self.hold(key(*args, **kwargs) if callable(key) else key, cost, timeout):
                    return await function(*args, **kwargs)

            return held

        return decorate


class AsyncRedisHold:
    """The result of ``hold``: waits for permits, holds them in the ``async with`` block, and gives them back."""

    __slots__ = ("_arguments", "_leases", "_limiter")

    def __init__(self, limiter: AsyncRedisConcurrency, key: Key, cost: int, timeout: Duration | None) -> None:
        self._limiter, self._arguments = limiter, (key, cost, timeout)
        # One lease for each time that the object is entered. Any exit may release any of them.
        self._leases: list[AsyncRedisLease] = []

    async def __aenter__(self) -> AsyncRedisLease:
        key, cost, timeout = self._arguments
        limiter = self._limiter
        if not await limiter.wait(key, cost, timeout):
            raise await limiter.exceeded(key)
        self._leases.append(lease_taken(limiter, key, cost))
        return self._leases[-1]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leases.pop().__aexit__(kind, error, trace)

    def __bool__(self) -> NoReturn:
        raise NotAwaited(
            f"what hold() of {self._limiter!r} returns is neither true nor false: it waits in an async with block"
        )


class RedisAllOf(BaseAllOf[Executor, RedisReservation]):
    """Several limits of one ``RedisStore`` at once, as ``forebay.AllOf``: all or none.

    A decision is one round trip. If the keys lie in several slots of a cluster, it is one for each slot, and those that
    give back.
    """

    _reservation = RedisReservation

    def wait_async(
        self, key: Keys, cost: Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> NoReturn:
        raise would_block(self)

    def limited(
        self,
        key: Keys | Callable[..., Keys],
        cost: Costs = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
    ) -> holding.Limited:
        self._check_spent()
        return holding.Limited(self, key, cost, timeout, jitter)


@asyncio_operations
class AsyncRedisAllOf(BaseAllOf[AsyncExecutor, AsyncRedisReservation]):
    """Several limits of one ``AsyncRedisStore`` at once, as ``RedisAllOf``."""

    _reservation = AsyncRedisReservation
    wait_async = BaseAllOf.wait

    def limited(
        self,
        key: Keys | Callable[..., Keys],
        cost: Costs = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
    ) -> holding.AsyncLimited:
        self._check_spent()
        return holding.AsyncLimited(self, key, cost, timeout, jitter)

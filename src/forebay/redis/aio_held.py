# mypy: disable-error-code="no-any-return,union-attr"
"""Permits that are held for a while, over an ``AsyncRedisStore``."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NoReturn, ParamSpec, Self, TypeVar

from forebay.core.table.keys import Key
from forebay.errors import LimitExceeded, NotAwaited
from forebay.rate import Duration, Rate
from forebay.redis.aio_limiters import AsyncRedisLimiter
from forebay.redis.awaiting import awaited
from forebay.redis.base import none_held
from forebay.redis.held import ConcurrencyCommands, HeldView, Taken, unimportant_after

__all__ = ["AsyncRedisConcurrency", "AsyncRedisHold", "AsyncRedisLease"]

T = TypeVar("T")
P = ParamSpec("P")


class AsyncRedisLease(HeldView):
    """Permits that are held: given back by ``release`` or at the end of an ``async with`` block.

    They come back by themselves at the end of the lease, however the process that holds them has ended.
    """

    __slots__ = ()
    _limiter: AsyncRedisConcurrency

    @property
    def full(self) -> bool:
        return self._taken.full

    @awaited
    async def release(self) -> bool:
        """Give the permits back, also if the task is cancelled meanwhile. Whether any was still held. If it raises, it
        may be called again."""
        self._released = True
        local = self._taken.local
        held = local is not None and local.release()
        if self._permits and self._taken.is_own:
            command = self._limiter._ask_release(self._taken.key, self._permits)
            held |= await self._limiter._store._do(command, none_held) > 0
        self._permits = []
        return held

    @awaited
    async def renew(self) -> bool:
        """Let the lease begin anew. False if any of the permits was not held any more."""
        permits, local = self._permits, self._taken.local
        if local is not None and not local.renew():
            return False
        if not permits or not self._taken.is_own:
            return local is not None
        command = self._limiter._ask_renew(self._taken.key, permits)
        return await self._limiter._store._do(command, none_held) == len(permits)

    async def __aenter__(self) -> Self:
        if not self._taken.allowed:
            raise await self._limiter.exceeded(self._key)
        if self._released:
            raise RuntimeError(f"{self!r} was released before: acquire another one")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end(error)

    async def _end(self, error: BaseException | None) -> None:
        """Of a block, whose outcome counts: what can't be released comes back by itself."""
        with contextlib.suppress(unimportant_after(error)):
            await self.release()


class AsyncRedisHold:
    """What ``hold`` returns: waits for permits, holds them in the ``async with`` block, gives them back."""

    __slots__ = ("_arguments", "_leases", "_limiter")

    def __init__(self, limiter: AsyncRedisConcurrency, key: Key, cost: int, timeout: Duration | None) -> None:
        self._limiter, self._arguments = limiter, (key, cost, timeout)
        # One for each time that it is entered: any of them is as good.
        self._leases: list[AsyncRedisLease] = []

    async def __aenter__(self) -> AsyncRedisLease:
        key, cost, timeout = self._arguments
        if not await self._limiter.wait(key, cost, timeout):
            raise await self._limiter.exceeded(key)
        self._leases.append(AsyncRedisLease(self._limiter, key, self._limiter._take_unleased_permits(key, cost)))
        return self._leases[-1]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leases.pop()._end(error)

    def __bool__(self) -> NoReturn:
        raise NotAwaited(
            f"what hold() of {self._limiter!r} returns is neither true nor false: it waits in an async with block"
        )


class AsyncRedisConcurrency(ConcurrencyCommands, AsyncRedisLimiter):
    """Permits that are held for a while, as ``forebay.Concurrency``; but nobody notices that a process has ended: its
    permits come back at the end of their leases. So take a short lease, and renew it."""

    @awaited
    async def acquire(self, key: Key, cost: int = 1) -> AsyncRedisLease:
        taken = await self._store._do(
            self._ask_acquire(key, cost), lambda fallback: fallback.acquire(key, cost), self._fallback
        )
        return AsyncRedisLease(self, key, taken)

    @awaited
    async def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        """Give back what ``allow``, ``hit``, ``wait`` or ``reserve`` took in this process, also if the task is
        cancelled meanwhile."""
        await self._store._run_to_its_end(self._refund(key, cost, rate, burst, request_id))

    def _lease_of(self, key: Key, taken: Taken) -> AsyncRedisLease:
        return AsyncRedisLease(self, key, taken)

    def hold(self, key: Key, cost: int = 1, timeout: Duration | None = None) -> AsyncRedisHold:
        return AsyncRedisHold(self, key, cost, timeout)

    def limited(
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

    @awaited
    async def exceeded(self, key: Key) -> LimitExceeded:
        return self._exceeded((await self.peek(key)).retry_after)

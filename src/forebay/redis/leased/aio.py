"""A host's own table in front of Redis, for asyncio: only who has to ask Redis waits for the network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast

from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, ForeignState, InvalidLimiter, StoreUnavailable
from forebay.rate import Duration, Rate
from forebay.redis.aio import AsyncRedisStore
from forebay.redis.aio_limiters import AsyncRedisReservation
from forebay.redis.awaiting import awaited
from forebay.redis.commands import Command, costs_of, keys_of
from forebay.redis.leased.fetch import LOOKS, Holdings, Steps, alone, is_alone, looked, refunded, reset, shared
from forebay.redis.leased.store import LeasedStoreBase, nothing
from forebay.redis.leased.terms import Terms
from forebay.redis.leased.turns import Turns
from forebay.redis.wait_queues import WaitQueues, wait
from forebay.store import Store

__all__ = ["AsyncLeasedLimiter", "AsyncLeasedStore"]

T = TypeVar("T")
NS = 1_000_000_000


class AsyncLeasedLimiter:
    """A limiter whose permits a host borrows from Redis, for asyncio. The methods mean what they do at
    ``forebay.TokenBucket`` and its like, and are awaited.

    *Tasks*: any number, in one event loop. *Processes*: as ``LeasedLimiter``, with which it shares leases if the stores
    are the same and have the same deadline. Any method may raise ``StoreUnavailable`` and ``ForeignState``.
    """

    may_free_early = False

    def __init__(self, store: AsyncLeasedStore, permits: Permits) -> None:
        self._store, self._permits = store, permits
        self._terms: Terms = permits.terms

    @property
    def store(self) -> AsyncLeasedStore:
        return self._store

    @property
    def name(self) -> str:
        return self._permits.name

    @property
    def limit(self) -> int:
        """The most permits that can be allowed at once."""
        return self._terms.limit

    def __getattr__(self, name: str) -> Any:
        """What it was made of: rate, burst, ..."""
        try:
            return self.__dict__["_terms"].parameters[name]
        except KeyError:
            raise AttributeError(f"a leased limiter has no attribute {name!r}") from None

    def __repr__(self) -> str:
        return f"<leased {self._terms.strict!r}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same stores and name")

    @awaited
    async def allow(self, key: Key, /) -> bool:
        allowed = self._permits.allow_now(key)
        return (await self._lacking(key, 1)).allowed if allowed is None else allowed

    @awaited
    async def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> Decision:
        if rate is not None or burst is not None or request_id is not None:
            self._permits.refuse_extras()
        decision = self._permits.hit_now(key, cost)
        if decision is not None:
            return decision
        if not (cost := self._permits.checked(cost)):
            return await self.peek(key, 0)
        return await self._lacking(key, cost)

    async def _lacking(self, key: Key, cost: int) -> Decision:
        store, permits = self._store, self._permits
        turns, fallback = store._turns, self._terms.strict._fallback

        def fall_back(fallback: Any) -> Decision:
            decision: Decision = fallback.hit(key, cost)
            return decision

        if is_alone(permits, cost):
            decision = await store._run(alone(permits, key, cost), fall_back, fallback)
            if decision is not None:
                return decision
        # Nobody waits for a task of a loop that has ended.
        store.redis_store.executor.check_use()
        try:
            decision = await turns.wait(permits, key, cost)
        except StoreUnavailable as error:
            return store.redis_store.executor.fall_back(error, lambda: fall_back(fallback))
        if decision is not None:
            return decision
        has_brought = None
        try:
            decision = await store._run(shared(permits, store._holdings, key, cost), fall_back, fallback)
            has_brought = not decision.degraded
            return decision
        except ForebayError:
            has_brought = False
            raise
        finally:
            turns.hand_on(permits, key, has_brought)

    @awaited
    async def peek(self, key: Key, cost: int = 1) -> Decision:
        steps = looked(self._permits, key, cost)
        return await self._store._run(steps, lambda fallback: fallback.peek(key, cost), self._terms.strict._fallback)

    @awaited
    async def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        listed = keys_of(keys)
        checked = [self._permits.checked(cost) for cost in costs_of(costs, len(listed))]
        for key in listed:
            self._permits.tag(key)
        return [(await self.hit(key, cost)).allowed for key, cost in zip(listed, checked, strict=True)]

    @awaited
    async def refund(self, key: Key, cost: int = 1) -> None:
        steps = refunded(self._permits, key, cost)
        await self._store._run(steps, lambda fallback: fallback.refund(key, cost), self._terms.strict._fallback)

    @awaited
    async def reset(self, key: Key) -> None:
        await self._store._run(reset(self._permits, key))

    @awaited
    async def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> NoReturn:
        raise InvalidLimiter(
            f"{self!r} can't book ahead: wait for a permit, or reserve by a limiter over the AsyncRedisStore itself"
        )

    @awaited
    async def wait(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        async def charge(max_delay: Duration | None) -> AsyncRedisReservation:
            return cast(AsyncRedisReservation, _Charged(self, key, cost, await self.hit(key, cost)))

        return await wait(charge, self._store._lines[self._permits.tag(key)], False, timeout, jitter)

    wait_async = wait

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        raise InvalidLimiter(
            f"{self!r} can't be one of several limits: make them all over the AsyncRedisStore itself, or ask one after "
            "the other"
        )


class _Charged:
    """For those who wait: what was charged now, or when to ask again."""

    def __init__(self, limiter: AsyncLeasedLimiter, key: Key, cost: int, decision: Decision) -> None:
        self._limiter, self._key, self._cost = limiter, key, cost
        self.allowed, self.delay, self.delay_ns = decision.allowed, decision.retry_after, decision.retry_after_ns
        self.due_ns = time.monotonic_ns() + decision.retry_after_ns

    async def cancel(self) -> None:
        await self._limiter.refund(self._key, self._cost)


class AsyncLeasedStore(LeasedStoreBase):
    """``LeasedStore`` for asyncio, over an ``AsyncRedisStore``. A task of its own gives back what isn't used.

    Of one event loop. ``await store.close()`` gives back what is left; it is an asynchronous context manager.
    """

    is_awaited = True
    _of_redis = AsyncRedisStore
    redis_store: AsyncRedisStore

    def __init__(
        self,
        redis_store: AsyncRedisStore,
        host_store: Store,
        *,
        lease: Duration = "1 second",
        share: float = 0.1,
    ) -> None:
        super().__init__(redis_store, host_store, lease, share)
        self._holdings = Holdings()
        self._lines, self._turns = WaitQueues(), Turns()
        self._looking: asyncio.Task[None] | None = None

    @awaited
    async def close(self) -> None:
        """Give back what is left of the leases that this process has fetched. Its limiters can't be used any more."""
        if self.closed:
            return
        # First, so that what is fetched meanwhile is given back here or there.
        self.closed = self._holdings.closed = True
        if self._looking:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        with contextlib.suppress(ForebayError):
            await self._give_back(self._holdings.unused(everything=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncLeasedLimiter:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        name, terms = self._terms(kind, args, kwargs)
        return AsyncLeasedLimiter(self, Permits(self.host_store, name, terms))

    async def _run(self, steps: Steps[T], fall_back: Callable[[Any], T] | None = None, fallback: Any = None) -> T:
        """As ``LeasedStore``'s."""
        if self.closed:
            raise self._was_closed()
        if self._looking is None:
            self._looking = asyncio.create_task(look(weakref.ref(self), self._options.lease_ns / LOOKS / NS))
        try:
            step = next(steps)
            while True:
                try:
                    answer = None
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    else:
                        answer = await self._ask(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return cast(T, end.value)
        except StoreUnavailable as error:
            return self.redis_store.executor.fall_back(error, fall_back and functools.partial(fall_back, fallback))

    async def _ask(self, command: Command[T]) -> T:
        return await self.redis_store.executor.execute(command)

    async def _give_back(self, command: Iterator[Command[Any]]) -> None:
        """As ``LeasedStore``'s."""
        question = next(command, None)
        if question is None:
            return
        with contextlib.suppress(ForeignState):
            await self._ask(question)
        # To its end: what was taken out of a lease, nobody else gives back.
        executor = self.redis_store.executor
        await executor.to_end(executor.run_many(list(command), nothing))


async def look(store_of: weakref.ref[AsyncLeasedStore], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        store = store_of()
        if store is None:
            return
        # As in a thread.
        with contextlib.suppress(Exception):
            await store._give_back(store._holdings.unused())
        del store

# mypy: disable-error-code="no-any-return,union-attr"
"""Limiters over an ``AsyncRedisStore``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from forebay.core.decision import Decision
from forebay.core.table.keys import Key
from forebay.rate import Duration, Rate
from forebay.redis.all_of import Admitted, AllOfCommands, Costs, Keys
from forebay.redis.awaiting import awaited
from forebay.redis.base import checked_limiters
from forebay.redis.commands import (
    ONE,
    Booked,
    BookingView,
    CommandFlow,
    LimiterCommands,
    StaggeredCommands,
    costs_of,
    keys_of,
    was_allowed,
)
from forebay.redis.held import HeldView, Taken

if TYPE_CHECKING:
    from forebay.redis.aio import AsyncRedisStore
    from forebay.redis.transport.deadline import Patience

__all__ = ["AsyncRedisAllOf", "AsyncRedisLimiter", "AsyncRedisReservation", "AsyncRedisStaggeredWindow"]


class AsyncRedisReservation(BookingView):
    """Permits booked for later. True when they were. As ``forebay.Reservation``; ``due_ns`` is in the time of
    ``time.monotonic_ns``."""

    __slots__ = ()
    _store: AsyncRedisStore

    @awaited
    async def cancel(self) -> None:
        """Give the permits back, as far as they still count.

        Once: if it raises ``StoreUnavailable``, they may have come back, or may yet, and calling it again does nothing;
        or else they might come back twice. What a ``Concurrency`` then still holds, its ``refund`` gives back.
        """
        # What Redis has booked stays booked, if it is away.
        await self._store._run_to_its_end(self._booked.cancel())


class AsyncRedisLimiter(LimiterCommands):
    """A limiter whose state is in Redis, for asyncio. The methods mean what they do at ``forebay.TokenBucket`` and its
    like, and are awaited.

    *Tasks*: any number, in one event loop. *Processes*: whoever makes a limiter of the same name and parameters over
    the same Redis and namespace shares its state. Who is cancelled while the answer is on its way may have been
    charged; but permits that a ``Concurrency`` has given out then come back at once.

    Each method is one round trip. Any may raise ``ForeignState``, and ``StoreUnavailable`` unless the store's policy
    answers instead; ``reset`` always does, if Redis is away.
    """

    _store: AsyncRedisStore

    @property
    def store(self) -> AsyncRedisStore:
        return self._store

    @awaited
    async def allow(self, key: Key, /) -> bool:
        if self._usual is None:
            return await self._store._do(self._ask_allow(key), lambda fallback: fallback.allow(key), self._fallback)
        return await self._store.executor.decide(
            self._script, (self._key(key),), self._usual, self._size, was_allowed, lambda: self._fallback.allow(key)
        )

    @awaited
    async def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Decision:
        if self._usual and cost is ONE and rate is None and burst is None and request_id is request_ttl is None:
            return await self._store.executor.decide(
                self._script,
                (self._key(key),),
                self._usual,
                self._size,
                lambda reply: self._usual_decision(self._name, reply),
                lambda: self._fallback.hit(key),
            )
        command = self._ask_hit(key, cost, rate, burst, request_id, request_ttl)
        more = {"rate": rate, "burst": burst, "request_id": request_id, "request_ttl": request_ttl}
        return await self._store._do(command, lambda fallback: fallback.hit(key, cost, **more), self._fallback)

    @awaited
    async def peek(
        self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None
    ) -> Decision:
        command = self._ask_peek(key, cost, rate, burst)
        return await self._store._do(
            command, lambda fallback: fallback.peek(key, cost, rate=rate, burst=burst), self._fallback
        )

    @awaited
    async def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> AsyncRedisReservation:
        command = self._ask_reserve(key, cost, max_delay)
        booked = await self._store._do(command, lambda fallback: fallback.reserve(key, cost, max_delay), self._fallback)
        return AsyncRedisReservation(self._store, booked)

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
        flow = self._refund(key, cost, rate, burst, request_id)
        more = {"rate": rate, "burst": burst, "request_id": request_id}
        await self._store._run(flow, lambda fallback: fallback.refund(key, cost, **more), self._fallback)

    @awaited
    async def reset(self, key: Key) -> None:
        await self._store._do(self._ask_reset(key))

    @awaited
    async def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        return await self._store._do_many(
            self._ask_many(keys, costs),
            lambda number, fallback: fallback.allow(keys[number], costs[number]),
            self._fallback,
        )

    @awaited
    async def wait(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        return await self._store.executor.wait(self, key, cost, timeout, jitter)

    wait_async = wait

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncRedisAllOf:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        return AsyncRedisAllOf(checked_limiters(kind, args, kwargs, AsyncRedisLimiter))


class AsyncRedisStaggeredWindow(StaggeredCommands, AsyncRedisLimiter):
    """A fixed window that begins at a time of each key's own."""


class AsyncRedisAllOf(AllOfCommands):
    """Several limits of one ``AsyncRedisStore`` at once, as ``RedisAllOf``."""

    _store: AsyncRedisStore

    @property
    def store(self) -> AsyncRedisStore:
        return self._store

    @property
    def limiters(self) -> tuple[LimiterCommands, ...]:
        return self._limiters

    @awaited
    async def allow(self, key: Keys, /) -> bool:
        flow = self._allow(self._parts(key, 1))
        return await self._store._run(flow, lambda fallback: fallback.allow(key), self._fallback)

    @awaited
    async def hit(self, key: Keys, cost: Costs = 1) -> Decision:
        return await self._store._run(self._hit(key, cost), lambda fallback: fallback.hit(key, cost), self._fallback)

    @awaited
    async def hit_each(self, key: Keys, cost: Costs = 1) -> list[Decision]:
        return await self._store._run(
            self._hit_each(key, cost), lambda fallback: fallback.hit_each(key, cost), self._fallback
        )

    @awaited
    async def peek(self, key: Keys, cost: Costs = 1) -> Decision:
        return await self._store._run(self._peek(key, cost), lambda fallback: fallback.peek(key, cost), self._fallback)

    @awaited
    async def reserve(self, key: Keys, cost: Costs = 1, max_delay: Duration | None = None) -> AsyncRedisReservation:
        flow = self._reserve(key, cost, max_delay)
        booked = await self._store._run(flow, lambda fallback: fallback.reserve(key, cost, max_delay), self._fallback)
        return AsyncRedisReservation(self._store, booked)

    async def _hit_each_for(self, patience: Patience, key: Keys, cost: Costs) -> list[Decision]:
        """For the web."""
        flow = self._hit_each(key, cost)
        return await self._store.executor.run_within(patience, flow, lambda: self._fallback.hit_each(key, cost))

    async def _admit(
        self, key: list[Key], cost: list[int], patience: Patience
    ) -> tuple[list[Decision], list[BookingView | HeldView]]:
        """For the web: what ``hit_each`` says; and for each limiter, if all allow it, what gives back what it took."""

        def views(taken: list[Booked | Taken]) -> list[BookingView | HeldView]:
            return [
                cast(Any, limiter)._lease_of(its_key, its)
                if isinstance(its, Taken)
                else AsyncRedisReservation(self._store, its)
                for limiter, its_key, its in zip(self._limiters, key, taken, strict=False)
            ]

        def give_back(admitted: Admitted) -> list[CommandFlow[None]]:
            return [view.give_back_flow() for view in views(admitted[1])]

        flow = self._admit_all(key, cost)
        decisions, taken = await self._store.executor.run_within(
            patience, flow, lambda: self._fallback.admit(key, cost), give_back
        )
        return decisions, views(taken)

    @awaited
    async def refund(self, key: Keys, cost: Costs = 1) -> None:
        await self._store._run_to_its_end(
            self._refund(key, cost), lambda fallback: fallback.refund(key, cost), self._fallback
        )

    @awaited
    async def reset(self, key: Keys) -> None:
        await self._store._run(self._reset(key))

    @awaited
    async def allow_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None = None) -> list[bool]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        many = self._many(keys, costs)

        def fall_back(number: int, fallback: Any) -> bool:
            return bool(fallback.allow(keys[number], costs[number]))

        if self._is_apart(many):
            return [
                await self._store._run(self._allow(parts), functools.partial(fall_back, number), self._fallback)
                for number, parts in enumerate(many)
            ]
        return await self._store._do_many([self._ask_allow(parts) for parts in many], fall_back, self._fallback)

    @awaited
    async def wait(self, key: Keys, cost: Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        return await self._store.executor.wait(self, key, cost, timeout, jitter)

    wait_async = wait

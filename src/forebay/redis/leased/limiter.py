"""Leased limiters, for threads and for asyncio: the public methods, over the executors of leases.

Both share one set of methods. With asyncio, the executor makes coroutines of their results.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Never, NoReturn, cast

from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.errors import InvalidLimiter
from forebay.rate import Duration, Rate
from forebay.redis.leased.executor import LeaseExecutor
from forebay.redis.leased.fetch import Steps
from forebay.redis.leased.terms import Terms
from forebay.redis.limiter import would_block
from forebay.redis.operations import awaited, awaited_method

if TYPE_CHECKING:
    from forebay.redis.leased.store import AsyncLeasedStore, LeasedStore

__all__ = ["AsyncLeasedLimiter", "LeasedLimiter"]


class LeasedBase:
    """The base of both leased limiters."""

    terms: Terms
    _store: Any
    _permits: Permits
    _executor: LeaseExecutor
    """With asyncio, an ``AsyncLeaseExecutor``."""

    @property
    def limit(self) -> int:
        """The most permits that can be allowed at once."""
        return self.terms.limit

    def __getattr__(self, name: str) -> Any:
        """The limiter's parameters: rate, burst, ..."""
        parameters = {} if name == "terms" else self.terms.parameters
        try:
            return parameters[name]
        except KeyError:
            raise AttributeError(f"a leased limiter has no attribute {name!r}") from None

    def make_limiter(self, kind: type[Never], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """For ``AllOf``, when a limiter of this kind is its first argument. Type checkers see that it makes nothing."""
        raise InvalidLimiter(
            f"{self!r} can't be one of several limits: make them all over the {self._redis_kind} itself, or call one "
            "after the other"
        )

    def _never_books(self) -> InvalidLimiter:
        return InvalidLimiter(
            f"{self!r} can't book ahead: wait for a permit, or reserve by a limiter over the {self._redis_kind} itself"
        )

    @property
    def _redis_kind(self) -> str:
        return type(self._store.redis_store).__name__


class LeasedLimiter(LeasedBase, Permits):
    """A limiter whose permits a host borrows from Redis. ``forebay.TokenBucket`` and its like document the methods.

    *Threads*: every method may be called from any thread. *Processes*: all processes of a host that make a limiter of
    the same name and parameters over the same stores share its leases; those over other host stores share its limit.
    *Fork*: works in parent and child.

    Any method may raise ``ForeignState``, and ``StoreUnavailable`` unless the Redis store's `when_unavailable` decides
    instead. ``reset`` raises it always while Redis is unavailable. A request waits for other workers of the host for at
    most two fetch deadlines, and then for as long as a call of its own may take. A fetch deadline is the Redis store's
    `timeout`, or a 64th of the lease if that is longer.
    """

    _store: LeasedStore

    def __new__(cls, store: LeasedStore, name: str, terms: Terms) -> LeasedLimiter:
        return Permits.__new__(cls, store.host_store, name, terms)  # type: ignore[call-arg]

    def __init__(self, store: LeasedStore, name: str, terms: Terms) -> None:
        self._store, self._executor = store, store.executor

    @property
    def store(self) -> LeasedStore:  # type: ignore[override]
        return self._store

    @property
    def _permits(self) -> Permits:  # type: ignore[override]
        return self

    def _lacking(self, key: Key, cost: int) -> bool:
        return self._executor.run(self._executor.fetch(self, key, cost)).allowed

    def _lacking_hit(self, key: Key, cost: int) -> Decision:
        cost = self.checked(cost)
        return self._executor.run(self._executor.fetch(self, key, cost)) if cost else self.peek(key, 0)

    def peek(self: LeasedBase, key: Key, cost: int = 1) -> Decision:
        """The decision that ``hit`` would return: from the lease if it suffices, else by one round trip.

        Borrows nothing.
        """
        return self._executor.run(self._executor.peek(self._permits, key, cost))

    def allow_many(self: LeasedBase, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key.

        All keys and costs are checked before any is charged. Permits that a lease lacks are fetched key by key.
        """
        return self._executor.run(self._executor.hit_many(self._permits, keys, costs))

    def refund(self: LeasedBase, key: Key, cost: int = 1) -> None:
        """Give back the permits of an allowed ``hit``, by one round trip. A key never has more than a fresh key."""
        return self._executor.run(self._executor.refund(self._permits, key, cost))

    def reset(self: LeasedBase, key: Key) -> None:
        """Forget `key` in Redis and on this host. Other hosts may spend what they have on loan until its end."""
        return self._executor.run(self._executor.reset(self._permits, key))

    def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> NoReturn:
        raise self._never_books()

    def wait(
        self: LeasedBase, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> bool:
        return self._executor.wait(Waited(self._store, self._permits), key, cost, timeout, jitter)

    def wait_async(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> NoReturn:
        raise would_block(self)


class AsyncLeasedLimiter(LeasedBase):
    """A limiter whose permits a host borrows from Redis, for asyncio. The methods of ``LeasedLimiter``, awaited.

    *Tasks*: any number, in one event loop. *Processes*: as ``LeasedLimiter``, with which it shares leases if the stores
    are the same and have the same `timeout`. Any method may raise ``StoreUnavailable`` and ``ForeignState``.
    """

    may_free_early = False
    _store: AsyncLeasedStore

    def __init__(self, store: AsyncLeasedStore, name: str, terms: Terms) -> None:
        self.terms = terms
        self._permits = Permits(store.host_store, name, terms)
        self._store, self._executor = store, cast(LeaseExecutor, store.executor)

    @property
    def store(self) -> AsyncLeasedStore:
        return self._store

    @property
    def name(self) -> str:
        return self._permits.name

    def __repr__(self) -> str:
        return repr(self._permits)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same stores and name")

    @awaited
    async def allow(self, key: Key, /) -> bool:
        allowed = self._permits.allow_now(key)
        if allowed is None:
            executor = self._store.executor
            return (await executor.run(executor.fetch(self._permits, key, 1))).allowed
        return allowed

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
        if decision is None:
            executor = self._store.executor
            return await executor.run(executor.hit(self._permits, key, cost))
        return decision

    peek = awaited_method(LeasedLimiter.peek)
    allow_many = awaited_method(LeasedLimiter.allow_many)
    refund = awaited_method(LeasedLimiter.refund)
    reset = awaited_method(LeasedLimiter.reset)
    wait = awaited_method(LeasedLimiter.wait)
    wait_async = wait

    @awaited
    async def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> NoReturn:
        raise self._never_books()


class Waited:
    """A leased limiter as ``wait`` uses limiters: a booking is a charge that is due now, or a denial with the time of
    the next try.
    """

    may_free_early = False

    def __init__(self, store: Any, permits: Permits) -> None:
        self.store, self.name, self._permits = store, permits.name, permits

    def queue_key(self, key: Key) -> object:
        return id(self.store), self.name, self._permits.tag(key)

    def reserve(self, key: Key, cost: int, max_delay: Duration | None) -> Any:
        """A ``Charged``; with asyncio, a coroutine of it."""
        return self.store.executor.run(self._charged(key, cost))

    def _charged(self, key: Key, cost: int) -> Steps[Charged]:
        decision = yield from self.store.executor.hit(self._permits, key, cost)
        return Charged(self, key, cost, decision)

    def refund(self, key: Key, cost: int) -> Any:
        executor = self.store.executor
        return executor.run(executor.refund(self._permits, key, cost))


class Charged:
    """A charge, or a denial with the time of the next try: for ``wait``, a booking."""

    def __init__(self, limiter: Waited, key: Key, cost: int, decision: Decision) -> None:
        self._limiter, self._key, self._cost = limiter, key, cost
        self.allowed, self.delay, self.delay_ns = decision.allowed, decision.retry_after, decision.retry_after_ns
        self.due_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + self.delay_ns

    def cancel(self) -> Any:
        """Give the permits back; with asyncio, a coroutine."""
        return self._limiter.refund(self._key, self._cost)

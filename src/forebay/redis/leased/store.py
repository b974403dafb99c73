"""Leased stores, which put a host's shared memory in front of Redis, and their limiters.

They stand together because each names the other's type. The limiters share one set of methods, over the executors of
leases. With asyncio, the executor makes coroutines of their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self, TypeAlias, cast

from forebay import holding
from forebay._native import need_compiled_core
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.all_of import AllOf
from forebay.core.arguments import ttl_without_id
from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.limiter import Limiter
from forebay.core.stores import Joinable
from forebay.core.table.keys import Key
from forebay.errors import InvalidLimiter, LimitExceeded, redacted_repr, short_repr
from forebay.flows import run, run_async
from forebay.host_time import host_ns
from forebay.names import LimiterNames
from forebay.rate import NS, Duration, Rate
from forebay.redis.commands import LimiterCommands
from forebay.redis.leased.all_of import AsyncLeasedAllOf, LeasedAllOf
from forebay.redis.leased.charge import LeasedPart
from forebay.redis.leased.executor import AsyncLeaseExecutor, LeaseExecutor
from forebay.redis.leased.once import hit_once, refund_once
from forebay.redis.leased.terms import Terms, checked_options, terms_of
from forebay.redis.limiter import would_block
from forebay.redis.operations import awaited, awaited_method
from forebay.redis.store import AsyncRedisStore, RedisStore, check_all_of
from forebay.store import Store

__all__ = ["AsyncLeasedLimiter", "AsyncLeasedStore", "LeasedLimiter", "LeasedStore"]

Leasable: TypeAlias = TokenBucket | FixedWindow | SlidingWindow


class LeasedStoreBase:
    """The base of both leased stores: a store in Redis, a store of the host, and the terms between them."""

    is_awaited: ClassVar[bool] = False
    """Whether its limiters' methods return coroutines."""
    is_leased: ClassVar[bool] = True
    _redis_kind: ClassVar[type]
    redis_store: Any
    executor: LeaseExecutor | AsyncLeaseExecutor

    def __init__(self, redis_store: Any, host_store: Store, lease: Duration, share: float, owns_stores: bool) -> None:
        need_compiled_core("A leased limit", "for development make the limiters over the RedisStore itself")
        name = type(self).__name__
        if not isinstance(redis_store, self._redis_kind):
            raise TypeError(
                f"the first argument of {name} is its {self._redis_kind.__name__}, not {redacted_repr(redis_store)} (a "
                "LeasedStore is over a RedisStore, an AsyncLeasedStore over an AsyncRedisStore)"
            )
        if not isinstance(host_store, Store):
            raise TypeError(f"the second argument of {name} is the host's Store, not {short_repr(host_store)}")
        self.redis_store, self.host_store = redis_store, host_store
        self.names: LimiterNames = self.redis_store.names
        self._owns_stores = owns_stores
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
    give back all that remain. ``close`` closes the two stores, too, if `owns_stores` is true. It is a context manager.
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
        owns_stores: bool = False,
    ) -> None:
        super().__init__(redis_store, host_store, lease, share, owns_stores)
        self.executor = LeaseExecutor(redis_store.executor, repr(self), self._options.lease_ns)

    def close(self) -> None:
        """Give back the remaining permits of the leases that this process has fetched. Its limiters can't be used any
        more.
        """
        self.executor.close()
        if self._owns_stores:
            self.redis_store.close()
            self.host_store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def now_ns() -> int:
        """The time by which a waiting thread sleeps."""
        return host_ns()

    def make_limiter(self, kind: type[Leasable], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LeasedLimiter:
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
        owns_stores: bool = False,
    ) -> None:
        super().__init__(redis_store, host_store, lease, share, owns_stores)
        self.executor = AsyncLeaseExecutor(redis_store.executor, repr(self), self._options.lease_ns)

    @awaited
    async def close(self) -> None:
        """Give back the remaining permits of the leases that this process has fetched. Its limiters can't be used any
        more.
        """
        await self.executor.close()
        if self._owns_stores:
            await self.redis_store.close()
            self.host_store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def make_limiter(self, kind: type[Leasable], args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncLeasedLimiter:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        return AsyncLeasedLimiter(self, *self._terms(kind, args, kwargs))


class LeasedBase:
    """The base of both leased limiters."""

    joins_stores = True
    """``AllOf`` of this limiter takes limiters of other stores beside it."""
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

    @property
    def part(self) -> LeasedPart:
        """This limiter for ``wait``, ``AllOf`` and the web."""
        return LeasedPart(self._store, self._permits)

    @property
    def kind(self) -> type:
        """The public class that made the limiter."""
        return self.terms.strict.kind

    def _parts(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LeasedPart | None]:
        """For ``AllOf``: a part for each limiter that is leased. Raises ``TypeError`` and ``InvalidLimiter``."""
        check_all_of(kind, args, kwargs)
        for limiter in args:
            if isinstance(limiter, LeasedBase):
                if isinstance(limiter, LeasedLimiter) is not isinstance(self, LeasedLimiter):
                    raise InvalidLimiter(
                        f"AllOf can't join {limiter!r} and {self!r}: calls of one block and those of the other are "
                        "awaited; make both over LeasedStores or both over AsyncLeasedStores"
                    )
            elif not isinstance(limiter, Limiter):
                raise InvalidLimiter(
                    f"AllOf takes leased limiters and limiters over a Store, not {short_repr(limiter)} beside "
                    f"{self!r}: if one limit is decided by Redis, make all of them over the {self._redis_kind} itself, "
                    "where one call decides all"
                )
        return [limiter.part if isinstance(limiter, LeasedBase) else None for limiter in args]

    def _takes_no_part(self) -> InvalidLimiter:
        return InvalidLimiter(
            f"{self!r} knows only a part of what there is: take as much as there is by a limiter over the "
            f"{self._redis_kind} itself"
        )

    def _never_converts(self) -> InvalidLimiter:
        return InvalidLimiter(
            f"{self!r} can't convert what a key has used, as other hosts may have permits on loan: a limiter over a "
            f"Store or over the {self._redis_kind} itself can. Let the key keep its state, or reset it"
        )

    def _never_adds(self) -> InvalidLimiter:
        return InvalidLimiter(
            f"{self!r} can't have permits above its limit, as its hosts borrow from one bucket: a token bucket over a "
            f"Store or over the {self._redis_kind} itself can"
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

    def make_limiter(self, kind: type[AllOf], args: tuple[Limiter, ...], kwargs: dict[str, Any]) -> LeasedAllOf:
        """For ``AllOf``, when one of its arguments is such a limiter."""
        return LeasedAllOf(args, self._parts(kind, args, kwargs))

    @property
    def _permits(self) -> Permits:  # type: ignore[override]
        return self

    def _lacking(self, key: Key, cost: int) -> bool:
        return self._executor.run(self._executor.fetch(self, key, cost)).allowed

    def _lacking_hit(self, key: Key, cost: int) -> Decision:
        cost = self.checked(cost)
        return self._executor.run(self._executor.fetch(self, key, cost)) if cost else self.peek(key, 0)

    def _hit_once(self, key: Key, cost: int, request_id: Key, request_ttl: Duration | None) -> Decision:
        return run(hit_once(self.part, key, cost, request_id, request_ttl))

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

    def refund(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> None:
        """Give back the permits of an allowed ``hit``, by one round trip. A key never has more than a fresh key.

        With the `request_id` of a ``hit`` on this host, gives back once, and only while the id is remembered. If Redis
        doesn't answer, these permits are lost.
        """
        if request_id is not None:
            run(refund_once(self.part, key, cost, request_id))
        else:
            self._executor.run(self._executor.refund(self, key, cost))

    def reset(self: LeasedBase, key: Key) -> None:
        """Forget `key` in Redis and on this host. Other hosts may spend what they have on loan until its end."""
        return self._executor.run(self._executor.reset(self._permits, key))

    def take_up_to(self, key: Key, most: int, *, rate: str | Rate | None = None, burst: int | None = None) -> NoReturn:
        raise self._takes_no_part()

    def reserve(
        self,
        key: Key,
        cost: int = 1,
        max_delay: Duration | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> NoReturn:
        raise self._never_books()

    def convert(self, key: Key, *arguments: Any, **options: Any) -> NoReturn:
        raise self._never_converts()

    def add(self, key: Key, *arguments: Any, **options: Any) -> NoReturn:
        raise self._never_adds()

    def wait(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> bool:
        if rate is not None or burst is not None:
            self._permits.refuse_extras()
        return self._executor.wait(self.part, key, cost, timeout, jitter)

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

    def exceeded(self, key: Key, cost: int = 1) -> LimitExceeded:
        """The exception for a wait in which `cost` permits of `key` didn't come in time."""
        return LimitExceeded(self.name, self.limit, self.peek(key, cost).retry_after)


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

    def make_limiter(
        self,
        kind: type[AllOf],
        args: tuple[Limiter | Joinable[AllOf, Limiter, AsyncLeasedAllOf], ...],
        kwargs: dict[str, Any],
    ) -> AsyncLeasedAllOf:
        """For ``AllOf``, when one of its arguments is such a limiter."""
        return AsyncLeasedAllOf(args, self._parts(kind, args, kwargs))

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
        request_ttl: Duration | None = None,
    ) -> Decision:
        if rate is not None or burst is not None:
            self._permits.refuse_extras()
        if request_id is not None:
            return await run_async(hit_once(self.part, key, cost, request_id, request_ttl))
        if request_ttl is not None:
            raise ttl_without_id(request_ttl)
        decision = self._permits.hit_now(key, cost)
        if decision is None:
            executor = self._store.executor
            return await executor.run(executor.hit(self._permits, key, cost))
        return decision

    peek = awaited_method(LeasedLimiter.peek)
    allow_many = awaited_method(LeasedLimiter.allow_many)
    reset = awaited_method(LeasedLimiter.reset)

    @awaited
    async def refund(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> None:
        """``LeasedLimiter.refund``, awaited."""
        executor = self._store.executor
        if request_id is not None:
            await run_async(refund_once(self.part, key, cost, request_id))
        else:
            await executor.run(executor.refund(self._permits, key, cost))

    @awaited
    async def wait(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> bool:
        if rate is not None or burst is not None:
            self._permits.refuse_extras()
        return await self._store.executor.wait(self.part, key, cost, timeout, jitter)

    wait_async = wait

    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> holding.AsyncLimited:
        return holding.AsyncLimited(self, key, cost, timeout, jitter)

    @awaited
    async def exceeded(self, key: Key, cost: int = 1) -> LimitExceeded:
        """The exception for a wait in which `cost` permits of `key` didn't come in time."""
        return LimitExceeded(self.name, self.limit, (await self.peek(key, cost)).retry_after)

    @awaited
    async def take_up_to(
        self, key: Key, most: int, *, rate: str | Rate | None = None, burst: int | None = None
    ) -> NoReturn:
        raise self._takes_no_part()

    @awaited
    async def reserve(
        self,
        key: Key,
        cost: int = 1,
        max_delay: Duration | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> NoReturn:
        raise self._never_books()

    @awaited
    async def convert(self, key: Key, *arguments: Any, **options: Any) -> NoReturn:
        raise self._never_converts()

    @awaited
    async def add(self, key: Key, *arguments: Any, **options: Any) -> NoReturn:
        raise self._never_adds()

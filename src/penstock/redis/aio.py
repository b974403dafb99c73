"""A store in Redis for asyncio, and its limiters: the same scripts, and the same answers, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast
from weakref import WeakValueDictionary

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from penstock.core.decision import Decision
from penstock.core.keys import Key
from penstock.errors import LimitExceeded, StoreUnavailable
from penstock.rate import Rate
from penstock.redis.all_of import AskingAll, Costs, Keys
from penstock.redis.asking import ONE, Asked, Asking, AskingStaggered, BookingView, Talk, checked
from penstock.redis.base import CHUNK, RedisStoreBase, checked_client, checked_limiters, deadlines, replaced, unknown
from penstock.redis.held import AskingHeld, Permit, Taken
from penstock.redis.scripts import Script
from penstock.waiting import FIRST_BACKOFF_NS, LAST_BACKOFF_NS, check_pauses

__all__ = [
    "AsyncRedisAllOf",
    "AsyncRedisConcurrency",
    "AsyncRedisHold",
    "AsyncRedisLease",
    "AsyncRedisLimiter",
    "AsyncRedisReservation",
    "AsyncRedisStore",
]

T = TypeVar("T")
P = ParamSpec("P")


class AsyncRedisReservation(BookingView):
    """Permits booked for later. True when they were. As ``penstock.Reservation``; ``due_ns`` is in the time of
    ``time.monotonic_ns``."""

    __slots__ = ()
    _store: AsyncRedisStore

    async def cancel(self) -> None:
        """Give the permits back, once, as far as they still count."""
        await self._store._run(self._booked.cancel())


class Line:
    """Those who wait for one key of one limiter in this event loop, in the order in which they came."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, key: object) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock


async def wait(
    reserve: Callable[[float | None], Awaitable[AsyncRedisReservation]],
    line: asyncio.Lock,
    may_free_early: bool,
    timeout: float | None,
    jitter: float,
) -> bool:
    """What ``wait`` of every limiter does. Only the first of the line asks."""
    check_pauses(timeout, jitter)
    deadline_s = math.inf if timeout is None else time.monotonic() + timeout
    try:
        async with asyncio.timeout(timeout):
            await line.acquire()
    except TimeoutError:
        return False
    try:
        booked = await _ask_until(reserve, may_free_early, deadline_s, jitter)
    finally:
        line.release()
    if booked is None:
        return False
    due_s = booked.due_ns / 1e9
    due_s = max(due_s, min(due_s + booked.delay * (_factor(jitter) - 1), deadline_s))
    try:
        while (left_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
    except BaseException:
        with contextlib.suppress(StoreUnavailable):
            await booked.cancel()
        raise
    return True


async def _ask_until(
    reserve: Callable[[float | None], Awaitable[AsyncRedisReservation]],
    may_free_early: bool,
    deadline_s: float,
    jitter: float,
) -> AsyncRedisReservation | None:
    backoff_s = FIRST_BACKOFF_NS / 1e9
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        booked = await reserve(None if deadline_s == math.inf else left_s)
        if booked.allowed:
            return booked
        if left_s == 0 or (booked.delay > left_s and not may_free_early):
            return None
        # A denial that names no time must not become a loop without sleep; and jitter never makes it too early.
        delay_s = booked.delay or FIRST_BACKOFF_NS / 1e9
        pause_s = max(delay_s, min(delay_s * _factor(jitter), left_s))
        if may_free_early:
            # Nothing wakes this one when a permit is given back.
            pause_s = min(pause_s, backoff_s * _factor(jitter), left_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_NS / 1e9)
        await asyncio.sleep(pause_s)


def _factor(jitter: float) -> float:
    return random.uniform(1 - jitter, 1 + jitter) if jitter else 1.0


class AsyncRedisLimiter(Asking):
    """A limiter whose state is in Redis, for asyncio. The methods mean what they do at ``penstock.TokenBucket`` and its
    like, and are awaited.

    *Tasks*: any number, in one event loop. *Processes*: whoever makes a limiter of the same name and parameters over
    the same Redis and namespace shares its state. Who is cancelled while the answer is on its way may have been
    charged.

    Each method is one round trip. Any may raise ``StoreUnavailable`` and ``ForeignState``.
    """

    _store: AsyncRedisStore

    @property
    def store(self) -> AsyncRedisStore:
        return self._store

    async def allow(self, key: Key, /) -> bool:
        if self._usual is None:
            return await self._store._do(self._ask_allow(key))
        return (await self._store._call(self._script, (self._key(key),), self._usual, self._size))[0] != 0

    async def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: str | float | timedelta = "5 minutes",
    ) -> Decision:
        if self._usual and cost is ONE and rate is None and burst is None and request_id is None:
            reply = await self._store._call(self._script, (self._key(key),), self._usual, self._size)
            return self._usual_decision(self._name, reply)
        return await self._store._do(self._ask_hit(key, cost, rate, burst, request_id, request_ttl))

    async def peek(
        self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None
    ) -> Decision:
        return await self._store._do(self._ask_peek(key, cost, rate, burst))

    async def reserve(self, key: Key, cost: int = 1, max_delay: float | None = None) -> AsyncRedisReservation:
        return AsyncRedisReservation(self._store, await self._store._do(self._ask_reserve(key, cost, max_delay)))

    async def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        await self._store._run(self._refund(key, cost, rate, burst, request_id))

    async def reset(self, key: Key) -> None:
        await self._store._do(self._ask_reset(key))

    async def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        return await self._store._do_many(self._ask_many(keys, costs))

    async def wait(self, key: Key, cost: int = 1, timeout: float | None = None, *, jitter: float = 0.0) -> bool:
        line = self._store._lines[self._key(key)]
        return await wait(functools.partial(self.reserve, key, cost), line, self.may_free_early, timeout, jitter)

    wait_async = wait

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncRedisAllOf:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        return AsyncRedisAllOf(checked_limiters(kind, args, kwargs, AsyncRedisLimiter))


class AsyncRedisStaggeredWindow(AskingStaggered, AsyncRedisLimiter):
    """A fixed window that begins at a time of each key's own."""


class AsyncRedisLease:
    """Permits that are held: given back by ``release`` or at the end of an ``async with`` block.

    They come back by themselves at the end of the lease, however the process that holds them has ended.
    """

    __slots__ = ("_key", "_limiter", "_permits", "_released", "_taken")

    def __init__(self, limiter: AsyncRedisConcurrency, key: Key, taken: Taken) -> None:
        self._limiter, self._key, self._taken = limiter, key, taken
        self._permits: list[Permit] = taken.permits
        self._released = False

    @property
    def allowed(self) -> bool:
        return self._taken.allowed

    async def release(self) -> bool:
        """Give the permits back. Whether any was still held."""
        self._released = True
        permits, self._permits = self._permits, []
        if not permits or not self._taken.is_own:
            return False
        return await self._limiter._store._do(self._limiter._ask_release(self._taken.key, permits)) > 0

    async def renew(self) -> bool:
        """Let the lease begin anew. False if any of the permits was not held any more."""
        permits = self._permits
        if not permits or not self._taken.is_own:
            return False
        return await self._limiter._store._do(self._limiter._ask_renew(self._taken.key, permits)) == len(permits)

    def __bool__(self) -> bool:
        return self._taken.allowed

    async def __aenter__(self) -> Self:
        if not self._taken.allowed:
            raise await self._limiter.exceeded(self._key)
        if self._released:
            raise RuntimeError(f"{self!r} was released before: acquire another one")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    def __repr__(self) -> str:
        return f"<AsyncRedisLease of {self._limiter.name!r}: {'held' if self._permits else 'not held'}>"


class AsyncRedisHold:
    """What ``hold`` returns: waits for permits, holds them in the ``async with`` block, gives them back."""

    __slots__ = ("_arguments", "_leases", "_limiter")

    def __init__(self, limiter: AsyncRedisConcurrency, key: Key, cost: int, timeout: float | None) -> None:
        self._limiter, self._arguments = limiter, (key, cost, timeout)
        # One for each time that it is entered: any of them is as good.
        self._leases: list[AsyncRedisLease] = []

    async def __aenter__(self) -> AsyncRedisLease:
        key, cost, timeout = self._arguments
        if not await self._limiter.wait(key, cost, timeout):
            raise await self._limiter.exceeded(key)
        self._leases.append(AsyncRedisLease(self._limiter, key, self._limiter._take_loose_permits(key, cost)))
        return self._leases[-1]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leases.pop().release()


class AsyncRedisConcurrency(AskingHeld, AsyncRedisLimiter):
    """Permits that are held for a while, as ``penstock.Concurrency``; but nobody notices that a process has ended: its
    permits come back at the end of their leases. So take a short lease, and renew it."""

    async def acquire(self, key: Key, cost: int = 1) -> AsyncRedisLease:
        return AsyncRedisLease(self, key, await self._store._do(self._ask_acquire(key, cost)))

    def hold(self, key: Key, cost: int = 1, timeout: float | None = None) -> AsyncRedisHold:
        return AsyncRedisHold(self, key, cost, timeout)

    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: float | None = None
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

    async def exceeded(self, key: Key) -> LimitExceeded:
        return self._exceeded((await self.peek(key)).retry_after)


class AsyncRedisAllOf(AskingAll):
    """Several limits of one ``AsyncRedisStore`` at once, as ``penstock.AllOf``: one round trip, all or none."""

    _store: AsyncRedisStore

    @property
    def store(self) -> AsyncRedisStore:
        return self._store

    @property
    def limiters(self) -> tuple[Asking, ...]:
        return self._limiters

    async def allow(self, key: Keys, /) -> bool:
        return await self._store._do(self._ask_allow(key))

    async def hit(self, key: Keys, cost: Costs = 1) -> Decision:
        return await self._store._do(self._ask_hit(key, cost))

    async def hit_each(self, key: Keys, cost: Costs = 1) -> list[Decision]:
        return await self._store._do(self._ask_hit_each(key, cost))

    async def peek(self, key: Keys, cost: Costs = 1) -> Decision:
        return await self._store._do(self._ask_peek(key, cost))

    async def reserve(self, key: Keys, cost: Costs = 1, max_delay: float | None = None) -> AsyncRedisReservation:
        return AsyncRedisReservation(self._store, await self._store._do(self._ask_reserve(key, cost, max_delay)))

    async def refund(self, key: Keys, cost: Costs = 1) -> None:
        await self._store._run(self._refund(key, cost))

    async def reset(self, key: Keys) -> None:
        await self._store._do(self._ask_reset(key))

    async def allow_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None = None) -> list[bool]:
        return await self._store._do_many(self._ask_many(keys, costs))

    async def wait(self, key: Keys, cost: Costs = 1, timeout: float | None = None, *, jitter: float = 0.0) -> bool:
        line = self._store._lines[tuple(part.key for part in self._parts(key, cost))]
        return await wait(functools.partial(self.reserve, key, cost), line, self.may_free_early, timeout, jitter)

    wait_async = wait


class AsyncRedisStore(RedisStoreBase):
    """Redis as the place where limiters keep their state, for asyncio: see ``RedisStore``, whose arguments it takes.

    ``await TokenBucket(AsyncRedisStore("redis://localhost"), "api", "100/minute").hit("user:42")``. `server` is a URL
    or a ``redis.asyncio.Redis``. Use it in one event loop, and close it there.
    """

    def __init__(
        self,
        server: str | redis.asyncio.Redis,
        *,
        namespace: str = "penstock",
        plain_keys: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(namespace, plain_keys)
        self._owns_client = isinstance(server, str)
        self._lines = Line()
        if isinstance(server, str):
            self._client = redis.asyncio.Redis.from_url(server, retry=Retry(NoBackoff(), 0), **deadlines(timeout))
        else:
            self._client = checked_client(server, redis.asyncio.Redis, "AsyncRedisStore", timeout)
        self._execute: Any = self._client.execute_command

    async def close(self) -> None:
        """End the connections, if the store has made them. Its limiters can't be used any more."""
        self.closed = True
        if self._owns_client:
            # `aclose` in versions of redis-py that have it.
            await getattr(self._client, "aclose", self._client.close)()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any], size: int) -> list[int]:
        if self.closed:
            raise self._was_closed()
        try:
            try:
                reply = await self._execute("EVALSHA", script.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                reply = await self._execute("EVAL", script.text, len(keys), *keys, *arguments)
        except RedisError as error:
            raise self._unavailable(error) from error
        return checked(reply, size, keys)

    async def _do(self, asked: Asked[T]) -> T:
        return asked.read(await self._call(asked.script, asked.keys, asked.arguments, asked.size))

    async def _run(self, talk: Talk[T]) -> T:
        try:
            asked = next(talk)
            while True:
                asked = talk.send(await self._do(asked))
        except StopIteration as end:
            return cast(T, end.value)

    async def _do_many(self, asked: list[Asked[T]]) -> list[T]:
        """In order, but not as one: others' requests may come between."""
        if self.closed:
            raise self._was_closed()
        answers: list[T] = []
        for start in range(0, len(asked), CHUNK):
            chunk = asked[start : start + CHUNK]
            try:
                replies = await self._send(chunk)
                if unsent := unknown(chunk, replies):
                    await self._client.script_load(chunk[0].script.text)
                    replies = replaced(replies, await self._send(unsent))
            except RedisError as error:
                raise self._unavailable(error) from error
            answers += self._answers(chunk, replies)
        return answers

    async def _send(self, asked: list[Asked[T]]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for one in asked:
                pipeline.evalsha(one.script.sha, len(one.keys), *one.keys, *one.arguments)
            return list(await pipeline.execute(raise_on_error=False))

    _limiter = AsyncRedisLimiter
    _staggered = AsyncRedisStaggeredWindow
    _concurrency = AsyncRedisConcurrency

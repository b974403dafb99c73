"""A store in Redis for asyncio, and its limiters: the same scripts, and the same answers, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Literal, ParamSpec, Self, TypeVar, cast
from weakref import WeakValueDictionary

import redis.asyncio
import redis.asyncio.cluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from penstock.core.decision import Decision
from penstock.core.keys import Key
from penstock.errors import LimitExceeded, PenstockError, StoreClosed, StoreUnavailable
from penstock.rate import Rate
from penstock.redis.all_of import AskingAll, Costs, Keys
from penstock.redis.asking import (
    GIVING_BACK,
    HIT,
    ONE,
    Asked,
    Asking,
    AskingStaggered,
    BookingView,
    Talk,
    checked,
    costs_of,
    given_up,
    keys_of,
)
from penstock.redis.base import (
    AWAY,
    CHUNK,
    RedisStoreBase,
    calls_with_text,
    check_options,
    checked_client,
    checked_limiters,
    checked_url,
    client_options,
    must_work,
    none_held,
    nothing,
    replaced,
    unknown,
)
from penstock.redis.cluster import AsyncCluster, cluster_url
from penstock.redis.held import AskingHeld, Permit, Taken, unimportant_after
from penstock.redis.scripts import Script
from penstock.redis.servers import AsyncServer
from penstock.store import Store
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
# Some hundred years. What is longer may be too large for the arithmetic of floats.
LONGEST_TIMEOUT_S: Final = 1e10
# Of the event loop, until tasks that were cancelled have begun to give back: one for each that waits for another.
TURNS_TO_BEGIN: Final = 10


class AsyncRedisReservation(BookingView):
    """Permits booked for later. True when they were. As ``penstock.Reservation``; ``due_ns`` is in the time of
    ``time.monotonic_ns``."""

    __slots__ = ()
    _store: AsyncRedisStore

    async def cancel(self) -> None:
        """Give the permits back, as far as they still count.

        Once: if it raises ``StoreUnavailable``, they may have come back, or may yet, and calling it again does nothing;
        or else they might come back twice. What a ``Concurrency`` then still holds, its ``refund`` gives back.
        """
        # What Redis has booked stays booked, if it is away.
        await self._store._run_to_its_end(self._booked.cancel())


async def _cancelled(booked: AsyncRedisReservation) -> None:
    with contextlib.suppress(PenstockError):
        await booked.cancel()


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
    if timeout is not None and timeout > LONGEST_TIMEOUT_S:
        timeout = None
    deadline_s = math.inf if timeout is None else time.monotonic() + timeout
    task = asyncio.current_task()
    assert task
    cancelled_before = task.cancelling()
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
        if task.cancelling() > cancelled_before:
            # While the answer came, which redis-py then returns as if nothing had been.
            raise asyncio.CancelledError
        while (left_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
    except BaseException:
        with contextlib.suppress(PenstockError):
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
    charged; but permits that a ``Concurrency`` has given out then come back at once.

    Each method is one round trip. Any may raise ``ForeignState``, and ``StoreUnavailable`` unless the store's policy
    answers instead; ``reset`` always does, if Redis is away.
    """

    _store: AsyncRedisStore

    @property
    def store(self) -> AsyncRedisStore:
        return self._store

    async def allow(self, key: Key, /) -> bool:
        if self._usual is None:
            return await self._store._do(self._ask_allow(key), lambda twin: twin.allow(key), self._twin)
        try:
            return (await self._store._call(self._script, (self._key(key),), self._usual, self._size))[0] != 0
        except StoreUnavailable as error:
            allowed: bool = self._store._instead(error, lambda twin: twin.allow(key), self._twin)
            return allowed

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
            try:
                reply = await self._store._call(self._script, (self._key(key),), self._usual, self._size)
            except StoreUnavailable as error:
                decision: Decision = self._store._instead(error, lambda twin: twin.hit(key), self._twin)
                return decision
            return self._usual_decision(self._name, reply)
        asked = self._ask_hit(key, cost, rate, burst, request_id, request_ttl)
        more = {"rate": rate, "burst": burst, "request_id": request_id, "request_ttl": request_ttl}
        return await self._store._do(asked, lambda twin: twin.hit(key, cost, **more), self._twin)

    async def peek(
        self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None
    ) -> Decision:
        asked = self._ask_peek(key, cost, rate, burst)
        return await self._store._do(asked, lambda twin: twin.peek(key, cost, rate=rate, burst=burst), self._twin)

    async def reserve(self, key: Key, cost: int = 1, max_delay: float | None = None) -> AsyncRedisReservation:
        asked = self._ask_reserve(key, cost, max_delay)
        booked = await self._store._do(asked, lambda twin: twin.reserve(key, cost, max_delay), self._twin)
        return AsyncRedisReservation(self._store, booked)

    async def _reserve_for_now(self, key: Key, cost: int, max_delay: float | None) -> AsyncRedisReservation:
        """For the web: nothing stays booked if the task is cancelled meanwhile."""
        return await self._store._to_its_end(self.reserve(key, cost, max_delay), _cancelled)

    async def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        talk = self._refund(key, cost, rate, burst, request_id)
        more = {"rate": rate, "burst": burst, "request_id": request_id}
        await self._store._run(talk, lambda twin: twin.refund(key, cost, **more), self._twin)

    async def reset(self, key: Key) -> None:
        await self._store._do(self._ask_reset(key))

    async def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        return await self._store._do_many(
            self._ask_many(keys, costs), lambda number, twin: twin.allow(keys[number], costs[number]), self._twin
        )

    async def wait(self, key: Key, cost: int = 1, timeout: float | None = None, *, jitter: float = 0.0) -> bool:
        line = self._store._lines[self._line_of(key)]
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
        """Give the permits back, also if the task is cancelled meanwhile. Whether any was still held. If it raises, it
        may be called again."""
        self._released = True
        local = self._taken.local
        held = local is not None and local.release()
        if self._permits and self._taken.is_own:
            asked = self._limiter._ask_release(self._taken.key, self._permits)
            held |= await self._limiter._store._do(asked, none_held) > 0
        self._permits = []
        return held

    async def renew(self) -> bool:
        """Let the lease begin anew. False if any of the permits was not held any more."""
        permits, local = self._permits, self._taken.local
        if local is not None and not local.renew():
            return False
        if not permits or not self._taken.is_own:
            return local is not None
        asked = self._limiter._ask_renew(self._taken.key, permits)
        return await self._limiter._store._do(asked, none_held) == len(permits)

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
        await self._end(error)

    async def _end(self, error: BaseException | None) -> None:
        """Of a block, whose outcome counts: what can't be released comes back by itself."""
        with contextlib.suppress(unimportant_after(error)):
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
        await self._leases.pop()._end(error)


class AsyncRedisConcurrency(AskingHeld, AsyncRedisLimiter):
    """Permits that are held for a while, as ``penstock.Concurrency``; but nobody notices that a process has ended: its
    permits come back at the end of their leases. So take a short lease, and renew it."""

    async def acquire(self, key: Key, cost: int = 1) -> AsyncRedisLease:
        taken = await self._store._do(self._ask_acquire(key, cost), lambda twin: twin.acquire(key, cost), self._twin)
        return AsyncRedisLease(self, key, taken)

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
    """Several limits of one ``AsyncRedisStore`` at once, as ``RedisAllOf``."""

    _store: AsyncRedisStore

    @property
    def store(self) -> AsyncRedisStore:
        return self._store

    @property
    def limiters(self) -> tuple[Asking, ...]:
        return self._limiters

    async def allow(self, key: Keys, /) -> bool:
        talk = self._allow(self._parts(key, 1))
        return await self._store._run(talk, lambda twin: twin.allow(key), self._twin)

    async def hit(self, key: Keys, cost: Costs = 1) -> Decision:
        return await self._store._run(self._hit(key, cost), lambda twin: twin.hit(key, cost), self._twin)

    async def hit_each(self, key: Keys, cost: Costs = 1) -> list[Decision]:
        return await self._store._run(self._hit_each(key, cost), lambda twin: twin.hit_each(key, cost), self._twin)

    async def peek(self, key: Keys, cost: Costs = 1) -> Decision:
        return await self._store._run(self._peek(key, cost), lambda twin: twin.peek(key, cost), self._twin)

    async def reserve(self, key: Keys, cost: Costs = 1, max_delay: float | None = None) -> AsyncRedisReservation:
        talk = self._reserve(key, cost, max_delay)
        booked = await self._store._run(talk, lambda twin: twin.reserve(key, cost, max_delay), self._twin)
        return AsyncRedisReservation(self._store, booked)

    async def _reserve_each(self, key: Keys, cost: Costs) -> tuple[AsyncRedisReservation, list[Decision]]:
        """For the web: what ``hit_each`` says, and how to take it back."""
        talk = self._reserve_all(key, cost)
        booked, decisions = await self._store._run(talk, lambda twin: twin.reserve_each(key, cost), self._twin)
        return AsyncRedisReservation(self._store, booked), decisions

    async def refund(self, key: Keys, cost: Costs = 1) -> None:
        await self._store._run_to_its_end(self._refund(key, cost), lambda twin: twin.refund(key, cost), self._twin)

    async def reset(self, key: Keys) -> None:
        await self._store._run(self._reset(key))

    async def allow_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None = None) -> list[bool]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        many = self._many(keys, costs)

        def otherwise(number: int, twin: Any) -> bool:
            return bool(twin.allow(keys[number], costs[number]))

        if self._is_apart(many):
            return [
                await self._store._run(self._allow(parts), functools.partial(otherwise, number), self._twin)
                for number, parts in enumerate(many)
            ]
        return await self._store._do_many([self._ask_allow(parts) for parts in many], otherwise, self._twin)

    async def wait(self, key: Keys, cost: Costs = 1, timeout: float | None = None, *, jitter: float = 0.0) -> bool:
        line = self._store._lines[self._line_of(key)]
        return await wait(functools.partial(self.reserve, key, cost), line, self.may_free_early, timeout, jitter)

    wait_async = wait


async def _nothing_more(_: object) -> None:
    pass


def _tell(whoever_waits: asyncio.Future[None], _: object) -> None:
    if not whoever_waits.done():
        whoever_waits.set_result(None)


class AsyncRedisStore(RedisStoreBase):
    """Redis as the place where limiters keep their state, for asyncio: see ``RedisStore``, whose arguments it takes.

    ``await TokenBucket(AsyncRedisStore("redis://localhost"), "api", "100/minute").hit("user:42")``. `server` is a URL
    or a client of ``redis.asyncio``. Use it in one event loop, and close it there; in another it raises
    ``RuntimeError``.
    """

    def __init__(
        self,
        server: str | redis.asyncio.Redis | redis.asyncio.cluster.RedisCluster,
        *,
        namespace: str = "penstock",
        plain_keys: bool = False,
        timeout: float | None = None,
        when_unavailable: Literal["deny", "allow", "local"] = "deny",
        host: Store | None = None,
        hosts: int | None = None,
    ) -> None:
        super().__init__(namespace, plain_keys, when_unavailable, host, hosts)
        self._owns_client = isinstance(server, str)
        self._is_closing = False
        self._lines = Line()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The loop itself doesn't keep them.
        self._going_on: set[asyncio.Task[Any]] = set()
        self._client: Any
        if isinstance(server, str):
            checked_url(server)
            options = {"retry": Retry(NoBackoff(), 0), **client_options(timeout)}
            if nodes_url := cluster_url(server):
                self._client = AsyncCluster(redis.asyncio.cluster.RedisCluster.from_url(nodes_url, **options))
            else:
                own = redis.asyncio.Redis.from_url(server, **options)
                check_options(own.connection_pool)
                self._client = AsyncServer(own)
        else:
            kinds = redis.asyncio.Redis, redis.asyncio.cluster.RedisCluster
            client = checked_client(server, kinds, "AsyncRedisStore", timeout)
            is_cluster = isinstance(client, redis.asyncio.cluster.RedisCluster)
            self._client = AsyncCluster(client) if is_cluster else AsyncServer(client)
        self._has_slots = isinstance(self._client, AsyncCluster)
        self._watch(server, timeout, host)
        self._execute: Any = self._client.execute_command

    async def close(self) -> None:
        """End the connections, if the store has made them. Its limiters can't be used any more.

        Before that it waits, for a deadline or two, for permits to come back that cancelled tasks have taken; of what
        is asked meanwhile, it only lets permits be given back. So what other tasks hold comes back if they were
        cancelled just before; else let their blocks end first. It is closed also if it is cancelled.
        """
        self.closed = self._is_closing = True
        try:
            for _ in range(TURNS_TO_BEGIN):
                await asyncio.sleep(0)
            # The calls that go on, and then what is given back.
            for _ in range(2):
                if self._going_on:
                    await asyncio.wait(self._going_on, timeout=self._timeout_s)
        finally:
            self._is_closing = False
            try:
                if self._owns_client:
                    await self._client.aclose()
            finally:
                self._breaker.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any], size: int) -> list[int]:
        self._check_use(arguments[0])
        try:
            with self._breaker.passage():
                try:
                    async with self._in_time():
                        try:
                            reply = await self._execute("EVALSHA", script.sha, b"%d" % len(keys), *keys, *arguments)
                        except NoScriptError:
                            reply = await self._execute("EVAL", script.text, b"%d" % len(keys), *keys, *arguments)
                except Exception as error:
                    self._check_connected(error)
                    raise
        except AWAY as error:
            raise self._unavailable(error) from error
        return checked(reply, size, keys)

    def _check_connected(self, error: Exception) -> None:
        """What fails as ``close`` has ended its connection is no failure of the server."""
        if self.closed and not self._is_closing:
            raise self._was_closed() from error

    def _check_use(self, what: bytes = HIT) -> None:
        if self.closed and not (self._is_closing and what in GIVING_BACK):
            raise self._was_closed()
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None:
                raise RuntimeError(
                    f"{self!r} was used in another event loop before, and its connections belong to that one: make a "
                    "store, and its limiters, for each event loop, or run all in one"
                )
            self._loop = loop

    def _in_time(self) -> asyncio.Timeout:
        """The deadline of a whole call; a client of somebody else's has its own. A cluster's, too, for each operation:
        after one that it has missed, it looks which node has the slot."""
        return asyncio.timeout(self._timeout_s if self._owns_client and not self._has_slots else None)

    async def _reply(self, asked: Asked[Any]) -> list[int]:
        call = self._call(asked.script, asked.keys, asked.arguments, asked.size)
        if_given_up = asked.if_given_up
        if if_given_up is None:
            return await call
        return await self._to_its_end(call, lambda reply: self._give_back(if_given_up(reply)))

    async def _to_its_end(
        self, call: Coroutine[Any, Any, T], if_given_up: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        """What a call returns, which goes on if this task is cancelled. See held.py for the argument."""
        going_on = self._go_on(call)
        # A task that is awaited itself is cancelled with whoever waits for it.
        answered: asyncio.Future[None] = going_on.get_loop().create_future()
        going_on.add_done_callback(functools.partial(_tell, answered))
        try:
            await answered
        except asyncio.CancelledError:
            going_on.add_done_callback(functools.partial(self._given_up, if_given_up))
            raise
        return going_on.result()

    def _given_up(self, if_given_up: Callable[[T], Coroutine[Any, Any, None]], call: asyncio.Task[T]) -> None:
        if not call.cancelled() and call.exception() is None:
            self._go_on(if_given_up(call.result()))

    async def _give_back(self, talk: Talk[None]) -> None:
        with contextlib.suppress(PenstockError):
            await self._run(talk, nothing)

    async def _give_back_all(self, talks: list[Talk[None]]) -> None:
        await self._finish([(talk, asked) for talk in talks if (asked := next(talk, None)) is not None])

    async def _finish(self, steps: list[tuple[Talk[Any], Asked[Any]]]) -> None:
        """A batch of each one's next call, until all have come to their ends."""
        with contextlib.suppress(StoreClosed):
            while steps:
                chunk, steps = steps[:CHUNK], steps[CHUNK:]
                replies, error = await self._exchange_now([asked for _, asked in chunk])
                for (talk, asked), reply in zip(chunk, replies or [error] * len(chunk), strict=True):
                    next_asked = self._next(talk, asked, reply)
                    if next_asked is not None:
                        steps.append((talk, next_asked))

    def _next(self, talk: Talk[None], asked: Asked[T], reply: Any) -> Asked[Any] | None:
        with contextlib.suppress(StopIteration, PenstockError, asyncio.CancelledError):
            try:
                if isinstance(reply, Exception):
                    raise self._unavailable(reply)
                answer = asked.answer(reply)
            except PenstockError as error:
                return talk.throw(error)
            return talk.send(answer)
        return None

    def _go_on(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        return task

    async def _do(self, asked: Asked[T], otherwise: Callable[[Any], T] | None = None, twin: Any = None) -> T:
        """The answer; if Redis is away, the policy's: `otherwise` asks the limiter's twin, if it has one."""
        try:
            return asked.read(await self._reply(asked))
        except StoreUnavailable as error:
            return self._instead(error, otherwise, twin)

    async def _run(self, talk: Talk[T], otherwise: Callable[[Any], T] | None = None, twin: Any = None) -> T:
        try:
            asked = next(talk)
            while True:
                try:
                    answer = asked.read(await self._reply(asked))
                except asyncio.CancelledError as error:
                    # What it asks for from now on gives back, also if this task is cancelled again.
                    await self._to_its_end(self._finish([(talk, talk.throw(error))]), _nothing_more)
                    raise
                except BaseException as error:
                    asked = talk.throw(error)
                else:
                    asked = talk.send(answer)
        except StopIteration as end:
            return cast(T, end.value)
        except StoreUnavailable as error:
            return self._instead(error, otherwise, twin)

    async def _run_to_its_end(
        self, talk: Talk[None], otherwise: Callable[[Any], None] = nothing, twin: Any = None
    ) -> None:
        """Of what gives back: nobody else gives back the rest if this task is cancelled between two calls, and what one
        call gives back, no other one is to try meanwhile."""
        await self._to_its_end(self._run(talk, otherwise, twin), _nothing_more)

    async def _do_many(
        self, asked: list[Asked[T]], otherwise: Callable[[int, Any], T] | None = None, twin: Any = None
    ) -> list[T]:
        """In order, but not as one: others' requests may come between. What Redis failed to answer, and all that would
        have been sent after it, the policy does."""
        self._check_use()
        replies: list[Any] = []
        error: Exception | None = None
        for start in range(0, len(asked), CHUNK):
            chunk = asked[start : start + CHUNK]
            sent: list[Any] = []
            if error is None:
                try:
                    sent, error = await self._exchange(chunk)
                except (asyncio.CancelledError, StoreClosed):
                    if chunk[0].if_given_up:
                        self._go_on(self._give_back_all(given_up(asked, replies)))
                    raise
            replies += sent or [error] * len(chunk)
        return self._answers(asked, replies, otherwise, twin)

    async def _exchange(self, chunk: list[Asked[Any]]) -> tuple[list[Any], Exception | None]:
        call = self._exchange_now(chunk)
        if chunk[0].if_given_up is None:
            return await call
        return await self._to_its_end(call, lambda exchanged: self._give_back_all(given_up(chunk, exchanged[0])))

    async def _exchange_now(self, chunk: list[Asked[Any]]) -> tuple[list[Any], Exception | None]:
        """The replies, of which some may be errors; and what says that Redis can't do its work, if anything does."""
        self._check_use(chunk[0].arguments[0])
        sent: list[Any] = []
        try:
            with self._breaker.passage():
                try:
                    async with self._in_time():
                        sent, missing = await self._send(chunk), len(chunk) + 1
                        while (unsent := unknown(chunk, sent)) and len(unsent) < missing:
                            missing = len(unsent)
                            sent = replaced(sent, await self._client.execute_many(calls_with_text(unsent)))
                except Exception as error:
                    self._check_connected(error)
                    raise
                must_work(sent)
        except (*AWAY, StoreUnavailable) as error:
            return sent, error
        return sent, None

    async def _send(self, asked: list[Asked[T]]) -> list[Any]:
        return cast(list[Any], await self._client.execute_many([one.call for one in asked]))

    _limiter = AsyncRedisLimiter
    _staggered = AsyncRedisStaggeredWindow
    _concurrency = AsyncRedisConcurrency

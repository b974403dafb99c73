"""A store in Redis for asyncio: the same scripts, and the same answers, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, cast

import redis.asyncio
import redis.asyncio.cluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from forebay.errors import ForebayError, StoreClosed, StoreUnavailable
from forebay.rate import Duration
from forebay.redis.aio_held import AsyncRedisConcurrency, AsyncRedisLease
from forebay.redis.aio_limiters import (
    AsyncRedisAllOf,
    AsyncRedisLimiter,
    AsyncRedisReservation,
    AsyncRedisStaggeredWindow,
)
from forebay.redis.aio_waiting import Lines
from forebay.redis.awaiting import awaited
from forebay.redis.base import (
    CHUNK,
    UNAVAILABLE_ERRORS,
    RedisStoreBase,
    Step,
    begun,
    calls_with_text,
    check_options,
    checked_client,
    checked_url,
    client_options,
    noop,
    raise_if_server_failed,
    replaced,
    unknown,
)
from forebay.redis.commands import GIVING_BACK, HIT, Command, CommandFlow, checked, given_up
from forebay.redis.scripts import Script
from forebay.redis.transport.cluster import AsyncCluster, bounded, cluster_url
from forebay.redis.transport.deadline import Patience, with_bounded_replies
from forebay.redis.transport.servers import AsyncServer
from forebay.store import Store

__all__ = ["AsyncRedisStore"]

T = TypeVar("T")
# Of the event loop, until tasks that were cancelled have begun to give back: one for each that waits for another.
TURNS_TO_BEGIN: Final = 10


async def nothing_more(_: object) -> None:
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

    is_awaited = True

    def __init__(
        self,
        server: str | redis.asyncio.Redis | redis.asyncio.cluster.RedisCluster,
        *,
        namespace: str = "forebay",
        plain_keys: bool = False,
        timeout: Duration | None = None,
        when_unavailable: Literal["deny", "allow", "local"] = "deny",
        host: Store | None = None,
        hosts: int | None = None,
    ) -> None:
        super().__init__(namespace, plain_keys, when_unavailable, host, hosts)
        self._owns_client = isinstance(server, str)
        self._is_closing = False
        self._lines = Lines()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The loop itself doesn't keep them.
        self._going_on: set[asyncio.Task[Any]] = set()
        self._client: Any
        if isinstance(server, str):
            checked_url(server)
            options = {"retry": Retry(NoBackoff(), 0), **client_options(timeout)}
            if nodes_url := cluster_url(server):
                self._client = AsyncCluster(bounded(redis.asyncio.cluster.RedisCluster.from_url(nodes_url, **options)))
            else:
                own = redis.asyncio.Redis.from_url(server, **options)
                check_options(own.connection_pool)
                own.connection_pool.connection_class = with_bounded_replies(own.connection_pool.connection_class)
                self._client = AsyncServer(own)
        else:
            kinds = redis.asyncio.Redis, redis.asyncio.cluster.RedisCluster
            client = checked_client(server, kinds, "AsyncRedisStore", timeout)
            is_cluster = isinstance(client, redis.asyncio.cluster.RedisCluster)
            self._client = AsyncCluster(client) if is_cluster else AsyncServer(client)
        self._has_slots = isinstance(self._client, AsyncCluster)
        self._attach_breaker(server, timeout, host)
        self._execute: Any = self._client.execute_command

    @awaited
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
        except UNAVAILABLE_ERRORS as error:
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

    @property
    def _has_deadlines(self) -> bool:
        return self._owns_client and not self._has_slots

    def _in_time(self) -> asyncio.Timeout:
        """The deadline of a whole call; a client of somebody else's has its own. A cluster's, too, for each operation:
        after one that it has missed, it looks which node has the slot."""
        return asyncio.timeout(self._timeout_s if self._has_deadlines else None)

    async def _reply(self, command: Command[Any]) -> list[int]:
        call = self._call(command.script, command.keys, command.arguments, command.size)
        if_given_up = command.if_given_up
        if if_given_up is not None:
            return await self._to_its_end(call, lambda reply: self._give_back(if_given_up(reply)))
        if command.arguments[0] in GIVING_BACK:
            return await self._to_its_end(call, nothing_more)
        return await call

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

    async def _give_back(self, flow: CommandFlow[None]) -> None:
        with contextlib.suppress(ForebayError):
            await self._run(flow, noop)

    async def _give_back_all(self, flows: list[CommandFlow[None]]) -> None:
        await self._finish(begun(flows))

    async def _finish(self, steps: list[Step]) -> bool:
        """Whether Redis has answered all of it."""
        batches, is_answered = self._in_batches(steps), True
        with contextlib.suppress(StoreClosed, StopIteration):
            command = next(batches)
            while True:
                replies, error = await self._exchange_now(command)
                is_answered = is_answered and error is None
                command = batches.send(replies or [error] * len(command))
        return is_answered

    async def _give_back_taken(
        self, taken: Sequence[AsyncRedisReservation | AsyncRedisLease], patience: Patience
    ) -> None:
        """As ``RedisStore``'s, by a task of its own, for as long as it takes.

        The breaker is told if that is longer than the request waits.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience.left_s
        steps = begun([one._giving_back() for one in taken])
        is_answered = await self._to_its_end(self._finish(steps), nothing_more)
        if is_answered and loop.time() > until_s:
            self._breaker.failed(self._late())

    def _late(self) -> TimeoutError:
        return TimeoutError(f"a request has waited for {self._timeout_s} s in all")

    async def _run_for(
        self,
        patience: Patience,
        flow: CommandFlow[T],
        fall_back: Callable[[Any], T],
        fallback: Any,
        if_given_up: Callable[[T], Coroutine[Any, Any, None]] = nothing_more,
    ) -> T:
        """As ``_run``, for no longer than a request waits: what is taken after that comes back.

        It may have ended just when the request is cancelled: then its outcome is `if_given_up`'s.
        """
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        try:
            if self._has_deadlines and patience.left_s >= self._timeout_s:
                # It is one call, which has that deadline itself.
                return await self._run(flow, fall_back, fallback)
            going_on = self._go_on(self._run(flow, fall_back, fallback))
            try:
                done, _ = await asyncio.wait({going_on}, timeout=patience.left_s)
            except asyncio.CancelledError:
                going_on.cancel()
                going_on.add_done_callback(functools.partial(self._given_up, if_given_up))
                raise
            if done:
                return going_on.result()
            going_on.cancel()
        finally:
            patience.left_s -= loop.time() - since_s
        self._breaker.failed(self._late())
        return self._fall_back(self._unavailable(self._late()), fall_back, fallback)

    def _go_on(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        return task

    async def _do(self, command: Command[T], fall_back: Callable[[Any], T] | None = None, fallback: Any = None) -> T:
        """The answer; if Redis is away, the policy's: `fall_back` asks the limiter's fallback, if it has one."""
        try:
            return command.read(await self._reply(command))
        except StoreUnavailable as error:
            return self._fall_back(error, fall_back, fallback)

    async def _run(self, flow: CommandFlow[T], fall_back: Callable[[Any], T] | None = None, fallback: Any = None) -> T:
        try:
            command = next(flow)
            while True:
                try:
                    answer = command.read(await self._reply(command))
                except asyncio.CancelledError as error:
                    # What it asks for from now on gives back, also if this task is cancelled again.
                    await self._to_its_end(self._finish([(flow, flow.throw(error))]), nothing_more)
                    raise
                except BaseException as error:
                    command = flow.throw(error)
                else:
                    command = flow.send(answer)
        except StopIteration as end:
            return cast(T, end.value)
        except StoreUnavailable as error:
            return self._fall_back(error, fall_back, fallback)

    async def _run_to_its_end(
        self, flow: CommandFlow[None], fall_back: Callable[[Any], None] = noop, fallback: Any = None
    ) -> None:
        """Of what gives back: nobody else gives back the rest if this task is cancelled between two calls, and what one
        call gives back, no other one is to try meanwhile."""
        await self._to_its_end(self._run(flow, fall_back, fallback), nothing_more)

    async def _do_many(
        self, command: list[Command[T]], fall_back: Callable[[int, Any], T] | None = None, fallback: Any = None
    ) -> list[T]:
        """In order, but not as one: others' requests may come between. What Redis failed to answer, and all that would
        have been sent after it, the policy does."""
        self._check_use()
        replies: list[Any] = []
        error: Exception | None = None
        for start in range(0, len(command), CHUNK):
            chunk = command[start : start + CHUNK]
            sent: list[Any] = []
            if error is None:
                try:
                    sent, error = await self._exchange(chunk)
                except (asyncio.CancelledError, StoreClosed):
                    if chunk[0].if_given_up:
                        self._go_on(self._give_back_all(given_up(command, replies)))
                    raise
            replies += sent or [error] * len(chunk)
        return self._answers(command, replies, fall_back, fallback)

    async def _exchange(self, chunk: list[Command[Any]]) -> tuple[list[Any], Exception | None]:
        call = self._exchange_now(chunk)
        if chunk[0].if_given_up is None:
            return await call
        return await self._to_its_end(call, lambda exchanged: self._give_back_all(given_up(chunk, exchanged[0])))

    async def _exchange_now(self, chunk: list[Command[Any]]) -> tuple[list[Any], Exception | None]:
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
                raise_if_server_failed(sent)
        except (*UNAVAILABLE_ERRORS, StoreUnavailable) as error:
            return sent, error
        return sent, None

    async def _send(self, command: list[Command[T]]) -> list[Any]:
        return cast(list[Any], await self._client.execute_many([one.call for one in command]))

    _limiter = AsyncRedisLimiter
    _all_of = AsyncRedisAllOf
    _staggered = AsyncRedisStaggeredWindow
    _concurrency = AsyncRedisConcurrency

"""Executors send the commands of limiters to Redis and return the results: one executor blocks, one is awaited.

A limiter makes a ``Command`` or a ``CommandFlow`` and gives it to the executor of its store. The executor

* checks that the store is open;
* takes the call past the circuit breaker, which learns its outcome;
* bounds the call by a deadline;
* sends a script's text if the server doesn't know the script;
* checks and decodes the reply;
* falls back, while Redis is unavailable, on what the caller gives for that.

``Executor`` returns a result. The same method of ``AsyncExecutor`` returns a coroutine of that result.

Cancellation of an ``AsyncExecutor``'s calls: see ``concurrency.py`` for the argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    RedisClusterException,
    RedisError,
)

from forebay import waiting
from forebay.errors import ForebayError, ForeignState, StoreClosed, StoreUnavailable
from forebay.rate import Duration
from forebay.redis.commands import GIVING_BACK, HIT, Command, CommandFlow, checked, given_up
from forebay.redis.scripts import Script
from forebay.redis.transport.breaker import Breaker, RedisStatus, is_failure
from forebay.redis.transport.cluster import AsyncCluster, Cluster
from forebay.redis.transport.deadline import Patience
from forebay.redis.transport.servers import Call
from forebay.redis.transport.timed_socket import UNTIL_S
from forebay.redis.wait_queues import WaitQueues, wait

__all__ = [
    "CHUNK",
    "LOG_EVERY_S",
    "UNAVAILABLE_ERRORS",
    "AsyncExecutor",
    "Executor",
    "ExecutorBase",
    "raise_if_server_failed",
    "replaced",
    "unknown",
]

T = TypeVar("T")
# A flow, and the command that it waits for.
Step: TypeAlias = tuple[CommandFlow[Any], Command[Any]]
Batches: TypeAlias = Generator[list[Command[Any]], Sequence[Any], None]

# Of a batch, so many commands are sent before their replies are read.
CHUNK: Final = 500
# What clients raise about the server. Those of clusters have a base of their own.
UNAVAILABLE_ERRORS: Final = (RedisError, RedisClusterException, TimeoutError)
# Errors that don't pass by themselves, and what to do about each.
_REMEDIES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (AuthenticationError, "check the user and the password of the URL"),
    (NoPermissionError, "docs/redis.md lists what the user must be allowed to do"),
    (MovedError, "the server is a node of a cluster, whose URL begins with redis+cluster:// or rediss+cluster://"),
)
_NO_CLUSTER: Final = "Cluster mode is not enabled"
LOG_EVERY_S: Final = 60
_log = logging.getLogger("forebay.redis")
# Turns of the event loop until cancelled tasks have begun to give back: one for each task that waits for another.
TURNS_TO_BEGIN: Final = 10


class GivesBack(Protocol):
    """A reservation or a lease."""

    def give_back_flow(self) -> CommandFlow[None]: ...


class ExecutorBase:
    """What both executors share: the state of the connection to one server, and what errors and replies mean.

    `client` is a ``Server``, a ``Cluster`` or one of their asyncio kind; `owner` names the store in errors. With
    `has_slots`, keys may lie in several slots of a cluster: no script runs over more than one slot.
    """

    def __init__(
        self,
        client: Any,
        owner: str,
        breaker: Breaker,
        timeout_s: float,
        *,
        owns_client: bool,
        raises_when_unavailable: bool,
    ) -> None:
        self.client = client
        self.execute_command: Callable[..., Any] = client.execute_command
        self.has_slots = isinstance(client, (Cluster, AsyncCluster))
        self._owner = owner
        self._owns_client = owns_client
        self._raises = raises_when_unavailable
        self._logged_s = -math.inf
        self.breaker = breaker
        self.timeout_s = timeout_s
        self.closed = False

    def __repr__(self) -> str:
        """The store's, as users read it in errors."""
        return self._owner

    def status(self) -> RedisStatus:
        """What this host knows of the server. Raises ``StoreClosed``."""
        if self.closed:
            raise self.closed_error()
        return self.breaker.status()

    def patience(self) -> Patience:
        """For the web: of one request, for all that it sends to this store and gives back to it."""
        return Patience(self.timeout_s)

    def closed_error(self) -> StoreClosed:
        return StoreClosed(f"{self!r} was used after it was closed")

    def ending_error(self) -> StoreUnavailable:
        """In place of whatever clients raise then: modules can't be imported any more, for one."""
        return StoreUnavailable(
            f"{self!r} has not decided: the interpreter is ending, when nothing can be asked of Redis any more; what "
            "is registered with atexit still can"
        )

    def unavailable(self, error: Exception) -> StoreUnavailable:
        """The error for callers; it is logged at most every ``LOG_EVERY_S`` seconds."""
        if isinstance(error, StoreUnavailable):
            return error
        unavailable = StoreUnavailable(f"{self!r} has not decided: {type(error).__name__}: {_described(error)}")
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            # Neither a fallback nor a 503 shows the reason to an operator.
            self._logged_s = now_s
            _log.warning("%s", unavailable)
        return unavailable

    def fall_back(self, error: StoreUnavailable, fall_back: Callable[[], T] | None) -> T:
        """The fallback's answer, if there is one and the store's policy allows it; else raise `error`."""
        self.breaker.decided()
        if fall_back is None or self._raises:
            raise error
        return fall_back()

    def _results(self, commands: list[Command[T]], replies: list[Any], fall_back: Callable[[int], T] | None) -> list[T]:
        """Of a batch. A command with an error instead of a reply falls back, by its number in the batch.

        All replies are decoded, though one is an error: what was taken is then remembered.
        """
        results: list[T] = []
        errors = []
        for number, (command, reply) in enumerate(zip(commands, replies, strict=True)):
            try:
                if isinstance(reply, Exception):
                    error = self.unavailable(reply)
                    if error is not reply:
                        error.__cause__ = reply
                    results.append(self.fall_back(error, fall_back and functools.partial(fall_back, number)))
                else:
                    results.append(command.result(reply))
            except ForebayError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _batches(self, steps: list[Step]) -> Batches:
        """A batch of the next command of each flow, until all flows have ended: no caller waits for their results."""
        while steps:
            chunk, steps = steps[:CHUNK], steps[CHUNK:]
            replies = yield [command for _, command in chunk]
            for (flow, command), reply in zip(chunk, replies, strict=True):
                with contextlib.suppress(StopIteration, ForebayError, asyncio.CancelledError):
                    steps.append((flow, self._next_command(flow, command, reply)))

    def _next_command(self, flow: CommandFlow[Any], command: Command[Any], reply: Any) -> Command[Any]:
        try:
            if isinstance(reply, Exception):
                raise self.unavailable(reply)
            result = command.result(reply)
        except ForebayError as error:
            if isinstance(error, ForeignState):
                _log.warning("nothing was given back: %s", error)
            return flow.throw(error)
        return flow.send(result)


class Executor(ExecutorBase):
    """Sends commands and blocks until the replies are there.

    *Threads*: safe. *Fork*: safe, as its client.
    """

    def close(self) -> None:
        self.closed = True
        if self._owns_client:
            self.client.close()
        self.breaker.close()

    def check_use(self) -> None:
        """Raises ``StoreClosed``."""
        if self.closed:
            raise self.closed_error()

    def decide(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        size: int,
        read: Callable[[list[int]], T],
        fall_back: Callable[[], T],
    ) -> T:
        """One call of a script, the shortest way: as ``run_command``, without a ``Command``."""
        try:
            return read(self._call(script, keys, arguments, size))
        except StoreUnavailable as error:
            return self.fall_back(error, fall_back)

    def execute(self, command: Command[T]) -> T:
        """One command, without a fallback. Raises ``StoreUnavailable``, which ``status`` doesn't count as decided."""
        return command.read(self._call(command.script, command.keys, command.arguments, command.size))

    def run_command(self, command: Command[T], fall_back: Callable[[], T] | None = None) -> T:
        try:
            return self.execute(command)
        except StoreUnavailable as error:
            return self.fall_back(error, fall_back)

    def run(
        self, flow: CommandFlow[T], fall_back: Callable[[], T] | None = None, patience: Patience | None = None
    ) -> T:
        """All commands of a flow, one after the other. An error of a command is raised in the flow."""
        try:
            command = next(flow)
            while True:
                try:
                    reply = self._call(command.script, command.keys, command.arguments, command.size, patience)
                    result = command.read(reply)
                except BaseException as error:
                    command = flow.throw(error)
                else:
                    command = flow.send(result)
        except StopIteration as end:
            return cast(T, end.value)
        except StoreUnavailable as error:
            return self.fall_back(error, fall_back)

    def run_each(self, flows: list[CommandFlow[T]], fall_back: Callable[[int], T]) -> list[T]:
        """One flow after the other. Each falls back by its number."""
        return [self.run(flow, functools.partial(fall_back, number)) for number, flow in enumerate(flows)]

    def run_to_end(self, flow: CommandFlow[T], fall_back: Callable[[], T] | None = None) -> T:
        """As ``run``: no task can be cancelled meanwhile."""
        return self.run(flow, fall_back)

    def run_within(
        self,
        patience: Patience,
        flow: CommandFlow[T],
        fall_back: Callable[[], T] | None,
        if_cancelled: Callable[[T], Iterable[CommandFlow[None]]] | None = None,
    ) -> T:
        """As ``run``, for no longer than a request waits."""
        return self.run(flow, fall_back, patience)

    def run_many(self, commands: list[Command[T]], fall_back: Callable[[int], T] | None = None) -> list[T]:
        """In order, but not as one: others' requests may come between.

        The commands that Redis failed to answer, and those that would have been sent after them, fall back.
        """
        self.check_use()
        replies: list[Any] = []
        error: Exception | None = None
        for start in range(0, len(commands), CHUNK):
            chunk = commands[start : start + CHUNK]
            sent: list[Any] = []
            if error is None:
                sent, error = self._exchange(chunk)
            replies += sent or [error] * len(chunk)
        return self._results(commands, replies, fall_back)

    def give_back(self, taken: Iterable[GivesBack], patience: Patience) -> None:
        """For the web, of one request: a batch, and one more for what only replies tell. Redis may be unavailable."""
        self.check_use()
        batches = self._batches(begun([one.give_back_flow() for one in taken]))
        with contextlib.suppress(StopIteration):
            commands = next(batches)
            while True:
                replies, error = self._exchange(commands, patience)
                commands = batches.send(replies or [error] * len(commands))

    def wait(self, limiter: Any, key: Any, cost: Any, timeout: Duration | None, jitter: float) -> bool:
        """What ``wait`` of every limiter does."""
        return waiting.wait(limiter, key, cost, timeout, jitter)

    def permits_came_back(self, limiter: Any, key: Any) -> None:
        """Let the first thread that waits for `key` try at once."""
        waiting.released(limiter, key)

    def send(self, commands: list[Command[Any]]) -> list[Any]:
        """Their replies, of which some may be errors; without the breaker, and without the text of unknown scripts."""
        return cast(list[Any], self.client.execute_many([command.call for command in commands]))

    def _call(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        size: int,
        patience: Patience | None = None,
    ) -> list[int]:
        if self.closed:
            raise self.closed_error()
        passage = self.breaker.enter()
        since_s = self._set_deadline(patience)
        try:
            if passage is None:
                reply = self._evaluate(script, keys, arguments)
            else:
                with passage:
                    reply = self._evaluate(script, keys, arguments)
        except Exception as error:
            if self.closed:
                # Its connection was closed by ``close`` during the call.
                raise self.closed_error() from error
            if isinstance(error, UNAVAILABLE_ERRORS):
                if passage is None:
                    self.breaker.failed(error)
                raise self.unavailable(error) from error
            if sys.is_finalizing():
                raise self.ending_error() from error
            raise
        finally:
            UNTIL_S.set(math.inf)
            if patience is not None:
                patience.left_s -= time.monotonic() - since_s
        return checked(reply, size, keys)

    def _set_deadline(self, patience: Patience | None) -> float:
        """Of the call that begins now, and when that is. Each sets its own, as an interrupt may leave one behind."""
        now_s = time.monotonic()
        UNTIL_S.set(now_s + (self.timeout_s if patience is None else patience.left_s))
        return now_s

    def _evaluate(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        try:
            return self.execute_command("EVALSHA", script.sha, b"%d" % len(keys), *keys, *arguments)
        except NoScriptError:
            return self.execute_command("EVAL", script.text, b"%d" % len(keys), *keys, *arguments)

    def _exchange(
        self, chunk: list[Command[Any]], patience: Patience | None = None
    ) -> tuple[list[Any], Exception | None]:
        """The replies, of which some may be errors; and the error that says that Redis can't work, if there is one."""
        sent: list[Any] = []
        since_s = self._set_deadline(patience)
        try:
            with self.breaker.passage():
                try:
                    sent, missing = self.send(chunk), len(chunk) + 1
                    while (unsent := unknown(chunk, sent)) and len(unsent) < missing:
                        missing = len(unsent)
                        sent = replaced(sent, self.client.execute_many(calls_with_text(unsent)))
                except Exception as caught:
                    if self.closed:
                        raise self.closed_error() from caught
                    raise
                raise_if_server_failed(sent)
        except (*UNAVAILABLE_ERRORS, StoreUnavailable) as error:
            return sent, error
        except Exception:
            if not sys.is_finalizing():
                raise
            return sent, self.ending_error()
        finally:
            UNTIL_S.set(math.inf)
            if patience is not None:
                patience.left_s -= time.monotonic() - since_s
        return sent, None


class AsyncExecutor(ExecutorBase):
    """Sends commands, and is awaited for the results. Of one event loop."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_closing = False
        self._queues = WaitQueues()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The loop itself doesn't keep them.
        self.going_on: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Wait, for a deadline or two, for permits to come back that cancelled tasks have taken, then close."""
        self.closed = self._is_closing = True
        try:
            for _ in range(TURNS_TO_BEGIN):
                await asyncio.sleep(0)
            # The calls that go on, and then what is given back.
            for _ in range(2):
                if self.going_on:
                    await asyncio.wait(self.going_on, timeout=self.timeout_s)
        finally:
            self._is_closing = False
            try:
                if self._owns_client:
                    await self.client.aclose()
            finally:
                self.breaker.close()

    def check_use(self, what: bytes = HIT) -> None:
        """Raises ``StoreClosed``, and ``RuntimeError`` in another event loop than the first."""
        if self.closed and not (self._is_closing and what in GIVING_BACK):
            raise self.closed_error()
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None:
                raise RuntimeError(
                    f"{self!r} was used in another event loop before, and its connections belong to that one: make a "
                    "store, and its limiters, for each event loop, or run all in one"
                )
            self._loop = loop

    async def decide(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        size: int,
        read: Callable[[list[int]], T],
        fall_back: Callable[[], T],
    ) -> T:
        """As ``Executor.decide``."""
        try:
            return read(await self._call(script, keys, arguments, size))
        except StoreUnavailable as error:
            return self.fall_back(error, fall_back)

    async def execute(self, command: Command[T]) -> T:
        """As ``Executor.execute``, and cancelled with its task."""
        return command.read(await self._call(command.script, command.keys, command.arguments, command.size))

    async def run_command(self, command: Command[T], fall_back: Callable[[], T] | None = None) -> T:
        try:
            return command.read(await self._reply(command))
        except StoreUnavailable as error:
            return self.fall_back(error, fall_back)

    async def run(self, flow: CommandFlow[T], fall_back: Callable[[], T] | None = None) -> T:
        """As ``Executor.run``."""
        try:
            command = next(flow)
            while True:
                try:
                    result = command.read(await self._reply(command))
                except asyncio.CancelledError as error:
                    # The flow's commands from now on give back, also if this task is cancelled again.
                    await self.to_end(self._finish([(flow, flow.throw(error))]))
                    raise
                except BaseException as error:
                    command = flow.throw(error)
                else:
                    command = flow.send(result)
        except StopIteration as end:
            return cast(T, end.value)
        except StoreUnavailable as error:
            return self.fall_back(error, fall_back)

    async def run_each(self, flows: list[CommandFlow[T]], fall_back: Callable[[int], T]) -> list[T]:
        """As ``Executor.run_each``."""
        return [await self.run(flow, functools.partial(fall_back, number)) for number, flow in enumerate(flows)]

    async def run_to_end(self, flow: CommandFlow[T], fall_back: Callable[[], T] | None = None) -> T:
        """As ``run``, for a flow that gives back: it goes on if this task is cancelled.

        No other task gives back the rest of the flow, and none may try what one of its commands gives back meanwhile.
        """
        return await self.to_end(self.run(flow, fall_back))

    async def run_within(
        self,
        patience: Patience,
        flow: CommandFlow[T],
        fall_back: Callable[[], T] | None,
        if_cancelled: Callable[[T], Iterable[CommandFlow[None]]] | None = None,
    ) -> T:
        """As ``run``, for no longer than a request waits: what is taken after that comes back.

        The flow may have ended just when the request is cancelled: then the flows of `if_cancelled` give its outcome
        back.
        """
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        try:
            if self._has_deadlines and patience.left_s >= self.timeout_s:
                # It is one call, which has that deadline itself.
                return await self.run(flow, fall_back)
            going_on = self._go_on(self.run(flow, fall_back))
            try:
                done, _ = await asyncio.wait({going_on}, timeout=patience.left_s)
            except asyncio.CancelledError:
                going_on.cancel()
                if if_cancelled is not None:
                    going_on.add_done_callback(functools.partial(self._give_up, if_cancelled))
                raise
            if done:
                return going_on.result()
            going_on.cancel()
        finally:
            patience.left_s -= loop.time() - since_s
        self.breaker.failed(self._late())
        return self.fall_back(self.unavailable(self._late()), fall_back)

    async def run_many(self, commands: list[Command[T]], fall_back: Callable[[int], T] | None = None) -> list[T]:
        """As ``Executor.run_many``."""
        self.check_use()
        replies: list[Any] = []
        error: Exception | None = None
        for start in range(0, len(commands), CHUNK):
            chunk = commands[start : start + CHUNK]
            sent: list[Any] = []
            if error is None:
                try:
                    sent, error = await self._exchange(chunk)
                except (asyncio.CancelledError, StoreClosed):
                    if chunk[0].if_given_up:
                        self._go_on(self._finish(begun(given_up(commands, replies))))
                    raise
            replies += sent or [error] * len(chunk)
        return self._results(commands, replies, fall_back)

    async def give_back(self, taken: Iterable[GivesBack], patience: Patience) -> None:
        """As ``Executor.give_back``, by a task of its own, for as long as it takes.

        The breaker learns if that is longer than the request waits.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience.left_s
        steps = begun([one.give_back_flow() for one in taken])
        is_answered = await self.to_end(self._finish(steps))
        if is_answered and loop.time() > until_s:
            self.breaker.failed(self._late())

    async def wait(self, limiter: Any, key: Any, cost: Any, timeout: Duration | None, jitter: float) -> bool:
        """What ``wait`` of every limiter does."""
        queue = self._queues[limiter.queue_key(key)]
        return await wait(functools.partial(limiter.reserve, key, cost), queue, limiter.may_free_early, timeout, jitter)

    def permits_came_back(self, limiter: Any, key: Any) -> None:
        """Nothing: the first task of a queue asks again after a pause."""

    async def to_end(
        self, call: Coroutine[Any, Any, T], if_cancelled: Callable[[T], Iterable[CommandFlow[None]]] | None = None
    ) -> T:
        """What a call returns, which goes on if this task is cancelled: then `if_cancelled` gives its outcome back."""
        going_on = self._go_on(call)
        # A task that is awaited itself is cancelled with the task that awaits it.
        answered: asyncio.Future[None] = going_on.get_loop().create_future()
        going_on.add_done_callback(functools.partial(_tell, answered))
        try:
            await answered
        except asyncio.CancelledError:
            if if_cancelled is not None:
                going_on.add_done_callback(functools.partial(self._give_up, if_cancelled))
            raise
        return going_on.result()

    def _give_up(self, if_cancelled: Callable[[T], Iterable[CommandFlow[None]]], call: asyncio.Task[T]) -> None:
        if not call.cancelled() and call.exception() is None:
            self._go_on(self._finish(begun(if_cancelled(call.result()))))

    def _go_on(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self.going_on.add(task)
        task.add_done_callback(self.going_on.discard)
        return task

    def _late(self) -> TimeoutError:
        return TimeoutError(f"a request has waited for {self.timeout_s} s in all")

    async def _reply(self, command: Command[Any]) -> list[int]:
        call = self._call(command.script, command.keys, command.arguments, command.size)
        if_given_up = command.if_given_up
        if if_given_up is not None:
            return await self.to_end(call, lambda reply: [if_given_up(reply)])
        if command.arguments[0] in GIVING_BACK:
            return await self.to_end(call)
        return await call

    async def _call(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any], size: int) -> list[int]:
        self.check_use(arguments[0])
        try:
            with self.breaker.passage():
                try:
                    async with self._deadline():
                        try:
                            reply = await self.execute_command(
                                "EVALSHA", script.sha, b"%d" % len(keys), *keys, *arguments
                            )
                        except NoScriptError:
                            reply = await self.execute_command(
                                "EVAL", script.text, b"%d" % len(keys), *keys, *arguments
                            )
                except Exception as error:
                    self._check_connected(error)
                    raise
        except UNAVAILABLE_ERRORS as error:
            raise self.unavailable(error) from error
        return checked(reply, size, keys)

    def _check_connected(self, error: Exception) -> None:
        """An error of a connection that ``close`` has ended is no failure of the server."""
        if self.closed and not self._is_closing:
            raise self.closed_error() from error

    @property
    def _has_deadlines(self) -> bool:
        return self._owns_client and not self.has_slots

    def _deadline(self) -> asyncio.Timeout:
        """Of a whole call; a client that the user made has its own, and so has each operation of a cluster: after one
        that has missed it, the cluster's client looks which node has the slot."""
        return asyncio.timeout(self.timeout_s if self._has_deadlines else None)

    async def _finish(self, steps: list[Step]) -> bool:
        """Whether Redis has answered all of it."""
        batches, is_answered = self._batches(steps), True
        with contextlib.suppress(StoreClosed, StopIteration):
            commands = next(batches)
            while True:
                replies, error = await self._exchange_now(commands)
                is_answered = is_answered and error is None
                commands = batches.send(replies or [error] * len(commands))
        return is_answered

    async def _exchange(self, chunk: list[Command[Any]]) -> tuple[list[Any], Exception | None]:
        call = self._exchange_now(chunk)
        if chunk[0].if_given_up is None:
            return await call
        return await self.to_end(call, lambda exchanged: given_up(chunk, exchanged[0]))

    async def _exchange_now(self, chunk: list[Command[Any]]) -> tuple[list[Any], Exception | None]:
        """The replies, of which some may be errors; and the error that says that Redis can't work, if there is one."""
        self.check_use(chunk[0].arguments[0])
        sent: list[Any] = []
        try:
            with self.breaker.passage():
                try:
                    async with self._deadline():
                        sent, missing = await self._send(chunk), len(chunk) + 1
                        while (unsent := unknown(chunk, sent)) and len(unsent) < missing:
                            missing = len(unsent)
                            sent = replaced(sent, await self.client.execute_many(calls_with_text(unsent)))
                except Exception as error:
                    self._check_connected(error)
                    raise
                raise_if_server_failed(sent)
        except (*UNAVAILABLE_ERRORS, StoreUnavailable) as error:
            return sent, error
        return sent, None

    async def _send(self, commands: list[Command[Any]]) -> list[Any]:
        return cast(list[Any], await self.client.execute_many([command.call for command in commands]))


def _tell(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _described(error: Exception) -> str:
    """Its message, with a remedy if the error doesn't pass by itself."""
    if not str(error) and isinstance(error, TimeoutError):
        return "no answer in time"
    if _NO_CLUSTER in str(error):
        return f"{error}; the server is no node of a cluster: its URL begins with redis:// or rediss://"
    remedy = next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), None)
    return f"{str(error).rstrip('.')}; {remedy}" if remedy else str(error)


def begun(flows: Iterable[CommandFlow[Any]]) -> list[Step]:
    """Each flow with its first command. A flow may have none."""
    return [(flow, command) for flow in flows if (command := next(flow, None)) is not None]


def unknown(commands: list[Command[T]], replies: list[Any]) -> list[Command[T]]:
    """Those whose script Redis didn't know, so that nothing was done."""
    return [command for command, reply in zip(commands, replies, strict=True) if isinstance(reply, NoScriptError)]


def replaced(replies: list[Any], again: list[Any]) -> list[Any]:
    """All replies, with those to the second attempt in the place of those that didn't know the script."""
    better = iter(again)
    return [next(better) if isinstance(reply, NoScriptError) else reply for reply in replies]


def calls_with_text(commands: list[Command[T]]) -> list[Call]:
    """To be sent again: the first brings the script along, and is answered whatever Redis forgets meanwhile."""
    first, *others = [command.call for command in commands]
    return [("EVAL", commands[0].script.text, *first[2:]), *others]


def raise_if_server_failed(replies: list[Any]) -> None:
    """Raise, of replies, the first error that says that the server can't do its work."""
    for reply in replies:
        if isinstance(reply, Exception) and is_failure(reply):
            raise reply

"""The executor that is awaited for the results: see ``executor_base.py``.

``concurrency.py`` has the proof that a cancelled task's permits come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar, cast

from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

from forebay.errors import StoreClosed, StoreUnavailable
from forebay.rate import Duration, Rate
from forebay.redis.commands import GIVING_BACK, HIT, Command, CommandFlow, checked, given_up
from forebay.redis.executor_base import (
    UNAVAILABLE_ERRORS,
    ExecutorBase,
    GivesBack,
    Step,
    begun,
    calls_with_text,
    chunks_of,
    raise_if_server_failed,
    replaced,
    unknown,
)
from forebay.redis.scripts import Script
from forebay.redis.transport.deadline import Patience
from forebay.redis.wait_queues import WaitQueues, wait
from forebay.waiting import tier_of

__all__ = ["AsyncExecutor"]

T = TypeVar("T")
# Turns of the event loop until cancelled tasks have begun to give permits back: one for each task of a chain in which
# each awaits the next.
TURNS_TO_BEGIN: Final = 10


class AsyncExecutor(ExecutorBase):
    """Sends commands, and is awaited for the results. It belongs to one event loop."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_closing = False
        self._queues = WaitQueues()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The event loop has only weak references to its tasks.
        self.going_on: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Wait, for at most two deadlines, until the permits of cancelled tasks have come back. Then close."""
        self.closed = self._is_closing = True
        try:
            for _ in range(TURNS_TO_BEGIN):
                await asyncio.sleep(0)
            # First for the calls that go on, then for the releases that follow them.
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

    async def run_to_end(self, flow: CommandFlow[T], fall_back: Callable[[], T]) -> T:
        """As ``run``, for a flow that gives permits back: it goes on if this task is cancelled.

        No other task would give back the rest of the flow's permits. And none may give back the same permits while one
        of the flow's commands is on its way.
        """
        return await self.to_end(self.run(flow, fall_back))

    async def run_within(
        self,
        patience: Patience,
        flow: CommandFlow[T],
        fall_back: Callable[[], T],
        if_cancelled: Callable[[T], Iterable[CommandFlow[None]]] | None = None,
    ) -> T:
        """As ``run``, for no longer than a request waits. Permits that are taken after that come back.

        If the flow ends at the moment at which the request is cancelled, the flows of `if_cancelled` give its permits
        back.
        """
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        try:
            if self._has_deadlines and patience.left_s >= self.timeout_s:
                # The flow is one call, which has that deadline itself.
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

    async def run_many(self, commands: list[Command[T]], fall_back: Callable[[int], T]) -> list[T]:
        """As ``Executor.run_many``."""
        self.check_use()
        replies: list[Any] = []
        error: Exception | None = None
        for chunk in chunks_of(commands):
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
        """As ``Executor.give_back``, in a task of its own, for as long as it takes.

        If that is longer than the request waits, the breaker counts a failure.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience.left_s
        steps = begun([one.give_back_flow() for one in taken])
        is_answered = await self.to_end(self._finish(steps))
        if is_answered and loop.time() > until_s:
            self.breaker.failed(self._late())

    async def wait(
        self,
        limiter: Any,
        key: Any,
        cost: Any,
        timeout: Duration | None,
        jitter: float,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> bool:
        """The ``wait`` of every limiter."""
        tier = tier_of(rate, burst)
        queue = self._queues[(limiter.queue_key(key), *tier.items())]
        if queue.locked():
            # A request that can never be allowed doesn't stand in line for that.
            limiter.check_request(key, cost, **tier)
        reserve = functools.partial(limiter.reserve, key, cost, **tier)
        return await wait(reserve, queue, limiter.may_free_early, timeout, jitter)

    def permits_came_back(self, limiter: Any, key: Any) -> None:
        """Do nothing: the first task of a queue tries again after a pause."""

    async def to_end(
        self, call: Coroutine[Any, Any, T], if_cancelled: Callable[[T], Iterable[CommandFlow[None]]] | None = None
    ) -> T:
        """A call's result. If this task is cancelled, the call goes on and `if_cancelled` gives its result back."""
        going_on = self._go_on(call)
        # This task awaits a future: its cancellation would also cancel a task that it awaits.
        answered: asyncio.Future[None] = going_on.get_loop().create_future()
        going_on.add_done_callback(functools.partial(_end_wait, answered))
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

    def _late(self) -> RedisTimeoutError:
        return RedisTimeoutError(f"a request has waited for {self.timeout_s} s in all")

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
        deadline, since_s = self._deadline(), time.monotonic()
        try:
            with self.breaker.passage():
                try:
                    async with deadline:
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
                    if isinstance(error, TimeoutError) and deadline.expired():
                        raise RedisTimeoutError from error
                    raise
        except UNAVAILABLE_ERRORS as error:
            self._answered(since_s, error)
            raise self.unavailable(error) from error
        self._answered(since_s)
        return checked(reply, size, keys)

    def _check_connected(self, error: Exception) -> None:
        """Raise ``StoreClosed`` if ``close`` has ended the connection: that is no failure of the server."""
        if self.closed and not self._is_closing:
            raise self.closed_error() from error

    @property
    def _has_deadlines(self) -> bool:
        return self._owns_client and not self.has_slots

    def _deadline(self) -> asyncio.Timeout:
        """The deadline of a whole call. A user's own client has a deadline itself, and so has each operation of a
        cluster: when one misses it, the cluster's client looks up the node of the slot.
        """
        return asyncio.timeout(self.timeout_s if self._has_deadlines else None)

    async def _finish(self, steps: list[Step]) -> bool:
        """Run flows to their ends. Return whether Redis has replied to all of their commands."""
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
        """The replies, some of which may be errors; and the error that shows that Redis can't work, if there is one."""
        self.check_use(chunk[0].arguments[0])
        sent: list[Any] = []
        deadline, since_s = self._deadline(), time.monotonic()
        try:
            with self.breaker.passage():
                try:
                    async with deadline:
                        sent, missing = await self._send(chunk), len(chunk) + 1
                        while (unsent := unknown(chunk, sent)) and len(unsent) < missing:
                            missing = len(unsent)
                            sent = replaced(sent, await self.client.execute_many(calls_with_text(unsent)))
                except Exception as error:
                    self._check_connected(error)
                    if isinstance(error, TimeoutError) and deadline.expired():
                        raise RedisTimeoutError from error
                    raise
                raise_if_server_failed(sent)
        except (*UNAVAILABLE_ERRORS, StoreUnavailable) as error:
            self._answered(since_s, error)
            return sent, error
        self._answered(since_s)
        return sent, None

    async def _send(self, commands: list[Command[Any]]) -> list[Any]:
        return cast(list[Any], await self.client.execute_many([command.call for command in commands]))


def _end_wait(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)

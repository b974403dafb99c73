"""The executor that blocks until the results are there: see ``executor_base.py``."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from redis.exceptions import NoScriptError

from forebay import waiting
from forebay.errors import StoreUnavailable
from forebay.rate import Duration, Rate
from forebay.redis.commands import Command, CommandFlow, checked
from forebay.redis.executor_base import (
    UNAVAILABLE_ERRORS,
    ExecutorBase,
    GivesBack,
    begun,
    calls_with_text,
    chunks_of,
    raise_if_server_failed,
    replaced,
    unknown,
)
from forebay.redis.scripts import Script
from forebay.redis.transport.deadline import Patience
from forebay.redis.transport.timed_socket import UNTIL_S

__all__ = ["Executor"]

T = TypeVar("T")


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
        """As ``run_command``, without a ``Command``: the fastest way to call a script."""
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

    def run_to_end(self, flow: CommandFlow[T], fall_back: Callable[[], T]) -> T:
        """As ``run``: no task can be cancelled meanwhile."""
        return self.run(flow, fall_back)

    def run_within(
        self,
        patience: Patience,
        flow: CommandFlow[T],
        fall_back: Callable[[], T],
        if_cancelled: Callable[[T], Iterable[CommandFlow[None]]] | None = None,
    ) -> T:
        """As ``run``, for no longer than a request waits."""
        return self.run(flow, fall_back, patience)

    def run_many(self, commands: list[Command[T]], fall_back: Callable[[int], T]) -> list[T]:
        """Send a batch in order. It is not atomic: requests of others may come between.

        Commands without a reply, and those that would have been sent after them, fall back.
        """
        self.check_use()
        replies: list[Any] = []
        error: Exception | None = None
        for chunk in chunks_of(commands):
            sent: list[Any] = []
            if error is None:
                sent, error = self._exchange(chunk)
            replies += sent or [error] * len(chunk)
        return self._results(commands, replies, fall_back)

    def give_back(self, taken: Iterable[GivesBack], patience: Patience) -> None:
        """For the web: give back the permits of one request. Raises nothing if Redis is unavailable.

        One batch, and one more for the commands that depend on a reply.
        """
        self.check_use()
        batches = self._batches(begun([one.give_back_flow() for one in taken]))
        with contextlib.suppress(StopIteration):
            commands = next(batches)
            while True:
                replies, error = self._exchange(commands, patience)
                commands = batches.send(replies or [error] * len(commands))

    def wait(
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
        return waiting.wait(limiter, key, cost, timeout, jitter, rate, burst)

    def permits_came_back(self, limiter: Any, key: Any) -> None:
        """Let the first thread that waits for `key` try at once."""
        waiting.released(limiter, key)

    def send(self, commands: list[Command[Any]]) -> list[Any]:
        """Send commands and return the replies, some of which may be errors.

        Without the breaker, and without a second attempt that sends the text of unknown scripts.
        """
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
                # ``close`` has ended the connection during the call.
                raise self.closed_error() from error
            if isinstance(error, UNAVAILABLE_ERRORS):
                self._answered(since_s, error)
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
        self._answered(since_s)
        return checked(reply, size, keys)

    def _set_deadline(self, patience: Patience | None) -> float:
        """Set the deadline of the call that begins now, and return the time.

        Each call sets its own deadline, because an interrupted call may leave its deadline behind.
        """
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
        """The replies, some of which may be errors; and the error that shows that Redis can't work, if there is one."""
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
            self._answered(since_s, error)
            return sent, error
        except Exception:
            if not sys.is_finalizing():
                raise
            return sent, self.ending_error()
        finally:
            UNTIL_S.set(math.inf)
            if patience is not None:
                patience.left_s -= time.monotonic() - since_s
        self._answered(since_s)
        return sent, None

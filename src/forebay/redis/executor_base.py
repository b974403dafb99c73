"""Executors send the commands of limiters to Redis and return the results: one executor blocks, one is awaited.

A limiter makes a ``Command`` or a ``CommandFlow`` and gives it to the executor of its store. The executor

* checks that the store is open;
* passes the call through the circuit breaker, and reports its outcome there;
* bounds the call by a deadline;
* sends a script's text if the server doesn't know the script;
* checks and decodes the reply;
* calls the caller's fallback if Redis is unavailable.

``Executor`` returns a result. The same method of ``AsyncExecutor`` returns a coroutine of that result. This module has
their common part, which does no I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from forebay.errors import ForebayError, ForeignState, StoreClosed, StoreUnavailable
from forebay.rate import NS
from forebay.redis.commands import Command, CommandFlow
from forebay.redis.transport.breaker import Breaker, RedisStatus, is_failure
from forebay.redis.transport.cluster import AsyncCluster, Cluster
from forebay.redis.transport.deadline import Patience
from forebay.redis.transport.servers import Call
from forebay.seldom import Seldom

__all__ = [
    "CHUNK",
    "LOG_EVERY_S",
    "UNAVAILABLE_ERRORS",
    "ExecutorBase",
    "GivesBack",
    "Step",
    "begun",
    "calls_with_text",
    "chunks_of",
    "raise_if_server_failed",
    "replaced",
    "unknown",
]

T = TypeVar("T")
# A flow, and the command that it waits for.
Step: TypeAlias = tuple[CommandFlow[Any], Command[Any]]
Batches: TypeAlias = Generator[list[Command[Any]], Sequence[Any], None]

# The number of commands of a batch that are sent before their replies are read.
CHUNK: Final = 500
# The errors that clients raise about the server. Those of clusters have a base class of their own.
UNAVAILABLE_ERRORS: Final = (RedisError, RedisClusterException)
# Those of them that are replies.
_ERROR_REPLIES: Final = (ResponseError, BusyLoadingError, AuthenticationError)
# Errors that don't pass by themselves, and what to do about each.
_REMEDIES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (AuthenticationError, "check the user and the password of the URL"),
    (NoPermissionError, "docs/redis.md lists what the user must be allowed to do"),
    (MovedError, "the server is a node of a cluster, whose URL begins with redis+cluster:// or rediss+cluster://"),
)
_NO_CLUSTER: Final = "Cluster mode is not enabled"
_NO_POLICY: Final = "the store's when_unavailable is 'deny': with 'allow' or 'local' it would decide without Redis"
LOG_EVERY_S: Final = 60
_log = logging.getLogger("forebay.redis")


class GivesBack(Protocol):
    """A reservation or a lease."""

    def give_back_flow(self) -> CommandFlow[None]: ...


class ExecutorBase:
    """The base of both executors: the state of the connection to one server, and the meaning of errors and replies.

    `client` is a ``Server``, a ``Cluster`` or one of their asyncio kind; `owner` names the store in errors.
    `note_latency` gets the ns that each call took to which Redis replied. With `has_slots`, keys may lie in several
    slots of a cluster: no script runs over more than one slot.
    """

    def __init__(
        self,
        client: Any,
        owner: str,
        breaker: Breaker,
        timeout_s: float,
        note_latency: Callable[[int], None] | None,
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
        self._log_turns = Seldom(LOG_EVERY_S)
        self.breaker = breaker
        self.timeout_s = timeout_s
        self._note_latency = note_latency
        self.closed = False

    def __repr__(self) -> str:
        """The store's ``repr``, which errors show to users."""
        return self._owner

    def status(self) -> RedisStatus:
        """The state of the server as this host knows it. Raises ``StoreClosed``."""
        if self.closed:
            raise self.closed_error()
        return self.breaker.status()

    def patience(self) -> Patience:
        """For the web: the time that one request may spend on all its calls to this store, refunds included."""
        return Patience(self.timeout_s)

    def closed_error(self) -> StoreClosed:
        return StoreClosed(f"{self!r} was used after it was closed")

    def ending_error(self) -> StoreUnavailable:
        """The error in place of a client's own ones, such as an import that fails while the interpreter ends."""
        return StoreUnavailable(
            f"{self!r} has not decided: the interpreter is ending, and no call to Redis works any more; functions that "
            "are registered with atexit run early enough"
        )

    def unavailable(self, error: Exception) -> StoreUnavailable:
        """The error for callers; it is logged at most every ``LOG_EVERY_S`` seconds."""
        if isinstance(error, StoreUnavailable):
            return error
        unavailable = StoreUnavailable(f"{self!r} has not decided: {type(error).__name__}: {_described(error)}")
        if self._log_turns.is_due():
            # Neither a fallback nor a 503 shows the reason to an operator.
            _log.warning("%s", unavailable)
        return unavailable

    def _answered(self, since_s: float, error: Exception | None = None) -> None:
        """Time the call that began then, if Redis replied to it: the error that it raised may be a reply."""
        if self._note_latency is not None and (error is None or isinstance(error, _ERROR_REPLIES)):
            # Tests may turn the clock back.
            self._note_latency(max(0, round((time.monotonic() - since_s) * NS)))

    def fall_back(self, error: StoreUnavailable, fall_back: Callable[[], T] | None) -> T:
        """The fallback's result. Raises `error` if there is no fallback, or if the store's policy is to deny."""
        if fall_back is None:
            raise error
        self.breaker.decided()
        if self._raises:
            # Several callers may get one error.
            if _NO_POLICY not in str(error):
                error.args = (f"{error}; {_NO_POLICY}",)
            raise error
        return fall_back()

    def _results(self, commands: list[Command[T]], replies: list[Any], fall_back: Callable[[int], T]) -> list[T]:
        """The results of a batch. A command with an error instead of a reply falls back, by its number in the batch.

        All replies are decoded even if one is an error, so that permits that were taken are remembered.
        """
        results: list[T] = []
        errors = []
        for number, (command, reply) in enumerate(zip(commands, replies, strict=True)):
            try:
                if isinstance(reply, Exception):
                    error = self.unavailable(reply)
                    if error is not reply:
                        error.__cause__ = reply
                    results.append(self.fall_back(error, functools.partial(fall_back, number)))
                else:
                    results.append(command.result(reply))
            except ForebayError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _batches(self, steps: list[Step]) -> Batches:
        """Yield batches of each flow's next command until all flows have ended. Their results are dropped."""
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


def _described(error: Exception) -> str:
    """The error's message, with a remedy if the error doesn't pass by itself."""
    if not str(error) and isinstance(error, RedisTimeoutError):
        return "no reply in time"
    if _NO_CLUSTER in str(error):
        return f"{error}; the server is no node of a cluster: its URL begins with redis:// or rediss://"
    remedy = next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), None)
    return f"{str(error).rstrip('.')}; {remedy}" if remedy else str(error)


def chunks_of(commands: list[Command[T]]) -> Iterator[list[Command[T]]]:
    """A batch in parts, each of which is sent at once."""
    for start in range(0, len(commands), CHUNK):
        yield commands[start : start + CHUNK]


def begun(flows: Iterable[CommandFlow[Any]]) -> list[Step]:
    """Each flow with its first command. A flow may have none."""
    return [(flow, command) for flow in flows if (command := next(flow, None)) is not None]


def unknown(commands: list[Command[T]], replies: list[Any]) -> list[Command[T]]:
    """The commands whose script Redis didn't have, so that it did nothing."""
    return [command for command, reply in zip(commands, replies, strict=True) if isinstance(reply, NoScriptError)]


def replaced(replies: list[Any], again: list[Any]) -> list[Any]:
    """All replies. Those to the second attempt, `again`, replace those of a server that didn't know the script."""
    better = iter(again)
    return [next(better) if isinstance(reply, NoScriptError) else reply for reply in replies]


def calls_with_text(commands: list[Command[T]]) -> list[Call]:
    """The calls of a second attempt. The first has the script's text, so it works even if Redis drops its scripts."""
    first, *others = [command.call for command in commands]
    return [("EVAL", commands[0].script.text, *first[2:]), *others]


def raise_if_server_failed(replies: list[Any]) -> None:
    """Raise the first error among the replies that shows that the server can't do its work."""
    for reply in replies:
        if isinstance(reply, Exception) and is_failure(reply):
            raise reply

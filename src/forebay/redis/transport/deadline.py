"""Deadlines for whole calls, and size limits for whole replies: redis-py has neither.

redis-py gives each socket operation a timeout of its own. A server that is slow at every step of the handshake, or
sends its reply a byte at a time, never exceeds one. So each call of a store sets one deadline (``UNTIL_S``), and the
sockets of the store's own client keep it for the whole call: connect, handshake, reply, and a second attempt that
sends the script. If the call has just begun, the first receive of a reply waits for the socket's whole timeout; so the
usual call changes no timeout.

A web request has one ``Patience`` for all its calls: those that admit it and those that give back at its end.

Over asyncio a whole call has a deadline already. But no deadline interrupts a parser that never waits, so the sizes of
replies are limited there, too, before a parser reads them: see replies.pyx.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any

from forebay.redis.transport.replies import ReplySizes
from forebay.redis.transport.timed_socket import UNTIL_S, TimedSocket

__all__ = ["Patience", "keep_deadlines", "with_bounded_replies"]

# A call without time left still connects if that succeeds at once, so that permits that are given back are sent.
LEAST_S = 0.001


class Patience:
    """The time that one web request still waits for a store, over all its calls.

    With no time left, a call is still sent, and its reply is not awaited.
    """

    __slots__ = ("left_s",)

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s


def keep_deadlines(pool: Any, timeout_s: float, *, of_cluster: bool = False) -> None:
    """Make the connections of a pool keep the deadlines of calls. The pool must not have made a connection yet.

    Connect and handshake together take at most `timeout_s`, and at most the time that the call has left. If a name has
    several addresses, the attempt at each may take that long. The name's resolution has no deadline.
    """
    base: Any = pool.connection_class
    on_connect = pool.connection_kwargs.get("redis_connect_func") or base.on_connect

    def left_s() -> float:
        return max(min(timeout_s, UNTIL_S.get() - time.monotonic()), LEAST_S)

    class TimedConnection(base):  # type: ignore[misc]
        def _connect(self) -> TimedSocket:
            until_s = min(time.monotonic() + timeout_s, UNTIL_S.get())
            self.socket_connect_timeout = left_s()
            return TimedSocket(super()._connect(), timeout_s, until_s, of_cluster=of_cluster)

        # Only a connection over TLS calls this.
        def _wrap_socket_with_ssl(self, sock: Any) -> Any:
            sock.settimeout(left_s())
            encrypted = super()._wrap_socket_with_ssl(sock)
            encrypted.settimeout(timeout_s)
            return encrypted

        def end_handshake(self) -> None:
            if self._sock is not None:
                self._sock.end_handshake()

    def shake_hands(connection: Any) -> None:
        try:
            on_connect(connection)
        except BaseException:
            # After an error that isn't its own, redis-py would use the connection later without the rest of the
            # handshake: in another database, for example.
            connection.disconnect()
            raise
        connection.end_handshake()

    pool.connection_class = TimedConnection
    pool.connection_kwargs["redis_connect_func"] = shake_hands


class BoundedReader:
    """A connection's ``StreamReader`` that checks the size of what redis-py reads from it."""

    def __init__(self, reader: Any, *, of_cluster: bool) -> None:
        self._reader = reader
        self._check_size = ReplySizes(of_cluster=of_cluster).take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def _checked(self, received: bytes) -> bytes:
        self._check_size(received, len(received))
        return received

    async def read(self, size: int) -> bytes:
        return self._checked(await self._reader.read(size))

    async def readexactly(self, size: int) -> bytes:
        return self._checked(await self._reader.readexactly(size))

    async def readline(self) -> bytes:
        return self._checked(await self._reader.readline())


def with_bounded_replies(kind: Any, *, of_cluster: bool = False) -> Any:
    """A subclass of an asyncio connection class that limits the sizes of replies.

    A connection whose handshake failed is closed. After an error that isn't its own, redis-py would use it later
    without the rest of the handshake: in another database, for example.
    """

    class BoundedConnection(kind):  # type: ignore[misc]
        _reader: Any

        async def _connect(self) -> None:
            await super()._connect()
            self._reader = BoundedReader(self._reader, of_cluster=of_cluster)

        # redis-py connects by either method; version 5 has only the first.
        async def connect(self) -> None:
            await self._closed_on_error(super().connect())

        async def connect_check_health(self, *arguments: Any, **options: Any) -> None:
            await self._closed_on_error(super().connect_check_health(*arguments, **options))

        async def _closed_on_error(self, connecting: Coroutine[Any, Any, None]) -> None:
            try:
                await connecting
            except BaseException:
                await self.disconnect(nowait=True)
                raise

    return BoundedConnection

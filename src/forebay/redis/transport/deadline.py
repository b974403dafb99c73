"""Bounds for what redis-py gives none: a whole handshake, and a whole answer however many parts it comes in.

redis-py gives each operation on a socket a timeout of its own. A server that takes its time for every step of the
handshake, or sends its answers a byte at a time, never runs into one. So each call of a store says until when it waits
(``UNTIL_S``), and the sockets of the store's own client keep to that in all that the call takes: to connect, to shake
hands, to be answered, and to be sent again with its script. An operation that is the first of its answer waits for the
whole timeout, as ever, if the call has just begun; so in the usual call no timeout is changed.

A web request has one ``Patience`` for all its calls: for whether it is let in, and for what it gives back at its end.

Over asyncio a whole call has its deadline. But no deadline ends what a parser does without waiting, so the sizes of
answers are bounded there, too, before a parser sees them: see replies.pyx.
"""

from __future__ import annotations

import time
from typing import Any

from forebay.redis.transport.replies import ReplySizes
from forebay.redis.transport.timed_socket import UNTIL_S, TimedSocket

__all__ = ["Patience", "keep_deadlines", "with_bounded_replies"]

# Who has no time left still connects if that is done at once, so that what is given back is sent.
LEAST_S = 0.001


class Patience:
    """How long one web request still waits for a store, in all its calls.

    Without any left, what is sent is sent, and its answer isn't waited for.
    """

    __slots__ = ("left_s",)

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s


def keep_deadlines(pool: Any, timeout_s: float) -> None:
    """Let the connections of a pool that has made none yet keep them.

    To connect and the handshake take no more than `timeout_s` together, or than is left of the call that they are for,
    where a name has one address: each gets what is left when it is tried. To look the name up takes as long as that
    takes.
    """
    kind: Any = pool.connection_class
    on_connect = pool.connection_kwargs.get("redis_connect_func") or kind.on_connect

    def left_s() -> float:
        return max(min(timeout_s, UNTIL_S.get() - time.monotonic()), LEAST_S)

    def connect(connection: Any) -> TimedSocket:
        until_s = min(time.monotonic() + timeout_s, UNTIL_S.get())
        connection.socket_connect_timeout = left_s()
        return TimedSocket(kind._connect(connection), timeout_s, until_s)

    def begin_tls(connection: Any, sock: Any) -> Any:
        sock.settimeout(left_s())
        encrypted = kind._wrap_socket_with_ssl(connection, sock)
        encrypted.settimeout(timeout_s)
        return encrypted

    def shake_hands(connection: Any) -> None:
        on_connect(connection)
        if connection._sock is not None:
            connection._sock.end_handshake()

    # Only a connection over TLS calls the second.
    methods = {"_connect": connect, "_wrap_socket_with_ssl": begin_tls}
    pool.connection_class = type(kind.__name__, (kind,), methods)
    pool.connection_kwargs["redis_connect_func"] = shake_hands


class BoundedReader:
    """A connection's ``StreamReader``, as far as redis-py reads from it."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._check_size = ReplySizes().take

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


def with_bounded_replies(kind: Any) -> Any:
    """A class of asyncio connections that is like this one, but for the sizes of answers."""

    async def connect(connection: Any) -> None:
        await kind._connect(connection)
        connection._reader = BoundedReader(connection._reader)

    return type(kind.__name__, (kind,), {"_connect": connect})

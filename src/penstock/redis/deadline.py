"""Bounds for what redis-py gives none: a whole handshake, and a whole answer however many parts it comes in.

redis-py gives each operation on a socket a timeout of its own. A server that takes its time for every step of the
handshake, or sends its answers a byte at a time, never runs into one. So the sockets of a store's own client count from
when a connection, or an answer, was first waited for. An operation that is the first of its answer waits for the whole
timeout, as ever; so in the usual call nothing is computed and no timeout is changed.

Over asyncio a whole call has its deadline. But no deadline ends what a parser does without waiting, so the sizes of
answers are bounded there, too, before a parser sees them: see replies.pyx.
"""

from __future__ import annotations

import time
from typing import Any

from penstock.redis.replies import ReplySizes
from penstock.redis.timed_socket import TimedSocket

__all__ = ["keep_deadlines", "with_bounded_replies"]


def keep_deadlines(pool: Any, timeout_s: float) -> None:
    """Let the connections of a pool that has made none yet keep them.

    To connect and the handshake take no more than `timeout_s` together, where a name has one address: each gets what is
    left when it is tried. To look the name up takes as long as it takes.
    """
    kind: Any = pool.connection_class
    on_connect = pool.connection_kwargs.get("redis_connect_func") or kind.on_connect

    def connect(connection: Any) -> TimedSocket:
        until_s = time.monotonic() + timeout_s
        return TimedSocket(kind._connect(connection), timeout_s, until_s)

    def shake_hands(connection: Any) -> None:
        on_connect(connection)
        if connection._sock is not None:
            connection._sock.end_handshake()

    pool.connection_class = type(kind.__name__, (kind,), {"_connect": connect})
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

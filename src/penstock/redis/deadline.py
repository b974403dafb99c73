"""Deadlines for what redis-py gives none: a whole handshake, and a whole answer however many parts it comes in.

redis-py gives each operation on a socket a timeout of its own. A server that takes its time for every step of the
handshake, or sends its answers a byte at a time, never runs into one. So the sockets of a store's own client count from
when a connection, or an answer, was first waited for. An operation that is the first of its answer waits for the whole
timeout, as ever; so in the usual call nothing is computed and no timeout is changed.
"""

from __future__ import annotations

import time
from typing import Any

from penstock.redis.timed_socket import TimedSocket

__all__ = ["keep_deadlines"]


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

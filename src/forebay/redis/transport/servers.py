"""Calls to a server over connections of a client's pool, none repeated.

Not by the client's own ``execute_command``, for two reasons. It repeats a call whose answer is late, as often as its
retries say, and each may be charged. And if an exception comes from elsewhere (an interrupt, a time limit that is a
signal's) between the call and its answer, it gives the connection back to the pool with the answer still to come: the
next one to ask would read it as its own. Here a connection whose answers haven't all been read is closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

__all__ = ["AsyncServer", "Call", "Server", "exchange", "exchange_all"]

Call = tuple[Any, ...]


def exchange(pool: Any, call: Call) -> Any:
    """One call's answer."""
    connection = pool.get_connection()
    try:
        connection.send_command(*call)
        reply = connection.read_response()
        if type(reply) is not list:
            # No script of ours answers so: what has been read is a rest of something else, and more may follow.
            connection.disconnect()
    except ResponseError:
        pool.release(connection)
        raise
    except BaseException:
        # If that is interrupted in its turn, the connection isn't given back at all.
        connection.disconnect()
        pool.release(connection)
        raise
    pool.release(connection)
    return reply


def is_answer(reply: Any) -> bool:
    return type(reply) is list or isinstance(reply, ResponseError)


def exchange_all(pool: Any, calls: Sequence[Call]) -> list[Any]:
    """All of them, sent before the first answer is read. For each its answer, or the server's error."""
    replies: list[Any] = []
    connection = pool.get_connection()
    try:
        connection.send_packed_command(connection.pack_commands(calls))
        for _ in calls:
            try:
                replies.append(connection.read_response())
            except ResponseError as error:
                replies.append(error)
        if not all(map(is_answer, replies)):
            connection.disconnect()
    except BaseException:
        connection.disconnect()
        pool.release(connection)
        raise
    pool.release(connection)
    return replies


class Server:
    """A ``redis.Redis``; `make` makes another one, if it is ours."""

    def __init__(self, client: Any, make: Callable[[], Any] | None = None) -> None:
        self._is_ours = make is not None
        self._make = make or (lambda: client)
        self._clients = {os.getpid(): client}

    @property
    def _client(self) -> Any:
        """This process's."""
        pid = os.getpid()
        client = self._clients.get(pid)
        if client is None:
            for number, parents in list(self._clients.items()):
                if number != pid:
                    # A fork may have left a lock of the parent's client held, by a thread that isn't here. That client
                    # closes nothing, so that its end doesn't wait for the lock either.
                    if self._is_ours:
                        parents.auto_close_connection_pool = False
                    self._clients.pop(number, None)
            # Threads that come here at once take the first one's: another's end would end connections that are in use.
            client = self._clients.setdefault(pid, self._make())
        return client

    @property
    def connection_pool(self) -> Any:
        return self._client.connection_pool

    def execute_command(self, *call: Any) -> Any:
        return exchange(self.connection_pool, call)

    def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        return exchange_all(self.connection_pool, calls)

    def script_load(self, text: str) -> None:
        self._client.script_load(text)

    def close(self) -> None:
        self._client.close()


class AsyncServer:
    """A ``redis.asyncio.Redis``."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.connection_pool = client.connection_pool

    async def execute_command(self, *call: Any) -> Any:
        """As ``exchange``."""
        pool = self.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_command(*call)
            reply = await connection.read_response()
            if type(reply) is not list:
                await connection.disconnect()
        except ResponseError:
            await pool.release(connection)
            raise
        except BaseException:
            await connection.disconnect(nowait=True)
            await pool.release(connection)
            raise
        await pool.release(connection)
        return reply

    async def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        """As ``exchange_all``."""
        pool = self.connection_pool
        replies: list[Any] = []
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command(connection.pack_commands(calls))
            for _ in calls:
                try:
                    replies.append(await connection.read_response())
                except ResponseError as error:
                    replies.append(error)
            if not all(map(is_answer, replies)):
                await connection.disconnect()
        except BaseException:
            await connection.disconnect(nowait=True)
            await pool.release(connection)
            raise
        await pool.release(connection)
        return replies

    async def aclose(self) -> None:
        await self._client.aclose()

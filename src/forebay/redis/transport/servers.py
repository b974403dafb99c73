"""Calls to a single Redis server over the connections of a client's pool. No call is repeated.

The client's own ``execute_command`` is not used, for two reasons. It repeats a call whose reply is late, and Redis may
charge each repetition. And an exception from elsewhere (an interrupt, a signal handler's time limit) may come between
the call and its reply. The client then returns the connection to the pool with the reply unread, and the next call on
that connection would read it as its own. Here a connection is closed unless all its replies have been read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from forebay.redis.transport.client_errors import raise_as_redis_error

__all__ = ["AsyncServer", "Call", "Server", "exchange", "exchange_all"]

Call = tuple[Any, ...]


def exchange(pool: Any, call: Call) -> Any:
    """Send one call and return its reply."""
    connection = pool.get_connection()
    try:
        connection.send_command(*call)
        reply = connection.read_response()
        if type(reply) is not list:
            # Every script replies with a list. This reply belongs to another call, and more such replies may follow.
            connection.disconnect()
    except ResponseError:
        pool.release(connection)
        raise
    except BaseException:
        # If a second interrupt ends this, the connection isn't released at all.
        connection.disconnect()
        pool.release(connection)
        raise
    pool.release(connection)
    return reply


def is_answer(reply: Any) -> bool:
    return type(reply) is list or isinstance(reply, ResponseError)


def exchange_all(pool: Any, calls: Sequence[Call]) -> list[Any]:
    """Send all calls before the first reply is read. Return for each call its reply or the server's error."""
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
    """A ``redis.Redis`` client. `make` makes another one for a forked process, if the store owns the client."""

    def __init__(self, client: Any, make: Callable[[], Any] | None = None) -> None:
        self._is_ours = make is not None
        self._make = make or (lambda: client)
        self._clients = {os.getpid(): client}

    @property
    def _client(self) -> Any:
        """The client of this process."""
        pid = os.getpid()
        client = self._clients.get(pid)
        if client is None:
            for number, parents in self._clients.copy().items():
                if number != pid:
                    # A thread of the parent may have held a lock of its client at the fork, and the child has no such
                    # thread. So the child's copy closes nothing: its finalizer would wait for that lock.
                    if self._is_ours:
                        parents.auto_close_connection_pool = False
                    self._clients.pop(number, None)
            # Threads that come here at once all take the first client: the end of another one would close connections
            # in use.
            client = self._clients.setdefault(pid, self._make())
        return client

    @property
    def connection_pool(self) -> Any:
        return self._client.connection_pool

    def execute_command(self, *call: Any) -> Any:
        try:
            return exchange(self.connection_pool, call)
        except Exception as error:
            raise_as_redis_error(error)
            raise

    def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        try:
            return exchange_all(self.connection_pool, calls)
        except Exception as error:
            raise_as_redis_error(error)
            raise

    def script_load(self, text: str) -> None:
        try:
            self._client.script_load(text)
        except Exception as error:
            raise_as_redis_error(error)
            raise

    def close(self) -> None:
        self._client.close()


class AsyncServer:
    """A ``redis.asyncio.Redis`` client."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.connection_pool = client.connection_pool

    async def execute_command(self, *call: Any) -> Any:
        try:
            return await self._exchange(call)
        except Exception as error:
            raise_as_redis_error(error)
            raise

    async def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        try:
            return await self._exchange_all(calls)
        except Exception as error:
            raise_as_redis_error(error)
            raise

    async def _exchange(self, call: Call) -> Any:
        """As ``exchange``, awaited."""
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

    async def _exchange_all(self, calls: Sequence[Call]) -> list[Any]:
        """As ``exchange_all``, awaited."""
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

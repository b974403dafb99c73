"""Calls to a Redis cluster: each goes to the node of its keys. No call is repeated.

redis-py's cluster clients repeat a call that has no reply, and so would charge a request twice. They don't if the call
names its node. They still follow the redirection of a slot that has moved: a node that redirects has executed nothing.
For the rest see servers.py.

After a failure, other nodes may own the slots. redis-py refreshes its slot table from one node after the other, and
each silent node costs a deadline. So in the sync client no call waits for a refresh: a thread does it, one at a time
and at most one each second, and ends when it is done. Until then calls go to the nodes that owned the slots before. A
fork during a refresh leaves the thread and its locks in the parent, so a child makes a client of its own.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import redis
import redis.connection
from redis.asyncio.cluster import PipelineCommand
from redis.exceptions import (
    AskError,
    ClusterDownError,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from forebay.redis.transport.client_errors import raise_as_redis_error
from forebay.redis.transport.deadline import keep_deadlines, with_bounded_replies
from forebay.redis.transport.servers import Call, exchange, exchange_all
from forebay.redis.transport.timed_socket import UNTIL_S

__all__ = ["AsyncCluster", "Cluster", "TimedPool", "bounded", "cluster_url"]

REFRESH_EVERY_S: Final = 1.0

# Errors of a node that has executed nothing, as it doesn't own the slot, or not all of its keys.
_REDIRECTIONS: Final = (AskError, TryAgainError)
# After these errors, other nodes may own the slots.
_LOST: Final = (redis.ConnectionError, redis.TimeoutError, ClusterDownError)


def cluster_url(url: str) -> str | None:
    """The URL by which redis-py makes a cluster client. None if `url` is a single server's."""
    scheme, found, rest = url.partition("+cluster://")
    return f"{scheme}://{rest}" if found and scheme in ("redis", "rediss") else None


def key_of(call: Call) -> bytes:
    """The first key of an EVAL or EVALSHA call. All its keys are in one slot."""
    key: bytes = call[3]
    return key


def by_node(calls: Sequence[Call], node_of: Callable[[bytes], Any]) -> list[tuple[Any, list[int]]]:
    """Group calls by node: each node with the indexes of its calls."""
    found: dict[str, tuple[Any, list[int]]] = {}
    for number, call in enumerate(calls):
        node = node_of(key_of(call))
        found.setdefault(node.name, (node, []))[1].append(number)
    return list(found.values())


def with_error(replies: list[Any], error: Exception) -> list[Any]:
    """Fill in `error` for each missing reply."""
    return [error if reply is None else reply for reply in replies]


def is_lost(result: Any) -> bool:
    """Whether a result of redis-py's pipeline is any error but the server's: the call has no reply."""
    return isinstance(result, Exception) and not isinstance(result, ResponseError)


@contextmanager
def as_redis_errors() -> Generator[None]:
    """As ``raise_as_redis_error``, for a block."""
    try:
        yield
    except Exception as error:
        raise_as_redis_error(error)
        raise


class TimedPool(redis.connection.ConnectionPool):
    """The connection pool of one node, for a client that the store owns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        keep_deadlines(self, options["socket_timeout"], of_cluster=True)


class ProcessClient:
    """The client of a ``Cluster`` in one process, and the thread that refreshes its slot table."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.is_deciding = threading.Lock()
        """Held by the thread that decides whether to start a refresh. The other threads need not wait for it."""
        self.refresher: threading.Thread | None = None
        self.next_refresh_s = -math.inf


class Cluster:
    """A ``redis.cluster.RedisCluster`` client. It is made on first use, because making it opens connections."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._is_closed = False
        # A child keeps its parent's client: its finalizer could wait for a lock that a thread of the parent held.
        self._processes: dict[int, ProcessClient] = {}

    def execute_command(self, *call: Any) -> Any:
        with as_redis_errors():
            node = self._node_of(key_of(call))
        try:
            with as_redis_errors():
                try:
                    return exchange(self._pool_of(node), call)
                except _REDIRECTIONS:
                    return self._cluster().execute_command(*call, target_nodes=node)
        except _LOST:
            self._refresh_slots()
            raise

    def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        """Send the calls node by node; all calls to a node before its first reply is read.

        After a node fails, nothing more is sent. The calls without a reply get that node's error.
        """
        replies: list[Any] = [None] * len(calls)
        with as_redis_errors():
            nodes = by_node(calls, self._node_of)
        for node, numbers in nodes:
            try:
                with as_redis_errors():
                    answers = exchange_all(self._pool_of(node), [calls[number] for number in numbers])
            except RedisError as error:
                self._refresh_slots()
                return with_error(replies, error)
            for number, answer in zip(numbers, answers, strict=True):
                replies[number] = answer
        # In order, so that the calls of one key keep their order.
        for number, reply in enumerate(replies):
            if isinstance(reply, _REDIRECTIONS):
                try:
                    replies[number] = self.execute_command(*calls[number])
                except RedisError as error:
                    replies[number] = error
        return replies

    def script_load(self, text: str) -> None:
        with as_redis_errors():
            self._cluster().script_load(text)

    def close(self) -> None:
        self._is_closed = True
        if own := self._processes.get(os.getpid()):
            self._disconnect(own.cluster)

    def _disconnect(self, cluster: Any) -> None:
        """Close all connections. redis-py 8's own ``close`` doesn't: the nodes' clients leave them to their pools."""
        for node in cluster.get_nodes():
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect()

    def _own(self) -> ProcessClient:
        pid = os.getpid()
        # Without a lock, under which concurrent threads would wait for each other's connection attempts. All take the
        # client that is stored first.
        return self._processes.get(pid) or self._processes.setdefault(pid, ProcessClient(self._make()))

    def _cluster(self) -> Any:
        return self._own().cluster

    def _pool_of(self, node: Any) -> Any:
        return self._cluster().get_redis_connection(node).connection_pool

    def _node_of(self, key: bytes) -> Any:
        try:
            return self._cluster().get_node_from_key(key)
        except SlotNotCoveredError:
            # No call reaches a node of an uncovered slot, so only this refresh can find its new owner.
            self._refresh_slots()
            raise

    def _refresh_slots(self) -> None:
        """Start a refresh of the slot table after an error that a moved slot may have caused. Does not wait for it."""
        own = self._own()
        if not own.is_deciding.acquire(blocking=False):
            return
        try:
            self._start_refresh(own)
        finally:
            own.is_deciding.release()

    def _start_refresh(self, own: ProcessClient) -> None:
        if time.monotonic() < own.next_refresh_s or (own.refresher is not None and own.refresher.is_alive()):
            return
        own.next_refresh_s = time.monotonic() + REFRESH_EVERY_S
        cluster = own.cluster

        def refresh() -> None:
            # Free-threaded CPython 3.14 gives a new thread the context of the call that has failed, with its deadline.
            UNTIL_S.set(math.inf)
            # The next call meets the error, if it lasts.
            with suppress(Exception):
                cluster.nodes_manager.initialize()
            if self._is_closed:
                # ``close`` was called during the refresh.
                self._disconnect(cluster)

        own.refresher = threading.Thread(target=refresh, name="forebay-cluster", daemon=True)
        # If no thread can be started, the next failure tries again.
        with suppress(RuntimeError):
            own.refresher.start()


def bounded(cluster: Any) -> Any:
    """Make the future connections of an asyncio cluster client limit the sizes of replies. It must have none yet."""
    nodes = cluster.nodes_manager
    # For the nodes that it will find, and for its startup nodes.
    kind = nodes.connection_kwargs.get("connection_class", redis.asyncio.Connection)
    kind = with_bounded_replies(kind, of_cluster=True)
    nodes.connection_kwargs["connection_class"] = kind
    for node in nodes.startup_nodes.values():
        node.connection_class = kind
    return cluster


class AsyncCluster:
    """A ``redis.asyncio.cluster.RedisCluster`` client."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    async def execute_command(self, *call: Any) -> Any:
        with as_redis_errors():
            # Reads the slot table if it is unknown or was dropped.
            await self._cluster.initialize()
            node = self._cluster.get_node_from_key(key_of(call))
            return await self._cluster.execute_command(*call, target_nodes=node)

    async def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        """As ``Cluster.execute_many``, awaited."""
        replies: list[Any] = [None] * len(calls)
        with as_redis_errors():
            await self._cluster.initialize()
            nodes = by_node(calls, self._cluster.get_node_from_key)
        for node, numbers in nodes:
            commands = [PipelineCommand(number, *calls[number]) for number in numbers]
            try:
                with as_redis_errors():
                    await node.execute_pipeline(commands)
                    results = [command.result for command in commands]
                    for number, result in zip(numbers, results, strict=True):
                        if not is_lost(result):
                            replies[number] = result
                    for result in results:
                        if is_lost(result) or isinstance(result, ClusterDownError):
                            raise result
            except RedisError as error:
                # The next call reads the slot table again.
                await self._cluster.aclose()
                return with_error(replies, error)
        for number, reply in enumerate(replies):
            if isinstance(reply, _REDIRECTIONS):
                try:
                    replies[number] = await self.execute_command(*calls[number])
                except RedisError as error:
                    replies[number] = error
        return replies

    async def aclose(self) -> None:
        await self._cluster.aclose()

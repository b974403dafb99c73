"""Cluster clients as stores need them: each call goes to the node of its keys, and none is repeated.

redis-py's cluster clients ask again by themselves when no answer has come, and so would charge a request twice. They
don't if a call names its node. They still follow a slot that has moved: whoever redirects has done nothing. For the
rest see servers.py.

After a failure other nodes may have the slots. To find out takes a deadline for each silent node that is asked, and
redis-py asks one after the other. So in the sync client no call waits for that: a thread of its own asks, one at a time
and at most one each second, and ends when it knows; until then calls go where the slots were. A fork that comes
meanwhile leaves the thread and what it has locked in the parent, so a child begins with a client of its own.
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
    ClusterError,
    RedisClusterException,
    RedisError,
    SlotNotCoveredError,
    TryAgainError,
)

from forebay.redis.transport.deadline import keep_deadlines, with_bounded_replies
from forebay.redis.transport.servers import Call, exchange, exchange_all

__all__ = ["AsyncCluster", "Cluster", "TimedPool", "bounded", "cluster_url"]

LOOK_EVERY_S: Final = 1.0

# What a node says that has done nothing, as the slot isn't its own, or not altogether.
_REDIRECTIONS: Final = (AskError, TryAgainError)
# After these, other nodes may have the slots.
_LOST: Final = (redis.ConnectionError, redis.TimeoutError, ClusterDownError)


def cluster_url(url: str) -> str | None:
    """What redis-py makes a cluster's client of; None if the URL is of a single server."""
    scheme, found, rest = url.partition("+cluster://")
    return f"{scheme}://{rest}" if found and scheme in ("redis", "rediss") else None


def key_of(call: Call) -> bytes:
    """Of EVAL or EVALSHA: all keys are in one slot."""
    key: bytes = call[3]
    return key


def by_node(calls: Sequence[Call], node_of: Callable[[bytes], Any]) -> list[tuple[Any, list[int]]]:
    """The nodes, with their calls' numbers."""
    found: dict[str, tuple[Any, list[int]]] = {}
    for number, call in enumerate(calls):
        node = node_of(key_of(call))
        found.setdefault(node.name, (node, []))[1].append(number)
    return list(found.values())


def with_error(replies: list[Any], error: Exception) -> list[Any]:
    """Instead of those that are missing."""
    return [error if reply is None else reply for reply in replies]


@contextmanager
def as_redis_errors() -> Generator[None]:
    """redis-py's cluster clients raise some that are none of its others."""
    try:
        yield
    except RedisClusterException as error:
        raise ClusterError(f"{type(error).__name__}: {error}") from error


class TimedPool(redis.connection.ConnectionPool):
    """Of one node, for a client of ours."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        keep_deadlines(self, options["socket_timeout"])


class OfProcess:
    """What a ``Cluster`` has in one process."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.looker: threading.Thread | None = None
        self.next_look_s = -math.inf


class Cluster:
    """A ``redis.cluster.RedisCluster``, which is made when it is first used: that takes connections."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._is_closed = False
        # A parent's is kept, as its end might wait for a lock that a thread of the parent has held.
        self._processes: dict[int, OfProcess] = {}

    def execute_command(self, *call: Any) -> Any:
        with as_redis_errors():
            node = self._node_of(key_of(call))
            try:
                return exchange(self._pool_of(node), call)
            except _REDIRECTIONS:
                return self._cluster().execute_command(*call, target_nodes=node)
            except _LOST:
                self._look_again()
                raise

    def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        """One node after the other; all calls to a node before its first answer is read.

        After a node that is lost nothing more is sent: these calls have its error instead of a reply.
        """
        replies: list[Any] = [None] * len(calls)
        with as_redis_errors():
            for node, numbers in by_node(calls, self._node_of):
                try:
                    answers = exchange_all(self._pool_of(node), [calls[number] for number in numbers])
                except _LOST as error:
                    self._look_again()
                    return with_error(replies, error)
                for number, answer in zip(numbers, answers, strict=True):
                    replies[number] = answer
        # In their order, so that those of one key keep theirs.
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
        """As its own ``close`` of redis-py 8 doesn't: the nodes' clients leave their connections to their pools."""
        for node in cluster.get_nodes():
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect()

    def _own(self) -> OfProcess:
        pid = os.getpid()
        # No lock: threads that come here at once would wait for each other for longer than one of them does. All take
        # the first one's.
        return self._processes.get(pid) or self._processes.setdefault(pid, OfProcess(self._make()))

    def _cluster(self) -> Any:
        return self._own().cluster

    def _pool_of(self, node: Any) -> Any:
        return self._cluster().get_redis_connection(node).connection_pool

    def _node_of(self, key: bytes) -> Any:
        try:
            return self._cluster().get_node_from_key(key)
        except SlotNotCoveredError:
            # Nothing else would make it look whether there is a node again.
            self._look_again()
            raise

    def _look_again(self) -> None:
        """Which node has which slots, after an error that may be for that. Waits for nobody."""
        own = self._own()
        if time.monotonic() < own.next_look_s or (own.looker is not None and own.looker.is_alive()):
            return
        own.next_look_s = time.monotonic() + LOOK_EVERY_S
        cluster = own.cluster

        def look() -> None:
            # What is wrong, the next call finds out.
            with suppress(Exception):
                cluster.nodes_manager.initialize()
            if self._is_closed:
                # Meanwhile.
                self._disconnect(cluster)

        own.looker = threading.Thread(target=look, name="forebay-cluster", daemon=True)
        # If there is no room for a thread, a later failure tries again.
        with suppress(RuntimeError):
            own.looker.start()


def bounded(cluster: Any) -> Any:
    """An asyncio cluster's client that has no connections yet: those that it makes bound the sizes of answers."""
    nodes = cluster.nodes_manager
    # Of all nodes that it will find, and of those that it begins with.
    kind = with_bounded_replies(nodes.connection_kwargs.get("connection_class", redis.asyncio.Connection))
    nodes.connection_kwargs["connection_class"] = kind
    for node in nodes.startup_nodes.values():
        node.connection_class = kind
    return cluster


class AsyncCluster:
    """A ``redis.asyncio.cluster.RedisCluster``."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    async def execute_command(self, *call: Any) -> Any:
        with as_redis_errors():
            # Which node has which slots, if that isn't known, or not any more.
            await self._cluster.initialize()
            node = self._cluster.get_node_from_key(key_of(call))
            return await self._cluster.execute_command(*call, target_nodes=node)

    async def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        """As ``Cluster`` does."""
        replies: list[Any] = [None] * len(calls)
        with as_redis_errors():
            await self._cluster.initialize()
            for node, numbers in by_node(calls, self._cluster.get_node_from_key):
                commands = [PipelineCommand(number, *calls[number]) for number in numbers]
                try:
                    await node.execute_pipeline(commands)
                    for number, command in zip(numbers, commands, strict=True):
                        replies[number] = command.result
                    for command in commands:
                        if isinstance(command.result, _LOST):
                            raise command.result
                except _LOST as error:
                    # So that it looks again which node has which slots.
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

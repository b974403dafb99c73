"""Cluster clients as stores need them: each call goes to the node of its keys, and none is repeated.

redis-py's cluster clients ask again by themselves when no answer has come, and so would charge a request twice. They
don't if a call names its node. They still follow a slot that has moved: whoever redirects has done nothing. For the
rest see servers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import redis
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

from penstock.redis.servers import Call, exchange, exchange_all

__all__ = ["AsyncCluster", "Cluster", "cluster_url"]

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


@contextmanager
def as_redis_errors() -> Generator[None]:
    """redis-py's cluster clients raise some that are none of its others."""
    try:
        yield
    except RedisClusterException as error:
        raise ClusterError(f"{type(error).__name__}: {error}") from error


class Cluster:
    """A ``redis.cluster.RedisCluster``, which is made when it is first used: that takes connections."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def execute_command(self, *call: Any) -> Any:
        with as_redis_errors():
            node = self._node_of(key_of(call))
            try:
                with self._looking_again():
                    return exchange(self._pool_of(node), call)
            except _REDIRECTIONS:
                return self._cluster().execute_command(*call, target_nodes=node)

    def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        """One node after the other; all calls to a node before its first answer is read."""
        replies: list[Any] = [None] * len(calls)
        with as_redis_errors():
            for node, numbers in by_node(calls, self._node_of):
                with self._looking_again():
                    answers = exchange_all(self._pool_of(node), [calls[number] for number in numbers])
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
        if self._made is not None:
            self._made.close()

    def _cluster(self) -> Any:
        # No lock: threads that come here at once would wait for each other for longer than one of them does.
        if self._made is None:
            self._made = self._make()
        return self._made

    def _pool_of(self, node: Any) -> Any:
        return self._cluster().get_redis_connection(node).connection_pool

    def _node_of(self, key: bytes) -> Any:
        cluster = self._cluster()
        try:
            return cluster.get_node_from_key(key)
        except SlotNotCoveredError:
            # Nothing else would make it look whether there is a node again.
            cluster.nodes_manager.initialize()
            return cluster.get_node_from_key(key)

    @contextmanager
    def _looking_again(self) -> Generator[None]:
        """Which node has which slots, after an error that may be for that."""
        try:
            yield
        except _LOST:
            with suppress(RedisError, RedisClusterException):
                self._cluster().nodes_manager.initialize()
            raise


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

    async def script_load(self, text: str) -> None:
        with as_redis_errors():
            await self._cluster.script_load(text)

    async def execute_many(self, calls: Sequence[Call]) -> list[Any]:
        """As ``Cluster`` does."""
        replies: list[Any] = [None] * len(calls)
        with as_redis_errors():
            await self._cluster.initialize()
            for node, numbers in by_node(calls, self._cluster.get_node_from_key):
                commands = [PipelineCommand(number, *calls[number]) for number in numbers]
                try:
                    await node.execute_pipeline(commands)
                    for command in commands:
                        if isinstance(command.result, _LOST):
                            raise command.result
                except _LOST:
                    # So that it looks again which node has which slots.
                    await self._cluster.aclose()
                    raise
                for number, command in zip(numbers, commands, strict=True):
                    replies[number] = command.result
        for number, reply in enumerate(replies):
            if isinstance(reply, _REDIRECTIONS):
                try:
                    replies[number] = await self.execute_command(*calls[number])
                except RedisError as error:
                    replies[number] = error
        return replies

    async def aclose(self) -> None:
        await self._cluster.aclose()

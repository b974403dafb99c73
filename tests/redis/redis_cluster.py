"""A cluster for tests: three masters, and a replica of the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis_server import RedisServer, free_cluster_port, redis_server, until

SLOTS = 16384


@dataclass(frozen=True)
class RedisCluster:
    nodes: list[RedisServer]
    """Three that began as masters, and the one that began as a replica."""

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def ask(self, node: RedisServer, command: str, *arguments: Any) -> Any:
        """The answer as it is: redis-py would make something of it that it knows by both words."""
        with node.client() as client:
            return client.execute_command(*command.split(), *arguments)

    def id_of(self, node: RedisServer) -> str:
        return str(self.ask(node, "CLUSTER MYID").decode())

    def masters(self) -> list[RedisServer]:
        return [node for node in self.nodes if self.ask(node, "ROLE")[0] == b"master"]

    def master_of(self, key: bytes) -> RedisServer:
        """The master that reports itself as the server of a key."""
        for node in self.masters():
            with contextlib.suppress(redis.ResponseError):
                self.ask(node, "EXISTS", key)
                return node
        raise AssertionError(f"no node serves {key!r}")

    def names(self) -> list[bytes]:
        return [name for node in self.masters() for name in self.ask(node, "KEYS", "*")]

    def on_masters(self, command: str) -> None:
        for node in self.masters():
            self.ask(node, command)

    def is_settled(self) -> bool:
        """Whether all nodes agree, and the replica follows."""
        states = [self.ask(node, "CLUSTER INFO").decode().split() for node in self.nodes]
        known = [self.ask(node, "CLUSTER SLOTS") for node in self.nodes]
        return (
            all({"cluster_state:ok", "cluster_known_nodes:4"} <= set(state) for state in states)
            and all(sorted(map(repr, one)) == sorted(map(repr, known[0])) for one in known)
            and len(self.masters()) == 3
            and all(self.ask(node, "ROLE")[3] == b"connected" for node in self.nodes if node not in self.masters())
        )


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[RedisCluster]:
    with contextlib.ExitStack() as stack:
        nodes = []
        for _ in range(4):
            port = free_cluster_port()
            (folder / str(port)).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "15000", "--repl-diskless-sync-delay", "0")
            nodes.append(stack.enter_context(redis_server(*options, "--dir", str(folder / str(port)), port=port)))
        cluster = RedisCluster(nodes)
        for number, node in enumerate(nodes):
            cluster.ask(node, "CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number > 0:
                cluster.ask(node, "CLUSTER MEET", "127.0.0.1", nodes[0].port)
            if number < 3:
                cluster.ask(node, "CLUSTER ADDSLOTS", *range(SLOTS * number // 3, SLOTS * (number + 1) // 3))
        first = cluster.id_of(nodes[0])
        until(lambda: first.encode() in cluster.ask(nodes[3], "CLUSTER NODES"), "the nodes have met")
        until(lambda: _replicates(cluster, nodes[3], first), "the replica knows its master")
        until(cluster.is_settled, "the cluster is settled")
        yield cluster


def _replicates(cluster: RedisCluster, node: RedisServer, master: str) -> bool:
    with contextlib.suppress(redis.ResponseError):
        cluster.ask(node, "CLUSTER REPLICATE", master)
        return True
    return False

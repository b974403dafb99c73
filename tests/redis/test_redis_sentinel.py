"""Limiters over a master that sentinels watch: the client follows a failover."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.retry
import redis.sentinel
from blocking import blocking_store
from redis.backoff import NoBackoff
from redis_server import PATIENCE_S, PROGRAM, RedisServer, answers, free_port, redis_server, until

from forebay import AllOf, Store, StoreUnavailable, TokenBucket
from forebay.redis import AsyncRedisStore, RedisStore

SERVICE = "shop"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    """A master, its replica and their sentinel."""
    folder = tmp_path_factory.mktemp("sentinel")
    with contextlib.ExitStack() as stack:
        options = ("--repl-diskless-sync-delay", "0", "--dir", str(folder))
        master = stack.enter_context(redis_server(*options))
        options = ("--replicaof", "127.0.0.1", str(master.port), *options)
        replica = stack.enter_context(redis_server(*options))
        sentinel = stack.enter_context(sentinel_of(master, folder))
        until(lambda: ask(sentinel, "SENTINEL REPLICAS", SERVICE), "the sentinel knows the replica")
        yield [master, replica, sentinel]


@contextlib.contextmanager
def sentinel_of(master: RedisServer, folder: Path) -> Iterator[RedisServer]:
    port = free_port()
    configuration = folder / "sentinel.conf"
    configuration.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {SERVICE} 127.0.0.1 {master.port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 60000\n"
    )
    process = subprocess.Popen([PROGRAM, str(configuration), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        server = RedisServer(process, port)
        until(lambda: answers(server), "the sentinel answers")
        yield server
    finally:
        process.kill()
        process.wait()


def calm(kind: Any) -> dict[str, Any]:
    """The options of a Sentinel's own clients that a store requires."""
    retry: Any = redis.asyncio.retry.Retry if kind is redis.asyncio.sentinel.Sentinel else redis.retry.Retry
    return {"socket_timeout": PATIENCE_S, "retry": retry(NoBackoff(), 0)}


def ask(server: RedisServer, command: str, *arguments: Any) -> Any:
    with server.client() as client:
        return client.execute_command(*command.split(), *arguments)


def fail_over(servers: list[RedisServer]) -> None:
    master, replica, sentinel = servers
    until(lambda: ask(replica, "ROLE")[3] == b"connected", "the replica follows")
    assert ask(master, "WAIT", 1, int(PATIENCE_S * 1000)) == 1
    until(lambda: begun(sentinel), "the sentinel begins")
    until(lambda: ask(replica, "ROLE")[0] == b"master" and ask(master, "ROLE")[0] == b"slave", "they have changed")
    # The sentinel's reply to clients.
    until(
        lambda: ask(sentinel, "SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)[1] == str(replica.port).encode(),
        "the sentinel names the new master",
    )
    servers[:2] = replica, master


def begun(sentinel: RedisServer) -> bool:
    with contextlib.suppress(redis.ResponseError):
        ask(sentinel, "SENTINEL FAILOVER", SERVICE)
        return True
    return False


def test_a_failover_is_followed(servers: list[RedisServer]) -> None:
    """One failover for both kinds of store: the old master is demoted only after ten seconds."""

    def master_of(kind: Any) -> Any:
        sentinel = kind([("127.0.0.1", servers[2].port)], sentinel_kwargs=calm(kind))
        return sentinel.master_for(SERVICE, socket_timeout=PATIENCE_S)

    def before(store: Any) -> None:
        bucket = TokenBucket(store, "api", "9/hour")
        for _ in range(3):
            assert bucket.allow("ada")

    def after(store: Any) -> None:
        bucket = TokenBucket(store, "api", "9/hour")
        both = AllOf(bucket, TokenBucket(store, "other", "9/hour"))
        # A client that still has a connection to the old master gets one reply that it is none; the script is sent
        # again.
        with contextlib.suppress(StoreUnavailable):
            bucket.peek("ada")
        assert bucket.hit("ada").remaining == 5
        assert bucket.allow_many(["ada", "bob"]) == [True, True]
        assert both.allow("ada")
        assert bucket.peek("ada").remaining == 3

    with (
        blocking_store(lambda: master_of(redis.asyncio.sentinel.Sentinel), True) as store,
        RedisStore(master_of(redis.sentinel.Sentinel), namespace="sync") as other,
    ):
        before(store)
        before(other)
        fail_over(servers)
        after(other)
        after(store)


def test_a_sentinel_without_deadlines_is_refused(servers: list[RedisServer]) -> None:
    make: Any
    for sentinel_kind, make in (
        (redis.sentinel.Sentinel, RedisStore),
        (redis.asyncio.sentinel.Sentinel, AsyncRedisStore),
    ):
        for of_sentinel, of_master in ((None, 1), (1, None)):
            sentinel: Any = sentinel_kind([("127.0.0.1", servers[2].port)], socket_timeout=of_sentinel)
            with pytest.raises(ValueError, match="for ever"):
                make(sentinel.master_for(SERVICE, socket_timeout=of_master))


def test_an_unavailable_sentinel_raises_store_unavailable(is_async: bool) -> None:
    def client() -> Any:
        kind: Any = redis.asyncio.sentinel.Sentinel if is_async else redis.sentinel.Sentinel
        options = {"socket_timeout": 1, "retry": None}
        return kind([("127.0.0.1", free_port())], sentinel_kwargs=options).master_for(SERVICE, socket_timeout=1)

    with blocking_store(client, is_async) as store, pytest.raises(StoreUnavailable, match="No master found"):
        TokenBucket(store, "api", "9/hour").allow("ada")


def test_masters_of_one_name_have_breakers_of_their_own() -> None:
    """The addresses of the sentinels identify a master. No server is called to find that out."""

    def store_of(*ports: int) -> RedisStore:
        kind = redis.sentinel.Sentinel
        sentinel = kind([("127.0.0.1", port) for port in ports], sentinel_kwargs=calm(kind))
        return RedisStore(sentinel.master_for(SERVICE, socket_timeout=PATIENCE_S), host=host, when_unavailable="allow")

    unused = [free_port() for _ in range(2)]
    with Store.private(keys=100) as host:
        first, other, again = store_of(*unused), store_of(unused[0]), store_of(*reversed(unused))
        bucket = TokenBucket(first, "api", "8/hour")
        assert all(bucket.hit("ada").degraded for _ in range(3))
        assert [store.status().state for store in (first, other, again)] == ["open", "closed", "open"]

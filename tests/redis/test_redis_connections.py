"""Connections: no call reads another call's reply, and no call is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.retry
import redis.sentinel
from blocking import Blocking, blocking_store, in_event_loop
from redis.backoff import ConstantBackoff, NoBackoff
from redis_server import PATIENCE_S, RedisServer, until

from forebay import StoreClosed, StoreUnavailable, TokenBucket
from forebay.redis import AsyncRedisStore, RedisStore


class Interrupted(BaseException):
    """An exception that a signal handler raises."""


def client_of(server: RedisServer, is_async: bool, socket_timeout: float = PATIENCE_S) -> Any:
    """A client that retries calls, of those that a store accepts."""
    kind: Any = redis.asyncio.Redis if is_async else redis.Redis
    return kind(host="127.0.0.1", port=server.port, socket_timeout=socket_timeout, retry=never(is_async))


def never(is_async: bool) -> Any:
    return (redis.asyncio.retry.Retry if is_async else redis.retry.Retry)(NoBackoff(), 0)


@pytest.mark.parametrize("is_batch", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("is_before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("method", ["send_packed_command", "read_response"])
@pytest.mark.parametrize("own_client", [False, True], ids=["URL", "client"])
def test_no_call_reads_the_reply_left_by_an_interrupted_one(
    own_client: bool,
    method: str,
    is_before: bool,
    is_batch: bool,
    server: RedisServer,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exhausted limiter and a fresh one share a connection."""
    kind: Any = redis.asyncio.Connection if is_async else redis.Connection
    usual = getattr(kind, method)

    @functools.wraps(usual)
    def interrupted(*arguments: Any, **options: Any) -> Any:
        if not is_before:
            usual(*arguments, **options)
        raise Interrupted

    @functools.wraps(usual)
    async def interrupted_task(*arguments: Any, **options: Any) -> Any:
        if not is_before:
            await usual(*arguments, **options)
        raise Interrupted

    make = functools.partial(client_of, server, is_async)
    server_of, options = (make, {}) if own_client else (server.url, {"timeout": 60})
    with blocking_store(server_of, is_async, **options) as store:
        full, free = TokenBucket(store, "full", "1/hour"), TokenBucket(store, "free", "1000/hour")
        assert full.allow("ada")
        assert free.allow("ada")
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, interrupted_task if is_async else interrupted)
            with pytest.raises(Interrupted):
                free.allow_many(["ada"] * 3) if is_batch else free.allow("ada")
        for _ in range(5):
            assert not full.allow("ada")
            assert free.allow("ada")
            assert full.allow_many(["ada"] * 2) == [False] * 2


@pytest.mark.parametrize("is_batch", [False, True], ids=["one", "batch"])
def test_a_retrying_client_repeats_no_call_of_a_limiter(
    is_batch: bool, server: RedisServer, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops until the client has given up the first attempt. A second attempt would reach it."""
    kind: Any = redis.asyncio.Connection if is_async else redis.Connection
    disconnect = kind.disconnect

    @functools.wraps(disconnect)
    def and_go_on(*arguments: Any, **options: Any) -> Any:
        server.process.send_signal(signal.SIGCONT)
        return disconnect(*arguments, **options)

    with blocking_store(functools.partial(client_of, server, is_async, 0.2), is_async) as store:
        # Afterwards, as a store takes none that has retries.
        store.executor.client._client.set_retry(
            (redis.asyncio.retry.Retry if is_async else redis.retry.Retry)(NoBackoff(), 5)
        )
        bucket = TokenBucket(store, "api", "9/hour")
        assert bucket.allow("ada")
        # Connections that others have left would be ended by the collector meanwhile.
        gc.collect()
        with server.stopped(), monkeypatch.context() as patch:
            patch.setattr(kind, "disconnect", and_go_on)
            with pytest.raises(StoreUnavailable):
                bucket.allow_many(["ada"]) if is_batch else bucket.allow("ada")
    with RedisStore(server.url, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "api", "9/hour")
        # The server has read it when it went on.
        until(lambda: bucket.peek("ada").remaining < 8, "the request has come")
        assert bucket.peek("ada").remaining == 7


def test_a_child_does_not_wait_for_a_lock_of_its_parents_threads(
    redis_store: RedisStore, in_child: Callable[[Callable[[], Any]], Any]
) -> None:
    """redis-py's pool has a lock, which the first call in a child acquires."""
    bucket = TokenBucket(redis_store, "api", "9/hour")
    assert bucket.allow("ada")
    lock = redis_store.executor.client.connection_pool._lock
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE_S)
    pid = os.getpid()
    try:
        assert in_child(lambda: (bucket.hit("ada").remaining, os.getpid() != pid)) == (7, True)
    finally:
        over.set()
        thread.join()
    assert bucket.hit("ada").remaining == 6


def test_connections_that_the_server_has_closed_are_replaced(server: RedisServer, is_async: bool) -> None:
    with blocking_store(server.url, is_async, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "api", "9/hour")
        assert bucket.allow("ada")
        with server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
        (connection,) = store.executor.client.connection_pool._available_connections
        while is_async and not connection._reader.at_eof():
            store.loop.run_until_complete(asyncio.sleep(0.001))  # the loop has to hear of it
        assert bucket.allow("ada")


def test_many_calls_at_once_get_connections(server: RedisServer) -> None:
    """By default, redis-py 8 opens at most a hundred connections."""

    async def body(store: Any) -> None:
        bucket = TokenBucket(store, "api", "1000/hour")
        assert all(await asyncio.gather(*[bucket.allow("ada") for _ in range(150)]))

    in_event_loop(server.url, body, timeout=PATIENCE_S)


def test_a_store_that_is_closed_while_it_is_used(server: RedisServer, is_async: bool) -> None:
    class Broken(Exception):
        """As redis-py's parts fail that are taken away under it."""

    with blocking_store(server.url, is_async, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "api", "9/hour")

        def broken(*call: Any) -> Any:
            store.executor.closed = True
            raise Broken

        store.executor.execute_command = broken
        with pytest.raises(StoreClosed):
            bucket.allow("ada")


# ---- Clients that the user makes -------------------------------------------------------------------------------------


def clients(is_async: bool, port: int, options: dict[str, Any], sentinel_options: dict[str, Any]) -> list[Any]:
    """One client of each kind. None has sent anything yet."""
    kind: Any = redis.asyncio.Redis if is_async else redis.Redis
    sentinels: Any = redis.asyncio.sentinel.Sentinel if is_async else redis.sentinel.Sentinel
    sentinel = sentinels([("127.0.0.1", port)], sentinel_kwargs={"socket_timeout": 0.2, **sentinel_options})
    pool: Any = redis.asyncio.BlockingConnectionPool if is_async else redis.BlockingConnectionPool
    return [
        kind(port=port, socket_timeout=0.2, **options),
        kind(connection_pool=pool(port=port, socket_timeout=0.2, **options)),
        sentinel.master_for("shop", socket_timeout=0.2, **options),
    ]


def test_a_client_that_would_connect_again_and_again_is_refused(is_async: bool) -> None:
    make: Any = AsyncRedisStore if is_async else RedisStore
    retry = redis.asyncio.retry.Retry if is_async else redis.retry.Retry
    for options in (
        {"retry": retry(ConstantBackoff(0.5), 1)},
        {"retry": retry(NoBackoff(), -1)},
        {"retry_on_error": [redis.TimeoutError]},
    ):
        for client in clients(is_async, 1, options, {"retry": never(is_async)}):
            with pytest.raises(ValueError, match=r"127\.0\.0\.1:1|localhost:1.*retry=Retry\(NoBackoff\(\), 0\)"):
                make(client)
    *_, of_sentinel = clients(is_async, 1, {}, {"retry": retry(NoBackoff(), 3)})
    with pytest.raises(ValueError, match="sentinel_kwargs"):
        make(of_sentinel)
    if int(redis.__version__.partition(".")[0]) >= 6:
        # As they are by default.
        default: Any = redis.asyncio.Redis if is_async else redis.Redis
        with pytest.raises(ValueError, match="by default"):
            make(default(socket_timeout=0.2))


def test_a_client_of_replicas_is_refused(is_async: bool) -> None:
    sentinels: Any = redis.asyncio.sentinel.Sentinel if is_async else redis.sentinel.Sentinel
    sentinel = sentinels([("127.0.0.1", 1)], socket_timeout=1)
    make: Any = AsyncRedisStore if is_async else RedisStore
    with pytest.raises(ValueError, match="master_for"):
        make(sentinel.slave_for("shop", socket_timeout=1))


@pytest.mark.parametrize("number", range(3), ids=["client", "pool", "sentinel"])
def test_a_call_connects_once(number: int, is_async: bool) -> None:
    """To a port that accepts connections and sends nothing."""

    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        options = {"retry": never(is_async)}
        make = functools.partial(clients, is_async, silent.getsockname()[1], options, options)
        with blocking_store(lambda: make()[number], is_async) as store, pytest.raises(StoreUnavailable):
            TokenBucket(store, "api", "9/hour").allow("ada")
        silent.settimeout(0.05)
        came = 0
        with contextlib.suppress(TimeoutError):
            while True:
                silent.accept()[0].close()
                came += 1
        assert came == 1


# ---- What is no answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_batch", [False, True], ids=["one", "batch"])
def test_a_connection_is_closed_after_an_unexpected_reply(
    is_batch: bool, server: RedisServer, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next bytes on it would belong to another reply."""
    kind: Any = redis.asyncio.Connection if is_async else redis.Connection

    with blocking_store(server.url, is_async, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "api", "9/hour")
        assert bucket.allow("ada")
        (connection,) = store.executor.client.connection_pool._available_connections
        reads = kind.read_response

        @functools.wraps(reads)
        def other(*arguments: Any, **options: Any) -> Any:
            reads(*arguments, **options)
            return b"OK"

        @functools.wraps(reads)
        async def other_later(*arguments: Any, **options: Any) -> Any:
            await reads(*arguments, **options)
            return b"OK"

        with monkeypatch.context() as patch:
            patch.setattr(kind, "read_response", other_later if is_async else other)
            with pytest.raises(StoreUnavailable, match="b'OK'"):
                bucket.allow_many(["ada"] * 2) if is_batch else bucket.allow("ada")
        assert not connection.is_connected if is_async else connection._sock is None
        assert bucket.allow("ada")


def test_leaked_connections_are_replaced(server: RedisServer, is_async: bool) -> None:
    """An interrupt may come after redis-py has taken a connection out of its pool and before it returns it."""

    with blocking_store(server.url, is_async, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "api", "9/hour")
        pool: Any = store.executor.client.connection_pool
        pool = Blocking(pool, store.loop) if is_async else pool
        lost = [pool.get_connection() for _ in range(120)]
        assert bucket.allow("ada")
        assert len(lost) == 120

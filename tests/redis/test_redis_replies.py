"""Limits for the sizes of replies: redis-py's parsers trust the length that a list declares."""

from __future__ import annotations

import signal
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions
from blocking import blocking_store
from hypothesis import given
from hypothesis import strategies as st
from proxy import proxy
from redis_cluster import RedisCluster
from redis_server import RedisServer

from forebay import FixedWindow, StoreUnavailable, TokenBucket
from forebay.redis import RedisStore
from forebay.redis.transport.replies import ReplySizes

HOSTILE = {
    "a list": b"*2000000000\r\n",
    "a list among numbers": b"*3\r\n:1\r\n:1\r\n*2000000000\r\n",
    "lists that are many together": b"*1000000\r\n*1000000\r\n",
    "a map": b"%600000\r\n",
    "lists in lists": b"*1\r\n" * 100_000,
    "a text": b"$2000000000\r\nxx",
    "an endless line": b"+" + b"x" * (1 << 24),
    "behind a line feed that ends no line": b"+one\n$100\r\n*2000000000\r\n",
    "no length": b"*2_000_000_000\r\n",
    "a length of many digits": b"*" + b"9" * 100,
    "less than nothing": b"*-2\r\n",
    "no length at all": b"*\r\n",
    "push messages": b">1\r\n+x\r\n" * 200_000,
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


def use_python_parser(store: Any, is_async: bool) -> None:
    parsers: Any = redis._parsers
    parser = parsers._AsyncRESP2Parser if is_async else parsers._RESP2Parser
    store.executor.client.connection_pool.connection_kwargs["parser_class"] = parser


@pytest.mark.parametrize("parser", ["hiredis", "python"])
@pytest.mark.parametrize("hostile", ["a list", "a list among numbers", "lists in lists", "a text"])
def test_a_reply_that_is_too_large_is_refused(hostile: str, parser: str, is_async: bool, server: RedisServer) -> None:
    with proxy(server.port) as through, blocking_store(through.url, is_async, timeout=60) as store:
        if parser == "python":
            use_python_parser(store, is_async)
        api = TokenBucket(store, "api", "100/hour")
        assert api.allow("key")
        through.instead = HOSTILE[hostile]
        # While an answer is waited for, and while a connection is made.
        for failures in (1, 2):
            with pytest.raises(StoreUnavailable, match="no answer to a limiter has"):
                api.allow("key")
            assert store.status().failures == failures
        through.instead = None
        assert api.hit("key").limit == 100


def test_push_messages_instead_of_a_reply_are_refused(is_async: bool, server: RedisServer) -> None:
    """redis-py reads each by a recursion."""
    with proxy(server.port) as through, blocking_store(through.url, is_async, timeout=60) as store:
        api = TokenBucket(store, "api", "100/hour")
        assert api.allow("key")
        through.instead = HOSTILE["push messages"]
        with pytest.raises(StoreUnavailable, match="push messages before it, which no answer to a limiter has"):
            api.allow("key")
        assert store.status().failures == 1


def test_replies_of_cluster_nodes_are_limited(
    is_async: bool, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cluster clients make their connections by other classes."""
    checked: list[type] = []

    with blocking_store(cluster.url, is_async, timeout=60) as store:
        assert TokenBucket(store, "api", "100/hour").allow("key")
        if is_async:
            nodes = store.executor.client._cluster.get_nodes()
            checked.extend(type(one._reader) for node in nodes for one in node._connections)
        else:
            pools = [node.redis_connection.connection_pool for node in store.executor.client._cluster().get_nodes()]
            checked.extend(type(one._sock) for pool in pools for one in pool._available_connections)
    assert {one.__name__ for one in checked} == {"BoundedReader" if is_async else "TimedSocket"}


def taken(*parts: bytes) -> ReplySizes:
    sizes = ReplySizes(of_cluster=True)
    for part in parts:
        sizes.take(bytearray(part), len(part))
    return sizes


@pytest.mark.parametrize("hostile", HOSTILE)
def test_every_kind_of_too_large_reply_is_refused(hostile: str) -> None:
    sent = HOSTILE[hostile]
    for parts in ([sent], [sent[:1], sent[1:]], [b"*1\r\n:1\r\n" + sent[:3], sent[3:]]):
        with pytest.raises(redis.exceptions.ConnectionError, match="no answer to a limiter has"):
            taken(*parts)
    if len(sent) < 100:
        with pytest.raises(redis.exceptions.ConnectionError):
            taken(*[sent[i : i + 1] for i in range(len(sent))])


def encoded(value: Any) -> bytes:
    if value is None:
        return b"*-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, str):
        return b"+%b\r\n" % value.encode()
    if isinstance(value, dict):
        return b"%%%d\r\n" % len(value) + b"".join(encoded(key) + encoded(its) for key, its in value.items())
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


lines = st.text(st.characters(exclude_characters="\r\n", codec="ascii")) | st.just("a\rb\nc")
scalars = st.none() | st.integers() | st.binary() | lines
values = st.recursive(scalars, lambda some: st.lists(some) | st.dictionaries(scalars, some), max_leaves=30)


@given(st.lists(values, max_size=5), st.lists(st.integers(0, 200), max_size=20))
def test_the_ends_of_replies_are_found_however_they_are_cut(replies: list[Any], cuts: list[int]) -> None:
    sent = b"".join(map(encoded, replies))
    ends = sorted({cut for cut in cuts if cut < len(sent)})
    sizes = taken(*[sent[i:j] for i, j in zip([0, *ends], [*ends, len(sent)], strict=True)])
    # The next answer may be as large as if it were the first, and no larger.
    for most in (b"*524288\r\n", b"$16777204\r\n"):
        ReplySizes(of_cluster=True).take(most, len(most))
    for beyond in (b"*524289\r\n", b"$16777217\r\n"):
        with pytest.raises(redis.exceptions.ConnectionError):
            taken(sent, beyond)
    sizes.take(b"*524288\r\n", 9)


def test_sizes_are_counted_per_reply() -> None:
    sizes = ReplySizes()
    for _ in range(100):
        for part in (b"*1000\r\n", b":1\r\n" * 1000, b"$65000\r\n", b"x" * 65_002, b">1\r\n:1\r\n"):
            sizes.take(part, len(part))


@pytest.mark.parametrize("beyond", [b"*1025\r\n", b"$65537\r\n", b">1\r\n:1\r\n" * 101])
def test_a_single_server_sends_nothing_as_large_as_a_cluster(beyond: bytes) -> None:
    with pytest.raises(redis.exceptions.ConnectionError, match="no answer to a limiter has"):
        ReplySizes().take(beyond, len(beyond))
    for most in (b"*1024\r\n", b"$65500\r\n", b">1\r\n:1\r\n" * 100):
        ReplySizes().take(most, len(most))


@contextmanager
def scripted_server(replies: Callable[[bytes], bytes]) -> Iterator[str]:
    """The URL of a server that sends `replies` of each piece of data it receives."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while received := self.request.recv(1 << 16):
                    self.request.sendall(replies(received))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("policy", ["deny", "allow"])
@pytest.mark.parametrize("how", ["allow", "allow_many"])
def test_a_handshake_that_no_client_expects_is_an_outage(is_async: bool, how: str, policy: Any) -> None:
    """HELLO is answered with a text, at which redis-py raises an AttributeError."""

    def replies(received: bytes) -> bytes:
        return b"+OK\r\n" * received.count(b"\r\n*", 0) + b"+OK\r\n"

    with scripted_server(replies) as url:
        # The asyncio client looks at the answer only with a password.
        url = (url.replace("//", "//user:password@") if is_async else url) + "/0?protocol=3"
        with blocking_store(url, is_async, timeout=60, when_unavailable=policy) as store:
            api = TokenBucket(store, "api", "100/hour")
            calls = {"allow": lambda: api.allow("key"), "allow_many": lambda: api.allow_many(["key"])}
            if policy == "allow":
                assert calls[how]() in (True, [True])
            else:
                with pytest.raises(StoreUnavailable):
                    calls[how]()
            assert store.status().failures == 1


def test_a_connection_whose_handshake_failed_is_not_used_again(is_async: bool, server: RedisServer) -> None:
    """Its database isn't selected."""
    with proxy(server.port) as through:
        url = f"redis://default:password@127.0.0.1:{through.port}/5?protocol=3"
        with blocking_store(url, is_async, timeout=60) as store:
            api = FixedWindow(store, "api", "1/year")
            through.instead = b"+OK\r\n"
            with pytest.raises(StoreUnavailable):
                api.allow("key")
            through.instead = None
            assert api.allow("key")
            assert not api.allow("key")
            assert through.connection_count == 2
    with server.client() as other:
        assert other.info("keyspace").keys() == {"db5"}


class SoftTimeLimit(Exception):
    """The exception by which a task queue's signal handler ends a task."""


@pytest.mark.parametrize("error", [AttributeError("x"), TimeoutError("x"), ssl.SSLError("x"), KeyError("x")], ids=repr)
def test_errors_of_redis_py_are_outages_and_those_of_applications_are_not(
    is_async: bool, server: RedisServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    raised: list[Exception] = [error]
    kind: Any = redis.asyncio.Connection if is_async else redis.Connection

    def read_response(*arguments: Any, **options: Any) -> Any:
        raise raised[0]

    async def read_response_async(*arguments: Any, **options: Any) -> Any:
        raise raised[0]

    with blocking_store(server.url, is_async, timeout=60) as store:
        api = TokenBucket(store, "api", "100/hour")
        assert api.allow("key")
        with monkeypatch.context() as patch:
            patch.setattr(kind, "read_response", read_response_async if is_async else read_response)
            for failures, call in enumerate((lambda: api.allow("key"), lambda: api.allow_many(["key"])), 1):
                with pytest.raises(StoreUnavailable, match=type(error).__name__):
                    call()
                assert store.status().failures == failures
            for applications in (SoftTimeLimit(), RecursionError()):
                raised[0] = applications
                with pytest.raises(type(applications)):
                    api.allow("key")
            assert store.status().failures == 2
        assert api.allow("key")


@contextmanager
def server_that_interrupts(at: bytes) -> Iterator[str]:
    """The URL of a server that answers no command with `at` in it: it sends this process a SIGUSR1 instead."""

    def replies(received: bytes) -> bytes:
        if at in received:
            # Not before the main thread waits for the reply: there the signal ends the wait.
            time.sleep(0.02)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return b""
        return b"+OK\r\n" * (received.count(b"\r\n*") + 1)

    with scripted_server(replies) as url:
        yield url


@contextmanager
def signal_handler(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", [Exception, RuntimeError, OSError, TimeoutError, AttributeError, SoftTimeLimit])
@pytest.mark.parametrize("at", [b"SELECT", b"EVALSHA"])
@pytest.mark.parametrize("how", ["allow", "allow_many"])
def test_an_exception_of_a_signal_handler_is_the_applications(how: str, at: bytes, kind: type[Exception]) -> None:
    """redis-py makes errors of its own from an OSError and a TimeoutError."""
    limit = kind("the task's time is over")

    def named(number: int, frame: FrameType | None) -> None:
        raise limit

    def unnamed(*arguments: object) -> None:
        raise limit

    with server_that_interrupts(at) as url, RedisStore(f"{url}/5", timeout=60, when_unavailable="allow") as store:
        api = TokenBucket(store, "api", "100/hour")
        calls = {"allow": lambda: api.allow("key"), "allow_many": lambda: api.allow_many(["key"])}
        for handler in (named, unnamed):
            with signal_handler(handler), pytest.raises(kind) as raised:
                calls[how]()
            assert raised.value is limit
        assert store.status().failures == store.status().decided_by_policy == 0


def test_a_call_while_a_time_limit_is_handled_can_find_an_outage() -> None:
    """The time limit is the context of the outage's error, and older than the call."""

    def handler(*arguments: object) -> None:
        raise TimeoutError

    with (
        scripted_server(lambda received: b"HTTP/1.1 400 Bad Request\r\n\r\n") as url,
        signal_handler(handler),
        RedisStore(url, timeout=60) as store,
    ):
        api = TokenBucket(store, "api", "100/hour")
        try:
            signal.raise_signal(signal.SIGUSR1)
        except TimeoutError:
            with pytest.raises(StoreUnavailable):
                api.allow("key")
        assert store.status().failures == 1


def test_an_endless_recursion_of_the_application_is_no_outage(server: RedisServer) -> None:
    with RedisStore(server.url, timeout=60, when_unavailable="allow") as store:
        api = FixedWindow(store, "api", "1/year")
        assert api.allow("key")
        decided: list[bool] = []

        def recurse() -> None:
            decided.append(api.allow("key"))
            recurse()

        with pytest.raises(RecursionError):
            recurse()
        assert decided
        assert not any(decided)
        assert store.status().failures == store.status().decided_by_policy == 0

"""Limits for the sizes of replies: redis-py's parsers trust the length that a list declares."""

from __future__ import annotations

from typing import Any

import pytest
import redis.exceptions
from blocking import blocking_store
from hypothesis import given
from hypothesis import strategies as st
from proxy import proxy
from redis_cluster import RedisCluster
from redis_server import RedisServer

from forebay import StoreUnavailable, TokenBucket
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
    sizes = ReplySizes()
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
    for most in (b"*1048576\r\n", b"$16777204\r\n"):
        ReplySizes().take(most, len(most))
    for beyond in (b"*1048577\r\n", b"$16777217\r\n"):
        with pytest.raises(redis.exceptions.ConnectionError):
            taken(sent, beyond)
    sizes.take(b"*1048576\r\n", 10)


def test_sizes_are_counted_per_reply() -> None:
    sizes = ReplySizes()
    for _ in range(10):
        for part in (b"*1000000\r\n", b":1\r\n" * 1_000_000, b"$10000000\r\n", b"x" * 10_000_002):
            sizes.take(part, len(part))

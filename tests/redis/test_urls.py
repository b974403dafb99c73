"""``forebay.connect``: one URL chooses where limits are kept."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis_server import RedisServer, redis_server

import forebay
from forebay import Concurrency, InvalidURL, SegmentError, Store, StoreFallbackWarning, TokenBucket
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore, SyncedStore

NOBODY = "redis://127.0.0.1:1/0"
"""The URL of a port that nobody listens at."""


@pytest.fixture
def host(name: str) -> str:
    """The URL of a host's store."""
    return f"shm:///{name}?keys=100"


@pytest.fixture
def out_of_reach(tmp_path: Path) -> str:
    """The URL of a store in a directory that does not exist."""
    return f"shm:///shop?keys=100&directory={tmp_path}/none"


@pytest.fixture(autouse=True)
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def connected(url: str, kind: type) -> Any:
    store = forebay.connect(url)
    assert type(store) is kind
    return store


def test_a_url_of_shared_memory_makes_the_hosts_store(name: str, tmp_path: Path) -> None:
    url = f"shm:///{name}?keys=100&on_full=deny&mode=660&group={os.getgid()}"
    with connected(url, Store) as store, connected(url, Store) as same:
        assert (store.name, store.keys, store.on_full) == (name, 100, "deny")
        assert os.stat(store.path).st_mode & 0o777 == 0o660
        assert TokenBucket(store, "api", "2/hour").allow("k")
        assert not TokenBucket(same, "api", "2/hour").hit("k", 2)
    with connected(f"shm:?keys=100&path={quote(str(tmp_path))}%2Flimits", Store) as store:
        assert store.path == str(tmp_path / "limits")
    with connected(f"shm:///shop?keys=100&directory={tmp_path}", Store) as store:
        assert store.path == str(tmp_path / "forebay-shop")


def test_a_url_of_a_unix_socket_reaches_redis(tmp_path: Path, host: str) -> None:
    socket = tmp_path / "redis.sock"
    with redis_server("--unixsocket", str(socket)):
        for url, kind in (
            (f"unix://{socket}?timeout=60", RedisStore),
            (f"unix://{socket}?db=1&timeout=60", RedisStore),
            (f"leased+unix://{socket}?host={host}&timeout=60", LeasedStore),
        ):
            with connected(url, kind) as store:
                bucket = TokenBucket(store, f"{kind.__name__} {len(url)}", "2/hour")
                assert [bucket.allow("k") for _ in range(3)] == [True, True, False]


def test_the_environment_names_the_url(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_URL", host)
    with forebay.connect() as store, forebay.connect_async() as same:
        assert isinstance(store, Store)
        assert isinstance(same, Store)
        assert store.path == same.path
    for unset in ("", None):
        monkeypatch.delenv("FOREBAY_URL", raising=False)
        if unset is not None:
            monkeypatch.setenv("FOREBAY_URL", unset)
        with pytest.raises(InvalidURL, match="set it to shm:///shop"):
            forebay.connect()


def test_a_url_of_redis_makes_a_redis_store(server: RedisServer, host: str) -> None:
    with connected(f"{server.url}?namespace=shop&plain_keys=true&timeout=9&client_name=me", RedisStore) as store:
        assert (store.namespace, store.keyspace.is_plain, store.executor.timeout_s) == ("shop", True, 9)
        assert TokenBucket(store, "api", "1/hour").allow("k")
        with server.client() as client:
            assert [one["name"] for one in client.client_list() if one["name"]] == ["me"]
    with connected(f"{server.url}?timeout=9 seconds&host={host}", RedisStore) as store:
        assert store.executor.timeout_s == 9


def test_leased_and_synced_urls_make_stores_over_the_hosts(server: RedisServer, host: str, name: str) -> None:
    with connected(f"leased+{server.url}?lease=2 s&share=0.5&timeout=9&host={host}", LeasedStore) as store:
        assert TokenBucket(store, "api", "100/hour").allow("k")
        assert "lease=2s" in repr(store)
        below = store.redis_store, store.host_store
    assert [store.closed for store in below] == [True, True]
    with connected(f"synced+{server.url}?interval=0.5&keys=10&timeout=9&host={host}", SyncedStore) as synced:
        assert TokenBucket(synced, "api", "100/hour").allow("k")
        assert (synced.keys, synced.interval_ns) == (10, 500_000_000)


def test_stores_that_own_the_stores_below_close_them(server: RedisServer, name: str) -> None:
    for owns in (False, True):
        below = RedisStore(server.url, timeout=9), Store(name, keys=100)
        LeasedStore(*below, owns_stores=owns).close()
        assert [store.closed for store in below] == [owns] * 2
        below = RedisStore(server.url, timeout=9), Store(name, keys=100)
        SyncedStore(*below, keys=10, owns_stores=owns).close()
        assert [store.closed for store in below] == [owns] * 2
        for store in below:
            store.close()


def test_asyncio_gets_stores_of_its_own(server: RedisServer, host: str) -> None:
    async def use() -> None:
        async with forebay.connect_async(f"{server.url}?timeout=9") as strict:
            assert isinstance(strict, AsyncRedisStore)
            assert await TokenBucket(strict, "api", "1/hour").allow("k")
        async with forebay.connect_async(f"leased+{server.url}?timeout=9&host={host}") as leased:
            assert isinstance(leased, AsyncLeasedStore)
            assert await TokenBucket(leased, "leased", "100/hour").allow("k")
        assert leased.redis_store.closed
        with forebay.connect_async(f"synced+{server.url}?timeout=9&keys=10&host={host}") as synced:
            assert isinstance(synced, SyncedStore)
            assert TokenBucket(synced, "synced", "100/hour").allow("k")

    asyncio.run(use())


def test_limits_go_to_redis_where_shared_memory_is_out_of_reach(server: RedisServer, out_of_reach: str) -> None:
    with pytest.raises(SegmentError, match="no such directory"):
        forebay.connect(out_of_reach)
    fallback = quote(f"{server.url}?timeout=9&namespace=shop")
    with pytest.warns(StoreFallbackWarning, match="limits are kept in Redis.*no such directory") as warned:
        store = connected(f"{out_of_reach}&fallback={fallback}", RedisStore)
    assert [one.filename for one in warned] == [__file__]
    with store:
        assert store.namespace == "shop"
        assert Concurrency(store, "jobs", 1).acquire("k")
    with pytest.warns(StoreFallbackWarning):
        awaited = forebay.connect_async(f"{out_of_reach}&fallback={fallback}")
    assert isinstance(awaited, AsyncRedisStore)


def test_leased_and_synced_limits_become_strict_without_shared_memory(server: RedisServer, out_of_reach: str) -> None:
    for mode, option in {"leased": "", "synced": "&keys=10"}.items():
        url = f"{mode}+{server.url}?timeout=9{option}&host={quote(out_of_reach)}"
        with pytest.raises(SegmentError, match="no such directory"):
            forebay.connect(url)
        with pytest.warns(StoreFallbackWarning, match=f"Redis decides each request.*no {mode} store") as warned:
            connected(f"{url}&fallback=strict", RedisStore).close()
        assert [one.filename for one in warned] == [__file__]


def test_a_segment_that_has_to_be_mended_has_no_fallback(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "forebay-shop").write_bytes(b"something else")
    with pytest.raises(forebay.ForeignSegment):
        forebay.connect(f"shm:///shop?keys=100&directory={tmp_path}&fallback={server.url}")


def test_the_hosts_share_holds_while_redis_is_away(server: RedisServer, host: str) -> None:
    with connected(f"{server.url}?timeout=9&hosts=4&fallback={host}", RedisStore) as store:
        decision = TokenBucket(store, "api", "8/hour").hit("k", 8)
        assert (decision.allowed, decision.degraded) == (True, False)
    with pytest.warns(StoreFallbackWarning, match="the host keeps its share.*127.0.0.1:1") as warned:
        store = connected(f"{NOBODY}?timeout=9&hosts=4&fallback={host}", RedisStore)
    assert [one.filename for one in warned] == [__file__]
    with store:
        bucket = TokenBucket(store, "api", "8/hour")
        assert [bucket.allow("k") for _ in range(3)] == [True, True, False]
        assert bucket.hit("other").degraded


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (7, "the URL of a store is text such as shm:///shop"),
        ("shop", "begins with shm, redis, leased.redis or synced.redis"),
        ("file:///shop?keys=1", "not with 'file'"),
        ("leased+shm:///shop?keys=1", "not with 'leased.shm'"),
        ("shm:///shop", "has the option keys"),
        ("shm:///?keys=1", "has a name"),
        ("shm:///shop?keys=1&path=/tmp/x", "has a name.*or else the option path"),
        ("shm://shop?keys=1", "write a third slash"),
        ("shm:///shop#2?keys=1", "no fragment"),
        ("shm:///[x?keys=1", "store's name"),
        ("shm://[x?keys=1", "can't be read"),
        ("shm:///a/b?keys=1", "store's name"),
        ("shm:///shop?keys=ten", "keys of a store's URL is a whole number, not 'ten'"),
        ("shm:///shop?keys=-1", "a whole number, not '-1'"),
        ("shm:///shop?keys=0", "keys is a whole number from 1"),
        ("shm:///shop?keys=1&mode=rw", "an octal number such as 660, not 'rw'"),
        ("shm:///shop?keys=1&on_full=drop", "on_full"),
        ("shm:///shop?keys=1&key=2", "no option 'key': did you mean keys"),
        ("shm:///shop?keys=1&banana=2", "its options are clock, directory, fallback"),
        ("shm:///shop?keys=1&keys=2", "option 'keys' twice"),
        ("shm:///shop?keys=1&fallback=shm:///other?keys=1", "the URL of a Redis server"),
        ("shm:///shop?keys=1&fallback=leased+redis://h", "the URL of a Redis server, not one of 'leased'"),
        ("shm:///shop?keys=1&fallback=redis://h?namespace=", "namespace"),
        ("redis://h/shop", "the number of a database"),
        ("redis://h?plain_keys=1", "plain_keys of a store's URL is true or false, not '1'"),
        ("redis://h?timeout=soon", "timeout of a store's URL is a length of time .* not 'soon'"),
        ("redis://h?namespac=shop", "did you mean namespace"),
        ("redis://h?banana=2", "unknown option, 'banana': leave it out"),
        ("redis+cluster://h?banana=2", "unknown option, 'banana': leave it out"),
        ("redis://h?hosts=4", "hosts"),
        ("redis://h?fallback=redis://other", "in its shared memory"),
        ("redis://h?fallback=shm:///shop?keys=1", "say hosts=4"),
        ("redis://h?when_unavailable=allow&fallback=shm:///shop?keys=1", "leave host and when_unavailable out"),
        ("leased+redis://h", "host=shm:///shop"),
        ("leased+redis://h?host=shm:///shop?keys=1&fallback=redis://h", "the fallback of a leased store is strict"),
        ("leased+redis://h?host=shm:///shop?keys=1&fallback=strict&when_unavailable=local", "leave one of them out"),
        ("leased+redis://h?host=shm:///shop?keys=1&share=much", "a number such as 0.1, not 'much'"),
        ("leased+redis://h?host=shm:///shop?keys=1&share=7", "share"),
        ("leased+redis://h?host=shm:///shop?keys=1&lease=1 hour", "lease"),
        ("leased+redis://h?host=shm:///shop?keys=1&lease=-1", "lease of a store's URL is a length of time"),
        ("synced+redis://h?host=shm:///shop?keys=1&interval=soon&keys=1", "interval of a store's URL is a length of"),
        ("synced+redis://h?host=shm:///shop?keys=1", "has the option keys"),
        ("synced+redis://h?keys=1&host=shm:///shop?keys=1&interval=1 ms", "10 ms"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: Any, message: str, name: str) -> None:
    if isinstance(url, str):
        url = url.replace("///shop", f"///{name}")
    for connect in (forebay.connect, forebay.connect_async):
        with pytest.raises(InvalidURL, match=message):
            connect(url)


@pytest.mark.parametrize("url", ["redis://me:geheim@h/x", "rediss://me:geheim@h:x", "redis:me:geheim@h", "geheim"])
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(InvalidURL) as raised:
        forebay.connect(url if ":" in url else f"shm:///shop?keys=1&fallback=redis://me:{url}@h:x")
    assert "geheim" not in str(raised.value)

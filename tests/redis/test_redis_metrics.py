"""Metrics of stores over Redis: breakers, leased and synced limits, and what is one process's own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import redis
from redis_server import RedisServer
from scrapes import scraped

from forebay import FixedWindow, Store, StoreUnavailable, TokenBucket, own_counts
from forebay.metrics.readings import OWN, OWN_COUNTERS
from forebay.redis import AsyncRedisStore, LeasedStore, RedisStore, SyncedStore, executor_base
from forebay.redis.synced import exchanger, news
from forebay.redis.transport import breaker
from forebay.rules.live import carrying
from forebay.segment import hot_keys

NEVER = "1 day"
THRESHOLD = 3


@pytest.fixture
def host(store_name: str) -> Iterator[Store]:
    with Store(store_name, keys=1000) as store:
        yield store


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_breaker_of_a_host_is_seen_by_every_store_of_it(host: Store, nobody: str) -> None:
    url = f"redis://user:secret@{nobody}"
    with (
        RedisStore(url, host=host, when_unavailable="allow") as one,
        RedisStore(url, host=host, when_unavailable="allow", namespace="other") as other,
    ):
        assert scraped(other)["forebay_redis_breaker", nobody, "host", "closed"] == 1
        bucket = TokenBucket(one, "api", "5/hour")
        assert all(bucket.allow("key") for _ in range(10))
        found = scraped(other, host)
        assert found["forebay_redis_breaker", nobody, "host", "open"] == 1
        assert found["forebay_redis_breaker", nobody, "host", "closed"] == 0
        assert found["forebay_redis_failures", nobody, "host"] == THRESHOLD
        assert found["forebay_redis_failing_seconds", nobody, "host"] >= 0
        assert found["forebay_redis_decided_by_policy_total", host.name] == one.status().decided_by_policy == 10
        # From outside, too.
        assert scraped(host.name)["forebay_redis_decided_by_policy_total", host.name] == 10
        assert not [key for key in found if "secret" in str(key)]
    assert "forebay_redis_failures" not in {name for name, *_ in scraped(one, host)}  # closed


def test_breaker_without_a_host_is_the_processs_own(nobody: str) -> None:
    with RedisStore(f"redis://{nobody}") as store:
        assert {labels[1] for name, *labels in scraped(store) if name.startswith("forebay_redis")} == {"process"}


def test_stores_for_asyncio_have_the_same_samples(host: Store, nobody: str) -> None:
    async def samples() -> set[str]:
        store = AsyncRedisStore(f"redis://{nobody}", host=host)
        try:
            return {name for name, *_ in scraped(store)}
        finally:
            await store.close()

    assert asyncio.run(samples()) == {
        *("forebay_redis_breaker", "forebay_redis_failures", "forebay_redis_failing_seconds")
    }


def test_leased_store_shows_its_host(host: Store, server: RedisServer) -> None:
    with (
        RedisStore(server.url, timeout=60, host=host) as redis_store,
        LeasedStore(redis_store, host) as leased,
    ):
        assert TokenBucket(leased, "api", "1000/hour").allow("key")
        found = scraped(leased)
        assert found["forebay_allowed_total", host.name, "api", "leased TokenBucket"] == 1
        assert found["forebay_redis_breaker", redis_store.server, "host", "closed"] == 1


def test_fetches_of_leases_are_counted_by_the_host(host: Store, server: RedisServer) -> None:
    fetches = ("forebay_lease_fetches_total", host.name)
    with (
        RedisStore(server.url, timeout=60, host=host) as redis_store,
        LeasedStore(redis_store, host, lease="1 minute", share=0.1) as leased,
        LeasedStore(redis_store, host, lease="1 minute", share=0.1) as other,
    ):
        window, few = FixedWindow(leased, "api", "1000/365 days"), FixedWindow(other, "few", "1/365 days")
        assert scraped(host)[fetches] == 0
        assert window.allow("key")
        assert scraped(host)[fetches] == 1
        # What Redis is asked without borrowing counts as little as what the host knows.
        assert window.peek("key", 500).allowed
        assert window.hit("key", 0)
        assert scraped(host)[fetches] == 1
        # Larger than any loan: charged at Redis.
        assert window.hit("key", 500)
        assert scraped(host)[fetches] == 2
        assert few.allow("key")
        assert not few.allow("key")
        assert scraped(host)[fetches] == 4
        assert not few.allow("key")  # remembered
        assert scraped(leased, other)[fetches] == scraped(host.name)[fetches] == 4


def test_calls_without_a_reply_fetch_no_lease(host: Store, nobody: str) -> None:
    with (
        RedisStore(f"redis://{nobody}", host=host, when_unavailable="allow") as redis_store,
        LeasedStore(redis_store, host) as leased,
    ):
        assert TokenBucket(leased, "api", "1000/hour").allow("key")
        assert scraped(host)["forebay_lease_fetches_total", host.name] == 0


def redis_calls(host: Store) -> float:
    return scraped(host).get(("forebay_redis_latency_seconds_count", host.name), 0)


def test_calls_that_redis_replies_to_are_timed(host: Store, server: RedisServer) -> None:
    with RedisStore(server.url, timeout=60, host=host) as store:
        bucket = TokenBucket(store, "api", "100/hour")
        assert bucket.allow("key")
        assert redis_calls(host) == 1
        assert all(bucket.allow_many(["one", "other"]))  # one batch
        assert redis_calls(host) == 2
    with RedisStore(server.url, timeout=60) as alone:
        assert TokenBucket(alone, "api", "100/hour").allow("key")
    assert redis_calls(host) == 2


def test_a_clock_that_is_turned_back_fails_no_decision(
    host: Store, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_base, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with RedisStore(server.url, timeout=60, host=host) as store:
        assert TokenBucket(store, "api", "100/hour").allow("key")
    assert redis_calls(host) == 1


def test_calls_for_asyncio_are_timed(host: Store, server: RedisServer) -> None:
    async def call() -> None:
        store = AsyncRedisStore(server.url, timeout=60, host=host)
        try:
            bucket = TokenBucket(store, "api", "100/hour")
            assert await bucket.allow("key")
            assert all(await bucket.allow_many(["one", "other"]))
        finally:
            await store.close()

    asyncio.run(call())
    assert redis_calls(host) == 2


@pytest.fixture(params=["maxmemory", "wrong password"])
def refusing_url(request: pytest.FixtureRequest, server: RedisServer, client: redis.Redis) -> Iterator[str]:
    """The server replies to every script by an error, or to the password before."""
    if request.param == "wrong password":
        yield server.url.replace("//", "//:secret@")
    else:
        client.config_set("maxmemory", 1)
        yield server.url
        client.config_set("maxmemory", 0)


def test_calls_that_redis_replies_to_by_an_error_are_timed(host: Store, refusing_url: str) -> None:
    with RedisStore(refusing_url, timeout=60, host=host, when_unavailable="allow") as store:
        bucket = TokenBucket(store, "api", "100/hour")
        assert bucket.allow("key")
        assert redis_calls(host) == 1
        assert all(bucket.allow_many(["one", "other"]))
        assert redis_calls(host) == 2
        assert store.status().decided_by_policy == 3


def test_what_no_policy_can_decide_is_not_counted_as_decided(nobody: str) -> None:
    with RedisStore(f"redis://{nobody}", when_unavailable="allow") as store:
        bucket = TokenBucket(store, "api", "9/hour")
        assert bucket.allow("key")
        command = bucket.commands.peek("key", 1)
        with pytest.raises(StoreUnavailable):
            store.executor.run_command(command)
        assert store.status().decided_by_policy == 1


def test_calls_for_asyncio_that_redis_replies_to_by_an_error_are_timed(host: Store, refusing_url: str) -> None:
    async def call() -> None:
        store = AsyncRedisStore(refusing_url, timeout=60, host=host, when_unavailable="allow")
        try:
            bucket = TokenBucket(store, "api", "100/hour")
            assert await bucket.allow("key")
            assert all(await bucket.allow_many(["one", "other"]))
        finally:
            await store.close()

    asyncio.run(call())
    assert redis_calls(host) == 2


def test_calls_without_a_reply_are_not_timed(host: Store, nobody: str) -> None:
    with RedisStore(f"redis://{nobody}", host=host, when_unavailable="allow") as store:
        assert TokenBucket(store, "api", "5/hour").allow("key")
    assert redis_calls(host) == 0


def test_synced_store_shows_its_exchanges(host: Store, server: RedisServer) -> None:
    with (
        RedisStore(server.url, timeout=60, host=host) as redis_store,
        SyncedStore(redis_store, host, NEVER, keys=100) as synced,
    ):
        window = FixedWindow(synced, "api", "1000/365 days")
        synced.exchange()
        assert window.allow("key")
        labels = (host.name, redis_store.server)
        found = scraped(synced)
        assert found["forebay_sync_pending_keys", *labels] == 1
        assert found["forebay_sync_unnamed_keys", *labels] == 0
        synced.exchange()
        found = scraped(synced)
        assert found["forebay_sync_pending_keys", *labels] == 0
        assert found["forebay_sync_age_seconds", *labels] >= 0
        assert found["forebay_allowed_total", host.name, "api", "synced FixedWindow"] == 1


def test_forebays_own_limiters_are_those_of_its_modules(host: Store) -> None:
    breaker.Cells(host)
    counts = {own_counts.DELAYED, own_counts.LEASE_FETCHES}
    own = {*counts, exchanger.ELECTION, exchanger.LAST, exchanger.ROUNDS, news.TURNS, carrying.MARKS, hot_keys.NAME}
    assert {*host.stats().limiters, *own} == OWN
    assert set(OWN_COUNTERS) == {breaker.RESERVED + "decided", breaker.RESERVED + "probes", exchanger.ROUNDS, *counts}
    found = scraped(host)
    assert not [key for key in found if len(key) == 4]
    assert found["forebay_redis_decided_by_policy_total", host.name] == 0

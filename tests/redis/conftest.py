"""A server for all tests, and a clock for the scripts that tests move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from leased_hosts import Hosts
from redis_cluster import RedisCluster, redis_cluster
from redis_server import RedisServer, redis_server
from scripts_clock import ServerClock, moved_by_tests

from forebay.redis import RedisStore


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """Empty, with the scripts forgotten."""
    with shared_server.client() as client:
        client.flushall()
        client.script_flush()
    return shared_server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: RedisCluster) -> RedisCluster:
    """Empty, with the scripts forgotten."""
    shared_cluster.on_masters("FLUSHALL")
    shared_cluster.on_masters("SCRIPT FLUSH")
    return shared_cluster


@pytest.fixture(params=["sync", "asyncio"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """For a test of both kinds of store."""
    return bool(request.param == "asyncio")


@pytest.fixture
def redis_store(server: RedisServer) -> Iterator[RedisStore]:
    with RedisStore(server.url, timeout=60) as opened:
        yield opened


@pytest.fixture
def server_clock(client: redis.Redis) -> Iterator[ServerClock]:
    """The time for scripts of limiters that are made from now on."""
    with moved_by_tests():
        yield ServerClock(client)


@pytest.fixture
def hosts(redis_store: RedisStore, server_clock: ServerClock, client: redis.Redis) -> Iterator[Hosts]:
    made = Hosts(redis_store, server_clock)
    client.config_resetstat()
    yield made
    for store in made.stores:
        store.close()
        store.host_store.close()

"""The common part of the limited task queues over the stores in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis_server import RedisServer, redis_server

from forebay import Concurrency, CostExceedsLimit, InvalidLimiter, Store, TokenBucket
from forebay.contrib.tasks import Admission, Options, TaskLimit
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore, SyncedStore
from forebay.testing import ManualClock

RATE, BURST = "10/minute", 20
TASKS = 40


def notify(order: int) -> None:
    """The task."""


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def host_store(store_name: str) -> Iterator[Store]:
    with Store(store_name, keys=1000) as opened:
        yield opened


def check(admissions: list[Admission], admitted: int) -> None:
    """The limit admits some tasks at once, and denied tasks have turns that are at least a permit's time apart."""
    delays = [admission.later_s for admission in admissions]
    assert delays.count(None) == admitted
    assert delays[:admitted] == [None] * admitted
    turns = [delay for delay in delays if delay is not None]
    # Real time passes between the requests, so a later one may have waited for less.
    assert [round(turn / 6) for turn in turns] == list(range(round(turns[0] / 6), round(turns[0] / 6) + len(turns)))


MAKERS: dict[str, Callable[[RedisStore, Store], Any]] = {
    "redis": lambda redis_store, host_store: redis_store,
    "leased": LeasedStore,
    "synced": lambda redis_store, host_store: SyncedStore(redis_store, host_store, keys=100),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_denied_tasks_have_turns(kind: str, server: RedisServer, host_store: Store) -> None:
    with RedisStore(server.url, timeout=60) as redis_store, MAKERS[kind](redis_store, host_store) as store:
        bucket = TokenBucket(store, "partner", RATE, burst=BURST)
        limit = TaskLimit(notify, bucket, "partner", {}, in_loop=False)
        check([limit.ask((order,), {}, str(order)) for order in range(TASKS)], BURST)


def test_denied_jobs_have_turns_in_an_event_loop(server: RedisServer, host_store: Store) -> None:
    async def run() -> None:
        redis_store = AsyncRedisStore(server.url, timeout=60)
        async with AsyncLeasedStore(redis_store, host_store, owns_stores=True) as leased_store:
            for store in (redis_store, leased_store):
                bucket: Any = TokenBucket(store, type(store).__name__, RATE, burst=BURST)
                limit = TaskLimit(notify, bucket, "partner", {}, in_loop=True)
                check([await limit.ask_async((n,), {}, str(n)) for n in range(TASKS)], BURST)

    asyncio.run(run())


def test_task_is_charged_once_with_a_request_ttl(server: RedisServer) -> None:
    with RedisStore(server.url, timeout=60) as store:
        limit = TaskLimit(
            notify, TokenBucket(store, "partner", "2/day"), "partner", {"request_ttl": "1 hour"}, in_loop=False
        )
        assert [limit.ask((n,), {}, str(n)).later_s is None for n in (1, 1, 1, 2, 3)] == [True] * 4 + [False]


@pytest.mark.parametrize("is_async", [False, True])
def test_held_permit_is_renewed_and_released(is_async: bool, server: RedisServer) -> None:
    """The task runs for several leases."""

    def blocking() -> None:
        with RedisStore(server.url, timeout=60) as store:
            exports = Concurrency(store, "exports", 1, lease="900 ms")
            limit = TaskLimit(notify, exports, "all", {}, in_loop=False)
            with limit.held(limit.ask((1,), {}, "1")):
                for _ in range(11):
                    asyncio.run(asyncio.sleep(0.1))
                    assert limit.ask((2,), {}, "2").later_s is not None
            assert limit.ask((3,), {}, "3").later_s is None

    async def awaited() -> None:
        async with AsyncRedisStore(server.url, timeout=60) as store:
            exports: Any = Concurrency(store, "exports", 1, lease="900 ms")
            limit = TaskLimit(notify, exports, "all", {}, in_loop=True)
            async with limit.held_async(await limit.ask_async((1,), {}, "1")):
                for _ in range(11):
                    await asyncio.sleep(0.1)
                    assert (await limit.ask_async((2,), {}, "2")).later_s is not None
            assert (await limit.ask_async((3,), {}, "3")).later_s is None

    asyncio.run(awaited()) if is_async else blocking()


def test_tasks_go_back_while_redis_is_unavailable() -> None:
    with RedisStore("redis://127.0.0.1:1", timeout=1) as store:
        limit = TaskLimit(notify, TokenBucket(store, "partner", "5/second"), "partner", {}, in_loop=False)
        delays = {limit.ask((n,), {}, str(n)).later_s for n in range(5)}
        assert all(delay is not None and 2.5 <= delay <= 5 for delay in delays)
        assert len(delays) == 5


def test_store_of_the_other_kind_is_refused(server: RedisServer, host_store: Store) -> None:
    def limited(store: Any, in_loop: bool, options: Options) -> TaskLimit:
        return TaskLimit(notify, TokenBucket(store, "partner", "5/second"), "partner", options, in_loop=in_loop)

    store, async_store = RedisStore(server.url), AsyncRedisStore(server.url)
    blocking, awaited = (
        (store, LeasedStore(store, host_store)),
        (async_store, AsyncLeasedStore(async_store, host_store)),
    )
    for one in blocking:
        limited(one, False, {})
        with pytest.raises(InvalidLimiter, match="would stop the event loop"):
            limited(one, True, {})
    for one in awaited:
        limited(one, True, {})
        with pytest.raises(InvalidLimiter, match="has to be awaited"):
            limited(one, False, {})
    with pytest.raises(CostExceedsLimit):
        limited(store, False, {"cost": 6})
    with pytest.raises(InvalidLimiter, match="takes no request_ttl"):
        limited(blocking[1], False, {"request_ttl": 1})
    store.close()
    asyncio.run(async_store.close())


def test_shared_memory_serves_both(clock: ManualClock, store_name: str) -> None:
    """It never blocks."""
    with Store(store_name, keys=10, clock=clock) as store:
        for in_loop in (False, True):
            TaskLimit(notify, TokenBucket(store, "partner", "5/second"), "partner", {}, in_loop=in_loop)

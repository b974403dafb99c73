"""Credits over Redis: how a balance is kept, and the stores that refuse it."""

from __future__ import annotations

import asyncio
import math

import pytest
import redis
from redis_server import RedisServer

from forebay import AllOf, Credits, ForeignState, InvalidLimiter, LimitExceeded, Store, StoreUnavailable, TokenBucket
from forebay.redis import AsyncRedisStore, LeasedStore, RedisStore, SyncedStore


def test_balance_has_no_time_to_live_and_is_gone_when_it_is_spent(redis_store: RedisStore, client: redis.Redis) -> None:
    prepaid = Credits(redis_store, "paid")
    prepaid.add("ada", 5)
    [key] = client.keys("*")
    assert key.endswith(b":paid:credits")
    assert (client.get(key), client.pttl(key)) == (b"c5", -1)
    assert prepaid.hit("ada", 5)
    assert not client.exists(key)
    prepaid.refund("ada", 2)
    assert (client.get(key), client.pttl(key)) == (b"c2", -1)


def test_denial_of_a_new_key_writes_nothing(redis_store: RedisStore, client: redis.Redis) -> None:
    prepaid = Credits(redis_store, "paid")
    assert not prepaid.allow("ada")
    assert not AllOf(TokenBucket(redis_store, "api", "5/second"), prepaid).hit("ada")
    assert prepaid.take_up_to("ada", 5) == 0
    assert client.keys("*") == []


def test_foreign_value_is_no_balance(redis_store: RedisStore, client: redis.Redis) -> None:
    prepaid = Credits(redis_store, "paid")
    prepaid.add("ada", 5)
    [key] = client.keys("*")
    for value in (b"5", b"c-5", b"c5.5", b"t5", b"c9007199254740992"):
        client.set(key, value)
        with pytest.raises(ForeignState):
            prepaid.hit("ada")
        with pytest.raises(ForeignState):
            prepaid.add("ada", 1)


def test_tasks_do_not_wait_for_what_never_comes(server: RedisServer) -> None:
    async def several() -> None:
        async with AsyncRedisStore(server.url) as store:
            prepaid = Credits(store, "paid")
            assert await asyncio.gather(*(prepaid.wait("ada") for _ in range(3))) == [False] * 3
            assert not await prepaid.wait("ada", timeout="1 hour")
            await prepaid.add("ada", 1)
            assert await prepaid.wait("ada")
            with pytest.raises(LimitExceeded, match="the key has 0 left"):
                async with prepaid.limited("ada"):
                    pass
            reservation = await prepaid.reserve("ada")
            assert math.isinf(reservation.delay)

    asyncio.run(several())


def test_store_that_decides_by_shares_refuses_credits(server: RedisServer) -> None:
    with (
        Store.private(keys=10) as host,
        RedisStore(server.url, when_unavailable="local", host=host, hosts=2) as store,
        pytest.raises(InvalidLimiter, match="'paid' has no share for this host"),
    ):
        Credits(store, "paid")


def test_store_that_allows_spends_nothing_while_redis_is_away() -> None:
    with RedisStore("redis://127.0.0.1:1", when_unavailable="allow") as store:
        prepaid = Credits(store, "paid")
        assert prepaid.hit("ada").degraded
        with pytest.raises(StoreUnavailable):
            prepaid.add("ada", 1)
    with RedisStore("redis://127.0.0.1:1") as store, pytest.raises(StoreUnavailable):
        Credits(store, "paid").hit("ada")


def test_leased_and_synced_stores_refuse_credits(redis_store: RedisStore) -> None:
    with (
        Store.private(keys=10) as host,
        LeasedStore(redis_store, host) as store,
        pytest.raises(InvalidLimiter, match="nothing can be lent"),
    ):
        Credits(store, "paid")  # type: ignore[arg-type]
    with (
        Store.private(keys=10) as host,
        SyncedStore(redis_store, host, keys=10) as store,
        pytest.raises(InvalidLimiter, match="can't be synced"),
    ):
        Credits(store, "paid")  # type: ignore[arg-type]

"""Credits over Redis: how a balance is kept, and the stores that refuse it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
from blocking import in_event_loop
from late_replies import Late, cancelled
from redis_server import PATIENCE_S, RedisServer

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
        async with AsyncRedisStore(server.url, timeout=PATIENCE_S) as store:
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


SPENDING: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "allow": lambda prepaid: prepaid.allow("ada"),
    "hit": lambda prepaid: prepaid.hit("ada"),
    "hit of several": lambda prepaid: prepaid.hit("ada", 2),
    "reserve": lambda prepaid: prepaid.reserve("ada", 2),
    "wait": lambda prepaid: prepaid.wait("ada", 2),
    "take_up_to": lambda prepaid: prepaid.take_up_to("ada", 2**48),
    "allow_many": lambda prepaid: prepaid.allow_many(["bob", "ada", "ada"]),
    "all": lambda prepaid: AllOf(TokenBucket(prepaid.store, "b", "100/hour"), prepaid).hit("ada"),
}


@pytest.mark.parametrize("how", SPENDING)
def test_charge_of_a_cancelled_task_comes_back(how: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Any) -> None:
        prepaid = Credits(store, "paid")
        await prepaid.add("ada", 5)
        # Redis knows the scripts, also those that give back.
        await SPENDING[how](prepaid)
        await prepaid.refund("ada")
        await (await prepaid.reserve("ada")).cancel()
        await prepaid.take_up_to("ada", 2**48)
        await prepaid.add("ada", 5)
        with monkeypatch.context() as patch:
            late = Late(store, patch)
            task = asyncio.ensure_future(SPENDING[how](prepaid))
            await late.under_way.wait()
            async with AsyncRedisStore(server.url, timeout=PATIENCE_S) as seen_by:
                seen = Credits(seen_by, "paid")
                assert (await seen.peek("ada", 0)).remaining < 5
                await cancelled(task)
                late.may_come.set()
                async with asyncio.timeout(PATIENCE_S):
                    while (await seen.peek("ada", 0)).remaining < 5:
                        await asyncio.sleep(0.005)

    in_event_loop(server.url, body, timeout=PATIENCE_S)


@pytest.mark.parametrize("how", ["alone", "all"])
def test_charge_of_a_cancelled_task_with_a_request_id_stays_and_its_retry_is_free(
    how: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(store: Any) -> None:
        prepaid = Credits(store, "paid")
        await prepaid.add("ada", 5)
        limits: Any = prepaid if how == "alone" else AllOf(TokenBucket(store, "b", "100/hour"), prepaid)
        with monkeypatch.context() as patch:
            late = Late(store, patch)
            task = asyncio.ensure_future(limits.hit("ada", request_id="order 7"))
            await late.under_way.wait()
            await cancelled(task)
            late.may_come.set()
            while going_on := store.executor.going_on:
                await asyncio.wait(going_on)
        assert await limits.hit("ada", request_id="order 7")
        assert (await prepaid.peek("ada", 0)).remaining == 4

    in_event_loop(server.url, body, timeout=PATIENCE_S)

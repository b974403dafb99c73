"""Permits whose holder never gets them, or can't give them back: cancelled tasks, and Redis unavailable."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis
from blocking import blocking_store, in_event_loop
from late_replies import Late, cancelled
from proxy import Proxy, proxy
from redis.exceptions import OutOfMemoryError
from redis_server import PATIENCE_S, RedisServer, until

from forebay import AllOf, Concurrency, ForeignState, LimitExceeded, Store, StoreUnavailable, TokenBucket
from forebay.errors import StoreClosed
from forebay.redis import AsyncRedisStore, RedisStore

LIMIT = 5


def held_of(store: Any) -> Any:
    return Concurrency(store, "held", LIMIT, lease="1 hour")


async def enter(held: Any) -> None:
    async with held.hold("ada", 2):
        pass


def all_of(held: Any) -> Any:
    return AllOf(TokenBucket(held.store, "b", "100/hour"), held)


TAKING: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "allow": lambda held: held.allow("ada"),
    "hit": lambda held: held.hit("ada", 2),
    "acquire": lambda held: held.acquire("ada", 2),
    "reserve": lambda held: held.reserve("ada", 2),
    "wait": lambda held: held.wait("ada", 2),
    "hold": enter,
    "allow_many": lambda held: held.allow_many(["bob", "ada", "ada"]),
    "all": lambda held: all_of(held).hit("ada"),
    "all's reserve": lambda held: all_of(held).reserve("ada"),
    "all's allow_many": lambda held: all_of(held).allow_many(["ada", "bob"]),
}


async def all_back(held: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for key in ("ada", "bob"):
            while (await held.peek(key)).remaining < LIMIT:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", TAKING)
def test_permits_of_a_cancelled_task_come_back(how: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Any) -> None:
        held = held_of(store)
        # Redis knows the scripts.
        await TAKING[how](held)
        await held.reset("ada")
        await held.reset("bob")
        async with AsyncRedisStore(server.url, timeout=PATIENCE_S) as seen_by:
            seen = held_of(seen_by)
            with monkeypatch.context() as patch:
                late = Late(store, patch)
                task = asyncio.ensure_future(TAKING[how](held))
                await late.under_way.wait()
                # Redis has given them out.
                assert (await seen.peek("ada")).remaining < LIMIT
                await cancelled(task)
                assert (await seen.peek("ada")).remaining < LIMIT
                late.may_come.set()
                await all_back(seen)
        # Nothing of it is remembered, either.
        assert await held.allow("ada")
        await held.refund("ada", LIMIT)
        await all_back(held)

    in_event_loop(server.url, body, timeout=PATIENCE_S)


def test_permits_of_a_cancelled_batch_of_several_parts_come_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.redis.executor_base.CHUNK", 1)

    async def body(store: Any) -> None:
        held, sent = held_of(store), itertools.count()
        execute_many = store.executor.client.execute_many
        waits, may_come = asyncio.Event(), asyncio.Event()

        async def late(*calls: Any) -> Any:
            answer = await execute_many(*calls)
            if next(sent) == 2:
                waits.set()
                await may_come.wait()
            return answer

        await held.allow_many(["ada"])
        await held.refund("ada")
        with monkeypatch.context() as patch:
            patch.setattr(store.executor.client, "execute_many", late)
            task = asyncio.ensure_future(held.allow_many(["ada", "bob", "ada", "bob"]))
            await waits.wait()
            await cancelled(task)
            may_come.set()
            await all_back(held)

    in_event_loop(server.url, body, timeout=PATIENCE_S)


def failing_in_between(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second call of a batch of three fail, as if the server's memory were full at that moment."""
    execute_many = store.executor.client.execute_many

    def without(calls: Any) -> Any:
        return calls if len(calls) != 3 else [calls[0], calls[2]]

    def failed(replies: Any, calls: Any) -> Any:
        return replies if len(calls) != 3 else [replies[0], OutOfMemoryError("command not allowed"), replies[1]]

    async def answers(calls: Any) -> Any:
        return failed(await execute_many(without(calls)), calls)

    def answers_at_once(calls: Any) -> Any:
        return failed(execute_many(without(calls)), calls)

    is_async = not isinstance(store, RedisStore)
    monkeypatch.setattr(store.executor.client, "execute_many", answers if is_async else answers_at_once)


def test_a_partly_failed_batch_keeps_the_other_replies(
    is_async: bool, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocking_store(server.url, is_async, timeout=PATIENCE_S, when_unavailable="allow") as store:
        held, bucket = held_of(store), TokenBucket(store, "b", "1/hour")
        held.allow("ada")
        bucket.allow("ada")
        with monkeypatch.context() as patch:
            failing_in_between(store, patch)
            assert held.allow_many(["ada", "bob", "ada"]) == [True] * 3
            assert bucket.allow_many(["ada", "bob", "ada"]) == [False, True, False]
        # The taken permits are known, and can be given back.
        held.refund("ada", 3)
        assert held.peek("ada").remaining == LIMIT


def test_permits_of_a_partly_failed_batch_come_back(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Any) -> None:
        held = held_of(store)
        await held.allow_many(["ada"])
        await held.refund("ada")
        with monkeypatch.context() as patch:
            failing_in_between(store, patch)
            late = Late(store, patch)
            task = asyncio.ensure_future(held.allow_many(["ada", "bob", "ada"]))
            await late.under_way.wait()
            await cancelled(task)
            late.may_come.set()
            await all_back(held)

    in_event_loop(server.url, body, timeout=PATIENCE_S)


@pytest.mark.parametrize("how", ["one", "all"])
def test_a_cancelled_batch_is_given_back_in_one_batch(
    how: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"user:{number}" for number in range(100)]

    async def body(store: Any) -> None:
        held = held_of(store)
        limiter = held if how == "one" else all_of(held)
        await limiter.allow_many(["ada"])
        await held.refund("ada")
        with monkeypatch.context() as patch:
            late = Late(store, patch)
            task = asyncio.ensure_future(limiter.allow_many(keys))
            await late.under_way.wait()
            await cancelled(task)
            batches: list[int] = []
            execute_many = store.executor.client.execute_many

            async def counted(calls: Any) -> Any:
                batches.append(len(calls))
                return await execute_many(calls)

            patch.setattr(store.executor.client, "execute_many", counted)
            # Not one by one.
            patch.setattr(store.executor, "execute_command", None)
            late.may_come.set()
            while store.executor.going_on:
                await asyncio.wait(store.executor.going_on)
            # Each script that Redis doesn't know yet is sent once more.
            assert 100 <= sum(batches) <= 1000
            assert len(batches) < 10
        for key in keys:
            assert (await held.peek(key)).remaining == LIMIT

    in_event_loop(server.url, body, timeout=PATIENCE_S)


def test_a_task_cancelled_at_any_time_holds_nothing(server: RedisServer) -> None:
    """Before the call is sent, on its way, on the reply's way, and after it."""

    async def body(store: Any) -> None:
        held = held_of(store)
        with proxy(server.port) as through:
            for delay_s in (0.0, 0.002):
                through.delay_s = delay_s
                async with AsyncRedisStore(through.url, timeout=PATIENCE_S) as slow:
                    slow_held = held_of(slow)

                    async def take_and_give_back(taken: Any = slow_held) -> None:
                        async with contextlib.AsyncExitStack() as stack:
                            lease = await stack.enter_async_context(taken.hold("ada", 2, timeout=0))
                            assert lease.allowed

                    for _ in range(100):
                        # Permits that come back may still be on their way.
                        with contextlib.suppress(TimeoutError, LimitExceeded):
                            async with asyncio.timeout(random.uniform(0, 0.001 + 3 * delay_s)):
                                await take_and_give_back()
                        for taking in (slow_held.acquire, slow_held.allow):
                            task = asyncio.ensure_future(taking("bob"))
                            await asyncio.sleep(random.uniform(0, 0.001 + 2 * delay_s))
                            if task.cancel():
                                with contextlib.suppress(asyncio.CancelledError):
                                    await task
                            if task.cancelled():
                                continue
                            answer = task.result()
                            await (answer.release() if taking == slow_held.acquire else slow_held.refund("bob"))
                    await all_back(held)

    in_event_loop(server.url, body, timeout=PATIENCE_S)


def test_a_release_goes_on_when_its_task_is_cancelled(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Any) -> None:
        held = held_of(store)
        lease = await held.acquire("ada", 2)
        with monkeypatch.context() as patch:
            send, may_go = store.executor.execute_command, asyncio.Event()

            async def later(*call: Any) -> Any:
                await may_go.wait()
                return await send(*call)

            patch.setattr(store.executor, "execute_command", later)
            task = asyncio.ensure_future(lease.release())
            await asyncio.sleep(0)
            await cancelled(task)
            may_go.set()
            await asyncio.wait(store.executor.going_on)
        assert (await held.peek("ada")).remaining == LIMIT

    in_event_loop(server.url, body, timeout=PATIENCE_S)


@pytest.mark.parametrize("how", ["cancel", "refund"])
def test_giving_back_in_several_calls_goes_on_after_a_cancellation(
    how: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is cancelled during the first of the calls."""

    async def body(store: Any) -> None:
        held = held_of(store)
        both = all_of(held)
        booked = await both.reserve("ada")
        with monkeypatch.context() as patch:
            late = Late(store, patch)
            task = asyncio.ensure_future(booked.cancel() if how == "cancel" else both.refund("ada"))
            await late.under_way.wait()
            await cancelled(task)
            late.may_come.set()
            while store.executor.going_on:
                await asyncio.wait(store.executor.going_on)
        assert (await held.peek("ada")).remaining == LIMIT

    in_event_loop(server.url, body, timeout=PATIENCE_S)


@pytest.mark.parametrize("is_denied", [False, True], ids=["allowed", "denied"])
def test_a_request_of_several_slots_that_is_cancelled_holds_nothing(
    server: RedisServer, is_denied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its last slot is called, and again while the charges in the others are given back; or only then, when the
    last one has denied.
    """

    async def body(store: Any) -> None:
        monkeypatch.setattr(store.executor, "has_slots", True)
        held = held_of(store)
        three = AllOf(TokenBucket(store, "b", "100/hour"), held, TokenBucket(store, "c", "1/hour"))
        keys = ["eve", "ada", "bob"]
        assert await three.allow(keys)
        await three.refund(keys)
        if is_denied:
            assert await three.limiters[2].allow("bob")
        cancelled_at = (4,) if is_denied else (3, 4)
        with monkeypatch.context() as patch:
            may_go, calls = asyncio.Event(), 0

            def later(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
                async def execute(*call: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls >= cancelled_at[0]:
                        await may_go.wait()
                    return await send(*call)

                return execute

            for owner, name in ((store.executor, "execute_command"), (store.executor.client, "execute_many")):
                patch.setattr(owner, name, later(getattr(owner, name)))
            task = asyncio.ensure_future(three.allow(keys))
            for count in cancelled_at:
                async with asyncio.timeout(PATIENCE_S):
                    while calls < count:
                        await asyncio.sleep(0)
                task.cancel()
            may_go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            while store.executor.going_on:
                await asyncio.wait(store.executor.going_on)
        assert (await held.peek("ada")).remaining == LIMIT
        assert (await three.limiters[0].peek("eve")).remaining == 100

    in_event_loop(server.url, body, timeout=PATIENCE_S)


def test_no_other_refund_gives_back_the_permits_of_a_running_refund(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(store: Any) -> None:
        held = held_of(store)
        assert await held.allow_many(["ada", "ada"]) == [True, True]
        with monkeypatch.context() as patch:
            send, may_go = store.executor.execute_command, asyncio.Event()

            async def later(*call: Any) -> Any:
                await may_go.wait()
                return await send(*call)

            patch.setattr(store.executor, "execute_command", later)
            task = asyncio.ensure_future(held.refund("ada"))
            while not store.executor.going_on:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await cancelled(task)
            going_on = set(store.executor.going_on)
            patch.setattr(store.executor, "execute_command", send)
            await held.refund("ada")
            may_go.set()
            await asyncio.wait(going_on)
        assert (await held.peek("ada")).remaining == LIMIT

    in_event_loop(server.url, body, timeout=PATIENCE_S)


def test_close_gives_back_first(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncRedisStore(server.url, timeout=PATIENCE_S) as store:
            late = Late(store, monkeypatch)
            task = asyncio.ensure_future(held_of(store).acquire("ada", 2))
            await late.under_way.wait()
            await cancelled(task)
            late.may_come.set()
        assert not store.executor.going_on

    asyncio.run(main())
    with RedisStore(server.url, timeout=PATIENCE_S) as store:
        assert held_of(store).peek("ada").remaining == LIMIT


@pytest.mark.parametrize("levels", [1, 3])
def test_permits_of_tasks_cancelled_just_before_a_close_come_back(levels: int, server: RedisServer) -> None:
    """None of the tasks has begun to release its permits."""

    async def main() -> None:
        async with AsyncRedisStore(server.url, timeout=PATIENCE_S) as store:
            held, holding = held_of(store), asyncio.Semaphore(0)

            async def work(level: int) -> None:
                if level:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(work(level - 1))
                else:
                    async with held.hold("ada"):
                        holding.release()
                        await asyncio.Event().wait()

            tasks = [asyncio.create_task(work(levels - 1)) for _ in range(2)]
            for _ in tasks:
                await holding.acquire()
            for task in tasks:
                task.cancel()

    asyncio.run(main())
    with RedisStore(server.url, timeout=PATIENCE_S) as store:
        assert held_of(store).peek("ada").remaining == LIMIT


def test_a_closing_store_only_gives_back(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = AsyncRedisStore(server.url, timeout=PATIENCE_S)
        held, bucket = held_of(store), TokenBucket(store, "b", "1/hour")
        lease, booked = await held.acquire("ada"), await bucket.reserve("ada")
        late = Late(store, monkeypatch)
        task = asyncio.ensure_future(held.acquire("ada", 2))
        await late.under_way.wait()
        await cancelled(task)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        for asked in (held.allow("bob"), held.acquire("bob"), held.peek("bob"), held.allow_many(["bob"])):
            with pytest.raises(StoreClosed):
                await asked
        giving_back = [asyncio.ensure_future(work) for work in (lease.release(), booked.cancel())]
        await asyncio.sleep(0)
        late.may_come.set()
        assert await asyncio.gather(*giving_back) == [True, None]
        await closing
        with pytest.raises(StoreClosed):
            await bucket.refund("ada")

    asyncio.run(main())
    with RedisStore(server.url, timeout=PATIENCE_S) as store:
        assert held_of(store).peek("ada").remaining == LIMIT
        assert held_of(store).peek("bob").remaining == LIMIT
        assert TokenBucket(store, "b", "1/hour").allow("ada")


def test_a_cancelled_close_closes(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = AsyncRedisStore(server.url, timeout=PATIENCE_S)
        held = held_of(store)
        with monkeypatch.context() as patch:
            late = Late(store, patch)
            task = asyncio.ensure_future(held.acquire("ada"))
            await late.under_way.wait()
            await cancelled(task)
            closing = asyncio.ensure_future(store.close())
            await asyncio.sleep(0)
            await cancelled(closing)
            late.may_come.set()
        assert store.closed
        assert not any(one.is_connected for one in store.executor.client.connection_pool._available_connections)
        for asked in (held.allow("ada"), TokenBucket(store, "b", "1/hour").refund("ada")):
            with pytest.raises(StoreClosed):
                await asked
        while store.executor.going_on:
            await asyncio.wait(store.executor.going_on)
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("what", ["allow", "allow_many"])
def test_calls_during_a_close_raise_store_closed(what: str, server: RedisServer, is_async: bool) -> None:
    """The breaker doesn't count them as failures of the server."""

    async def main() -> None:
        with proxy(server.port) as through, Store.private(keys=100) as host:
            kind: Any = AsyncRedisStore if is_async else RedisStore
            store = kind(through.url, timeout=PATIENCE_S, host=host)
            bucket = TokenBucket(store, "b", "100/hour")
            call: Any = (lambda method, *given: method(*given)) if is_async else asyncio.to_thread
            await call(bucket.allow, "ada")
            through.is_silent = True

            pool = store.executor.client.connection_pool
            in_use = set(pool._in_use_connections)
            asked = call(bucket.allow, "ada") if what == "allow" else call(bucket.allow_many, ["ada", "bob"])
            task = asyncio.ensure_future(asked)
            while not set(pool._in_use_connections) - in_use:
                await asyncio.sleep(0.001)
            # That it has been sent.
            await asyncio.sleep(0.05)
            await call(store.close)
            with pytest.raises(StoreClosed):
                await task
            async with AsyncRedisStore(through.url, host=host) as other:
                assert other.status().failures == 0

    asyncio.run(main())


def test_a_failed_give_back_is_no_error(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis becomes unavailable between the request and the cancellation, or sends an unexpected reply."""
    errors: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        for away in (True, False):
            with proxy(server.port) as through:
                async with AsyncRedisStore(through.url, timeout=PATIENCE_S) as store:
                    held = held_of(store)
                    await held.allow("bob")
                    with monkeypatch.context() as patch:
                        late = Late(store, patch)
                        task = asyncio.ensure_future(held.acquire("ada"))
                        await late.under_way.wait()
                        await cancelled(task)
                        if away:
                            through.server_port = 1
                            through.cut()
                        else:
                            store.executor.execute_command = None  # the answer comes, and nothing else can be sent
                        late.may_come.set()
                        while store.executor.going_on and away:
                            await asyncio.wait(store.executor.going_on)

    asyncio.run(main())
    # The broken one may be reported when it is collected; Redis being away is not.
    assert [type(context.get("exception")) for context in errors] in ([], [TypeError])


# ---- Redis away when permits are given back --------------------------------------------------------------------------


@pytest.fixture
def through(server: RedisServer) -> Iterator[Proxy]:
    with proxy(server.port) as opened:
        yield opened


def lose(through: Proxy) -> None:
    through.server_port = 1
    through.cut()


def find(through: Proxy, server: RedisServer, held: Any) -> None:
    """Send a call that finds the cut connections."""
    through.server_port = server.port

    def is_answered() -> bool:
        with contextlib.suppress(StoreUnavailable):
            held.peek("ada")
            return True
        return False

    until(is_answered, "a reply over a new connection")


@pytest.mark.parametrize("how", ["hold", "acquire"])
def test_a_block_keeps_its_outcome(how: str, through: Proxy, server: RedisServer, is_async: bool) -> None:
    with blocking_store(through.url, is_async, timeout=PATIENCE_S) as store:
        held = held_of(store)
        for error in (None, ValueError("the block's own")):
            find(through, server, held)
            manager = held.hold("ada") if how == "hold" else held.acquire("ada")
            manager.__enter__()
            lose(through)
            assert not manager.__exit__(type(error) if error else None, error, None)


@pytest.mark.parametrize("how", ["hold", "acquire"])
@pytest.mark.parametrize("what", ["closed", "foreign"])
def test_a_block_raises_its_own_exception(
    what: str, how: str, server: RedisServer, client: redis.Redis, is_async: bool
) -> None:
    class Own(Exception):
        pass

    with blocking_store(server.url, is_async, timeout=PATIENCE_S) as store:
        held = held_of(store)

        def spoil() -> None:
            if what == "closed":
                store.close()
            else:
                client.set(client.keys("*held*")[0], "something else")

        def block(error: Exception | None) -> None:
            with held.hold("ada") if how == "hold" else held.acquire("ada"):
                spoil()
                if error:
                    raise error

        with pytest.raises(Own):
            block(Own())
        if what == "foreign":
            client.flushall()
            with pytest.raises(ForeignState):
                block(None)


def test_a_failed_release_can_be_repeated(through: Proxy, server: RedisServer, is_async: bool) -> None:
    with blocking_store(through.url, is_async, timeout=PATIENCE_S) as store:
        held = held_of(store)
        lease = held.acquire("ada", 2)
        assert held.allow("ada")
        booked = held.reserve("ada")
        left = LIMIT - 4
        for give_back, again, count in (
            (lease.release, lease.release, 2),
            (booked.cancel, lambda: held.refund("ada"), 1),
            (lambda: held.refund("ada"), lambda: held.refund("ada"), 1),
        ):
            lose(through)
            with pytest.raises(StoreUnavailable):
                give_back()
            find(through, server, held)
            assert held.peek("ada").remaining == left
            assert again() in (True, None)
            left += count
            assert held.peek("ada").remaining == left
        assert not lease.release()

"""A forgotten `await` over an asyncio store admits no request."""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from redis_server import RedisServer
from starlette.background import BackgroundTask

import forebay.redis
from forebay import AllOf, Concurrency, FixedWindow, NotAwaited, Store, TokenBucket
from forebay.redis import AsyncLeasedStore, AsyncRedisStore

# Whatever else a method takes has a default.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "allow_many": (["key"],),
    "take_up_to": ("key", 1),
    "convert": ("key", "50/hour"),
    "add": ("key", 1),
    "charge": ("key", 1),
    **dict.fromkeys(("close", "release", "renew", "cancel"), ()),
}


async def things(store: AsyncRedisStore, host: Store) -> list[Any]:
    """One of each class whose methods are awaited."""
    held = Concurrency(store, "held", 100)
    leased = AsyncLeasedStore(store, host)
    return [
        store,
        leased,
        TokenBucket(store, "api", "100/hour"),
        FixedWindow(store, "each", "100/hour", align="stagger"),
        held,
        AllOf(held, TokenBucket(store, "other", "100/hour")),
        TokenBucket(leased, "leased", "100/hour"),
        AllOf(TokenBucket(host, "local", "100/hour"), TokenBucket(leased, "leased", "100/hour")),
        await held.acquire("key"),
        await held.reserve("key"),
    ]


def methods_of(thing: Any) -> list[str]:
    return [
        name for name in dir(type(thing)) if not name.startswith("_") and inspect.isfunction(getattr(type(thing), name))
    ]


def with_things(ask: Callable[[list[Any]], Any], server: RedisServer) -> Any:
    async def main() -> Any:
        async with AsyncRedisStore(server.url, timeout=60) as store:
            with Store.private(keys=100) as host:
                return await ask(await things(store, host))

    return asyncio.run(main())


def test_an_unawaited_call_is_neither_true_nor_false(server: RedisServer) -> None:
    async def ask(made: list[Any]) -> None:
        asked = []
        for thing in made:
            for name in methods_of(thing):
                if name in (
                    "hold",
                    "limited",
                    "status",
                    "give_back_flow",
                    "queue_key",
                    "check_request",
                    "view",
                    "all_of",
                    "together",
                    "make_limiter",
                ):
                    continue
                answer = getattr(thing, name)(*ARGUMENTS.get(name, ("key",)))
                with pytest.raises(NotAwaited, match=r"\(\) was not awaited.* write await"):
                    bool(answer)
                with pytest.raises(NotAwaited):
                    _ = not answer
                with pytest.raises(NotAwaited):
                    any([answer])
                # Or Python would warn of it.
                answer.close()
                asked.append(name)
        assert {"allow", "hit", "hit_each", "acquire", "release", "wait_async", "reserve", "cancel", "close"} < set(
            asked
        )
        assert len(asked) > 50
        with pytest.raises(NotAwaited, match="async with"):
            bool(made[4].hold("key"))

    with_things(ask, server)


def test_every_public_class_with_awaited_methods_is_tested(server: RedisServer) -> None:
    async def ask(made: list[Any]) -> None:
        names = {kind.__name__ for thing in made for kind in type(thing).__mro__}
        assert {name for name in forebay.redis.__all__ if name.startswith("Async")} - names == {"AsyncRedisHold"}

    with_things(ask, server)


def test_an_awaited_method_is_a_coroutine_function(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(made: list[Any]) -> None:
        api = made[2]

        async def left() -> int:
            return int((await api.peek("key")).remaining)

        assert await api.allow("key") is True
        assert await asyncio.gather(api.allow("key"), api.allow("key")) == [True, True]
        task = asyncio.create_task(api.allow("key"))
        assert "AsyncRedisLimiter.allow() running" in repr(task)
        assert await task is True
        assert await asyncio.wait_for(api.allow("key"), 60) is True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(api.allow("key"))
        async with anyio.create_task_group() as group:
            group.start_soon(api.allow, "key")
        with anyio.move_on_after(60):
            assert await api.allow("key")
        assert await asyncio.shield(api.allow("key"))
        # It inspects its function to decide whether to call it in a thread or to await it.
        await BackgroundTask(api.allow, "key")()
        assert await left() == 100 - 10
        answer = api.allow("key")
        assert isinstance(answer, types.CoroutineType)
        assert inspect.getcoroutinestate(answer) == inspect.CORO_CREATED
        await answer
        with pytest.raises(RuntimeError, match="already awaited"):
            await answer
        with monkeypatch.context() as patch:
            patch.setattr(made[0].executor, "execute_command", lambda *_: asyncio.get_running_loop().create_future())
            cancelled = asyncio.ensure_future(api.allow("key"))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        thrown = api.allow("key")
        with pytest.raises(ValueError, match="from outside"):
            thrown.throw(ValueError("from outside"))

    with_things(ask, server)


def test_an_event_loop_runs_an_awaited_method(server: RedisServer) -> None:
    store = AsyncRedisStore(server.url, timeout=60)
    with asyncio.Runner() as runner:
        assert runner.run(TokenBucket(store, "api", "1/hour").allow("key")) is True
        runner.run(store.close())


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_python_warns_of_an_unawaited_call(server: RedisServer) -> None:
    async def ask(made: list[Any]) -> None:
        with pytest.warns(RuntimeWarning, match=r"coroutine 'AsyncRedisLimiter.allow' was never awaited"):
            made[2].allow("key")
        with pytest.warns(RuntimeWarning, match="never awaited"), pytest.raises(NotAwaited):
            bool(made[2].allow("key"))

    with_things(ask, server)

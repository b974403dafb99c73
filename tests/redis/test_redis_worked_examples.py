"""The worked examples of the algorithms over Redis: the very tests that the other stores pass."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import Answer, Booking
from redis_server import RedisServer
from scripts_clock import ServerClock

from penstock import Decision
from penstock.redis import AsyncRedisStore, RedisStore
from penstock.redis.all_of import AskingAll

sys.path.append(str(Path(__file__).parents[1] / "unit"))

import test_worked_examples as examples

EXAMPLES = {
    name: test
    for name, test in vars(examples).items()
    if name.startswith("test_w") and "limit" in inspect.signature(test).parameters
}
globals().update(EXAMPLES)


@pytest.fixture(params=["sync", "two stores", "async", "sync and async"])
def limit(request: pytest.FixtureRequest, server: RedisServer, server_clock: ServerClock) -> Iterator[examples.Limit]:
    """Makes a limiter over each store that is asked."""
    loop = asyncio.new_event_loop()
    names = request.param.split(" and ")
    stores: list[Any] = [RedisStore(server.url, timeout=60) for _ in range(2)] if "two stores" in names else []
    stores += [RedisStore(server.url, timeout=60)] if "sync" in names else []
    stores += [AsyncRedisStore(server.url, timeout=60)] if "async" in names else []

    def ask_async(limiter: Any, method: str, *arguments: Any) -> Any:
        async def answered() -> Any:
            return await getattr(limiter, method)(*arguments)

        return told(limiter, loop.run_until_complete(answered()))

    def ask_sync(limiter: Any, method: str, *arguments: Any) -> Any:
        return told(limiter, getattr(limiter, method)(*arguments))

    def make(make_native: Callable[[Any], Any], rule: object) -> examples.Asked:
        askers: list[Callable[..., Any]] = []
        for store in stores:
            ask = ask_async if isinstance(store, AsyncRedisStore) else ask_sync
            askers.append(functools.partial(ask, make_native(store)))
        return examples.Asked(askers)

    server_clock.set(examples.START)
    yield make
    for store in stores:
        if isinstance(store, AsyncRedisStore):
            loop.run_until_complete(store.close())
        else:
            store.close()
    loop.close()


def told(limiter: Any, answer: Any) -> Answer | Booking:
    """An answer in the oracle's words."""
    if not isinstance(answer, Decision):
        return Booking(answer.allowed, answer.delay_ns)
    bound_by = answer.limiter if isinstance(limiter, AskingAll) else None
    return Answer(
        answer.allowed, answer.limit, answer.remaining, answer.retry_after_ns, answer.reset_after_ns, bound_by
    )


@pytest.fixture
def clock(server_clock: ServerClock) -> ServerClock:
    return server_clock


@pytest.fixture
def at(server_clock: ServerClock) -> examples.At:
    """Moves the clock to so many seconds after the start."""
    return lambda seconds: server_clock.set(examples.START + seconds)


def test_none_is_missing() -> None:
    numbers = {int(name.split("_")[1].removeprefix("w")) for name in EXAMPLES}
    assert numbers >= {*range(1, 18)}

"""A forgotten `await` of a limiter in memory admits no request."""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import anyio
import pytest
from web_requests import wsgi_environ

import forebay
from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Credits,
    FixedWindow,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    NotAwaited,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.web import Gate, Passage, Rule
from forebay.web.native_requests import WSGIRequest

LIMITERS: Final[dict[str, Callable[[Store], Any]]] = {
    "TokenBucket": lambda store: TokenBucket(store, "api", "1/year", burst=1),
    "LeakyBucket": lambda store: LeakyBucket(store, "api", "1/year", capacity=1),
    "MinInterval": lambda store: MinInterval(store, "api", "1 day"),
    "FixedWindow": lambda store: FixedWindow(store, "api", "1/year"),
    "SlidingWindow": lambda store: SlidingWindow(store, "api", "1/year"),
    "BucketedWindow": lambda store: BucketedWindow(store, "api", "1/year", buckets=5),
    "SlidingLog": lambda store: SlidingLog(store, "api", "1/year", keys=8),
    "Concurrency": lambda store: Concurrency(store, "api", 1),
    "AllOf": lambda store: AllOf(TokenBucket(store, "first", "1/year"), FixedWindow(store, "second", "1/year")),
    "Credits": lambda store: with_a_permit(Credits(store, "api")),
}


def with_a_permit(limiter: Credits) -> Credits:
    limiter.add("key", 1)
    return limiter


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=100) as made:
        yield made


@pytest.fixture(params=LIMITERS)
def limiter(request: pytest.FixtureRequest, store: Store) -> Any:
    return LIMITERS[request.param](store)


@pytest.fixture
def bucket(store: Store) -> TokenBucket:
    return TokenBucket(store, "bucket", "100/year")


def test_every_public_limiter_is_tested() -> None:
    public = {name for name in forebay.__all__ if hasattr(getattr(forebay, name), "wait_async")}
    assert public == set(LIMITERS)


def test_wait_async_is_the_only_method_that_is_awaited(limiter: Any) -> None:
    """A new one has to refuse, too."""
    coroutines = []
    for name in dir(type(limiter)):
        method = getattr(limiter, name)
        if name.startswith("_") or name == "wait" or not callable(method):
            continue
        try:
            answer = method("key")
        except (TypeError, InvalidLimiter):  # it takes no key
            continue
        if inspect.isawaitable(answer):
            coroutines.append(name)
            answer.close()
    assert coroutines == ["wait_async"]


def test_an_unawaited_wait_is_neither_true_nor_false(limiter: Any) -> None:
    assert limiter.allow("key")
    answer = limiter.wait_async("key", timeout=0)
    with pytest.raises(NotAwaited, match=r"wait_async\(\) was not awaited.* write await"):
        bool(answer)
    with pytest.raises(NotAwaited):
        _ = not answer
    with pytest.raises(NotAwaited):
        any([answer])
    # Otherwise Python warns of it.
    answer.close()
    assert asyncio.run(limiter.wait_async("key", timeout=0)) is False


def test_an_unawaited_decision_of_a_gate_admits_no_request(bucket: TokenBucket) -> None:
    async def key(request: Any) -> str:
        return "key"

    gate = Gate([Rule(bucket, key=key)])
    passage: Any = gate.enter_async(WSGIRequest(wsgi_environ()))
    with pytest.raises(NotAwaited, match=r"enter_async\(\) was not awaited.* write await"):
        bool(passage)
    for name in ("fields", "cleanup"):
        with pytest.raises(AttributeError):
            getattr(passage, name)
    assert bucket.peek("key").remaining == 100
    admitted: Any = asyncio.run(passage)
    assert isinstance(admitted, Passage)
    assert bucket.peek("key").remaining == 99


def test_a_hold_that_is_not_entered_is_neither_true_nor_false(store: Store) -> None:
    hold = Concurrency(store, "reports", 1).hold("key", timeout=0)
    with pytest.raises(NotAwaited, match="with block"):
        bool(hold)
    with hold as lease:
        assert lease


def test_event_loops_take_an_unawaited_wait(bucket: TokenBucket) -> None:
    async def main() -> None:
        assert await bucket.wait_async("key") is True
        assert await asyncio.gather(bucket.wait_async("key"), bucket.wait_async("key")) == [True, True]
        task = asyncio.create_task(bucket.wait_async("key"))
        assert "wait_async() running" in repr(task)
        assert await task is True
        assert await asyncio.wait_for(bucket.wait_async("key"), 60) is True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bucket.wait_async("key"))
        async with anyio.create_task_group() as group:
            group.start_soon(bucket.wait_async, "key")
        with anyio.fail_after(60):
            assert await bucket.wait_async("key")
        assert await asyncio.shield(bucket.wait_async("key"))
        assert bucket.peek("key").remaining == 100 - 9
        answer = bucket.wait_async("key")
        assert isinstance(answer, types.CoroutineType)
        assert inspect.iscoroutine(answer)
        assert inspect.getcoroutinestate(answer) == inspect.CORO_CREATED
        await answer
        with pytest.raises(RuntimeError, match="already awaited"):
            await answer
        with pytest.raises(InvalidKey):
            await bucket.wait_async(1.5)  # type: ignore[arg-type]

    asyncio.run(main(), debug=True)
    assert asyncio.run(bucket.wait_async("other")) is True


def test_the_repr_of_a_task_may_ask_whether_its_coroutine_is_true(bucket: TokenBucket) -> None:
    """From Python 3.12 on it does; a function of that module asks here for every version."""
    asked: dict[str, Any] = {"__name__": asyncio.base_tasks.__name__}
    exec("def ask(coroutine): return bool(coroutine)", asked)
    answer = bucket.wait_async("key")
    assert asked["ask"](answer) is True
    answer.close()


# A wait for credits ends at once.
@pytest.mark.parametrize("limiter", [name for name in LIMITERS if name != "Credits"], indirect=True)
def test_a_cancelled_wait_charges_nothing(limiter: Any) -> None:
    async def main() -> None:
        assert limiter.allow("key")
        task = asyncio.ensure_future(limiter.wait_async("key"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    limiter.refund("key")
    assert limiter.allow("key")


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_python_warns_of_an_unawaited_wait(bucket: TokenBucket) -> None:
    with pytest.warns(RuntimeWarning, match=r"coroutine 'wait_async' was never awaited"):
        bucket.wait_async("key")
    with pytest.warns(RuntimeWarning, match="never awaited"), pytest.raises(NotAwaited):
        bool(bucket.wait_async("key"))
    assert bucket.peek("key").remaining == 100

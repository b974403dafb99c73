"""Limited tasks where no worker could return them, and actors whose options would fail them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Retries
from redis_server import redis_server
from rq import Queue, SimpleWorker

from forebay import Concurrency, InvalidLimiter, LimitExceeded, Store, TokenBucket
from forebay.contrib import arq as arq_limits
from forebay.contrib import celery as celery_limits
from forebay.contrib import dramatiq as dramatiq_limits
from forebay.contrib import rq as rq_limits
from forebay.testing import ManualClock, private_stores


@pytest.fixture
def bucket(clock: ManualClock) -> Iterator[TokenBucket]:
    with private_stores(clock), Store("shop", keys=1000) as store:
        yield TokenBucket(store, "partner", "1/second", burst=2)


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    broker = StubBroker()
    broker.add_middleware(CurrentMessage())
    yield broker
    broker.close()


def notify(order: int) -> int:
    """The task."""
    return order


def test_direct_call_and_eager_call_of_celery_raise_a_denial(bucket: TokenBucket) -> None:
    app = Celery()
    task = app.task(celery_limits.limited(bucket, key="partner")(notify))
    assert task(1) == 1
    assert task.apply((2,)).get() == 2
    with pytest.raises(LimitExceeded):
        task(3)
    with pytest.raises(LimitExceeded):
        task.apply((4,)).get()


def test_direct_call_and_sync_queue_of_rq_raise_a_denial(bucket: TokenBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = rq_limits.limited(bucket, key="partner")(notify)
    assert limited(1) == 1
    with redis_server() as server, server.client() as client:
        queue = Queue("default", connection=client, is_async=False)
        # The queue finds a job's function by its name.
        monkeypatch.setitem(notify.__globals__, "notify", limited)
        assert queue.enqueue(limited, 2).return_value() == 2
        job = queue.enqueue(limited, 3)
        assert "LimitExceeded" in str(job.latest_result().exc_string)
    with pytest.raises(LimitExceeded):
        limited(4)


def notify_three_times() -> list[str]:
    return [outcome_of_notify(number) for number in range(3)]


def outcome_of_notify(number: int) -> str:
    try:
        return str(notify(number))
    except LimitExceeded as denial:
        return str(denial.limiter)


def test_direct_call_by_another_job_of_rq_raises_a_denial(bucket: TokenBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = rq_limits.limited(bucket, key="partner")(notify)
    with redis_server() as server, server.client() as client:
        queue = Queue("default", connection=client)
        monkeypatch.setitem(notify.__globals__, "notify", limited)
        job = queue.enqueue(notify_three_times)
        SimpleWorker([queue], connection=client).work(burst=True, logging_level="WARNING")
        assert job.return_value() == ["0", "1", "partner"]


def test_direct_call_by_another_actor_raises_a_denial(bucket: TokenBucket, broker: StubBroker) -> None:
    inner = dramatiq_limits.limited(bucket, key="partner")(dramatiq.actor(broker=broker)(notify))
    outcomes: list[Any] = []

    @dramatiq.actor(broker=broker)
    def outer() -> None:
        for number in range(3):
            try:
                outcomes.append(inner(number))
            except LimitExceeded as denial:
                outcomes.append(denial.limiter)

    outer.send()
    worker = dramatiq.Worker(broker, worker_threads=1)
    worker.start()
    broker.join(outer.queue_name, timeout=60_000)
    worker.stop()
    assert outcomes == [0, 1, "partner"]


def test_direct_call_of_an_arq_job_raises_a_denial(bucket: TokenBucket) -> None:
    @arq_limits.limited(bucket, key="partner")
    async def job(context: dict[str, Any], order: int) -> int:
        return order

    async def run() -> None:
        assert await job({}, 1) == 1
        assert await job({}, order=2) == 2
        with pytest.raises(LimitExceeded):
            await job({}, 3)

    asyncio.run(run())


def test_direct_call_of_an_actor_raises_a_denial(bucket: TokenBucket, broker: StubBroker) -> None:
    actor = dramatiq_limits.limited(bucket, key="partner")(dramatiq.actor(broker=broker)(notify))
    assert actor(1) == 1
    assert actor(2) == 2
    with pytest.raises(LimitExceeded):
        actor(3)


@pytest.mark.parametrize("options", [{}, {"max_retries": 0}, {"retry_when": lambda count, error: False}])
def test_denied_message_returns_whatever_the_actor_says_of_retries(
    options: dict[str, Any], broker: StubBroker, store_name: str
) -> None:
    """In real time, as the broker's delays are."""
    ran: list[int] = []

    def send(order: int) -> None:
        ran.append(order)

    with Store(store_name, keys=10) as store:
        bucket = TokenBucket(store, "partner", "20/second", burst=1)
        actor = dramatiq_limits.limited(bucket, key="partner")(dramatiq.actor(broker=broker, **options)(send))
        for order in range(3):
            actor.send(order)
        worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
        worker.start()
        broker.join("default", timeout=60_000)
        worker.stop()
    assert sorted(ran) == [0, 1, 2]
    assert not broker.dead_letters


def test_actor_whose_denials_would_be_lost_is_refused(bucket: TokenBucket, broker: StubBroker) -> None:
    limited = dramatiq_limits.limited(bucket, key="partner")
    with pytest.raises(InvalidLimiter, match=r"add_middleware\(CurrentMessage\(\)\)"):
        limited(dramatiq.actor(broker=StubBroker(), actor_name="a")(notify))
    with pytest.raises(InvalidLimiter, match=r"add_middleware\(Retries\(\)\)"):
        limited(dramatiq.actor(broker=StubBroker(middleware=[CurrentMessage()]), actor_name="b")(notify))
    with pytest.raises(InvalidLimiter, match="throws="):
        limited(dramatiq.actor(broker=broker, actor_name="c", throws=Exception)(notify))
    limited(dramatiq.actor(broker=broker, actor_name="d", throws=(ValueError, KeyError))(notify))
    assert any(isinstance(one, Retries) for one in broker.middleware)


def test_async_actor_is_limited(bucket: TokenBucket, broker: StubBroker) -> None:
    """dramatiq runs it in its event loop, and the thread of the worker takes the permit."""

    async def send(order: int) -> int:
        return order

    broker.add_middleware(dramatiq.middleware.AsyncIO())
    actor = dramatiq_limits.limited(bucket, key="partner")(dramatiq.actor(broker=broker)(send))
    broker.emit_before("worker_boot", None)
    try:
        assert [actor(1), actor(2)] == [1, 2]
        with pytest.raises(LimitExceeded):
            actor(3)
    finally:
        broker.emit_after("worker_shutdown", None)


def test_denial_by_the_lower_of_two_limits_releases_the_permit_of_the_upper(bucket: TokenBucket) -> None:
    slots = Concurrency(bucket.store, "slots", 1)
    limited = rq_limits.limited(slots, key="all")(rq_limits.limited(bucket, key="partner", cost=2)(notify))
    assert limited(1) == 1
    with pytest.raises(LimitExceeded, match="'partner'"):
        limited(2)
    assert slots.acquire("all")


async def coroutine(context: dict[str, Any], order: int) -> None:
    """A job of arq."""


def generator(order: int) -> Iterator[int]:
    yield order


def test_function_that_a_queue_does_not_run_is_refused(bucket: TokenBucket) -> None:
    blocking: Any
    for blocking in (celery_limits, rq_limits):
        for function in (coroutine, generator, int, print):
            with pytest.raises(InvalidLimiter, match="@limited decorates"):
                blocking.limited(bucket, key="key")(function)
    awaiting: Any = arq_limits
    for function in (notify, generator, asyncio.sleep(0)):
        with pytest.raises(InvalidLimiter, match="@limited decorates"):
            awaiting.limited(bucket, key="key")(function)
        if asyncio.iscoroutine(function):
            function.close()
    actors: Any = dramatiq_limits
    for function in (notify, coroutine):
        with pytest.raises(InvalidLimiter, match=r"above @dramatiq\.actor"):
            actors.limited(bucket, key="key")(function)

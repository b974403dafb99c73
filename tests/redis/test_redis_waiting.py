"""Waiting for permits, holding them and giving them back, in threads and tasks; and requests that are charged once."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis_server import RedisServer, until
from scripts_clock import ServerClock

from forebay import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidLimiter,
    LeakyBucket,
    LimitExceeded,
    MinInterval,
    NotAwaited,
    SlidingLog,
    Store,
    StoreClosed,
    TokenBucket,
    waiting,
)
from forebay.contrib.requests import LimitedAdapter
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, RedisStore, wait_queues
from forebay.redis.concurrency import lease_taken

make_log: Any = SlidingLog
WAITED_FOR: dict[str, Callable[[Any], Any]] = {
    "token bucket": lambda store: TokenBucket(store, "w", "2 per 40 ms"),
    "leaky bucket": lambda store: LeakyBucket(store, "w", "1 per 20 ms", capacity=2),
    "minimum interval": lambda store: MinInterval(store, "w", "20 ms"),
    "fixed window": lambda store: FixedWindow(store, "w", "2 per 40 ms"),
    "sliding log": lambda store: make_log(store, "w", "2 per 40 ms"),
    "two": lambda store: AllOf(MinInterval(store, "g", "20 ms"), make_log(store, "w", "2 per 40 ms")),
    "concurrency": lambda store: Concurrency(store, "w", 2, lease="20 ms"),
}
every_kind = pytest.mark.parametrize("make", WAITED_FOR.values(), ids=WAITED_FOR)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


@asynccontextmanager
async def async_store(server: RedisServer) -> AsyncIterator[AsyncRedisStore]:
    async with AsyncRedisStore(server.url, timeout=60) as store:
        yield store


@every_kind
def test_a_waiting_request_is_admitted(
    make: Callable[[Any], Any], redis_store: RedisStore, server: RedisServer
) -> None:
    limiter = make(redis_store)
    assert [limiter.wait("ada", jitter=0.1) for _ in range(6)] == [True] * 6

    async def waited() -> list[bool]:
        async with async_store(server) as store:
            limiter = make(store)
            tasks = [asyncio.create_task(limiter.wait("bob", jitter=0.1)) for _ in range(6)]
            return list(await asyncio.gather(*tasks, limiter.wait_async("cid")))

    assert run(waited()) == [True] * 7


def test_jitter_spreads_tasks_that_wait_for_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, sleeps, answers = 0.0, list[float](), itertools.cycle([False, True])

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        sleeps.append(seconds)

    async def booked(max_delay: object) -> Any:
        return SimpleNamespace(allowed=True, delay=1.0, delay_ns=10**9, due_ns=round((now_s + 1) * 1e9))

    async def denied_once(max_delay: object) -> Any:
        allowed = next(answers)
        return SimpleNamespace(allowed=allowed, delay=1.0 - allowed, delay_ns=10**9 * (1 - allowed), due_ns=0)

    async def waited() -> None:
        for reserve in (booked, denied_once):
            for timeout, room in (("1 minute", 0.1), (None, 0.1), ("1.02 s", 0.02)):
                sleeps.clear()
                for _ in range(100):
                    assert await wait_queues.wait(reserve, asyncio.Lock(), False, timeout, 0.1)
                assert len(set(sleeps)) == 100
                assert 1.0 <= min(sleeps) < 1.0 + 0.2 * room
                assert 1.0 + 0.8 * room < max(sleeps) <= 1.0 + room + 1e-6

    # Two draws of other seeds may round to the same nanosecond.
    monkeypatch.setattr(waiting, "random", random.Random(0))
    monkeypatch.setattr(wait_queues, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    run(waited())


def test_a_cancelled_wait_gives_back_its_booking(
    redis_store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = TokenBucket(redis_store, "w", "1/hour")
    assert bucket.allow("ada")
    before_ns = bucket.peek("ada").reset_after_ns
    # A booking whose reply is still on its way stays charged.
    sleeps = asyncio.Event()

    async def sleep(seconds: float) -> None:
        sleeps.set()
        await asyncio.Event().wait()

    async def cancelled() -> None:
        async with async_store(server) as store:
            task = asyncio.create_task(TokenBucket(store, "w", "1/hour").wait("ada"))
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "sleep", sleep)
                await sleeps.wait()
            assert bucket.peek("ada").reset_after_ns > before_ns
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(cancelled())
    assert bucket.peek("ada").reset_after_ns <= before_ns


def test_tasks_that_cannot_book_are_admitted_in_order(server: RedisServer) -> None:
    async def waited() -> list[int]:
        order: list[int] = []

        async def one(limiter: Any, number: int) -> None:
            assert await limiter.wait("ada")
            order.append(number)

        async with async_store(server) as store:
            limiter = FixedWindow(store, "w", "1 per 5 ms")
            await asyncio.gather(*[one(limiter, number) for number in range(8)])
        return order

    assert run(waited()) == list(range(8))


def test_invalid_waits_are_refused(redis_store: RedisStore, server: RedisServer) -> None:
    bucket = TokenBucket(redis_store, "w", "1/hour")
    for options in ({"timeout": -1}, {"jitter": 1}, {"jitter": "x"}, {"timeout": float("nan")}):
        with pytest.raises(ValueError, match=r"timeout|jitter"):
            bucket.wait("ada", **options)  # type: ignore[arg-type]

        async def waited(options: dict[str, Any]) -> None:
            async with async_store(server) as store:
                await TokenBucket(store, "w", "1/hour").wait("ada", **options)

        with pytest.raises(ValueError, match=r"timeout|jitter"):
            run(waited(options))
    for limiter in (bucket, AllOf(bucket)):
        with pytest.raises(TypeError, match="AsyncRedisStore"):
            limiter.wait_async("ada")
    for max_delay in (-1, "1", True):
        with pytest.raises(ValueError, match="max_delay"):
            bucket.reserve("ada", 1, max_delay)  # type: ignore[arg-type]
    redis_store.close()
    with pytest.raises(StoreClosed):
        bucket.wait("ada")


def test_requests_for_other_windows_wait_in_other_queues(redis_store: RedisStore, server: RedisServer) -> None:
    """The limiters have one name and separate states."""
    slow, quick = FixedWindow(redis_store, "w", "1/year"), FixedWindow(redis_store, "w", "5/second")
    assert slow.allow("ada")
    thread = threading.Thread(target=slow.wait, args=("ada",), daemon=True)
    thread.start()
    until(lambda: waiting._queues, "it is queued")
    assert quick.wait("ada", timeout=5)
    # Nothing else wakes the waiter before its year is over: it ends with this process.
    waiting._queues.clear()


def test_task_that_is_cancelled_while_a_denial_comes_ends() -> None:
    """redis-py may return the reply and drop the cancellation."""

    async def reserve(max_delay: float | None) -> Any:
        task = asyncio.current_task()
        assert task
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return SimpleNamespace(allowed=False, delay=3600.0, delay_ns=3600 * 10**9)

    async def cancelled() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(wait_queues.wait(reserve, asyncio.Lock(), False, None, 0.0), 30)

    run(cancelled())


OF_ONE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "token bucket": lambda store, leased, host: TokenBucket(store, "w", "1/hour"),
    "fixed window": lambda store, leased, host: FixedWindow(store, "w", "1/year"),
    "concurrency": lambda store, leased, host: Concurrency(store, "w", 1, lease="1 hour"),
    "two": lambda store, leased, host: AllOf(TokenBucket(store, "w", "1/hour"), FixedWindow(store, "v", "5/hour")),
    "leased": lambda store, leased, host: TokenBucket(leased, "w", "1/hour"),
    "leased, and one of the host": lambda store, leased, host: AllOf(
        TokenBucket(leased, "w", "5/hour"), FixedWindow(host, "v", "1/hour")
    ),
}


@pytest.mark.parametrize("make", OF_ONE.values(), ids=OF_ONE)
def test_task_whose_request_can_never_be_allowed_does_not_stand_in_line(
    server: RedisServer, make: Callable[[Any, Any, Any], Any]
) -> None:
    async def stand_in_line() -> None:
        with Store.private(keys=10) as host:
            async with async_store(server) as store, AsyncLeasedStore(store, host) as leased:
                limiter = make(store, leased, host)
                assert await limiter.allow("ada")
                first = asyncio.create_task(limiter.wait("ada"))
                await asyncio.sleep(0)
                for cost, error in ((2, CostExceedsLimit), (-1, InvalidCost)):
                    with pytest.raises(error):
                        await limiter.wait("ada", cost, timeout=1)
                assert not first.done()
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first

    run(stand_in_line())


@pytest.mark.parametrize("several", [False, True])
def test_thread_whose_request_can_never_be_allowed_does_not_stand_in_line(
    redis_store: RedisStore, several: bool
) -> None:
    places = Concurrency(redis_store, "w", 1, lease="1 hour")
    limiter: Any = AllOf(places, FixedWindow(redis_store, "v", "5/hour")) if several else places
    taken = places.acquire("ada")
    thread = threading.Thread(target=limiter.wait, args=("ada",), daemon=True)
    thread.start()
    until(lambda: waiting._queues, "it is queued")
    for cost, error in ((2, CostExceedsLimit), (-1, InvalidCost)):
        with pytest.raises(error):
            limiter.wait("ada", cost, timeout=1)
    assert waiting._queues
    taken.release()
    thread.join(60)
    assert not thread.is_alive()


def test_an_interrupted_wait_raises_the_interrupt_whatever_fails(server: RedisServer) -> None:
    async def cancelled() -> None:
        store = AsyncRedisStore(server.url, timeout=60)
        bucket = TokenBucket(store, "w", "1/hour")
        assert await bucket.allow("ada")
        task = asyncio.create_task(bucket.wait("ada"))
        while (await bucket.peek("ada")).reset_after <= 3600:
            await asyncio.sleep(0.001)
        await store.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())


# Permits that are held


def test_tasks_hold_and_renew_a_lease(server: RedisServer, server_clock: ServerClock) -> None:
    async def used() -> None:
        async with async_store(server) as store:
            held = Concurrency(store, "c", 2, lease="30s")
            first = await held.acquire("ada")
            async with await held.acquire("ada"):
                assert (await held.peek("ada")).remaining == 0
                with pytest.raises(LimitExceeded, match="allows 2"):
                    async with await held.acquire("ada"):
                        pass
                with pytest.raises(LimitExceeded):
                    async with held.hold("ada", timeout=0):
                        pass
            assert await first.renew()
            assert await first.release()
            assert not await first.renew()
            assert not await first.release()

            @held.limited(lambda name: name)
            async def work(name: str) -> int:
                return (await held.peek(name)).remaining

            assert await work("ada") == 1
            assert (await held.peek("ada")).remaining == 2
            with pytest.raises(TypeError, match="coroutines"):
                held.limited("ada")(lambda: None)  # type: ignore[arg-type, return-value]
            async with held.hold("ada", 2) as lease:
                assert lease.allowed
                assert not await held.allow("ada")
            assert await held.allow("ada")
            await held.refund("ada")
            assert (await held.peek("ada")).remaining == 2

    run(used())


@pytest.mark.parametrize("several", [False, True])
def test_a_coroutine_over_redis_is_limited(several: bool, server: RedisServer) -> None:
    async def used() -> None:
        async with async_store(server) as store:
            limiter: Any = TokenBucket(store, "w", "2/hour")
            if several:
                limiter = AllOf(FixedWindow(store, "f", "5/year"), limiter)
            ran: list[str] = []

            @limiter.limited(lambda name: name, timeout=0)
            async def work(name: str) -> str:
                ran.append(name)
                return name

            assert [await work("ada"), await work("ada")] == ["ada"] * 2
            with pytest.raises(LimitExceeded, match="limiter 'w' had no permit in time: it allows 2"):
                await work("ada")
            assert ran == ["ada"] * 2
            async with limiter.limited("bob", 2):
                pass
            with pytest.raises(LimitExceeded):
                async with limiter.limited("bob", timeout=0):
                    raise AssertionError("the block ran")
            with pytest.raises(TypeError, match="limits coroutines"):
                limiter.limited("ada")(lambda: None)
            with pytest.raises(NotAwaited, match="limited"):
                bool(limiter.limited("ada"))

    run(used())


def test_a_coroutine_is_not_limited_by_a_store_that_blocks(redis_store: RedisStore) -> None:
    @TokenBucket(redis_store, "w", "1/hour").limited("ada")
    async def work() -> None: ...

    with pytest.raises(TypeError, match="AsyncRedisStore"):
        run(work())


def test_several_limits_with_held_permits_limit_no_function(redis_store: RedisStore, server: RedisServer) -> None:
    def both(store: Any) -> Any:
        return AllOf(TokenBucket(store, "w", "1/hour"), Concurrency(store, "c", 1))

    async def refused() -> None:
        async with async_store(server) as store:
            with pytest.raises(InvalidLimiter, match="Concurrency"):
                both(store).limited("ada")

    with pytest.raises(InvalidLimiter, match="Concurrency"):
        both(redis_store).limited("ada")
    run(refused())


def test_a_timeout_beyond_the_range_of_clocks(server: RedisServer, redis_store: RedisStore) -> None:
    longest: Any = 10**400

    async def waited() -> bool:
        async with async_store(server) as store:
            return await MinInterval(store, "g", "10 ms").wait("ada", timeout=longest)

    assert run(waited())
    assert MinInterval(redis_store, "h", "10 ms").wait("ada", timeout=longest)


def test_a_release_admits_the_next_waiter(redis_store: RedisStore) -> None:
    held = Concurrency(redis_store, "c", 2, lease="10 minutes")
    inside, most = [0], [0]
    lock = threading.Lock()

    @held.limited("ada")
    def work() -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        held.peek("ada")
        with lock:
            inside[0] -= 1

    threads = [threading.Thread(target=lambda: [work() for _ in range(5)]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= 2
    assert held.peek("ada").remaining == 2
    with held.hold("ada", 2), pytest.raises(LimitExceeded), held.hold("ada", timeout=0.001):
        pass
    assert held.peek("ada").remaining == 2
    assert held.allow("ada")
    with held.hold("ada", 0):
        pass
    assert held.peek("ada").remaining == 1  # a block that held nothing gives nothing back


def acquired(held: Any) -> Any:
    return held.acquire("ada")


def of_several(held: Any) -> Any:
    limits = AllOf(held, FixedWindow(held.store, "w", "10/hour"))
    assert limits.allow("ada")
    return limits


def reserved_of_several(held: Any) -> Any:
    keys = ["bob", "ada"]
    booked = AllOf(FixedWindow(held.store, "w", "10/hour"), held).reserve(keys)
    keys.clear()  # the reservation has keys of its own
    return booked


def end_a_web_request(held: Any, taken: Any) -> None:
    held.store.executor.give_back([taken], held.store.executor.patience())


# How a permit is taken, and how it is given back.
GIVING_BACK: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "release": (acquired, lambda held, lease: lease.release()),
    "end of a block": (acquired, lambda held, lease: lease.__exit__(None, None, None)),
    "end of a web request": (acquired, end_a_web_request),
    "refund": (lambda held: held.allow("ada"), lambda held, taken: held.refund("ada")),
    "reset": (acquired, lambda held, lease: held.reset("ada")),
    "cancellation": (lambda held: held.reserve("ada"), lambda held, booked: booked.cancel()),
    "refund of several limits": (of_several, lambda held, limits: limits.refund("ada")),
    "reset of several limits": (of_several, lambda held, limits: limits.reset("ada")),
    "cancellation of several limits": (reserved_of_several, lambda held, booked: booked.cancel()),
    "end of a web request of several limits": (reserved_of_several, end_a_web_request),
}


@pytest.mark.parametrize("how", GIVING_BACK)
def test_a_permit_that_comes_back_wakes_the_waiter(
    how: str, redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiter sends no request by itself: its pauses outlast the test."""
    for name in ("FIRST_BACKOFF_NS", "LAST_BACKOFF_NS"):
        monkeypatch.setattr(waiting, name, waiting.LONGEST_SLEEP_NS)
    monkeypatch.setattr(waiting, "_queues", {})
    held = Concurrency(redis_store, "c", 1, lease="1 hour")
    take, give_back = GIVING_BACK[how]
    taken = take(held)
    admitted = list[bool]()
    threading.Thread(target=lambda: admitted.append(held.wait("ada")), daemon=True).start()
    until(lambda: waiting._queues, "the thread waits")
    give_back(held, taken)
    until(lambda: admitted, "the waiter has the permit")
    assert admitted == [True]


def test_permits_that_have_lapsed_are_not_given_back(redis_store: RedisStore, server_clock: ServerClock) -> None:
    held = Concurrency(redis_store, "c", 3, lease="30s")
    other = Concurrency(redis_store, "c", 3, lease="60s")
    assert held.allow("ada")
    held.reset("ada")
    assert held.allow("ada")
    assert other.allow("ada")
    held.refund("ada")  # the second one, as the first is gone
    assert held.peek("ada").remaining == 2
    held.refund("ada", 3)
    assert held.peek("ada").remaining == 2  # what the other has taken isn't ours to give back
    server_clock.advance(59)
    assert held.peek("ada").remaining == 2
    server_clock.advance(1)
    assert held.peek("ada").remaining == 3


def test_a_reservation_whose_permits_are_gone_gives_back_others(
    redis_store: RedisStore, server: RedisServer, server_clock: ServerClock
) -> None:
    """A `hold` takes the newest permits, a refund the oldest. A cancellation then gives back one of the others."""
    held = Concurrency(redis_store, "c", 4, lease="30s")
    assert held.allow("ada")
    booked = held.reserve("ada", 2)
    lease = lease_taken(held, "ada", 1)  # what entering a `hold` does
    booked.cancel()
    assert held.peek("ada").remaining == 3
    assert lease.release()
    assert held.peek("ada").remaining == 4

    booked = held.reserve("ada")
    server_clock.advance(10)
    assert held.allow("ada")
    held.refund("ada")
    booked.cancel()
    booked.cancel()
    assert held.peek("ada").remaining == 4

    # Its own lease is over, and nothing of it counts any more: then others are none of its business.
    booked = held.reserve("ada")
    server_clock.advance(10)
    assert held.allow("ada")
    held.refund("ada")
    server_clock.advance(20)
    booked.cancel()
    assert held.peek("ada").remaining == 3

    async def asked() -> None:
        async with async_store(server) as store:
            held = Concurrency(store, "c", 4, lease="30s")
            assert await held.allow("bob")
            booked = await held.reserve("bob")
            async with held.hold("bob"):
                await held.refund("bob", 2)
                assert (await held.peek("bob")).remaining == 3
            assert await held.allow("bob")
            await booked.cancel()
            assert (await held.peek("bob")).remaining == 4

    run(asked())


def test_a_signal_handler_takes_permits(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any point of the code that records permits."""
    held = Concurrency(redis_store, "c", 5)
    inside: list[str] = []

    def handler(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.endswith("concurrency.py") and not inside:
            inside.append("ada")
            assert held.allow("bob")
            assert held.allow("ada")
            held.refund("bob")
            held.refund("ada")
            inside.clear()
        return handler

    sys.settrace(handler)
    try:
        for _ in range(3):
            assert held.allow("ada")
            held.refund("ada")
            booked = held.reserve("ada")
            booked.cancel()
    finally:
        sys.settrace(None)
    assert held.peek("bob").remaining == 5
    assert held.peek("ada").remaining == 5


# Requests that are charged once


def test_a_request_is_charged_once_while_its_id_is_remembered(redis_store: RedisStore, client: redis.Redis) -> None:
    log = make_log(redis_store, "l", "9/hour")
    assert log.hit("ada", request_id="r", request_ttl=60).remaining == 8
    (mark,) = client.keys("*:request:*")
    assert 0 < client.pttl(mark) <= 60_001
    client.pexpire(mark, 1)
    event = threading.Event()
    while client.exists(mark):
        event.wait(0.001)
    assert log.hit("ada", request_id="r").remaining == 7
    assert log.hit("ada", request_id="r").remaining == 7
    assert log.hit("ada", 2, request_id="r").remaining == 5  # of another cost: another request
    assert log.hit("bob", request_id="r").remaining == 8


def test_concurrent_requests_of_one_id_are_charged_once(server: RedisServer, server_clock: ServerClock) -> None:
    async def asked() -> int:
        async with async_store(server) as store:
            bucket = TokenBucket(store, "b", "100/hour")
            decisions = await asyncio.gather(*[bucket.hit("ada", request_id=("r", 1)) for _ in range(20)])
            assert all(decisions)
            return (await bucket.peek("ada")).remaining

    assert run(asked()) == 99


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_client_refuses_permits_that_it_can_not_give_back(redis_store: RedisStore, is_joined: bool) -> None:
    places: Any = Concurrency(redis_store, "places", 1)
    limiter = AllOf(places, TokenBucket(redis_store, "api", "5/second")) if is_joined else places
    with pytest.raises(InvalidLimiter, match="make the Concurrency in a Store"):
        LimitedAdapter(limiter)

"""The order of fetches among requests that lack permits of one key: none waits forever while others are served."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from leased_hosts import Hosts
from process_helpers import Crew, SharedNumbers
from proxy import proxy
from redis_server import RedisServer

from forebay import Store, StoreUnavailable, TokenBucket
from forebay.core.leased import BUSY, ENTERED, UNKNOWN_SIZE, Permits
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore
from forebay.redis.commands import Command
from forebay.redis.leased import fetch as leased_fetch
from forebay.redis.leased import single_flight
from forebay.redis.leased.fetch import FETCH_SLOT_QUANTUM_NS, Holdings, Outcome, Steps, borrowed, reported

KEY = "user:42"


@pytest.fixture
def passing(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move the clocks, and the time that bounds how long requests wait."""
    passed_s = 0.0

    def advance(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds
        hosts.advance(seconds)

    for module in (leased_fetch, single_flight):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: passed_s))
    return advance


def asking(limiter: Any, cost: int = 1) -> tuple[Steps[Outcome], Command[Any]]:
    steps = borrowed(limiter, Holdings(), KEY, cost)
    asked = next(steps)
    assert isinstance(asked, Command)
    return steps, asked


def waiting(limiter: Any, cost: int) -> Steps[Outcome]:
    steps = borrowed(limiter, Holdings(), KEY, cost)
    assert isinstance(next(steps), float)
    return steps


def ended(steps: Steps[Outcome], answer: Any = None) -> Outcome:
    with pytest.raises(StopIteration) as end:
        steps.send(answer)
    outcome: Outcome = end.value.value
    return outcome


def spend_all(limiter: Any) -> None:
    while limiter.allow_now(KEY):
        pass


def bucket(hosts: Hosts) -> Any:
    return TokenBucket(hosts.new(lease=60), "l", "1000000/hour")


def passed_over(
    hosts: Hosts, limiter: Any, passing: Callable[[float], None], cost: int, seconds: float = 0.03
) -> tuple[Steps[Outcome], Steps[Outcome], Command[Any]]:
    """A request that has waited long while others fetched, and the fetch that runs now."""
    fetch, asked = asking(limiter)
    long = waiting(limiter, cost)
    passing(0.002)
    assert ended(fetch, hosts.executor.run_command(asked)).allowed
    spend_all(limiter)
    fetch, asked = asking(limiter)
    assert isinstance(long.send(None), float)
    passing(seconds)
    assert isinstance(long.send(None), float)
    return long, fetch, asked


def test_a_request_that_has_waited_long_fetches_next(hosts: Hosts, passing: Callable[[float], None]) -> None:
    """Other requests come to the fetch slot before it tries again."""
    limiter = bucket(hosts)
    long, fetch, asked = passed_over(hosts, limiter, passing, 60)
    assert ended(fetch, hosts.executor.run_command(asked)).allowed
    spend_all(limiter)
    others = [waiting(limiter, 1) for _ in range(3)]
    asked = long.send(None)
    assert isinstance(asked, Command)
    assert ended(long, hosts.executor.run_command(asked)).allowed
    assert isinstance(others[0].send(None), Command)


@pytest.mark.parametrize("seconds", [0.01, 0.3])
def test_a_request_that_was_not_passed_over_reserves_nothing(
    hosts: Hosts, passing: Callable[[float], None], seconds: float
) -> None:
    """So no request is delayed for others that the first reply may serve, however slow it is."""
    limiter = bucket(hosts)
    fetch, asked = asking(limiter)
    waiter = waiting(limiter, 60)
    passing(seconds)
    assert isinstance(waiter.send(None), float)
    assert ended(fetch, hosts.executor.run_command(asked)).allowed
    spend_all(limiter)
    asking(limiter)


@pytest.mark.parametrize("fetch_s", [0.03, 59.99])
def test_a_reservation_that_no_request_takes_ends(
    hosts: Hosts, passing: Callable[[float], None], fetch_s: float
) -> None:
    """It ends soon, at the latest when the fetch slot would have opened anyway. The size of loans stays known."""
    limiter = bucket(hosts)
    tag = limiter.tag(KEY)
    while limiter.left(tag)[0] < 20:
        limiter.allow(KEY)
    spend_all(limiter)
    long, fetch, asked = passed_over(hosts, limiter, passing, 1000, fetch_s)
    long.close()
    assert ended(fetch, hosts.executor.run_command(asked)).allowed
    slot, until_ns, _, size = limiter.enter(tag, 1)
    assert slot == BUSY
    assert size != UNKNOWN_SIZE
    assert until_ns - limiter.now_ns() <= min(0.018, 60 - fetch_s + 0.002) * 1e9
    passing((until_ns - limiter.now_ns()) / 1e9)
    slot, _, _, size = limiter.enter(tag, 1)
    assert slot == ENTERED
    assert size != UNKNOWN_SIZE


def test_a_waiting_request_notices_a_lost_fetch(hosts: Hosts, passing: Callable[[float], None]) -> None:
    """A fetch that fails, as Redis is unavailable, also hands the slot to the waiting request."""
    limiter = bucket(hosts)
    long, fetch, _ = passed_over(hosts, limiter, passing, 60)
    with pytest.raises(StoreUnavailable):
        fetch.throw(StoreUnavailable("away"))
    assert limiter.enter(limiter.tag(KEY), 1)[::3] == (BUSY, UNKNOWN_SIZE)
    assert isinstance(long.send(None), Command)


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_request_is_denied_while_redis_answers_others(
    hosts: Hosts, passing: Callable[[float], None], is_answered: bool
) -> None:
    """However many fetches come before it, at last the request is denied for a moment. It is not unavailable."""
    limiter = bucket(hosts)
    fetch, asked = asking(limiter)
    late = waiting(limiter, 60)
    for _ in range(3):
        passing(0.002)
        if is_answered:
            assert ended(fetch, hosts.executor.run_command(asked)).allowed
            spend_all(limiter)
        else:
            with pytest.raises(StoreUnavailable):
                fetch.throw(StoreUnavailable("away"))
        fetch, asked = asking(limiter)
        assert isinstance(late.send(None), float)
    passing(121)
    if is_answered:
        assert ended(late)[:3] == (False, 0, FETCH_SLOT_QUANTUM_NS)
    else:
        with pytest.raises(StoreUnavailable, match="no fetch"):
            late.send(None)


@pytest.mark.parametrize("cost", [9, 60])
def test_a_request_of_several_permits_beside_flooding_threads(server: RedisServer, cost: int) -> None:
    """As many as a lease can hold, and more."""
    with (
        Store.private(keys=100) as host_store,
        RedisStore(server.url, timeout=5) as redis_store,
        LeasedStore(redis_store, host_store, share=0.01) as store,
    ):
        limiter = TokenBucket(store, "l", "1000000/second", burst=1000)
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                limiter.allow(KEY)

        threads = [threading.Thread(target=flood) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            assert all(limiter.hit(KEY, cost).allowed for _ in range(20))
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("cost", [9, 60])
def test_a_request_of_several_permits_beside_flooding_processes_with_latency(server: RedisServer, cost: int) -> None:
    """Each fetch holds the slot for milliseconds, and leaves it free for microseconds."""
    crew = Crew()
    with Store.private(keys=100) as memory, proxy(server.port) as distant:
        distant.delay_s = 0.01
        stop = SharedNumbers(1)

        @contextlib.contextmanager
        def limiter() -> Iterator[Any]:
            redis_store = RedisStore(distant.url, timeout=30)
            with redis_store, LeasedStore(redis_store, memory, share=0.01) as store:
                yield TokenBucket(store, "l", "1000000/second", burst=1000)

        def flood() -> None:
            with limiter() as flooded:
                while not stop[0]:
                    flooded.allow(KEY)

        try:
            floods = [crew.start(flood) for _ in range(2)]
            with limiter() as asked:
                assert all(asked.hit(KEY, cost).allowed for _ in range(10))
            stop[0] = 1
            crew.results(floods)
        finally:
            crew.end()


def test_very_many_tasks_request_a_new_key(server: RedisServer) -> None:
    async def work() -> None:
        async with AsyncRedisStore(server.url) as redis_store:
            with Store.private(keys=100) as host_store:
                async with AsyncLeasedStore(redis_store, host_store) as store:
                    limiter: Any = TokenBucket(store, "l", "100000000/hour", burst=1_000_000)
                    assert await limiter.allow("warm")
                    tasks = [limiter.allow(KEY) for _ in range(60_000)]
                    answers = Counter(map(type, await asyncio.gather(*tasks, return_exceptions=True)))
                    # The task that fetches while the loop begins all the others may be too late.
                    assert answers[bool] >= 59_999, answers

    asyncio.run(work())


def test_a_refund_waits_in_turn(hosts: Hosts, passing: Callable[[float], None]) -> None:
    """Other requests come to the fetch slot before it tries again."""
    limiter = bucket(hosts)
    fetch, asked = asking(limiter)
    refund = reported(limiter, KEY, 1)
    assert isinstance(next(refund), float)
    passing(0.002)
    assert ended(fetch, hosts.executor.run_command(asked)).allowed
    spend_all(limiter)
    fetch, asked = asking(limiter)
    assert isinstance(refund.send(None), float)
    passing(0.03)
    for _ in range(2):
        assert isinstance(refund.send(None), float)
    assert ended(fetch, hosts.executor.run_command(asked)).allowed
    spend_all(limiter)
    others = [waiting(limiter, 1) for _ in range(3)]
    asked = refund.send(None)
    assert isinstance(asked, Command)
    with pytest.raises(StopIteration):
        refund.send(hosts.executor.run_command(asked))
    assert isinstance(others[0].send(None), Command)


class Late:
    """Holds back the replies to an AsyncLeasedStore until the test releases them."""

    def __init__(self, store: AsyncLeasedStore) -> None:
        self._ask = store.executor.redis.execute
        store.executor.redis.execute = self.ask  # type: ignore[method-assign]
        self.error: Exception | None = None
        self.asked = 0
        self.gate = asyncio.Semaphore(0)

    async def ask(self, asked: Command[Any]) -> Any:
        self.asked += 1
        await self.gate.acquire()
        if self.error:
            raise self.error
        return await self._ask(asked)

    async def turn(self, number: int) -> None:
        """Wait until `number` fetches have called Redis."""
        async with asyncio.timeout(60):
            while self.asked < number:
                await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def with_late(server: RedisServer, work: Callable[[Any, Late], Any], policy: Any = "deny") -> None:
    """Run `work` over leases of one permit each, though more could be borrowed."""

    async def run() -> None:
        async with AsyncRedisStore(server.url, timeout=60, when_unavailable=policy) as redis_store:
            with Store.private(keys=100) as host_store, pytest.MonkeyPatch.context() as patched:
                patched.setattr(leased_fetch, "next_size", lambda *_: 0)
                async with AsyncLeasedStore(redis_store, host_store) as store:
                    late = Late(store)
                    await work(TokenBucket(store, "l", "1000000/hour"), late)
                    assert not store.executor.flight.queues
                    late.gate.release()

    asyncio.run(run())


def started(limiter: Any, costs: list[int]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(limiter.hit(KEY, cost)) for cost in costs]


def test_tasks_fetch_one_after_the_other(server: RedisServer) -> None:
    async def work(limiter: Any, late: Late) -> None:
        tasks = started(limiter, [1, 5, 1, 7])
        for number in range(1, 5):
            await settle()
            assert late.asked == number
            late.gate.release()
            await asyncio.wait(tasks[:number])
        assert all(task.result().allowed for task in tasks)

    with_late(server, work)


def test_a_cancelled_task_hands_its_flight_on(server: RedisServer) -> None:
    """It is cancelled while it waits, as its flight begins, and while it fetches."""

    async def work(limiter: Any, late: Late) -> None:
        tasks = started(limiter, [1, 2, 3, 4, 5])
        await settle()
        tasks[1].cancel()
        hand_on = limiter.store.executor.flight.hand_on

        def cancelling(*arguments: Any, **options: Any) -> None:
            hand_on(*arguments, **options)
            tasks[2].cancel()

        limiter.store.executor.flight.hand_on = cancelling
        tasks[0].cancel()
        await settle()
        limiter.store.executor.flight.hand_on = hand_on
        assert [task.cancelled() for task in tasks] == [True, True, True, False, False]
        assert late.asked == 2
        for _ in range(2):
            late.gate.release()
        assert all(await asyncio.gather(*tasks[3:]))

    with_late(server, work)


@pytest.mark.parametrize("policy", ["deny", "allow"])
@pytest.mark.parametrize("is_answered", [True, False])
def test_tasks_that_wait_too_long_get_an_error(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, is_answered: bool, policy: Any
) -> None:
    """They get it at the end of the second fetch. Tasks that came since then go on waiting."""
    clock = SimpleNamespace(now_s=0.0)
    for module in (leased_fetch, single_flight):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    async def work(limiter: Any, late: Late) -> None:
        tasks = started(limiter, [1, 1, 5, 6])
        await settle()
        clock.now_s += 119
        tasks += started(limiter, [1])
        await settle()
        clock.now_s += 2
        late.error = None if is_answered else StoreUnavailable("away")
        late.gate.release()
        await late.turn(2)
        late.gate.release()
        outcomes = await asyncio.gather(*tasks[2:4], return_exceptions=True)
        late.error = None
        late.gate.release()
        assert (await tasks[4]).allowed
        assert late.asked == 3
        for outcome in outcomes:
            if is_answered:
                assert (outcome.allowed, outcome.retry_after_ns) == (False, FETCH_SLOT_QUANTUM_NS)  # type: ignore[union-attr]
            elif policy == "allow":
                assert outcome.allowed  # type: ignore[union-attr]
                assert outcome.degraded  # type: ignore[union-attr]
            else:
                assert isinstance(outcome, StoreUnavailable)
                assert "no fetch" in str(outcome)
        await asyncio.gather(*tasks[:2], return_exceptions=True)

    with_late(server, work, policy)


@pytest.mark.parametrize("is_next", [True, False])
def test_cancelled_flights_show_nothing_about_redis(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, is_next: bool
) -> None:
    """However late it is, the next task then fetches itself. Only flights that Redis ends are counted."""
    clock = SimpleNamespace(now_s=0.0)
    for module in (leased_fetch, single_flight):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    async def work(limiter: Any, late: Late) -> None:
        tasks = started(limiter, [1, 1, 1, 5])
        for number in range(1, 4):
            await late.turn(number)
            clock.now_s += 59
            if number == 3 and not is_next:
                # Two have fetched and given up, and this is the first that fails because of Redis.
                late.error = StoreUnavailable("away")
                late.gate.release()
            else:
                tasks[number - 1].cancel()
            await asyncio.wait(tasks[number - 1 : number])
        await late.turn(4)
        late.error = None
        late.gate.release()
        assert (await tasks[3]).allowed

    with_late(server, work)


@pytest.mark.parametrize("is_collected", [True, False])
def test_no_task_waits_for_a_loop_that_has_ended(server: RedisServer, is_collected: bool) -> None:
    """The loop was closed while tasks fetched and waited; they were never cancelled."""
    with Store.private(keys=100) as host_store:
        redis_store = AsyncRedisStore(server.url, timeout=60)
        store = AsyncLeasedStore(redis_store, host_store)
        limiter: Any = TokenBucket(store, "l", "1000000/hour")
        late = Late(store)

        async def begin() -> list[asyncio.Task[Any]]:
            tasks = started(limiter, [5, 6, 7])
            await late.turn(1)
            await settle()
            return tasks

        loop = asyncio.new_event_loop()
        tasks = loop.run_until_complete(begin())
        loop.run_until_complete(redis_store.executor.client.aclose())
        loop.close()
        store.executor.checking._log_destroy_pending = False  # type: ignore[union-attr]
        if is_collected:
            for task in tasks:
                # Their messages about being destroyed are of no interest.
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            del tasks, task
            late.gate = asyncio.Semaphore(0)
            gc.collect()
            assert not store.executor.flight.queues

        async def ask() -> Any:
            async with asyncio.timeout(60):
                return await limiter.hit(KEY, 300)

        with pytest.raises(RuntimeError, match="another event loop before"):
            asyncio.run(ask())


def test_an_interrupted_task_hands_its_flight_on(server: RedisServer) -> None:
    """By any other exception, such as a signal handler raises."""

    async def work(limiter: Any, late: Late) -> None:
        tasks = started(limiter, [1, 5, 6, 7])
        await settle()
        hit_now = Permits.hit_now

        class Spoilt:
            terms, tag, name = limiter._permits.terms, limiter._permits.tag, limiter._permits.name

            def hit_now(self, key: Any, cost: int) -> Any:
                if cost == 6:
                    raise InterruptedError("by a signal")
                return hit_now(limiter._permits, key, cost)

        (line,) = limiter._store.executor.flight.queues.values()
        for waiter in line.waiters:
            waiter.permits = Spoilt()
        for _ in range(4):
            late.gate.release()
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        names = [type(outcome).__name__ for outcome in outcomes]
        assert names == ["Decision", "InterruptedError", "Decision", "Decision"]

    with_late(server, work)


def test_waiting_tasks_of_a_closed_store_get_an_error(server: RedisServer) -> None:
    async def work(limiter: Any, late: Late) -> None:
        tasks = started(limiter, [1, 1, 1])
        await settle()
        limiter.store.executor.closed = True
        late.gate.release()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes[0]
        assert [type(outcome).__name__ for outcome in outcomes[1:]] == ["StoreClosed"] * 2
        limiter.store.executor.closed = False

    with_late(server, work)

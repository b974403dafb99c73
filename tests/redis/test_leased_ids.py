"""A request to a leased limit that is repeated on one host under one id is charged once there."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from blocking import Blocking, blocking_store
from leased_hosts import Hosts
from process_helpers import Crew, SharedNumbers, wait_until
from redis_server import RedisServer, redis_server
from scripts_clock import ServerClock

from forebay import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    MinInterval,
    SlidingWindow,
    Store,
    StoreClosed,
    StoreUnavailable,
    TokenBucket,
)
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedLimiter, LeasedStore, RedisStore
from forebay.redis.leased.charge import LeasedPart
from forebay.segment import layout
from forebay.testing import ManualClock

KEY: Final = "user:42"
LIMIT: Final = 100
KINDS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "token bucket": lambda store, name: TokenBucket(store, name, "100/hour"),
    "fixed window": lambda store, name: FixedWindow(store, name, "100/hour"),
    "sliding window": lambda store, name: SlidingWindow(store, name, "100/hour"),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class World:
    """One host, with workers whose stores block or, behind `Blocking`, are awaited."""

    def __init__(self, redis_store: Any, clock: ManualClock, server_clock: ServerClock) -> None:
        self.redis_store, self.clock, self.server_clock = redis_store, clock, server_clock
        self.host_store = Store.private(keys=1000, clock=clock)
        self.workers: list[Any] = []

    def worker(self, host_store: Store | None = None) -> Any:
        host_store = host_store or self.host_store
        if isinstance(self.redis_store, Blocking):
            store: Any = Blocking(
                AsyncLeasedStore(self.redis_store.wrapped, host_store, lease="1 minute", share=0.1),
                self.redis_store.loop,
            )
        else:
            store = LeasedStore(self.redis_store, host_store, lease="1 minute", share=0.1)
        self.workers.append(store)
        return store

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.server_clock.advance(seconds)

    def used(self, limiter: Any, key: Any = KEY) -> int:
        """The permits that count as spent, after all workers have given back."""
        for store in self.workers:
            executor = store.executor
            back = executor.give_back(executor.holdings.unused(everything=True))
            if back is not None:
                store.loop.run_until_complete(back)
        decision = limiter.peek(key, 0)
        return int(decision.limit - decision.remaining)

    def close(self) -> None:
        for store in self.workers:
            store.close()
        self.host_store.close()


@pytest.fixture
def world(server: RedisServer, server_clock: ServerClock, is_async: bool) -> Iterator[World]:
    with blocking_store(server.url, is_async, timeout=60) as redis_store:
        made = World(redis_store, ManualClock(1000.0), server_clock)
        yield made
        made.close()


@every_kind
def test_repeated_request_is_charged_once(world: World, make: Callable[..., Any]) -> None:
    limiter = make(world.worker(), "l")
    for cost, request_id in ((1, "r"), (3, "r"), (3, b"r"), (LIMIT // 5, "alone")):
        before = world.used(limiter)
        first = limiter.hit(KEY, cost, request_id=request_id)
        for _ in range(4):
            again = limiter.hit(KEY, cost, request_id=request_id)
            assert (again.allowed, again.limit, again.retry_after) == (True, LIMIT, 0.0)
            assert again.limiter == "l"
            assert 0 <= again.remaining <= LIMIT - before - cost
            assert again.reset_after >= first.reset_after - 60
        assert world.used(limiter) == before + cost
    assert limiter.hit(KEY, request_id="another")
    assert limiter.hit("another key", request_id="r")
    assert world.used(limiter) == 1 + 3 + 3 + LIMIT // 5 + 1
    stats = world.host_store.stats().limiters["l"]
    assert (stats.allowed, stats.denied) == (5 * 4 + 2, 0)


@every_kind
def test_workers_of_one_host_know_the_id_and_another_host_does_not(world: World, make: Callable[..., Any]) -> None:
    first, second = make(world.worker(), "l"), make(world.worker(), "l")
    with Store.private(keys=1000, clock=world.clock) as another:
        far = make(world.worker(another), "l")
        assert all(limiter.hit(KEY, 5, request_id="r") for limiter in (first, second, first))
        assert world.used(first) == 5
        assert far.hit(KEY, 5, request_id="r")
        assert world.used(first) == 10
        # Each host gives back what was charged there.
        for limiter in (far, far, second, first):
            limiter.refund(KEY, 5, request_id="r")
        assert world.used(first) == 0
        for store in world.workers:
            store.close()


@every_kind
def test_refund_by_id_gives_back_once(world: World, make: Callable[..., Any]) -> None:
    limiter, other = make(world.worker(), "l"), make(world.worker(), "l")
    assert limiter.hit(KEY, 10)
    assert limiter.hit(KEY, 3, request_id="r")
    for key, cost, request_id in (
        (KEY, 3, "unknown"),
        ("other", 3, "r"),
        (KEY, 2, "r"),
        (KEY, 2**70, "r"),
        (KEY, 0, "r"),
    ):
        limiter.refund(key, cost, request_id=request_id)
    assert world.used(limiter) == 13
    for one in (other, limiter, other):
        one.refund(KEY, 3, request_id="r")
        assert world.used(limiter) == 10
    # The refund has removed the mark.
    for _ in range(2):
        assert limiter.hit(KEY, 3, request_id="r")
        assert world.used(limiter) == 13


@every_kind
def test_denied_request_leaves_no_mark(world: World, make: Callable[..., Any]) -> None:
    limiter = make(world.worker(), "l")
    assert limiter.hit(KEY, LIMIT, request_id="all")
    for _ in range(2):
        assert not limiter.hit(KEY, request_id="r")
    again = limiter.hit(KEY, LIMIT, request_id="all")
    assert (again.allowed, again.remaining, again.retry_after) == (True, 0, 0.0)
    limiter.refund(KEY, request_id="r")
    assert world.used(limiter) == LIMIT
    world.advance(2 * 3600)
    assert limiter.hit(KEY, 7, request_id="r")
    assert world.used(limiter) == 7


def test_request_is_remembered_for_its_ttl(world: World) -> None:
    limiter = TokenBucket(world.worker(), "l", "100/year")
    for ttl, seconds in (({"request_ttl": "90s"}, 90), ({}, 300)):
        before = world.used(limiter)
        assert limiter.hit(KEY, 5, request_id="r", **ttl)
        world.advance(seconds - 0.001)
        assert limiter.hit(KEY, 5, request_id="r", **ttl)
        assert world.used(limiter) == before + 5
        world.advance(0.001)
        limiter.refund(KEY, 5, request_id="r")
        assert limiter.hit(KEY, 5, request_id="r", **ttl)
        assert world.used(limiter) == before + 10
        world.advance(seconds)


def test_request_with_cost_0_leaves_no_mark(world: World) -> None:
    limiter = FixedWindow(world.worker(), "l", "100/hour")
    assert limiter.hit(KEY, 0, request_id="r")
    assert limiter.hit(KEY, 5, request_id="r")
    assert world.used(limiter) == 5


def test_wrong_ids_charge_nothing(world: World) -> None:
    limiter: Any = FixedWindow(world.worker(), "l", "100/hour")
    several: Any = AllOf(limiter, FixedWindow(world.host_store, "local", "100/hour"))
    for one in (limiter, several):
        for error, key, more in [
            *((InvalidKey, KEY, {"request_id": wrong}) for wrong in (1.5, [], {}, object(), ("r", None))),
            *((InvalidRate, KEY, {"request_id": "r", "request_ttl": wrong}) for wrong in ("soon", 0, -1, float("nan"))),
            (InvalidKey, KEY, {"request_ttl": "1 hour"}),
            (InvalidKey, 1.5, {"request_id": "r"}),
        ]:
            with pytest.raises(error):
                one.hit(key, **more)
        with pytest.raises(InvalidKey, match="request_id is str"):
            one.refund(KEY, request_id=1.5)
        with pytest.raises(CostExceedsLimit):
            one.hit(KEY, LIMIT + 1, request_id="r")
    with pytest.raises(InvalidLimiter, match="one limit for all calls"):
        limiter.hit(KEY, rate="6/hour", request_id="r")
    held = AllOf(limiter, Concurrency(world.host_store, "held", 5))
    for method in (held.hit, held.refund):
        with pytest.raises(InvalidLimiter, match=r"Concurrency.*takes no request_id in AllOf.*a call of its own"):
            method(KEY, request_id="r")
    assert world.used(limiter) == 0
    assert several.peek(KEY).remaining == LIMIT


# Races. An attempt acts between two steps of another one.


def once(monkeypatch: pytest.MonkeyPatch, method: str, another: Callable[[], Any]) -> None:
    """Ahead of the first call of this method of a part, another attempt is allowed."""
    usual = getattr(LeasedPart, method)
    calls = [another]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if calls:
            assert calls.pop()()
        return usual(*args, **kwargs)

    monkeypatch.setattr(LeasedPart, method, replaced)


@every_kind
def test_loser_of_a_race_gives_its_charge_back(
    hosts: Hosts, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = make(hosts.new(), "l")

    once(monkeypatch, "charge_now", lambda: limiter.hit(KEY, 3, request_id="r"))
    decision = limiter.hit(KEY, 3, request_id="r")
    assert (decision.allowed, decision.retry_after) == (True, 0.0)
    hosts.give_back(everything=True)
    assert limiter.peek(KEY).remaining == LIMIT - 3
    assert limiter.hit(KEY, 3, request_id="r")
    assert limiter.peek(KEY).remaining == LIMIT - 3


@every_kind
def test_second_attempt_for_the_last_permits_is_allowed_by_the_mark(
    hosts: Hosts, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = make(hosts.new(), "l")
    once(monkeypatch, "charge_now", lambda: limiter.hit(KEY, LIMIT, request_id="r"))
    assert limiter.hit(KEY, LIMIT, request_id="r")
    assert limiter.peek(KEY).remaining == 0
    assert not limiter.hit(KEY, request_id="another")


def test_loser_is_allowed_while_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its charge stays."""
    with (
        redis_server() as own,
        RedisStore(own.url, timeout=60) as redis_store,
        Store.private(keys=100) as host,
        LeasedStore(redis_store, host, share=1.0, lease="1 minute") as store,
    ):
        limiter: Any = FixedWindow(store, "l", "100/year")
        while limiter.left(limiter.tag(KEY))[0] < 10:
            assert limiter.allow(KEY)
        had = limiter.left(limiter.tag(KEY))[0]

        def another() -> Any:
            decision = limiter.hit(KEY, 3, request_id="r")
            own.process.kill()
            own.process.wait()
            return decision

        once(monkeypatch, "charge_now", another)
        for _ in range(3):
            assert limiter.hit(KEY, 3, request_id="r")
        assert limiter.left(limiter.tag(KEY))[0] == had - 6
        # The permits that a refund can't report are lost, and it raises.
        with pytest.raises(StoreUnavailable):
            limiter.refund(KEY, 3, request_id="r")
        limiter.refund(KEY, 3, request_id="r")


@pytest.mark.parametrize("step", ["charge_now", "insert_mark", "cancel"])
@pytest.mark.parametrize("several", [False, True])
def test_attempt_that_ends_anywhere_leaves_no_mark_without_a_charge(
    hosts: Hosts, step: str, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of a signal handler ends an attempt before it charges, before it marks, or before it gives back."""
    store = hosts.new()
    leased: Any = FixedWindow(store, "l", "100/hour")
    limiter: Any = AllOf(FixedWindow(store.host_store, "local", "100/hour"), leased) if several else leased

    class Ended(BaseException):
        pass

    def end(*args: Any) -> None:
        raise Ended

    if step == "cancel":
        once(monkeypatch, "charge_now", lambda: limiter.hit(KEY, 3, request_id="r"))
        monkeypatch.setattr(type(store.executor), "cancel", end)
    else:
        monkeypatch.setattr(LeasedPart if step == "charge_now" else LeasedLimiter, step, end)
    if step == "charge_now" and several:
        # The look has found a lease that suffices.
        assert leased.hit(KEY, 1)
        assert leased.allow_many([KEY] * 10) == [True] * 10
    before = LIMIT - leased.peek(KEY, 0).remaining
    with contextlib.suppress(Ended):
        limiter.hit(KEY, 3, request_id="r")
    monkeypatch.undo()
    hosts.give_back(everything=True)
    charged = {"charge_now": 0, "insert_mark": 3, "cancel": 6}[step]
    assert LIMIT - leased.peek(KEY, 0).remaining <= before + charged
    assert limiter.hit(KEY, 3, request_id="r")
    assert limiter.hit(KEY, 3, request_id="r")
    hosts.give_back(everything=True)
    assert 3 <= LIMIT - leased.peek(KEY, 0).remaining - before <= charged + 3


def test_threads_with_one_id_charge_once(hosts: Hosts) -> None:
    limiter: Any = FixedWindow(hosts.new(), "l", "1000000/year")
    threads, ids = 4, 300
    together = threading.Barrier(threads)
    denied = []

    def work() -> None:
        for number in range(ids):
            if number % 25 == 0:
                together.wait()
            if not limiter.hit(KEY, 2, request_id=number):
                denied.append(number)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert denied == []
    hosts.give_back(everything=True)
    assert limiter.peek(KEY).remaining == 1_000_000 - 2 * ids


def test_killed_workers_leave_no_mark_without_a_charge(crew: Crew, server: RedisServer) -> None:
    """The client repeats every request, whether or not it got an answer."""
    kills, chance, begun, limit = 25, random.Random(1), SharedNumbers(1), 1_000_000
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(Store.private(keys=20_000))

        def limiter_of(stack: contextlib.ExitStack) -> Any:
            redis_store = stack.enter_context(RedisStore(server.url, timeout=30))
            return FixedWindow(stack.enter_context(LeasedStore(redis_store, host)), "l", f"{limit}/year")

        def work() -> None:
            with contextlib.ExitStack() as own:
                limiter = limiter_of(own)
                for _ in range(1000):
                    begun[0] += 1
                    limiter.hit(KEY, request_id=begun[0])
                signal.pause()

        limiter = limiter_of(stack)
        limiter.store.executor.keeper.end()
        # Enough that no worker fetches: a fetch that is killed would lose what it borrows.
        while limiter.left(limiter.tag(KEY))[0] < 2 * 1000 * kills:
            assert limiter.allow(KEY)
        before = limiter.peek(KEY, 0).remaining
        for _ in range(kills):
            enough = begun[0] + chance.randrange(5, 50)
            worker = crew.start(work)
            wait_until(lambda enough=enough: begun[0] >= enough, "requests")  # type: ignore[misc]
            worker.kill()
        ids = begun[0]
        for request_id in range(1, ids + 1):
            assert limiter.hit(KEY, request_id=request_id)
        assert ids <= before - limiter.peek(KEY, 0).remaining <= ids + kills


# asyncio


def in_loop(server: RedisServer, work: Callable[[Any, AsyncRedisStore], Any]) -> None:
    async def main() -> None:
        async with AsyncRedisStore(server.url, timeout=30) as redis_store:
            with Store.private(keys=100) as host:
                async with AsyncLeasedStore(redis_store, host, share=1.0, lease="1 minute") as store:
                    await work(store, redis_store)

    asyncio.run(main())


@pytest.mark.parametrize("several", [False, True])
def test_tasks_with_one_id_charge_once(server: RedisServer, several: bool) -> None:
    async def work(store: Any, redis_store: AsyncRedisStore) -> None:
        leased: Any = FixedWindow(store, "l", "100/year")
        local = FixedWindow(store.host_store, "local", "100/year")
        limiter: Any = AllOf(local, leased) if several else leased
        for request_id in range(10):
            decisions = await asyncio.gather(*[limiter.hit(KEY, 3, request_id=request_id) for _ in range(10)])
            assert all(decision.allowed for decision in decisions)
        assert (await leased.peek(KEY, 0)).remaining == 70
        assert not several or local.peek(KEY).remaining == 70
        await limiter.refund(KEY, 3, request_id=0)
        await limiter.refund(KEY, 3, request_id=0)
        assert (await leased.peek(KEY, 0)).remaining == 73

    in_loop(server, work)


@pytest.mark.parametrize("several", [False, True])
def test_cancelled_attempt_leaves_no_mark(server: RedisServer, several: bool) -> None:
    async def work(store: Any, redis_store: AsyncRedisStore) -> None:
        leased: Any = FixedWindow(store, "l", "100/year")
        limiter: Any = AllOf(FixedWindow(store.host_store, "local", "100/year"), leased) if several else leased
        execute: Any = redis_store.executor.execute_command
        asked = asyncio.Event()

        async def never(*call: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        redis_store.executor.execute_command = never  # type: ignore[method-assign]
        request = asyncio.ensure_future(limiter.hit(KEY, 3, request_id="r"))
        await asked.wait()
        waiting = asyncio.ensure_future(limiter.hit(KEY, 3, request_id="r"))
        await asyncio.sleep(0)
        redis_store.executor.execute_command = execute  # type: ignore[method-assign]
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        # The attempt that waits for the other one's fetch makes its own.
        assert (await waiting).allowed
        assert (await limiter.hit(KEY, 3, request_id="r")).allowed
        assert (await leased.peek(KEY, 0)).remaining == 97

    in_loop(server, work)


# A store that fails, or is full, or closed


def fill(store: Store) -> None:
    filler = FixedWindow(store, "filler", "1/year")
    assert all(filler.allow(number) for number in range(5000))


@pytest.mark.parametrize("policy", ["allow", "local"])
def test_fallback_remembers_what_it_has_charged(policy: str, is_async: bool) -> None:
    options: dict[str, Any] = {"when_unavailable": policy}
    with Store.private(keys=100) as host, Store.private(keys=100) as shares, redis_server() as own:
        if policy == "local":
            options |= {"host": shares, "hosts": 2}
        with blocking_store(own.url, is_async, timeout=60, **options) as redis_store:
            made = World(redis_store, ManualClock(1000.0), None)  # type: ignore[arg-type]
            limiter = FixedWindow(made.worker(host), "l", "100/year")
            local = FixedWindow(host, "local", "100/year")
            several: Any = AllOf(limiter, local)
            assert limiter.hit("before", 5, request_id="r")
            own.process.kill()
            own.process.wait()
            # What a lease has charged is known without Redis.
            assert not limiter.hit("before", 5, request_id="r").degraded
            for number in range(1, 4):
                decision = limiter.hit(KEY, 5, request_id="r")
                assert (decision.allowed, decision.degraded) == (True, True)
                assert decision.remaining == (45 if policy == "local" else LIMIT)
                # The fallbacks of several limits don't know the request, so it is charged again.
                assert several.hit("several", 1, request_id="r")
                assert local.peek("several").remaining == LIMIT - number
            limiter.refund(KEY, 5, request_id="r")
            limiter.refund(KEY, 5, request_id="r")
            assert limiter.hit(KEY, 1).remaining == (49 if policy == "local" else LIMIT)
            # The fallback gives back nothing that it has not charged.
            assert limiter.hit("before", 20).degraded
            limiter.refund("before", 5, request_id="r")
            assert limiter.hit("before", 1).remaining == (29 if policy == "local" else LIMIT)
            for store in made.workers:
                store.close()


def test_request_that_a_full_store_lets_in_is_charged_later(redis_store: RedisStore) -> None:
    with Store.private(keys=1, on_full="allow") as host, LeasedStore(redis_store, host, share=1.0) as store:
        limiter: Any = FixedWindow(store, "l", "1000000/year")
        fill(host)
        for _ in range(3):
            assert limiter.hit(KEY, 5, request_id="r").full
        limiter.refund(KEY, 5, request_id="r")
        assert limiter.peek(KEY).remaining == 1_000_000


def test_closed_stores_say_so(world: World) -> None:
    limiter = FixedWindow(world.worker(), "l", "100/hour")
    assert limiter.hit(KEY, 3, request_id="r")
    world.workers.pop().close()
    with pytest.raises(StoreClosed):
        limiter.refund(KEY, 3, request_id="r")
    with pytest.raises(StoreClosed):
        limiter.hit("another", 3, request_id="r")
    world.host_store.close()
    for method in (limiter.hit, limiter.refund):
        with pytest.raises(StoreClosed):
            method(KEY, 3, request_id="r")


# Several limits


def test_request_to_several_limits_is_charged_once_to_all(world: World) -> None:
    store = world.worker()
    local, gap = FixedWindow(world.host_store, "local", "100/hour"), MinInterval(world.host_store, "gap", "1 hour")
    first, second = TokenBucket(store, "first", "90/hour"), SlidingWindow(store, "second", "100/hour")
    several: Any = AllOf(first, local, gap, second)
    keys, costs = ["a", "b", "c", "d"], [2, 3, 1, 4]
    for _ in range(3):
        decision = several.hit(keys, costs, request_id="r")
        assert (decision.allowed, decision.retry_after) == (True, 0.0)
    assert (world.used(first, "a"), world.used(second, "d")) == (2, 4)
    assert (local.peek("b").remaining, gap.peek("c").allowed) == (97, False)
    allowed = {name: stats.allowed for name, stats in world.host_store.stats().limiters.items()}
    assert [allowed[name] for name in ("first", "local", "gap", "second")] == [3] * 4
    # Others are other requests. The gap denies them.
    for other_keys, other_costs, request_id in (
        (keys, costs, "other"),
        (keys, [2, 3, 1, 5], "r"),
        (keys[::-1], costs, "r"),
    ):
        assert several.hit(other_keys, other_costs, request_id=request_id).allowed is (other_keys != keys)
    several.refund(keys, [2, 3, 1, 5], request_id="r")
    several.refund(keys, [2, 3, 1, 500], request_id="r")
    assert local.peek("b").remaining == 97
    for _ in range(2):
        several.refund(keys, costs, request_id="r")
        assert (world.used(first, "a"), world.used(second, "d")) == (0, 0)
        assert (local.peek("b").remaining, gap.peek("c").allowed) == (100, True)
    assert several.hit(keys, 0, request_id="zero")
    assert several.hit(keys, [0, 0, 0, 5], request_id="zero")
    assert world.used(second, "d") == 5


def test_child_counts_a_repeated_request_in_lines_of_its_own(crew: Crew, redis_store: RedisStore) -> None:
    """Not in those of its parent, which may count at the same moment."""
    with Store.private(keys=1000) as host, LeasedStore(redis_store, host, share=1.0) as store:
        limits = [FixedWindow(store, "first", "100/year"), TokenBucket(store, "second", "100/year")]
        several: Any = AllOf(*limits)
        assert several.hit(KEY, request_id="r")
        assert crew.start(lambda: several.hit(KEY, request_id="r").allowed).result()
        raw = host.segment.read(layout.COUNTERS_OFFSET, layout.OWNED_COUNTER_LINES * layout.COUNTER_LINE.size)
        lines = [line for line in layout.COUNTER_LINE.iter_unpack(raw) if line[0]]
        numbers = [number for number, (name, _) in host.attachment.limiters().items() if name in ("first", "second")]
        assert len(numbers) == 2
        for number in numbers:
            assert [allowed for limiter, _, _, allowed, *_ in lines if limiter == number + 1] == [1, 1]


def test_loser_gives_back_to_all_limits(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    store = hosts.new()
    local, leased = FixedWindow(store.host_store, "local", "100/hour"), TokenBucket(store, "leased", "100/hour")
    several: Any = AllOf(local, leased)
    # Both attempts fetch.
    once(monkeypatch, "charge", lambda: several.hit(KEY, 3, request_id="r"))
    assert several.hit(KEY, 3, request_id="r")
    hosts.give_back(everything=True)
    assert (local.peek(KEY).remaining, leased.peek(KEY).remaining) == (97, 97)
    assert several.hit(KEY, 3, request_id="r").remaining <= 97
    assert (local.peek(KEY).remaining, leased.peek(KEY).remaining) == (97, 97)


def test_several_limits_with_one_that_lets_in_uncharged_leave_no_mark(redis_store: RedisStore) -> None:
    with (
        Store.private(keys=1000) as host,
        Store.private(keys=1, on_full="allow") as full,
        LeasedStore(redis_store, host, share=1.0) as store,
    ):
        local = FixedWindow(full, "local", "1000000/year")
        fill(full)
        leased = FixedWindow(store, "l", "100/year")
        several: Any = AllOf(local, leased)
        for _ in range(2):
            assert several.hit(KEY, 3, request_id="r")
        store.executor.give_back(store.executor.holdings.unused(everything=True))
        assert leased.peek(KEY).remaining == 94

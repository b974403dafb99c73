"""Several limits of which some are leased: a request is charged to all or to none."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from leased_hosts import Hosts
from process_helpers import Crew, SharedNumbers, wait_until
from redis_server import RedisServer

from forebay import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    LimitExceeded,
    SlidingWindow,
    Store,
    StoreClosed,
    StoreUnavailable,
    TokenBucket,
)
from forebay.redis import (
    AsyncLeasedAllOf,
    AsyncLeasedStore,
    AsyncRedisStore,
    LeasedAllOf,
    LeasedStore,
    RedisStore,
    SyncedStore,
)

KEY = "user:42"
PLENTY = "1000000000/year"
KINDS: dict[str, Callable[[Any, str, str], Any]] = {
    "token bucket": lambda store, name, rate: TokenBucket(store, name, rate),
    "fixed window": lambda store, name, rate: FixedWindow(store, name, rate),
    "fixed window, first": lambda store, name, rate: FixedWindow(store, name, rate, align="first"),
    "fixed window, stagger": lambda store, name, rate: FixedWindow(store, name, rate, align="stagger"),
    "sliding window": lambda store, name, rate: SlidingWindow(store, name, rate),
}
WINDOWS = {name: make for name, make in KINDS.items() if "window" in name}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
every_window = pytest.mark.parametrize("make", WINDOWS.values(), ids=WINDOWS)


def used(hosts: Hosts, limiter: Any, key: Any = KEY) -> int:
    """How many permits count as spent, at Redis or in this host's memory, after all hosts have given back."""
    hosts.give_back(everything=True)
    decision = limiter.peek(key, 0)
    return int(decision.limit - decision.remaining)


@every_kind
def test_a_request_is_charged_to_all(hosts: Hosts, make: Callable[..., Any]) -> None:
    store = hosts.new()
    local, leased, other = (
        TokenBucket(store.host_store, "local", "100/hour"),
        make(store, "leased", "1000/hour"),
        FixedWindow(store, "other", "500/hour"),
    )
    several: Any = AllOf(local, leased, other)
    assert isinstance(several, LeasedAllOf)
    assert several.limiters == (local, leased, other)
    assert several.name == "local + leased + other"
    for request in (
        lambda: several.allow(KEY),
        lambda: several.hit(KEY).allowed,
        lambda: all(several.hit_each(KEY)),
        lambda: several.wait(KEY),
        lambda: several.allow_many([KEY]) == [True],
        lambda: several.hit([KEY, KEY, KEY], [1, 1, 1]),
        lambda: several.charge(KEY, 1).allowed,
    ):
        assert request()
    assert [used(hosts, limiter) for limiter in several.limiters] == [7, 7, 7]
    several.refund(KEY, [1, 2, 3])
    assert [used(hosts, limiter) for limiter in several.limiters] == [6, 5, 4]
    several.charge(KEY, 2).cancel()
    assert [used(hosts, limiter) for limiter in several.limiters] == [6, 5, 4]
    assert several.hit(["a", "b", "c"], [1, 0, 2])
    assert [used(hosts, one, key) for one, key in zip(several.limiters, "abc", strict=True)] == [1, 0, 2]
    several.reset(KEY)
    assert [used(hosts, limiter) for limiter in several.limiters] == [0, 0, 0]


def test_the_place_of_a_leased_limiter_does_not_matter(hosts: Hosts) -> None:
    store = hosts.new()
    with Store.private(keys=10) as another:
        locals_ = [FixedWindow(store.host_store, f"local {i}", f"{10 + i}/hour", align="first") for i in range(2)]
        far = FixedWindow(another, "far", "17/hour", align="first")
        leased = [FixedWindow(store, f"leased {i}", f"{20 + i}/hour", align="first") for i in range(2)]
        for limiters in ([locals_[0], leased[0]], [leased[1], locals_[0], leased[0], locals_[1]], [leased[0]],
                         [far, leased[0], locals_[1]]):  # fmt: skip
            several: Any = AllOf(*limiters)
            key = several.name
            for _ in range(2):
                each = several.hit_each(key)
                assert [one.limiter for one in each] == [one.limiter for one in several.hit_each([key] * len(limiters))]
                assert [one.limiter for one in each] == [limiter.name for limiter in limiters]
            assert [used(hosts, limiter, key) for limiter in limiters] == [4] * len(limiters)


def test_the_decision_names_the_binding_limit(hosts: Hosts) -> None:
    store = hosts.new(share=1.0)
    local = FixedWindow(store.host_store, "local", "2/hour", align="first")
    leased = FixedWindow(store, "leased", "4/hour", align="first")
    several = AllOf(leased, local)
    first = several.hit("a")
    assert (first.limiter, first.remaining, first.limit) == ("leased", 0, 4)
    assert several.hit("a")
    denied = several.hit("a")
    assert (denied.allowed, denied.limiter, denied.retry_after) == (False, "local", 3600.0)
    assert several.peek("a").limiter == "local"
    assert leased.hit("b", 3)
    assert several.hit("b")
    for denied in (several.hit("b"), several.peek("b"), several.hit("b")):
        assert (denied.allowed, denied.limiter, denied.reason) == (False, "leased", "limit")
    assert str(several.exceeded("b")).count("leased")
    with pytest.raises(LimitExceeded, match="leased"), several.limited("b", timeout=0.01):
        pass


def test_a_local_denial_calls_no_server(hosts: Hosts) -> None:
    store = hosts.new()
    local, leased = FixedWindow(store.host_store, "l", "1/hour"), TokenBucket(store, "b", "1000/hour")
    several = AllOf(leased, local)
    assert local.allow(KEY)
    before = hosts.calls()
    assert not several.allow(KEY)
    assert [one.allowed for one in several.hit_each(KEY)] == [True, False]
    assert not several.wait(KEY, timeout=0.001)
    assert hosts.calls() == before
    assert used(hosts, leased) == 0


@every_kind
def test_a_denial_by_redis_gives_back_what_the_host_charged(hosts: Hosts, make: Callable[..., Any]) -> None:
    store = hosts.new()
    local = [
        TokenBucket(store.host_store, "bucket", "100/hour"),
        LeakyBucket(store.host_store, "queue", "100/hour", capacity=9),
    ]
    other = make(hosts.new(), "leased", "40/hour")
    leased = make(store, "leased", "40/hour")
    assert other.hit(KEY, 38)
    several = AllOf(*local, leased)
    assert not several.hit(KEY, 3)
    assert [used(hosts, limiter) for limiter in (*local, leased)] == [0, 0, 38]
    assert several.hit(KEY, 2)
    assert [used(hosts, limiter) for limiter in (*local, leased)] == [2, 2, 40]


@pytest.mark.parametrize("cost", [1, 3, 8])
@every_kind
def test_a_denial_by_redis_gives_back_what_leases_were_charged(
    hosts: Hosts, make: Callable[..., Any], cost: int
) -> None:
    """A cost of 8 is charged without a lease: it is above the share."""
    store = hosts.new()
    first, second = make(store, "first", "60/hour"), FixedWindow(store, "second", "50/hour")
    with contextlib.closing(hosts.new()) as another:
        assert FixedWindow(another, "second", "50/hour").hit(KEY, 50)
        several = AllOf(first, second)
        each = several.hit_each(KEY, cost)
        assert [one.allowed for one in each] == [True, False]
        assert used(hosts, first) == 0
        # The host remembers the denial.
        before = hosts.calls()
        for _ in range(5):
            assert not several.hit(KEY, cost)
            assert cost > 1 or not several.allow(KEY)
        assert hosts.calls() == before


def test_a_remembered_denial_writes_nothing(hosts: Hosts) -> None:
    store = hosts.new()
    local = FixedWindow(store.host_store, "local", "5/hour")
    leased = FixedWindow(store, "leased", "30/hour")
    assert leased.hit(KEY, 30)
    assert not leased.allow(KEY)
    several = AllOf(local, leased)
    before = hosts.calls(), used(hosts, local)
    denied = store.host_store.stats().limiters
    for request in (several.allow, several.hit, several.hit_each, lambda key: several.charge(key, 1)):
        request(KEY)
    assert (hosts.calls(), used(hosts, local)) == before == (before[0], 0)
    assert denied != store.host_store.stats().limiters


@every_window
def test_a_charge_comes_back_only_in_its_own_window(hosts: Hosts, make: Callable[..., Any]) -> None:
    """In the next window it would admit more than the limit."""
    store = hosts.new()
    leased = make(store, "leased", "60/hour")
    for cost in (2, 30):
        charge = leased.part.charge(KEY, cost)
        assert charge.allowed
        hosts.advance(2 * 3600)
        assert leased.hit(KEY, 10)
        before = used(hosts, leased)
        charge.cancel()
        assert used(hosts, leased) == before == 10
        charge = leased.part.charge(KEY, cost)
        charge.cancel()
        assert used(hosts, leased) == before
        hosts.advance(2 * 3600)


def test_a_bucket_takes_back_only_what_it_has_not_refilled(hosts: Hosts) -> None:
    """The rest would come twice: by the refill, and by the charge that is given back."""
    leased: Any = TokenBucket(hosts.new(), "leased", "60/hour")
    for seconds, back in ((0, 50), (600, 50), (1200, 40), (3595, 0), (3600, 0), (7200, 0)):
        charge = leased.part.charge(KEY, 50)
        assert charge.allowed
        hosts.advance(seconds)
        while leased.hit(KEY, 10):
            pass
        before = used(hosts, leased)
        charge.cancel()
        assert before - used(hosts, leased) == back
        hosts.advance(10 * 3600)


def test_a_wait_that_is_given_up_gives_back_in_its_own_window(hosts: Hosts) -> None:
    store = hosts.new()
    leased = FixedWindow(store, "leased", "60/hour")
    charge = leased.part.reserve(KEY, 3, None)
    assert (charge.allowed, charge.delay_ns, charge.delay) == (True, 0, 0.0)
    charge.cancel()
    assert used(hosts, leased) == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_lost_race_for_a_lease_gives_back(hosts: Hosts, position: int) -> None:
    """The look finds the last permit of the lease for each of two limits, and only one of them can spend it."""
    store, other = hosts.new(share=1.0), hosts.new(share=1.0)
    local, leased, third = (
        FixedWindow(store.host_store, "local", "50/hour"),
        FixedWindow(store, "leased", "40/hour"),
        FixedWindow(store, "third", "70/hour"),
    )
    while leased.left(leased.tag(KEY))[0] != 1:
        assert leased.allow(KEY)
    while third.left(third.tag(KEY))[0] != 1:
        assert third.allow(KEY)
    spent = [leased.limit - 1, 70 - third.peek(KEY, 0).remaining]
    # No more permits can be borrowed.
    taken = FixedWindow(other, "leased", "40/hour")
    rest = taken.peek(KEY, 0).remaining
    assert taken.hit(KEY, rest)
    limiters: list[Any] = [leased, leased, local]
    limiters.insert(position, third)
    several = AllOf(*limiters)
    for request in (several.allow, several.hit):
        assert not request(KEY)
        assert used(hosts, local) == 0
        assert used(hosts, leased) == spent[0]
    assert third.part.peek(KEY, 0).remaining == 70 - spent[1] or position == 3


def test_what_a_full_store_admits_gives_nothing_back(redis_store: RedisStore) -> None:
    """Nothing was charged."""
    with Store.private(keys=1, on_full="allow") as host, LeasedStore(redis_store, host, share=0.5) as store:
        leased = FixedWindow(store, "leased", "40/year")
        keys = iter(range(10_000))
        charge = next(made for made in (leased.part.charge(next(keys), 1) for _ in keys) if made.decision.full)
        assert charge.allowed
        key = charge.key
        strict = FixedWindow(redis_store, "leased", "40/year")
        assert strict.hit(key, 5)
        charge.cancel()
        assert strict.peek(key).remaining == 35


@pytest.mark.parametrize("policy", ["deny", "allow", "local"])
def test_redis_is_unavailable(server: RedisServer, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.private(keys=100) as host:
        options: Any = {} if policy == "deny" else {"host": host, "hosts": 2} if policy == "local" else {}
        with RedisStore(server.url, timeout=10, when_unavailable=policy, **options) as redis_store:
            store = LeasedStore(redis_store, host)
            local = FixedWindow(host, "local", "5/year")
            first, second = FixedWindow(store, "first", "40/year"), FixedWindow(store, "second", "20/year")
            strict = FixedWindow(redis_store, "first", "40/year")
            assert strict.hit(KEY, 7)
            several = AllOf(local, first, second)

            def away(*arguments: Any) -> Any:
                raise StoreUnavailable("away")

            call = redis_store.executor._call
            with monkeypatch.context() as patch:
                patch.setattr(redis_store.executor, "_call", away)
                if policy == "deny":
                    with pytest.raises(StoreUnavailable):
                        several.allow(KEY)
                    assert local.peek(KEY).remaining == 5
                else:
                    decision = several.hit(KEY)
                    assert decision.allowed
                    assert local.peek(KEY).remaining == 4
                    charge = first.part.charge(KEY, 1)
                    assert charge.decision.degraded
            if policy != "deny":
                # Redis has never learnt of that charge.
                patched = redis_store.executor._call
                assert patched == call
                charge.cancel()
            assert strict.peek(KEY).remaining == 33
            if policy == "local":
                assert first.terms.fallback.peek(KEY, 1).remaining == 19
            store.close()


def test_an_error_of_a_limit_gives_back(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    store = hosts.new()
    local, first, second = (
        TokenBucket(store.host_store, "local", "9/hour"),
        FixedWindow(store, "first", "90/hour"),
        FixedWindow(store, "second", "90/hour"),
    )
    several: Any = AllOf(local, first, second)
    execute = store.executor.redis.execute

    for error in (KeyboardInterrupt, StoreUnavailable, StoreClosed):

        def fail(command: Any, error: Any = error) -> Any:
            # The fetch of the second limit.
            if command.keys == [second.terms.place(KEY).redis_key]:
                raise error("planned")
            return execute(command)

        with monkeypatch.context() as patch:
            patch.setattr(store.executor.redis, "execute", fail)
            with pytest.raises(error):
                several.hit(KEY)
        assert [used(hosts, limiter) for limiter in (local, first)] == [0, 0]
        hosts.advance(70)


def test_wrong_arguments_charge_nothing(hosts: Hosts) -> None:
    store = hosts.new()
    local, leased = TokenBucket(store.host_store, "local", "9/hour"), FixedWindow(store, "leased", "90/hour")
    several: Any = AllOf(local, leased)
    for key, cost, error in [
        (1.5, 1, InvalidKey),
        (["a"], 1, InvalidKey),
        (["a", 1.5], 1, InvalidKey),
        (("a", "b"), 1, InvalidKey),
        ("a", [1], InvalidCost),
        ("a", -1, InvalidCost),
        ("a", [1, -1], InvalidCost),
        ("a", [1, 91], CostExceedsLimit),
        ("a", 10, CostExceedsLimit),
    ]:
        for name in ("hit", "hit_each", "peek", "charge", "refund"):
            if name != "refund" or error is not CostExceedsLimit:
                with pytest.raises(error):
                    getattr(several, name)(key, cost)
    assert [used(hosts, limiter, "a") for limiter in (local, leased)] == [0, 0]


def test_sets_that_can_not_be_are_refused(hosts: Hosts, server: RedisServer) -> None:
    store = hosts.new()
    leased = TokenBucket(store, "leased", "9/minute")
    local = TokenBucket(store.host_store, "local", "9/minute")
    make: Any = AllOf
    strict = TokenBucket(hosts.redis_store, "strict", "9/minute")
    for limiters in ([strict, leased], [leased, strict], [local, strict, leased]):
        with pytest.raises(InvalidLimiter, match="make all of them over the RedisStore itself"):
            make(*limiters)
    for limiters in ([leased, "b"], [leased, [local]], [leased] * 17, [local, make(leased, local)]):
        with pytest.raises(InvalidLimiter):
            make(*limiters)
    with pytest.raises(TypeError, match="is a store"):
        TokenBucket(leased, "b", "1/s")  # type: ignore[call-overload]
    several = make(local, leased)
    for refused in (
        lambda: several.reserve(KEY),
        lambda: make(leased, Concurrency(store.host_store, "c", 3)).limited(KEY),
    ):
        with pytest.raises(InvalidLimiter):
            refused()
    with pytest.raises(TypeError, match="would stop the event loop"):
        several.wait_async(KEY)

    async def work() -> None:
        async with (
            AsyncRedisStore(server.url, timeout=10) as redis_store,
            AsyncLeasedStore(redis_store, store.host_store) as awaited,
        ):
            other = TokenBucket(awaited, "leased", "9/minute")
            for limiters in ([leased, other], [other, leased], [local, other, leased]):
                with pytest.raises(InvalidLimiter, match="both over LeasedStores or both over AsyncLeasedStores"):
                    make(*limiters)
            several = make(local, other)
            with pytest.raises(InvalidLimiter):
                await several.reserve(KEY)

    asyncio.run(work())


def test_held_and_synced_limits_beside_leased_ones(hosts: Hosts) -> None:
    store = hosts.new()
    with SyncedStore(hosts.redis_store, store.host_store, "1 minute", keys=100) as over:
        held = Concurrency(store.host_store, "held", 3)
        synced = SlidingWindow(over, "synced", "9/hour")
        leased = TokenBucket(store, "leased", "90/hour")
        several: Any = AllOf(held, synced, leased)
        assert several.may_free_early
        assert [several.allow(KEY) for _ in range(4)] == [True] * 3 + [False]
        assert (synced.peek(KEY).remaining, used(hosts, leased)) == (6, 3)
        several.refund(KEY)
        assert (held.peek(KEY).remaining, synced.peek(KEY).remaining, used(hosts, leased)) == (1, 7, 2)


@pytest.mark.parametrize("seed", range(12))
def test_limits_agree_on_what_was_admitted(hosts: Hosts, seed: int) -> None:
    """Random requests of two hosts. Each limit counts what was admitted, and nothing else: all or none."""
    chance = random.Random(seed)
    makes = list(KINDS.values())
    rates = [(f"leased {i}", chance.choice(["20/year", "60/year", "300/year"])) for i in range(3)]
    chosen = [chance.choice(makes) for _ in rates]
    several, locals_, admitted = [], [], [0, 0]
    for _ in range(2):
        store = hosts.new(share=chance.choice([0.02, 0.2, 1.0]))
        leased = [make(store, name, rate) for make, (name, rate) in zip(chosen, rates, strict=True)]
        locals_.append(
            [
                FixedWindow(store.host_store, "window", f"{chance.choice([30, 90])}/year"),
                SlidingWindow(store.host_store, "sliding", f"{chance.choice([30, 90])}/year"),
            ]
        )
        limiters = [*leased, *locals_[-1]]
        chance.shuffle(limiters)
        several.append((AllOf(*limiters), leased))
    reasons = set()
    for _ in range(150):
        host = chance.randrange(2)
        limits, leased = several[host]
        cost = chance.choice([1, 1, 1, 2, 5])
        how = chance.random()
        if how < 0.6:
            decision = limits.hit(KEY, cost)
            reasons.add(None if decision else decision.limiter)
            admitted[host] += cost * decision.allowed
        elif how < 0.8:
            admitted[host] += limits.allow(KEY)
        elif how < 0.9:
            charge = limits.charge(KEY, cost)
            if chance.random() < 0.5:
                charge.cancel()
            else:
                admitted[host] += cost * charge.allowed
        else:
            hosts.give_back(everything=chance.random() < 0.5)
    assert sum(admitted) > 0
    assert len(reasons) > 1
    for host in range(2):
        assert [used(hosts, limiter) for limiter in locals_[host]] == [admitted[host]] * 2
    assert [used(hosts, limiter) for limiter in several[0][1]] == [sum(admitted)] * 3


def test_threads_that_race_are_charged_to_all_or_none(server: RedisServer) -> None:
    with RedisStore(server.url, timeout=30) as redis_store, Store.private(keys=100) as host:
        store = LeasedStore(redis_store, host, lease=60, share=0.05)
        local = FixedWindow(host, "local", "700/year")
        leased = [FixedWindow(store, f"leased {i}", f"{900 - 250 * i}/year") for i in range(2)]
        several = AllOf(leased[0], local, leased[1])
        counts, start = [0] * 4, threading.Barrier(4)

        def work(number: int) -> None:
            start.wait()
            for _ in range(400):
                counts[number] += several.allow(KEY)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.close()
        assert 0 < sum(counts) <= 650
        assert 700 - local.peek(KEY).remaining == sum(counts)
        for i in range(2):
            strict = FixedWindow(redis_store, f"leased {i}", f"{900 - 250 * i}/year")
            assert strict.limit - strict.peek(KEY).remaining == sum(counts)


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.end()


def spend(number: int, url: str, host: Store, counts: SharedNumbers, stop: SharedNumbers) -> None:
    with RedisStore(url, timeout=0.5) as redis_store:
        store = LeasedStore(redis_store, host, lease=10, share=0.02)
        several = AllOf(
            FixedWindow(store, "first", PLENTY),
            FixedWindow(host, "local", PLENTY),
            FixedWindow(store, "second", PLENTY),
        )
        while not stop[0]:
            # A killed process may have been fetching.
            with contextlib.suppress(StoreUnavailable):
                counts[number] += several.allow(KEY)
        store.close()


def test_processes_that_are_killed_leave_no_limit_exceeded(crew: Crew, server: RedisServer) -> None:
    """A killed process leaves charges, and never a request that one limit admitted and another did not charge."""
    with Store.private(keys=100) as host, RedisStore(server.url, timeout=10) as redis_store:
        counts, stop = SharedNumbers(4), SharedNumbers(1)
        workers = [crew.start(spend, number, server.url, host, counts, stop) for number in range(4)]
        for number in range(2):
            wait_until(lambda number=number: counts[number] > 300, "some requests")
            workers[number].kill()
        wait_until(lambda: min(counts[2], counts[3]) > 600, "some requests")
        stop[0] = 1
        for worker in workers[2:]:
            worker.result()
        admitted = sum(counts)
        local = FixedWindow(host, "local", PLENTY)
        # A killed process may have been between a charge and the count of it.
        assert admitted <= local.peek(KEY, 0).limit - local.peek(KEY).remaining <= admitted + 2
        for name in ("first", "second"):
            strict = FixedWindow(redis_store, name, PLENTY)
            assert strict.limit - strict.peek(KEY).remaining >= admitted


class World:
    """An asyncio host with a local limit and two leased ones, whose calls to Redis stop where a test wants."""

    def __init__(self, redis_store: AsyncRedisStore, host: Store) -> None:
        self.redis_store = redis_store
        self.store = AsyncLeasedStore(redis_store, host, lease=60)
        self.local = FixedWindow(host, "local", "50/year")
        self.first, self.second = (FixedWindow(self.store, name, "40/year") for name in ("first", "second"))
        self.several: Any = AllOf(self.first, self.local, self.second)
        self.calls = 0
        self.stop_at = (-1, False)
        self.stopped = asyncio.Event()
        self.go_on = asyncio.Event()
        self._execute = redis_store.executor.execute_command

    async def begin(self) -> None:
        """Let Redis know all scripts, so that each decision is one call. Then count the calls."""
        strict: Any = FixedWindow(self.redis_store, "second", "40/year")
        assert await strict.hit("another", 40)
        assert not await self.several.allow("another")
        self.redis_store.executor.execute_command = self._held_up

    async def _held_up(self, *call: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        for is_after in (False, True):
            if (number, is_after) == self.stop_at:
                self.stopped.set()
                await self.go_on.wait()
            if not is_after:
                answer = await self._execute(*call)
        return answer

    async def used(self, name: str) -> int:
        await self.store.executor.give_back(self.store.executor.holdings.unused(everything=True))
        strict: Any = FixedWindow(self.redis_store, name, "40/year")
        return int(40 - (await strict.peek(KEY)).remaining)


def in_world(server: RedisServer, work: Callable[[World], Any]) -> None:
    async def main() -> None:
        async with AsyncRedisStore(server.url, timeout=30) as redis_store:
            with Store.private(keys=100) as host:
                world = World(redis_store, host)
                await world.begin()
                try:
                    await work(world)
                finally:
                    world.go_on.set()
                    await world.store.close()

    asyncio.run(main())


def test_asyncio_requests_are_charged_to_all(server: RedisServer) -> None:
    async def work(world: World) -> None:
        several = world.several
        assert isinstance(several, AsyncLeasedAllOf)
        assert await several.allow(KEY)
        assert all(await several.hit_each(KEY))
        assert (await several.hit(KEY)).allowed
        assert await several.wait(KEY)
        assert await several.wait_async(KEY)
        assert await several.allow_many([KEY, [KEY] * 3]) == [True] * 2
        assert (await several.peek(KEY, 40)).allowed is False
        charge = await several.charge(KEY, 1)
        await charge.cancel()
        assert (50 - world.local.peek(KEY).remaining, await world.used("first"), await world.used("second")) == (7,) * 3
        await several.refund(KEY, 2)
        assert (50 - world.local.peek(KEY).remaining, await world.used("first")) == (5, 5)
        admitted = await asyncio.gather(*[several.allow(KEY) for _ in range(60)])
        assert (sum(admitted), 50 - world.local.peek(KEY).remaining) == (35, 40)
        assert not await several.wait(KEY, timeout=0.01)
        assert (await several.exceeded(KEY)).retry_after > 0
        with pytest.raises(LimitExceeded):
            async with several.limited(KEY, timeout=0.01):
                pass
        await several.reset(KEY)
        assert world.local.peek(KEY).remaining == 50
        assert await world.used("first") == 0

    in_world(server, work)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("denied", [False, True])
@pytest.mark.parametrize("number", range(6))
def test_a_request_that_is_cancelled_at_any_call_gives_back(
    server: RedisServer, number: int, denied: bool, is_after: bool
) -> None:
    """The permits of the fetch that was under way may be lost, as with one leased limiter."""

    async def work(world: World) -> None:
        if denied:
            strict: Any = FixedWindow(world.redis_store, "second", "40/year")
            assert await strict.hit(KEY, 40)
        world.calls, world.stop_at = 0, (number, is_after)
        request = asyncio.ensure_future(world.several.hit(KEY))
        stopped = asyncio.ensure_future(world.stopped.wait())
        await asyncio.wait({request, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            # It makes fewer calls.
            stopped.cancel()
            assert number >= 2
            return
        request.cancel()
        # Once more, while it gives back.
        for _ in range(3):
            await asyncio.sleep(0)
            request.cancel()
        world.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await request
        going_on = world.redis_store.executor.going_on
        while going_on:
            await asyncio.wait(going_on)
        assert world.local.peek(KEY).remaining == 50
        # Which call it was: the first limit's fetch, the second's, or one that gives back.
        lost = number == 0 and is_after
        assert await world.used("first") == lost
        if denied:
            assert await world.used("second") == 40
        else:
            assert await world.used("second") == (number == 1 and is_after)

    in_world(server, work)


def test_a_denied_asyncio_request_gives_back(server: RedisServer) -> None:
    async def work(world: World) -> None:
        strict: Any = FixedWindow(world.redis_store, "second", "40/year")
        assert await strict.hit(KEY, 40)
        assert [one.allowed for one in await world.several.hit_each(KEY)] == [True, True, False]
        assert world.local.peek(KEY).remaining == 50
        assert await world.used("first") == 0
        before = world.calls
        assert not await world.several.allow(KEY)
        assert world.calls == before

    in_world(server, work)


def test_a_store_that_is_closed_during_a_fetch_leaves_nothing_charged(server: RedisServer) -> None:
    async def work(world: World) -> None:
        world.stop_at = (1, True)
        request = asyncio.ensure_future(world.several.hit(KEY))
        await world.stopped.wait()
        await world.store.close()
        world.go_on.set()
        with contextlib.suppress(StoreClosed):
            assert (await request).allowed
            return
        assert world.local.peek(KEY).remaining == 50

    in_world(server, work)


def test_a_loop_that_ends_during_a_fetch_leaves_the_stores_uncharged(server: RedisServer) -> None:
    with Store.private(keys=100) as host:

        async def main() -> World:
            redis_store = AsyncRedisStore(server.url, timeout=30)
            world = World(redis_store, host)
            flow = world.several._charge([KEY] * 3, [1] * 3)
            call = next(flow)
            with contextlib.suppress(StopIteration):
                call = flow.send(await call)
            assert world.local.peek(KEY).remaining == 49
            call.close()
            flow.close()
            await world.store.close()
            await redis_store.close()
            return world

        world = asyncio.run(main())
        assert world.local.peek(KEY).remaining == 50

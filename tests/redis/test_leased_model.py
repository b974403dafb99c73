"""The whole protocol of leases, step by step in any order: hosts whose calls are late, lost and overtaken.

Each worker's fetch is split where it calls Redis: its request may arrive later than another one's, or never, and so may
the reply. The time of hosts and server is moved together. Whatever happens, all hosts together admit no more than one
limiter would have. Random steps would hardly ever reach two cases, so the test leads to them: a report that arrives
when its loan has ended and was refilled, or at a server that has forgotten the key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import redis
from leased_hosts import answered
from redis_server import RedisServer
from scripts_clock import ServerClock

from forebay import FixedWindow, SlidingWindow, Store, StoreUnavailable, TokenBucket
from forebay.redis import LeasedStore, RedisStore
from forebay.redis.commands import Command
from forebay.redis.leased import fetch as leased_fetch
from forebay.redis.leased.fetch import Holdings, Outcome, Steps
from forebay.testing import ManualClock

KEY = "k"
STEPS = 500
RATES = [("10/second", 10), ("7/second", 25), ("1000/minute", 60), ("3 per 7 seconds", 20)]


@dataclass
class Fetch:
    """A worker's fetch between its request and the reply."""

    steps: Steps[Outcome] | None
    cost: int
    asked: Command[Any]
    answer: Any = None
    was_executed: bool = False

    @property
    def is_charge(self) -> bool:
        """Whether it is a bucket's charge: as over strict limiters it counts when it is executed, even if the reply is
        lost.
        """
        return b"charge" in self.asked.arguments


@dataclass
class Host:
    limiter: Any
    clock: ManualClock
    holdings: Holdings = field(default_factory=Holdings)
    fetches: list[Fetch] = field(default_factory=list)


class World:
    def __init__(self, hosts: list[Host], redis_store: RedisStore, server_clock: ServerClock, seed: int) -> None:
        self.hosts, self.redis_store, self.server_clock = hosts, redis_store, server_clock
        self.random = random.Random(seed)
        self.admitted: list[tuple[int, int]] = []
        self.calls = self.overtaken = self.charged = 0
        self.forgotten = 0
        """So many of those admitted, the server doesn't know of any more."""
        self.dead: list[Any] = []

    def advance(self, us: int) -> None:
        self.server_clock.set_us(self.server_clock.now_us + us)
        for host in self.hosts:
            host.clock.advance(us / 1e6)

    def admit(self, cost: int) -> None:
        self.admitted.append((self.server_clock.now_us, cost))

    def request(self, host: Host) -> None:
        # Also more than there is, so that permits are left when it fetches; and as much as a lease, which is charged.
        left, most = host.limiter.left(host.limiter.tag(KEY))[0], host.limiter.terms.most_on_loan
        cost = self.random.choice([1, 1, 1, 2, min(left + 1, host.limiter.limit), most, host.limiter.limit])
        decision = host.limiter.hit_now(KEY, cost)
        if decision is None:
            self.proceed(host, answered(host.limiter, host.holdings, KEY, cost), cost, None)
        elif decision:
            self.admit(cost)

    def proceed(self, host: Host, steps: Steps[Outcome], cost: int, answer: Any, was_charge: bool = False) -> None:
        left = host.limiter.left(host.limiter.tag(KEY))[0]
        try:
            step = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
        except StopIteration as end:
            # One that was charged has counted since.
            was_charged = was_charge and left == host.limiter.left(host.limiter.tag(KEY))[0]
            if end.value.allowed and not was_charged:
                self.admit(cost)
        except StoreUnavailable:
            pass
        else:
            # A worker that waits for another one's fetch has no permits: it goes.
            if isinstance(step, Command):
                host.fetches.append(Fetch(steps, cost, step))

    def execute(self, fetch: Fetch) -> None:
        if not fetch.was_executed:
            fetch.was_executed = True
            fetch.answer = self.redis_store.executor.run_command(fetch.asked)
            self.calls += 1
            self.overtaken += getattr(fetch.answer, "status", 0) == 2
            if fetch.is_charge and fetch.answer.permits:
                self.charged += 1
                self.admit(fetch.cost)

    def drain(self) -> None:
        """All hosts take all permits that they can get, at once: if a permit was granted twice, there are too many."""
        for host in self.random.sample(self.hosts, len(self.hosts)):
            for _ in range(60):
                decision = host.limiter.hit_now(KEY, 1)
                if decision is None:
                    fetches = len(host.fetches)
                    self.proceed(host, answered(host.limiter, host.holdings, KEY, 1), 1, None)
                    if len(host.fetches) == fetches:
                        break
                    fetch = host.fetches.pop()
                    self.execute(fetch)
                    assert fetch.steps
                    self.proceed(host, fetch.steps, 1, fetch.answer)
                elif decision:
                    self.admit(1)
                else:
                    break

    def report_late(self, host: Host, forgets: bool) -> None:
        """A host that has permits left fetches more: its request arrives when it has none on loan any more."""
        left, end_ns = self.hoarded(host)
        # A charge reports nothing.
        if not 0 < left < host.limiter.terms.most_on_loan - 1:
            return
        if not forgets:
            # It fetches when its loan is about to end.
            rest_us = (end_ns - host.limiter.now_ns()) // 1000
            self.advance(max(rest_us - self.random.choice([1000, 20_000]), 0))
        fetches = len(host.fetches)
        self.proceed(host, answered(host.limiter, host.holdings, KEY, left + 1), left + 1, None)
        if len(host.fetches) == fetches:
            return
        fetch = host.fetches.pop()
        if forgets:
            self.forget_all(host)
        else:
            # And its request arrives before the next loan would have ended.
            self.advance(self.random.choice([60_000, 600_000, 1_500_000, 2_500_000]))
        self.execute(fetch)
        assert fetch.steps
        self.proceed(host, fetch.steps, fetch.cost, fetch.answer, fetch.is_charge)

    def hoarded(self, host: Host) -> tuple[int, int]:
        """The permits left to a host that has just fetched, and until when."""
        self.advance(self.random.choice([0, 1_100_000]))
        decision = host.limiter.hit_now(KEY, 1)
        if decision:
            self.admit(1)
        elif decision is None:
            fetches = len(host.fetches)
            self.proceed(host, answered(host.limiter, host.holdings, KEY, 1), 1, None)
            if len(host.fetches) > fetches:
                fetch = host.fetches.pop()
                self.execute(fetch)
                assert fetch.steps
                self.proceed(host, fetch.steps, 1, fetch.answer)
        left, end_ns, _ = host.limiter.left(host.limiter.tag(KEY))
        return left, end_ns

    def forget_all(self, reporting: Host) -> None:
        """The server's state is lost. The other hosts' loans would come on top: they are lost, too."""
        terms = reporting.limiter.terms
        self.server_clock.client.delete(terms.place(KEY).redis_key)
        self.forgotten = len(self.admitted)
        for host in self.hosts:
            if host is not reporting:
                host.limiter.forget(host.limiter.tag(KEY))

    def act(self) -> None:
        host = self.random.choice(self.hosts)
        what = self.random.random()
        if what < 0.20:
            self.request(host)
        elif what < 0.30 and host.fetches:
            self.execute(self.random.choice(host.fetches))
        elif what < 0.40 and host.fetches:
            fetch = host.fetches.pop(self.random.randrange(len(host.fetches)))
            self.execute(fetch)
            if fetch.steps:
                self.proceed(host, fetch.steps, fetch.cost, fetch.answer, fetch.is_charge)
        elif what < 0.43 and host.fetches:
            # The reply is lost; the request may still arrive.
            fetch = self.random.choice(host.fetches)
            steps, fetch.steps = fetch.steps, None
            if steps:
                self.proceed(host, steps, fetch.cost, StoreUnavailable("lost"))
        elif what < 0.45 and host.fetches:
            # Killed: not even the fetch slot is left.
            fetch = self.random.choice(host.fetches)
            self.dead.append(fetch.steps)
            fetch.steps = None
        elif what < 0.51:
            for asked in host.holdings.unused(everything=self.random.random() < 0.5):
                host.fetches.append(Fetch(None, 0, asked))
        elif what < 0.53:
            host.limiter.forget(host.limiter.tag(KEY))
        elif what < 0.55:
            self.drain()
        elif what < 0.57:
            # A window's loans would come on top until it has passed.
            is_bucket = host.limiter.terms.same_ns == 0
            self.report_late(host, forgets=is_bucket and self.random.random() < 0.4)
        elif what < 0.92:
            self.advance(self.random.choice([1, 1000, 20_000, 60_000, 60_000, 300_000]))
        else:
            self.advance(self.random.choice([600_000, 1_100_000, 1_100_000, 4_000_000]))


@pytest.fixture
def world_of(
    server: RedisServer, server_clock: ServerClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., World]]:
    opened: list[Any] = []
    sizes = random.Random(0)
    # However much hosts borrow.
    monkeypatch.setattr(leased_fetch, "next_size", lambda *_: sizes.randrange(6))

    def make(kind: Any, seed: int, **options: Any) -> World:
        hosts = []
        sizes.seed(seed)
        # For the limiters only: they hold a fetch slot for so long. The sockets of this client have their own timeout.
        fast.executor.timeout_s = 0.05
        for _ in range(2):
            clock = ManualClock(1000.0)
            host_store = Store.private(keys=100, clock=clock)
            store = LeasedStore(fast, host_store, lease=3, share=0.6)
            opened.append(store)
            hosts.append(Host(kind(store, f"m{seed}", **options), clock))
        return World(hosts, fast, server_clock, seed)

    with redis.Redis.from_url(server.url, socket_timeout=60) as client:
        fast = RedisStore(client, namespace="model")
        yield make
        for store in opened:
            # Nothing is given back.
            store.executor.closed = True
            store.host_store.close()


def run(world: World, used_at: Callable[[int], Fraction], most: Fraction) -> None:
    """After every step, the limit covers what Redis would lend, what hosts have left and what was used."""
    for _ in range(STEPS):
        world.act()
        limiters = [host.limiter for host in world.hosts]
        terms = limiters[0].terms
        free, _ = world.redis_store.executor.run_command(terms.peek(terms.place(KEY), 1))
        left = sum(limiter.left(limiter.tag(KEY))[0] for limiter in limiters)
        used = used_at(world.server_clock.now_us)
        assert free + left + used <= most, f"{free} free, {left} left, {float(used):.3f} used, of {float(most):.3f}"
    assert world.calls


@pytest.mark.parametrize("seed", range(16))
def test_token_bucket(world_of: Callable[..., World], seed: int) -> None:
    rate, burst = RATES[seed % len(RATES)]
    world = world_of(TokenBucket, seed, rate=rate, burst=burst)
    algorithm = world.hosts[0].limiter.terms.strict.algorithm
    unit_us = Fraction(algorithm.period_us, algorithm.rate.limit)
    tat_us = Fraction(0)
    counted = 0

    def used_at(now_us: int) -> Fraction:
        """By the generic cell rate algorithm, of all that was admitted."""
        nonlocal tat_us, counted
        if world.forgotten > counted:
            tat_us, counted = Fraction(0), world.forgotten
        for at_us, cost in world.admitted[counted:]:
            tat_us = max(tat_us, Fraction(at_us)) + cost * unit_us
        counted = len(world.admitted)
        return max(tat_us - now_us, Fraction(0)) / unit_us

    run(world, used_at, algorithm.tolerance_us / unit_us)


@pytest.mark.parametrize("align", ["clock", "stagger", "first"])
@pytest.mark.parametrize("seed", range(3))
def test_fixed_window(world_of: Callable[..., World], seed: int, align: str) -> None:
    world = world_of(FixedWindow, seed, rate="20/second", align=align)
    place = world.hosts[0].limiter.terms.place(KEY)

    def window_of(at_us: int) -> int:
        return (at_us - int(place.arguments[3])) // 1_000_000

    def used_at(now_us: int) -> Fraction:
        if align == "first":
            # Only the server knows when windows begin.
            return Fraction(0)
        known = world.admitted[world.forgotten :]
        return Fraction(sum(cost for at_us, cost in known if window_of(at_us) == window_of(now_us)))

    run(world, used_at, Fraction(20))


@pytest.mark.parametrize("seed", range(8))
def test_sliding_window(world_of: Callable[..., World], seed: int) -> None:
    world = world_of(SlidingWindow, seed, rate="20/second")

    def used_at(now_us: int) -> Fraction:
        window, since_us = divmod(now_us, 1_000_000)
        known = world.admitted[world.forgotten :]
        counts = [sum(cost for at_us, cost in known if at_us // 1_000_000 == window - i) for i in range(2)]
        return Fraction(counts[0] + counts[1] * (1_000_000 - since_us) // 1_000_000)

    run(world, used_at, Fraction(20))

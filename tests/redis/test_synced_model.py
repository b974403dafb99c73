"""Synced limits against a model, by moved clocks: Redis has what the hosts have counted, whichever reports are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisServer
from scripts_clock import ServerClock
from synced_hosts import Host, admitted, hosts, sums

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.errors import StoreUnavailable
from forebay.redis.commands import Command
from forebay.redis.synced.exchange import SHARE, ListsCommand
from forebay.testing import ManualClock

START = 1_000_000_020
COUNT = 3
LIMIT = 60
US = 1_000_000

EXCHANGES = st.sampled_from(["answered", "not sent", "answer lost", "overtaken", "repeated"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hit"), st.integers(0, COUNT - 1), st.integers(1, 5)),
        st.tuples(st.just("refund"), st.integers(0, COUNT - 1), st.integers(1, 5)),
        st.tuples(st.just("exchange"), st.integers(0, COUNT - 1), EXCHANGES),
        st.tuples(st.just("advance"), st.sampled_from([0, 1, 7, 20, 41, 60]), st.just(0)),
    ),
    max_size=40,
)
FAST = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Line:
    """The connection of a host to Redis, which may lose its reports or replies."""

    def __init__(self, host: Host) -> None:
        (self.exchange,) = host.synced._exchanger.exchanges
        self.send_now = self.exchange.send
        self.exchange.send = self.send  # type: ignore[method-assign]
        self.fate = "answered"
        self.late: list[list[Command[None]]] = []

    def send(self, messages: list[Command[None]]) -> Sequence[Any]:
        if isinstance(messages[0], ListsCommand):
            return self.send_now(messages)
        if self.fate in ("not sent", "overtaken"):
            self.late += [messages] if self.fate == "overtaken" else []
            raise StoreUnavailable("the test lets nothing through")
        replies = self.send_now(messages)
        if self.fate == "answer lost":
            raise StoreUnavailable("the test loses the answer")
        if self.fate == "repeated":
            replies = self.send_now(messages)
        for overtaken in self.late:
            self.send_now(overtaken)
        self.late.clear()
        return replies


class Scene:
    def __init__(self, made: list[Host], server_clock: ServerClock, host_clock: ManualClock) -> None:
        self.hosts, self.server_clock, self.host_clock = made, server_clock, host_clock
        self.lines = [Line(host) for host in made]
        self.now: float = START

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.host_clock.set(self.now)
        self.server_clock.set(self.now)

    def exchange(self, host: int, fate: str) -> None:
        self.lines[host].fate = fate
        if fate in ("answered", "repeated"):
            self.hosts[host].exchange()
        else:
            failed = self.hosts[host].synced._exchanger.exchange(-1, elected=False)
            assert failed is None or isinstance(failed, StoreUnavailable)

    def settle(self) -> None:
        for _ in range(2):
            for host in range(len(self.hosts)):
                self.exchange(host, "answered")


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
@FAST
@given(steps=STEPS)
def test_redis_knows_the_counts_of_windows(
    server: RedisServer, client: redis.Redis, server_clock: ServerClock, kind: Any, steps: list[tuple[str, int, Any]]
) -> None:
    client.flushall()
    clock = ManualClock(START)
    with hosts(COUNT, server.url, lambda store: kind(store, "api", f"{LIMIT}/minute"), clock=clock) as made:
        scene = Scene(made, server_clock, clock)
        scene.advance(0)
        counted: dict[tuple[int, int], int] = {}  # by window and host
        for what, host, argument in steps:
            window = scene.now // 60
            own = counted.get((window, host), 0)
            if what == "advance":
                scene.advance(host)
            elif what == "hit":
                allowed = made[host].limiter.hit("k", argument).allowed
                counted[window, host] = own + argument * allowed
            elif what == "refund":
                before = counted.get((window - 1, host), 0) if kind is SlidingWindow else 0
                counted[window, host] = max(own - argument, 0)
                if before:
                    # The part that the current window didn't hold, if the state has one.
                    counted[window - 1, host] = before - min(before, max(argument - own, 0))
                made[host].limiter.refund("k", argument)
            else:
                scene.exchange(host, argument)
        scene.settle()
        window = scene.now // 60
        in_redis = {int(key.rsplit("-", 1)[1]) - 1: value for key, value in sums(client).items()}
        live = [window, window - 1] if kind is SlidingWindow else [window]
        for number in live:
            total = sum(counted.get((number, host), 0) for host in range(COUNT))
            assert in_redis.get(number, 0) == total
        for host in range(COUNT):
            total = sum(counted.get((window, other), 0) for other in range(COUNT))
            if counted.get((window, host)):
                remaining = LIMIT - total
                if kind is SlidingWindow:
                    before = sum(counted.get((window - 1, other), 0) for other in range(COUNT))
                    remaining -= before * (60 - scene.now % 60) // 60
                assert made[host].limiter.peek("k").remaining == max(remaining, 0)


@FAST
@given(steps=STEPS)
def test_redis_knows_the_charges_of_buckets(
    server: RedisServer, client: redis.Redis, server_clock: ServerClock, steps: list[tuple[str, int, Any]]
) -> None:
    """Redis counts each host's charges once, and no host admits a permit that it knows to be used up."""
    client.flushall()
    clock = ManualClock(START)
    with hosts(COUNT, server.url, lambda store: TokenBucket(store, "api", f"{LIMIT}/minute"), clock=clock) as made:
        scene = Scene(made, server_clock, clock)
        scene.advance(0)
        charged = [0] * COUNT
        for what, host, argument in steps:
            if what == "advance":
                scene.advance(host)
            elif what == "exchange":
                scene.exchange(host, argument)
            else:
                # Hosts learn of each other in between, so the remaining permits show how many a refund has given back.
                before = made[host].limiter.peek("k").remaining
                getattr(made[host].limiter, what)("k", argument)
                charged[host] += before - made[host].limiter.peek("k").remaining
        in_use = [host for host in range(COUNT) if made[host].limiter.peek("k").remaining < LIMIT]
        scene.settle()
        assert all(host.synced.status().pending_keys == 0 for host in made)
        ((key, arrival_us),) = sums(client).items() or [("none", 0)]
        reported = {field: int(entry.split(b":")[2]) for field, entry in client.hgetall(key).items() if b":" in entry}
        assert [reported.get(host.field, 0) for host in made] == [permits * US for permits in charged]
        # Each second brings one permit back: what isn't ahead of now has been refilled.
        ahead = max(arrival_us - scene.now * US, 0) // US
        assert ahead <= sum(charged)
        assert all(made[host].limiter.peek("k").remaining <= max(LIMIT - ahead, 0) for host in in_use)


@FAST
@given(steps=STEPS)
def test_a_single_host_merges_nothing_new(
    server: RedisServer, client: redis.Redis, server_clock: ServerClock, steps: list[tuple[str, int, Any]]
) -> None:
    """It decides as without other hosts, however it exchanges."""
    client.flushall()
    clock = ManualClock(START)
    rate = {"rate": "61/minute", "burst": 9}
    with (
        hosts(1, server.url, lambda store: TokenBucket(store, "api", **rate), clock=clock) as (host,),
        Store.private(keys=1, clock=clock) as store,
    ):
        scene = Scene([host], server_clock, clock)
        scene.advance(0)
        alone = TokenBucket(store, "api", **rate)
        for what, argument, which in steps:
            if what == "advance":
                scene.advance(argument)
            elif what == "exchange":
                scene.exchange(0, which)
            else:
                getattr(host.limiter, what)("k", which)
                getattr(alone, what)("k", which)
            assert host.limiter.peek("k").remaining == alone.peek("k").remaining


@FAST
@given(
    steps=st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, 9)), max_size=60),
    limit=st.integers(1, LIMIT),
)
def test_a_host_admits_by_its_own_count_and_the_others_reports(
    server: RedisServer, client: redis.Redis, server_clock: ServerClock, steps: list[tuple[int, int]], limit: int
) -> None:
    """Exactly. So all hosts together exceed the limit by no more than the counts that are not exchanged yet."""
    client.flushall()
    clock = ManualClock(START)
    with hosts(COUNT, server.url, lambda store: FixedWindow(store, "api", f"{limit}/minute"), clock=clock) as made:
        Scene(made, server_clock, clock).advance(0)
        own, reported = [0] * COUNT, [0] * COUNT
        known = [0] * COUNT
        for host, requests in steps:
            if requests == 0:
                others = sum(reported) - reported[host]
                # A host that hasn't counted the key knows it only if it is hot.
                if own[host] or SHARE * others >= limit:
                    known[host] = others
                reported[host] = own[host]
                made[host].exchange()
            for _ in range(requests):
                allowed = made[host].limiter.allow("k")
                assert allowed == (own[host] + known[host] < limit)
                own[host] += allowed


@pytest.mark.parametrize(("count", "limit", "burst"), [(2, 10, 20), (3, 1000, 20), (6, 100, 100)])
def test_buckets_of_greedy_hosts_admit_the_rate(
    server: RedisServer, server_clock: ServerClock, client: redis.Redis, count: int, limit: int, burst: int
) -> None:
    """In the long run they admit the rate, though each host learns of the others' bursts late."""
    total = 0
    for elapsed, host in fleet(server, server_clock, count, f"{limit}/second", burst, 40):
        while host.limiter.allow("k"):
            total += 1
        assert total <= burst + limit * elapsed + limit + (count - 1) * (burst + 2 * limit)
    assert total >= limit * 39


@pytest.mark.parametrize("burst", [50, 1000])
def test_hosts_within_the_rate_are_never_denied(
    server: RedisServer, server_clock: ServerClock, client: redis.Redis, burst: int
) -> None:
    """A bucket holds much less than what is used between two exchanges."""
    for _, host in fleet(server, server_clock, 3, "1000/second", burst, 20):
        # 6 each in 20 ms are 900 a second.
        assert admitted(host.limiter, 6) == 6


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow, TokenBucket])
@pytest.mark.parametrize("fate", ["answer lost", "overtaken"])
def test_a_refund_before_the_reply_stays_pending(
    server: RedisServer, client: redis.Redis, server_clock: ServerClock, kind: Any, fate: str
) -> None:
    """The count equals the last known one, but a report with a higher count may have arrived."""
    clock = ManualClock(START)
    with hosts(1, server.url, lambda store: kind(store, "api", f"{LIMIT}/minute"), clock=clock) as (host,):
        scene = Scene([host], server_clock, clock)
        scene.advance(0)
        assert host.limiter.hit("k", 5)
        scene.exchange(0, fate)
        host.limiter.refund("k", 5)
        assert host.synced.status().pending_keys == 1
        scene.lines[0].fate = "answered"
        assert host.synced._exchanger.exchange(-2, elected=False) is None
        entries = [client.hget(key, host.field) or b"0:0:0:0" for key in sums(client)]
        assert [int(entry.split(b":")[2]) for entry in entries] == [0]


def fleet(
    server: RedisServer, server_clock: ServerClock, count: int, rate: str, burst: int, seconds: int
) -> Iterator[tuple[float, Host]]:
    """Each host sends requests every 20 ms of the moved clocks, and exchanges once a second at a time of its own."""
    clock = ManualClock(START)
    with hosts(count, server.url, lambda store: TokenBucket(store, "api", rate, burst=burst), clock=clock) as made:
        scene = Scene(made, server_clock, clock)
        for tick in range(50 * seconds):
            scene.advance(0.02)
            for number, host in enumerate(made):
                yield tick / 50, host
                if tick % 50 == 50 * number // count:
                    host.exchange()

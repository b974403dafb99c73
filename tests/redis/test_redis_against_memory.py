"""The same limits over Redis and over shared memory, told the same things: also when bookings are cancelled later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from redis_server import RedisServer
from scripts_clock import ServerClock, moved_by_tests

from penstock import (
    BucketedWindow,
    Decision,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingWindow,
    Store,
    TokenBucket,
)
from penstock.redis import RedisStore
from penstock.testing import ManualClock

# With permits that are whole milliseconds apart, so that both count the same.
KINDS: dict[str, Callable[[Any], Any]] = {
    "TokenBucket": lambda store: TokenBucket(store, "api", "5/second", burst=4),
    "TokenBucketInterval": lambda store: TokenBucket(store, "api", "2/second", burst=5, refill="interval"),
    "LeakyBucket": lambda store: LeakyBucket(store, "api", "5/second", capacity=4),
    "MinInterval": lambda store: MinInterval(store, "api", "300 ms"),
    "FixedWindow": lambda store: FixedWindow(store, "api", "5/second"),
    "SlidingWindow": lambda store: SlidingWindow(store, "api", "5/second"),
    "BucketedWindow": lambda store: BucketedWindow(store, "api", "5/second", buckets=4),
}


def said(decision: Decision) -> tuple[Any, ...]:
    """All of it, to the microsecond."""
    times_ns = (decision.retry_after_ns, decision.reset_after_ns, decision.next_after_ns)
    return decision.allowed, decision.limit, decision.remaining, *(-(-time_ns // 1000) for time_ns in times_ns)


class RedisAndMemory(RuleBasedStateMachine):
    make: ClassVar[Callable[[Any], Any]]
    server: ClassVar[RedisServer]

    @initialize(start_ms=st.integers(0, 10**9))
    def begin(self, start_ms: int) -> None:
        self.now_ms = start_ms
        self.client = self.server.client()
        self.client.flushall()
        self.server_clock = ServerClock(self.client, 1000 * start_ms)
        self.clock = ManualClock(start_ms / 1000)
        self.stores: list[Any] = [RedisStore(self.server.url, timeout=60), Store.private(keys=100, clock=self.clock)]
        self.both = [type(self).make(store) for store in self.stores]
        self.booked: list[list[Any]] = []

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for opened in [*self.stores, self.client]:
                opened.close()

    @rule(cost=st.integers(0, 5))
    def hit(self, cost: int) -> None:
        cost = min(cost, self.both[0].limit)
        over_redis, in_memory = (limiter.hit("ada", cost) for limiter in self.both)
        assert said(over_redis) == said(in_memory)

    @rule(cost=st.integers(1, 5), max_delay=st.sampled_from([None, 0, 0.3, 0.8, 1.5, 2]))
    def reserve(self, cost: int, max_delay: float | None) -> None:
        cost = min(cost, self.both[0].limit)
        over_redis, in_memory = (limiter.reserve("ada", cost, max_delay) for limiter in self.both)
        assert over_redis.allowed is in_memory.allowed
        assert over_redis.delay_ns == -(-in_memory.delay_ns // 1000) * 1000
        self.booked.append([over_redis, in_memory])

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.booked:
            for reservation in self.booked.pop(data.draw(st.integers(0, len(self.booked) - 1))):
                reservation.cancel()

    @rule(cost=st.integers(0, 5))
    def refund(self, cost: int) -> None:
        for limiter in self.both:
            limiter.refund("ada", min(cost, limiter.peek("ada").limit))

    @rule()
    def reset(self) -> None:
        for limiter in self.both:
            limiter.reset("ada")

    @rule(pause_ms=st.sampled_from([1, 49, 50, 100, 199, 200, 250, 300, 500, 999, 1000]) | st.integers(0, 3000))
    def go_on(self, pause_ms: int) -> None:
        self.now_ms += pause_ms
        self.server_clock.set_us(1000 * self.now_ms)
        self.clock.set(self.now_ms / 1000)

    @invariant()
    def they_are_alike(self) -> None:
        if hasattr(self, "both"):
            over_redis, in_memory = (limiter.peek("ada") for limiter in self.both)
            assert said(over_redis) == said(in_memory)


@pytest.fixture(autouse=True)
def served(shared_server: RedisServer) -> Iterator[None]:
    RedisAndMemory.server = shared_server
    with moved_by_tests():
        yield


for kind, make in KINDS.items():
    machine: Any = type(kind, (RedisAndMemory,), {"make": staticmethod(make)})
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
    globals()[f"Test{kind}"] = machine.TestCase
del machine

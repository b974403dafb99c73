"""The same operations at two places, one in memory: both answer alike, also after a late cancellation.

A late cancellation exceeds the oracle's rules, so memory is the reference. A synced bucket differs: see
``test_hosts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar, Final

import pytest
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from places import opened
from redis_server import RedisServer

from forebay import (
    BucketedWindow,
    Decision,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingWindow,
    TokenBucket,
)

MS_NS: Final = 1_000_000
# Permits are whole milliseconds apart, so that places that count in microseconds agree.
KINDS: dict[str, Callable[[Any], Any]] = {
    "TokenBucket": lambda store: TokenBucket(store, "api", "5/second", burst=4),
    "TokenBucketInterval": lambda store: TokenBucket(store, "api", "2/second", burst=5, refill="interval"),
    "LeakyBucket": lambda store: LeakyBucket(store, "api", "5/second", capacity=4),
    "MinInterval": lambda store: MinInterval(store, "api", "300 ms"),
    "FixedWindow": lambda store: FixedWindow(store, "api", "5/second"),
    "SlidingWindow": lambda store: SlidingWindow(store, "api", "5/second"),
    "BucketedWindow": lambda store: BucketedWindow(store, "api", "5/second", buckets=4),
}


def fields(decision: Decision) -> tuple[Any, ...]:
    """All fields, with times rounded up to the microsecond."""
    times_ns = (decision.retry_after_ns, decision.reset_after_ns, decision.next_after_ns)
    return decision.allowed, decision.limit, decision.remaining, *(-(-time_ns // 1000) for time_ns in times_ns)


# Hypothesis examples for each limiter, by place.
EXAMPLES: Final = {"redis": 50, "asyncio": 5}


class PlaceAndMemory(RuleBasedStateMachine):
    make: ClassVar[Callable[[Any], Any]]
    place_kind: ClassVar[str]
    server: ClassVar[RedisServer | None] = None

    @initialize(start_ms=st.integers(0, 10**9))
    def begin(self, start_ms: int) -> None:
        self.now_ns = start_ms * MS_NS
        self.opening = ExitStack()
        self.places = [
            self.opening.enter_context(opened(kind, self.server, self.now_ns, keys=100))
            for kind in (self.place_kind, "private")
        ]
        self.both = [type(self).make(place.store) for place in self.places]
        self.booked: list[list[Any]] = []

    def teardown(self) -> None:
        if hasattr(self, "opening"):
            self.opening.close()

    @rule(cost=st.integers(0, 5))
    def hit(self, cost: int) -> None:
        cost = min(cost, self.both[1].peek("ada").limit)
        there, in_memory = (limiter.hit("ada", cost) for limiter in self.both)
        assert fields(there) == fields(in_memory)

    @rule(cost=st.integers(1, 5), max_delay=st.sampled_from([None, 0, 0.3, 0.8, 1.5, 2]))
    def reserve(self, cost: int, max_delay: float | None) -> None:
        cost = min(cost, self.both[1].peek("ada").limit)
        there, in_memory = (limiter.reserve("ada", cost, max_delay) for limiter in self.both)
        assert there.allowed is in_memory.allowed
        assert -(-there.delay_ns // 1000) == -(-in_memory.delay_ns // 1000)
        self.booked.append([there, in_memory])

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
        self.now_ns += pause_ms * MS_NS
        for place in self.places:
            place.clock.set_ns(self.now_ns)

    @invariant()
    def both_agree(self) -> None:
        if hasattr(self, "booked"):
            there, in_memory = (limiter.peek("ada") for limiter in self.both)
            assert fields(there) == fields(in_memory)


@pytest.fixture(autouse=True)
def served(shared_server: RedisServer) -> Iterator[None]:
    PlaceAndMemory.server = shared_server
    yield
    PlaceAndMemory.server = None


def machine_of(make: Callable[[Any], Any], place_kind: str) -> Any:
    machine: Any = type("Cancelled", (PlaceAndMemory,), {"make": staticmethod(make), "place_kind": place_kind})
    machine.TestCase.settings = examples(EXAMPLES[place_kind])
    return machine.TestCase


for kind in KINDS:
    for place_kind in EXAMPLES:
        globals()[f"Test{kind}{place_kind.title()}"] = machine_of(KINDS[kind], place_kind)

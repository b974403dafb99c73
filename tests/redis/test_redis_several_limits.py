"""Several limits over Redis at once: one script judges all and charges all, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracle import AllOfOracle, Answer
from redis_cases import CASES, LATEST_US, Held, magnitudes
from redis_server import RedisServer
from scripts_clock import ServerClock, moved_by_tests

from penstock import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    Decision,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    Store,
    TokenBucket,
)
from penstock.redis import RedisStore

NAMES = ("a", "b", "c", "d")
KEYS = ("user:1", 7)


def answer_of(decision: Decision) -> Answer:
    return Answer(
        decision.allowed,
        decision.limit,
        decision.remaining,
        decision.retry_after_ns // 1000,
        decision.reset_after_ns // 1000,
        decision.limiter,
    )


class AllOfRedisAndOracle(RuleBasedStateMachine):
    server: ClassVar[RedisServer]
    kinds: ClassVar[list[str]] = sorted(set(CASES) - {"FixedWindowStagger"})
    has_slots: ClassVar[bool] = False

    @initialize(data=st.data(), start_us=magnitudes(0, LATEST_US))
    def begin(self, data: st.DataObject, start_us: int) -> None:
        one = st.sampled_from(self.kinds).flatmap(CASES.__getitem__)
        self.cases = cases = data.draw(st.lists(one, min_size=1, max_size=len(NAMES)))
        self.now_us = start_us
        self.client = self.server.client()
        self.client.flushall()
        self.clock = ServerClock(self.client, start_us)
        self.store = RedisStore(self.server.url, timeout=60)
        self.store._has_slots = self.has_slots
        self.limiters = [case.make(self.store, name) for case, name in zip(cases, NAMES, strict=False)]
        self.all: Any = AllOf(*self.limiters)
        self.oracle = AllOfOracle({name: case.rule for case, name in zip(cases, NAMES, strict=False)})

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.client.close()

    def drawn(self, data: st.DataObject, least: int = 0) -> tuple[Any, Any, list[Any], list[int]]:
        """Keys and costs, as a limiter takes them and as the oracle does."""
        count = len(self.cases)
        keys = data.draw(st.lists(st.sampled_from(KEYS), min_size=count, max_size=count))
        costs = [data.draw(case.costs().filter(lambda cost: cost >= least)) for case in self.cases]
        asked_keys: Any = keys[0] if len(set(keys)) == 1 and data.draw(st.booleans()) else keys
        asked_costs: Any = costs[0] if len(set(costs)) == 1 and data.draw(st.booleans()) else costs
        return asked_keys, asked_costs, keys, costs

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        asked_keys, asked_costs, keys, costs = self.drawn(data)
        assert answer_of(self.all.hit(asked_keys, asked_costs)) == self.oracle.hit(keys, costs, self.now_us)

    @rule(key=st.sampled_from(KEYS))
    def allow(self, key: Any) -> None:
        count = len(self.cases)
        assert self.all.allow(key) is self.oracle.hit([key] * count, [1] * count, self.now_us).allowed

    @rule(data=st.data())
    def hit_each(self, data: st.DataObject) -> None:
        asked_keys, asked_costs, keys, costs = self.drawn(data)
        each = self.all.hit_each(asked_keys, asked_costs)
        expected = self.oracle.hit(keys, costs, self.now_us)
        assert all(each) is expected.allowed
        assert [one.limiter for one in each] == list(self.oracle.rules)
        assert min(one.remaining for one in each) == expected.remaining

    @rule(asked=st.lists(st.sampled_from(KEYS), max_size=9))
    def allow_many(self, asked: list[Any]) -> None:
        count = len(self.cases)
        expected = [self.oracle.hit([key] * count, [1] * count, self.now_us).allowed for key in asked]
        assert self.all.allow_many(asked) == expected

    @rule(data=st.data())
    def peek(self, data: st.DataObject) -> None:
        asked_keys, asked_costs, keys, costs = self.drawn(data)
        assert answer_of(self.all.peek(asked_keys, asked_costs)) == self.oracle.peek(keys, costs, self.now_us)

    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        asked_keys, asked_costs, keys, costs = self.drawn(data)
        self.all.refund(asked_keys, asked_costs)
        self.oracle.refund(keys, costs, self.now_us)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        asked_keys, _, keys, _ = self.drawn(data)
        self.all.reset(asked_keys)
        self.oracle.reset(keys, self.now_us)

    @rule(data=st.data())
    def reserve_and_cancel(self, data: st.DataObject) -> None:
        asked_keys, asked_costs, keys, costs = self.drawn(data, least=1)
        expected = self.oracle.hit(keys, costs, self.now_us)
        reservation = self.all.reserve(asked_keys, asked_costs)
        assert reservation.allowed is expected.allowed
        assert reservation.delay_ns == 1000 * expected.retry_after_ns
        if reservation and data.draw(st.booleans()):
            for _ in range(2):
                reservation.cancel()
            for (name, its_rule), key, cost in zip(self.oracle.rules.items(), keys, costs, strict=True):
                one = self.oracle.oracles[name]
                if isinstance(its_rule, Held):
                    one.states[key] = its_rule.released(one.states[key], self.now_us, cost)
                else:
                    one.refund(its_rule, key, cost, self.now_us)

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.now_us = data.draw(data.draw(st.sampled_from(self.cases)).times_us(self.now_us))
        self.clock.set_us(self.now_us)

    @invariant()
    def parts_are_alike(self) -> None:
        if hasattr(self, "limiters"):
            for limiter, (name, its_rule) in zip(self.limiters, self.oracle.rules.items(), strict=True):
                for key in KEYS:
                    expected = self.oracle.oracles[name].peek(its_rule, key, 1, self.now_us)
                    assert answer_of(limiter.peek(key)) == replace(expected, limiter=name)


@pytest.fixture(autouse=True)
def served(shared_server: RedisServer) -> Iterator[None]:
    AllOfRedisAndOracle.server = shared_server
    with moved_by_tests():
        yield


class ApartRedisAndOracle(AllOfRedisAndOracle):
    """As over a cluster, one call for each slot: with nobody in between, the answers are the same.

    But for what a charge leaves that is given back: a window that has begun with it, a log's oldest permits.
    """

    kinds: ClassVar[list[str]] = [
        kind for kind in AllOfRedisAndOracle.kinds if kind not in ("FixedWindowFirst", "SlidingLog")
    ]
    has_slots = True


TestAllOf: Any = AllOfRedisAndOracle.TestCase
TestAllOf.settings = settings(max_examples=100, stateful_step_count=30)
TestApart: Any = ApartRedisAndOracle.TestCase
TestApart.settings = settings(max_examples=100, stateful_step_count=30)


def test_one_limiter_twice_is_charged_twice(redis_store: RedisStore, server_clock: ServerClock) -> None:
    bucket = TokenBucket(redis_store, "api", "1/minute", burst=3)
    twice = AllOf(bucket, bucket)
    assert twice.hit("ada").remaining == 1
    assert not twice.allow("ada")
    assert bucket.peek("ada").remaining == 1  # nothing was charged by the one that was denied
    assert twice.allow(["bob", "cid"])
    twice.refund("ada")
    assert bucket.peek("ada").remaining == 3


def test_different_algorithms_share_nothing_but_a_name(redis_store: RedisStore, server_clock: ServerClock) -> None:
    both = AllOf(FixedWindow(redis_store, "api", "5/minute"), SlidingLog(redis_store, "api", "5/minute", keys=9))
    assert [both.allow("ada") for _ in range(6)] == [True] * 5 + [False]


def test_a_denial_writes_nothing(redis_store: RedisStore, client: redis.Redis, server_clock: ServerClock) -> None:
    window, gap = FixedWindow(redis_store, "w", "9/minute"), MinInterval(redis_store, "g", "1 minute")
    held = Concurrency(redis_store, "c", 9)
    both = AllOf(window, held, gap)
    assert both.allow("ada")
    written = client.info("persistence")["rdb_changes_since_last_save"]
    assert not both.hit("ada")
    assert not both.reserve("ada")
    assert not both.peek("ada")
    assert client.info("persistence")["rdb_changes_since_last_save"] == written
    assert held.peek("ada").remaining == 8


def test_permits_taken_with_others_are_given_back(redis_store: RedisStore, server_clock: ServerClock) -> None:
    held, bucket = Concurrency(redis_store, "c", 2), TokenBucket(redis_store, "b", "9/minute")
    both = AllOf(held, bucket)
    assert both.allow("ada")
    reservation = both.reserve("ada")
    assert not held.peek("ada")
    reservation.cancel()
    assert (held.peek("ada").remaining, bucket.peek("ada").remaining) == (1, 8)
    both.refund("ada")
    assert (held.peek("ada").remaining, bucket.peek("ada").remaining) == (2, 9)


def test_limits_that_share_a_state_are_all_given_back(redis_store: RedisStore, server_clock: ServerClock) -> None:
    queue = LeakyBucket(redis_store, "q", "1/second", capacity=4)
    booked = AllOf(queue, queue).reserve("ada")
    assert queue.peek("ada").remaining == 2
    booked.cancel()
    assert queue.peek("ada").remaining == 4


def test_what_cannot_be_asked(redis_store: RedisStore, server: RedisServer) -> None:
    bucket = TokenBucket(redis_store, "b", "9/minute")
    both: Any = AllOf(bucket, MinInterval(redis_store, "g", 1))
    for key, cost, error in (
        (["ada"], 1, InvalidKey),
        ("ada", [1], InvalidCost),
        ("ada", 2, CostExceedsLimit),
        (1.5, 1, InvalidKey),
        ("ada", -1, InvalidCost),
    ):
        for ask in (both.hit, both.peek, both.refund, both.reserve):
            with pytest.raises(error):
                ask(key, cost)
    with Store.private(keys=1) as store, RedisStore(server.url) as other:
        make: Any = AllOf
        for others in ([TokenBucket(store, "b", "1/s")], [TokenBucket(other, "b", "1/s")], ["b"], [bucket] * 16):
            with pytest.raises(InvalidLimiter):
                make(bucket, *others)
        with pytest.raises(InvalidLimiter):
            make(TokenBucket(store, "b", "1/s"), bucket)
        with pytest.raises(TypeError, match="is a store"):
            TokenBucket(bucket, "b", "1/s")  # type: ignore[call-overload]

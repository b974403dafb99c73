"""Several limits at once, and an oracle for each: all are charged or none, and the decision names the binding limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from bucket_strategies import magnitudes
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from limiter_cases import MEMORY, OF_ONE_HOST, REDIS, SYNCED, Measure, cases_of
from oracle import AllOfOracle, Answer, ToppedUpBucket
from oracle_counts import Held
from oracle_machine import KEYS, answer_in, keys
from places import Place, opened
from redis_server import RedisServer

from forebay import AllOf, CostExceedsLimit, InvalidCost, InvalidKey

EXACT_IN_MEMORY = sorted(cases_of(MEMORY).keys() - {"FixedWindowStagger", "Concurrency"})
EXACT_OVER_REDIS = sorted(cases_of(REDIS).keys() - {"FixedWindowStagger"})


class SeveralAndOracles(RuleBasedStateMachine):
    """The clock only goes forward; other tests move each limiter's clock back."""

    measure: ClassVar[Measure]
    kinds: ClassVar[list[str]]
    place_kind: ClassVar[str]
    has_slots: ClassVar[bool] = False
    server: ClassVar[RedisServer | None] = None

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        one = st.sampled_from(self.kinds).flatmap(cases_of(self.measure).__getitem__)
        cases = data.draw(st.lists(one, min_size=1, max_size=4))
        self.cases = {f"limit {number}": case for number, case in enumerate(cases)}
        self.most = min(case.rule.most for case in cases)
        self.now = data.draw(st.just(0) | magnitudes(1, self.measure.latest // 2))
        start_ns = self.now * self.measure.unit_ns
        self.opening: AbstractContextManager[Place] = opened(self.place_kind, self.server, start_ns)
        self.place = self.opening.__enter__()
        if self.has_slots:
            self.place.store.executor.has_slots = True
        self.limiters = [case.make(self.place.store, name) for name, case in self.cases.items()]
        self.all: Any = AllOf(*self.limiters)
        self.oracle = AllOfOracle({name: case.rule for name, case in self.cases.items()})
        self.waits: list[int] = []

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.opening.__exit__(None, None, None)

    def draw_keys(self, data: st.DataObject) -> tuple[Any, list[Any]]:
        """A key argument, and the key that it gives to each limiter."""
        key = data.draw(keys)
        if data.draw(st.booleans()):
            same = [key] * len(self.cases)
            # A tuple of as many parts as there are limiters is ambiguous, and refused.
            return same if isinstance(key, tuple) else key, same
        each = [data.draw(keys) for _ in self.cases]
        return each, each

    def draw_costs(self, data: st.DataObject) -> tuple[Any, list[int]]:
        if data.draw(st.booleans()):
            cost = data.draw(st.just(1) | st.integers(0, min(self.most, 3)) | magnitudes(1, self.most))
            return cost, [cost] * len(self.cases)
        each = [data.draw(case.costs()) for case in self.cases.values()]
        return each, each

    def named(self, decision: Any) -> Answer:
        return replace(answer_in(self.measure, decision), limiter=decision.limiter)

    def expect(self, keys: list[Any], costs: list[int]) -> Answer:
        answer = self.oracle.hit(keys, costs, self.now)
        self.waits = [answer.retry_after_ns, answer.reset_after_ns]
        return answer

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        assert self.named(self.all.hit(key, cost)) == self.expect(keys, costs)

    @rule(data=st.data())
    def hit_each(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        each, expected = self.all.hit_each(key, cost), self.expect(keys, costs)
        assert all(each) is expected.allowed
        assert [one.limiter for one in each] == list(self.cases)
        assert min(one.remaining for one in each) == expected.remaining

    @rule(data=st.data())
    def allow(self, data: st.DataObject) -> None:
        key, keys = self.draw_keys(data)
        assert self.all.allow(key) is self.expect(keys, [1] * len(keys)).allowed

    @rule(data=st.data())
    def peek(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        assert self.named(self.all.peek(key, cost)) == self.oracle.peek(keys, costs, self.now)

    @rule(count=st.integers(0, 20), data=st.data())
    def allow_many(self, count: int, data: st.DataObject) -> None:
        requests = [(*self.draw_keys(data), *self.draw_costs(data)) for _ in range(count)]
        passed = self.all.allow_many([key for key, _, _, _ in requests], [cost for _, _, cost, _ in requests])
        assert passed == [self.expect(keys, costs).allowed for _, keys, _, costs in requests]

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        reservation, answer = self.all.reserve(key, cost), self.expect(keys, costs)
        assert reservation.allowed is answer.allowed
        assert reservation.delay_ns == answer.retry_after_ns * self.measure.unit_ns
        if reservation and data.draw(st.booleans()):
            for _ in range(2):
                reservation.cancel()
            for (name, its_rule), key, cost in zip(self.oracle.rules.items(), keys, costs, strict=True):
                one = self.oracle.oracles[name]
                if isinstance(its_rule, Held):
                    one.states[key] = its_rule.released(one.states.get(key, its_rule.fresh), self.now, cost)
                else:
                    one.cancel(its_rule, key, cost, self.now)

    @precondition(lambda self: not self.has_slots)
    @rule(key=keys, permits=st.integers(1, 3) | magnitudes(1, 2**40), data=st.data())
    def add(self, key: Any, permits: int, data: st.DataObject) -> None:
        limiter, (name, its_rule) = data.draw(
            st.sampled_from(list(zip(self.limiters, self.oracle.rules.items(), strict=True)))
        )
        if isinstance(its_rule, ToppedUpBucket):
            states = self.oracle.oracles[name].states
            states[key] = its_rule.added(states.get(key, its_rule.fresh), self.now, permits)
            limiter.add(key, permits)

    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        self.all.refund(key, cost)
        self.oracle.refund(keys, costs, self.now)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        key, keys = self.draw_keys(data)
        self.all.reset(key)
        self.oracle.reset(keys, self.now)

    @rule(key=keys, excess=magnitudes(1, 2**70))
    def exceed_the_limits(self, key: Any, excess: int) -> None:
        count = len(self.cases)
        if isinstance(key, tuple):
            if len(key) == count:
                with pytest.raises(InvalidKey):
                    self.all.hit(key)
            key = [key] * count
        for name in ("hit", "peek", "reserve", "refund"):
            method = getattr(self.all, name)
            if name != "refund":
                with pytest.raises(CostExceedsLimit):
                    method(key, self.most + excess)
            with pytest.raises(InvalidCost):
                method(key, -excess)
            with pytest.raises(InvalidCost):
                method(key, [1] * (count + 1))
            with pytest.raises(InvalidKey):
                method([1] * (count + 1))
            with pytest.raises(InvalidKey):
                method(1.5)

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.move(data.draw(data.draw(st.sampled_from(list(self.cases.values()))).times(self.now)))

    @precondition(lambda self: self.waits)
    @rule(data=st.data(), off=st.integers(-1, 1))
    def wait_until_reported(self, data: st.DataObject, off: int) -> None:
        self.move(self.now + data.draw(st.sampled_from(self.waits)) + off)
        self.waits = []

    def move(self, now: int) -> None:
        self.now = min(max(now, self.now), self.measure.latest)
        self.place.clock.set_ns(self.now * self.measure.unit_ns)

    @invariant()
    def each_limit_agrees_with_its_oracle(self) -> None:
        """A request that one limit denied was charged to none."""
        if hasattr(self, "waits"):
            for limiter, (name, its_rule) in zip(self.limiters, self.oracle.rules.items(), strict=True):
                for key in KEYS:
                    expected = self.oracle.oracles[name].peek(its_rule, key, 1, self.now)
                    assert answer_in(self.measure, limiter.peek(key)) == expected


@pytest.fixture(autouse=True)
def served(shared_server: RedisServer) -> Iterator[None]:
    SeveralAndOracles.server = shared_server
    yield
    SeveralAndOracles.server = None


def machine_of(place_kind: str, measure: Measure, kinds: list[str], count: int, *, has_slots: bool = False) -> Any:
    parameters = {"measure": measure, "kinds": kinds, "place_kind": place_kind, "has_slots": has_slots}
    machine: Any = type(f"Several{place_kind.title()}", (SeveralAndOracles,), parameters)
    machine.TestCase.settings = examples(count)
    return machine.TestCase


TestPrivate = machine_of("private", MEMORY, EXACT_IN_MEMORY, 60)
TestSynced = machine_of("synced", SYNCED, list(OF_ONE_HOST), 25)
TestRedis = machine_of("redis", REDIS, EXACT_OVER_REDIS, 40)
TestAsyncio = machine_of("asyncio", REDIS, EXACT_OVER_REDIS, 8)
# One call for each slot, as over a cluster. Without other clients in between, the answers are the same, except after a
# charge that is rolled back: a window that it began, the oldest permits of a log, or the last permits above a burst.
TestSlots = machine_of(
    "redis", REDIS, [kind for kind in EXACT_OVER_REDIS if kind not in ("FixedWindowFirst", "SlidingLog")], 40,
    has_slots=True,
)  # fmt: skip

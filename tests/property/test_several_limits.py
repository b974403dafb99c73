"""Several limits at once, and the oracle of each: all or none, and the limit that bound the request is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bucket_strategies import LATEST_NS, answer_of, magnitudes, set_ns
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from limiter_cases import CASES, Case
from oracle import AllOfOracle, Answer

from penstock import AllOf, CostExceedsLimit, InvalidCost, InvalidKey, Store
from penstock.testing import ManualClock

# Those whose rule says all that there is to know.
EXACT = sorted(CASES.keys() - {"FixedWindowFirst", "FixedWindowStagger"})
KEYS = ("user:1", b"user:1", 7, ("user", 1))

keys = st.sampled_from(KEYS)
cases = st.sampled_from(EXACT).flatmap(lambda kind: CASES[kind])


class SeveralAndOracles(RuleBasedStateMachine):
    """With a clock that only goes forward: what limiters make of one that goes back is tested with each of them."""

    @initialize(cases=st.lists(cases, min_size=1, max_size=4), start_ns=st.just(0) | magnitudes(1, 2**58))
    def begin(self, cases: list[Case], start_ns: int) -> None:
        self.cases = {f"limit {number}": case for number, case in enumerate(cases)}
        self.most = min(case.rule.most for case in cases)
        self.now_ns = start_ns
        self.clock = ManualClock()
        set_ns(self.clock, start_ns)
        self.store = Store.private(keys=1, clock=self.clock)
        self.native = AllOf(*[case.make(self.store, name) for name, case in self.cases.items()])
        self.oracle = AllOfOracle({name: case.rule for name, case in self.cases.items()})
        self.told_ns: list[int] = []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    def draw_keys(self, data: st.DataObject) -> tuple[Any, list[Any]]:
        """What to ask with, and what that means for each limiter."""
        key = data.draw(keys)
        if data.draw(st.booleans()):
            return key, [key] * len(self.cases)
        each = [data.draw(keys) for _ in self.cases]
        return each, each

    def draw_costs(self, data: st.DataObject) -> tuple[Any, list[int]]:
        if data.draw(st.booleans()):
            cost = data.draw(st.just(1) | st.integers(0, min(self.most, 3)) | magnitudes(1, self.most))
            return cost, [cost] * len(self.cases)
        each = [data.draw(case.costs()) for case in self.cases.values()]
        return each, each

    def expect(self, keys: list[Any], costs: list[int]) -> Answer:
        answer = self.oracle.hit(keys, costs, self.now_ns)
        self.told_ns = [answer.retry_after_ns, answer.reset_after_ns]
        return answer

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        assert named_answer_of(self.native.hit(key, cost)) == self.expect(keys, costs)

    @rule(data=st.data())
    def allow(self, data: st.DataObject) -> None:
        key, keys = self.draw_keys(data)
        assert self.native.allow(key) is self.expect(keys, [1] * len(keys)).allowed

    @rule(data=st.data())
    def peek(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        assert named_answer_of(self.native.peek(key, cost)) == self.oracle.peek(keys, costs, self.now_ns)

    @rule(count=st.integers(0, 20), data=st.data())
    def allow_many(self, count: int, data: st.DataObject) -> None:
        asked = [(*self.draw_keys(data), *self.draw_costs(data)) for _ in range(count)]
        passed = self.native.allow_many([key for key, _, _, _ in asked], [cost for _, _, cost, _ in asked])
        assert passed == [self.expect(keys, costs).allowed for _, keys, _, costs in asked]

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        reservation, answer = self.native.reserve(key, cost), self.expect(keys, costs)
        assert (reservation.allowed, reservation.delay_ns) == (answer.allowed, answer.retry_after_ns)

    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        (key, keys), (cost, costs) = self.draw_keys(data), self.draw_costs(data)
        self.native.refund(key, cost)
        self.oracle.refund(keys, costs, self.now_ns)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        key, keys = self.draw_keys(data)
        self.native.reset(key)
        self.oracle.reset(keys, self.now_ns)

    @rule(key=keys, excess=magnitudes(1, 2**70))
    def ask_for_what_cannot_be(self, key: Any, excess: int) -> None:
        count = len(self.cases)
        for ask in (self.native.hit, self.native.peek, self.native.reserve):
            with pytest.raises(CostExceedsLimit):
                ask(key, self.most + excess)
            with pytest.raises(InvalidCost):
                ask(key, -excess)
            with pytest.raises(InvalidCost):
                ask(key, [1] * (count + 1))
            with pytest.raises(InvalidKey):
                ask([key] * (count + 1))

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.move(data.draw(data.draw(st.sampled_from(list(self.cases.values()))).times_ns(self.now_ns)))

    @precondition(lambda self: self.told_ns)
    @rule(data=st.data(), off_ns=st.integers(-1, 1))
    def wait_as_told(self, data: st.DataObject, off_ns: int) -> None:
        self.move(self.now_ns + data.draw(st.sampled_from(self.told_ns)) + off_ns)
        self.told_ns = []

    def move(self, now_ns: int) -> None:
        self.now_ns = min(max(now_ns, self.now_ns), LATEST_NS)
        set_ns(self.clock, self.now_ns)

    @invariant()
    def each_limit_is_as_its_oracle(self) -> None:
        """None has been charged that should not have been, for a request that another denied."""
        if hasattr(self, "native"):
            for limiter in self.native.limiters:
                oracle, case = self.oracle.oracles[limiter.name], self.cases[limiter.name]
                for key in KEYS:
                    assert answer_of(limiter.peek(key)) == oracle.peek(case.rule, key, 1, self.now_ns)


def named_answer_of(decision: Any) -> Answer:
    return replace(answer_of(decision), limiter=decision.limiter)


TestSeveralAndOracles = SeveralAndOracles.TestCase
TestSeveralAndOracles.settings = settings(max_examples=150, stateful_step_count=30)

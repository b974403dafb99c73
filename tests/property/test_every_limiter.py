"""Every limiter and the oracle, told the same things at the same times, answer alike to the last field."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from bucket_strategies import LATEST_NS, NS, answer_of, magnitudes, set_ns
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from limiter_cases import CASES, LONGEST_REFILL_NS, Case
from oracle import Answer, Booking, Oracle, Rule
from oracle_counts import BucketedWindow, Log

from penstock import CostExceedsLimit, InvalidCost, InvalidKey, Store
from penstock.testing import ManualClock

# Few enough that an expired key's cell is not reused, so that a clock that goes back finds it again.
KEYS = ("user:1", b"user:1", 7, ("user", 1))

keys = st.sampled_from(KEYS)


class NativeAndOracle(RuleBasedStateMachine):
    cases: ClassVar[st.SearchStrategy[Case]]
    store_kind: ClassVar[str]

    @initialize(data=st.data(), start_ns=st.just(0) | magnitudes(1, LATEST_NS))
    def begin(self, data: st.DataObject, start_ns: int) -> None:
        self.case = data.draw(type(self).cases)
        self.now_ns = self.latest_ns = start_ns
        self.earliest_ns = 0
        self.clock = ManualClock()
        set_ns(self.clock, start_ns)
        if self.store_kind == "private":
            self.store = Store.private(keys=1, clock=self.clock)
        else:
            self.store = Store(f"test-{os.getpid()}-{secrets.token_hex(6)}", keys=1, clock=self.clock)
        self.native = self.case.make(self.store)
        self.oracle: Oracle[Any] = Oracle()
        self.told_ns: list[int] = []
        self.allowed = self.denied = 0
        self.phases_ns = {key: self.phase_of(key) for key in KEYS} if self.case.staggered else {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            counted = self.store.stats().limiters["native"]
            self.store.close()
            if self.store_kind == "named":
                Store.unlink(self.store.name)
            assert (counted.allowed, counted.denied) == (self.allowed, self.denied)
            assert (counted.evicted, counted.full) == (0, 0)

    def phase_of(self, key: Any) -> int:
        """When the key's windows begin: a request tells how far away the end of the current one is."""
        period_ns = self.case.span_ns
        left_ns: int = self.native.hit(key).reset_after_ns
        self.native.reset(key)
        self.allowed += 1
        assert 0 < left_ns <= period_ns
        return (self.now_ns + left_ns) % period_ns

    def rule_of(self, key: Any, rule: Rule[Any] | None = None) -> Rule[Any]:
        rule = rule or self.case.rule
        return replace(rule, phase_ns=self.phases_ns[key]) if self.case.staggered else rule  # type: ignore[type-var]

    def expect(self, key: Any, cost: int, rule: Rule[Any] | None = None) -> Answer:
        """What the oracle says to a `hit`, counted."""
        before = self.oracle.states.get(key)
        answer = self.oracle.hit(self.rule_of(key, rule), key, cost, self.now_ns)
        self.allowed += answer.allowed
        self.denied += not answer.allowed
        self.told_ns = [answer.retry_after_ns, answer.reset_after_ns]
        if self.case.slack_ns and answer.allowed and cost and (before is None or before[0] <= self.now_ns):
            return replace(answer, reset_after_ns=self.learn_end(key))
        return answer

    def learn_end(self, key: Any) -> int:
        """A window that has just begun ends a little later than the rule says; the oracle takes its end from there."""
        exact_ns, count = self.oracle.states[key]
        left_ns: int = self.native.peek(key).reset_after_ns
        assert 0 <= self.now_ns + left_ns - exact_ns < self.case.slack_ns
        self.oracle.states[key] = self.now_ns + left_ns, count
        return left_ns

    @rule(key=keys)
    def allow(self, key: Any) -> None:
        allowed = self.native.allow(key)
        assert allowed is self.expect(key, 1).allowed

    @rule(key=keys, data=st.data())
    def hit(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs())
        answer = answer_of(self.native.hit(key, cost))
        assert answer == self.expect(key, cost)

    @rule(key=keys, data=st.data())
    def hit_all_that_remains(self, key: Any, data: st.DataObject) -> None:
        remaining = self.native.peek(key, 0).remaining
        cost = min(remaining + data.draw(st.integers(0, 1)), self.case.rule.most)
        answer = answer_of(self.native.hit(key, cost))
        assert answer == self.expect(key, cost)

    @precondition(lambda self: self.case.tiers)
    @rule(key=keys, data=st.data())
    def ask_at_another_rate(self, key: Any, data: st.DataObject) -> None:
        options, tier = data.draw(st.sampled_from(self.case.tiers))
        cost = data.draw(replace(self.case, rule=tier).costs())
        answer = answer_of(self.native.peek(key, cost, **options))
        assert answer == self.oracle.peek(self.rule_of(key, tier), key, cost, self.now_ns)
        answer = answer_of(self.native.hit(key, cost, **options))
        assert answer == self.expect(key, cost, tier)
        if data.draw(st.booleans()):
            self.native.refund(key, cost, **options)
            self.oracle.refund(self.rule_of(key, tier), key, cost, self.now_ns)

    @rule(key=keys, data=st.data())
    def peek(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs())
        self.check(key, cost)

    @rule(asked=st.lists(keys, max_size=40), data=st.data())
    def allow_many(self, asked: list[Any], data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            passed = self.native.allow_many(asked)
            assert passed == [self.expect(key, 1).allowed for key in asked]
        else:
            prices = data.draw(st.lists(self.case.costs(), min_size=len(asked), max_size=len(asked)))
            passed = self.native.allow_many(asked, prices)
            assert passed == [self.expect(key, cost).allowed for key, cost in zip(asked, prices, strict=True)]

    @rule(key=keys, data=st.data())
    def refund(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs())
        self.native.refund(key, cost)
        self.oracle.refund(self.rule_of(key), key, cost, self.now_ns)
        self.stay()

    @rule(key=keys)
    def reset(self, key: Any) -> None:
        self.native.reset(key)
        self.oracle.reset(self.rule_of(key), key, self.now_ns)
        self.stay()

    @rule(key=keys, max_delay=st.sampled_from([None, 0]) | st.integers(0, 10**6), data=st.data())
    def reserve(self, key: Any, max_delay: int | None, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs().filter(bool))
        if self.oracle.peek(self.rule_of(key), key, cost, self.now_ns).retry_after_ns >= LONGEST_REFILL_NS:
            return  # Bookings end where the arithmetic does.
        before = self.oracle.states.get(key)
        booking = self.oracle.reserve(
            self.rule_of(key), key, cost, self.now_ns, None if max_delay is None else max_delay * NS
        )
        reservation = self.native.reserve(key, cost, max_delay)
        assert Booking(reservation.allowed, reservation.delay_ns) == booking
        assert reservation.due_ns == self.now_ns + booking.delay_ns
        self.allowed += booking.allowed
        self.denied += not booking.allowed
        self.told_ns = [booking.delay_ns]
        if self.case.slack_ns and booking.allowed and (before is None or before[0] <= self.now_ns):
            self.learn_end(key)
        if data.draw(st.booleans()):
            for _ in range(2):
                reservation.cancel()
            if booking.allowed:
                self.oracle.refund(self.rule_of(key), key, cost, self.now_ns)
                self.stay()

    @rule(key=keys, excess=magnitudes(1, 2**70))
    def ask_for_too_much(self, key: Any, excess: int) -> None:
        most = self.case.rule.most
        for ask in (self.native.hit, self.native.peek, self.native.refund, self.native.reserve):
            with pytest.raises(CostExceedsLimit) as caught:
                ask(key, most + excess)
            assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (most + excess, most, "native")
            with pytest.raises(InvalidCost):
                ask(key, -excess)
        with pytest.raises(CostExceedsLimit):
            self.native.allow_many([key, key], [1, most + excess])
        with pytest.raises(InvalidKey):
            self.native.allow_many([key, 1.5, key])

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.move(data.draw(self.case.times_ns(self.now_ns)))

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.move(2 * self.now_ns - data.draw(self.case.times_ns(self.now_ns)))

    @precondition(lambda self: self.told_ns)
    @rule(data=st.data(), off_ns=st.integers(-1, 1))
    def wait_as_told(self, data: st.DataObject, off_ns: int) -> None:
        self.move(self.now_ns + data.draw(st.sampled_from(self.told_ns)) + off_ns)
        self.told_ns = []

    def move(self, now_ns: int) -> None:
        self.now_ns = min(max(now_ns, self.earliest_ns), LATEST_NS)
        self.latest_ns = max(self.latest_ns, self.now_ns)
        set_ns(self.clock, self.now_ns)

    def stay(self) -> None:
        """Where permits are told by their times, a clock that goes back to before some were given back finds a part."""
        if isinstance(self.case.rule, BucketedWindow | Log):
            self.earliest_ns = self.latest_ns
            self.move(self.latest_ns)

    def check(self, key: Any, cost: int) -> None:
        assert answer_of(self.native.peek(key, cost)) == self.oracle.peek(self.rule_of(key), key, cost, self.now_ns)

    @invariant()
    def all_keys_are_alike(self) -> None:
        if hasattr(self, "native"):
            for key in KEYS:
                self.check(key, 1)


def machine_of(kind: str, store_kind: str) -> Any:
    machine: Any = type(
        f"{kind}{store_kind.title()}", (NativeAndOracle,), {"cases": CASES[kind], "store_kind": store_kind}
    )  # fmt: skip
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
    return machine.TestCase


for kind in CASES:
    for store_kind in ("private", "named"):
        globals()[f"Test{kind}{store_kind.title()}"] = machine_of(kind, store_kind)

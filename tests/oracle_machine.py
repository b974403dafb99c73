"""A state machine that sends a limiter and the oracle the same operations at the same times: all fields must agree."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from bucket_strategies import answer_of, magnitudes
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from limiter_cases import Case, Measure
from oracle import Above, Answer, Booking, Bucket, Oracle, Rule, ToppedUpBucket
from oracle_counts import BucketedWindow, Held, Log
from places import IN_MEMORY, Place, opened
from redis_server import RedisServer

from forebay import CostExceedsLimit, Decision, InvalidCost, InvalidKey

# So few that no expired key's cell is reused: a clock that goes back finds the key again.
KEYS = ("user:1", b"user:1", 7, ("user", 1))

keys = st.sampled_from(KEYS)


def answer_in(measure: Measure, decision: Decision) -> Answer:
    """The decision as the oracle's `Answer`, its times in whole units of `measure`."""
    answer = answer_of(decision)
    units = [divmod(time_ns, measure.unit_ns) for time_ns in (answer.retry_after_ns, answer.reset_after_ns)]
    assert [rest for _, rest in units] == [0, 0]
    return replace(answer, retry_after_ns=units[0][0], reset_after_ns=units[1][0])


class LimiterAndOracle(RuleBasedStateMachine):
    """Times are in units of the place's measure."""

    cases: ClassVar[st.SearchStrategy[Case]]
    place_kind: ClassVar[str]
    server: ClassVar[RedisServer | None] = None

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.case = data.draw(type(self).cases)
        self.measure = self.case.measure
        self.now = self.latest = data.draw(st.just(0) | magnitudes(1, self.measure.latest))
        self.earliest = 0
        self.open(self.now * self.measure.unit_ns)
        self.limiter = self.case.make(self.place.store)
        self.oracle: Oracle[Any] = Oracle()
        self.waits: list[int] = []
        self.numbers = itertools.count()
        self.allowed = self.denied = self.batches = 0
        self.phases = {key: self.phase_of(key) for key in KEYS} if self.case.staggered else {}

    def open(self, start_ns: int) -> None:
        self.opening: AbstractContextManager[Place] = opened(self.place_kind, self.server, start_ns)
        self.place = self.opening.__enter__()

    def teardown(self) -> None:
        if hasattr(self, "place"):
            stats = self.place.store.stats() if self.place_kind in IN_MEMORY and hasattr(self, "phases") else None
            self.opening.__exit__(None, None, None)
            if stats:
                counted = stats.limiters["api"]
                assert (counted.allowed, counted.denied) == (self.allowed, self.denied)
                # A batch finds its keys' cells first; a new key of the batch may then take an expired key's cell.
                assert (counted.evicted, counted.full) == (0, 0)
                assert counted.cas_retries == 0 or self.batches
                if type(self.case.rule) in (Bucket, ToppedUpBucket):
                    states = self.oracle.states.values()
                    assert stats.live_keys == sum(isinstance(state, Above) or state > self.now for state in states)

    def phase_of(self, key: Any) -> int:
        """The phase of the key's windows, from the time that a request has left until its window ends."""
        left = answer_in(self.measure, self.limiter.hit(key)).reset_after_ns
        self.limiter.reset(key)
        self.allowed += 1
        assert 0 < left <= self.case.span
        return (self.now + left) % self.case.span

    def rule_of(self, key: Any, rule: Rule[Any] | None = None) -> Rule[Any]:
        rule = rule or self.case.rule
        return replace(rule, phase_ns=self.phases[key]) if self.case.staggered else rule  # type: ignore[type-var]

    def expect(self, key: Any, cost: int, rule: Rule[Any] | None = None) -> Answer:
        """The oracle's answer to a `hit`, added to the expected counters."""
        answer = self.oracle.hit(self.rule_of(key, rule), key, cost, self.now)
        # A cost of 0 holds no permit, and a concurrency limit doesn't count it.
        self.allowed += answer.allowed and (cost > 0 or not isinstance(self.case.rule, Held))
        self.denied += not answer.allowed
        self.waits = [answer.retry_after_ns, answer.reset_after_ns]
        return answer

    def hit_(self, key: Any, cost: int, **options: Any) -> Answer:
        return answer_in(self.measure, self.limiter.hit(key, cost, **options))

    @rule(key=keys)
    def allow(self, key: Any) -> None:
        allowed = self.limiter.allow(key)
        assert allowed is self.expect(key, 1).allowed

    @rule(key=keys, data=st.data())
    def hit(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs())
        answer = self.hit_(key, cost)
        assert answer == self.expect(key, cost)

    @rule(key=keys, data=st.data())
    def hit_all_that_remains(self, key: Any, data: st.DataObject) -> None:
        remaining = self.limiter.peek(key, 0).remaining
        cost = min(remaining + data.draw(st.integers(0, 1)), self.case.rule.most)
        answer = self.hit_(key, cost)
        assert answer == self.expect(key, cost)

    @precondition(lambda self: self.case.tiers)
    @rule(key=keys, data=st.data())
    def hit_at_another_rate(self, key: Any, data: st.DataObject) -> None:
        options, tier = data.draw(st.sampled_from(self.case.tiers))
        cost = data.draw(replace(self.case, rule=tier).costs())
        answer = answer_in(self.measure, self.limiter.peek(key, cost, **options))
        assert answer == self.oracle.peek(self.rule_of(key, tier), key, cost, self.now)
        answer = self.hit_(key, cost, **options)
        assert answer == self.expect(key, cost, tier)
        if data.draw(st.booleans()):
            self.limiter.refund(key, cost, **options)
            self.oracle.refund(self.rule_of(key, tier), key, cost, self.now)
            self.stay()

    @precondition(lambda self: not isinstance(self.case.rule, Held))
    @rule(key=keys, data=st.data())
    def take_up_to(self, key: Any, data: st.DataObject) -> None:
        options, tier = data.draw(st.sampled_from([({}, self.case.rule), *self.case.tiers]))
        most = data.draw(replace(self.case, rule=tier).costs() | magnitudes(1, 2**70))
        taken = self.limiter.take_up_to(key, most, **options)
        assert taken == self.oracle.take_up_to(self.rule_of(key, tier), key, most, self.now)
        assert type(taken) is int
        self.allowed += taken > 0
        self.denied += taken == 0 < most

    @precondition(lambda self: isinstance(self.case.rule, ToppedUpBucket))
    @rule(key=keys, permits=st.integers(0, 3) | magnitudes(1, 2**48 - 1), data=st.data())
    def add(self, key: Any, permits: int, data: st.DataObject) -> None:
        options, tier = data.draw(st.sampled_from([({}, self.case.rule), *self.case.tiers]))
        state = tier.added(self.oracle.states.get(key, tier.fresh), self.now, permits)
        if state is None:
            with pytest.raises(InvalidCost):
                self.limiter.add(key, permits, **options)
            return
        assert self.limiter.add(key, permits, **options) == tier.remaining(state, self.now)
        if permits:
            self.oracle.states[key] = state
        self.stay()

    @rule(key=keys, data=st.data())
    def peek(self, key: Any, data: st.DataObject) -> None:
        self.check(key, data.draw(self.case.costs()))

    # In memory a request id's mark may take an expired key's cell, which a clock that goes back then doesn't find.
    @precondition(lambda self: self.place_kind not in IN_MEMORY and not isinstance(self.case.rule, Held))
    @rule(key=keys, data=st.data())
    def hit_once(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs().filter(bool))
        request = {"request_id": data.draw(st.sampled_from([str, int, lambda n: b"%d" % n]))(next(self.numbers))}
        answer = self.hit_(key, cost, **request, request_ttl=1e-6)
        repeated = self.hit_(key, cost, **request, request_ttl=1e-6)
        assert answer == self.expect(key, cost)
        if answer.allowed:
            assert repeated == replace(self.oracle.peek(self.rule_of(key), key, 0, self.now), allowed=True)
            if data.draw(st.booleans()):
                for _ in range(2):
                    self.limiter.refund(key, cost, **request)
                self.oracle.refund(self.rule_of(key), key, cost, self.now)
                self.stay()

    @rule(several=st.lists(keys, max_size=40), data=st.data())
    def allow_many(self, several: list[Any], data: st.DataObject) -> None:
        self.batches += 1
        if data.draw(st.booleans()):
            passed = self.limiter.allow_many(several)
            assert passed == [self.expect(key, 1).allowed for key in several]
        else:
            prices = data.draw(st.lists(self.case.costs(), min_size=len(several), max_size=len(several)))
            passed = self.limiter.allow_many(several, prices)
            assert passed == [self.expect(key, cost).allowed for key, cost in zip(several, prices, strict=True)]

    @rule(key=keys, data=st.data())
    def refund(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs() | magnitudes(1, 2**70))
        self.limiter.refund(key, cost)
        self.oracle.refund(self.rule_of(key), key, cost, self.now)
        self.stay()

    @rule(key=keys)
    def reset(self, key: Any) -> None:
        if self.place_kind in IN_MEMORY and isinstance(self.case.rule, Held):
            # Memory can't distinguish permits that end at one instant, so after a reset a cancellation gives back none
            # of
            # them (`test_cancellation_at_the_instant_of_a_reset_gives_back_nothing` in tests/unit).
            if self.now == self.measure.latest:
                return
            self.limiter.reset(key)
            self.oracle.reset(self.rule_of(key), key, self.now)
            self.move(self.now + 1)
            return
        self.limiter.reset(key)
        self.oracle.reset(self.rule_of(key), key, self.now)
        self.stay()

    @rule(key=keys, max_delay=st.sampled_from([None, 0]) | st.integers(0, 10**6), data=st.data())
    def reserve(self, key: Any, max_delay: int | None, data: st.DataObject) -> None:
        options, tier = data.draw(st.sampled_from([({}, self.case.rule), *self.case.tiers]))
        cost = data.draw(replace(self.case, rule=tier).costs().filter(bool))
        rule = self.rule_of(key, tier)
        if self.oracle.peek(rule, key, cost, self.now).retry_after_ns >= self.measure.longest_refill:
            return  # beyond the bounds of the arithmetic
        most = None if max_delay is None else max_delay * self.measure.second
        booking = self.oracle.reserve(rule, key, cost, self.now, most)
        reservation = self.limiter.reserve(key, cost, max_delay, **options)
        assert reservation.allowed is booking.allowed
        assert reservation.delay_ns == booking.delay_ns * self.measure.unit_ns
        if self.place_kind in IN_MEMORY:
            assert reservation.due_ns == self.now + booking.delay_ns
        self.allowed += booking.allowed
        self.denied += not booking.allowed
        self.waits = [booking.delay_ns]
        if data.draw(st.booleans()):
            for _ in range(2):
                reservation.cancel()
            self.cancelled(key, cost, booking, tier)

    def cancelled(self, key: Any, cost: int, booking: Booking, tier: Rule[Any]) -> None:
        if booking.allowed:
            rule = self.rule_of(key, tier)
            if isinstance(rule, Held):
                self.oracle.states[key] = rule.released(self.oracle.states[key], self.now, cost)
            else:
                self.oracle.cancel(rule, key, cost, self.now)
            self.stay()

    @rule(key=keys, excess=magnitudes(1, 2**70))
    def exceed_the_limit(self, key: Any, excess: int) -> None:
        most = self.case.rule.most
        for method in (self.limiter.hit, self.limiter.peek, self.limiter.reserve):
            with pytest.raises(CostExceedsLimit) as caught:
                method(key, most + excess)
            assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (most + excess, most, "api")
            with pytest.raises(InvalidCost):
                method(key, -excess)
        with pytest.raises(CostExceedsLimit):
            self.limiter.allow_many([key, key], [1, most + excess])
        with pytest.raises(InvalidKey):
            self.limiter.allow_many([key, 1.5, key])

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.move(data.draw(self.case.times(self.now)))

    @precondition(lambda self: not isinstance(self.case.rule, Held))  # permits are given back in the order of taking
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.move(2 * self.now - data.draw(self.case.times(self.now)))

    @precondition(lambda self: self.waits)
    @rule(data=st.data(), off=st.integers(-1, 1))
    def wait_until_reported(self, data: st.DataObject, off: int) -> None:
        wait = data.draw(st.sampled_from(self.waits)) + off
        # The clock of held permits doesn't go back, as with `go_back`.
        self.move(self.now + (max(wait, 0) if isinstance(self.case.rule, Held) else wait))
        self.waits = []

    def move(self, now: int) -> None:
        if self.case.back:
            self.earliest = max(self.earliest, self.latest - self.case.back)
        self.now = min(max(now, self.earliest), self.measure.latest)
        self.latest = max(self.latest, self.now)
        self.place.clock.set_ns(self.now * self.measure.unit_ns)

    def stay(self) -> None:
        """Forbid earlier times from here on, if the state has dates: before a refund only part of them counts."""
        if self.measure.forgets or isinstance(self.case.rule, BucketedWindow | Log):
            self.earliest = self.latest
            self.move(self.latest)

    def check(self, key: Any, cost: int) -> None:
        answer = answer_in(self.measure, self.limiter.peek(key, cost))
        assert answer == self.oracle.peek(self.rule_of(key), key, cost, self.now)

    @invariant()
    def all_keys_agree(self) -> None:
        if hasattr(self, "phases"):
            for key in KEYS:
                self.check(key, 1)

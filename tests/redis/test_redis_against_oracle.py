"""Every limiter over Redis and the oracle, told the same things at the same times, answer alike to the last field."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Answer, Booking, Oracle, Rule
from redis_cases import CASES, LATEST_US, LONGEST_REFILL_US, US, Case, Held, magnitudes
from redis_server import RedisServer
from scripts_clock import ServerClock, moved_by_tests

from penstock import CostExceedsLimit, Decision, InvalidCost, InvalidKey
from penstock.redis import AsyncRedisStore, RedisStore

KEYS = ("user:1", b"user:1", 7, ("user", 1))

keys = st.sampled_from(KEYS)


def us(duration_ns: int) -> int:
    whole, rest = divmod(duration_ns, 1000)
    assert rest == 0
    return whole


def answer_of(decision: Decision) -> Answer:
    assert bool(decision) is decision.allowed
    return Answer(
        decision.allowed, decision.limit, decision.remaining, us(decision.retry_after_ns), us(decision.reset_after_ns)
    )


class Awaited:
    """A limiter or a reservation for asyncio, each of whose methods is awaited here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, asked: Any) -> None:
        self._loop, self._asked = loop, asked

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._asked, name)
        return (lambda *args, **kwargs: self._done(method(*args, **kwargs))) if callable(method) else method

    def _done(self, coroutine: Any) -> Any:
        assert inspect.iscoroutine(coroutine)
        answer = self._loop.run_until_complete(coroutine)
        return Awaited(self._loop, answer) if hasattr(answer, "cancel") else answer


class RedisAndOracle(RuleBasedStateMachine):
    cases: ClassVar[st.SearchStrategy[Case]]
    is_async: ClassVar[bool]
    server: ClassVar[RedisServer]

    @initialize(data=st.data(), start_us=magnitudes(0, LATEST_US), plain=st.booleans())
    def begin(self, data: st.DataObject, start_us: int, plain: bool) -> None:
        self.case = data.draw(type(self).cases)
        self.now_us = self.latest_us = start_us
        self.earliest_us = 0
        self.client = self.server.client()
        self.client.flushall()
        self.clock = ServerClock(self.client, start_us)
        if self.is_async:
            self.loop = asyncio.new_event_loop()
            self.store: Any = AsyncRedisStore(self.server.url, timeout=60, plain_keys=plain)
            self.limiter: Any = Awaited(self.loop, self.case.make(self.store))
        else:
            self.store = RedisStore(self.server.url, timeout=60, plain_keys=plain)
            self.limiter = self.case.make(self.store)
        self.oracle: Oracle[Any] = Oracle()
        self.told_us: list[int] = []
        self.phases_us = {key: self.phase_of(key) for key in KEYS} if self.case.staggered else {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            if self.is_async:
                self.loop.run_until_complete(self.store.close())
                self.loop.close()
            else:
                self.store.close()
            self.client.close()

    def phase_of(self, key: Any) -> int:
        """When the key's windows begin: a request tells how far away the end of the current one is."""
        left_us = us(self.limiter.hit(key).reset_after_ns)
        self.limiter.reset(key)
        assert 0 < left_us <= self.case.span_us
        return (self.now_us + left_us) % self.case.span_us

    def rule_of(self, key: Any, rule: Rule[Any] | None = None) -> Rule[Any]:
        rule = rule or self.case.rule
        return replace(rule, phase_ns=self.phases_us[key]) if self.case.staggered else rule  # type: ignore[type-var]

    def expect(self, key: Any, cost: int, rule: Rule[Any] | None = None) -> Answer:
        answer = self.oracle.hit(self.rule_of(key, rule), key, cost, self.now_us)
        self.told_us = [answer.retry_after_ns, answer.reset_after_ns]
        return answer

    @rule(key=keys)
    def allow(self, key: Any) -> None:
        assert self.limiter.allow(key) is self.expect(key, 1).allowed

    @rule(key=keys, data=st.data())
    def hit(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs())
        answer = answer_of(self.limiter.hit(key, cost))
        assert answer == self.expect(key, cost)

    @rule(key=keys, data=st.data())
    def hit_all_that_remains(self, key: Any, data: st.DataObject) -> None:
        remaining = self.limiter.peek(key, 0).remaining
        cost = min(remaining + data.draw(st.integers(0, 1)), self.case.rule.most)
        answer = answer_of(self.limiter.hit(key, cost))
        assert answer == self.expect(key, cost)

    @precondition(lambda self: self.case.tiers)
    @rule(key=keys, data=st.data())
    def ask_at_another_rate(self, key: Any, data: st.DataObject) -> None:
        options, tier = data.draw(st.sampled_from(self.case.tiers))
        cost = data.draw(replace(self.case, rule=tier).costs())
        answer = answer_of(self.limiter.peek(key, cost, **options))
        assert answer == self.oracle.peek(self.rule_of(key, tier), key, cost, self.now_us)
        answer = answer_of(self.limiter.hit(key, cost, **options))
        assert answer == self.expect(key, cost, tier)
        if data.draw(st.booleans()):
            self.limiter.refund(key, cost, **options)
            self.oracle.refund(self.rule_of(key, tier), key, cost, self.now_us)
            self.stay()

    @rule(key=keys, data=st.data())
    def peek(self, key: Any, data: st.DataObject) -> None:
        self.check(key, data.draw(self.case.costs()))

    @precondition(lambda self: not isinstance(self.case.rule, Held))
    @rule(key=keys, data=st.data(), request_id=st.sampled_from(["r", b"r", 1]))
    def hit_once(self, key: Any, data: st.DataObject, request_id: Any) -> None:
        cost = data.draw(self.case.costs().filter(bool))
        answer = answer_of(self.limiter.hit(key, cost, request_id=request_id, request_ttl=1e-6))
        repeated = answer_of(self.limiter.hit(key, cost, request_id=request_id, request_ttl=1e-6))
        assert answer == self.expect(key, cost)
        if answer.allowed:
            assert repeated == replace(self.oracle.peek(self.rule_of(key), key, 0, self.now_us), allowed=True)
            if data.draw(st.booleans()):
                for _ in range(2):
                    self.limiter.refund(key, cost, request_id=request_id)
                self.oracle.refund(self.rule_of(key), key, cost, self.now_us)
                self.stay()
        self.client.delete(*self.client.keys("*:request:*"), "nothing")

    @rule(asked=st.lists(keys, max_size=20), data=st.data())
    def allow_many(self, asked: list[Any], data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            passed = self.limiter.allow_many(asked)
            assert passed == [self.expect(key, 1).allowed for key in asked]
        else:
            prices = data.draw(st.lists(self.case.costs(), min_size=len(asked), max_size=len(asked)))
            passed = self.limiter.allow_many(asked, prices)
            assert passed == [self.expect(key, cost).allowed for key, cost in zip(asked, prices, strict=True)]

    @rule(key=keys, data=st.data())
    def refund(self, key: Any, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs())
        self.limiter.refund(key, cost)
        self.oracle.refund(self.rule_of(key), key, cost, self.now_us)
        self.stay()

    @rule(key=keys)
    def reset(self, key: Any) -> None:
        self.limiter.reset(key)
        self.oracle.reset(self.rule_of(key), key, self.now_us)
        self.stay()

    @rule(key=keys, max_delay=st.sampled_from([None, 0]) | st.integers(0, 10**6), data=st.data())
    def reserve(self, key: Any, max_delay: int | None, data: st.DataObject) -> None:
        cost = data.draw(self.case.costs().filter(bool))
        if self.oracle.peek(self.rule_of(key), key, cost, self.now_us).retry_after_ns >= LONGEST_REFILL_US:
            return  # Bookings end where the arithmetic does.
        booking = self.oracle.reserve(
            self.rule_of(key), key, cost, self.now_us, None if max_delay is None else max_delay * US
        )
        reservation = self.limiter.reserve(key, cost, max_delay)
        assert Booking(reservation.allowed, us(reservation.delay_ns)) == booking
        self.told_us = [booking.delay_ns]
        if data.draw(st.booleans()):
            for _ in range(2):
                reservation.cancel()
            if booking.allowed:
                if isinstance(self.case.rule, Held):
                    self.oracle.states[key] = self.case.rule.released(self.oracle.states[key], self.now_us, cost)
                else:
                    self.oracle.refund(self.rule_of(key), key, cost, self.now_us)
                self.stay()

    @rule(key=keys, excess=magnitudes(1, 2**70))
    def ask_for_too_much(self, key: Any, excess: int) -> None:
        most = self.case.rule.most
        for ask in (self.limiter.hit, self.limiter.peek, self.limiter.refund, self.limiter.reserve):
            with pytest.raises(CostExceedsLimit) as caught:
                ask(key, most + excess)
            assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (most + excess, most, "api")
            with pytest.raises(InvalidCost):
                ask(key, -excess)
        with pytest.raises(CostExceedsLimit):
            self.limiter.allow_many([key, key], [1, most + excess])
        with pytest.raises(InvalidKey):
            self.limiter.allow_many([key, 1.5, key])

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.move(data.draw(self.case.times_us(self.now_us)))

    @precondition(lambda self: not isinstance(self.case.rule, Held))  # which are given back in the order of taking
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.move(2 * self.now_us - data.draw(self.case.times_us(self.now_us)))

    @precondition(lambda self: self.told_us)
    @rule(data=st.data(), off_us=st.integers(-1, 1))
    def wait_as_told(self, data: st.DataObject, off_us: int) -> None:
        self.move(self.now_us + data.draw(st.sampled_from(self.told_us)) + off_us)
        self.told_us = []

    def move(self, now_us: int) -> None:
        self.now_us = min(max(now_us, self.earliest_us), LATEST_US)
        self.latest_us = max(self.latest_us, self.now_us)
        self.clock.set_us(self.now_us)

    def stay(self) -> None:
        """What is as good as never seen is gone: a clock that goes back to before that finds nothing."""
        self.earliest_us = self.latest_us
        self.move(self.latest_us)

    def check(self, key: Any, cost: int) -> None:
        assert answer_of(self.limiter.peek(key, cost)) == self.oracle.peek(self.rule_of(key), key, cost, self.now_us)

    @invariant()
    def all_keys_are_alike(self) -> None:
        if hasattr(self, "limiter"):
            for key in KEYS:
                self.check(key, 1)


@pytest.fixture(autouse=True)
def served(shared_server: RedisServer) -> Iterator[None]:
    RedisAndOracle.server = shared_server
    with moved_by_tests():
        yield


def machine_of(kind: str, is_async: bool) -> Any:
    machine: Any = type(kind, (RedisAndOracle,), {"cases": CASES[kind], "is_async": is_async})
    machine.TestCase.settings = settings(max_examples=15 if is_async else 60, stateful_step_count=30)
    return machine.TestCase


for kind in CASES:
    globals()[f"Test{kind}"] = machine_of(kind, is_async=False)
    globals()[f"Test{kind}Async"] = machine_of(kind, is_async=True)

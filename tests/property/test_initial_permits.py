"""A bucket whose keys start with fewer permits than its burst, against the oracle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from bucket_strategies import answer_of, buckets, magnitudes
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from limiter_cases import MEMORY
from oracle import InitialBucket, Oracle
from oracle_machine import KEYS, keys
from places import Place, opened

from forebay import Rate, TokenBucket


class InitialPermits(RuleBasedStateMachine):
    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        bucket = data.draw(buckets(MEMORY.most_burst, MEMORY.longest_refill // 2))
        initial = data.draw(st.integers(1, min(5, bucket.burst)) | magnitudes(1, bucket.burst))
        self.rule = InitialBucket(bucket.limit, bucket.period_ns, bucket.burst, initial)
        self.now = data.draw(st.just(0) | magnitudes(1, MEMORY.latest // 2))
        self.opening: AbstractContextManager[Place] = opened("private", None, self.now)
        self.place = self.opening.__enter__()
        rate = Rate.per_ns(bucket.limit, bucket.period_ns)
        self.limiter: Any = TokenBucket(self.place.store, "api", rate, bucket.burst, initial=initial)
        self.oracle: Oracle[int] = Oracle()

    def teardown(self) -> None:
        if hasattr(self, "opening"):
            self.opening.__exit__(None, None, None)

    def cost(self, data: st.DataObject, least: int = 0) -> int:
        initial = self.rule.initial
        return data.draw(st.integers(least, min(initial, 3)) | magnitudes(1, initial) | st.just(initial))

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """To any time, and to the moments at which a bucket is full or forgotten, or one ns beside them."""
        bucket = self.rule
        edges = [0, *(at for tat in self.oracle.states.values() for at in (tat, tat + bucket.missing_ns))]
        moves = st.sampled_from([0, bucket.unit_ns, bucket.missing_ns]) | magnitudes(1, 2 * bucket.tolerance_ns)
        near = st.builds(lambda at, off: at + off, st.sampled_from(edges), st.integers(-1, 1))
        now = data.draw(moves.map(lambda move: self.now + move) | near)
        self.now = min(max(now, 0), MEMORY.latest)
        self.place.clock.set_ns(self.now)

    @rule(key=keys, data=st.data())
    def hit(self, key: Any, data: st.DataObject) -> None:
        cost = self.cost(data)
        expected = self.oracle.peek(self.rule, key, cost, self.now)
        assert answer_of(self.limiter.peek(key, cost)) == expected
        assert answer_of(self.limiter.hit(key, cost)) == self.oracle.hit(self.rule, key, cost, self.now)
        if not expected.allowed:
            # Allowed then, and however much later.
            for wait_ns in (expected.retry_after_ns, expected.retry_after_ns + 3 * self.rule.missing_ns):
                if self.now + wait_ns <= MEMORY.latest:
                    self.place.clock.set_ns(self.now + wait_ns)
                    assert self.limiter.peek(key, cost)
            self.place.clock.set_ns(self.now)

    @rule(several=st.lists(keys, max_size=20))
    def allow(self, several: list[Any]) -> None:
        expected = [self.oracle.hit(self.rule, key, 1, self.now).allowed for key in several]
        if len(several) % 2:
            assert [self.limiter.allow(key) for key in several] == expected
        else:
            assert self.limiter.allow_many(several) == expected

    @rule(key=keys, most=magnitudes(1, 2**70))
    def take_up_to(self, key: Any, most: int) -> None:
        assert self.limiter.take_up_to(key, most) == self.oracle.take_up_to(self.rule, key, most, self.now)

    @rule(key=keys, most=magnitudes(1, 2**70))
    def refund(self, key: Any, most: int) -> None:
        self.limiter.refund(key, most)
        self.oracle.refund(self.rule, key, most, self.now)

    @rule(key=keys)
    def reset(self, key: Any) -> None:
        self.limiter.reset(key)
        self.oracle.reset(self.rule, key, self.now)

    @rule(key=keys, max_delay=st.sampled_from([None, 0]) | st.integers(0, 10**6), data=st.data())
    def reserve(self, key: Any, max_delay: int | None, data: st.DataObject) -> None:
        cost = self.cost(data, least=1)
        if self.oracle.peek(self.rule, key, cost, self.now).retry_after_ns >= MEMORY.longest_refill:
            return
        most_ns = None if max_delay is None else max_delay * 10**9
        booking = self.oracle.reserve(self.rule, key, cost, self.now, most_ns)
        reservation = self.limiter.reserve(key, cost, max_delay)
        assert (reservation.allowed, reservation.delay_ns) == (booking.allowed, booking.delay_ns)
        if data.draw(st.booleans()):
            reservation.cancel()
            if booking.allowed:
                self.oracle.refund(self.rule, key, cost, self.now)

    @rule()
    def nothing_is_beyond_the_burst(self) -> None:
        for key in KEYS:
            assert self.limiter.peek(key).remaining <= self.rule.burst


TestInitialPermits = InitialPermits.TestCase
TestInitialPermits.settings = examples(200)

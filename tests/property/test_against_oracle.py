"""The native token bucket and the oracle, told the same things at the same times, answer alike to the last field."""

from __future__ import annotations

import pytest
from bucket_strategies import LATEST_NS, answer_of, buckets, costs, magnitudes, rate_of, set_ns, spans_ns
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Bucket, TokenBucketOracle

from penstock import CostExceedsLimit, InvalidCost, InvalidKey, Store, TokenBucket
from penstock.testing import ManualClock

# Few enough never to fill one line of the table: an expired key's cell is not reused, so that a clock that goes back
# finds it again. What reuse does is for test_small_stores.py.
KEYS = ("user:1", "user:2", b"user:1", 7, ("user", 1))

keys = st.sampled_from(KEYS)


class NativeAndOracle(RuleBasedStateMachine):
    @initialize(own=buckets(), tier=buckets(), start_ns=st.just(0) | magnitudes(1, LATEST_NS))
    def begin(self, own: Bucket, tier: Bucket, start_ns: int) -> None:
        self.own, self.tier = own, tier
        self.now_ns = start_ns
        self.clock = ManualClock()
        set_ns(self.clock, start_ns)
        self.store = Store.private(keys=1, clock=self.clock)
        self.native = TokenBucket(self.store, "native", rate_of(own), burst=own.burst)
        self.oracle = TokenBucketOracle()
        self.waited_for: tuple[Bucket, object, int, int] | None = None
        self.allowed = self.denied = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats()
            self.store.close()
            counted = stats.limiters["native"]
            assert (counted.allowed, counted.denied) == (self.allowed, self.denied)
            assert (counted.evicted, counted.full, counted.cas_retries) == (0, 0, 0)
            assert stats.live_keys == len(self.oracle.live_keys(self.now_ns))

    def expect(self, bucket: Bucket, key: object, cost: int) -> bool:
        """What the oracle says to a `hit`, counted."""
        answer = self.oracle.hit(bucket, key, cost, self.now_ns)
        self.count(answer.allowed)
        if not answer.allowed:
            self.waited_for = (bucket, key, cost, answer.retry_after_ns)
        return answer.allowed

    def count(self, allowed: bool) -> None:
        self.allowed += allowed
        self.denied += not allowed

    @rule(key=keys)
    def allow(self, key: object) -> None:
        assert self.native.allow(key) is self.expect(self.own, key, 1)

    @rule(key=keys, data=st.data())
    def hit(self, key: object, data: st.DataObject) -> None:
        cost = data.draw(costs(self.own))
        answer = self.oracle.hit(self.own, key, cost, self.now_ns)
        self.count(answer.allowed)
        if not answer.allowed:
            self.waited_for = (self.own, key, cost, answer.retry_after_ns)
        assert answer_of(self.native.hit(key, cost)) == answer

    @rule(key=keys, data=st.data())
    def hit_at_another_rate(self, key: object, data: st.DataObject) -> None:
        cost = data.draw(costs(self.tier))
        answer = self.oracle.hit(self.tier, key, cost, self.now_ns)
        self.count(answer.allowed)
        if not answer.allowed:
            self.waited_for = (self.tier, key, cost, answer.retry_after_ns)
        assert answer_of(self.native.hit(key, cost, rate=rate_of(self.tier), burst=self.tier.burst)) == answer

    @rule(key=keys, data=st.data())
    def peek(self, key: object, data: st.DataObject) -> None:
        cost = data.draw(costs(self.own))
        assert answer_of(self.native.peek(key, cost)) == self.oracle.peek(self.own, key, cost, self.now_ns)
        cost = data.draw(costs(self.tier))
        native = self.native.peek(key, cost, rate=rate_of(self.tier), burst=self.tier.burst)
        assert answer_of(native) == self.oracle.peek(self.tier, key, cost, self.now_ns)

    @rule(asked=st.lists(keys, max_size=40), data=st.data())
    def allow_many(self, asked: list[object], data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            assert self.native.allow_many(asked) == [self.expect(self.own, key, 1) for key in asked]
        else:
            prices = data.draw(st.lists(costs(self.own), min_size=len(asked), max_size=len(asked)))
            answers = self.native.allow_many(asked, prices)
            assert answers == [self.expect(self.own, key, cost) for key, cost in zip(asked, prices, strict=True)]

    @rule(key=keys, data=st.data())
    def refund(self, key: object, data: st.DataObject) -> None:
        cost = data.draw(costs(self.own))
        self.native.refund(key, cost)
        self.oracle.refund(self.own, key, cost, self.now_ns)

    @rule(key=keys, data=st.data())
    def refund_at_another_rate(self, key: object, data: st.DataObject) -> None:
        cost = data.draw(costs(self.tier))
        self.native.refund(key, cost, rate=rate_of(self.tier), burst=self.tier.burst)
        self.oracle.refund(self.tier, key, cost, self.now_ns)

    @rule(key=keys)
    def reset(self, key: object) -> None:
        self.native.reset(key)
        self.oracle.reset(self.own, key, self.now_ns)

    @rule(key=keys, excess=magnitudes(1, 2**70))
    def ask_for_too_much(self, key: object, excess: int) -> None:
        for ask in (self.native.hit, self.native.peek, self.native.refund):
            with pytest.raises(CostExceedsLimit):
                ask(key, self.own.burst + excess)
            with pytest.raises(InvalidCost):
                ask(key, -excess)
        with pytest.raises(CostExceedsLimit):
            self.native.allow_many([key, key], [1, self.own.burst + excess])

    @rule(key=keys)
    def ask_for_a_wrong_key(self, key: object) -> None:
        with pytest.raises(InvalidKey):
            self.native.allow_many([key, 1.5, key])

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.move(self.now_ns + data.draw(spans_ns(self.own) | spans_ns(self.tier)))

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.move(self.now_ns - data.draw(spans_ns(self.own) | spans_ns(self.tier)))

    @precondition(lambda self: self.waited_for is not None)
    @rule(early_ns=st.integers(0, 1))
    def wait_as_told(self, early_ns: int) -> None:
        assert self.waited_for is not None
        bucket, key, cost, wait_ns = self.waited_for
        self.waited_for = None
        self.move(self.now_ns + wait_ns - early_ns)
        native = self.native.peek(key, cost, rate=rate_of(bucket), burst=bucket.burst)
        assert answer_of(native) == self.oracle.peek(bucket, key, cost, self.now_ns)

    def move(self, now_ns: int) -> None:
        self.now_ns = min(max(now_ns, 0), LATEST_NS)
        set_ns(self.clock, self.now_ns)

    @invariant()
    def all_keys_are_alike(self) -> None:
        if hasattr(self, "store"):
            for key in KEYS:
                assert answer_of(self.native.peek(key)) == self.oracle.peek(self.own, key, 1, self.now_ns)


TestNativeAndOracle = NativeAndOracle.TestCase
TestNativeAndOracle.settings = settings(max_examples=200, stateful_step_count=30)

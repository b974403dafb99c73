"""A store so small that cells are reused and new keys find no room, against the oracle.

The smallest table has 1024 cells; a few thousand keys overfill it. The clock only goes forward, as the host's does.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from bucket_strategies import answer_of, costs, rate_of, set_ns, spans_ns
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from oracle import Answer, Bucket, TokenBucketOracle

from forebay import LimiterStats, Store, TokenBucket
from forebay.testing import ManualClock

CELLS = 1024
REGULARS = ["regular:1", "regular:2", "regular:3"]


COUNTS = ("allowed", "denied", "inserted", "evicted", "full", "cas_retries")


class SmallStore(RuleBasedStateMachine):
    """The rules of every `on_full`. `audit` compares every key that was ever allowed."""

    on_full: Any

    @initialize(burst=st.integers(1, 5), period_ns=st.sampled_from([3, 10**9, 3600 * 10**9]))
    def begin(self, burst: int, period_ns: int) -> None:
        self.bucket = Bucket(3, period_ns, burst)
        self.now_ns = 10**12
        self.clock = ManualClock()
        set_ns(self.clock, self.now_ns)
        self.store = Store.private(keys=1, on_full=self.on_full, clock=self.clock)
        self.native = TokenBucket(self.store, "small", rate_of(self.bucket), burst=burst)
        self.oracle = TokenBucketOracle()
        self.newcomers = 0
        self.before = LimiterStats()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.audit()
            self.store.close()

    def since(self) -> LimiterStats:
        """The counters' growth since the last call."""
        now = self.store.stats().limiters["small"]
        delta = LimiterStats(*(getattr(now, name) - getattr(self.before, name) for name in COUNTS))
        self.before = now
        return delta

    def audit(self) -> set[Any]:
        """The live keys that the table has lost; the oracle then forgets them, too. It must agree on all others."""
        forgotten = set()
        for key in self.oracle.live_keys(self.now_ns):
            ahead_ns = self.native.peek(key).reset_after_ns
            if ahead_ns == 0:
                forgotten.add(key)
            else:
                assert ahead_ns == self.oracle.tat_ns[key] - self.now_ns
        for key in forgotten:
            self.oracle.reset(self.bucket, key, self.now_ns)
        assert self.store.stats().live_keys == len(self.oracle.live_keys(self.now_ns)) <= CELLS
        return forgotten

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.now_ns += data.draw(spans_ns(self.bucket))
        set_ns(self.clock, self.now_ns)

    @rule(count=st.integers(1, 900), data=st.data())
    def newcomers_come(self, count: int, data: st.DataObject) -> None:
        """Fresh keys, in one batch or one by one, all with the same cost."""
        cost = data.draw(costs(self.bucket).filter(bool))
        names = range(self.newcomers, self.newcomers + count)
        self.newcomers += count
        if data.draw(st.booleans()):
            passed = self.native.allow_many(names, [cost] * count)
        else:
            passed = [bool(self.native.hit(name, cost)) for name in names]
        counts = self.since()
        assert (counts.allowed, counts.denied) == (sum(passed), count - sum(passed))
        assert counts.inserted + counts.full == count
        for name, allowed in zip(names, passed, strict=True):
            if allowed:
                assert self.oracle.hit(self.bucket, name, cost, self.now_ns).allowed
        self.check_crowd(count, passed, counts)

    @abstractmethod
    def check_crowd(self, count: int, passed: list[bool], counts: LimiterStats) -> None:
        """Checks the decisions and counters of a crowd of new keys."""

    @rule(data=st.data())
    def known_key_hits(self, data: st.DataObject) -> None:
        known: st.SearchStrategy[Any] = st.sampled_from(REGULARS)
        if self.newcomers:
            known |= st.integers(0, self.newcomers - 1)
        key = data.draw(known)
        cost = data.draw(costs(self.bucket))
        expected = self.oracle.peek(self.bucket, key, cost, self.now_ns)
        decision = self.native.hit(key, cost)
        counts = self.since()
        if counts.full:
            self.check_no_room(key, cost, answer_of(decision))
            return
        assert answer_of(decision) == self.oracle.hit(self.bucket, key, cost, self.now_ns)
        assert decision.allowed is expected.allowed
        if counts.evicted:
            assert counts.evicted == 1
            assert len(self.audit()) == 1

    @abstractmethod
    def check_no_room(self, key: Any, cost: int, answer: Answer) -> None:
        """Checks the decision for a new key without room."""


class Denying(SmallStore):
    on_full = "deny"

    def check_crowd(self, count: int, passed: list[bool], counts: LimiterStats) -> None:
        assert counts.evicted == 0
        assert counts.denied == counts.full
        assert self.audit() == set()

    def check_no_room(self, key: Any, cost: int, answer: Answer) -> None:
        # A key with a cell is never denied for lack of room, and `reset_after` says when a cell is free.
        assert self.oracle.peek(self.bucket, key, 0, self.now_ns).reset_after_ns == 0
        assert not answer.allowed
        assert answer.remaining == 0
        assert 0 < answer.retry_after_ns == answer.reset_after_ns <= self.bucket.tolerance_ns
        set_ns(self.clock, self.now_ns + answer.retry_after_ns - 1)
        assert not self.native.hit(key, cost)
        self.now_ns += answer.retry_after_ns
        set_ns(self.clock, self.now_ns)
        assert answer_of(self.native.hit(key, cost)) == self.oracle.hit(self.bucket, key, cost, self.now_ns)
        self.since()
        assert self.audit() == set()


class Allowing(SmallStore):
    on_full = "allow"

    def check_crowd(self, count: int, passed: list[bool], counts: LimiterStats) -> None:
        assert all(passed)
        assert counts.evicted == 0
        # Each key let in uncharged is counted.
        assert len(self.audit()) == counts.full

    def check_no_room(self, key: Any, cost: int, answer: Answer) -> None:
        fresh = TokenBucketOracle().hit(self.bucket, key, cost, self.now_ns)
        assert answer == fresh
        assert self.native.peek(key, 0).reset_after_ns == 0


class Evicting(SmallStore):
    on_full = "evict"

    def check_crowd(self, count: int, passed: list[bool], counts: LimiterStats) -> None:
        assert all(passed)
        assert counts.full == 0
        assert len(self.audit()) == counts.evicted

    def check_no_room(self, key: Any, cost: int, answer: Answer) -> None:
        raise AssertionError("evicting always makes room")


FEW = examples(12, steps=20)
TestDenying = Denying.TestCase
TestDenying.settings = FEW
TestAllowing = Allowing.TestCase
TestAllowing.settings = FEW
TestEvicting = Evicting.TestCase
TestEvicting.settings = FEW

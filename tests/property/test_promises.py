"""What the fields of a decision promise, of every limiter, stated without saying how they are reached."""

from __future__ import annotations

from typing import Any

import pytest
from bucket_strategies import LATEST_NS, MS_NS, NS, answer_of, set_ns
from hypothesis import given, settings
from hypothesis import strategies as st
from limiter_cases import CASES, Case, sliding_windows

from penstock import Store
from penstock.testing import ManualClock

START_NS = 1000 * NS
# With the largest limits a sliding window is not exact, but what it says of itself is.
ALL = CASES | {"SlidingWindowOfLargeLimits": sliding_windows(exact=False)}
every_limiter = pytest.mark.parametrize("kind", ALL)


@every_limiter
@given(data=st.data())
@settings(max_examples=60)
def test_what_a_decision_says_comes_true(kind: str, data: st.DataObject) -> None:
    case = data.draw(ALL[kind])
    now_ns, clock = START_NS, ManualClock()
    set_ns(clock, now_ns)
    with Store.private(keys=1, clock=clock) as store:
        limiter = case.make(store)
        for _ in range(data.draw(st.integers(1, 12))):
            now_ns = data.draw(st.just(now_ns) | case.times_ns(now_ns))
            if now_ns > LATEST_NS // 2:
                break
            set_ns(clock, now_ns)
            cost = data.draw(case.costs() | st.just(limiter.peek("k").remaining))
            decision = limiter.hit("k", cost)
            check_remaining(limiter, case)
            now_ns = check_waits(limiter, case, clock, now_ns, cost, decision)


def check_remaining(limiter: Any, case: Case) -> None:
    remaining = limiter.peek("k", 0).remaining
    if remaining:
        assert limiter.peek("k", remaining)
    if remaining < case.rule.most:
        assert not limiter.peek("k", remaining + 1)


def check_waits(limiter: Any, case: Case, clock: ManualClock, now_ns: int, cost: int, decision: Any) -> int:
    """Ask again before, at and after the times that were told; nothing is charged. The time then."""
    most = case.rule.most
    assert (decision.retry_after_ns == 0) is decision.allowed
    allowed_at_ns = now_ns + decision.retry_after_ns
    fresh_at_ns = now_ns + decision.reset_after_ns
    checks: set[int] = {now_ns, fresh_at_ns}
    if not decision:
        checks |= {allowed_at_ns - 1, allowed_at_ns, max(now_ns, allowed_at_ns - MS_NS)}
    if decision.reset_after_ns:
        checks.add(fresh_at_ns - 1)
    for time_ns in sorted(checks):
        set_ns(clock, time_ns)
        if not decision:
            assert limiter.peek("k", cost).allowed is (time_ns >= allowed_at_ns)
        assert (limiter.peek("k").reset_after_ns == 0) is (time_ns >= fresh_at_ns)
        if time_ns == fresh_at_ns:
            assert answer_of(limiter.peek("k", most)) == answer_of(limiter.peek("never seen", most))
    return max(checks)


@every_limiter
@given(data=st.data())
@settings(max_examples=60)
def test_sleeping_for_the_seconds_told_is_enough(kind: str, data: st.DataObject) -> None:
    """What a caller does: ``time.sleep(decision.retry_after)``, a float."""
    case = data.draw(ALL[kind])
    clock = ManualClock()
    set_ns(clock, START_NS)
    with Store.private(keys=1, clock=clock) as store:
        limiter = case.make(store)
        limiter.hit("k", case.rule.most)
        cost = data.draw(case.costs())
        clock.advance(limiter.peek("k", cost).retry_after)
        assert limiter.hit("k", cost)
        clock.advance(limiter.peek("k", cost).reset_after)
        assert answer_of(limiter.peek("k", cost)) == answer_of(limiter.peek("never seen", cost))


@every_limiter
@given(data=st.data())
@settings(max_examples=60)
def test_no_more_than_the_limit_at_one_instant(kind: str, data: st.DataObject) -> None:
    case = data.draw(ALL[kind])
    clock = ManualClock()
    set_ns(clock, data.draw(case.times_ns(START_NS)))
    with Store.private(keys=1, clock=clock) as store:
        limiter = case.make(store)
        asked = data.draw(st.lists(case.costs(), max_size=60))
        passed = sum(cost for cost in asked if limiter.hit("k", cost))
        # Whatever is left over, taken as told until nothing is.
        while left := limiter.peek("k", 0).remaining:
            assert limiter.hit("k", left)
            passed += left
        assert not limiter.allow("k")
        assert passed <= case.rule.most


@pytest.mark.parametrize("kind", [kind for kind in ALL if "Bucket" not in kind or "Window" in kind])
@given(data=st.data())
@settings(max_examples=40)
def test_single_requests_use_up_the_limit_exactly(kind: str, data: st.DataObject) -> None:
    case = data.draw(ALL[kind].filter(lambda case: case.rule.most <= 1000))
    clock = ManualClock()
    set_ns(clock, data.draw(case.times_ns(START_NS)))
    with Store.private(keys=1, clock=clock) as store:
        limiter = case.make(store)
        most = case.rule.most
        passed = limiter.allow_many(["k"] * (most + 2)) if data.draw(st.booleans()) else [
            limiter.allow("k") for _ in range(most + 2)
        ]  # fmt: skip
        assert passed == [True] * most + [False] * 2


@every_limiter
@given(data=st.data())
@settings(max_examples=60)
def test_after_the_next_permits_time_there_is_more(kind: str, data: st.DataObject) -> None:
    case = data.draw(ALL[kind])
    now_ns, clock = START_NS, ManualClock()
    set_ns(clock, now_ns)
    with Store.private(keys=1, clock=clock) as store:
        limiter = case.make(store)
        for _ in range(data.draw(st.integers(1, 8))):
            decision = limiter.hit("k", data.draw(case.costs()))
            if not decision:
                assert decision.next_after_ns == decision.retry_after_ns
            elif decision.remaining == decision.limit:
                assert decision.next_after_ns == 0
            else:
                now_ns += decision.next_after_ns
                set_ns(clock, now_ns)
                assert limiter.peek("k", decision.remaining + 1)
            assert decision.next_after_ns <= max(decision.reset_after_ns, decision.retry_after_ns)
            assert decision.next_after >= decision.next_after_ns / 1e9
            now_ns = data.draw(st.just(now_ns) | case.times_ns(now_ns))
            if now_ns > LATEST_NS // 2:
                break
            set_ns(clock, now_ns)

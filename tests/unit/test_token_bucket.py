"""Token buckets in memory, by example. tests/behaviour has the properties that hold at every place."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest

from forebay import (
    CostExceedsLimit,
    Decision,
    ForebayError,
    InvalidLimiter,
    Rate,
    Store,
    TokenBucket,
)
from forebay.testing import ManualClock

NS = 1_000_000_000
YEAR_NS = 31_536_000 * NS
# Each is just above a power of two, where rounding to a float and dividing lose most.
LONG_WAITS_NS = [40136425139902212, 147448985727592976, 293144738239445152, 652929165811704640, 1405255331116018304]
MOST = 2**61 - 1  # the largest burst at the fastest rate
HUGE = 10**5000  # more digits than Python converts to text by default


@pytest.fixture
def bucket(store: Store) -> TokenBucket:
    return TokenBucket(store, "api", "10/second", burst=20)


def fields(decision: Decision) -> tuple[bool, int, int, int, int]:
    return (
        decision.allowed, decision.limit, decision.remaining, decision.retry_after_ns, decision.reset_after_ns
    )  # fmt: skip


def test_bucket_refills_a_billion_per_second(store: Store, clock: ManualClock) -> None:
    limiter = TokenBucket(store, "api", "1000000000/second")
    assert fields(limiter.hit("k", 10**9)) == (True, 10**9, 0, 0, NS)
    assert not limiter.allow("k")
    clock.advance(1e-9)
    assert limiter.allow("k")
    assert not limiter.allow("k")
    clock.advance(1)
    assert limiter.peek("k").remaining == 10**9


def test_bucket_of_one_per_nanosecond_has_no_burst(store: Store, clock: ManualClock) -> None:
    limiter = TokenBucket(store, "api", Rate(1, 1e-9))
    assert [limiter.allow("k"), limiter.allow("k")] == [True, False]
    clock.advance(1e-9)
    assert [limiter.allow("k"), limiter.allow("k")] == [True, False]


def test_longest_burst_takes_73_years_to_refill(store: Store) -> None:
    limiter = TokenBucket(store, "api", "1/year", burst=73)
    assert limiter.hit("k", 73)
    assert limiter.hit("k", 73).retry_after_ns == 73 * YEAR_NS
    with pytest.raises(InvalidLimiter, match=r"'long'.*73 years.*burst of 74 at 1 per year"):
        TokenBucket(store, "long", "1/year", burst=74)


@pytest.mark.parametrize("now", [2e9, 3e9, 4e9 - 1])
def test_longest_burst_is_kept_at_every_time_of_a_clock(now: float) -> None:
    clock = ManualClock()
    with Store.private(keys=1, clock=clock) as store:
        with suppress(ValueError):
            clock.set(now)
        with suppress(ValueError):
            clock.advance(now)
        limiter = TokenBucket(store, "api", "1/year", burst=73)
        assert [limiter.allow("k") for _ in range(75)] == [True] * 73 + [False] * 2


@pytest.mark.parametrize(
    "burst",
    [2**61, 2**62, 2**63, 2**64, 2**64 + 1, HUGE, -HUGE],
    ids=lambda burst: f"{burst:.3g}" if abs(burst) < 2**65 else "huge",
)
def test_burst_beyond_the_arithmetic_is_refused(store: Store, burst: int) -> None:
    with pytest.raises(InvalidLimiter):
        TokenBucket(store, "api", "1000000000/second", burst=burst)


def test_largest_burst_is_accepted(store: Store) -> None:
    limiter = TokenBucket(store, "api", "1000000000/second", burst=MOST)
    assert fields(limiter.hit("k", MOST)) == (True, MOST, 0, 0, MOST)
    assert fields(limiter.hit("k", MOST)) == (False, MOST, 0, MOST, MOST)


def test_cost_exceeds_limit_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(CostExceedsLimit(3, 2, "api")))
    assert (error.cost, error.limit, error.limiter) == (3, 2, "api")


def test_only_limiters_make_decisions(bucket: TokenBucket) -> None:
    with pytest.raises(TypeError, match=r"limiter\.hit"):
        Decision()
    with pytest.raises(TypeError):
        type("Mine", (Decision,), {})
    for twin in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            twin(bucket.hit("k"))


def test_decision_without_a_limiter_does_no_harm(in_child: Any) -> None:
    def look() -> str:
        try:
            decision = Decision.__new__(Decision)
        except TypeError:
            return "refused"
        return repr((decision, fields(decision)))

    assert in_child(look)


def test_uninitialised_limiter_does_no_harm(in_child: Any) -> None:
    def use() -> bool:
        with Store.private(keys=1) as store:
            try:
                limiter = TokenBucket.__new__(TokenBucket, store, "api")
            except TypeError:
                return True
            for method in (limiter.hit, limiter.peek, limiter.refund):
                for cost in (0, 1):
                    try:
                        method("k", cost)
                    except (ForebayError, TypeError):
                        continue
            limiter.allow("k")
            limiter.allow_many(["k"])
            return True

    assert in_child(use)


def test_seconds_of_a_decision_are_never_too_few(store: Store) -> None:
    """A caller that sleeps for the seconds must not come early; beyond 104 days a float has no nanoseconds."""
    limiter = TokenBucket(store, "api", Rate(1, 1e-9), burst=MOST)
    for wait_ns in [1, 3, 10**9 + 1, 2**50 - 1, 2**50, 2**53 + 1, *LONG_WAITS_NS, MOST]:
        limiter.reset("k")
        decision = limiter.hit("k", wait_ns)
        assert decision.reset_after_ns == wait_ns
        exact = Fraction(decision.reset_after) * NS
        assert round(exact) == wait_ns if wait_ns < 2**50 else exact >= wait_ns
    assert limiter.hit("k", MOST).retry_after == decision.reset_after

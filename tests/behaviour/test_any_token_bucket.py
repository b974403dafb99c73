"""Token buckets, by example: costs, decisions, tiers, keys."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from operator import index
from typing import Any

import pytest
from places import EXACT, STRICT, Clock

from forebay import (
    CostExceedsLimit,
    Decision,
    ForebayError,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    Rate,
    TokenBucket,
)
from forebay.redis import SyncedStore

pytestmark = pytest.mark.places(*EXACT)

NS = 1_000_000_000
YEAR_NS = 31_536_000 * NS
HUGE = 10**5000  # more digits than Python converts to text by default


class Whole:
    """An integer of another type, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.fixture
def bucket(store: Any) -> TokenBucket:
    return TokenBucket(store, "api", "10/second", burst=20)


def fields(decision: Decision) -> tuple[bool, int, int, int, int]:
    return (
        decision.allowed, decision.limit, decision.remaining, decision.retry_after_ns, decision.reset_after_ns
    )  # fmt: skip


# Rates and bursts


def test_default_burst_is_the_rates_limit(store: Any) -> None:
    limiter = TokenBucket(store, "api", "3/minute")
    assert limiter.burst == 3
    assert limiter.rate == Rate(3, 60)
    assert limiter.name == "api"
    assert limiter.store is (store.host_store if isinstance(store, SyncedStore) else store)
    assert [limiter.allow("k") for _ in range(5)] == [True, True, True, False, False]


def test_bucket_refills_one_per_year(store: Any, clock: Clock) -> None:
    limiter = TokenBucket(store, "api", "1/year")
    assert fields(limiter.hit("k")) == (True, 1, 0, 0, YEAR_NS)
    assert fields(limiter.hit("k")) == (False, 1, 0, YEAR_NS, YEAR_NS)
    clock.advance(31_536_000 - 1)
    assert fields(limiter.hit("k")) == (False, 1, 0, NS, NS)
    clock.advance(1)
    assert limiter.allow("k")


@pytest.mark.parametrize("burst", [0, -1, True, False, 1.0, 1.5, float("nan"), float("inf"), "3", b"3", (3,), Whole(3)])
def test_invalid_bursts_are_refused(store: Any, burst: Any) -> None:
    with pytest.raises(InvalidLimiter, match=r"'api'.*at least 1"):
        TokenBucket(store, "api", "1/second", burst=burst)


# Costs


@pytest.mark.parametrize("cost", [2, Whole(2)])
@pytest.mark.parametrize("method", ["hit", "peek"])
def test_cost_may_be_an_integer_of_any_type(bucket: TokenBucket, method: str, cost: Any) -> None:
    assert getattr(bucket, method)("k", cost).remaining == {"hit": 18, "peek": 20}[method]


def test_cost_of_0_is_allowed_and_charges_nothing(bucket: TokenBucket) -> None:
    assert fields(bucket.hit("k", 0)) == (True, 20, 20, 0, 0)
    bucket.hit("k", 20)
    assert fields(bucket.hit("k", 0)) == (True, 20, 0, 0, 2 * NS)
    assert fields(bucket.peek("k", 0)) == (True, 20, 0, 0, 2 * NS)
    assert bucket.allow_many(["k", "k"], [0, 1]) == [True, False]
    bucket.refund("k", 0)
    assert bucket.peek("k", 0).reset_after_ns == 2 * NS


def test_cost_of_0_is_denied_in_debt(bucket: TokenBucket, clock: Clock) -> None:
    bucket.hit("k", 20)
    clock.set(clock.now() - 0.5)
    assert fields(bucket.hit("k", 0)) == (False, 20, 0, NS // 2, 5 * NS // 2)
    assert bucket.allow_many(["k"], [0]) == [False]


@pytest.mark.parametrize(
    "cost",
    [
        -1, -(2**63), -(2**63) - 1, -(2**70), -HUGE, True, False, 1.0, 0.5, float("nan"), float("inf"), Decimal(1),
        Fraction(1), None, "1", b"1", (1,), Whole(-1), object(),
    ],
    ids=lambda cost: "huge" if cost == -HUGE else f"{cost!r:.20}",
)  # fmt: skip
def test_invalid_costs_are_refused(bucket: TokenBucket, cost: Any) -> None:
    for method in (bucket.hit, bucket.peek, bucket.refund):
        with pytest.raises(InvalidCost, match="whole number of at least 0"):
            method("k", cost)
    with pytest.raises(InvalidCost, match="whole number of at least 0"):
        bucket.allow_many(["k", "l"], [1, cost])
    assert bucket.peek("k").remaining == 20


@pytest.mark.parametrize("cost", [21, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**30, Whole(21), Whole(2**64)])
def test_cost_above_the_burst_raises_with_the_numbers(bucket: TokenBucket, cost: Any) -> None:
    for method in (bucket.hit, bucket.peek):
        with pytest.raises(CostExceedsLimit) as caught:
            method("k", cost)
        error = caught.value
        assert (index(error.cost), error.limit, error.limiter) == (index(cost), 20, "api")
        assert "'api'" in str(error)
        assert "at most 20 at once" in str(error)
        assert isinstance(error, ValueError)
        assert isinstance(error, ForebayError)
    with pytest.raises(CostExceedsLimit):
        bucket.allow_many(["k", "l"], [1, cost])
    assert bucket.peek("k").remaining == 20


@pytest.mark.parametrize("cost", [21, 2**62, 2**63, 2**64 + 1, 10**30, Whole(21), Whole(2**64)])
def test_refund_above_the_burst_only_fills_the_bucket(bucket: TokenBucket, cost: Any) -> None:
    assert bucket.hit("k", 15)
    bucket.refund("k", cost)
    assert bucket.peek("k").remaining == 20
    assert bucket.hit("k", 20)
    assert not bucket.allow("k")
    bucket.refund("k", cost, rate="5/minute", burst=10)
    assert bucket.peek("k", rate="5/minute", burst=10).remaining <= 10


def test_huge_cost_has_a_short_message(bucket: TokenBucket) -> None:
    with pytest.raises(CostExceedsLimit) as caught:
        bucket.hit("k", HUGE)
    assert len(str(caught.value)) < 1000


def test_exception_of_a_costs_index_reaches_the_caller(bucket: TokenBucket) -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bucket.hit("k", Broken())  # type: ignore[arg-type]


# Decisions


def test_decision_is_true_if_allowed(bucket: TokenBucket) -> None:
    allowed, denied = bucket.hit("k", 20), bucket.hit("k", 15)
    assert allowed
    assert not denied
    assert fields(allowed) == (True, 20, 0, 0, 2 * NS)
    assert fields(denied) == (False, 20, 0, 3 * NS // 2, 2 * NS)
    assert (allowed.retry_after, allowed.reset_after) == (0.0, 2.0)
    assert (denied.retry_after, denied.reset_after) == (1.5, 2.0)
    assert type(allowed.allowed) is bool
    assert repr(denied) == "Decision(allowed=False, limit=20, remaining=0, retry_after=1.5, reset_after=2.0)"


def test_denied_decision_reports_the_permits_that_remain(bucket: TokenBucket) -> None:
    bucket.hit("k", 15)
    denied = bucket.hit("k", 10)
    assert (denied.allowed, denied.remaining) == (False, 5)
    assert bucket.hit("k", denied.remaining)


def test_decision_is_immutable(bucket: TokenBucket) -> None:
    decision = bucket.hit("k")
    for name in ("allowed", "limit", "remaining", "retry_after", "reset_after", "retry_after_ns", "other"):
        with pytest.raises(AttributeError):
            setattr(decision, name, 1)
        with pytest.raises(AttributeError):
            delattr(decision, name)
    assert fields(decision) == (True, 20, 19, 0, NS // 10)


# peek, refund, reset, tiers


def test_peek_charges_nothing(bucket: TokenBucket) -> None:
    for _ in range(30):
        assert fields(bucket.peek("k", 20)) == (True, 20, 20, 0, 0)
    bucket.hit("k", 15)
    assert fields(bucket.peek("k", 6)) == (False, 20, 5, NS // 10, 3 * NS // 2)


def test_refund_gives_back_at_most_a_full_bucket(bucket: TokenBucket, clock: Clock) -> None:
    bucket.refund("k", 5)
    assert bucket.peek("k").remaining == 20
    bucket.hit("k", 10)
    bucket.refund("k", 4)
    assert bucket.peek("k").remaining == 14
    bucket.refund("k", 20)
    assert fields(bucket.peek("k")) == (True, 20, 20, 0, 0)
    bucket.hit("k", 10)
    clock.advance(1)
    bucket.refund("k", 10)
    assert [bucket.hit("k", 20).allowed, bucket.allow("k")] == [True, False]


def test_reset_forgets_one_key(bucket: TokenBucket) -> None:
    bucket.hit("k", 20)
    bucket.hit("l", 20)
    bucket.reset("k")
    bucket.reset("never seen")
    assert bucket.peek("k").remaining == 20
    assert bucket.peek("l").remaining == 0


def test_rate_for_one_call_uses_the_same_state(bucket: TokenBucket) -> None:
    gold = Rate(100, 1)
    assert bucket.hit("k", 20)
    assert not bucket.allow("k")
    # The state is two seconds ahead; a burst of 300 at 100 per second may be three seconds ahead.
    decision = bucket.hit("k", 100, rate=gold, burst=300)
    assert fields(decision) == (True, 300, 0, 0, 3 * NS)
    assert fields(bucket.peek("k", 1, rate="100/second", burst=300)) == (False, 300, 0, NS // 100, 3 * NS)
    bucket.refund("k", 100, rate=gold, burst=300)
    assert fields(bucket.peek("k")) == (False, 20, 0, NS // 10, 2 * NS)
    assert bucket.peek("k", 1, rate=gold).limit == 100
    with pytest.raises(CostExceedsLimit) as caught:
        bucket.hit("k", 301, rate=gold, burst=300)
    assert caught.value.limit == 300


def test_reservation_at_another_rate_is_booked_and_cancelled_by_that_rate(bucket: TokenBucket) -> None:
    assert bucket.hit("k", 20)
    # The state is two seconds ahead, which a burst of 200 at 100 per second allows.
    booked = bucket.reserve("k", 3, rate="100/second", burst=200)
    assert (booked.allowed, booked.delay_ns) == (True, 30_000_000)
    assert not bucket.reserve("k", 3, 0.05, rate="100/second", burst=200)
    assert bucket.peek("k").reset_after_ns == 2_030_000_000
    booked.cancel()
    assert bucket.peek("k").reset_after_ns == 2 * NS
    assert not bucket.wait("k", timeout=0)
    assert bucket.wait("k", timeout=0, rate="100/second", burst=300)
    assert bucket.peek("k").reset_after_ns == 2_010_000_000


@pytest.mark.places(*STRICT)
def test_cancelled_reservation_of_a_larger_burst_leaves_a_waiting_one_its_time(bucket: TokenBucket) -> None:
    assert bucket.hit("k", 20)
    gold = bucket.reserve("k", 10, rate="100/second", burst=300)
    waiting = bucket.reserve("k")
    assert (gold.delay_ns, waiting.delay_ns) == (0, 200_000_000)
    gold.cancel()
    assert bucket.peek("k").reset_after_ns == 2_200_000_000
    waiting.cancel()
    assert bucket.peek("k").reset_after_ns == 2_100_000_000


def test_burst_for_one_call_needs_a_rate(bucket: TokenBucket) -> None:
    for method in (bucket.hit, bucket.peek, bucket.refund, bucket.reserve, bucket.wait):
        with pytest.raises(InvalidLimiter, match="rate"):
            method("k", burst=5)


def test_invalid_rate_for_one_call_charges_nothing(bucket: TokenBucket) -> None:
    for options in ({"rate": "fast"}, {"rate": 5}, {"rate": "1/s", "burst": 0}, {"rate": "1/s", "burst": 2**64}):
        for method in (bucket.hit, bucket.peek, bucket.refund, bucket.reserve, bucket.wait):
            with pytest.raises(ValueError):  # noqa: PT011  # other tests check each message
                method("k", **options)
    assert bucket.peek("k").remaining == 20


# Keys


@pytest.mark.parametrize(
    "key",
    [
        *(None, 1.5, ["a"], {"a"}, bytearray(b"a"), memoryview(b"a"), object()),
        *((1.5,), (None,), (("a",),), ("a", ["b"])),
        # True is the integer 1 in Python, so a client with the key True would share the key 1.
        *(True, False, ("a", True)),
    ],
)
def test_key_of_another_type_is_refused(bucket: TokenBucket, key: Any) -> None:
    for method in (bucket.allow, bucket.hit, bucket.peek, bucket.refund, bucket.reset):
        with pytest.raises(InvalidKey, match="str, bytes"):
            method(key)
    assert issubclass(InvalidKey, TypeError)


@pytest.mark.parametrize(
    "key",
    [
        "",
        b"",
        0,
        (),
        "x" * 2**20,
        b"x" * 2**20,
        1 << 2**23,
        ("x" * 2**20,) * 2,
        ("a",) * 10_000,
        "\ud800",
        "\0",
        "\U0010ffff" * 10,
    ],
    ids=lambda key: type(key).__name__,
)
def test_extreme_keys_are_accepted(bucket: TokenBucket, key: Any) -> None:
    assert bucket.hit(key, 20)
    assert not bucket.allow(key)
    assert bucket.allow_many([key]) == [False]
    bucket.reset(key)
    assert bucket.allow(key)


# Limiters of one store


def test_limiters_of_one_name_share_their_state(store: Any) -> None:
    first = TokenBucket(store, "api", "10/second")
    second = TokenBucket(store, "api", "10/second")
    other = TokenBucket(store, "other", "10/second")
    assert first.hit("k", 6).remaining == 4
    assert second.hit("k", 4).remaining == 0
    assert not first.allow("k")
    assert other.hit("k", 10)
    second.reset("k")
    assert first.peek("k").remaining == 10
    assert other.peek("k").remaining == 0


def test_limiters_of_similar_names_are_separate(store: Any) -> None:
    names = ["a", "b", "aa", "A", " a", "a ", "0a", "1a", "é", "e\u0301", "a" * 48, "é" * 24]
    for limiter in [TokenBucket(store, name, "1/hour") for name in names]:
        assert limiter.allow("k"), limiter.name

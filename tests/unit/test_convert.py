"""`TokenBucket.convert`: what a key keeps when its limit changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay import InvalidKey, InvalidLimiter, InvalidRate, Rate, Store, StoreClosed, TokenBucket
from forebay.testing import ManualClock

NS = 10**9


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as store:
        yield store


@pytest.mark.parametrize(
    ("keep", "remaining"),
    [("permits", 20), ("share", 8), ("used", 0)],
)
def test_a_lower_burst(store: Store, keep: Any, remaining: int) -> None:
    bucket = TokenBucket(store, "api", "100/minute", burst=20)
    assert bucket.hit("k", 60, rate="100/minute", burst=100).remaining == 40
    assert bucket.peek("k").remaining == 0
    assert bucket.convert("k", "100/minute", 100, keep=keep) == remaining
    assert bucket.peek("k").remaining == remaining
    assert bucket.peek("other").remaining == 20


@pytest.mark.parametrize(
    ("keep", "remaining"),
    [("permits", 8), ("share", 40), ("used", 88)],
)
def test_a_higher_burst_and_rate(store: Store, keep: Any, remaining: int) -> None:
    bucket = TokenBucket(store, "api", "20/minute")
    assert bucket.hit("k", 12).remaining == 8
    assert bucket.convert("k", "20/minute", rate="1000/hour", burst=100, keep=keep) == remaining
    assert bucket.peek("k", rate="1000/hour", burst=100).remaining == remaining


def test_permits_are_what_a_key_keeps_by_default(store: Store) -> None:
    bucket = TokenBucket(store, "api", "50/minute")
    bucket.hit("k", 30)
    assert bucket.convert("k", "50/minute", rate="10/hour", burst=40) == 20


def test_a_key_that_has_used_nothing_has_the_new_burst(store: Store, clock: ManualClock) -> None:
    bucket = TokenBucket(store, "api", "60/minute")
    bucket.hit("back", 5)
    clock.advance(5)
    for key in ("new", "back"):
        for keep in ("permits", "share", "used"):
            assert bucket.convert(key, "60/minute", rate="1/hour", burst=7, keep=keep) == 7  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", ["permits", "share", "used"])
def test_bookings_stay_booked(store: Store, clock: ManualClock, keep: Any) -> None:
    bucket = TokenBucket(store, "api", "1/second", burst=10)
    bucket.hit("k", 10)
    assert bucket.reserve("k", 5).delay == 5
    assert bucket.convert("k", "1/second", 10, rate="1/second", burst=5, keep=keep) == 0
    # With the share, fifteen of ten become seven and a half of five.
    delay = {"permits": 5.0, "share": 2.5, "used": 10.0}[keep]
    assert bucket.peek("k", 0, rate="1/second", burst=5).reset_after == 5 + delay


periods_ns = st.sampled_from([NS // 100, NS, 60 * NS, 86_400 * NS])
limits = st.tuples(st.integers(1, 10**6), periods_ns, st.integers(1, 20_000))


@given(old=limits, new=limits, cost=st.integers(1, 20_000), passed_ns=st.integers(0, 10**11))
@example(old=(1, 365 * 86_400 * NS, 73), new=(1, 1, 1), cost=73, passed_ns=0)
@example(old=(1, 1, 1), new=(1, 365 * 86_400 * NS, 73), cost=1, passed_ns=0)
@example(old=(307, NS // 100, 4679), new=(1, NS // 100, 1), cost=1, passed_ns=29_252)  # most of a permit is back
@pytest.mark.parametrize("keep", ["permits", "share", "used"])
def test_no_key_gains_by_it_and_none_loses_more_than_a_permit(
    keep: Any, old: tuple[int, int, int], new: tuple[int, int, int], cost: int, passed_ns: int
) -> None:
    clock = ManualClock(1000)
    (limit, period_ns, burst), (new_limit, new_period_ns, new_burst) = old, new
    old_rate, new_rate = Rate.per_ns(limit, period_ns), Rate.per_ns(new_limit, new_period_ns)
    with Store.private(keys=10, clock=clock) as store:
        bucket = TokenBucket(store, "api", new_rate, burst=new_burst)
        bucket.hit("k", min(cost, burst), rate=old_rate, burst=burst)
        clock.advance(passed_ns / NS)
        before = bucket.peek("k", 0, rate=old_rate, burst=burst)
        left = before.remaining
        remaining = bucket.convert("k", old_rate, burst, keep=keep)
        match keep:
            case _ if before.reset_after_ns == 0:
                assert remaining == new_burst
            case "permits":
                assert remaining == min(left, new_burst)
            case "share":
                # `left` leaves out a part of a permit, and each tolerance has less than a permit to spare.
                assert (left - 1) * new_burst // burst - 2 <= remaining <= -(-(left + 1) * new_burst // burst) + 1
            case "used":
                assert max(new_burst - (burst - left) - 1, 0) <= remaining <= max(new_burst - (burst - left) + 1, 0)
        # The new state is one that the limiter may have.
        assert bucket.peek("k", 0).reset_after_ns >= 0
        assert remaining == 0 or bucket.hit("k", remaining)
        assert remaining == new_burst or not bucket.allow("k")


@pytest.mark.parametrize("keep", ["", "all", None, 1, b"share", ["share"]])
def test_what_is_kept_is_one_of_three(store: Store, keep: Any) -> None:
    with pytest.raises(InvalidLimiter, match="keep is 'permits', 'share' or 'used', not"):
        TokenBucket(store, "api", "1/s").convert("k", "1/s", keep=keep)


def test_arguments_are_those_of_a_limit(store: Store) -> None:
    bucket = TokenBucket(store, "api", "9/minute")
    with pytest.raises(InvalidRate):
        bucket.convert("k", None)  # type: ignore[arg-type]
    with pytest.raises(InvalidLimiter, match="a whole number of at least 1, not 0"):
        bucket.convert("k", "1/s", 0)
    with pytest.raises(InvalidLimiter, match="needs a rate beside it"):
        bucket.convert("k", "1/s", burst=5)
    with pytest.raises(InvalidKey):
        bucket.convert(1.5, "1/s")  # type: ignore[arg-type]
    for other in (TokenBucket(store, "a", "9/s", initial=1), TokenBucket(store, "b", "9/s", refill="interval")):
        with pytest.raises(InvalidLimiter, match="one limit for all calls"):
            other.convert("k", "1/s")
    store.close()
    with pytest.raises(StoreClosed):
        bucket.convert("k", "1/s")


def test_charges_of_other_processes_count_before_or_after(in_child: Any) -> None:
    with Store.private(keys=10, clock=ManualClock(1000)) as store:
        bucket = TokenBucket(store, "api", "1000/hour")

        def charge() -> int:
            return sum(bucket.allow("k") for _ in range(400))

        def convert() -> int:
            for _ in range(300):
                bucket.convert("k", "1000/hour", keep="used")
            return charge()

        assert in_child(charge) + convert() == 800
        assert bucket.peek("k").remaining == 200

"""Admissions at every place, including hosts that lease or exchange, and the rules that differ for those.

A leasing host knows only its permits on loan: `remaining` is at most the true remainder. It remembers a denial until
Redis's answer can change, rounded up by some milliseconds: requests come `A_MOMENT_S` after a change. Permits spent
from a bucket's loan stay on loan until the next fetch reports them, and refill only from then on: such a host admits
less than other places, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import pytest
from places import EXACT, Place

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)

START_S: Final = 86_400
A_MOMENT_S: Final = 0.01


class Traffic(NamedTuple):
    make: Callable[[Any], Any]
    burst: int
    requests: Sequence[tuple[float, int, int]]
    """(seconds, requests, admitted): at this time the host gets this many requests, and admits so many."""


TRAFFIC: Final = {
    "token bucket": Traffic(
        lambda store: TokenBucket(store, "api", "60/minute", burst=5),
        5,
        [(0, 7, 5), (1, 3, 1), (1.5, 3, 0), (3, 1, 1), (4, 9, 2), (3600, 9, 5)],
    ),
    "gap": Traffic(
        lambda store: TokenBucket(store, "api", "1/minute", burst=1),
        1,
        [(0, 2, 1), (59, 2, 0), (60, 2, 1), (100, 2, 0), (121, 2, 1)],
    ),
    "fixed window": Traffic(
        lambda store: FixedWindow(store, "api", "5/minute"),
        5,
        [(0, 3, 3), (59, 6, 2), (60, 6, 5), (119, 6, 0), (120, 6, 5)],
    ),
    "sliding window": Traffic(
        lambda store: SlidingWindow(store, "api", "10/minute"),
        10,
        [(0, 11, 10), (59, 3, 0), (60, 2, 1), (66, 3, 1), (90, 9, 4), (180, 12, 10)],
    ),
}
every_kind = pytest.mark.parametrize("kind", TRAFFIC)


def start(place: Place, kind: str) -> Any:
    place.clock.set(START_S)
    return TRAFFIC[kind].make(place.store)


@every_kind
@pytest.mark.parametrize("how", ["allow", "hit", "allow_many", "with a cost"])
def test_place_admits_the_same_requests(place: Place, kind: str, how: str) -> None:
    limiter = start(place, kind)
    passed = possible = TRAFFIC[kind].burst
    for seconds, requests, admitted in TRAFFIC[kind].requests:
        place.clock.set(START_S + seconds + A_MOMENT_S)
        if place.kind == "leased" and "window" not in kind and seconds:
            passed += sum(limiter.allow_many(["k"] * requests))
            possible += admitted
            assert 0 < passed <= possible
        elif how == "with a cost" and admitted:
            assert limiter.hit("k", admitted)
            assert admitted == requests or not limiter.hit("k")
        elif how == "allow_many":
            assert limiter.allow_many(["k"] * requests) == [True] * admitted + [False] * (requests - admitted)
        else:
            method = limiter.hit if how == "hit" else limiter.allow
            assert [bool(method("k")) for _ in range(requests)] == [True] * admitted + [False] * (requests - admitted)
        assert limiter.allow(f"at {seconds}")


@every_kind
def test_remaining_permits_can_be_taken_and_retry_after_suffices(place: Place, kind: str) -> None:
    limiter = start(place, kind)
    burst = TRAFFIC[kind].burst
    assert limiter.peek("k").remaining == burst
    for taken in range(1, burst + 1):
        decision = limiter.hit("k")
        assert (decision.allowed, decision.limit, decision.retry_after_ns) == (True, burst, 0)
        if place.kind == "leased":
            assert 0 <= decision.remaining <= burst - taken
            # A peek reads Redis and fetches no lease.
            assert limiter.peek("k", burst).remaining <= burst - taken
        else:
            assert decision.remaining == limiter.peek("k").remaining == burst - taken
    denied = limiter.hit("k")
    assert (denied.allowed, denied.limit, denied.remaining) == (False, burst, 0)
    due_ns = place.clock.now_ns + -(-denied.retry_after_ns // 1000) * 1000
    place.clock.set_ns(due_ns - denied.retry_after_ns // 2 // 1000 * 1000)
    assert not limiter.allow("k")
    place.clock.set_ns(due_ns)
    assert limiter.hit("k")
    assert denied.reset_after_ns >= denied.retry_after_ns


@every_kind
def test_refunded_permits_can_be_taken_again(place: Place, kind: str) -> None:
    limiter = start(place, kind)
    burst = TRAFFIC[kind].burst
    assert limiter.hit("k", burst)
    limiter.refund("k", (burst + 1) // 2)
    place.clock.advance(A_MOMENT_S)
    assert limiter.hit("k", (burst + 1) // 2)
    assert not limiter.allow("k")
    limiter.refund("k", 10 * burst)
    place.clock.advance(A_MOMENT_S)
    assert limiter.allow_many(["k"] * (burst + 1)) == [True] * burst + [False]
    limiter.reset("k")
    limiter.refund("k", burst)
    assert limiter.allow_many(["k"] * (burst + 1)) == [True] * burst + [False]


@every_kind
def test_invalid_requests_are_refused(place: Place, kind: str) -> None:
    limiter = start(place, kind)
    burst = TRAFFIC[kind].burst
    for method in (limiter.hit, limiter.peek):
        with pytest.raises(CostExceedsLimit) as caught:
            method("k", burst + 1)
        assert (caught.value.cost, caught.value.limit, caught.value.limiter) == (burst + 1, burst, "api")
    for method in (limiter.hit, limiter.peek, limiter.refund):
        for cost in (-1, 1.0, True, None, "1"):
            with pytest.raises(InvalidCost):
                method("k", cost)
    for method in (limiter.allow, limiter.hit, limiter.peek, limiter.refund, limiter.reset):
        for key in (None, 1.5, ["k"], ("k", None)):
            with pytest.raises(InvalidKey):
                method(key)
    with pytest.raises(CostExceedsLimit):
        limiter.allow_many(["k", "j"], [1, burst + 1])
    with pytest.raises(InvalidKey):
        limiter.allow_many(["k", 1.5])
    assert limiter.allow_many(["k"] * (burst + 1)) == [True] * burst + [False]


# Rules that differ for hosts that lease or exchange

NOT_LEASED_OR_SYNCED: Final[dict[str, Callable[[Any], Any]]] = {
    "interval bucket": lambda store: TokenBucket(store, "api", "5/hour", refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "api", "5/hour", capacity=5),
    "minimum interval": lambda store: MinInterval(store, "api", "1 hour"),
    "bucketed window": lambda store: BucketedWindow(store, "api", "5/hour", keys=9),
    "sliding log": lambda store: SlidingLog(store, "api", "5/hour", keys=9),
    "concurrency": lambda store: Concurrency(store, "api", 5, keys=9),
}


@pytest.mark.places("leased", "synced")
@pytest.mark.parametrize("make", NOT_LEASED_OR_SYNCED.values(), ids=NOT_LEASED_OR_SYNCED)
def test_other_limiters_are_refused_when_they_are_made(place: Place, make: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidLimiter, match=r"RedisStore|instead|can be"):
        make(place.store)


@pytest.mark.places("synced")
@pytest.mark.parametrize("align", ["first", "stagger"])
def test_only_clock_aligned_windows_are_synced(place: Place, align: Any) -> None:
    with pytest.raises(InvalidLimiter):
        FixedWindow(place.store, "api", "5/hour", align=align)


@pytest.mark.places("synced")
def test_synced_window_refuses_a_rate_for_one_call(place: Place) -> None:
    for window in (FixedWindow(place.store, "f", "5/hour"), SlidingWindow(place.store, "s", "5/hour")):
        for method in (window.hit, window.peek, window.refund):
            with pytest.raises(InvalidLimiter):
                method("k", rate="6/hour")


@pytest.mark.places(*EXACT)
def test_only_a_synced_bucket_gets_an_earlier_booking_back(place: Place) -> None:
    """Elsewhere a later booking keeps its time, so the earlier one's place is lost. A synced host's merges may lie
    behind it."""
    bucket = TokenBucket(place.store, "api", "5/second", burst=4)
    first, second = bucket.reserve("k"), bucket.reserve("k", 4)
    assert second.delay == 0.2
    first.cancel()
    first.cancel()
    assert bucket.peek("k").retry_after == (0.2 if place.kind == "synced" else 0.4)


@pytest.mark.places("leased")
@every_kind
def test_leased_limiter_refuses_bookings(place: Place, kind: str) -> None:
    limiter = start(place, kind)
    for refusing in (limiter, AllOf(limiter)):
        with pytest.raises(InvalidLimiter, match="book"):
            refusing.reserve("k")
    for options in ({"rate": "1/s"}, {"burst": 3}):
        with pytest.raises(InvalidLimiter, match="one limit for all calls: over the RedisStore itself"):
            limiter.hit("k", **options)
    assert limiter.peek("k").remaining == TRAFFIC[kind].burst

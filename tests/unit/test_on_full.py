"""`on_full`: a new key whose cells are all taken by live keys. The smallest table has 1024 cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    LimiterStats,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.testing import ManualClock

CELLS = 1024
CROWD = range(5000)


def open_bucket(clock: ManualClock, on_full: Any, rate: str = "1/minute", keys: int = 1) -> tuple[Store, TokenBucket]:
    store = Store.private(keys=keys, on_full=on_full, clock=clock)
    return store, TokenBucket(store, "api", rate, burst=100)


def test_evict_makes_room_and_counts_evictions(clock: ManualClock) -> None:
    store, limiter = open_bucket(clock, "evict")
    with store:
        assert all(limiter.allow_many(CROWD))
        stats = store.stats()
        evicted = len(CROWD) - stats.live_keys
        assert len(CROWD) - CELLS <= evicted
        assert stats.live_keys > CELLS * 0.9
        assert stats.total == LimiterStats(allowed=len(CROWD), inserted=len(CROWD), evicted=evicted)


def test_evict_takes_the_key_that_expires_first(clock: ManualClock) -> None:
    """A flood of one-off keys evicts its own keys; keys that used much stay."""
    store, limiter = open_bucket(clock, "evict")
    heavy = [f"heavy {n}" for n in range(100)]
    with store:
        limiter.allow_many(heavy, [50] * len(heavy))
        for second in range(10):
            limiter.allow_many(range(second * 2000, second * 2000 + 2000))
            clock.advance(1)
        assert store.stats().total.evicted > 15_000
        assert [limiter.peek(key).remaining for key in heavy] == [50] * len(heavy)


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_taking_what_is_there_follows_on_full(clock: ManualClock, on_full: Any) -> None:
    store, limiter = open_bucket(clock, on_full)
    with store:
        taken = [limiter.take_up_to(key, 150) for key in CROWD]
        stats = store.stats()
        charged = taken.count(100) if on_full != "allow" else stats.total.inserted
        assert set(taken) == ({100, 0} if on_full == "deny" else {100})
        assert stats.total.inserted == charged
        assert stats.total.allowed == taken.count(100)
        assert stats.total.denied == stats.total.full * (on_full == "deny") == taken.count(0)
        assert (stats.total.full > 0) is (on_full != "evict")
        assert sum(limiter.peek(key).remaining == 0 for key in CROWD) == stats.live_keys


def test_deny_refuses_only_new_keys_and_counts_denials(clock: ManualClock) -> None:
    store, limiter = open_bucket(clock, "deny")
    with store:
        passed = limiter.allow_many(CROWD)
        denied = passed.count(False)
        stats = store.stats()
        assert len(CROWD) - CELLS <= denied < len(CROWD) - CELLS * 0.9
        assert stats.live_keys == len(CROWD) - denied
        assert stats.total == LimiterStats(
            allowed=len(CROWD) - denied, denied=denied, inserted=len(CROWD) - denied, full=denied
        )
        known = [key for key, allowed in zip(CROWD, passed, strict=True) if allowed]
        unknown = [key for key, allowed in zip(CROWD, passed, strict=True) if not allowed]
        assert all(limiter.allow_many(known))
        assert not any(limiter.allow(key) for key in unknown)
        assert store.stats().total.full == 2 * denied


def test_denial_for_lack_of_room_has_a_retry_after(clock: ManualClock) -> None:
    store, limiter = open_bucket(clock, "deny")
    with store:
        passed = limiter.allow_many(CROWD)
        clock.advance(10)
        newcomer = CROWD[passed.index(False)]
        decision = limiter.hit(newcomer)
        assert (decision.allowed, decision.limit, decision.remaining) == (False, 100, 0)
        assert decision.retry_after == decision.reset_after == 50.0
        assert decision.full
        assert "full=True" in repr(decision)
        assert decision.reason == "no room"
        # `full` is false where the limit binds, and for a peek, which `on_full` doesn't decide.
        known = CROWD[passed.index(True)]
        assert limiter.hit(known, limiter.hit(known).remaining).reason is None
        assert not limiter.hit(known)
        assert limiter.hit(known).reason == "limit"
        assert not any(decision.full for decision in (limiter.hit(known), limiter.peek(newcomer)))
        [decision] = AllOf(limiter).hit_each(newcomer)
        assert (decision.allowed, decision.full, decision.reason) == (False, True, "no room")
        for reservation in (limiter.reserve(newcomer), AllOf(limiter).reserve(newcomer)):
            assert (reservation.allowed, reservation.full, reservation.delay) == (False, True, 50.0)
        assert not limiter.reserve(known, max_delay=0).full
        clock.advance(49.999)
        assert not limiter.allow(newcomer)
        clock.advance(0.001)
        assert limiter.allow(newcomer)
        assert all(limiter.allow_many(range(-500, 0)))


@pytest.mark.parametrize("on_full", ["deny", "allow"])
def test_concurrency_limit_flags_every_answer_of_a_full_store(clock: ManualClock, on_full: Any) -> None:
    with Store.private(keys=1, on_full=on_full, clock=clock) as store:
        limiter = Concurrency(store, "slots", 1, keys=1)
        newcomer = next(key for key in CROWD if limiter.acquire(key).full)
        for answer in (limiter.acquire(newcomer), limiter.hit(newcomer), limiter.reserve(newcomer)):
            assert (bool(answer), answer.full) == (on_full == "allow", True)
        assert not any(answer.full for answer in (limiter.acquire(0), limiter.hit(0), limiter.reserve(0)))


ONE_REQUEST_USES_UP: dict[str, Callable[[Store], Any]] = {
    "minimum interval": lambda store: MinInterval(store, "one", "1 hour"),
    "token bucket": lambda store: TokenBucket(store, "one", "9/hour", burst=1),
    "token bucket, initial": lambda store: TokenBucket(store, "one", "9/hour", initial=1),
    "token bucket, intervals": lambda store: TokenBucket(store, "one", "1/hour", refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "one", "9/hour", 1),
    "fixed window": lambda store: FixedWindow(store, "one", "1/hour"),
    "fixed window, first": lambda store: FixedWindow(store, "one", "1/hour", align="first"),
    "fixed window, stagger": lambda store: FixedWindow(store, "one", "1/hour", align="stagger"),
    "fixed window, calendar": lambda store: FixedWindow(store, "one", "1/year", align="calendar", timezone="UTC"),
    "sliding window": lambda store: SlidingWindow(store, "one", "1/hour"),
    "sliding log": lambda store: SlidingLog(store, "one", "1/hour", keys=1),
    "bucketed window": lambda store: BucketedWindow(store, "one", "1/hour", keys=1),
    "concurrency": lambda store: Concurrency(store, "one", 1, lease="1 hour", keys=1),
}


@pytest.mark.parametrize("on_full", [None, "evict", "deny", "allow"])
@pytest.mark.parametrize("make", ONE_REQUEST_USES_UP.values(), ids=ONE_REQUEST_USES_UP)
def test_a_limit_that_one_request_uses_up_evicts_only_if_told_to(
    clock: ManualClock, make: Callable[[Store], Any], on_full: Any
) -> None:
    with Store.private(keys=1, on_full=on_full, clock=clock) as store:
        limiter = make(store)
        answers = [limiter.hit(key) for key in CROWD]
        total = store.stats().total
        assert [answer.reason for answer in answers].count("no room") == (total.full if on_full != "allow" else 0)
        assert (total.full > 0) == (on_full != "evict")
        assert (total.evicted > 0) == (on_full == "evict")
        if on_full is None:
            # Each key that found room is at its limit still.
            known = [key for key, answer in zip(CROWD, answers, strict=True) if answer]
            assert {limiter.hit(key).reason for key in known} == {"limit"}
        # Others evict unless the store says otherwise.
        assert all(TokenBucket(store, "bucket", "9/hour").allow_many(CROWD)) == (on_full != "deny")


def test_allow_lets_new_keys_in_uncharged_and_counts_them(clock: ManualClock) -> None:
    store, limiter = open_bucket(clock, "allow")
    with store:
        assert all(limiter.allow_many(CROWD, [100] * len(CROWD)))
        stats = store.stats()
        full = len(CROWD) - stats.live_keys
        assert len(CROWD) - CELLS <= full
        assert stats.total == LimiterStats(allowed=len(CROWD), inserted=stats.live_keys, full=full)
        # Keys with a cell are limited as usual, the others are not.
        again = limiter.allow_many(CROWD)
        assert again.count(True) == full
        decision = limiter.hit(CROWD[again.index(True)], 30)
        assert (decision.allowed, decision.remaining, decision.reset_after) == (True, 70, 1800.0)
        assert (decision.full, decision.reason) == (True, None)


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_expired_keys_make_room(clock: ManualClock, on_full: Any) -> None:
    store, limiter = open_bucket(clock, on_full)
    with store:
        for wave in range(20):
            assert all(limiter.allow_many(range(wave * 500, wave * 500 + 500)))
            assert store.stats().live_keys == 500
            clock.advance(60)
            assert store.stats().live_keys == 0
        assert store.stats().total == LimiterStats(allowed=10_000, inserted=10_000)


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
def test_advertised_number_of_keys_has_room(clock: ManualClock, on_full: Any) -> None:
    """At most one insertion in 10,000 may find its probe set full."""
    keys = 100_000
    store, limiter = open_bucket(clock, on_full, keys=keys)
    with store:
        limiter.allow_many(range(keys))
        total = store.stats().total
        assert total.full + total.evicted <= keys // 10_000


def test_limiters_of_one_store_share_its_room(clock: ManualClock) -> None:
    store, limiter = open_bucket(clock, "deny")
    with store:
        limiter.allow_many(CROWD)
        before = store.stats()
        other = TokenBucket(store, "other", "1/hour")
        passed = other.allow_many(CROWD)
        after = store.stats()
        assert after.limiters["api"] == before.limiters["api"]
        assert after.limiters["other"].full == passed.count(False) > 4900
        assert after.live_keys == before.live_keys + passed.count(True) <= CELLS


def test_each_store_object_has_its_own_policy(clock: ManualClock, store_name: str) -> None:
    with (
        Store(store_name, keys=1, on_full="deny", clock=clock) as strict,
        Store(store_name, keys=1, on_full="allow", clock=clock) as lenient,
    ):
        passed = TokenBucket(strict, "api", "1/hour").allow_many(CROWD)
        key = CROWD[passed.index(False)]
        assert TokenBucket(lenient, "api", "1/hour").allow(key)
        assert not TokenBucket(strict, "api", "1/hour").allow(key)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: TokenBucket(s, "it", "1/second"),
        lambda s: FixedWindow(s, "it", "1/second", align="first"),
        lambda s: SlidingLog(s, "it", "1/second", keys=1),
        lambda s: BucketedWindow(s, "it", "1/second", buckets=2, keys=1),
        lambda s: AllOf(FixedWindow(s, "others", "9/minute"), TokenBucket(s, "it", "1/second")),
    ],
)
def test_reservation_let_in_uncharged_has_nothing_to_cancel(clock: ManualClock, make: Callable[[Store], Any]) -> None:
    with Store.private(keys=1, on_full="allow", clock=clock) as store:
        limiter = make(store)
        key, reservation = next(
            (key, reservation)
            for key in CROWD
            if (reservation := limiter.reserve(key, max_delay=0)) and limiter.peek(key).remaining == 1
        )
        clock.advance(3)
        assert [limiter.allow(key) for _ in range(2)] == [True, False]
        reservation.cancel()
        assert not limiter.allow(key)

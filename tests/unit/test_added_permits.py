"""Permits above a bucket's burst in a full store."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import InvalidLimiter, Store, StoreFull, TokenBucket
from forebay.testing import ManualClock

CROWD = range(5000)


def bucket_in(store: Store, rate: str = "1/minute", **options: Any) -> TokenBucket:
    return TokenBucket(store, "api", rate, burst=100, **options)


def test_key_above_its_burst_is_never_evicted(clock: ManualClock) -> None:
    rich = [f"rich {n}" for n in range(100)]
    with Store.private(keys=1, on_full="evict", clock=clock) as store:
        limiter = bucket_in(store)
        for key in rich:
            limiter.add(key, 50)
        for second in range(10):
            # The others are at their limits.
            limiter.allow_many(range(second * 2000, second * 2000 + 2000), [100] * 2000)
            clock.advance(1)
        assert store.stats().total.evicted > 15_000
        assert [limiter.peek(key).remaining for key in rich] == [150] * len(rich)


def test_store_full_of_permits_evicts_none(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="evict", clock=clock) as store:
        limiter = bucket_in(store)
        added = [key for key in CROWD if is_added(limiter, key)]
        assert len(added) > 1000
        assert [limiter.peek(key).remaining for key in added] == [101] * len(added)
        other = next(key for key in CROWD if key not in added)
        decision = limiter.hit(other)
        assert (decision.allowed, decision.reason) == (False, "no room")
        assert decision.retry_after > 0
        assert store.stats().total.evicted == 0


def is_added(limiter: TokenBucket, key: int) -> bool:
    try:
        return limiter.add(key, 1) == 101
    except StoreFull:
        return False


@pytest.mark.parametrize("on_full", ["deny", "allow"])
def test_store_without_room_adds_nothing_and_says_so(clock: ManualClock, on_full: Any) -> None:
    with Store.private(keys=1, on_full=on_full, clock=clock) as store:
        limiter = bucket_in(store)
        limiter.allow_many(CROWD, [100] * len(CROWD))
        live = [key for key in CROWD if limiter.peek(key).remaining == 0]
        lost = [key for key in CROWD if limiter.peek(key).remaining == 100]
        assert lost
        for key in lost[:10]:
            with pytest.raises(StoreFull, match="limiter 'api' got no permits for the key") as caught:
                limiter.add(key, 5)
            assert caught.value.limiter == "api"
            assert limiter.peek(key).remaining == 100
        # Keys that have a cell have room.
        assert [limiter.add(key, 105) for key in live] == [105] * len(live)


def test_keys_above_their_burst_fill_a_store_for_good(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="deny", clock=clock) as store:
        limiter = bucket_in(store)
        full = [key for key in CROWD if not is_added(limiter, key)]
        clock.advance(10 * 365 * 86_400)
        decision = limiter.hit(full[0])
        assert (decision.allowed, decision.reason) == (False, "no room")
        for key in CROWD:
            limiter.reset(key)
        assert limiter.allow(full[0])
        assert store.stats().live_keys == 1


def test_bucket_with_initial_permits_refuses(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock) as store:
        limiter = bucket_in(store, initial=5)
        with pytest.raises(InvalidLimiter, match="without initial="):
            limiter.add("ada", 1)

"""``limited`` of limiters whose permits are spent: a block waits for them, or raises ``LimitExceeded``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from places import STRICT

from forebay import AllOf, FixedWindow, LeakyBucket, LimitExceeded, MinInterval, NotAwaited, SlidingLog, TokenBucket

KINDS: dict[str, Callable[[Any], Any]] = {
    "token bucket": lambda store: TokenBucket(store, "w", "2/hour"),
    "leaky bucket": lambda store: LeakyBucket(store, "w", "2/hour", 2),
    "minimum interval": lambda store: MinInterval(store, "w", "1 hour"),
    "fixed window": lambda store: FixedWindow(store, "w", "2/hour", align="first"),
    "sliding log": lambda store: SlidingLog(store, "w", "2/hour", keys=9),
    "several": lambda store: AllOf(FixedWindow(store, "day", "9/day"), TokenBucket(store, "w", "2/hour")),
}


def test_block_spends_permits_or_raises(store: Any) -> None:
    limiter = TokenBucket(store, "w", "3/hour", burst=3)
    with limiter.limited("ada", 2):
        pass
    with pytest.raises(ValueError, match="of the block"), limiter.limited("ada"):
        raise ValueError("of the block")
    for _ in range(2):
        with pytest.raises(LimitExceeded) as caught, limiter.limited("ada", timeout=0):
            raise AssertionError("the block ran")
        assert (caught.value.limiter, caught.value.limit) == ("w", 3)
        assert 0 < caught.value.retry_after <= 1200
    with limiter.limited("bob"):
        pass


@pytest.mark.places(*STRICT)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_block_of_every_kind_raises_what_a_request_would_have_to_wait(make: Callable[[Any], Any], store: Any) -> None:
    limiter = make(store)
    while limiter.wait("ada", timeout=0):
        pass
    with pytest.raises(LimitExceeded) as caught, limiter.limited("ada", timeout=0):
        raise AssertionError("the block ran")
    assert caught.value.limiter == "w"
    assert caught.value.limit == limiter.peek("ada").limit
    assert 0 < caught.value.retry_after <= 3600


def test_a_forgotten_with_is_no_truth(store: Any) -> None:
    with pytest.raises(NotAwaited, match="neither true nor false"):
        bool(TokenBucket(store, "w", "3/hour").limited("ada"))

"""`convert`: what a key keeps when its limit changes, wherever limits are kept."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

import pytest
from places import OVER_REDIS, STRICT, Clock

from forebay import (
    BucketedWindow,
    Concurrency,
    FixedWindow,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    LeakyBucket,
    MinInterval,
    SlidingWindow,
    StoreClosed,
    TokenBucket,
)

pytestmark = pytest.mark.places(*STRICT)

KINDS: Final[dict[str, Any]] = {
    "bucket": lambda store, limit: TokenBucket(store, "w", f"{limit}/minute"),
    "fixed": lambda store, limit: FixedWindow(store, "w", f"{limit}/minute"),
    "first": lambda store, limit: FixedWindow(store, "w", f"{limit}/minute", align="first"),
    "stagger": lambda store, limit: FixedWindow(store, "w", f"{limit}/minute", align="stagger"),
    "sliding": lambda store, limit: SlidingWindow(store, "w", f"{limit}/minute"),
    "rounded up": lambda store, limit: SlidingWindow(store, "w", f"{limit}/minute", rounding="up"),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize(("keep", "remaining"), [("permits", 20), ("share", 8), ("used", 0)])
def test_a_lower_limit(store: Any, clock: Clock, make: Any, keep: Any, remaining: int) -> None:
    clock.set(3600)
    limiter = make(store, 100)
    assert limiter.hit("k", 60).remaining == 40
    assert limiter.convert("k", "100/minute", rate="20/minute", keep=keep) == remaining
    assert limiter.peek("k", rate="20/minute").remaining == remaining
    assert limiter.peek("other", rate="20/minute").remaining == 20


@every_kind
@pytest.mark.parametrize(("keep", "remaining"), [("permits", 8), ("share", 40), ("used", 88)])
def test_a_higher_limit(store: Any, clock: Clock, make: Any, keep: Any, remaining: int) -> None:
    clock.set(3600)
    limiter = make(store, 100)
    assert limiter.hit("k", 12, rate="20/minute").remaining == 8
    assert limiter.convert("k", "20/minute", keep=keep) == remaining
    assert limiter.peek("k").remaining == remaining


@every_kind
def test_a_share_is_rounded_against_the_key(store: Any, clock: Clock, make: Any) -> None:
    clock.set(3600)
    limiter = make(store, 100)
    limiter.hit("k", rate="3/minute")
    assert limiter.convert("k", "3/minute", keep="share") == 66


@every_kind
@pytest.mark.parametrize("keep", ["permits", "share", "used"])
def test_a_key_that_has_used_nothing_has_the_new_limit(store: Any, clock: Clock, make: Any, keep: Any) -> None:
    clock.set(3600)
    limiter = make(store, 100)
    limiter.hit("back", 5)
    clock.advance(180)
    for key in ("new", "back"):
        assert limiter.convert(key, "100/minute", rate="7/minute", keep=keep) == 7
        assert limiter.peek(key, rate="7/minute").reset_after == 0


def test_defaults(store: Any, clock: Clock) -> None:
    """A bucket keeps the permits that remain, and a window what was used."""
    clock.set(3600)
    for kind, remaining in (("bucket", 20), ("fixed", 10), ("sliding", 10)):
        limiter = KINDS[kind](store, 50)
        limiter.hit("k", 30)
        assert limiter.convert("k", "50/minute", rate="40/minute") == remaining


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("passed_s", [0, 59])
@pytest.mark.parametrize(("old", "new"), [(100, 40), (3, 1000), (1000, 3), (7, 11)])
def test_both_counts_of_a_sliding_window_are_converted(
    store: Any, clock: Clock, rounding: Any, old: int, new: int, passed_s: int
) -> None:
    window = SlidingWindow(store, "w", "5000/minute", rounding=rounding)
    of_old: dict[str, Any] = {"rate": f"{old}/minute"}
    of_new: dict[str, Any] = {"rate": f"{new}/minute"}
    for keep in ("permits", "share", "used"):
        clock.set(3600)
        window.reset("k")
        window.hit("k", old - old // 3, **of_old)
        clock.advance(60 + passed_s)
        window.hit("k", window.peek("k", **of_old).remaining // 2, **of_old)
        left = window.peek("k", **of_old).remaining
        remaining = window.convert("k", f"{old}/minute", **of_new, keep=keep)  # type: ignore[arg-type]
        if keep == "share":
            # `left` is rounded by less than a permit of the old limit.
            assert Fraction((left - 1) * new, old) - 3 <= remaining <= Fraction((left + 1) * new, old) + 1
        else:
            assert remaining == (min(left, new) if keep == "permits" else max(new - (old - left), 0))
        assert window.peek("k", **of_new).remaining == remaining


@pytest.mark.parametrize("keep", ["permits", "share", "used"])
def test_bookings_stay_booked(store: Any, clock: Clock, keep: Any) -> None:
    bucket = TokenBucket(store, "api", "1/second", burst=10)
    bucket.hit("k", 10)
    assert bucket.reserve("k", 5).delay == 5
    assert bucket.convert("k", "1/second", 10, rate="1/second", burst=5, keep=keep) == 0
    # With the share, fifteen of ten become seven and a half of five.
    delay = {"permits": 5.0, "share": 2.5, "used": 10.0}[keep]
    assert bucket.peek("k", 0, rate="1/second", burst=5).reset_after == 5 + delay


@pytest.mark.parametrize("kind", ["fixed", "sliding"])
def test_windows_convert_from_rates_of_their_period(store: Any, kind: str) -> None:
    with pytest.raises(InvalidLimiter, match="its own period"):
        KINDS[kind](store, 9).convert("k", "9/hour")


@every_kind
def test_wrong_arguments_are_refused(store: Any, make: Any) -> None:
    limiter = make(store, 9)
    for keep in ("", "all", 1, ["share"]):
        with pytest.raises(InvalidLimiter, match="keep is 'permits', 'share' or 'used', not"):
            limiter.convert("k", "9/minute", keep=keep)
    with pytest.raises(InvalidRate):
        limiter.convert("k", None)
    with pytest.raises(InvalidKey):
        limiter.convert(1.5, "9/minute")
    store.close()
    with pytest.raises(StoreClosed):
        limiter.convert("k", "9/minute")


@pytest.mark.places(*OVER_REDIS)
def test_other_limiters_can_not_convert(store: Any) -> None:
    others: list[Any] = [
        TokenBucket(store, "a", "9/minute", refill="interval"),
        LeakyBucket(store, "b", "9/minute", 9),
        MinInterval(store, "c", "1s"),
        BucketedWindow(store, "d", "9/minute"),
        Concurrency(store, "e", 9),
    ]
    for limiter in others:
        with pytest.raises(InvalidLimiter, match="a FixedWindow and a SlidingWindow can"):
            limiter.convert("k", "9/minute")

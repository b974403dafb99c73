"""`convert` of windows: what a key keeps of its window when its limit changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import FixedWindow, InvalidKey, InvalidLimiter, InvalidRate, SlidingWindow, Store, StoreClosed
from forebay.testing import ManualClock

KINDS: Final[dict[str, Any]] = {
    "fixed": lambda store, limit: FixedWindow(store, "w", f"{limit}/minute"),
    "first": lambda store, limit: FixedWindow(store, "w", f"{limit}/minute", align="first"),
    "stagger": lambda store, limit: FixedWindow(store, "w", f"{limit}/minute", align="stagger"),
    "sliding": lambda store, limit: SlidingWindow(store, "w", f"{limit}/minute"),
    "rounded up": lambda store, limit: SlidingWindow(store, "w", f"{limit}/minute", rounding="up"),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    # The clock stands at the beginning of a minute's window, and of an hour's.
    clock.set(3600)
    with Store.private(keys=100, clock=clock) as store:
        yield store


@every_kind
@pytest.mark.parametrize(("keep", "remaining"), [("permits", 20), ("share", 8), ("used", 0)])
def test_a_lower_limit(store: Store, make: Any, keep: Any, remaining: int) -> None:
    window = make(store, 100)
    assert window.hit("k", 60).remaining == 40
    assert window.convert("k", "100/minute", rate="20/minute", keep=keep) == remaining
    assert window.peek("k", rate="20/minute").remaining == remaining
    assert window.peek("other", rate="20/minute").remaining == 20


@every_kind
@pytest.mark.parametrize(("keep", "remaining"), [("permits", 8), ("share", 40), ("used", 88)])
def test_a_higher_limit(store: Store, make: Any, keep: Any, remaining: int) -> None:
    window = make(store, 100)
    assert window.hit("k", 12, rate="20/minute").remaining == 8
    assert window.convert("k", "20/minute", keep=keep) == remaining
    assert window.peek("k").remaining == remaining


@every_kind
def test_a_share_is_rounded_against_the_key(store: Store, make: Any) -> None:
    window = make(store, 100)
    window.hit("k", rate="3/minute")
    assert window.convert("k", "3/minute", keep="share") == 66
    assert window.convert("k", "100/minute", rate="3/minute", keep="share") == 1


@every_kind
def test_a_window_keeps_what_was_used_by_default(store: Store, make: Any) -> None:
    window = make(store, 100)
    window.hit("k", 30)
    before = window.peek("k").reset_after
    assert window.convert("k", "100/minute", rate="40/minute") == 10
    assert window.peek("k").reset_after == before


@every_kind
@pytest.mark.parametrize("keep", ["permits", "share", "used"])
def test_a_key_that_has_used_nothing_has_the_new_limit(store: Store, clock: ManualClock, make: Any, keep: Any) -> None:
    window = make(store, 100)
    window.hit("back", 5)
    clock.advance(180)
    for key in ("new", "back"):
        assert window.convert(key, "100/minute", rate="7/minute", keep=keep) == 7
    assert store.stats().live_keys == 0


@every_kind
@pytest.mark.parametrize("keep", ["permits", "share"])
def test_a_converted_window_ends_when_it_would_have(store: Store, clock: ManualClock, make: Any, keep: Any) -> None:
    window = make(store, 100)
    window.hit("k", 60)
    end_ns = window.peek("k").reset_after_ns
    window.convert("k", "100/minute", rate="100/minute", keep=keep)
    assert window.peek("k").reset_after_ns == end_ns
    assert window.peek("k").remaining == 40


def test_a_window_by_the_calendar(store: Store) -> None:
    quota = FixedWindow(store, "q", "1000/month", align="calendar", timezone="Europe/Berlin")
    quota.hit("k", 600)
    assert quota.convert("k", "1000/month", rate="100/month", keep="share") == 40
    with pytest.raises(InvalidLimiter, match="its own unit"):
        quota.convert("k", "1000/day")


limits = st.integers(1, 5000)


@pytest.mark.parametrize("keep", ["permits", "share", "used"])
@pytest.mark.parametrize("rounding", ["up", "down"])
@given(old=limits, new=limits, before=st.integers(1, 5000), cost=st.integers(0, 5000), passed_s=st.integers(0, 59))
def test_both_counts_of_a_sliding_window_are_converted(
    keep: Any, rounding: Any, old: int, new: int, before: int, cost: int, passed_s: int
) -> None:
    clock = ManualClock(3600)
    with Store.private(keys=10, clock=clock) as store:
        window = SlidingWindow(store, "w", "5000/minute", rounding=rounding)
        of_old: dict[str, Any] = {"rate": f"{old}/minute"}
        of_new: dict[str, Any] = {"rate": f"{new}/minute"}
        window.hit("k", min(before, old), **of_old)
        clock.advance(60 + passed_s)
        if left := window.peek("k", **of_old).remaining:
            window.hit("k", min(cost, left), **of_old)
        left = window.peek("k", **of_old).remaining
        remaining = window.convert("k", f"{old}/minute", **of_new, keep=keep)
        match keep:
            case _ if left == old:
                assert remaining == new
            case "permits":
                assert remaining == min(left, new)
            case "share":
                # `left` is rounded by less than a permit of the old limit.
                assert (left - 1) * new // old - 2 <= remaining <= -(-(left + 1) * new // old) + 1
            case "used":
                assert remaining == max(new - (old - left), 0)
        assert remaining == 0 or window.hit("k", remaining, **of_new)
        assert remaining == new or not window.hit("k", **of_new)
        # None of it lasts longer than it would have.
        clock.advance(120)
        assert window.peek("k", **of_new).remaining == new


@every_kind
@pytest.mark.parametrize("keep", ["", "all", None, 1, ["share"]])
def test_what_is_kept_is_one_of_three(store: Store, make: Any, keep: Any) -> None:
    with pytest.raises(InvalidLimiter, match="keep is 'permits', 'share' or 'used', not"):
        make(store, 5).convert("k", "5/minute", keep=keep)


@every_kind
def test_rates_are_those_of_the_limiter(store: Store, make: Any) -> None:
    window = make(store, 9)
    with pytest.raises(InvalidRate):
        window.convert("k", None)
    with pytest.raises(InvalidLimiter, match="its own period"):
        window.convert("k", "9/hour")
    with pytest.raises(InvalidLimiter, match="make it with the largest of its rates"):
        window.convert("k", "1000000000/minute")
    with pytest.raises(InvalidKey):
        window.convert(1.5, "9/minute")
    store.close()
    with pytest.raises(StoreClosed):
        window.convert("k", "9/minute")


@pytest.mark.parametrize("kind", ["fixed", "sliding"])
def test_a_limit_that_counts_in_fewer_bits_has_states_of_its_own(store: Store, kind: str) -> None:
    """Such a limit can't find the key, and its error names the remedy."""
    small = KINDS[kind](store, 5)
    with pytest.raises(InvalidLimiter, match="make it with the largest of its rates"):
        small.convert("k", "100000000/minute")


def test_charges_of_other_processes_count_before_or_after(in_child: Any) -> None:
    with Store.private(keys=10, clock=ManualClock(3600)) as store:
        window = FixedWindow(store, "w", "1000/hour")

        def charge() -> int:
            return sum(window.allow("k") for _ in range(400))

        def convert() -> int:
            for _ in range(300):
                window.convert("k", "1000/hour", keep="permits")
            return charge()

        assert in_child(charge) + convert() == 800
        assert window.peek("k").remaining == 200

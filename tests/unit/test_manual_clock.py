"""`ManualClock`, for tests of code that uses forebay."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest

from forebay import ClockMismatch, InvalidRate, Store, TokenBucket
from forebay.testing import ManualClock


def test_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock()
    assert clock.now() == 0.0
    with Store.private(keys=1, clock=clock) as store:
        limiter = TokenBucket(store, "api", "1/second")
        assert [limiter.allow("k") for _ in range(3)] == [True, False, False]
        assert clock.now() == 0.0
        clock.advance(1)
        assert clock.now() == 1.0
        assert [limiter.allow("k") for _ in range(3)] == [True, False, False]
        clock.set(100)
        assert clock.now() == 100.0
        assert limiter.hit("k").reset_after == 1.0


@pytest.mark.parametrize("bound", [False, True])
def test_manual_clock_is_exact_to_the_nanosecond(bound: bool) -> None:
    clock = ManualClock(1)
    with Store.private(keys=1, clock=clock if bound else "monotonic"):
        for _ in range(10):
            clock.advance(0.1)
        assert clock.now() == 2.0
        clock.advance(1e-9)
        assert clock.now() == 2.000000001
        clock.set(Fraction(10, 3))  # type: ignore[arg-type]
        assert clock.now() == 3.333333333
        clock.advance(0)
        assert clock.now() == 3.333333333


def test_only_set_moves_a_manual_clock_back() -> None:
    clock = ManualClock(10)
    with Store.private(keys=1, clock=clock) as store:
        limiter = TokenBucket(store, "api", "1/second")
        assert limiter.allow("k")
        clock.set(5)
        assert clock.now() == 5.0
        # A charge is kept.
        assert limiter.hit("k").retry_after == 6.0
        assert limiter.hit("l").reset_after == 1.0
        with pytest.raises(ValueError, match="goes back by set"):
            clock.advance(-1)
        clock.set(11)
        assert limiter.allow("k")


@pytest.mark.parametrize("seconds", [-1, -1e-9, float("nan"), float("inf"), float("-inf"), 4e9, 1e300])
def test_manual_clock_refuses_times_out_of_range(seconds: float) -> None:
    with pytest.raises(InvalidRate, match=r"at least 0|time is from 0"):
        ManualClock(seconds)
    clock = ManualClock(7)
    with Store.private(keys=1, clock=clock):
        for move in (clock.set, clock.advance):
            with pytest.raises(InvalidRate, match=r"at least 0|time is from 0"):
                move(seconds)
        assert clock.now() == 7.0


@pytest.mark.parametrize("time", [None, "1", "soon", b"1s", [1], True], ids=repr)
def test_manual_clock_refuses_values_that_are_no_time(time: Any) -> None:
    clock = ManualClock(7)
    for move in (ManualClock, clock.set, clock.advance):
        with pytest.raises(InvalidRate, match=r"a length of time of at least 0, not .*500 ms"):
            move(time)
    assert clock.now() == 7.0


@pytest.mark.parametrize("minute", ["1 minute", "60s", 60, 60.0, timedelta(minutes=1)], ids=repr)
def test_manual_clock_takes_times_of_every_form(minute: Any) -> None:
    clock = ManualClock(minute)
    assert clock.now() == 60.0
    clock.advance(minute)
    assert clock.now() == 120.0
    clock.set(minute)
    assert clock.now() == 60.0


def test_manual_clock_refuses_to_pass_its_last_time() -> None:
    clock = ManualClock()
    with Store.private(keys=1, clock=clock):
        while clock.now() < 1e9:
            clock.advance(0.9e9)
        with pytest.raises(ValueError, match="time is from 0"):
            clock.advance(3e9)


def test_one_clock_moves_several_stores() -> None:
    clock = ManualClock(50)
    with Store.private(keys=1, clock=clock) as one, Store.private(keys=1, clock=clock) as two:
        limiters = [TokenBucket(store, "api", "1/second") for store in (one, two)]
        for _ in range(3):
            assert [limiter.allow("k") for limiter in limiters] == [True, True]
            assert [limiter.allow("k") for limiter in limiters] == [False, False]
            clock.advance(1)
        assert clock.now() == 53.0


def test_manual_clock_continues_at_its_segments_time(store_name: str) -> None:
    first = ManualClock(50)
    with Store(store_name, keys=1, clock=first) as store:
        first.advance(25)
        late = ManualClock(10)
        with Store(store_name, keys=1, clock=late) as again:
            assert late.now() == first.now() == 75.0
            limiters = [TokenBucket(opened, "api", "1/second") for opened in (store, again)]
            assert [limiter.allow("k") for limiter in limiters] == [True, False]
            # The time is the segment's, so each clock moves both.
            late.advance(1)
            assert first.now() == 76.0
            assert [limiter.allow("k") for limiter in limiters] == [True, False]
            first.advance(1)
            assert late.now() == 77.0
    third = ManualClock()
    with Store(store_name, keys=1, clock=third):
        assert third.now() == 77.0


def test_clock_that_joins_a_later_segment_moves_its_other_stores(store_name: str) -> None:
    first = ManualClock(50)
    both = ManualClock(10)
    with Store(store_name, keys=1, clock=first), Store.private(keys=1, clock=both) as other:
        limiter = TokenBucket(other, "api", "1/second")
        assert limiter.allow("k")
        with Store(store_name, keys=1, clock=both):
            assert both.now() == 50.0
            assert limiter.allow("k")


def test_child_sees_its_parents_clock_move(in_child: Any) -> None:
    clock = ManualClock(1)
    with Store.private(keys=1, clock=clock) as store:
        limiter = TokenBucket(store, "api", "1/second")
        assert in_child(lambda: limiter.allow("k"))
        assert not limiter.allow("k")
        in_child(lambda: clock.advance(1))
        assert clock.now() == 2.0
        assert limiter.allow("k")


def test_segment_keeps_its_kind_of_clock(store_name: str) -> None:
    with Store(store_name, keys=1, clock=ManualClock()):
        with pytest.raises(ClockMismatch) as caught:
            Store(store_name, keys=1)
        assert "manual" in caught.value.found
        assert "monotonic" in caught.value.expected
    Store.unlink(store_name)
    clock = ManualClock(5)
    with Store(store_name, keys=1):
        with pytest.raises(ClockMismatch):
            Store(store_name, keys=1, clock=clock)
        assert clock.now() == 5.0

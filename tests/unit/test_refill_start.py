"""`TokenBucket(refill="interval", start=...)`: when periods start."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest

from forebay import InvalidLimiter, Store, TokenBucket
from forebay.testing import ManualClock

WEEK = timedelta(weeks=1)
MONDAY_AT_SIX = datetime(2026, 1, 5, 6, tzinfo=UTC)
WEDNESDAY = datetime(2026, 1, 7, 12, 34, 56, tzinfo=UTC)


def bucket_at(store: Store, start: Any, rate: str = "3/week") -> TokenBucket:
    return TokenBucket(store, "api", rate, refill="interval", start=start)


@pytest.mark.parametrize("weeks", [0, 1, 2000, -1, -2000])
def test_periods_start_at_whole_periods_before_and_after(weeks: int) -> None:
    clock = ManualClock(WEDNESDAY.timestamp())
    with Store.private(keys=10, clock=clock) as store:
        limiter = bucket_at(store, MONDAY_AT_SIX + weeks * WEEK)
        assert limiter.hit("k", 3).reset_after == (MONDAY_AT_SIX + WEEK - WEDNESDAY).total_seconds()
        clock.set((MONDAY_AT_SIX + WEEK).timestamp() - 1)
        assert limiter.hit("k").retry_after_ns == 10**9
        clock.set((MONDAY_AT_SIX + WEEK).timestamp())
        assert limiter.hit("k", 3).reset_after == WEEK.total_seconds()


def test_a_start_in_another_time_zone_is_the_same_moment() -> None:
    there = MONDAY_AT_SIX.astimezone(timezone(timedelta(hours=-5)))
    with Store.private(keys=10, clock=ManualClock(WEDNESDAY.timestamp())) as store:
        assert bucket_at(store, there).hit("k", 3)
        assert not bucket_at(store, MONDAY_AT_SIX + 5 * WEEK).allow("k"), "they share their state"
        assert bucket_at(store, MONDAY_AT_SIX + timedelta(microseconds=1)).hit("k", 3), "another start, another state"


def test_a_start_at_a_multiple_of_the_period_is_the_default() -> None:
    with Store.private(keys=10) as store:
        assert bucket_at(store, datetime(1970, 1, 1, tzinfo=UTC), "3/day").hit("k", 3)
        assert not bucket_at(store, None, "3/day").allow("k")


def test_the_start_is_shown() -> None:
    with Store.private(keys=10) as store:
        limiter = bucket_at(store, MONDAY_AT_SIX)
        assert limiter.start == MONDAY_AT_SIX
        assert "start='2026-01-05T06:00:00+00:00'" in repr(limiter)
        assert bucket_at(store, None).start is None


class NoOffset(tzinfo):
    def utcoffset(self, when: datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    "start",
    [
        datetime(2026, 1, 5),
        datetime(2026, 1, 5, tzinfo=NoOffset()),
        "2026-01-05",
        1_767_592_800,
        MONDAY_AT_SIX.date(),
        True,
    ],
)
def test_a_start_is_a_datetime_with_a_time_zone(start: Any) -> None:
    with (
        Store.private(keys=10) as store,
        pytest.raises(InvalidLimiter, match="the start of limiter 'api' is a datetime with a time zone, not"),
    ):
        bucket_at(store, start)


def test_a_start_is_for_intervals() -> None:
    with Store.private(keys=10) as store:
        for initial in (None, 1):
            with pytest.raises(InvalidLimiter, match="start= is for refill='interval'"):
                TokenBucket(store, "api", "3/week", initial=initial, start=MONDAY_AT_SIX)

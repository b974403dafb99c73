"""Windows by the calendar: their edges against a walk through the hours of a zone, and a limiter at known edges."""

from __future__ import annotations

import sys
import zoneinfo
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any, Final
from zoneinfo import ZoneInfo

import pytest

from forebay import AllOf, FixedWindow, InvalidLimiter, InvalidRate, Store, TokenBucket
from forebay.calendars import Calendar
from forebay.testing import ManualClock

NS: Final = 1_000_000_000
QUARTER_S: Final = 900

# Clocks change at midnight in Sao Paulo and Havana, by half an hour on Lord Howe; Apia left out 30 December 2011.
ZONES: Final = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Sao_Paulo",
    "America/Havana",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
    "Pacific/Apia",
]


def seconds(*fields: int, zone: str = "UTC") -> int:
    return int(datetime(*fields, tzinfo=ZoneInfo(zone)).timestamp())  # type: ignore[misc, arg-type]


def first_moments(zone: str, first_year: int, last_year: int) -> dict[date, int]:
    """Each date's first moment, by a walk through the quarter hours, at which all these zones change their clocks."""
    found: dict[date, int] = {}
    latest = date.min
    for second in range(seconds(first_year, 1, 1) - 86_400, seconds(last_year + 1, 1, 2), QUARTER_S):
        day = datetime.fromtimestamp(second, ZoneInfo(zone)).date()
        if day > latest:
            found[day], latest = second, day
    return found


@pytest.mark.parametrize("zone", ZONES)
def test_windows_begin_at_the_first_moment_of_their_first_date(zone: str) -> None:
    moments = first_moments(zone, 2007, 2012)
    days = [day for day in moments if 2007 <= day.year <= 2012]
    assert date(2008, 2, 29) in days
    assert (date(2011, 12, 30) in days) is (zone != "Pacific/Apia")
    for unit, firsts in {
        "day": days,
        "week": [day for day in days if day.weekday() == 0],
        "month": [day for day in days if day.day == 1],
        "year": [day for day in days if (day.month, day.day) == (1, 1)],
    }.items():
        edges = [moments[day] * NS for day in firsts]
        calendar = Calendar(unit, zone)
        assert calendar.edges_ns(edges[0], len(edges) - 1) == edges
        for begin_ns, end_ns in pairwise(edges):
            assert calendar.edges_ns(end_ns - 1, 1) == [begin_ns, end_ns]
            assert end_ns - begin_ns > calendar.shortest_ns


def test_days_have_23_and_25_hours_and_months_28_to_31_days() -> None:
    def hours(unit: str, *day: int) -> float:
        begin_ns, end_ns = Calendar(unit, "Europe/Berlin").edges_ns(seconds(*day, 12, zone="Europe/Berlin") * NS, 1)
        return (end_ns - begin_ns) / (3600 * NS)

    assert [hours("day", *day) for day in ((2026, 3, 28), (2026, 3, 29), (2026, 10, 25))] == [24, 23, 25]
    assert [hours("month", 2027, 2, 5), hours("month", 2028, 2, 5)] == [28 * 24, 29 * 24]
    assert [hours("month", 2026, 3, 5), hours("month", 2026, 10, 5)] == [31 * 24 - 1, 31 * 24 + 1]
    assert [hours("year", 2027, 6, 1), hours("year", 2028, 6, 1)] == [365 * 24, 366 * 24]


@pytest.mark.parametrize(
    ("rate", "begins", "ends"),
    [
        ("2/day", (2026, 3, 29), (2026, 3, 30)),
        ("2 per day", (2026, 10, 25), (2026, 10, 26)),
        ("2/week", (2026, 3, 23), (2026, 3, 30)),
        ("2/month", (2028, 2, 1), (2028, 3, 1)),
        ("2 / 1 year", (2028, 1, 1), (2029, 1, 1)),
    ],
)
def test_limit_holds_from_edge_to_edge(rate: str, begins: tuple[int, ...], ends: tuple[int, ...]) -> None:
    begin_s, end_s = (seconds(*day, zone="Europe/Berlin") for day in (begins, ends))
    clock = ManualClock(begin_s - 1)
    with Store.private(keys=9, clock=clock) as store:
        window = FixedWindow(store, "quota", rate, align="calendar", timezone="Europe/Berlin")
        assert [window.allow("k") for _ in range(3)] == [True, True, False]
        assert window.hit("k").retry_after == 1.0
        clock.set(begin_s)
        decision = window.hit("k")
        assert (decision.allowed, decision.remaining, decision.reset_after_ns) == (True, 1, (end_s - begin_s) * NS)
        clock.set(end_s - 0.5)
        assert [window.allow("k") for _ in range(2)] == [True, False]
        assert window.hit("k").retry_after_ns == NS // 2
        clock.set(end_s)
        assert window.peek("k").remaining == 2


def test_windows_go_on_for_years_and_a_clock_that_is_set_back_stays_in_the_later_window() -> None:
    clock = ManualClock(seconds(1970, 1, 1, 0, 30))
    with Store.private(keys=9, clock=clock) as store:
        window = FixedWindow(store, "quota", "2/day", align="calendar", timezone="America/New_York")
        for day in range(0, 20_000, 97):
            noon = datetime(1970, 1, 2, 17, tzinfo=UTC) + timedelta(days=day)
            clock.set(noon.timestamp())
            assert [window.allow("k") for _ in range(3)] == [True, True, False]
        clock.set(noon.timestamp() - 10 * 86_400)
        denied = window.hit("k")
        assert (denied.allowed, denied.retry_after_ns) == (False, denied.reset_after_ns)
        assert 10 * 86_400 < denied.retry_after < 11 * 86_400
        clock.advance(denied.retry_after)
        assert window.hit("k").remaining == 1


@pytest.mark.parametrize(
    "charge",
    [
        lambda window: window.hit("k", 2, rate="2/day"),
        lambda window: window.reserve("k", 2, rate="2/day"),
        lambda window: window.take_up_to("k", 2),
    ],
)
@pytest.mark.parametrize("kind", ["manual", "time"])
def test_a_process_that_was_idle_for_longer_than_it_knows_windows_counts_its_first_request(
    charge: Callable[[FixedWindow], object], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_s = seconds(2026, 1, 1)
    clock = ManualClock(begin_s)
    monkeypatch.setattr("time.time", clock.now)
    with Store.private(keys=9, clock=clock if kind == "manual" else "time") as store:
        window = FixedWindow(store, "quota", "2/day", align="calendar", timezone="UTC")
        clock.set(begin_s + 100 * 86_400 + 3600)
        charge(window)
        assert not window.allow("k")
        clock.set(begin_s + 200 * 86_400 + 3600)
        assert window.peek("k").remaining == 2


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Pacific/Apia"])
@pytest.mark.parametrize("unit", ["day", "week", "month", "year"])
def test_a_clock_that_goes_to_and_fro_finds_the_end_of_each_window(unit: str, zone: str) -> None:
    """Windows differ in length: the end of a longer one must not be taken for that of a shorter one before it."""
    begin_ns = seconds(2011, 1, 1, zone=zone) * NS
    edges = [edge_ns // NS for edge_ns in Calendar(unit, zone).edges_ns(begin_ns, 15 if unit == "year" else 40)]
    clock = ManualClock(edges[0])
    with Store.private(keys=9, clock=clock) as store:
        window = FixedWindow(store, "quota", f"2/{unit}", align="calendar", timezone=zone)
        for before_s, edge_s, after_s in zip(edges, edges[1:], edges[2:], strict=False):
            for now_s in (edge_s, edge_s - 1, before_s, edge_s - 1, after_s - 1, edge_s - 1, edge_s, before_s):
                clock.set(now_s)
                end_s = edge_s if now_s < edge_s else after_s
                fresh = window.hit(("k", before_s, now_s, end_s), 0)
                assert fresh.remaining == 2
                used = window.hit(("used", edge_s, now_s), 2)
                assert used.reset_after_ns == (end_s - now_s) * NS
                window.reset(("used", edge_s, now_s))


def test_all_stores_of_a_name_have_the_same_windows(name: str) -> None:
    clock = ManualClock(seconds(2026, 5, 31, 22, 30))
    with Store(name, keys=9, clock=clock) as one, Store(name, keys=9, clock=clock) as other:
        berlin, again = (
            FixedWindow(store, "q", "3/month", align="calendar", timezone="Europe/Berlin") for store in (one, other)
        )
        assert [berlin.hit("k").remaining, again.hit("k").remaining] == [2, 1]
        # June has begun in Berlin, and not in London.
        london = FixedWindow(one, "london", "3/month", align="calendar", timezone="Europe/London")
        assert london.hit("k").reset_after == 1800.0
        assert berlin.peek("k").reset_after_ns == (seconds(2026, 6, 30, 22) - seconds(2026, 5, 31, 22, 30)) * NS


def test_calendar_windows_work_as_others(store: Store) -> None:
    window = FixedWindow(store, "quota", "5/month", align="calendar", timezone="UTC")
    assert repr(window) == "<FixedWindow 'quota' 5 per month align='calendar' timezone='UTC'>"
    assert (window.align, window.timezone, window.rate.limit) == ("calendar", "UTC", 5)
    assert type(window) is FixedWindow
    assert window.allow_many(["a", "b", "a"], [5, 1, 1]) == [True, True, False]
    assert window.hit("a", 2, rate="7/month").remaining == 0
    with pytest.raises(InvalidLimiter, match="own unit"):
        window.hit("a", rate="7/day")
    window.refund("b")
    assert window.take_up_to("b", 9) == 5
    assert AllOf(window, TokenBucket(store, "b", "9/second")).hit("c", 4).remaining == 1
    assert window.wait("c", timeout=0)
    assert not window.reserve("c")


@pytest.mark.parametrize("rate", ["5/hour", "5/2 months", "5", "0/day", f"{2**40 + 1}/day", 5, None])
def test_wrong_rates_by_the_calendar_are_refused(store: Store, rate: Any) -> None:
    with pytest.raises(InvalidRate):
        FixedWindow(store, "quota", rate, align="calendar", timezone="UTC")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": "calendar"}, "needs a time zone"),
        ({"align": "calendar", "timezone": "Europe/Atlantis"}, "no time zone 'Europe/Atlantis'"),
        ({"align": "calendar", "timezone": "../etc/passwd"}, "no time zone"),
        ({"align": "calendar", "timezone": 1}, "a time zone is a name"),
        ({"timezone": "UTC"}, "for windows by the calendar"),
        ({"align": "moon"}, "align is"),
    ],
)
def test_wrong_calendars_are_refused(store: Store, options: Any, message: str) -> None:
    with pytest.raises(InvalidLimiter, match=message):
        FixedWindow(store, "quota", "5/day", **options)


def test_without_data_of_time_zones_the_error_names_the_remedy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tzdata", "tzdata.zoneinfo", "tzdata.zoneinfo.Europe"):
        monkeypatch.setitem(sys.modules, module, None)
    zoneinfo.reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    try:
        with pytest.raises(InvalidLimiter, match="install the package tzdata"):
            FixedWindow(store, "quota", "5/day", align="calendar", timezone="Europe/Berlin")
        assert FixedWindow(store, "quota", "5/day", align="calendar", timezone="UTC").allow("k")
    finally:
        zoneinfo.reset_tzpath()
        ZoneInfo.clear_cache()

"""Windows of a calendar: days, weeks, months and years as a named time zone counts them.

A window begins at the first moment of its first date in that zone. So a day has 23 or 25 hours where clocks change, and
a month 28 to 31 days. A calendar is a pure function of the time: all processes with one version of the time zones'
rules have the same windows.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, Final

from forebay.errors import InvalidLimiter, InvalidRate, short_repr
from forebay.rate import MAX_LIMIT, NS, Rate

__all__ = ["Calendar", "calendar_of"]

DAY_NS: Final = 86_400 * NS
# In days, the usual length of the longest window of a unit.
_DAYS: Final = {"day": 1, "week": 7, "month": 31, "year": 366}
# No window since 1970 is shorter, in any zone. A zone that skips a date makes its week, month and year a day shorter;
# there is no window for the date itself.
_SHORTEST_NS: Final = {"day": DAY_NS // 2, "week": 5 * DAY_NS, "month": 26 * DAY_NS, "year": 363 * DAY_NS}
_RATE: Final = re.compile(
    r"\s*(?P<limit>\d{1,18}(?:_\d{1,18}){0,9})\s*(?:/|\bper\b)\s*(?:1\s*)?(?P<unit>day|week|month|year)s?\s*",
    re.ASCII | re.IGNORECASE,
)
_FORMS: Final = 'the accepted forms are "1000/month" and "1000 per month", with the units day, week, month and year'
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Calendar:
    """The windows of one unit in one time zone. Immutable."""

    def __init__(self, unit: str, timezone: str) -> None:
        self.unit, self.timezone = unit, timezone
        self.shortest_ns = _SHORTEST_NS[unit]
        self._zone = _zone_of(timezone)

    def rate(self, limit: int) -> Rate:
        """The limit per the longest window of the usual length."""
        return Rate(limit, timedelta(days=_DAYS[self.unit]))

    def edges_ns(self, time_ns: int, count: int) -> list[int]:
        """The begin of the window at a time in ns since 1970, and the ends of `count` windows from it on, ascending."""
        time_s = time_ns // NS
        try:
            first = self._number_of((_EPOCH + timedelta(seconds=time_s)).astimezone(self._zone).date()) - 1
            edges: list[int] = []
            # One number more for each date that a zone has left out.
            for number in range(first, first + count + 5):
                begin_s = self._begin_s(self._date_of(number))
                if not edges or begin_s > edges[-1]:
                    edges.append(begin_s)
        except (OverflowError, ValueError):
            raise InvalidLimiter("the calendar of Python's datetime has no such time: set the clock back") from None
        at = bisect_right(edges, time_s)
        return [edge_s * NS for edge_s in edges[at - 1 : at + count]]

    def _number_of(self, day: date) -> int:
        """The number of the window that a date is in."""
        if self.unit == "day":
            return day.toordinal()
        if self.unit == "week":  # from Monday on: 0001-01-01, of ordinal 1, is one
            return (day.toordinal() - 1) // 7
        return day.year * 12 + day.month - 1 if self.unit == "month" else day.year

    def _date_of(self, number: int) -> date:
        """The first date of a window."""
        if self.unit == "day":
            return date.fromordinal(number)
        if self.unit == "week":
            return date.fromordinal(7 * number + 1)
        return date(number // 12, number % 12 + 1, 1) if self.unit == "month" else date(number, 1, 1)

    def _begin_s(self, day: date) -> int:
        """The first moment of a date, in seconds since 1970.

        That is the first of two midnights; or where clocks skip midnight, by their time before, the end of the gap.
        """
        midnight = datetime(day.year, day.month, day.day, tzinfo=self._zone, fold=0)
        return (midnight.astimezone(UTC) - _EPOCH) // timedelta(seconds=1)


def _zone_of(name: object) -> tzinfo:
    if name == "UTC":  # which needs no data of time zones
        return UTC
    if not isinstance(name, str):
        raise InvalidLimiter(f'a time zone is a name, such as "Europe/Berlin" or "UTC", not {short_repr(name)}')
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # seldom needed, and slow to import

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidLimiter(
            f"there is no time zone {short_repr(name)}: take a name such as Europe/Berlin; without the system's time "
            "zones, install the package tzdata"
        ) from None


def calendar_of(rate: object, timezone: Any) -> tuple[Calendar, int]:
    """The calendar of a rate such as ``"1000/month"``, and its limit. Raises ``InvalidRate``, ``InvalidLimiter``."""
    if not isinstance(rate, str):
        raise InvalidRate(f"a rate by the calendar is text, not {short_repr(rate)}; {_FORMS}")
    unit, limit = _parsed(rate)
    if timezone is None:
        raise InvalidLimiter('a window by the calendar needs a time zone: timezone="Europe/Berlin", or "UTC"')
    return Calendar(unit, timezone), limit


@lru_cache(maxsize=1024)
def _parsed(rate: str) -> tuple[str, int]:
    match = _RATE.fullmatch(rate)
    if match is None:
        raise InvalidRate(f"{short_repr(rate)} is not a rate by the calendar; {_FORMS}")
    limit = int(match["limit"])
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRate(f"a rate by the calendar allows 1 to 2**40 = {MAX_LIMIT}, not {short_repr(limit)}")
    return match["unit"].lower(), limit

"""Rates: a number of permits per period."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from fractions import Fraction
from functools import lru_cache
from typing import Final, TypeAlias

from forebay.errors import InvalidRate, short_repr

__all__ = ["Duration", "Rate", "as_byte_count", "as_delay_ns", "as_period_ns", "as_rate", "is_never"]

Duration: TypeAlias = str | float | timedelta
"""A length of time: text like ``"2s"`` or ``"500 ms"``, a number of seconds, or a ``timedelta``."""

NS: Final = 1_000_000_000
MAX_LIMIT: Final = 2**40
MAX_PERIOD_NS: Final = 10 * 31_536_000 * NS
NEVER_NS: Final = 2**63 - 1
"""The time to what never happens by itself: ``retry_after_ns`` of a denial by ``Credits``."""

_UNITS_NS: Final = {
    "millisecond": NS // 1000,
    "second": NS,
    "minute": 60 * NS,
    "hour": 3600 * NS,
    "day": 86_400 * NS,
    "week": 604_800 * NS,
    "year": 31_536_000 * NS,
}
_ABBREVIATIONS: Final = {
    "ms": "millisecond",
    "s": "second",
    "sec": "second",
    "m": "minute",
    "min": "minute",
    "h": "hour",
    "hr": "hour",
    "d": "day",
}
_SIZES: Final = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Their capitals matter: "Mb" is a million bits to some, and a million bytes to others."""
_NUMBER: Final = r"\d{1,18}(?:_\d{1,18}){0,9}"
_BYTES: Final = rf"(?P<limit>{_NUMBER}(?:\.\d{{1,9}})?)(?:\s*(?P<size>(?!per\b)[a-z]+))?"
_RATE: Final = re.compile(
    rf"\s*{_BYTES}\s*(?:/|\bper\b)\s*(?:(?P<count>{_NUMBER}(?:\.\d{{1,9}})?)\s*)?(?P<unit>[a-z]+)\s*",
    re.ASCII | re.IGNORECASE,
)
_SIZE: Final = re.compile(rf"\s*{_BYTES}\s*", re.ASCII | re.IGNORECASE)
_PERIOD: Final = re.compile(
    rf"\s*(?:(?P<count>{_NUMBER}(?:\.\d{{1,9}})?)\s*)?(?P<unit>[a-z]+)\s*", re.ASCII | re.IGNORECASE
)
_PERIOD_FORMS: Final = (
    'the accepted forms are "2s", "500 ms", "1.5 minutes", a number of seconds and a timedelta, with the units '
    "ms, second, minute, hour, day, week and year"
)
_FORMS: Final = (
    'the accepted forms are "100/minute", "5 per 10 seconds", "5/10s" and Rate(5, 10), with the units '
    "ms, second, minute, hour, day, week and year"
)
_SIZE_FORMS: Final = (
    f"sizes have one of the units {', '.join(_SIZES)}, in these capitals, and are whole numbers of bytes"
)


class Rate:
    """``limit`` permits per period of ``period_ns`` nanoseconds.

    ``Rate(5, 10)`` is five per ten seconds. The period is a number of seconds, a ``timedelta`` or text like
    ``"10 minutes"``. ``limit`` is a whole number of at least 1. The fastest rate is one permit per nanosecond, the
    clock's resolution; the longest period is ten years. Anything else raises ``InvalidRate``. Immutable and hashable.
    """

    __slots__ = ("limit", "period_ns")

    limit: int
    period_ns: int

    def __init__(self, limit: int, period: Duration) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise InvalidRate(f"the limit of a rate is a whole number, not {short_repr(limit)}; {_FORMS}")
        period_ns = _period_ns(period)
        if limit < 1:
            raise InvalidRate(f"a rate allows at least 1 per period, not {short_repr(limit)}; {_FORMS}")
        if not 1 <= period_ns <= MAX_PERIOD_NS:
            raise InvalidRate(f"the period of a rate is from 1 ns to 10 years, not {short_repr(period_ns)} ns")
        if limit > period_ns or limit > MAX_LIMIT:
            raise InvalidRate(
                f"{short_repr(limit)} per {_period_text(period_ns)} is too fast: the clock has "
                f"nanoseconds, so a rate is "
                f"at most 1_000_000_000 per second; and its limit is at most 2**40 = {MAX_LIMIT}"
            )
        object.__setattr__(self, "limit", limit)
        object.__setattr__(self, "period_ns", period_ns)

    @classmethod
    def per_ns(cls, limit: int, period_ns: int) -> Rate:
        """A rate whose period is a whole number of nanoseconds."""
        return cls(limit, Fraction(period_ns, NS))  # type: ignore[arg-type]  # a Fraction keeps it exact

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read ``"100/minute"``, ``"5 per 10 seconds"``, ``"5/10s"``; ``"1.5 MiB/second"``, where permits are bytes."""
        match = _RATE.fullmatch(text)
        if match is None or (match["size"] is None and "." in match["limit"]):
            raise InvalidRate(f"{short_repr(text)} is not a rate; {_FORMS}")
        limit = _matched_bytes(match)
        if limit is None:
            raise InvalidRate(f"{short_repr(text)} is not a rate: {_SIZE_FORMS}; {_FORMS}")
        period = _matched_period(match)
        if period is None:
            raise InvalidRate(
                f"{short_repr(text)} is not a rate: there is no unit {short_repr(match['unit'])}; {_FORMS}"
            )
        try:
            return cls(limit, period)  # type: ignore[arg-type]  # a Fraction keeps it exact
        except InvalidRate as error:
            raise InvalidRate(f"{short_repr(text)} is not a rate: {error}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Rate is immutable; make another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Rate is immutable; make another one")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rate):
            return NotImplemented
        return (self.limit, self.period_ns) == (other.limit, other.period_ns)

    def __hash__(self) -> int:
        return hash((self.limit, self.period_ns))

    def __reduce__(self) -> tuple[type[Rate], tuple[int, Fraction]]:
        return Rate, (self.limit, Fraction(self.period_ns, NS))

    def __str__(self) -> str:
        return f"{self.limit} per {_period_text(self.period_ns)}"

    def __repr__(self) -> str:
        return f"Rate.parse({str(self)!r})"


def is_never(duration_ns: int) -> bool:
    """Whether it is `NEVER_NS`, or that in whole microseconds. No time of a state is so far ahead."""
    return duration_ns >= 2**62


def as_rate(rate: str | Rate) -> Rate:
    """Return a ``Rate`` unchanged, and parse text, with a cache. Raises ``InvalidRate`` for any other value."""
    if isinstance(rate, Rate):
        return rate
    if isinstance(rate, str):
        return _parse(rate)
    raise InvalidRate(f"{short_repr(rate)} is not a rate; {_FORMS}")


_parse = lru_cache(maxsize=1024)(Rate.parse)


def as_byte_count(size: str | int, what: str) -> int:
    """A number of bytes: a whole number, or text like ``"10 MiB"``. `what` begins the error message."""
    count = None
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        count = match and _matched_bytes(match)
    elif isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        count = size
    if count is None:
        raise InvalidRate(f'{what} a number of bytes such as "10 MiB" or 65536, not {short_repr(size)}; {_SIZE_FORMS}')
    return count


def as_period_ns(period: Duration) -> int:
    """A length of time in ns: text like ``"2s"``, a number of seconds or a ``timedelta``; from 1 ns to 10 years."""
    try:
        period_ns = _period_ns(period)
    except InvalidRate:
        raise InvalidRate(f"{short_repr(period)} is not a length of time; {_PERIOD_FORMS}") from None
    if not 1 <= period_ns <= MAX_PERIOD_NS:
        raise InvalidRate(f"a length of time is from 1 ns to 10 years, not {short_repr(period)}; {_PERIOD_FORMS}")
    return period_ns


def as_delay_ns(delay: Duration, what: str) -> int:
    """``as_period_ns`` for a duration that may be 0, or longer than 10 years.

    `what` begins the error message, as in "timeout is None or".
    """
    try:
        delay_ns = _period_ns(delay)
    except InvalidRate:
        delay_ns = -1
    if delay_ns < 0:
        raise InvalidRate(f"{what} a length of time of at least 0, not {short_repr(delay)}; {_PERIOD_FORMS}")
    return delay_ns


@lru_cache(maxsize=1024)
def _text_ns(text: str) -> int:
    match = _PERIOD.fullmatch(text)
    period = _matched_period(match) if match else None
    if period is None:
        raise InvalidRate(f"{short_repr(text)} is not a length of time; {_PERIOD_FORMS}")
    return round(period * NS)


def _matched_period(match: re.Match[str]) -> Fraction | None:
    """The seconds that `count` and `unit` of a match mean; None for an unknown unit."""
    unit = match["unit"].lower()
    unit = _ABBREVIATIONS.get(unit, unit.removesuffix("s"))
    if unit not in _UNITS_NS:
        return None
    return Fraction((match["count"] or "1").replace("_", "")) * _UNITS_NS[unit] / NS


def _matched_bytes(match: re.Match[str]) -> int | None:
    """The whole number that `limit` and `size` of a match mean; None if it isn't whole, or the unit is unknown."""
    factor = _SIZES.get(match["size"] or "B")
    count = None if factor is None else Fraction(match["limit"].replace("_", "")) * factor
    return None if count is None or count.denominator > 1 else count.numerator


def _period_ns(period: Duration | Fraction) -> int:
    if isinstance(period, str):
        return _text_ns(period)
    if isinstance(period, timedelta):
        return period // timedelta(microseconds=1) * 1000
    if isinstance(period, bool) or not isinstance(period, (int, float, Fraction)):
        raise InvalidRate(
            f"the period of a rate is a number of seconds, a timedelta or text, not {short_repr(period)}; {_FORMS}"
        )
    if isinstance(period, float) and not math.isfinite(period):
        raise InvalidRate(f"the period of a rate is finite, not {period}")
    # Equals `round(Fraction(period) * NS)`, in a fifth of the time.
    numerator, denominator = period.as_integer_ratio()
    period_ns, rest = divmod(numerator * NS, denominator)
    return period_ns + (2 * rest > denominator or (2 * rest == denominator and period_ns % 2))


def _period_text(period_ns: int) -> str:
    """The period in its largest whole unit: ``minute``, ``10 seconds``, ``1.5 ms``."""
    for unit, unit_ns in reversed(_UNITS_NS.items()):
        count, rest = divmod(period_ns, unit_ns)
        if count and not rest:
            return unit if count == 1 else f"{count} {unit}s"
    whole, rest = divmod(period_ns, 1_000_000)
    return f"{whole}.{rest:06}".rstrip("0") + " ms"

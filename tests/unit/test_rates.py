"""Rates and durations: every accepted form, and errors that list the accepted forms."""

from __future__ import annotations

import copy
import pickle
from collections import UserString
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest

from forebay import ForebayError, InvalidRate, MinInterval, Rate, Store, TokenBucket
from forebay.rate import as_byte_count, as_period_ns

NS = 1_000_000_000
YEAR_NS = 31_536_000 * NS
HUGE = 10**5000  # more digits than Python converts to text by default


@pytest.mark.parametrize(
    ("text", "limit", "period_ns"),
    [
        ("100/minute", 100, 60 * NS),
        ("5 per 10 seconds", 5, 10 * NS),
        ("5/10s", 5, 10 * NS),
        ("5/10 s", 5, 10 * NS),
        ("  5  /  10  seconds\n", 5, 10 * NS),
        ("5 PER 10 Seconds", 5, 10 * NS),
        ("1_000_000/hour", 1_000_000, 3600 * NS),
        ("7/1_0s", 7, 10 * NS),
        ("3/1.5s", 3, 1_500_000_000),
        ("1 per 0.5 days", 1, 43_200 * NS),
        ("1/0.000000001s", 1, 1),
        ("2/ms", 2, 1_000_000),
        ("2/milliseconds", 2, 1_000_000),
        ("2/s", 2, NS),
        ("2/sec", 2, NS),
        ("2/m", 2, 60 * NS),
        ("2/min", 2, 60 * NS),
        ("2/h", 2, 3600 * NS),
        ("2/hr", 2, 3600 * NS),
        ("2/hours", 2, 3600 * NS),
        ("2/d", 2, 86_400 * NS),
        ("2/days", 2, 86_400 * NS),
        ("2/week", 2, 604_800 * NS),
        ("1/year", 1, YEAR_NS),
        ("1/10 years", 1, 10 * YEAR_NS),
        ("1000000000/second", 10**9, NS),
        ("1099511627776 per hour", 2**40, 3600 * NS),
        ("1 MiB/second", 2**20, NS),
        ("1.5MiB per 10 s", 3 * 2**19, 10 * NS),
        ("1_000 B/s", 1000, NS),
        ("250 kB per minute", 250_000, 60 * NS),
        ("64KiB/m", 2**16, 60 * NS),
        ("0.5 MB/s", 500_000, NS),
        ("1 GB/hour", 10**9, 3600 * NS),
        ("2GiB/day", 2**31, 86_400 * NS),
        ("1TB/day", 10**12, 86_400 * NS),
        ("1 TiB / year", 2**40, YEAR_NS),
    ],
)
def test_rate_accepts_texts(text: str, limit: int, period_ns: int) -> None:
    rate = Rate.parse(text)
    assert (rate.limit, rate.period_ns) == (limit, period_ns)
    assert Rate.parse(str(rate)) == rate


@pytest.mark.parametrize(
    ("limit", "period", "period_ns"),
    [
        (5, 10, 10 * NS),
        (5, 0.25, NS // 4),
        (1, 0.1, 100_000_000),
        (1, Fraction(1, 3), 333_333_333),
        (1, 1e-9, 1),
        (5, timedelta(minutes=2), 120 * NS),
        (1, timedelta(microseconds=1), 1000),
        (1, 315_360_000, 10 * YEAR_NS),
        (10**9, 1, NS),
    ],
)
def test_rate_accepts_numbers(limit: int, period: Any, period_ns: int) -> None:
    rate = Rate(limit, period)
    assert (rate.limit, rate.period_ns) == (limit, period_ns)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "100",
        "100/",
        "/minute",
        "per minute",
        "100 minute",
        "100//minute",
        "100/minute/minute",
        "100 per minute per day",
        "fast",
        "-1/second",
        "+1/second",
        "1.5/second",
        "1e3/second",
        "0x10/second",
        "nan/second",
        "inf/second",
        "1/-1 second",
        "1/1e3 s",
        "1_/s",
        "_1/s",
        "1__0/s",
        "1/fortnight",
        "1/month",
        "1/ss",
        "5per10s",
        "1 mib/second",
        "1 Mb/second",
        "1 KB/second",
        "8 Mbit/second",
        "1 b/second",
        "1.5 B/second",
        "0.1 KiB/second",
        "1. MiB/second",
        "MiB/second",
        "1 MiB",
        "1 MiB MiB/second",
        "1 MiB/s/s",
        "1 per/second",
        "1 requests/second",
        "\u0661/s",
        "1/\u017f",
        "1/s\0",
        "1/s; 2/s",
    ],
)
def test_error_for_a_text_lists_the_accepted_forms(text: str) -> None:
    with pytest.raises(InvalidRate) as caught:
        Rate.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    for form in ('"100/minute"', '"5 per 10 seconds"', '"5/10s"', "Rate(5, 10)", "ms, second, minute, hour, day"):
        assert form in message
    with pytest.raises(InvalidRate), Store.private(keys=1) as store:
        TokenBucket(store, "rates", text)


@pytest.mark.parametrize(
    ("limit", "period"),
    [
        (0, 1),
        (-1, 1),
        (True, 1),
        (1.0, 1),
        ("5", 1),
        (None, 1),
        (float("nan"), 1),
        (2**40 + 1, 315_360_000),
        (2, 1e-9),
        (1_000_000_001, 1),
        (1, 0),
        (1, -1),
        (1, 1e-10),
        (1, True),
        (1, "1"),
        (1, None),
        (1, float("nan")),
        (1, float("inf")),
        (1, float("-inf")),
        (1, 1e308),
        (1, 315_360_000.000000001 + 1),
        (1, timedelta(0)),
        (1, timedelta(days=-1)),
        (1, timedelta.max),
        pytest.param(HUGE, 1, id="huge limit"),
        pytest.param(-HUGE, 1, id="huge negative limit"),
        pytest.param(1, HUGE, id="huge period"),
        pytest.param(1, -HUGE, id="huge negative period"),
        pytest.param(1, Fraction(1, HUGE), id="tiny fraction"),
        pytest.param(1, Fraction(HUGE, 3), id="huge fraction"),
    ],
    ids=repr,
)
def test_numbers_that_make_no_rate_are_refused(limit: Any, period: Any) -> None:
    with pytest.raises(InvalidRate) as caught:
        Rate(limit, period)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "9" * 18 + ("_" + "9" * 18) * 300 + "/s",
        "1/" + "9" * 18 + ("_" + "9" * 18) * 300 + "s",
        "1/" + "s" * 2**20,
        "1" * 2**20,
        "1_" * 2**19 + "/s",
        " " * 2**20,
    ],
    ids=["limit", "count", "unit", "digits", "groups", "spaces"],
)
def test_long_text_is_refused_with_a_short_message(text: str) -> None:
    with pytest.raises(InvalidRate) as caught:
        Rate.parse(text)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["100/0s", "0/minute", "0x/s", "100/11 years", "5/0.0000001 ms"])
def test_error_shows_the_text(text: str) -> None:
    with pytest.raises(InvalidRate, match=f"^'{text}' is not a rate"):
        Rate.parse(text)
    with pytest.raises(InvalidRate, match=r"^a length of time is from 1 ns to 10 years, not '0s'"):
        as_period_ns("0s")


def test_error_for_an_excessive_rate_names_the_bound() -> None:
    with pytest.raises(InvalidRate, match="1_000_000_000 per second"):
        Rate.parse("2000000000/second")
    with pytest.raises(InvalidRate, match="10 years"):
        Rate.parse("1/11 years")


@pytest.mark.parametrize("rate", [None, 5, 5.0, b"5/s", (5, 10), ["5/s"], UserString("5/s"), timedelta(1)])
def test_limiter_refuses_a_rate_of_another_type(rate: Any) -> None:
    with Store.private(keys=1) as store, pytest.raises(InvalidRate, match="100/minute"):
        TokenBucket(store, "rates", rate)


def test_invalid_rate_is_a_value_error_and_a_forebay_error() -> None:
    assert issubclass(InvalidRate, ValueError)
    assert issubclass(InvalidRate, ForebayError)


def test_rate_compares_and_hashes_by_value() -> None:
    rate = Rate(5, 10)
    assert rate == Rate.parse("5/10s") == Rate(5, timedelta(seconds=10))
    assert hash(rate) == hash(Rate.parse("5/10s"))
    assert rate != Rate(10, 20)
    assert rate != "5/10s"
    assert {rate: 1}[Rate(5, 10.0)] == 1
    for name in ("limit", "period_ns", "other"):
        with pytest.raises(AttributeError):
            setattr(rate, name, 1)
    with pytest.raises(AttributeError):
        del rate.limit
    for twin in (copy.copy(rate), copy.deepcopy(rate), pickle.loads(pickle.dumps(rate))):
        assert twin == rate


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (Rate(5, 10), "5 per 10 seconds"),
        (Rate(100, 60), "100 per minute"),
        (Rate(1, 7 * 86_400), "1 per week"),
        (Rate(1, 90), "1 per 90 seconds"),
        (Rate(1, 0.0015), "1 per 1.5 ms"),
        (Rate(1, 1e-9), "1 per 0.000001 ms"),
    ],
)
def test_rate_is_shown_in_the_largest_unit(rate: Rate, shown: str) -> None:
    assert str(rate) == shown
    assert repr(rate) == f"Rate.parse({shown!r})"


@pytest.mark.parametrize(
    ("length", "length_ns"),
    [
        ("2s", 2 * NS),
        ("2 s", 2 * NS),
        (" 2  seconds\n", 2 * NS),
        ("2 SECONDS", 2 * NS),
        ("second", NS),
        ("hour", 3600 * NS),
        ("500 ms", NS // 2),
        ("1.5 minutes", 90 * NS),
        ("1_0 s", 10 * NS),
        ("0.000000001s", 1),
        ("0.000001 ms", 1),
        ("2 hours", 7200 * NS),
        ("1 day", 86_400 * NS),
        ("1 week", 604_800 * NS),
        ("10 years", 10 * YEAR_NS),
        (2, 2 * NS),
        (0.25, NS // 4),
        (1e-9, 1),
        (Fraction(1, 3), 333_333_333),
        (10 * YEAR_NS // NS, 10 * YEAR_NS),
        (timedelta(milliseconds=1.5), 1_500_000),
        (timedelta(days=1), 86_400 * NS),
    ],
)
def test_durations_of_every_form_are_accepted(length: Any, length_ns: int) -> None:
    assert as_period_ns(length) == length_ns
    with Store.private(keys=1) as store:
        assert MinInterval(store, "gap", length).interval_ns == length_ns


@pytest.mark.parametrize(
    "length",
    [
        *("", " ", "s2", "2", "-2s", "+2s", "1e3 s", "2 fortnights", "1 month", "2 s 5 ms", "2s;", "1/s", "nan s"),
        *("0s", "0.0000000001 s", "11 years", "10.1 years", "\u0662 s", "2\u017f", "1_ s", "1__0 s"),
        *(0, -1, 1e-10, float("nan"), float("inf"), 10 * YEAR_NS // NS + 1, 1e300, True, None, b"2s", [2]),
        *(timedelta(0), timedelta(days=-1), timedelta.max, UserString("2s")),
        pytest.param(HUGE, id="huge"),
        pytest.param("9" * 18 + ("_" + "9" * 18) * 300 + "s", id="long"),
        pytest.param("s" * 2**20, id="long unit"),
    ],
    ids=repr,
)
def test_values_that_are_no_duration_are_refused_briefly(length: Any) -> None:
    with pytest.raises(InvalidRate) as caught:
        as_period_ns(length)
    assert len(str(caught.value)) < 1000
    assert '"500 ms"' in str(caught.value)
    with Store.private(keys=1) as store:
        with pytest.raises(InvalidRate):
            MinInterval(store, "gap", length)
        assert store.stats().limiters == {}


def test_error_for_a_duration_lists_the_accepted_forms() -> None:
    with pytest.raises(InvalidRate) as caught:
        as_period_ns("soon")
    for form in ("'soon'", '"2s"', '"500 ms"', '"1.5 minutes"', "timedelta", "ms, second, minute, hour, day, week"):
        assert form in str(caught.value)


def test_rate_of_whole_nanoseconds_is_exact() -> None:
    rate = Rate.per_ns(7, 1_000_000_007)
    assert (rate.limit, rate.period_ns) == (7, 1_000_000_007)
    assert pickle.loads(pickle.dumps(rate)) == rate
    for limit, period_ns in ((0, 1), (1, 0), (2, 1), (1, 10 * YEAR_NS + 1)):
        with pytest.raises(InvalidRate):
            Rate.per_ns(limit, period_ns)


def test_sizes_are_whole_numbers_of_bytes() -> None:
    for size, count in ((0, 0), (7, 7), ("7", 7), ("10 MiB", 10 * 2**20), (" 1.5kB ", 1500), ("0 B", 0)):
        assert as_byte_count(size, "after is") == count
    for wrong in ("", "MiB", "10 mib", "0.3 B", "1.5", "-1", "1e3", "10 MiB/second", -1, True, 1.0, None, b"1"):
        with pytest.raises(InvalidRate, match=r"^after is a number of bytes such as") as caught:
            as_byte_count(wrong, "after is")  # type: ignore[arg-type]
        assert "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, in these capitals" in str(caught.value)


def test_unknown_size_is_named_with_those_that_exist() -> None:
    with pytest.raises(InvalidRate, match=r"^'8 Mb/second' is not a rate: sizes have one of the units B, kB, MB"):
        Rate.parse("8 Mb/second")
    with pytest.raises(InvalidRate, match="too fast"):
        Rate.parse("1 GiB/second")

"""Rates as text: a printed rate parses to itself, and invalid text raises `InvalidRate`."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from fractions import Fraction

import pytest
from bucket_strategies import NS, magnitudes
from hypothesis import example, given
from hypothesis import strategies as st

from forebay import InvalidRate, Rate, Store, TokenBucket

TEN_YEARS_NS = 10 * 31_536_000 * NS
UNITS_NS = {
    "ms": NS // 1000,
    "millisecond": NS // 1000,
    "s": NS,
    "sec": NS,
    "second": NS,
    "m": 60 * NS,
    "min": 60 * NS,
    "minute": 60 * NS,
    "h": 3600 * NS,
    "hr": 3600 * NS,
    "hour": 3600 * NS,
    "d": 86_400 * NS,
    "day": 86_400 * NS,
    "week": 7 * 86_400 * NS,
    "year": 365 * 86_400 * NS,
}

periods_ns = magnitudes(1, TEN_YEARS_NS) | st.builds(
    lambda unit_ns, count: min(unit_ns * count, TEN_YEARS_NS),
    st.sampled_from(list(UNITS_NS.values())),
    st.integers(1, 99),
)
rates = periods_ns.flatmap(
    lambda period_ns: st.builds(Rate, magnitudes(1, min(period_ns, 2**40)), st.just(Fraction(period_ns, NS)))
)
spaces = st.sampled_from(["", " ", "  ", "\t"])
# Texts that resemble rates: the pieces of one in any number and order.
almost_rates = st.lists(
    st.sampled_from(
        ["100", "5", "0", "-1", "1_0", "_", ".5", "1.5", "1e3", "/", "per", " per ", "s", "second", "Minutes", " "]
    )
    | st.text(max_size=2),
    max_size=7,
).map("".join)


@given(rates)
def test_printed_rate_parses_to_the_same_rate(rate: Rate) -> None:
    assert Rate.parse(str(rate)) == rate
    assert eval(repr(rate), {"Rate": Rate}) == rate
    assert hash(Rate.parse(str(rate))) == hash(rate)
    assert pickle.loads(pickle.dumps(rate)) == rate
    assert copy.deepcopy(rate) == copy.copy(rate) == rate


@given(
    limit=st.integers(1, 1000),
    count=st.none() | st.integers(1, 1000),
    unit=st.sampled_from(sorted(UNITS_NS)),
    plural=st.booleans(),
    upper=st.booleans(),
    slash=st.booleans(),
    gaps=st.tuples(spaces, spaces, spaces, spaces, spaces),
)
def test_every_accepted_form_is_parsed(
    limit: int, count: int | None, unit: str, plural: bool, upper: bool, slash: bool, gaps: tuple[str, ...]
) -> None:
    written = unit + "s" if plural and len(unit) > 3 else unit
    between = gaps[1] + "/" + gaps[2] if slash else " " + gaps[1] + "per" + gaps[2] + " "
    text = gaps[0] + str(limit) + between + ("" if count is None else str(count) + gaps[3]) + written + gaps[4]
    period_ns = UNITS_NS[unit] * (count or 1)
    wanted = (limit, period_ns) if period_ns <= TEN_YEARS_NS else None
    try:
        rate = Rate.parse(text.upper() if upper else text)
    except InvalidRate:
        assert wanted is None
    else:
        assert (rate.limit, rate.period_ns) == wanted


@given(st.text() | almost_rates)
@example("1/s\n1/s")
@example("1/s\0")
@example("\u0661/s")
@example("1/\u017f")
def test_other_text_raises_only_invalid_rate(text: str) -> None:
    try:
        rate = Rate.parse(text)
    except InvalidRate:
        return
    assert 1 <= rate.limit <= rate.period_ns <= TEN_YEARS_NS


@given(
    limit=st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3) | magnitudes(1, 2**60),
    period=st.integers()
    | st.floats()
    | st.fractions()
    | st.timedeltas()
    | st.booleans()
    | st.none()
    | st.text(max_size=3),
)
@example(1, timedelta.max)
@example(1, timedelta(microseconds=1))
def test_numbers_that_make_no_rate_raise_only_invalid_rate(limit: object, period: object) -> None:
    try:
        rate = Rate(limit, period)  # type: ignore[arg-type]
    except InvalidRate:
        return
    assert 1 <= rate.limit <= rate.period_ns <= TEN_YEARS_NS
    if isinstance(period, timedelta):
        period = Fraction(period // timedelta(microseconds=1), 10**6)
    exact_s = Fraction(period)  # type: ignore[arg-type]
    assert abs(rate.period_ns - exact_s * NS) <= Fraction(1, 2)


@given(rates, st.integers() | magnitudes(1, 2**64))
def test_limiter_takes_a_rate_and_burst_or_names_the_bad_one(rate: Rate, burst: int) -> None:
    with Store.private(keys=1) as store:
        if burst < 1 or burst * rate.period_ns // rate.limit >= 2**61:
            with pytest.raises(ValueError, match="burst"):
                TokenBucket(store, "rates", rate, burst=burst)
        elif burst * -(-rate.period_ns // rate.limit) < 2**61:
            limiter = TokenBucket(store, "rates", rate, burst=burst)
            assert limiter.rate == rate
            assert limiter.burst == burst
            assert limiter.hit("k", burst).remaining == 0

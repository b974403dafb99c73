"""Limiters of every algorithm, with parameters of every size, and the oracle's rule for each.

The oracle counts integer units of time. A unit is a nanosecond in memory and a microsecond over Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

from bucket_strategies import NS, YEAR_NS, buckets, magnitudes
from hypothesis import strategies as st
from oracle import Bucket, Queue, Rule, ToppedUpBucket
from oracle_counts import (
    BucketedWindow,
    CalendarWindow,
    ClockWindow,
    FirstWindow,
    Held,
    IntervalBucket,
    Log,
    SlidingWindow,
    SortedLog,
    first_window_in_memory,
)

import forebay
from forebay import Rate, TokenBucket


@dataclass(frozen=True)
class Measure:
    """The unit in which a kind of place counts time, and the bounds of its fields."""

    unit_ns: int
    latest: int
    """The latest time that a clock accepts."""
    longest_refill: int
    shortest_window: int
    longest_window: int
    most_burst: int
    most_limit: int
    most_sliding: Callable[[int], int]
    """Period -> the largest limit for which both counts are exact."""
    most_bucketed: Callable[[int, int], int]
    """(period, number of buckets) -> the largest limit."""
    most_logged: int
    log: Callable[[int, int], Rule[Any]]
    forgets: bool
    """An expired state is deleted: a clock that goes back to before its end finds a fresh key."""
    grain: int = 1
    """Periods are multiples of this many units."""
    has_tiers: bool = True
    """`hit` of a window accepts a rate for one call."""

    @property
    def second(self) -> int:
        return NS // self.unit_ns

    @property
    def year(self) -> int:
        return YEAR_NS // self.unit_ns

    def rate(self, limit: int, period: int) -> Rate:
        return Rate(limit, Fraction(period, self.second))  # type: ignore[arg-type]  # exact

    def length(self, units: int) -> str:
        return f"{units // self.second}.{units % self.second:0{len(str(self.second)) - 1}} s"

    def windows(self) -> st.SearchStrategy[int]:
        usual = [self.shortest_window, *(seconds * self.second for seconds in (1, 60, 3600, 86_400)), self.year]
        lengths = st.sampled_from(usual) | magnitudes(self.shortest_window, self.longest_window)
        return lengths.map(lambda units: max(units, self.shortest_window) // self.grain * self.grain)

    def limits(self, most: int) -> st.SearchStrategy[int]:
        most = min(self.most_limit, most)
        return st.integers(1, min(5, most)) | magnitudes(1, most)

    def buckets(self, most_burst: int | None = None) -> st.SearchStrategy[Bucket]:
        most = min(most_burst or self.most_burst, self.most_burst)
        drawn = buckets(most, self.longest_refill // self.grain, second=self.second // self.grain)
        return drawn.map(lambda bucket: replace(bucket, period_ns=bucket.period_ns * self.grain))


# Enough cells that the few keys of a test don't compete for them.
KEYS: Final = 500
MEMORY: Final = Measure(
    unit_ns=1,
    latest=2 * 10**18,
    # A quarter of the clock's range, since a test waits that long more than once.
    longest_refill=2**59,
    shortest_window=NS // 100,
    longest_window=YEAR_NS,
    most_burst=2**61,
    most_limit=10**9,
    most_sliding=lambda period: (1 << (period.bit_length() - 1) // 2) - 1,
    most_bucketed=lambda period, count: min(period // count // 16, 2**29 - 1),
    most_logged=300,
    log=Log,
    forgets=False,
)
# As in memory, within the bounds of an exchange over Redis: microseconds, and windows longer than the interval.
SYNCED: Final = replace(
    MEMORY,
    shortest_window=60 * NS,
    most_burst=2**51,
    most_limit=2**20,
    most_sliding=lambda period: 2**12,
    grain=1000,
    forgets=True,
    has_tiers=False,
)
REDIS: Final = Measure(
    unit_ns=1000,
    latest=4 * 10**15,
    # Slightly below the longest refill that a limiter accepts.
    longest_refill=2**50,
    shortest_window=1,
    longest_window=10 * YEAR_NS // 1000,
    most_burst=2**51,
    most_limit=2**40,
    most_sliding=lambda period: period,
    most_bucketed=lambda period, count: period,
    most_logged=2**40,
    log=SortedLog,
    forgets=True,
)


@dataclass(frozen=True)
class Case:
    """A limiter and the oracle's rule for it. Times are in units of `measure`."""

    make: Callable[..., Any]  # arguments: a store, and optionally a name ("api" by default)
    rule: Rule[Any]
    step: int  # the state may change at multiples of this
    span: int  # after this much time a key is fresh again
    measure: Measure = MEMORY
    # Rates for one call, with their rules.
    tiers: list[tuple[dict[str, Any], Rule[Any]]] = field(default_factory=list)
    # Each key's windows begin at the key's own phase.
    staggered: bool = False
    # How far the clock may go back for answers to be exact; 0: any time.
    back: int = 0

    def costs(self) -> st.SearchStrategy[int]:
        return st.just(1) | st.integers(0, min(self.rule.most, 3)) | magnitudes(1, self.rule.most)

    def times(self, now: int) -> st.SearchStrategy[int]:
        """Times from `now` on: small and large moves, whole steps, and one unit to either side of them."""
        latest = self.measure.latest
        longest = min(3 * self.span, latest // 4)
        moves = st.sampled_from([0, self.step, self.span]) | magnitudes(1, longest) | st.just(self.measure.year)
        later = moves.map(lambda units: now + units)
        begun = (st.integers(0, 3) | magnitudes(0, longest // self.step + 1)).map(
            lambda steps: (now // self.step + steps) * self.step
        )
        near = st.builds(lambda time, off: time + off, later | begun, st.integers(-1, 1))
        return (near | later).map(lambda time: min(max(time, now), latest))


@st.composite
def token_buckets(draw: st.DrawFn, measure: Measure) -> Case:
    bucket = draw(measure.buckets())
    tier = draw(measure.buckets(bucket.burst))
    if measure is not SYNCED:
        bucket, tier = (ToppedUpBucket(one.limit, one.period_ns, one.burst) for one in (bucket, tier))
    rate, of_tier = (measure.rate(one.limit, one.period_ns) for one in (bucket, tier))
    return Case(
        lambda store, name="api": TokenBucket(store, name, rate, burst=bucket.burst),
        bucket,
        step=bucket.unit_ns,
        span=bucket.tolerance_ns,
        measure=measure,
        tiers=[({"rate": of_tier, "burst": tier.burst}, tier)],
    )


@st.composite
def interval_buckets(draw: st.DrawFn, measure: Measure) -> Case:
    period = draw(measure.windows())
    limit = draw(measure.limits(period))
    longest = max(1, measure.longest_refill * limit // period // 2)
    burst = draw(st.integers(1, min(5, longest)) | magnitudes(1, min(longest, 2**40)) | st.just(min(limit, longest)))
    return Case(
        lambda store, name="api": TokenBucket(store, name, measure.rate(limit, period), burst, refill="interval"),
        IntervalBucket(limit, period, burst),
        step=period,
        span=-(-burst // limit) * period,
        measure=measure,
    )


@st.composite
def leaky_buckets(draw: st.DrawFn, measure: Measure) -> Case:
    bucket = draw(measure.buckets())
    rate = measure.rate(bucket.limit, bucket.period_ns)
    return Case(
        lambda store, name="api": forebay.LeakyBucket(store, name, rate, bucket.burst),
        Queue(bucket.limit, bucket.period_ns, bucket.burst),
        step=bucket.unit_ns,
        span=bucket.tolerance_ns,
        measure=measure,
    )


@st.composite
def min_intervals(draw: st.DrawFn, measure: Measure) -> Case:
    interval = draw(measure.windows() | magnitudes(1, measure.year))
    return Case(
        lambda store, name="api": forebay.MinInterval(store, name, measure.length(interval)),
        Bucket(1, interval, 1),
        step=interval,
        span=interval,
        measure=measure,
    )


@st.composite
def fixed_windows(draw: st.DrawFn, measure: Measure, align: Any) -> Case:
    period = draw(measure.windows())
    limit = draw(measure.limits(period))
    of_tier = draw(measure.limits(limit))
    rule: Rule[Any] = ClockWindow(limit, period)
    if align == "first":
        rule = first_window_in_memory(limit, period) if measure is MEMORY else FirstWindow(limit, period)
    return Case(
        lambda store, name="api": forebay.FixedWindow(store, name, measure.rate(limit, period), align=align),
        rule,
        step=period,
        span=period,
        measure=measure,
        tiers=[({"rate": measure.rate(of_tier, period)}, replace(rule, limit=of_tier))] * measure.has_tiers,
        staggered=align == "stagger",
    )


@st.composite
def calendar_windows(draw: st.DrawFn, measure: Measure) -> Case:
    unit, days = draw(st.sampled_from([("day", 1), ("week", 7), ("month", 31), ("year", 366)]))
    timezone = draw(st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"]))
    limit = draw(measure.limits(measure.most_limit))
    of_tier = draw(measure.limits(limit))
    rule = CalendarWindow(limit, days * 86_400 * NS, unit=unit, timezone=timezone)
    return Case(
        lambda store, name="api": forebay.FixedWindow(
            store, name, f"{limit}/{unit}", align="calendar", timezone=timezone
        ),
        rule,
        step=3600 * NS,
        span=rule.period_ns,
        measure=measure,
        tiers=[({"rate": f"{of_tier} per {unit}"}, replace(rule, limit=of_tier))],
        # A limiter knows the edges of 64 windows.
        back=60 * 23 * 3600 * NS,
    )


@st.composite
def sliding_windows(draw: st.DrawFn, measure: Measure, exact: bool = True) -> Case:
    """With `exact`, both counts are exact; without, large limits may round the previous count, as in memory."""
    period = draw(measure.windows())
    limit = draw(measure.limits(measure.most_sliding(period) if exact else period // 40))
    of_tier = draw(measure.limits(limit))
    rounding: Any = draw(st.sampled_from([None, "up", "down"]))
    rule = SlidingWindow(limit, period, rounding)
    of_tier_rule = SlidingWindow(of_tier, period, "up" if rule.rounds_up else "down")
    return Case(
        lambda store, name="api": forebay.SlidingWindow(store, name, measure.rate(limit, period), rounding=rounding),
        rule,
        step=draw(st.sampled_from([period, max(1, period // limit)])),
        span=2 * period,
        measure=measure,
        tiers=[({"rate": measure.rate(of_tier, period)}, of_tier_rule)] * measure.has_tiers,
    )


@st.composite
def bucketed_windows(draw: st.DrawFn, measure: Measure) -> Case:
    period = draw(measure.windows())
    count = min(draw(st.sampled_from([60, 1, 2, 3, 7]) | st.integers(1, 60)), period)
    limit = draw(measure.limits(measure.most_bucketed(period, count)))
    rule = BucketedWindow(limit, period, count)
    return Case(
        lambda store, name="api": forebay.BucketedWindow(
            store, name, measure.rate(limit, period), buckets=count, keys=KEYS
        ),
        rule,
        step=rule.bucket_ns,
        span=count * rule.bucket_ns,
        measure=measure,
    )


@st.composite
def sliding_logs(draw: st.DrawFn, measure: Measure) -> Case:
    period = draw(measure.windows())
    limit = draw(measure.limits(min(period, measure.most_logged)))
    return Case(
        lambda store, name="api": forebay.SlidingLog(store, name, measure.rate(limit, period), keys=KEYS),
        measure.log(limit, period),
        step=period,
        span=period,
        measure=measure,
    )


@st.composite
def concurrencies(draw: st.DrawFn, measure: Measure) -> Case:
    lease = draw(measure.windows())
    limit = draw(measure.limits(50))
    return Case(
        lambda store, name="api": forebay.Concurrency(store, name, limit, lease=measure.length(lease), keys=KEYS),
        Held(limit, lease),
        step=lease,
        span=lease,
        measure=measure,
    )


def cases_of(measure: Measure) -> dict[str, st.SearchStrategy[Case]]:
    return {
        "TokenBucket": token_buckets(measure),
        "TokenBucketInterval": interval_buckets(measure),
        "LeakyBucket": leaky_buckets(measure),
        "MinInterval": min_intervals(measure),
        "FixedWindowClock": fixed_windows(measure, "clock"),
        "FixedWindowFirst": fixed_windows(measure, "first"),
        "FixedWindowStagger": fixed_windows(measure, "stagger"),
        **({"FixedWindowCalendar": calendar_windows(measure)} if measure is MEMORY else {}),
        "SlidingWindow": sliding_windows(measure),
        "BucketedWindow": bucketed_windows(measure),
        "SlidingLog": sliding_logs(measure),
        "Concurrency": concurrencies(measure),
    }


OF_ONE_HOST: Final = ("TokenBucket", "FixedWindowClock", "SlidingWindow")
"""The limiters that hosts can lease or exchange."""

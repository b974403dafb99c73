"""Limiters of every algorithm, with parameters of every size, and their rules in the oracle's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from bucket_strategies import LATEST_NS, NS, YEAR_NS, buckets, magnitudes, rate_of
from hypothesis import strategies as st
from oracle import Bucket, Queue, Rule
from oracle_counts import BucketedWindow, ClockWindow, FirstWindow, IntervalBucket, Log, SlidingWindow

import penstock
from penstock import Rate, TokenBucket

MS_NS = 1_000_000
SHORTEST_WINDOW_NS = 10 * MS_NS
# A quarter of the clock's range: so long may be waited, once and again.
LONGEST_REFILL_NS = 2**59
# Room for so many that a test's few keep out of each other's way.
KEYS = 500


@dataclass(frozen=True)
class Case:
    """A limiter to be made, and what the oracle has to know of it."""

    make: Callable[..., Any]  # of a store, and a name if it is not "native"
    rule: Rule[Any]
    step_ns: int  # multiples of this are when something may change
    span_ns: int  # after this much time all is forgotten
    # Rates that are good for one call, and their rules.
    tiers: list[tuple[dict[str, Any], Rule[Any]]] = field(default_factory=list)
    # A window may end later than the rule says, by less than this.
    slack_ns: int = 0
    # Each key's windows begin at a time of its own.
    staggered: bool = False

    def costs(self) -> st.SearchStrategy[int]:
        return st.just(1) | st.integers(0, min(self.rule.most, 3)) | magnitudes(1, self.rule.most)

    def times_ns(self, now_ns: int) -> st.SearchStrategy[int]:
        """Times around now: tiny moves and long ones, whole steps, and one nanosecond to either side of them."""
        longest_ns = min(3 * self.span_ns, LATEST_NS // 4)
        moves_ns = st.sampled_from([0, self.step_ns, self.span_ns]) | magnitudes(1, longest_ns) | st.just(YEAR_NS)
        later = moves_ns.map(lambda ns: now_ns + ns)
        begun = (st.integers(0, 3) | magnitudes(0, longest_ns // self.step_ns + 1)).map(
            lambda steps: (now_ns // self.step_ns + steps) * self.step_ns
        )
        near = st.builds(lambda time_ns, off_ns: time_ns + off_ns, later | begun, st.integers(-1, 1))
        return (near | later).map(lambda time_ns: min(max(time_ns, now_ns), LATEST_NS))


def windows_ns() -> st.SearchStrategy[int]:
    usual = st.sampled_from([SHORTEST_WINDOW_NS, NS, 60 * NS, 3600 * NS, 86_400 * NS, YEAR_NS])
    return usual | magnitudes(SHORTEST_WINDOW_NS, YEAR_NS)


def limits(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, min(5, most)) | magnitudes(1, min(10**9, most))


def rate_ns(limit: int, period_ns: int) -> Rate:
    return Rate(limit, Fraction(period_ns, NS))  # type: ignore[arg-type]


@st.composite
def token_buckets(draw: st.DrawFn) -> Case:
    bucket = draw(buckets(longest_refill_ns=LONGEST_REFILL_NS))
    tier = draw(buckets(most_burst=bucket.burst, longest_refill_ns=LONGEST_REFILL_NS))
    return Case(
        lambda store, name="native": TokenBucket(store, name, rate_of(bucket), burst=bucket.burst),
        bucket,
        step_ns=bucket.unit_ns,
        span_ns=bucket.tolerance_ns,
        tiers=[({"rate": rate_of(tier), "burst": tier.burst}, tier)],
    )


@st.composite
def interval_buckets(draw: st.DrawFn) -> Case:
    period_ns = draw(windows_ns())
    limit = draw(limits(period_ns))
    longest = max(1, LONGEST_REFILL_NS * limit // period_ns // 2)
    burst = draw(st.integers(1, min(5, longest)) | magnitudes(1, min(longest, 2**40)) | st.just(min(limit, longest)))
    rule = IntervalBucket(limit, period_ns, burst)
    return Case(
        lambda store, name="native": TokenBucket(
            store, name, rate_ns(limit, period_ns), burst=burst, refill="interval"
        ),
        rule,
        step_ns=period_ns,
        span_ns=-(-burst // limit) * period_ns,
    )  # fmt: skip


@st.composite
def leaky_buckets(draw: st.DrawFn) -> Case:
    bucket = draw(buckets(longest_refill_ns=LONGEST_REFILL_NS))
    return Case(
        lambda store, name="native": penstock.LeakyBucket(store, name, rate_of(bucket), bucket.burst),
        Queue(bucket.limit, bucket.period_ns, bucket.burst),
        step_ns=bucket.unit_ns,
        span_ns=bucket.tolerance_ns,
    )


@st.composite
def min_intervals(draw: st.DrawFn) -> Case:
    interval_ns = draw(windows_ns() | magnitudes(1, YEAR_NS))
    return Case(
        lambda store, name="native": penstock.MinInterval(store, name, f"{interval_ns // NS}.{interval_ns % NS:09} s"),
        Bucket(1, interval_ns, 1),
        step_ns=interval_ns,
        span_ns=interval_ns,
    )


@st.composite
def fixed_windows(draw: st.DrawFn, align: Any) -> Case:
    period_ns = draw(windows_ns())
    limit = draw(limits(period_ns))
    of_tier = draw(limits(limit))
    rule = (FirstWindow if align == "first" else ClockWindow)(limit, period_ns)
    return Case(
        lambda store, name="native": penstock.FixedWindow(store, name, rate_ns(limit, period_ns), align=align),
        rule,
        step_ns=period_ns,
        span_ns=period_ns,
        tiers=[({"rate": rate_ns(of_tier, period_ns)}, replace(rule, limit=of_tier))],
        slack_ns=limit if align == "first" else 0,
        staggered=align == "stagger",
    )


@st.composite
def sliding_windows(draw: st.DrawFn, exact: bool = True) -> Case:
    """With both counts exact; or, as for the largest limits, with the previous one perhaps rounded."""
    period_ns = draw(windows_ns())
    most = 1 << (period_ns.bit_length() - 1) // 2 if exact else period_ns // 40
    limit = draw(limits(most - 1))
    of_tier = draw(limits(limit))
    return Case(
        lambda store, name="native": penstock.SlidingWindow(store, name, rate_ns(limit, period_ns)),
        SlidingWindow(limit, period_ns),
        step_ns=draw(st.sampled_from([period_ns, max(1, period_ns // limit)])),
        span_ns=2 * period_ns,
        tiers=[({"rate": rate_ns(of_tier, period_ns)}, SlidingWindow(of_tier, period_ns))],
    )


@st.composite
def bucketed_windows(draw: st.DrawFn) -> Case:
    period_ns = draw(windows_ns())
    count = draw(st.sampled_from([60, 1, 2, 3, 7]) | st.integers(1, 60))
    limit = draw(limits(min(period_ns // count // 16, 2**29 - 1)))
    rule = BucketedWindow(limit, period_ns, count)
    return Case(
        lambda store, name="native": penstock.BucketedWindow(
            store, name, rate_ns(limit, period_ns), buckets=count, keys=KEYS
        ),
        rule,
        step_ns=rule.bucket_ns,
        span_ns=count * rule.bucket_ns,
    )


@st.composite
def sliding_logs(draw: st.DrawFn) -> Case:
    period_ns = draw(windows_ns())
    limit = draw(st.integers(1, 5) | magnitudes(1, 300))
    return Case(
        lambda store, name="native": penstock.SlidingLog(store, name, rate_ns(limit, period_ns), keys=KEYS),
        Log(limit, period_ns),
        step_ns=period_ns,
        span_ns=period_ns,
    )


CASES: dict[str, st.SearchStrategy[Case]] = {
    "TokenBucket": token_buckets(),
    "TokenBucketInterval": interval_buckets(),
    "LeakyBucket": leaky_buckets(),
    "MinInterval": min_intervals(),
    "FixedWindowClock": fixed_windows("clock"),
    "FixedWindowFirst": fixed_windows("first"),
    "FixedWindowStagger": fixed_windows("stagger"),
    "SlidingWindow": sliding_windows(),
    "BucketedWindow": bucketed_windows(),
    "SlidingLog": sliding_logs(),
}

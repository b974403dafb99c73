"""Limiters of every algorithm over Redis, with parameters of every size, and their rules in the oracle's words.

The oracle counts in whole units of time, whatever they are: here they are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st
from oracle import Bucket, Queue, Rule
from oracle_counts import BucketedWindow, ClockWindow, Counting, FirstWindow, IntervalBucket, SlidingWindow

import penstock
from penstock import Rate, TokenBucket

US = 1_000_000
YEAR_US = 31_536_000 * US
DECADE_US = 10 * YEAR_US
# A little less than the longest that a limiter takes.
LONGEST_REFILL_US = 2**50
LATEST_US = 4 * 10**15


def magnitudes(least: int, most: int) -> st.SearchStrategy[int]:
    """Whole numbers of every length, the ends more often than chance would have it."""
    by_length = st.integers(least.bit_length(), most.bit_length()).flatmap(
        lambda bits: st.integers(max(least, 1 << bits >> 1), min(most, (1 << bits) - 1))
    )
    return st.sampled_from([least, most]) | by_length


Batches = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Log(Counting[Batches]):
    """Every permit for `period_ns` after its date, (date, permits) of each admission: over Redis there is no ring."""

    fresh = ()

    def past(self, state: Batches, now: int) -> int:
        return max([now, *(date for date, _ in state)])

    def live(self, state: Batches, now: int) -> Batches:
        past = self.past(state, now)
        return tuple((date, permits) for date, permits in state if date + self.period_ns > past)

    def used(self, state: Batches, now_ns: int) -> int:
        return sum(permits for _, permits in self.live(state, now_ns))

    def charged(self, state: Batches, now_ns: int, cost: int) -> Batches:
        return *self.live(state, now_ns), (self.past(state, now_ns), cost)

    def refunded(self, state: Batches, now_ns: int, cost: int) -> Batches:
        kept = []
        for date, permits in self.live(state, now_ns):
            back = min(cost, permits)
            cost -= back
            if permits > back:
                kept.append((date, permits - back))
        return tuple(kept) or self.fresh

    def over_ns(self, state: Batches) -> int:
        return state[-1][0] + self.period_ns if state else 0


Ends = tuple[int, ...]


@dataclass(frozen=True)
class Held(Counting[Ends]):
    """Permits that are held until their leases end; `period_ns` is the lease. Given back are those that end first."""

    fresh = ()

    def live(self, state: Ends, now: int) -> Ends:
        return tuple(end for end in state if end > now)

    def used(self, state: Ends, now_ns: int) -> int:
        return len(self.live(state, now_ns))

    def charged(self, state: Ends, now_ns: int, cost: int) -> Ends:
        return tuple(sorted((*self.live(state, now_ns), *[now_ns + self.period_ns] * cost)))

    def refunded(self, state: Ends, now_ns: int, cost: int) -> Ends:
        return self.live(state, now_ns)[cost:]

    def released(self, state: Ends, now: int, cost: int) -> Ends:
        """Without those that have been taken just now."""
        assert state[-cost:] == (now + self.period_ns,) * cost
        return state[:-cost]

    def over_ns(self, state: Ends) -> int:
        return max(state, default=0)


@dataclass(frozen=True)
class Case:
    """A limiter to be made, and what the oracle has to know of it."""

    make: Callable[..., Any]  # of a store, and a name if it is not "api"
    rule: Rule[Any]
    step_us: int  # multiples of this are when something may change
    span_us: int  # after this much time all is forgotten
    # Rates that are good for one call, and their rules.
    tiers: list[tuple[dict[str, Any], Rule[Any]]] = field(default_factory=list)
    # Each key's windows begin at a time of its own.
    staggered: bool = False

    def costs(self) -> st.SearchStrategy[int]:
        return st.just(1) | st.integers(0, min(self.rule.most, 3)) | magnitudes(1, self.rule.most)

    def times_us(self, now_us: int) -> st.SearchStrategy[int]:
        """Times around now: tiny moves and long ones, whole steps, and one microsecond to either side of them."""
        longest_us = min(3 * self.span_us, LATEST_US // 4)
        moves_us = st.sampled_from([0, self.step_us, self.span_us]) | magnitudes(1, longest_us) | st.just(YEAR_US)
        later = moves_us.map(lambda us: now_us + us)
        begun = (st.integers(0, 3) | magnitudes(0, longest_us // self.step_us + 1)).map(
            lambda steps: (now_us // self.step_us + steps) * self.step_us
        )
        near = st.builds(lambda time_us, off_us: time_us + off_us, later | begun, st.integers(-1, 1))
        return (near | later).map(lambda time_us: min(max(time_us, now_us), LATEST_US))


def periods_us(most: int = DECADE_US) -> st.SearchStrategy[int]:
    usual = st.sampled_from([1, 1000, US, 60 * US, 3600 * US, 86_400 * US, YEAR_US])
    return usual | magnitudes(1, most)


def limits(most: int) -> st.SearchStrategy[int]:
    most = min(most, 2**40)
    return st.integers(1, min(5, most)) | magnitudes(1, most)


def rate_us(limit: int, period_us: int) -> Rate:
    return Rate(limit, Fraction(period_us, US))  # type: ignore[arg-type]  # exact


def seconds(duration_us: int) -> str:
    return f"{duration_us // US}.{duration_us % US:06} s"


@st.composite
def buckets(draw: st.DrawFn, most_burst: int = 2**51) -> Bucket:
    period_us = draw(periods_us())
    limit = draw(limits(period_us))
    longest = max(1, (LONGEST_REFILL_US - period_us // limit - 1) * limit // period_us)
    burst = draw(st.integers(1, min(5, longest, most_burst)) | magnitudes(1, min(longest, most_burst)))
    return Bucket(limit, period_us, burst)


def rate_of(bucket: Bucket) -> Rate:
    return rate_us(bucket.limit, bucket.period_ns)


@st.composite
def token_buckets(draw: st.DrawFn) -> Case:
    bucket = draw(buckets())
    tier = draw(buckets(most_burst=bucket.burst))
    return Case(
        lambda store, name="api": TokenBucket(store, name, rate_of(bucket), burst=bucket.burst),
        bucket,
        step_us=bucket.unit_ns,
        span_us=bucket.tolerance_ns,
        tiers=[({"rate": rate_of(tier), "burst": tier.burst}, tier)],
    )


@st.composite
def interval_buckets(draw: st.DrawFn) -> Case:
    period_us = draw(periods_us())
    limit = draw(limits(period_us))
    longest = max(1, LONGEST_REFILL_US * limit // period_us // 2)
    burst = draw(st.integers(1, min(5, longest)) | magnitudes(1, longest) | st.just(min(limit, longest)))
    return Case(
        lambda store, name="api": TokenBucket(store, name, rate_us(limit, period_us), burst=burst, refill="interval"),
        IntervalBucket(limit, period_us, burst),
        step_us=period_us,
        span_us=-(-burst // limit) * period_us,
    )


@st.composite
def leaky_buckets(draw: st.DrawFn) -> Case:
    bucket = draw(buckets())
    return Case(
        lambda store, name="api": penstock.LeakyBucket(store, name, rate_of(bucket), bucket.burst),
        Queue(bucket.limit, bucket.period_ns, bucket.burst),
        step_us=bucket.unit_ns,
        span_us=bucket.tolerance_ns,
    )


@st.composite
def min_intervals(draw: st.DrawFn) -> Case:
    interval_us = draw(periods_us())
    return Case(
        lambda store, name="api": penstock.MinInterval(store, name, seconds(interval_us)),
        Bucket(1, interval_us, 1),
        step_us=interval_us,
        span_us=interval_us,
    )


@st.composite
def fixed_windows(draw: st.DrawFn, align: Any) -> Case:
    period_us = draw(periods_us())
    limit = draw(limits(period_us))
    of_tier = draw(limits(limit))
    rule = (FirstWindow if align == "first" else ClockWindow)(limit, period_us)
    return Case(
        lambda store, name="api": penstock.FixedWindow(store, name, rate_us(limit, period_us), align=align),
        rule,
        step_us=period_us,
        span_us=period_us,
        tiers=[({"rate": rate_us(of_tier, period_us)}, replace(rule, limit=of_tier))],
        staggered=align == "stagger",
    )


@st.composite
def sliding_windows(draw: st.DrawFn) -> Case:
    period_us = draw(periods_us())
    limit = draw(limits(period_us))
    of_tier = draw(limits(limit))
    return Case(
        lambda store, name="api": penstock.SlidingWindow(store, name, rate_us(limit, period_us)),
        SlidingWindow(limit, period_us),
        step_us=draw(st.sampled_from([period_us, max(1, period_us // limit)])),
        span_us=2 * period_us,
        tiers=[({"rate": rate_us(of_tier, period_us)}, SlidingWindow(of_tier, period_us))],
    )


@st.composite
def bucketed_windows(draw: st.DrawFn) -> Case:
    period_us = draw(periods_us())
    count = draw(st.sampled_from([1, 2, 3, 7, 60]) | st.integers(1, 60))
    count = min(count, period_us)
    limit = draw(limits(period_us))
    rule = BucketedWindow(limit, period_us, count)
    return Case(
        lambda store, name="api": penstock.BucketedWindow(store, name, rate_us(limit, period_us), buckets=count),
        rule,
        step_us=rule.bucket_ns,
        span_us=count * rule.bucket_ns,
    )


@st.composite
def sliding_logs(draw: st.DrawFn) -> Case:
    period_us = draw(periods_us())
    limit = draw(limits(period_us))
    make: Any = penstock.SlidingLog
    return Case(
        lambda store, name="api": make(store, name, rate_us(limit, period_us)),
        Log(limit, period_us),
        step_us=period_us,
        span_us=period_us,
    )


@st.composite
def concurrencies(draw: st.DrawFn) -> Case:
    lease_us = draw(periods_us())
    limit = draw(limits(50))
    return Case(
        lambda store, name="api": penstock.Concurrency(store, name, limit, lease=seconds(lease_us)),
        Held(limit, lease_us),
        step_us=lease_us,
        span_us=lease_us,
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
    "Concurrency": concurrencies(),
}

"""Every limiter against the oracle at the limits of its fields.

Windows last nanoseconds, so counts, laps and running totals wrap all the time. Limits, bursts, costs and periods are
the largest accepted. Times reach from 0 to the last time of a clock, with jumps of years both ways.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bucket_strategies import NS, YEAR_NS, buckets, magnitudes, rate_of
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import rule
from limiter_cases import MEMORY, Case
from oracle import Bucket, Queue
from oracle_counts import BucketedWindow, ClockWindow, IntervalBucket, Log, SlidingWindow, first_window_in_memory
from oracle_machine import LimiterAndOracle, keys

import forebay
from forebay import TokenBucket

LAST_NS = 2**61
EDGES = replace(MEMORY, latest=LAST_NS)
LONGEST_PERIOD_NS = 10 * YEAR_NS
MOST_PERMITS = 2**40
# No state of a bucket is further ahead of now than this.
MOST_AHEAD_NS = 2**61 - 1


def tiny_periods_ns(least: int) -> st.SearchStrategy[int]:
    return st.integers(least, least + 5) | magnitudes(least, 1000 * least)


def longest_periods_ns() -> st.SearchStrategy[int]:
    return st.sampled_from([LONGEST_PERIOD_NS, LONGEST_PERIOD_NS - 1]) | magnitudes(YEAR_NS, LONGEST_PERIOD_NS)


def most_and_less(most: int) -> st.SearchStrategy[int]:
    """Limits up to `most`, with `most` drawn most often."""
    return st.sampled_from([most, max(1, most - 1), 1]) | magnitudes(1, most)


@st.composite
def token_buckets(draw: st.DrawFn) -> Case:
    """Buckets whose refill takes the longest accepted time, or that refill every nanosecond."""
    bucket = draw(buckets(longest_refill_ns=MOST_AHEAD_NS) | full_buckets())
    make = draw(st.sampled_from([TokenBucket, forebay.LeakyBucket]))
    return Case(
        lambda store, name="api": make(store, name, rate_of(bucket), bucket.burst),
        (Queue if make is forebay.LeakyBucket else Bucket)(bucket.limit, bucket.period_ns, bucket.burst),
        step=bucket.unit_ns,
        span=bucket.tolerance_ns,
    )


@st.composite
def full_buckets(draw: st.DrawFn) -> Bucket:
    """Buckets with the largest burst for their rate."""
    period_ns = draw(st.sampled_from([1, 3, NS, LONGEST_PERIOD_NS]) | magnitudes(1, LONGEST_PERIOD_NS))
    limit = draw(most_and_less(min(period_ns, MOST_PERMITS)))
    least, most = 1, MOST_AHEAD_NS
    while least < most:
        middle = (least + most + 1) // 2
        fits = Bucket(limit, period_ns, middle).tolerance_ns <= MOST_AHEAD_NS
        least, most = (middle, most) if fits else (least, middle - 1)
    return Bucket(limit, period_ns, least)


@st.composite
def interval_buckets(draw: st.DrawFn) -> Case:
    period_ns = draw(tiny_periods_ns(1) | longest_periods_ns())
    limit = draw(most_and_less(min(period_ns, MOST_PERMITS)))
    # Half of the range that a state has left at the last time, as a reservation may double it.
    longest = 2**58 * limit // period_ns
    burst = draw(st.just(limit) | magnitudes(1, max(1, longest)))
    return Case(
        lambda store, name="api": TokenBucket(
            store, name, MEMORY.rate(limit, period_ns), burst=burst, refill="interval"
        ),
        IntervalBucket(limit, period_ns, burst),
        step=period_ns,
        span=-(-burst // limit) * period_ns,
    )  # fmt: skip


@st.composite
def fixed_windows(draw: st.DrawFn, align: Any) -> Case:
    period_ns = draw(tiny_periods_ns(1) | longest_periods_ns() | magnitudes(MOST_PERMITS, 2 * MOST_PERMITS))
    limit = draw(most_and_less(min(period_ns, MOST_PERMITS)))
    tier = draw(most_and_less(limit))
    window = (first_window_in_memory if align == "first" else ClockWindow)(limit, period_ns)
    return Case(
        lambda store, name="api": forebay.FixedWindow(store, name, MEMORY.rate(limit, period_ns), align=align),
        window,
        step=period_ns,
        span=period_ns,
        tiers=[({"rate": MEMORY.rate(tier, period_ns)}, replace(window, limit=tier))],
        staggered=align == "stagger",
    )


@st.composite
def sliding_windows(draw: st.DrawFn) -> Case:
    """Limits up to the largest for which both counts are exact."""
    period_ns = draw(tiny_periods_ns(300) | longest_periods_ns())
    most = (1 << (period_ns.bit_length() - 1) // 2) - 1
    limit = draw(most_and_less(most))
    rounding: Any = draw(st.sampled_from(["up", "down"]))
    return Case(
        lambda store, name="api": forebay.SlidingWindow(store, name, MEMORY.rate(limit, period_ns), rounding=rounding),
        SlidingWindow(limit, period_ns, rounding),
        step=draw(st.sampled_from([period_ns, max(1, period_ns // limit)])),
        span=2 * period_ns,
    )


@st.composite
def bucketed_windows(draw: st.DrawFn) -> Case:
    """Running totals of the fewest bits, or of all 32."""
    bucket_ns = draw(tiny_periods_ns(8) | magnitudes(2**31, LONGEST_PERIOD_NS // 8))
    count = draw(st.integers(1, 8))
    low_bits = min(bucket_ns.bit_length(), 32)
    limit = draw(most_and_less((1 << low_bits - 2) - 1))
    period_ns = bucket_ns * count
    window = BucketedWindow(limit, period_ns, count)
    return Case(
        lambda store, name="api": forebay.BucketedWindow(
            store, name, MEMORY.rate(limit, period_ns), buckets=count, keys=64
        ),
        window,
        step=window.bucket_ns,
        span=count * window.bucket_ns,
    )


@st.composite
def sliding_logs(draw: st.DrawFn) -> Case:
    """As many permits as fit into windows of nanoseconds, or windows of the longest period."""
    period_ns = draw(tiny_periods_ns(2) | longest_periods_ns())
    limit = draw(most_and_less(min(max(1, 1 << period_ns.bit_length() - 2), period_ns, 300)))
    return Case(
        lambda store, name="api": forebay.SlidingLog(store, name, MEMORY.rate(limit, period_ns), keys=64),
        Log(limit, period_ns),
        step=period_ns,
        span=period_ns,
    )


class AtTheEdges(LimiterAndOracle):
    place_kind = "private"

    def times(self) -> st.SearchStrategy[int]:
        spans_ns = st.sampled_from(
            [0, 1, self.case.step, self.case.span, YEAR_NS, LONGEST_PERIOD_NS, 60 * YEAR_NS]
        ) | magnitudes(0, LAST_NS)
        near = st.builds(lambda span_ns, off_ns, sign: self.now + sign * span_ns + off_ns,
                         spans_ns, st.integers(-1, 1), st.sampled_from([1, 1, 1, -1]))  # fmt: skip
        ends = st.sampled_from([0, 1, LAST_NS, LAST_NS - 1]) | st.builds(lambda span_ns: LAST_NS - span_ns, spans_ns)
        whole = near.map(lambda time_ns: time_ns // self.case.step * self.case.step)
        return near | near | whole | ends

    @rule(key=keys, rounds=st.integers(1, 20), giving_back=st.booleans(), data=st.data())
    def wind_on(self, key: Any, rounds: int, giving_back: bool, data: st.DataObject) -> None:
        """Advances laps and running totals to where they wrap."""
        cost = data.draw(st.just(self.case.rule.most) | self.case.costs())
        for _ in range(rounds):
            assert self.hit_(key, cost) == self.expect(key, cost)
            if giving_back:
                self.limiter.refund(key, (cost + 1) // 2)
                self.oracle.refund(self.rule_of(key), key, (cost + 1) // 2, self.now)
                self.stay()
                self.check(key, 1)
            self.move(self.now + self.case.span)
        # The wrapped state is not forgotten.
        assert self.hit_(key, cost) == self.expect(key, cost)

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.move(data.draw(self.times()))

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.move(self.now - data.draw(magnitudes(0, LAST_NS)))

    @rule(key=keys, data=st.data())
    def reserve(self, key: Any, data: st.DataObject) -> None:
        """Book only what is due now: a state must not pass a bound. test_every_limiter.py books later times."""
        cost = data.draw(self.case.costs().filter(bool))
        booking = self.oracle.reserve(self.rule_of(key), key, cost, self.now, 0)
        reservation = self.limiter.reserve(key, cost, 0)
        assert (reservation.allowed, reservation.delay_ns) == (booking.allowed, booking.delay_ns)
        self.allowed += booking.allowed
        self.denied += not booking.allowed


CASES: dict[str, st.SearchStrategy[Case]] = {
    "Buckets": token_buckets(),
    "BucketsInIntervals": interval_buckets(),
    "FixedWindowClock": fixed_windows("clock"),
    "FixedWindowFirst": fixed_windows("first"),
    "FixedWindowStagger": fixed_windows("stagger"),
    "SlidingWindow": sliding_windows(),
    "BucketedWindow": bucketed_windows(),
    "SlidingLog": sliding_logs(),
}


def machine_of(kind: str) -> Any:
    cases = CASES[kind].map(lambda case: replace(case, measure=EDGES))
    machine: Any = type(kind, (AtTheEdges,), {"cases": cases})
    machine.TestCase.settings = examples(40)
    return machine.TestCase


for kind in CASES:
    globals()[f"Test{kind}"] = machine_of(kind)

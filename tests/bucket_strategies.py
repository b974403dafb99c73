"""Strategies for buckets, costs and times of every size, and conversions to and from forebay's types."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st
from oracle import Answer, Bucket

from forebay import Decision, Rate
from forebay.testing import ManualClock

NS = 1_000_000_000
MS_NS = 1_000_000
YEAR_NS = 31_536_000 * NS
LONGEST_REFILL_NS = 2**61 - 1
LATEST_NS = 2 * 10**18  # close to the latest time that a clock accepts


def magnitudes(least: int, most: int) -> st.SearchStrategy[int]:
    """Integers of every bit length; the two ends are drawn more often than by chance."""
    by_length = st.integers(least.bit_length(), most.bit_length()).flatmap(
        lambda bits: st.integers(max(least, 1 << bits >> 1), min(most, (1 << bits) - 1))
    )
    return st.sampled_from([least, most]) | by_length


@st.composite
def buckets(
    draw: st.DrawFn, most_burst: int = 2**61, longest_refill_ns: int = LONGEST_REFILL_NS, second: int = NS
) -> Bucket:
    """From 1 permit per year to 1 per nanosecond (or another unit of time), with any burst that forebay accepts."""
    year = 31_536_000 * second
    usual = st.sampled_from([1, 1000, second, 60 * second, 3600 * second, year])
    period_ns = draw(usual | magnitudes(1, year))
    limit = draw(magnitudes(1, min(period_ns, 2**40)))
    longest = max(1, (longest_refill_ns - period_ns // limit - 1) * limit // period_ns)
    burst = draw(st.integers(1, min(5, longest, most_burst)) | magnitudes(1, min(longest, most_burst)))
    return Bucket(limit, period_ns, burst)


def costs(bucket: Bucket) -> st.SearchStrategy[int]:
    return st.just(1) | st.integers(0, min(bucket.burst, 3)) | magnitudes(1, bucket.burst)


def spans_ns(bucket: Bucket) -> st.SearchStrategy[int]:
    """Spans at which something changes for `bucket`, one nanosecond to either side of them, and spans between."""
    whole = st.sampled_from([0, bucket.unit_ns, 2 * bucket.unit_ns, bucket.tolerance_ns])
    near = st.builds(lambda span, off: max(0, span + off), whole, st.integers(-1, 1))
    return near | st.integers(0, bucket.tolerance_ns) | magnitudes(1, min(3 * bucket.tolerance_ns, LATEST_NS // 4))


def rate_of(bucket: Bucket) -> Rate:
    return Rate(bucket.limit, Fraction(bucket.period_ns, NS))  # type: ignore[arg-type]


def set_ns(clock: ManualClock, now_ns: int) -> None:
    clock.set(Fraction(now_ns, NS))  # type: ignore[arg-type]  # exact, where a float would round


def answer_of(decision: Decision) -> Answer:
    """A forebay decision as the oracle's `Answer`; its times in seconds must equal those in nanoseconds."""
    for seconds, ns in (
        (decision.retry_after, decision.retry_after_ns),
        (decision.reset_after, decision.reset_after_ns),
    ):
        # Exact to the nanosecond for 13 days; beyond that to a float's precision.
        assert round(Fraction(seconds) * NS) == ns or (ns >= 2**50 and abs(Fraction(seconds) * NS - ns) <= ns >> 48)
    assert bool(decision) is decision.allowed
    return Answer(
        decision.allowed, decision.limit, decision.remaining, decision.retry_after_ns, decision.reset_after_ns
    )

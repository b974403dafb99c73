"""The promises of a token bucket, independent of its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from bucket_strategies import MS_NS, NS, answer_of, buckets, costs, magnitudes, rate_of, set_ns, spans_ns
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import Bucket

from forebay import Store, TokenBucket
from forebay.testing import ManualClock

THREE_PER_SECOND = Bucket(limit=3, period_ns=NS, burst=3)
START_NS = 1_000 * NS
# Leaves time on the clock for a wait after the last request.
LATEST_NS = 2**60
LONGEST_REFILL_NS = 2**59


@contextmanager
def limiter_of(bucket: Bucket) -> Iterator[tuple[TokenBucket, ManualClock]]:
    clock = ManualClock()
    set_ns(clock, START_NS)
    with Store.private(keys=1, clock=clock) as store:
        yield TokenBucket(store, "bounds", rate_of(bucket), burst=bucket.burst), clock


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Bucket, list[tuple[int, int]]]:
    """A bucket, and requests for one key as (nanoseconds since the previous one, cost)."""
    bucket = draw(buckets(longest_refill_ns=LONGEST_REFILL_NS))
    requests = draw(st.lists(st.tuples(st.just(0) | spans_ns(bucket), costs(bucket)), min_size=1, max_size=40))
    now_ns, kept = START_NS, []
    for gap_ns, cost in requests:
        now_ns += gap_ns
        if now_ns > LATEST_NS:
            break
        kept.append((gap_ns, cost))
    return bucket, kept


@given(traffic())
def test_denied_request_is_allowed_at_its_retry_after_and_not_sooner(
    case: tuple[Bucket, list[tuple[int, int]]],
) -> None:
    bucket, requests = case
    with limiter_of(bucket) as (limiter, clock):
        now_ns = START_NS
        for gap_ns, cost in requests:
            now_ns += gap_ns
            set_ns(clock, now_ns)
            decision = limiter.hit("k", cost)
            if decision:
                assert decision.retry_after_ns == 0
                continue
            wait_ns = decision.retry_after_ns
            assert wait_ns > 0
            set_ns(clock, now_ns + wait_ns - 1)
            assert not limiter.hit("k", cost)
            if wait_ns > MS_NS:
                set_ns(clock, now_ns + wait_ns - MS_NS)
                assert not limiter.hit("k", cost)
            set_ns(clock, now_ns + wait_ns)
            assert limiter.peek("k", cost)
            # No peek charged anything.
            set_ns(clock, now_ns)
            assert answer_of(limiter.hit("k", cost)) == answer_of(decision)
        now_ns += limiter.peek("k", bucket.burst).retry_after_ns
        set_ns(clock, now_ns)
        assert limiter.hit("k", bucket.burst)


@given(buckets(most_burst=1000, longest_refill_ns=LONGEST_REFILL_NS), st.data())
def test_sleeping_for_retry_after_suffices(bucket: Bucket, data: st.DataObject) -> None:
    """A caller does ``time.sleep(decision.retry_after)``, with a float."""
    with limiter_of(bucket) as (limiter, clock):
        limiter.hit("k", bucket.burst)
        clock.advance(data.draw(st.floats(0, bucket.tolerance_ns / NS / 2)))
        cost = data.draw(costs(bucket))
        clock.advance(limiter.peek("k", cost).retry_after)
        assert limiter.hit("k", cost)
        clock.advance(limiter.peek("k", cost).reset_after)
        assert answer_of(limiter.peek("k", bucket.burst)) == answer_of(limiter.peek("never seen", bucket.burst))


@given(buckets().flatmap(lambda bucket: st.tuples(st.just(bucket), st.lists(costs(bucket), max_size=60))))
def test_bucket_admits_at_most_its_burst_at_one_instant(case: tuple[Bucket, list[int]]) -> None:
    bucket, costs = case
    with limiter_of(bucket) as (limiter, _):
        passed = [cost for cost in costs if limiter.hit("k", cost)]
        # Take the reported remainder until none is left.
        while left := limiter.peek("k", 0).remaining:
            assert limiter.hit("k", left)
            passed.append(left)
        assert not limiter.allow("k")
        assert sum(passed) <= bucket.burst


@given(buckets(most_burst=300), st.sampled_from(["allow", "allow_many"]))
@example(THREE_PER_SECOND, "allow")
@example(THREE_PER_SECOND, "allow_many")
@example(Bucket(limit=7, period_ns=60 * NS, burst=300), "allow")
def test_burst_of_single_requests_passes_whole(bucket: Bucket, method: str) -> None:
    with limiter_of(bucket) as (limiter, _):
        keys = ["k"] * (bucket.burst + 2)
        passed = limiter.allow_many(keys) if method == "allow_many" else [limiter.allow(key) for key in keys]
        assert passed == sorted(passed, reverse=True)
        assert sum(passed) <= bucket.burst
        if bucket.burst < bucket.unit_ns:
            assert sum(passed) == bucket.burst


@given(buckets().flatmap(lambda bucket: st.tuples(st.just(bucket), magnitudes(1, bucket.burst))))
def test_whole_burst_fits_in_one_request(case: tuple[Bucket, int]) -> None:
    bucket, cost = case
    with limiter_of(bucket) as (limiter, _):
        assert limiter.hit("k", cost)
        assert limiter.hit("l", bucket.burst)


@given(traffic())
def test_any_span_admits_at_most_the_burst_and_the_refill(
    case: tuple[Bucket, list[tuple[int, int]]],
) -> None:
    bucket, requests = case
    with limiter_of(bucket) as (limiter, clock):
        now_ns = START_NS
        admitted: list[tuple[int, int]] = []
        for gap_ns, cost in requests:
            now_ns += gap_ns
            set_ns(clock, now_ns)
            if limiter.hit("k", cost):
                admitted.append((now_ns, cost))
            if (left := limiter.peek("k", 0).remaining) and cost % 2 and limiter.hit("k", left):
                admitted.append((now_ns, left))
    for first, (first_ns, _) in enumerate(admitted):
        permits = 0
        for last_ns, cost in admitted[first:]:
            permits += cost
            span_ns = last_ns - first_ns
            assert permits <= math.ceil(bucket.burst + Fraction(span_ns * bucket.limit, bucket.period_ns))


@given(buckets(), st.integers(1, 60))
def test_requests_at_the_rate_all_pass(bucket: Bucket, count: int) -> None:
    with limiter_of(bucket) as (limiter, clock):
        for n in range(min(count, 1 + (LATEST_NS - START_NS) // bucket.unit_ns)):
            set_ns(clock, START_NS + n * bucket.unit_ns)
            assert limiter.allow("k")


@given(
    buckets().flatmap(lambda bucket: st.tuples(st.just(bucket), st.lists(costs(bucket), max_size=10), costs(bucket)))
)
def test_refund_undoes_a_hit(case: tuple[Bucket, list[int], int]) -> None:
    bucket, before, cost = case
    with limiter_of(bucket) as (limiter, _):
        for other in before:
            limiter.hit("k", other)
        as_it_was = answer_of(limiter.peek("k", 0))
        if limiter.hit("k", cost):
            limiter.refund("k", cost)
        assert answer_of(limiter.peek("k", 0)) == as_it_was
        # A refund of more than was taken fills the bucket, and no more.
        for _ in range(len(before) + 1):
            limiter.refund("k", bucket.burst)
        assert answer_of(limiter.peek("k", 0)) == answer_of(limiter.peek("never seen", 0))

"""The promises of ``RateLimit`` and ``Retry-After`` come true: for every limiter, at any time, after any requests."""

from __future__ import annotations

from typing import Any

import http_sf
from hypothesis import given
from hypothesis import strategies as st
from web_requests import CLIENT, Site

from forebay import (
    BucketedWindow,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    Rate,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.testing import ManualClock
from forebay.web import Rule

MAKERS: dict[str, Any] = {
    "token bucket": lambda store, rate, burst: TokenBucket(store, "x", rate, burst),
    "interval bucket": lambda store, rate, burst: TokenBucket(store, "x", rate, burst, refill="interval"),
    "leaky bucket": lambda store, rate, burst: LeakyBucket(store, "x", rate, burst),
    "fixed window": lambda store, rate, burst: FixedWindow(store, "x", rate),
    "fixed window, first": lambda store, rate, burst: FixedWindow(store, "x", rate, align="first"),
    "fixed window, stagger": lambda store, rate, burst: FixedWindow(store, "x", rate, align="stagger"),
    "sliding window": lambda store, rate, burst: SlidingWindow(store, "x", rate),
    "bucketed window": lambda store, rate, burst: BucketedWindow(store, "x", rate, 4, keys=4),
    "sliding log": lambda store, rate, burst: SlidingLog(store, "x", rate, keys=4),
    "minimum interval": lambda store, rate, burst: MinInterval(store, "x", rate.period_ns / 1e9),
}
rates = st.builds(
    Rate,
    st.integers(1, 12),
    st.sampled_from([0.004, 0.1, 0.7, 1, 1.5, 3, 7, 10, 59.999, 60, 3600, 86400]),
)
steps = st.lists(st.tuples(st.sampled_from([0, 0, 0.001, 0.3, 0.999, 1, 2.5, 20]), st.integers(0, 4)), max_size=12)


@given(st.sampled_from(sorted(MAKERS)), rates, st.integers(1, 12), steps, st.booleans(), st.floats(0, 1e6))
def test_header_fields_come_true(
    kind: str, rate: Rate, burst: int, steps: list[tuple[float, int]], is_booked: bool, start: float
) -> None:
    clock = ManualClock(start)
    with Store.private(keys=10, clock=clock) as store:
        limiter = MAKERS[kind](store, rate, burst)
        cost = 1
        rule = Rule(limiter, cost=lambda request: cost, charge_on=range(600) if is_booked else None)
        site = Site("wsgi", [rule])
        for wait_s, cost in [*steps, (0, 1)]:
            clock.advance(wait_s)
            answer = site.request()
            if "ratelimit" not in answer:
                # The cost exceeds the limit.
                assert answer.status == 429
                assert "retry-after" not in answer
                continue
            found: Any = http_sf.parse(answer["ratelimit"].encode(), tltype="list")
            ((name, fields),) = found
            assert name == "x"
            remaining, now = fields["r"], clock.now()
            assert remaining == limiter.peek(CLIENT, 0).remaining
            assert limiter.peek(CLIENT, remaining).allowed
            if answer.status == 429:
                clock.advance(int(answer["retry-after"]))
                assert limiter.peek(CLIENT, cost).allowed, "after Retry-After"
                assert int(answer["retry-after"]) == fields.get("t", 1)
            elif "t" in fields:
                clock.advance(fields["t"])
                assert limiter.peek(CLIENT, 0).remaining > remaining, "after t"
            else:
                assert cost == 0 or kind == "leaky bucket" or remaining == limiter.peek(CLIENT, 0).limit
            clock.set(now)
        # `left` requests pass at once, one by one.
        cost = 1
        left = limiter.peek(CLIENT, 0).remaining
        assert [site.request().status for _ in range(left + 1)] == [200] * left + [429]

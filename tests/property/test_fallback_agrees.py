"""The pure-Python fallback decides as the compiled core: every field of every answer, to the nanosecond.

Both take the same requests at the same times. A compiled wheel has no fallback: it is imported from its sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from fallback_beside import FallbackStore, fallback
from hypothesis import given
from hypothesis import strategies as st

import forebay
from forebay.testing import ManualClock

FIELDS = (
    *("allowed", "full", "reason", "limiter", "limit", "remaining", "retry_after", "reset_after", "next_after"),
    *("retry_after_ns", "reset_after_ns", "next_after_ns"),
)
BOOKED = ("allowed", "delay_ns", "due_ns", "full")

Make = Callable[[Any, Any], Any]

RATES = ("1/second", "3/second", "7 per 10 seconds", "100/minute", "1000000/second", "5/hour", "11 per 1000 hours")
COUNTED = ("1/second", "3/second", "6/second", "100/minute", "30011/second", "1000/second", "5/hour")

KINDS: dict[str, tuple[tuple[str, ...], Callable[[str], Make]]] = {
    "bucket": (RATES, lambda rate: lambda of, store: of.TokenBucket(store, "a", rate)),
    "small bucket": (RATES, lambda rate: lambda of, store: of.TokenBucket(store, "a", rate, 3)),
    "initial": (("7/second", "100/minute"), lambda rate: lambda of, store: of.TokenBucket(store, "a", rate, initial=3)),
    "interval": (RATES, lambda rate: lambda of, store: of.TokenBucket(store, "a", rate, 5, "interval")),
    "queue": (RATES, lambda rate: lambda of, store: of.LeakyBucket(store, "a", rate, 4)),
    "gap": (("1 ms", "2s", "1 hour"), lambda time: lambda of, store: of.MinInterval(store, "a", time)),
    "credits": (("credits",), lambda name: lambda of, store: of.Credits(store, name)),
    "fixed": (COUNTED, lambda rate: lambda of, store: of.FixedWindow(store, "a", rate)),
    "first": (COUNTED, lambda rate: lambda of, store: of.FixedWindow(store, "a", rate, "first")),
    "calendar": (
        ("4/day", "40/month"),
        lambda rate: lambda of, store: of.FixedWindow(store, "a", rate, "calendar", timezone="Europe/Berlin"),
    ),
    "sliding up": (COUNTED, lambda rate: lambda of, store: of.SlidingWindow(store, "a", rate, rounding="up")),
    "sliding down": (COUNTED, lambda rate: lambda of, store: of.SlidingWindow(store, "a", rate, rounding="down")),
    "bucketed": (
        ("3/second", "100/minute", "5/hour"),
        lambda rate: lambda of, store: of.BucketedWindow(store, "a", rate, 4, keys=9),
    ),
    "log": (
        ("3/second", "17/minute", "5/hour"),
        lambda rate: lambda of, store: of.SlidingLog(store, "a", rate, keys=9),
    ),
    "slots": (("1s", "1 hour"), lambda lease: lambda of, store: of.Concurrency(store, "a", 4, lease, keys=9)),
    "several": (
        ("3/second", "5/hour"),
        lambda rate: (
            lambda of, store: of.AllOf(
                of.TokenBucket(store, "a", rate),
                of.FixedWindow(store, "b", "4/second"),
                of.SlidingLog(store, "c", rate, keys=9),
            )
        ),
    ),
    "one state twice": (
        ("3/second",),
        lambda rate: (
            lambda of, store: of.AllOf(of.TokenBucket(store, "a", rate), of.TokenBucket(store, "a", "5/second"))
        ),
    ),
}

keys = st.sampled_from(["k", "other", 1, b"k", ("k", 1)])
costs = st.sampled_from([0, 1, 1, 1, 2, 3, 5, 100])
steps_ns = st.one_of(
    st.sampled_from([0, 1, 1000, 10**6, 10**8, 10**9 // 3, 10**9, 60 * 10**9, 3600 * 10**9, 10**14]),
    st.integers(0, 2 * 10**9),
    st.sampled_from([-1, -(10**9), -(10**10)]),
)
delays = st.sampled_from([None, 0, "1 ms", 1, "1 hour"])
CALLS = st.one_of(
    st.tuples(st.sampled_from(["hit", "peek", "refund", "hit_each", "take_up_to"]), keys, costs),
    st.tuples(st.sampled_from(["allow", "reset"]), keys),
    st.tuples(st.just("reserve"), keys, costs, delays),
    st.tuples(st.just("allow_many"), st.lists(keys, max_size=4)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("acquire"), keys, costs),
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("hit once"), keys, costs, st.integers(0, 2)),
    st.tuples(st.just("refund once"), keys, costs, st.integers(0, 2)),
    st.tuples(st.just("add"), keys, costs | st.just(2**48 - 3)),
    st.tuples(st.just("convert"), keys, st.integers(1, 9), st.sampled_from(["permits", "share", "used"])),
    st.tuples(st.just("with rate"), keys, costs, st.sampled_from(["2/second", "50/minute", "5/hour"])),
)


class Side:
    """One implementation's limiter, and the answers that later calls refer to."""

    def __init__(self, limiter: Any) -> None:
        self.limiter = limiter
        self.bookings: list[Any] = []
        self.leases: list[Any] = []

    def answer(self, name: str, *arguments: Any) -> Any:
        """What a call returns, in comparable parts; the text of its error."""
        try:
            return self._parts(self._call(name, *arguments))
        except (forebay.ForebayError, AttributeError, TypeError) as error:
            # An attribute's or argument's error has other words in compiled code.
            return type(error), str(error) if isinstance(error, forebay.ForebayError) else ""

    def _call(self, name: str, *arguments: Any) -> Any:
        if name in ("cancel", "release"):
            answers = self.bookings if name == "cancel" else self.leases
            return getattr(answers[arguments[0] % len(answers)], name)() if answers else None
        if name in ("hit once", "refund once"):
            key, cost, request_id = arguments
            return getattr(self.limiter, name.split()[0])(key, cost, request_id=request_id)
        if name == "convert":
            key, limit, keep = arguments
            old_rate = forebay.Rate.per_ns(limit, self.limiter.rate.period_ns)
            return self.limiter.convert(key, old_rate, keep=keep)
        if name == "with rate":
            key, cost, rate = arguments
            return self.limiter.hit(key, cost, rate=rate)
        result = getattr(self.limiter, name)(*arguments)
        if name == "reserve":
            self.bookings.append(result)
        elif name == "acquire":
            self.leases.append(result)
        return result

    def _parts(self, result: Any) -> Any:
        if isinstance(result, list):
            return [self._parts(one) for one in result]
        if hasattr(result, "retry_after_ns"):
            return {name: getattr(result, name) for name in FIELDS}
        if hasattr(result, "due_ns"):
            return {name: getattr(result, name) for name in BOOKED}
        return (result.allowed, result.full) if hasattr(result, "release") else result


def counted(stats: forebay.LimiterStats) -> forebay.LimiterStats:
    """The counts that both have. Only where one state is charged twice by one request, the compiled core counts a CAS
    that failed. If the hashes of keys lie close to each other, a key may take the cell of one that has expired, which
    is then inserted once more when it comes back.
    """
    return replace(stats, cas_retries=0, inserted=0)


@pytest.mark.parametrize("kind", KINDS)
@examples(30)
@given(data=st.data(), calls=st.lists(st.tuples(steps_ns, CALLS), min_size=5, max_size=40))
def test_every_answer_is_the_compiled_cores(kind: str, data: Any, calls: list[tuple[int, tuple[Any, ...]]]) -> None:
    rates, maker = KINDS[kind]
    make = maker(data.draw(st.sampled_from(rates)))
    clock = ManualClock(1_700_000_000)
    with forebay.Store.private(keys=10, clock=clock) as store, FallbackStore.private(keys=10, clock=clock) as other:
        sides = Side(make(forebay, store)), Side(make(fallback, other))
        assert repr(sides[0].limiter) == repr(sides[1].limiter)
        for step_ns, call in calls:
            if kind == "slots" and (step_ns < 0 or "cancel" in call):
                # By a clock that goes back, and by which permit a refund frees, slots differ as they may.
                step_ns = 0
            if kind == "slots" and call[0] == "hit once":
                # The compiled core makes the lease of a request with an id a little longer.
                continue
            clock.set_ns(clock.now_ns() + step_ns)
            ours, theirs = (side.answer(*call) for side in sides)
            assert theirs == ours, (call, clock.now_ns())
        ours, theirs = store.stats(), other.stats()
        assert {name: counted(stats) for name, stats in theirs.limiters.items()} == {
            name: counted(stats) for name, stats in ours.limiters.items()
        }
        assert all(stats.inserted <= ours.limiters[name].inserted for name, stats in theirs.limiters.items())
        assert theirs.live_keys == ours.live_keys


@pytest.mark.parametrize("other", ["LeakyBucket", "MinInterval"])
def test_permits_above_the_burst_are_forgotten_by_other_limiters_as_in_the_core(other: str) -> None:
    """Those that share the bucket's state by its name."""
    clock = ManualClock(1_700_000_000)
    answers = []
    with forebay.Store.private(keys=10, clock=clock) as store, FallbackStore.private(keys=10, clock=clock) as theirs:
        for of, its_store in ((forebay, store), (fallback, theirs)):
            bucket: Any = of.TokenBucket(its_store, "a", "2/second", 3)
            arguments = ("2/second", 3) if other == "LeakyBucket" else ("500 ms",)
            with pytest.warns(forebay.LimiterNameWarning):
                side = Side(getattr(of, other)(its_store, "a", *arguments))
            answers.append([bucket.add("k", 20), bucket.reserve("k", 2)])
            for name in ("peek", "refund", "hit", "hit"):
                answers[-1] += [side.answer(name, "k", 1), bucket.peek("k").remaining]
            answers[-1] += [bucket.add("k", 20), side.answer("reserve", "k", 1), bucket.peek("k").remaining]
            answers[-1].pop(1).cancel()
            answers[-1].append(bucket.peek("k").remaining)
    assert answers[0] == answers[1]

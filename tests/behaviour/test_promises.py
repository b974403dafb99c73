"""The promises of a decision's fields for every limiter, independent of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from bucket_strategies import MS_NS, answer_of
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from limiter_cases import MEMORY, OF_ONE_HOST, REDIS, SYNCED, Case, cases_of, sliding_windows
from places import Clock, opened
from redis_server import RedisServer

START_S: Final = 1000
# In memory a sliding window of the largest limits is not exact, but its decisions' fields are true.
LARGE: Final = {"SlidingWindowOfLargeLimits": sliding_windows(MEMORY, exact=False)}
# The cases of each place, and the number of examples of a hundred.
PLACES: Final = {
    "private": (cases_of(MEMORY) | LARGE, 100),
    "redis": (cases_of(REDIS), 40),
    "synced": ({kind: cases_of(SYNCED)[kind] for kind in OF_ONE_HOST}, 40),
}
ALL: Final = [
    (where, kind, cases, percent)
    for where, (by_kind, percent) in PLACES.items()
    for kind, cases in by_kind.items()
    if kind != "Concurrency"
]


def every_limiter(
    count: int, kinds: Callable[[str], bool] = lambda kind: True
) -> Callable[[Callable[[Trial], None]], Callable[..., None]]:
    """Decorates a test that runs with all limiters at all places."""

    def decorate(test: Callable[[Trial], None]) -> Callable[..., None]:
        chosen = [one for one in ALL if kinds(one[1])]

        @pytest.mark.parametrize(("where", "kind", "cases", "percent"), chosen, ids=[f"{a}-{b}" for a, b, *_ in chosen])
        def run(
            where: str, kind: str, cases: st.SearchStrategy[Case], percent: int, shared_server: RedisServer
        ) -> None:
            @examples(count * percent // 100)
            @given(data=st.data())
            def example(data: st.DataObject) -> None:
                test(Trial(where, data, cases, shared_server))

            example()

        run.__doc__ = test.__doc__
        return run

    return decorate


class Trial:
    """One example: a limiter and its clock, in its place's unit of time."""

    def __init__(self, where: str, data: st.DataObject, cases: st.SearchStrategy[Case], server: RedisServer) -> None:
        self.where, self.data, self.cases, self.server = where, data, cases, server

    @contextmanager
    def limiter(self, most: int | None = None, *, anywhen: bool = False) -> Iterator[Any]:
        cases = self.cases if most is None else self.cases.filter(lambda case: case.rule.most <= most)
        self.case = self.data.draw(cases)
        self.unit_ns = self.case.measure.unit_ns
        self.now = START_S * self.case.measure.second
        if anywhen:
            self.now = self.data.draw(self.case.times(self.now))
        with opened(self.where, self.server, self.now * self.unit_ns) as place:
            self.clock: Clock = place.clock
            yield self.case.make(place.store)

    def units(self, time_ns: int) -> int:
        units, rest = divmod(time_ns, self.unit_ns)
        assert rest == 0
        return units

    def move(self, now: int) -> None:
        self.now = now
        self.clock.set_ns(now * self.unit_ns)

    def goes_on(self) -> bool:
        """Move to a time from now on; False if no time is left for the rest of the example."""
        now = self.data.draw(st.just(self.now) | self.case.times(self.now))
        if now > self.case.measure.latest // 2:
            return False
        self.move(now)
        return True


@every_limiter(20)
def test_fields_of_a_decision_come_true(trial: Trial) -> None:
    with trial.limiter() as limiter:
        for _ in range(trial.data.draw(st.integers(1, 12))):
            if not trial.goes_on():
                break
            cost = trial.data.draw(trial.case.costs() | st.just(limiter.peek("k").remaining))
            decision = limiter.hit("k", cost)
            check_remaining(limiter, trial.case)
            check_waits(limiter, trial, cost, decision)


def check_remaining(limiter: Any, case: Case) -> None:
    remaining = limiter.peek("k", 0).remaining
    if remaining:
        assert limiter.peek("k", remaining)
    if remaining < case.rule.most:
        assert not limiter.peek("k", remaining + 1)


def check_waits(limiter: Any, trial: Trial, cost: int, decision: Any) -> None:
    """Peek before, at and after the reported times; nothing is charged."""
    most, now = trial.case.rule.most, trial.now
    assert (decision.retry_after_ns == 0) is decision.allowed
    allowed_at = now + trial.units(decision.retry_after_ns)
    fresh_at = now + trial.units(decision.reset_after_ns)
    checks: set[int] = {now, fresh_at}
    if not decision:
        checks |= {allowed_at - 1, allowed_at, max(now, allowed_at - MS_NS // trial.unit_ns)}
    if decision.reset_after_ns:
        checks.add(fresh_at - 1)
    for time in sorted(checks):
        trial.move(time)
        if not decision:
            assert limiter.peek("k", cost).allowed is (time >= allowed_at)
        assert (limiter.peek("k").reset_after_ns == 0) is (time >= fresh_at)
        if time == fresh_at:
            assert answer_of(limiter.peek("k", most)) == answer_of(limiter.peek("never seen", most))


@every_limiter(20)
def test_sleeping_for_retry_after_suffices(trial: Trial) -> None:
    """A caller does ``time.sleep(decision.retry_after)``, with a float."""
    with trial.limiter() as limiter:
        limiter.hit("k", trial.case.rule.most)
        cost = trial.data.draw(trial.case.costs())
        trial.clock.advance(limiter.peek("k", cost).retry_after)
        assert limiter.hit("k", cost)
        trial.clock.advance(limiter.peek("k", cost).reset_after)
        assert answer_of(limiter.peek("k", cost)) == answer_of(limiter.peek("never seen", cost))


@every_limiter(20)
def test_limiter_admits_at_most_its_limit_at_one_instant(trial: Trial) -> None:
    with trial.limiter(anywhen=True) as limiter:
        costs = trial.data.draw(st.lists(trial.case.costs(), max_size=60))
        passed = sum(cost for cost in costs if limiter.hit("k", cost))
        # Take the reported remainder until none is left.
        while left := limiter.peek("k", 0).remaining:
            assert limiter.hit("k", left)
            passed += left
        assert not limiter.allow("k")
        assert passed <= trial.case.rule.most


@every_limiter(15, lambda kind: "Bucket" not in kind or "Window" in kind)
def test_single_requests_use_up_the_limit_exactly(trial: Trial) -> None:
    with trial.limiter(most=1000, anywhen=True) as limiter:
        most = trial.case.rule.most
        if trial.where != "private" or trial.data.draw(st.booleans()):
            passed = limiter.allow_many(["k"] * (most + 2))
        else:
            passed = [limiter.allow("k") for _ in range(most + 2)]
        assert passed == [True] * most + [False] * 2


@every_limiter(20)
def test_more_remains_after_next_after(trial: Trial) -> None:
    with trial.limiter() as limiter:
        for _ in range(trial.data.draw(st.integers(1, 8))):
            decision = limiter.hit("k", trial.data.draw(trial.case.costs()))
            if not decision:
                assert decision.next_after_ns == decision.retry_after_ns
            elif decision.remaining == decision.limit:
                assert decision.next_after_ns == 0
            else:
                # Over Redis some permits come between two microseconds: round up.
                trial.move(trial.now - -decision.next_after_ns // trial.unit_ns)
                assert limiter.peek("k", decision.remaining + 1)
            assert decision.next_after_ns <= max(decision.reset_after_ns, decision.retry_after_ns)
            assert decision.next_after >= decision.next_after_ns / 1e9
            if not trial.goes_on():
                break

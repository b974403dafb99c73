"""Several processes share each kind of limiter: together they get the limit, to the permit.

``tests/proof`` has the long run: all sizes of costs, a clock that moves, kills and stops.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest
from limiter_kinds import HOUR_MS, KEY, KINDS, MS, Kind, every_kind_with_a_limit
from process_helpers import Crew, Meeting, until_raced

from forebay import LeakyBucket, Store
from forebay.testing import ManualClock

PROCESSES: Final = 4


@every_kind_with_a_limit
def test_processes_together_get_exactly_the_limit(crew: Crew, name: str, kind: Kind) -> None:
    """They request exactly the limit, and then more."""
    limit, keys = 6000, 3
    clock = ManualClock(1_000_000)

    def turn(number: int) -> int:
        before = store.stats().total
        answers = crew.run(PROCESSES, _take_a_share, name, kind, limit, keys, Meeting(PROCESSES))
        after = store.stats().total
        assert answers == [(limit // PROCESSES * keys, 0)] * PROCESSES
        assert after.allowed - before.allowed == limit * keys
        assert after.evicted == after.full == 0
        # The next turn meets the states of this one, expired.
        clock.advance(3 * 3600)
        return after.cas_retries - before.cas_retries

    with Store(name, keys=100, clock=clock) as store:
        kind.make(store, "limiter", limit, HOUR_MS)
        until_raced(turn)


def _take_a_share(me: int, name: str, kind: Kind, limit: int, keys: int, meeting: Meeting) -> tuple[int, int]:
    with Store(name, keys=100, clock=ManualClock()) as store:
        allow = kind.make(store, "limiter", limit, HOUR_MS).allow
        meeting.wait(me)
        taken = sum([allow(key) for _ in range(limit // PROCESSES) for key in range(keys)])
        meeting.wait(me)
        return taken, sum([allow(key) for _ in range(50) for key in range(keys)])


@pytest.mark.parametrize("kind", [KINDS["token bucket"], KINDS["leaky bucket"]], ids=["token bucket", "leaky bucket"])
def test_processes_book_each_moment_once(crew: Crew, name: str, kind: Kind) -> None:
    limit = 3600
    unit_ns = HOUR_MS * MS // limit
    clock = ManualClock(1_000_000)

    def turn(number: int) -> int:
        before = store.stats().total
        results = crew.run(PROCESSES, _reserve, name, kind, limit, Meeting(PROCESSES))
        now_ns = round(clock.now() * 1e9)
        dues = Counter(due_ns - now_ns for result in results for due_ns in result)
        if isinstance(limiter, LeakyBucket):
            assert dues == Counter(range(0, limit * unit_ns, unit_ns))
        else:
            # A whole burst now, the rest one by one.
            booked = PROCESSES * limit
            assert dues == Counter([0] * limit + [unit_ns * (i + 1) for i in range(booked - limit)])
        clock.advance(20 * 3600)
        return store.stats().total.cas_retries - before.cas_retries

    with Store(name, keys=100, clock=clock) as store:
        limiter = kind.make(store, "limiter", limit, HOUR_MS)
        until_raced(turn)


def _reserve(me: int, name: str, kind: Kind, limit: int, meeting: Meeting) -> list[int]:
    with Store(name, keys=100, clock=ManualClock()) as store:
        reserve = kind.make(store, "limiter", limit, HOUR_MS).reserve
        meeting.wait(me)
        booked = [reserve(KEY) for _ in range(limit)]
        return [reservation.due_ns for reservation in booked if reservation]

"""Refunds that race with charges: no permit is lost, and none is granted twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from process_helpers import Crew, Meeting

from forebay import BucketedWindow, SlidingLog, Store
from forebay.testing import ManualClock

LIMIT: Final = 8
WORKERS: Final = 3
HELD: Final = LIMIT - WORKERS
TURNS: Final = 40
PAIRS: Final = 5_000

# The period is so long that no permit leaves a window during the test.
# One kind also has a mark in an older bucket without requests.
TWO_BUCKETS: Final = "bucketed window, with an older bucket"
MAKERS: Final[dict[str, Callable[[Store], Any]]] = {
    "sliding log": lambda store: SlidingLog(store, "api", f"{LIMIT}/year", keys=1),
    "bucketed window": lambda store: BucketedWindow(store, "api", f"{LIMIT}/year", 4, keys=1),
    TWO_BUCKETS: lambda store: BucketedWindow(store, "api", f"{LIMIT}/hour", keys=1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_refunds_that_race_with_hits_lose_and_duplicate_no_permit(crew: Crew, kind: str) -> None:
    """The limit has one permit for each worker beside those that stay held, so no worker is ever denied one."""
    for _ in range(TURNS):
        with Store.private(keys=1, clock=ManualClock(100) if kind == TWO_BUCKETS else "monotonic") as store:
            limiter = MAKERS[kind](store)
            assert limiter.hit("k", HELD)
            results = crew.run(WORKERS, _take_and_give_back, limiter, Meeting(WORKERS))
            crew.workers.clear()
            assert results == [(PAIRS, 0)] * WORKERS
            assert limiter.peek("k").remaining == LIMIT - HELD


def _take_and_give_back(me: int, limiter: Any, meeting: Meeting) -> tuple[int, int]:
    """How often the worker got a permit, and how often it got more than were free."""
    meeting.wait(me)
    one = too_many = 0
    for _ in range(PAIRS):
        too_many += limiter.hit("k", LIMIT - HELD + 1).allowed
        if limiter.allow("k"):
            one += 1
            limiter.refund("k")
    return one, too_many

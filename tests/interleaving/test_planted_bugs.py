"""Each step of the protocols is needed: without it, the explorer finds a schedule that goes wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from leased_scenes import LEASED_FOUND_BY, LEASED_SCENES
from planted_bugs import BUGS, number_of
from scenes import SCENES
from synced_scenes import SYNCED_FOUND_BY, SYNCED_SCENES

# By which program each is found.
FOUND_BY = {
    "a cell is written by two stores": "fixed window: hits",
    "a denial is not confirmed": "reuse of an expired cell",
    "a denial writes the cell as it is": "who is denied writes nothing: fixed window",
    "words are judged by a state that may be another key's": "bucketed window: eviction between two reads",
    "no scan after the claim": "insertion by two",
    "a claim at a later position stands": "insertion beside another key",
    "who finds no room is allowed": "reuse of an expired cell",
    "a look at words is not confirmed": "a look at a sliding log",
    "the scan goes on where it meets an earlier claim": "insertion, three claims",
    "a refund is by no clock": "fixed window: hits and a refund",
    "claims are not helped": "insertion by two",
    "the scan is not sequentially consistent": "insertion beside another key on weaker memory",
    "the clock is read before the scan": "reuse of an expired cell",
    "a key evicts itself": "no eviction by itself",
    "a key that was met while room was looked for is forgotten": "insertion, a member that becomes a claim",
    "a key is not looked for again where there is no room": "insertion, a key that moves",
    "all claims have one id": "insertion, two claims in one cell",
    "a reset removes whatever stands in the cell": "removal by two",
    "a member is promoted over": "insertion by two",
    "an old reading opens an old window": "fixed window: hits",
    "an unwritten entry is not written for its claimant": "sliding log: hits",
    "an unwritten entry is dated before its claim": "sliding log: hits",
    "the lap is not looked at": "sliding log: larger costs",
    "a refund takes entries that were claimed since": "sliding log: a refund behind a refund and a hit",
    "a refund takes an entry of two laps later": "sliding log: two laps later",
    "entries of a lap further on are taken for unwritten ones": "sliding log: a helper a lap late",
    "what has left is judged by a date ahead of the clock": "sliding log: a helper's date ahead of the clock",
    "who clears begins with the newest entry": "sliding log: a clear stopped half-way for a window",
    "a refund looks at one state only": "sliding log: a refund behind a hit and a refund",
    "who gives back is told the time once": "sliding log: a cancellation that is stopped for a window",
    "what is charged later is given back": "sliding log: more is given back than there is",
    "what is charged once all has left is given back": "sliding log: a refund that is stopped for a window",
    "what others have changed meanwhile is told": "sliding log: what is told once others have come",
    "a later claim of the same key is taken for the one that is cleared for": "sliding log: a clear of a later claim",
    "who clears stops at what may count for a quantum": "sliding log: a clear within a quantum",
    "two laps bear one date": "sliding log: two laps within one instant",
    "permits before those given back are not looked at": "sliding log: a refund while the window moves on",
    "an evicted key's permit is dated by the clock alone": "sliding log: eviction ahead of the clock",
    "an entry written meanwhile is taken for one whose place is taken": (
        "sliding log: eviction of what is being written"
    ),
    "a new key's entries are cleared with the old one's": "sliding log: eviction",
    "an evicted key's entries stay": "sliding log: a clean start after an eviction",
    "a bucket has no mark": "bucketed window: hits",
    "old permits count in a new key's buckets": "bucketed window: a clean start after an eviction",
    "a refund gives back more than there is": "bucketed window: two refunds of more than there is",
    "a later bucket's mark is taken for none": "bucketed window: hits",
    "what was charged before a denial is kept": "two limits at once",
    "a batch takes a lost CAS for one that was done": "a batch over a boundary",
    "who loses a race for a request's mark keeps its charge": "one request sent twice",
    "what was let in uncharged, sent twice, is given back": "one request sent twice, let in uncharged",
    "a slot that is held is taken": "slots: one for two",
    "a slot that is held is marked again": "who is denied writes nothing: slots",
    "who doesn't get all keeps some": "slots: two at once",
    "nobody looks for ended processes": "slots: one for two",
    "what has been refilled is given back": "a booking of which some has been refilled is cancelled",
    "a booking that others have booked behind is given back": "booking ahead",
    "a slot is given back whoever holds it": "slots: leases that end",
    **LEASED_FOUND_BY,
    **SYNCED_FOUND_BY,
}


def test_every_bug_is_looked_for() -> None:
    assert set(FOUND_BY) == {bug.name for bug in BUGS}


@pytest.mark.parametrize("bug", FOUND_BY)
def test_found(bug: str, record: Callable[[str, object], None]) -> None:
    explorable = (SCENES | LEASED_SCENES | SYNCED_SCENES)[FOUND_BY[bug]]
    planted = number_of(bug)
    found = explorable.make().explore(**explorable.quick, planted=planted)
    assert found.verdict in {"wrong", "broken", "held up"}
    # The schedule by itself goes wrong in the same way, in another segment with other hashes.
    again = explorable.make().explore(**explorable.quick, planted=planted, replay=found.replay)
    assert (again.verdict, again.executions) == (found.verdict, 1)
    assert again.trace.count("\n") == found.trace.count("\n")
    # And it is the bug that does it.
    assert explorable.make().explore(**explorable.quick, replay=found.replay).verdict in {"complete", "not the same"}
    record(f"planted: {bug}", f"{found.verdict} after {found.executions:,} schedules")

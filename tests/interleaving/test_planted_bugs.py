"""Each step of the protocols is needed: without it, the explorer finds a schedule that goes wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hot_keys_scenes import HOT_KEYS_FOUND_BY, HOT_KEYS_SCENES
from leased_scenes import LEASED_FOUND_BY, LEASED_SCENES
from planted_bugs import BUGS, number_of
from resize_scenes import RESIZE_FOUND_BY, RESIZE_SCENES
from scenes import SCENES
from synced_scenes import SYNCED_FOUND_BY, SYNCED_SCENES

# By which program each is found.
FOUND_BY = {
    "a cell is written by two stores": "fixed window: hits",
    "a denial is not confirmed": "reuse of an expired cell",
    "a denial writes the cell as it is": "a denial writes nothing: fixed window",
    "a record is judged by a state that may be another key's": "bucketed window: eviction between two reads",
    "no scan after the claim": "insertion by two",
    "a claim at a later position stands": "insertion beside another key",
    "a request without room is allowed": "reuse of an expired cell",
    "a look at a record is not confirmed": "a look at a sliding log",
    "the scan goes on where it meets an earlier claim": "insertion, three claims",
    "a refund is by no clock": "fixed window: hits and a refund",
    "claims are not helped": "insertion by two",
    "the scan is not sequentially consistent": "insertion beside another key on weaker memory",
    "a vacancy is taken as it is by now": "reuse of an expired cell",
    "an expired key gives way though a cell is empty": "insertion beside expired keys",
    "eviction looks at the expiry alone": "eviction, a log at its limit",
    "eviction doesn't look at what a state tells of use": "eviction, a first window at its limit",
    "the clock is read before the scan": "reuse of an expired cell",
    "a key evicts itself": "no eviction by itself",
    "a key that the search for room has met is forgotten": "insertion, a member that becomes a claim",
    "a key is not searched again where there is no room": "insertion, a key that moves",
    "all claims have one id": "insertion, two claims in one cell",
    "a denied insertion is not confirmed": "sliding log: eviction",
    "a denied insertion empties whatever its cell holds": "sliding log: eviction",
    "a reset removes whatever stands in the cell": "removal by two",
    "a member is promoted over": "insertion by two",
    "an old reading opens an old window": "fixed window: hits",
    "an unwritten entry is not written for its claimant": "sliding log: hits",
    "an unwritten entry is dated before its claim": "sliding log: hits",
    "the lap is not checked": "sliding log: larger costs",
    "a refund takes entries that were claimed since": "sliding log: a refund behind a refund and a hit",
    "a refund takes an entry of two laps later": "sliding log: two laps later",
    "entries of a lap further on are taken for unwritten ones": "sliding log: a helper a lap late",
    "permits that have left are judged by a date ahead of the clock": "sliding log: a helper's date ahead of the clock",
    "a clear begins with the newest entry": "sliding log: a clear stopped half-way for a window",
    "a refund reads one state only": "sliding log: a refund behind a hit and a refund",
    "a refund reads the clock only once": "sliding log: a cancellation that is stopped for a window",
    "a permit charged later is given back": "sliding log: a refund of more than there is",
    "a permit charged once all have left is given back": "sliding log: a refund that is stopped for a window",
    "a decision ignores the requests that came since": "sliding log: decisions after other requests",
    "a later claim of the same key is taken for the one that is cleared for": "sliding log: a clear of a later claim",
    "a clear stops at an entry that may count for a quantum": "sliding log: a clear within a quantum",
    "two laps bear one date": "sliding log: two laps within one instant",
    "permits before those given back are not checked": "sliding log: a refund while the window moves on",
    "an evicted key's permit is dated by the clock alone": "sliding log: eviction ahead of the clock",
    "an entry written meanwhile is taken for one whose place is taken": (
        "sliding log: eviction while entries are written"
    ),
    "a new key's entries are cleared with the old one's": "sliding log: eviction",
    "an evicted key's entries stay": "sliding log: a clean start after an eviction",
    "a bucket has no mark": "bucketed window: hits",
    "old permits count in a new key's buckets": "bucketed window: a clean start after an eviction",
    "a refund gives back more than there is": "bucketed window: two refunds of more than there is",
    "a later bucket's mark is taken for none": "bucketed window: hits",
    "the charges before a denial are kept": "two limits at once",
    "a new key of a bucket with initial permits starts full": "token bucket with initial permits: hits",
    "the loser of a race for the mark of several limits keeps its charges": "one request to two limits, sent twice",
    "a request to several limits is marked before it is charged": "one request to two limits, sent twice",
    "a batch takes a lost CAS for one that was done": "a batch over a boundary",
    "the loser of a race for a request's mark keeps its charge": "one request sent twice",
    "a request let in uncharged, sent twice, gives a charge back": "one request sent twice, let in uncharged",
    "a slot that is held is taken": "slots: one for two",
    "a slot that is held is marked again": "a denial writes nothing: slots",
    "a request that doesn't get all its slots keeps some": "slots: two at once",
    "no process looks for ended processes": "slots: one for two",
    "refilled permits are given back": "a booking that is partly refilled is cancelled",
    "a booking that others have booked behind is given back": "booking ahead",
    "a release frees a slot of any process": "slots: leases that end",
    "a repeated request takes over whatever its slot holds": (
        "permits by id: one takes over, one releases, one acquires"
    ),
    "a take-over expects the pair that the slot holds by now": (
        "permits by id: one takes over, one releases, one acquires"
    ),
    "a take-over that loses the race for the mark keeps its permits": "permits by id: two take over",
    "the loser of a race for the mark of permits keeps them": "permits by id: two send it, for two permits",
    "the loser of a race for the mark of permits is allowed": "permits by id: two send it, for two permits",
    "a repeated request that finds no permits doesn't look at its mark again": (
        "permits by id: two send it, for one permit"
    ),
    "a renewal takes permits back that were taken over": "permits by id: one takes over, one renews",
    "a reset leaves permits that are renewed meanwhile": "permits by id: one renews, one resets",
    "a refund by an id takes permits over and keeps them": "permits by id: two refund, another request comes",
    "a lease by an id ends with that of the earlier request": (
        "permits by id: their lease ends, another request comes"
    ),
    "permits above the burst end by an old reading": "token bucket: permits above the burst are spent",
    "permits above the burst expire": "permits above the burst are not evicted",
    "added permits take the place of others above the burst": "insertion by two that add permits",
    "a key without credits takes a cell to be denied": "credits: a denied key needs no room",
    "added credits take the place of others": "credits: permits are added",
    "a key gets no credits back that has lost its cell": "credits: permits are given back",
    **HOT_KEYS_FOUND_BY,
    **LEASED_FOUND_BY,
    **RESIZE_FOUND_BY,
    **SYNCED_FOUND_BY,
}


def test_every_bug_is_looked_for() -> None:
    assert set(FOUND_BY) == {bug.name for bug in BUGS}


@pytest.mark.parametrize("bug", FOUND_BY)
def test_found(bug: str, record: Callable[[str, object], None]) -> None:
    explorable = (SCENES | HOT_KEYS_SCENES | LEASED_SCENES | RESIZE_SCENES | SYNCED_SCENES)[FOUND_BY[bug]]
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

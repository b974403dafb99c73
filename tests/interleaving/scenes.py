"""The programs that are explored: for each its scene, the bounds of a quick proof, and what a full one adds to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from leased_programs import LeasedScene
from oracle import Above, Bucket, InitialBucket, Prepaid, ToppedUpBucket
from oracle_counts import BucketedWindow as Buckets
from oracle_counts import ClockWindow, IntervalBucket, Log, first_window_in_memory
from oracle_counts import SlidingWindow as Sliding
from programs import (
    NS,
    Scene,
    SceneOfAnswers,
    SceneOfExpiredKeys,
    SceneOfKeptLimit,
    SceneOfOneRequest,
    SceneOfOneRequestToSeveral,
    SceneOfRepeats,
    SceneOfRoomLater,
    SceneOfSeveral,
    SceneOfSlots,
)
from synced_programs import SyncedScene

import forebay

# At a time at which the date in a log's state is rounded up, by up to three nanoseconds.
ODD_NS = 1_000_000 * NS + 1
# So near the end of a second that a jump of ten nanoseconds crosses it.
EDGE_NS = 1_000_000 * NS - 5


@dataclass(frozen=True)
class Explorable:
    make: Callable[[], Scene | SceneOfSlots | LeasedScene | SyncedScene]
    quick: dict[str, Any]
    full: dict[str, Any] = field(default_factory=dict)


def token_bucket(burst: int, **options: Any) -> Scene:
    return Scene(lambda s: forebay.TokenBucket(s, "limit", "1/second", burst=burst), Bucket(1, NS, burst), **options)


@dataclass(frozen=True)
class DatedAbove(Above):
    since_ns: int


class DatedTopUps(ToppedUpBucket):
    """The rule with the time of the latest change, which the code does without: no charge is dated before it."""

    def dated(self, state: Any, now_ns: int) -> Any:
        return DatedAbove(state.permits, now_ns) if isinstance(state, Above) else state

    def charged(self, state: Any, now_ns: int, cost: int) -> Any:
        now_ns = max(now_ns, getattr(state, "since_ns", 0))
        return self.dated(super().charged(state, now_ns, cost), now_ns)

    def cancelled(self, state: Any, now_ns: int, cost: int) -> Any:
        return self.dated(super().cancelled(state, now_ns, cost), max(now_ns, getattr(state, "since_ns", 0)))

    def added(self, state: Any, now_ns: int, permits: int) -> Any:
        now_ns = max(now_ns, getattr(state, "since_ns", 0))
        return self.dated(super().added(state, now_ns, permits), now_ns)


def topped_up(burst: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.TokenBucket(s, "limit", "1/second", burst=burst), DatedTopUps(1, NS, burst), **options
    )


def permits_stay() -> Scene:
    """One cell: another key comes, and has no room as long as the first has more permits than its burst."""
    scene = topped_up(1, usable=1, on_full="evict", crowded="another").topped_up(2)
    return scene.hits_of_another(0).hits(1).add(2, "top_up")


def prepaid(**options: Any) -> Scene:
    return Scene(lambda s: forebay.Credits(s, "limit"), Prepaid(), **options)


def credits_back() -> Scene:
    """Two cells: another key may evict a key which has nothing left. Then that one evicts the neighbour."""
    scene = prepaid(usable=2, on_full="evict")
    scene.program.foreign(scene.limiter, 1, scene.at_ns + 1000 * NS)
    scene.topped_up(1)
    return scene.hits(0).add(0, "refund").add(1, "top_up", key=scene.other)


def denial_without_room() -> Scene:
    """One cell, in which another key lives: a denial needs no room."""
    scene = prepaid(usable=1)
    scene.program.foreign(scene.limiter, 0, scene.at_ns + NS)
    return scene.hits(0, 1)


def initial_bucket(burst: int, initial: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.TokenBucket(s, "limit", "1/second", burst, initial=initial),
        InitialBucket(1, NS, burst, initial),
        **options,
    )


def interval_bucket(burst: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.TokenBucket(s, "limit", "1/second", burst=burst, refill="interval"),
        IntervalBucket(1, NS, burst),
        at_ns=EDGE_NS,
        **options,
    )


def leaky_bucket(capacity: int, **options: Any) -> Scene:
    return Scene(lambda s: forebay.LeakyBucket(s, "limit", "1/second", capacity), Bucket(1, NS, capacity), **options)


def min_interval(**options: Any) -> Scene:
    return Scene(lambda s: forebay.MinInterval(s, "limit", "1 second"), Bucket(1, NS, 1), **options)


def fixed_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.FixedWindow(s, "limit", f"{limit}/second"), ClockWindow(limit, NS), at_ns=EDGE_NS, **options
    )


def first_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.FixedWindow(s, "limit", f"{limit}/second", align="first"),
        first_window_in_memory(limit, NS),
        **options,
    )


def sliding_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.SlidingWindow(s, "limit", f"{limit}/second"), Sliding(limit, NS), at_ns=EDGE_NS, **options
    )


def bucketed_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.BucketedWindow(s, "limit", f"{limit}/second", buckets=2, keys=1),
        Buckets(limit, NS, 2),
        at_ns=EDGE_NS,
        borrows=True,
        **{"usable": 2, **options},
    )


def sliding_log(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: forebay.SlidingLog(s, "limit", f"{limit}/second", keys=1),
        Log(limit, NS, readings_differ=True),
        **{"usable": 2, **options},
    )


SECOND = {"clock_moves": 1, "jumps_ns": [NS]}
OVER_THE_EDGE = {"clock_moves": 2, "jumps_ns": [10]}
BUCKETS = {"clock_moves": 2, "jumps_ns": [10, NS // 2]}
LATER = {"clock_moves": 2, "jumps_ns": [NS]}
# A key that comes to a log's cell is dated behind the evicted one: some nanoseconds, by a clock that stands still.
BEHIND = {"clock_moves": 1, "jumps_ns": [NS + 100]}

WINDOW_LATER = {"clock_moves": 1, "jumps_ns": [NS + 10]}

SCENES: dict[str, Explorable] = {}

# The limiters whose state is their cell.
ONE_CELL: dict[str, tuple[Callable[..., Scene], dict[str, Any]]] = {
    "token bucket": (token_bucket, SECOND),
    "token bucket in intervals": (interval_bucket, OVER_THE_EDGE),
    "leaky bucket": (leaky_bucket, SECOND),
    "fixed window": (fixed_window, OVER_THE_EDGE),
    "window from the first request": (first_window, SECOND),
    "sliding window": (sliding_window, OVER_THE_EDGE),
}


def one_cell(name: str, make: Callable[..., Scene], times: dict[str, Any]) -> dict[str, Explorable]:
    return {
        f"{name}: hits": Explorable(lambda: make(2).before().hits(0, 1, 2), {**times, "crashes": 1}, {"crashes": 2}),
        f"{name}: hits and a refund": Explorable(
            lambda: make(2).before().hits(0, 1).add(2, "refund"), {**times, "crashes": 1}, {"crashes": 2}
        ),
        f"{name}: larger costs": Explorable(
            lambda: make(3).before().hits(0, cost=2).hits(1).hits(2, cost=2), times, {"crashes": 1}
        ),
        f"{name}: two each": Explorable(
            lambda: make(3).before().hits(0, 1, 0, 1), {**times, "crashes": 1}, {"crashes": 2}
        ),
        f"{name}: hits on weaker memory": Explorable(
            lambda: make(2).before().hits(0, 1, 2), {**times, "stale_reads": 2}, {"crashes": 1, "stale_reads": 3}
        ),
    }


for _name, (_make, _times) in ONE_CELL.items():
    SCENES |= one_cell(_name, _make, _times)


# One key comes to a table in which another comes and goes, so that two claims can stand in two cells.


def insertion_beside_another() -> Scene:
    scene = token_bucket(1, usable=2, crowded=True)
    scene.program.foreign(scene.limiter, 0, scene.at_ns - 1)
    return scene.hits(0, 1).hits(2, key=scene.other).add(2, "reset", key=scene.other)


def reuse() -> Scene:
    """One cell for all: it expires, and is another key's."""
    scene = token_bucket(1, usable=1, crowded=True)
    return scene.before().hits(0).hits(1, key=scene.other).hits(2)


def reuse_by_itself() -> Scene:
    return token_bucket(1, usable=1).before().hits(0, 1)


def eviction() -> Scene:
    """Two keys and one cell: what a key has used is forgotten when the other one comes, and only then."""
    scene = token_bucket(1, usable=1, on_full="evict", evicts=True, crowded=True)
    return scene.hits(0, 1).hits(2, key=scene.other)


def no_eviction_of_a_neighbour() -> Scene:
    """Two keys and two cells: there is room for both, in any order."""
    scene = token_bucket(1, usable=2, on_full="evict")
    return scene.before(key=scene.other).hits(0, 1).hits(2, key=scene.other)


def evictions(make: Callable[..., Scene], **options: Any) -> Scene:
    """Of words: one cell, in which a key at its limit gives way to another one that uses all of its own."""
    scene = make(2, usable=1, on_full="evict", evicts=True, crowded=True, **options)
    return scene.before(2).hits(0, key=scene.other).hits(1, 1, key=scene.other).hits(2, cost=2, key=scene.other)


def three_claims() -> Scene:
    """In three cells: the last one is the longest vacant, then the first, then the second. So a scan for the last one
    may have looked at the first before there was a claim, and come to the one in the second.
    """
    scene = token_bucket(1, usable=3)
    for cell in range(2):
        scene.program.foreign(scene.limiter, cell, scene.at_ns - 2 + cell)
    return scene.hits(0, 1, 2)


def moving_claim() -> Scene:
    """A request with an older clock reading finds room in the last cell only. Its claim there gives way to this key's
    claim in the first cell.
    """
    scene = token_bucket(1, usable=3)
    for cell in range(2):
        scene.program.foreign(scene.limiter, cell, scene.at_ns + 1 + cell)
    return scene.hits(0, 1, 2)


def moving_key() -> Scene:
    """The same, and another key that takes the cell left: all of them have been looked at, and none was this key's."""
    scene = token_bucket(3, usable=2, crowded="another")
    scene.program.foreign(scene.limiter, 0, scene.at_ns + 1)
    return scene.hits(0, 1, 2).hits_of_another(2)


def insertion_beside_expired_keys() -> Scene:
    """Two keys come, and two cells away from their home line are empty."""
    scene = SceneOfExpiredKeys(lambda s: forebay.TokenBucket(s, "limit", "1/second", burst=2), Bucket(1, NS, 2))
    return scene.hits(0).hits_of_another(1, 1)


def insertion_away_from_expired_keys() -> Scene:
    """Keys have expired in the home line, and one cell elsewhere is empty. Of three requests of one key, one may claim
    the empty cell, and another one, which finds no empty cell any more, a cell at home.
    """
    scene = token_bucket(2, usable=5)
    for cell in range(4):
        scene.program.foreign(scene.limiter, cell, scene.at_ns - 1 - cell)
    return scene.hits(0, 1, 2)


def claims_in_one_cell() -> Scene:
    """One claim is given up for a claim in the other cell. A process that had chosen the cell before places another
    claim there: the two differ.
    """
    scene = token_bucket(1, usable=2)
    scene.program.foreign(scene.limiter, 0, scene.at_ns - 1)
    return scene.hits(0, 1, 2)


def eviction_between_reads() -> Scene:
    """While a process reads its key's cell, another key moves in. A mark that is written too late is too small, which
    leaves less than there might be.
    """
    scene = bucketed_window(2, usable=1, on_full="evict", evicts=True, crowded=True, exact_finals=False)
    return scene.before().hits(0).hits_of_another(1, 2)


def answers_of_a_log() -> Scene:
    return SceneOfAnswers(
        lambda s: forebay.SlidingLog(s, "limit", "2/second", keys=1), Log(2, NS, readings_differ=True), usable=2
    )


def two_laps() -> Scene:
    """While a process gives back a permit, its key's cell comes to another key, and the ring comes round twice."""
    return sliding_log(1, usable=1, crowded=True).before().add(0, "refund").hits_of_another(1, 1, 1)


def two_laps_at_once() -> Scene:
    """The same within one instant, by evictions and refunds."""
    scene = sliding_log(1, usable=1, on_full="evict", evicts=True, crowded=True).before().add(0, "refund")
    return scene.hits_of_another(1).add(1, "refund", key=scene.other).hits_of_another(1, 1)


def two_laps_of_one_key() -> Scene:
    """The same by refunds alone: a late writer finds the ring as it was, with other dates."""
    return sliding_log(1, usable=1, crowded=True).hits(0, 1).add(2, "refund").add(2, "refund").hits(2, 2)


def eviction_ahead_of_the_clock() -> Scene:
    """An evicted key's process has a date to write that is later than the clock."""
    scene = sliding_log(1, usable=1, on_full="evict", evicts=True, crowded=True)
    scene.before().given_back().before().given_back()
    return scene.hits(0).hits_of_another(1).add(1, "refund", key=scene.other)


def late_helper() -> Scene:
    """A process that is stopped after it has read a state finds, when it goes on, another lap's entries in the ring."""
    scene = sliding_log(3, usable=1, at_ns=ODD_NS, exact=False, exact_finals=False)
    return scene.before().hits(0).hits(1, 1, 1, 1, 1)


def helped_ahead_of_the_clock() -> Scene:
    """A helper dates the entries of another process up to a quantum late: as of a time when the first four have left,
    which has not come yet.
    """
    return sliding_log(5, usable=1, at_ns=ODD_NS + 1).before(4).hits(0).hits(1, cost=4)


def eviction_of_what_is_being_written() -> Scene:
    """While another key's process clears, the evicted key's writes the first of its two entries: the second one must
    not be dated as if it took the first one's place, a window later.
    """
    scene = sliding_log(2, usable=1, on_full="evict", evicts=True, crowded=True)
    return scene.hits(0, cost=2).hits_of_another(1)


def clear_half_way() -> Scene:
    """Of two entries that an evicted key has not written, one is, and a window passes."""
    scene = sliding_log(
        2, usable=1, at_ns=ODD_NS, on_full="evict", evicts=True, crowded=True, exact=False, exact_finals=False
    )
    return scene.hits(0, cost=2).hits_of_another(1).hits_of_another(2, 2, 2)


def clear_of_a_later_claim() -> Scene:
    """A process that clears for one claim is stopped, and then finds another claim of the same key in the same cell."""
    scene = sliding_log(1, usable=1, on_full="evict", evicts=True, crowded="by claims", exact=False, exact_finals=False)
    third = scene.program.key(scene.limiter, number=2)
    scene.hits(0).hits_of_another(1, 2).hits(2).hits(2, key=third)
    return scene.hits_of_another(2, 2)


def clear_within_a_quantum() -> Scene:
    """The older of an evicted key's entries is dated later than the newer one, by a helper that was slower."""
    scene = sliding_log(
        3, usable=1, at_ns=ODD_NS, on_full="evict", evicts=True, crowded=True, exact_finals=False, borrows=True
    )
    return scene.hits(0, cost=2).add(1, "peek").hits(2, cost=2, key=scene.other)


def removal() -> Scene:
    return token_bucket(2, usable=2).before().hits(0, 1).add(2, "reset")


def removal_by_two() -> Scene:
    """The second process may find another key in the cell."""
    return token_bucket(1, usable=1, crowded=True).before().add(0, "reset").add(1, "reset").hits_of_another(1)


SCENES |= {
    "token bucket: permits are added": Explorable(
        lambda: topped_up(2).before().hits(0, cost=2).hits(1).add(2, "top_up", 2),
        {**SECOND, "crashes": 1},
        {"crashes": 2},
    ),
    "token bucket: permits above the burst are spent": Explorable(
        lambda: topped_up(2).topped_up(2).hits(0, cost=2).hits(1, 0), {**SECOND, "crashes": 1}, {"crashes": 2}
    ),
    "token bucket: permits above the burst are given back": Explorable(
        lambda: topped_up(2).topped_up(2).reserves(0, 0, cancels=True).hits(1).add(2, "refund"), SECOND, {"crashes": 1}
    ),
    "token bucket: permits are added on weaker memory": Explorable(
        lambda: topped_up(1).topped_up(1).hits(0).add(1, "top_up").hits(2),
        {"crashes": 1, "stale_reads": 2},
        {"stale_reads": 3},
    ),
    "insertion by two that add permits": Explorable(
        lambda: topped_up(1).add(0, "top_up").add(1, "top_up", 2), {"crashes": 1}, {"crashes": 2}
    ),
    "credits: permits are added": Explorable(
        lambda: prepaid().topped_up(1).hits(0).hits(1).add(2, "top_up", 2), {"crashes": 1}, {"crashes": 2}
    ),
    "credits: permits are spent": Explorable(
        lambda: prepaid().topped_up(2).hits(0, 1, 2), {"crashes": 1, "stale_reads": 2}, {"crashes": 2}
    ),
    "credits: permits are given back": Explorable(credits_back, {"crashes": 1}, {"crashes": 2}),
    "credits: a denied key needs no room": Explorable(denial_without_room, {"crashes": 1}, {"crashes": 2}),
    "credits: a key without any is denied": Explorable(
        lambda: prepaid(usable=1, on_full="evict").hits(0).add(1, "top_up").hits(2), {"crashes": 1}, {"crashes": 2}
    ),
    "permits above the burst are not evicted": Explorable(permits_stay, {"crashes": 1}, {"crashes": 2}),
    "token bucket with initial permits: hits": Explorable(
        lambda: initial_bucket(3, 2).hits(0, 1), {**SECOND, "crashes": 1}, {"crashes": 2}
    ),
    "token bucket with initial permits: hits and a refund": Explorable(
        lambda: initial_bucket(3, 2).before().hits(0, 1).add(2, "refund"), {**SECOND, "crashes": 1}, {"crashes": 2}
    ),
    "insertion by two": Explorable(lambda: token_bucket(1).hits(0, 1), {"crashes": 1}, {"crashes": 2}),
    "insertion by two on weaker memory": Explorable(
        lambda: token_bucket(1, usable=3).hits(0, 1), {"crashes": 1, "stale_reads": 2}, {"stale_reads": 4}
    ),
    "insertion by three": Explorable(
        lambda: token_bucket(2, usable=3).hits(0, 1, 2), {"preemptions": 4}, {"preemptions": 5, "crashes": 1}
    ),
    "insertion beside another key": Explorable(insertion_beside_another, {"preemptions": 4}, {"crashes": 1}),
    "insertion beside another key on weaker memory": Explorable(
        insertion_beside_another, {"preemptions": 3, "stale_reads": 2}, {"stale_reads": 3}
    ),
    "insertion beside expired keys": Explorable(insertion_beside_expired_keys, {"crashes": 1}, {"crashes": 2}),
    "insertion away from expired keys": Explorable(
        insertion_away_from_expired_keys, {"preemptions": 3}, {"preemptions": 4}
    ),
    "reuse of an expired cell": Explorable(reuse, {**LATER, "preemptions": 4}, {"preemptions": None, "crashes": 1}),
    "reuse by the same key": Explorable(reuse_by_itself, {**LATER, "crashes": 1}, {"crashes": 2}),
    "no eviction by itself": Explorable(
        lambda: token_bucket(1, usable=1, on_full="evict").hits(0, 1), {"crashes": 1}, {"crashes": 2}
    ),
    "eviction": Explorable(eviction, {"preemptions": 4}, {"preemptions": None, "crashes": 1}),
    "eviction, a first window at its limit": Explorable(
        lambda: SceneOfKeptLimit(
            lambda s: forebay.FixedWindow(s, "limit", "3/second", align="first"), first_window_in_memory(3, NS)
        ),
        {"preemptions": 3},
        {"preemptions": 5, "crashes": 1},
    ),
    "eviction, a log at its limit": Explorable(
        lambda: SceneOfKeptLimit(
            lambda s: forebay.SlidingLog(s, "limit", "2/second", keys=3), Log(2, NS, readings_differ=True)
        ),
        {"preemptions": 2},
        {"preemptions": 3},
    ),
    "one cell for two": Explorable(lambda: token_bucket(2, usable=1).hits(0, 1), {"crashes": 1}, {"crashes": 2}),
    "no eviction of a neighbour": Explorable(no_eviction_of_a_neighbour, {}, {"crashes": 1}),
    "removal": Explorable(removal, {"crashes": 1}, {"crashes": 2}),
    "removal by two": Explorable(removal_by_two, {"crashes": 1}, {"crashes": 2}),
    "insertion, three claims": Explorable(three_claims, {"preemptions": 5}, {"crashes": 1}),
    "insertion, a claim that moves": Explorable(
        moving_claim, {"preemptions": 5, "clock_moves": 1, "jumps_ns": [2]}, {"preemptions": 5}
    ),
    "insertion, a key that moves": Explorable(
        moving_key, {"preemptions": 3, "clock_moves": 1, "jumps_ns": [2]}, {"preemptions": 5}
    ),
    "insertion, two claims in one cell": Explorable(claims_in_one_cell, {"preemptions": 5}, {"crashes": 1}),
    "insertion, always room for one key": Explorable(
        lambda: token_bucket(1, usable=1, on_full="allow").hits(0, 1, 2),
        {**LATER, "preemptions": 3},
        {"preemptions": 5},
    ),
    "insertion, a member that becomes a claim": Explorable(
        lambda: token_bucket(1, usable=1, on_full="allow").hits(0, 1).add(2, "reset").hits(2), {"preemptions": 5}
    ),
}

SCENES["minimum interval: hits"] = Explorable(
    lambda: min_interval().hits(0, 1), {**SECOND, "crashes": 1}, {"crashes": 2, "stale_reads": 2}
)

SCENES |= {
    "bucketed window: hits": Explorable(
        lambda: bucketed_window(2).before().hits(0, 1, 2), {**BUCKETS, "crashes": 1}, {"crashes": 2}
    ),
    "bucketed window: two each": Explorable(
        lambda: bucketed_window(3).before().hits(0, 1, 0, 1), {**BUCKETS, "crashes": 1}, {"clock_moves": 3}
    ),
    "bucketed window: a charge between mark and claim": Explorable(
        lambda: bucketed_window(3).before().hits(0, 1).hits(2, cost=2), BUCKETS, {"crashes": 1}
    ),
    "bucketed window: hits and a refund": Explorable(
        lambda: bucketed_window(2).before().hits(0, 1).add(2, "refund"),
        {**BUCKETS, "crashes": 1},
        {"crashes": 2},
    ),
    "bucketed window: a refund while the window moves on": Explorable(
        lambda: bucketed_window(2, exact_finals=False).before().hits(0).add(1, "refund").hits(2, 2),
        {**BUCKETS, "preemptions": 3},
        {"preemptions": None},
    ),
    "bucketed window: hits on weaker memory": Explorable(
        lambda: bucketed_window(2).before().hits(0, 1, 2),
        {**BUCKETS, "stale_reads": 1, "preemptions": 3},
        {"preemptions": 5},
    ),
    "sliding log: hits": Explorable(
        lambda: sliding_log(2).before().hits(0, 1, 2), {**SECOND, "crashes": 1}, {"crashes": 2}
    ),
    "sliding log: round the ring": Explorable(
        lambda: sliding_log(2).before().hits(0, 1, 0, 1),
        {**SECOND, "clock_moves": 2, "preemptions": 4},
        {"preemptions": None, "crashes": 1},
    ),
    "sliding log: larger costs": Explorable(
        lambda: sliding_log(3).before().hits(0, cost=2).hits(1, cost=2).hits(2),
        {**SECOND, "preemptions": 4, "crashes": 1},
        {"preemptions": 5, "crashes": 0},
    ),
    "sliding log: a hit and a refund": Explorable(
        lambda: sliding_log(2).before().hits(0, 1).add(2, "refund"), {**SECOND, "crashes": 1}, {"crashes": 2}
    ),
    "sliding log: two refunds": Explorable(
        lambda: sliding_log(2).before(2).add(0, "refund").add(1, "refund").hits(2),
        {},
        {"crashes": 1},
    ),
    "sliding log: refunds and larger costs": Explorable(
        lambda: sliding_log(3).before(2).add(0, "refund").hits(1).hits(2, cost=2),
        {**SECOND, "preemptions": 4},
        {"preemptions": 5, "crashes": 1},
    ),
    "sliding log: eviction": Explorable(
        lambda: evictions(sliding_log), {**BEHIND, "preemptions": 3}, {"preemptions": 4, "clock_moves": 0}
    ),
    "sliding log: a clean start after an eviction": Explorable(
        lambda: sliding_log(2, usable=1, on_full="evict", evicts=True).before(2).hits_of_another(0, 1),
        {},
        BEHIND,
    ),
    "sliding log: eviction, killed half-way": Explorable(
        lambda: evictions(sliding_log), {"preemptions": 2, "crashes": 1}, {"preemptions": 3}
    ),
    "bucketed window: two refunds of more than there is": Explorable(
        lambda: bucketed_window(3).before(2).add(0, "refund", 2).add(1, "refund").hits(2), {}, {"crashes": 1}
    ),
    "bucketed window: a clean start after an eviction": Explorable(
        lambda: bucketed_window(2, usable=1, on_full="evict", evicts=True).before(2).hits_of_another(0, 1),
        {"clock_moves": 1, "jumps_ns": [10]},
    ),
    "bucketed window: eviction": Explorable(
        lambda: evictions(bucketed_window, exact=False, exact_finals=False),
        {**BUCKETS, "preemptions": 2},
        {"preemptions": 3, "clock_moves": 1},
    ),
    "bucketed window: eviction between two reads": Explorable(eviction_between_reads, {}, {"crashes": 1}),
    "sliding log: two laps later": Explorable(two_laps, LATER, {"crashes": 1, "clock_moves": 3}),
    "sliding log: two laps within one instant": Explorable(two_laps_at_once, {"crashes": 1}, {"crashes": 2}),
    "sliding log: a helper a lap late": Explorable(
        late_helper, {"clock_moves": 2, "jumps_ns": [NS + 10], "preemptions": 3}, {"preemptions": 4}
    ),
    "sliding log: a cancellation that is stopped for a window": Explorable(
        lambda: sliding_log(1, usable=1).reserves(0, 0, cancels=True).hits(1, 1),
        {"clock_moves": 1, "jumps_ns": [NS + 10], "preemptions": 3},
        {"preemptions": None, "crashes": 1},
    ),
    "sliding log: two cancellations, half a window apart": Explorable(
        lambda: (
            sliding_log(2, usable=1, at_ns=ODD_NS, exact=False)
            .reserves(0, 0, cancels=True)
            .reserves(1, 0, cancels=True)
            .hits(2, 2)
        ),
        {"clock_moves": 2, "jumps_ns": [NS // 2 + 10], "preemptions": 2},
        {"clock_moves": 3},
    ),
    "sliding log: a cancellation once the cell is another key's": Explorable(
        lambda: sliding_log(1, usable=1, crowded=True).reserves(0, 0, cancels=True).hits_of_another(1, 1).hits(1),
        {"clock_moves": 2, "jumps_ns": [NS + 10], "preemptions": 3},
        {"crashes": 1},
    ),
    "sliding log: a refund behind a refund and a hit": Explorable(
        lambda: sliding_log(2, usable=1).before().hits(1).add(0, "refund").add(1, "refund").hits(1).hits(1, cost=2),
        {"clock_moves": 1, "jumps_ns": [10], "preemptions": 3},
        {"preemptions": None},
    ),
    "sliding log: a refund of more than there is": Explorable(
        lambda: sliding_log(3, usable=1, exact=False).before(2).add(0, "refund", 3).hits(1, cost=2).hits(1, 1),
        {"preemptions": 3},
        {"preemptions": None},
    ),
    "sliding log: a reset": Explorable(
        lambda: sliding_log(2, exact=False).before(2).add(0, "reset").hits(1, 1).hits(2),
        {**SECOND, "preemptions": 3},
        {"crashes": 1},
    ),
    "sliding log: a reset that is stopped for a window": Explorable(
        lambda: sliding_log(1, usable=1).before().add(0, "reset").hits(1, 1), WINDOW_LATER, {"crashes": 1}
    ),
    "sliding log: a refund that is stopped for a window": Explorable(
        lambda: sliding_log(3, usable=1, exact=False).before(2).add(0, "refund", 2).hits(1, cost=3).hits(1),
        {**WINDOW_LATER, "preemptions": 2},
        {"preemptions": None},
    ),
    "bucketed window: a reset": Explorable(
        lambda: bucketed_window(2, exact=False).before(2).add(0, "reset").hits(1, 1).hits(2),
        {**BUCKETS, "preemptions": 3},
        {"crashes": 1},
    ),
    "sliding log: decisions after other requests": Explorable(
        lambda: answers_of_a_log().before().hits(0, cost=0).hits(0).hits(1, 1), WINDOW_LATER, {"clock_moves": 2}
    ),
    "sliding log: a clear of a later claim": Explorable(clear_of_a_later_claim, {"preemptions": 3}),
    "sliding log: a clear within a quantum": Explorable(
        clear_within_a_quantum, {**SECOND, "preemptions": 2}, {"preemptions": 4}
    ),
    "sliding log: a helper's date ahead of the clock": Explorable(
        helped_ahead_of_the_clock, {"clock_moves": 1, "jumps_ns": [NS - 1]}, {"crashes": 1}
    ),
    "sliding log: eviction while entries are written": Explorable(
        eviction_of_what_is_being_written, BEHIND, {"crashes": 1}
    ),
    "sliding log: a clear stopped half-way for a window": Explorable(
        clear_half_way, {**BEHIND, "preemptions": 2}, {"preemptions": 3}
    ),
    "sliding log: a refund behind a hit and a refund": Explorable(
        lambda: sliding_log(2, usable=1).before().add(0, "refund").hits(1).add(1, "refund"), {}, {"crashes": 1}
    ),
    "sliding log: two laps of one key": Explorable(two_laps_of_one_key, {"preemptions": 3}, {"preemptions": 5}),
    "sliding log: eviction ahead of the clock": Explorable(eviction_ahead_of_the_clock, {}, {"crashes": 1}),
    "sliding log: a refund while the window moves on": Explorable(
        lambda: sliding_log(2, borrows=True).before().hits(0).add(1, "refund").hits(2, cost=2).hits(1),
        {"clock_moves": 3, "jumps_ns": [NS // 2 + 10], "preemptions": 3},
        {"preemptions": 4},
    ),
    "sliding log: hits on weaker memory": Explorable(
        lambda: sliding_log(2).before().hits(0, 1, 2),
        {**SECOND, "stale_reads": 1, "preemptions": 3},
        {"stale_reads": 2, "preemptions": 4},
    ),
}

# Several limits at once, requests that are sent again, and permits that are held.

TOKENS = (lambda s: forebay.TokenBucket(s, "tokens", "1/second", burst=2), Bucket(1, NS, 2))
FEWER = (lambda s: forebay.TokenBucket(s, "fewer", "1/second", burst=1), Bucket(1, NS, 1))
WINDOW = (lambda s: forebay.FixedWindow(s, "window", "2/second"), ClockWindow(2, NS))
LOG = (lambda s: forebay.SlidingLog(s, "log", "2/second", keys=1), Log(2, NS, readings_differ=True))


def one_request() -> Scene:
    return SceneOfOneRequest(lambda s: forebay.TokenBucket(s, "limit", "1/hour", burst=3), Bucket(1, 3600 * NS, 3))


def request_to_two() -> Scene:
    limits = [
        (lambda s, name=name: forebay.TokenBucket(s, name, "1/hour", burst=3), Bucket(1, 3600 * NS, 3))
        for name in ("one", "another")
    ]
    return SceneOfOneRequestToSeveral(limits)


def request_without_room() -> Scene:
    return SceneOfRoomLater(lambda s: forebay.TokenBucket(s, "limit", "1/hour", burst=1), Bucket(1, 3600 * NS, 1))


SCENES |= {
    "two limits at once": Explorable(
        lambda: SceneOfSeveral([TOKENS, FEWER]).hits(0, 1), {"preemptions": 4}, {"preemptions": None}
    ),
    "two limits at once, killed half-way": Explorable(
        lambda: SceneOfSeveral([TOKENS, FEWER]).hits(0, 1),
        {"preemptions": 3, "crashes": 1},
        {"preemptions": 5},
    ),
    "two limits at once, one a log": Explorable(
        lambda: SceneOfSeveral([FEWER, LOG]).hits(0, 1), {**WINDOW_LATER, "preemptions": 3}, {"crashes": 1}
    ),
    "two limits at once, one a window": Explorable(
        lambda: SceneOfSeveral([TOKENS, WINDOW], at_ns=EDGE_NS).hits(0, 1, 2),
        {**OVER_THE_EDGE, "preemptions": 2},
    ),
    "one request sent twice": Explorable(
        lambda: one_request().hits(0, 1), {"preemptions": 4, "crashes": 1}, {"preemptions": None}
    ),
    "one request to two limits, sent twice": Explorable(
        lambda: request_to_two().hits(0, 1), {"preemptions": 3, "crashes": 1}, {"preemptions": 4}
    ),
    "one request sent twice, let in uncharged": Explorable(
        request_without_room, {"preemptions": 3}, {"preemptions": 4}
    ),
    "slots: one for two": Explorable(lambda: SceneOfSlots(1, 2).holds_once(0, 1, 0), {"crashes": 1}, {"crashes": 2}),
    "slots: two for three": Explorable(
        lambda: SceneOfSlots(2, 3).holds_once(0, 1, 2), {"crashes": 1, "preemptions": 3}, {"preemptions": 5}
    ),
    "slots: two at once": Explorable(
        lambda: SceneOfSlots(2, 2).holds_once(0, cost=2).holds_once(1).holds_once(1, cost=2),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": 5},
    ),
    "slots: leases that end": Explorable(
        lambda: SceneOfSlots(1, 2).holds_once(0, 1, 0),
        LATER,
        {"crashes": 1},
    ),
    "slots: leases that begin anew": Explorable(
        lambda: SceneOfSlots(1, 2).holds_once(0, renews=True).holds_once(1),
        {**LATER, "crashes": 1},
        {"clock_moves": 3},
    ),
    "slots on weaker memory": Explorable(
        lambda: SceneOfSlots(1, 2).holds_once(0, 1), {"stale_reads": 2}, {"crashes": 1}
    ),
}

# Permits of one request that several workers send.

# After one move a lease lasts, after two it has ended.
PART_OF_A_LEASE = {"clock_moves": 2, "jumps_ns": [NS * 6 // 10]}

SCENES |= {
    "permits by id: two send it, for one permit": Explorable(
        lambda: SceneOfRepeats(1, 2).sends(0, 1, releases=True), {"crashes": 1}, {"crashes": 2}
    ),
    "permits by id: two send it, for two permits": Explorable(
        lambda: SceneOfRepeats(2, 2).sends(0, 1, releases=True),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": None},
    ),
    "permits by id: two send it at a cost of two": Explorable(
        lambda: SceneOfRepeats(2, 2, cost=2).sends(0, 1, releases=True),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": 4},
    ),
    "permits by id: two take over": Explorable(
        lambda: SceneOfRepeats(2, 2).sent_before().sends(0, 1), {"crashes": 1}, {"crashes": 2}
    ),
    "permits by id: one takes over, one renews": Explorable(
        lambda: SceneOfRepeats(2, 2).sends(0, renews=True).sends(1),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": 5},
    ),
    "permits by id: one takes over, one releases, one acquires": Explorable(
        lambda: SceneOfRepeats(1, 3).sends(0, releases=True).sends(1).tries(2),
        {"crashes": 1, "preemptions": 2},
        {"preemptions": 3},
    ),
    "permits by id: one takes over beside another request": Explorable(
        lambda: SceneOfRepeats(2, 2).sent_before().sends(0, releases=True).holds_once(1),
        {"crashes": 1},
        {"crashes": 2},
    ),
    "permits by id: one renews, one resets": Explorable(
        lambda: SceneOfRepeats(2, 2).sends(0, renews=True, releases=True).resets(1),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": 5},
    ),
    "permits by id: two send it, one resets": Explorable(
        lambda: SceneOfRepeats(1, 3).sends(0, releases=True).sends(1).resets(2),
        {"crashes": 1, "preemptions": 2},
        {"preemptions": 3},
    ),
    "permits by id: one takes over, one refunds": Explorable(
        lambda: SceneOfRepeats(1, 2).sent_before().sends(0, releases=True).refunds(1),
        {"crashes": 1, "preemptions": 4},
        {"preemptions": 5},
    ),
    "permits by id: two refund, another request comes": Explorable(
        lambda: SceneOfRepeats(1, 3).sent_before().refunds(0, 1).tries(2),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": 4},
    ),
    "permits by id: one renews, one refunds": Explorable(
        lambda: SceneOfRepeats(2, 2).sends(0, renews=True).refunds(1),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": 5},
    ),
    "permits by id: one refunds permits of two slots": Explorable(
        lambda: SceneOfRepeats(2, 2, cost=2).sends(0, releases=True).refunds(1),
        {"crashes": 1, "preemptions": 3},
        {"preemptions": 4},
    ),
    "permits by id: their lease ends": Explorable(
        lambda: SceneOfRepeats(1, 2).sends(0, releases=True).sends(1),
        {**PART_OF_A_LEASE, "preemptions": 3},
        {"crashes": 1, "preemptions": 4},
    ),
    "permits by id: their lease ends, another request comes": Explorable(
        lambda: SceneOfRepeats(1, 3).sent_before().sends(0).tries(1),
        {**PART_OF_A_LEASE, "preemptions": 3},
        {"crashes": 1, "preemptions": 4},
    ),
    "permits by id: two send it, on weaker memory": Explorable(
        lambda: SceneOfRepeats(2, 2).sends(0, 1, releases=True), {"stale_reads": 2, "preemptions": 3}, {"crashes": 1}
    ),
}

# Other ways to call a limiter.


def booking() -> Scene:
    """One that cancels, one that books behind it, one that won't wait."""
    return token_bucket(1).before().reserves(0, 3 * NS, cancels=True).reserves(1, 3 * NS).reserves(2, NS // 2)


def batches() -> Scene:
    scene = token_bucket(1, usable=3)
    return scene.batch(0, scene.key, scene.other, scene.key).hits(1).hits_of_another(1)


def no_room_for_all() -> Scene:
    scene = token_bucket(1, usable=1, on_full="allow", crowded=True)
    return scene.hits(0).hits_of_another(1, 2).add(0, "refund")


SCENES |= {
    "a look at it": Explorable(
        lambda: token_bucket(2, usable=2).before().hits(0).add(1, "peek", 2).add(1, "peek").add(2, "refund"),
        {**SECOND, "crashes": 1},
        {"crashes": 2},
    ),
    "a look at a bucketed window": Explorable(
        lambda: bucketed_window(2).before().hits(0).add(1, "peek").add(1, "peek", 2), {**BUCKETS, "crashes": 1}
    ),
    "a look at a sliding log": Explorable(
        lambda: sliding_log(2).before().hits(0).add(1, "peek").add(1, "peek", 2),
        {**SECOND, "crashes": 1},
        {"clock_moves": 2},
    ),
    "booking ahead": Explorable(booking, SECOND, {"crashes": 1}),
    "a booking that is partly refilled is cancelled": Explorable(
        lambda: token_bucket(2).reserves(0, 0, cancels=True).hits(1, 1, 1),
        {"clock_moves": 2, "jumps_ns": [NS * 6 // 10, NS * 4 // 10]},
        {"crashes": 1},
    ),
    "booking ahead in intervals": Explorable(
        lambda: interval_bucket(2).before().reserves(0, 3 * NS).hits(1).reserves(2, NS // 2),
        {**OVER_THE_EDGE, "crashes": 1},
        {"crashes": 2},
    ),
    "a batch": Explorable(batches, {"preemptions": 4}, {"preemptions": None, "crashes": 1}),
    "a batch over a boundary": Explorable(
        lambda: (scene := fixed_window(2).before()).batch(0, scene.key, scene.key).hits(1),
        {**OVER_THE_EDGE, "crashes": 1},
        {"crashes": 2},
    ),
    "no room, and allowed": Explorable(no_room_for_all, {"preemptions": 4, **SECOND}, {"preemptions": 5, "crashes": 1}),
}

# A denied request and a peek write nothing that is shared.

STILL = {"clock_moves": 1, "jumps_ns": [1], "only_reads": True}


def denials(make: Callable[..., Scene]) -> Callable[[], Scene]:
    return lambda: make(2).before(2).hits(0, 1).hits(0, cost=2).add(1, "peek")


def away_from_home() -> Scene:
    """Its home line was full when the key came."""
    scene = token_bucket(1, usable=5)
    for cell in range(4):
        scene.program.foreign(scene.limiter, cell, 10**18)
    return scene.before().hits(0, 1)


def no_room() -> Scene:
    return token_bucket(1, usable=0, crowded=True).hits(0, 1)


DENIALS = {name: Explorable(denials(make), STILL) for name, (make, _) in ONE_CELL.items()} | {
    "minimum interval": Explorable(lambda: min_interval().before().hits(0, 1), STILL),
    "credits": Explorable(lambda: prepaid().topped_up(1).hits(0, 1, cost=2).add(1, "peek"), STILL),
    "credits of a key without any": Explorable(lambda: prepaid(usable=1).hits(0, 1), STILL),
    "bucketed window": Explorable(denials(bucketed_window), STILL),
    "sliding log": Explorable(denials(sliding_log), STILL),
    "slots": Explorable(lambda: SceneOfSlots(2, 2).before(2).tries(0, 1, 0), {"only_reads": True}),
    "several limits": Explorable(lambda: SceneOfSeveral([TOKENS, FEWER]).before().hits(0, 1), STILL),
    "a request with an id": Explorable(lambda: token_bucket(1).before().add(0, "hit_once").add(1, "hit_once"), STILL),
    "a batch": Explorable(lambda: (scene := token_bucket(1).before()).batch(0, scene.key, scene.key).hits(1), STILL),
    "booking ahead": Explorable(lambda: token_bucket(1).before().reserves(0, 0).reserves(1, NS // 2), STILL),
    "away from home": Explorable(away_from_home, STILL),
    "no room": Explorable(no_room, STILL),
    "looks": Explorable(lambda: token_bucket(2).before().add(0, "peek").add(1, "peek", 2), STILL),
}
SCENES |= {f"a denial writes nothing: {name}": explorable for name, explorable in DENIALS.items()}

"""The programs that are explored: for each its scene, the bounds of a quick proof, and what a full one adds to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oracle import Bucket
from oracle_counts import BucketedWindow as Buckets
from oracle_counts import ClockWindow, FirstWindow, IntervalBucket, Log
from oracle_counts import SlidingWindow as Sliding
from programs import NS, Scene, SceneOfOneRequest, SceneOfSeveral, SceneOfSlots

import penstock

# So near the end of a second that a jump of ten nanoseconds crosses it.
EDGE_NS = 1_000_000 * NS - 5


@dataclass(frozen=True)
class Explorable:
    make: Callable[[], Scene | SceneOfSlots]
    quick: dict[str, Any]
    full: dict[str, Any] = field(default_factory=dict)


def token_bucket(burst: int, **options: Any) -> Scene:
    return Scene(lambda s: penstock.TokenBucket(s, "limit", "1/second", burst=burst), Bucket(1, NS, burst), **options)


def interval_bucket(burst: int, **options: Any) -> Scene:
    return Scene(
        lambda s: penstock.TokenBucket(s, "limit", "1/second", burst=burst, refill="interval"),
        IntervalBucket(1, NS, burst),
        at_ns=EDGE_NS,
        **options,
    )


def leaky_bucket(capacity: int, **options: Any) -> Scene:
    return Scene(lambda s: penstock.LeakyBucket(s, "limit", "1/second", capacity), Bucket(1, NS, capacity), **options)


def min_interval(**options: Any) -> Scene:
    return Scene(lambda s: penstock.MinInterval(s, "limit", "1 second"), Bucket(1, NS, 1), **options)


def fixed_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: penstock.FixedWindow(s, "limit", f"{limit}/second"), ClockWindow(limit, NS), at_ns=EDGE_NS, **options
    )


def first_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: penstock.FixedWindow(s, "limit", f"{limit}/second", align="first"), FirstWindow(limit, NS), **options
    )


def sliding_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: penstock.SlidingWindow(s, "limit", f"{limit}/second"), Sliding(limit, NS), at_ns=EDGE_NS, **options
    )


def bucketed_window(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: penstock.BucketedWindow(s, "limit", f"{limit}/second", buckets=2, keys=1),
        Buckets(limit, NS, 2),
        at_ns=EDGE_NS,
        borrows=True,
        **{"usable": 2, **options},
    )


def sliding_log(limit: int, **options: Any) -> Scene:
    return Scene(
        lambda s: penstock.SlidingLog(s, "limit", f"{limit}/second", keys=1),
        Log(limit, NS),
        # An entry that is written by another process than its claimant may be dated later: less is allowed then.
        **{"usable": 2, "exact": False, "exact_finals": False, **options},
    )


SECOND = {"clock_moves": 1, "jumps_ns": [NS]}
OVER_THE_EDGE = {"clock_moves": 2, "jumps_ns": [10]}
BUCKETS = {"clock_moves": 2, "jumps_ns": [10, NS // 2]}
LATER = {"clock_moves": 2, "jumps_ns": [NS]}

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
    """Two keys and two cells: there is room for both, whoever comes first."""
    scene = token_bucket(1, usable=2, on_full="evict")
    return scene.before(key=scene.other).hits(0, 1).hits(2, key=scene.other)


def evictions(make: Callable[..., Scene]) -> Scene:
    """Of words: one cell, in which a key at its limit gives way to another one that uses all of its own."""
    scene = make(2, usable=1, on_full="evict", evicts=True, crowded=True, exact=False, exact_finals=False)
    return scene.before(2).hits(0, key=scene.other).hits(1, 1, key=scene.other).hits(2, cost=2, key=scene.other)


def removal() -> Scene:
    return token_bucket(2, usable=2).before().hits(0, 1).add(2, "reset")


INSERTION = {
    "insertion by two": Explorable(lambda: token_bucket(1).hits(0, 1), {"crashes": 1}, {"crashes": 2}),
    "insertion by two on weaker memory": Explorable(
        lambda: token_bucket(1, usable=3).hits(0, 1), {"crashes": 1, "stale_reads": 2}, {"stale_reads": 4}
    ),
    "insertion by three": Explorable(
        lambda: token_bucket(2, usable=3).hits(0, 1, 2), {"preemptions": 4}, {"preemptions": None, "crashes": 1}
    ),
    "insertion beside another key": Explorable(
        insertion_beside_another, {"preemptions": 4}, {"preemptions": 5, "crashes": 1}
    ),
    "insertion beside another key on weaker memory": Explorable(
        insertion_beside_another, {"preemptions": 3, "stale_reads": 2}, {"preemptions": 4, "stale_reads": 3}
    ),
    "reuse of an expired cell": Explorable(reuse, {**LATER, "preemptions": 4}, {"preemptions": None, "crashes": 1}),
    "reuse by the same key": Explorable(reuse_by_itself, {**LATER, "crashes": 1}, {"crashes": 2}),
    "no eviction by itself": Explorable(
        lambda: token_bucket(1, usable=1, on_full="evict").hits(0, 1), {"crashes": 1}, {"crashes": 2}
    ),
    "eviction": Explorable(eviction, {"preemptions": 4}, {"preemptions": None, "crashes": 1}),
    "one cell for two": Explorable(lambda: token_bucket(2, usable=1).hits(0, 1), {"crashes": 1}, {"crashes": 2}),
    "no eviction of a neighbour": Explorable(no_eviction_of_a_neighbour, {"preemptions": 3}, {"preemptions": 5}),
    "removal": Explorable(removal, {"preemptions": 4, "crashes": 1}, {"preemptions": 6}),
}
SCENES |= INSERTION

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
    "bucketed window: hits on weaker memory": Explorable(
        lambda: bucketed_window(2).before().hits(0, 1, 2),
        {**BUCKETS, "stale_reads": 1, "preemptions": 3},
        {"stale_reads": 2, "preemptions": 4},
    ),
    "sliding log: hits": Explorable(
        lambda: sliding_log(2).before().hits(0, 1, 2), {**SECOND, "crashes": 1}, {"crashes": 2}
    ),
    "sliding log: hits, none killed": Explorable(
        lambda: sliding_log(2, exact=True).before().hits(0, 1, 2), SECOND, {"clock_moves": 2}
    ),
    "sliding log: round the ring": Explorable(
        lambda: sliding_log(2).before().hits(0, 1, 0, 1),
        {**SECOND, "clock_moves": 2, "preemptions": 4},
        {"preemptions": None, "crashes": 1},
    ),
    "sliding log: larger costs": Explorable(
        lambda: sliding_log(3).before().hits(0, cost=2).hits(1, cost=2).hits(2),
        {**SECOND, "preemptions": 4, "crashes": 1},
        {"preemptions": 5},
    ),
    "sliding log: a hit and a refund": Explorable(
        lambda: sliding_log(2).before().hits(0, 1).add(2, "refund"), {**SECOND, "crashes": 1}, {"crashes": 2}
    ),
    "sliding log: a hit and a refund, none killed": Explorable(
        lambda: sliding_log(2, exact=True, exact_finals=True).before().hits(0, 1).add(2, "refund"), SECOND
    ),
    "sliding log: two refunds": Explorable(
        lambda: sliding_log(2, exact=True, exact_finals=True).before(2).add(0, "refund").add(1, "refund").hits(2),
        {"preemptions": 4},
        {"preemptions": 6},
    ),
    "sliding log: refunds and larger costs": Explorable(
        lambda: sliding_log(3).before(2).add(0, "refund").hits(1).hits(2, cost=2),
        {**SECOND, "preemptions": 4},
        {"preemptions": 5, "crashes": 1},
    ),
    "sliding log: eviction": Explorable(
        lambda: evictions(sliding_log), {**SECOND, "preemptions": 3}, {"preemptions": 4}
    ),
    "sliding log: a clean start after an eviction": Explorable(
        lambda: sliding_log(2, usable=1, on_full="evict", evicts=True, exact=True).before(2).hits_of_another(0, 1),
        {},
        SECOND,
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
        lambda: evictions(bucketed_window), {**BUCKETS, "preemptions": 2}, {"preemptions": 3, "crashes": 1}
    ),
    "sliding log: hits on weaker memory": Explorable(
        lambda: sliding_log(2).before().hits(0, 1, 2),
        {**SECOND, "stale_reads": 1, "preemptions": 3},
        {"stale_reads": 2, "preemptions": 4},
    ),
}

# Several limits at once, requests that are sent again, and permits that are held.

TOKENS = (lambda s: penstock.TokenBucket(s, "tokens", "1/second", burst=2), Bucket(1, NS, 2))
FEWER = (lambda s: penstock.TokenBucket(s, "fewer", "1/second", burst=1), Bucket(1, NS, 1))
WINDOW = (lambda s: penstock.FixedWindow(s, "window", "2/second"), ClockWindow(2, NS))


def one_request() -> Scene:
    return SceneOfOneRequest(lambda s: penstock.TokenBucket(s, "limit", "1/hour", burst=3), Bucket(1, 3600 * NS, 3))


SCENES |= {
    "two limits at once": Explorable(
        lambda: SceneOfSeveral([TOKENS, FEWER]).hits(0, 1), {"preemptions": 4}, {"preemptions": 6}
    ),
    "two limits at once, killed half-way": Explorable(
        lambda: SceneOfSeveral([TOKENS, FEWER], exact_finals=False).hits(0, 1),
        {"preemptions": 3, "crashes": 1},
        {"preemptions": 5},
    ),
    "two limits at once, one a window": Explorable(
        lambda: SceneOfSeveral([TOKENS, WINDOW], at_ns=EDGE_NS, exact_finals=False).hits(0, 1, 2),
        {**OVER_THE_EDGE, "preemptions": 2},
        {"preemptions": 3},
    ),
    "one request sent twice": Explorable(
        lambda: one_request().hits(0, 1), {"preemptions": 4, "crashes": 1}, {"preemptions": 6}
    ),
    "slots: one for two": Explorable(
        lambda: SceneOfSlots(1, 2).holds_once(0, 1, 0), {"crashes": 1, "preemptions": 4}, {"preemptions": None}
    ),
    "slots: two for three": Explorable(
        lambda: SceneOfSlots(2, 3).holds_once(0, 1, 2), {"crashes": 1, "preemptions": 3}, {"preemptions": 5}
    ),
    "slots: leases that end": Explorable(
        lambda: SceneOfSlots(1, 2).holds_once(0, 1, 0),
        {"preemptions": 4, "clock_moves": 2, "jumps_ns": [NS]},
        {"crashes": 1},
    ),
    "slots on weaker memory": Explorable(
        lambda: SceneOfSlots(1, 2).holds_once(0, 1), {"preemptions": 4, "stale_reads": 2}, {"crashes": 1}
    ),
}
